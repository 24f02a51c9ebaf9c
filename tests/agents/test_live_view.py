import io
from dataclasses import replace

import pytest

from wattgym.agents.deployment import JobTick, LiveRun, Tick
from wattgym.agents.live_view import live_view
from wattgym.envs.config import PowerShapingConfig
from wattgym.hw.telemetry import GuardState, GuardTelemetry

JOB = JobTick(
    limit_w=490.0, sensor_w=480.0, meter_w=481.0, throughput=0.9, phase="compute", state="running", steps=12,
    samples=48, tokens=9000, loss=5.1, loss_mean=5.25, warning="",
)  # fmt: skip
TICK = Tick(
    tick=3, t_s=6.0, signal=0.1, target_w=950.0, power_w=962.4, sensor_w=960.0, throughput=0.9, tokens_per_s=812.3,
    reward=0.1, decision_ms=0.2, lateness_ms=1.4, missed=1, age_s=0.1, decisions=0, fallback="telemetry stale",
    fallbacks=2, guard_state="armed", guard_events=4, failed_commands=0, nrmse=0.042, pjm_composite=None,
    jobs=(JOB, replace(JOB, loss_mean=None, warning="disk full")),
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_one_plain_line_a_period():
    output = io.StringIO()
    with live_view("PI", 30, output) as show:
        show(TICK)
        show(replace(TICK, tick=4, fallback="", pjm_composite=0.914))
    first, second = output.getvalue().splitlines()
    assert first == (
        "3/30 | target 950 W | power 962 W | nRMSE 0.042 | 812 tokens/s | throughput 0.90 | loss 5.250 | "
        "guard armed, 4 events | fallbacks 2 (telemetry stale) | late 1.4 ms, 1 missed"
    )
    assert "PJM 0.914, nRMSE 0.042" in second
    assert "fallbacks 2 |" in second


def test_a_terminal_gets_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    output = Terminal()
    with live_view("PI on 2 jobs", 30, output) as show:
        show(TICK)
    text = output.getvalue()
    for part in ("PI on 2 jobs", "3 of 30", "962 W (+12 W)", "telemetry stale", "disk full", "loss none yet"):
        assert part in text


def test_rows_hold_every_number_of_tick_and_jobs():
    row = TICK.row()
    assert row["power_w"] == 962.4
    assert (row["job0_loss_mean"], row["job1_warning"]) == (5.25, "disk full")
    assert len(row) == 21 + 2 * 12
    # Of other knobs it holds those that are enabled, in their own units.
    shaped = replace(TICK, jobs=(replace(JOB, knobs={"micro_batch": 4.0, "duty_cycle": 0.5}),)).row()
    assert (shaped["job0_micro_batch"], shaped["job0_duty_cycle"]) == (4.0, 0.5)
    assert len(shaped) == 21 + 12 + 2


@pytest.mark.parametrize(("state", "lost"), [("frozen", "somebody else set 600000 mW"), ("armed", "")])
def test_control_is_lost_where_a_guard_had_frozen_before_it_was_closed(state, lost):
    class Plant:
        guards = (
            GuardTelemetry(state=GuardState.CLOSED),
            GuardTelemetry(state=GuardState.CLOSED, why="somebody else set 600000 mW"),
        )

    run = LiveRun(None, PowerShapingConfig(), Plant(), ticks=[replace(TICK, guard_state=state)])
    assert run.control_lost == lost

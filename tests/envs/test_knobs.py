"""Knobs beside the power limit: what they do in the emulator, how actions set them, what rules hold them back."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.envs.config import KnobRules, PowerShapingConfig
from wattgym.envs.emulator.batch_form import fitted_form, formed, power_form, spaced_divisors, speed_form
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.knob_actions import KnobSettings, reachable_w
from wattgym.envs.knobs import KNOBS, Command, active_speed, nearest
from wattgym.envs.plant import Phase
from wattgym.envs.power_shaping import PowerShapingEnv
from wattgym.envs.shaping import PowerShaping
from wattgym.envs.vector import PowerShapingVecEnv
from wattgym.errors import UserError
from wattgym.traces import load_table

BESIDE = KNOBS[1:]
OPEN = {"floor_fraction": 0.0, "raise_fraction_per_s": 50.0, "dead_band_fraction": 0.0, "dead_band_w": 0.0}
CERTAIN = {"command_loss": 0.0, "control_delay_periods": (0, 0), "randomise": 0.0}
FIXED = {"comm_share": (0.1, 0.1), "straggler_share": (0.03, 0.03)}
FREE = {"micro_batch_switch_s": 0.0, "active_gpus_switch_s": 0.0, "local_steps_switch_s": 0.0}
SURFACE = "a40/bert_base_sentiment/b128"


def build(*, knobs=KNOBS, physics=None, **site):
    """One steady job of a measured surface on eight GPUs, every knob enabled, nothing random."""
    return PowerShapingConfig.model_validate(
        {
            "site": {
                "jobs": 1, "surfaces": (SURFACE,), "gpus_per_job": (8,), **CERTAIN, **site,
                "knobs": {**FIXED, **FREE, **(physics or {})},
            },
            "rules": OPEN, "action": {"knobs": knobs},
        }
    )  # fmt: skip


def started(config, batch=1, seed=0):
    emulator = Emulator(config)
    emulator.reset([np.random.default_rng(seed + i) for i in range(batch)])
    return emulator


def whole(emulator, **setting):
    """A command for all jobs; what is left out is neutral."""
    spec = emulator.spec
    limit = setting.pop("limit_w", None)
    limit_w = spec.max_limit_w if limit is None else np.full(spec.n_gpus.shape, float(limit))
    return Command(limit_w, **{name: np.full(spec.n_gpus.shape, value) for name, value in setting.items()})


def settled(emulator, command, *, periods=60):
    """Median power, W, and throughput of each job over the periods in which it computed from end to end."""
    power, speed = [], []
    before = np.zeros(emulator.spec.n_gpus.shape, dtype=bool)
    for k in range(periods):
        emulator.apply(command)
        telemetry = emulator.advance()
        now = telemetry.phase == Phase.COMPUTE
        if k > 5:
            power.append(np.where(before & now, telemetry.meter_w, np.nan))
            speed.append(np.where(before & now, telemetry.throughput, np.nan))
        before = now.copy()
    return np.nanmedian(power, axis=0), np.nanmedian(speed, axis=0)


# What the knobs do


@pytest.mark.parametrize(
    "action", [{"kind": "absolute"}, {"kind": "residual"}, {"kind": "advice", "loop": {"split": "optimal"}}], ids=str
)
def test_neutral_knobs_change_nothing_bit_for_bit(action):
    base = {"site": {"jobs": 3}, "action": action}
    plain = PowerShapingVecEnv(base, num_envs=5)
    shaped = PowerShapingVecEnv({**base, "action": {**action, "knobs": KNOBS}}, num_envs=5)
    plain.seed(4)
    shaped.seed(4)
    first = plain.layout.size
    np.testing.assert_array_equal(plain.reset(), shaped.reset()[:, :first])
    rng = np.random.default_rng(0)
    for _ in range(60):
        limits = rng.uniform(-1.0, 1.0, (5, 3)).astype(np.float32)
        mine = plain.step(limits)
        theirs = shaped.step(np.concatenate([limits, np.ones((5, 12), np.float32)], axis=1))
        np.testing.assert_array_equal(mine[0], theirs[0][:, :first])
        np.testing.assert_array_equal(mine[1], theirs[1])
        np.testing.assert_array_equal(plain.outcome.power_w, shaped.outcome.power_w)


@pytest.mark.parametrize("micro_batch", [8, 32, 64])
@pytest.mark.parametrize("limit_w", [150, 300])
def test_a_measured_micro_batch_draws_and_trains_as_it_was_measured(micro_batch, limit_w):
    table = load_table("gpu_power/zeus_power_limit_batch_size")
    job = table[(table["gpu"] == "A40") & (table["dataset"] == "sentiment140")].set_index(
        ["batch_size", "power_limit_w"]
    )
    emulator = started(build())
    power, speed = settled(emulator, whole(emulator, limit_w=limit_w, micro_batch=micro_batch))
    row, full = job.loc[(micro_batch, limit_w)], job.loc[(128, 300)]
    # 33 points of the limit range lie between, and the reading is a median with 2 % of jitter.
    assert speed[0, 0] == pytest.approx(full["time_per_epoch_s"] / row["time_per_epoch_s"], rel=0.01)
    assert power[0, 0] == pytest.approx(8 * row["average_power_w"], rel=0.03)


def test_active_gpus_duty_and_local_steps_by_hand():
    emulator = started(build())
    full_w, full = settled(emulator, whole(emulator))
    idle_w = emulator.spec.knobs.idle_w[0, 0]
    assert idle_w == 8 * 60.0  # the preset's, for eight A40
    half_w, half = settled(emulator, whole(emulator, duty=0.5))
    assert half_w[0, 0] == pytest.approx((full_w[0, 0] + idle_w) / 2, rel=0.02)
    assert half[0, 0] == pytest.approx(full[0, 0] / 2, rel=1e-9)
    four_w, four = settled(emulator, whole(emulator, active_gpus=4))
    assert four_w[0, 0] == pytest.approx((full_w[0, 0] + idle_w) / 2, rel=0.02)
    # Computing 0.87 x 2, ring (3/4)(8/7) = 6/7 of the exchange 0.1 and of twice the wait 0.03: 1.74 + 0.16 x 6/7.
    assert four[0, 0] == pytest.approx(full[0, 0] / (1.74 + 0.16 * 6 / 7), rel=1e-9)
    _, lone = settled(emulator, whole(emulator, active_gpus=1))
    assert lone[0, 0] == pytest.approx(full[0, 0] / (0.87 * 8), rel=1e-9)  # nobody to talk to or to wait for
    _, local = settled(emulator, whole(emulator, local_steps=4))
    assert local[0, 0] == pytest.approx(full[0, 0] / (0.87 + 0.13 / 4), rel=1e-9)
    paused_w, paused = settled(emulator, whole(emulator, duty=0.0))
    assert (paused_w[0, 0], paused[0, 0]) == (pytest.approx(idle_w), 0.0)


@given(st.integers(1, 64), st.integers(1, 32), st.floats(0.0, 0.25), st.floats(0.0, 0.2))
def test_fewer_ranks_are_slower_but_each_of_them_faster(n, steps, comm, straggler):
    active = np.arange(1, n + 1)
    speed = active_speed(n, active, steps, comm, straggler)
    assert (np.diff(speed) > 0).all()
    assert (np.diff(speed / active) <= 1e-12).all()
    assert active_speed(n, n, 1, comm, straggler) == 1.0
    assert active_speed(n, n, steps, comm, straggler) >= 1.0


def test_the_assumed_form_lies_within_what_was_measured_of_language_models():
    table = load_table("gpu_power/zeus_power_limit_batch_size")
    job = table[table["dataset"] == "sentiment140"]
    job = job[job["power_limit_w"] == job.groupby("gpu")["power_limit_w"].transform("max")]
    for share in (1 / 2, 1 / 4, 1 / 8):
        measured = []
        for _, own in job.groupby("gpu"):
            own = own.set_index("batch_size")["time_per_epoch_s"]
            measured.append(own[own.index.max()] / own[share * own.index.max()])
        assert min(measured) - 0.02 <= speed_form(np.array(share)) <= max(measured) + 0.02
    u = np.linspace(0.01, 1.0, 50)
    assert (np.diff(speed_form(u)) > 0).all()
    assert (np.diff(power_form(u)) > 0).all()
    assert (speed_form(u)[-1], power_form(u)[-1]) == (1.0, 1.0)
    assert all(value > 0 for value in fitted_form())


def test_a_formed_job_at_its_largest_micro_batch_is_the_job_itself():
    limit, power, speed = np.array([100.0, 200.0, 300.0]), np.array([100.0, 190.0, 250.0]), np.array([0.5, 0.9, 1.0])
    np.testing.assert_array_equal(formed(1.0, 60.0, limit, power, speed), [power, speed])
    small_w, small = formed(1 / 16, 60.0, limit, power, speed)
    asked = 60.0 + 190.0 * float(power_form(np.array(1 / 16)))
    assert small_w[-1] == pytest.approx(asked)
    # A limit of 200 W presses this job as one of 200 x 250 / asked presses the whole one.
    pressed = np.interp(200.0 * 250.0 / asked, limit, speed)
    assert small[1] == pytest.approx(float(speed_form(np.array(1 / 16))) * pressed)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_nominal_response_is_what_an_undisturbed_plant_settles_at(data):
    emulator = started(build(jobs=2, surfaces=(SURFACE, "v100/resnet50/b360", "h100-sxm/assumed/compute_bound")))
    spec = emulator.spec
    rows = [data.draw(st.integers(0, int(count) - 1)) for count in spec.knobs.micro_batches[0]]
    command = Command(
        limit_w=spec.min_limit_w + data.draw(st.floats(0.0, 1.0)) * (spec.max_limit_w - spec.min_limit_w),
        micro_batch=np.array([[spec.knobs.micro_batch[0, j, m] for j, m in enumerate(rows)]]),
        active_gpus=np.array([[data.draw(st.integers(1, 8)) for _ in rows]]),
        duty=np.array([[data.draw(st.one_of(st.just(0.0), st.floats(0.1, 1.0))) for _ in rows]]),
        local_steps=np.array([[data.draw(st.integers(1, 8)) for _ in rows]]),
    )
    power, speed = settled(emulator, command, periods=40)
    expected_w, expected = spec.response(command)
    np.testing.assert_allclose(speed, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(power, expected_w, rtol=0.05)


def test_an_episode_has_the_same_jobs_and_phases_whichever_knobs_are_enabled():
    plain, shaped = (
        started(PowerShapingConfig.model_validate({"action": {"knobs": k}}), 4) for k in (KNOBS[:1], KNOBS)
    )
    np.testing.assert_array_equal(plain.spec.power_table_w, shaped.spec.power_table_w)
    np.testing.assert_array_equal(shaped.spec.knobs.power_w[:, :, 0], shaped.spec.power_table_w)
    np.testing.assert_array_equal(shaped.spec.knobs.throughput[:, :, 0], shaped.spec.throughput_table)
    assert (shaped.spec.knobs.samples_per_update[..., None] % shaped.spec.knobs.micro_batch == 0).all()
    assert shaped.spec.knobs.micro_batches.max() > 2


def test_one_site_of_a_batch_goes_its_own_way():
    config = {"site": {"jobs": 2}, "action": {"knobs": KNOBS}, "episode_s": 300.0}
    batch = PowerShapingVecEnv(config, num_envs=3)
    batch.seed(5)
    batch.reset()
    env = PowerShapingEnv(config)
    env.reset(seed=6)  # the batch's second
    rng = np.random.default_rng(0)
    for _ in range(100):
        actions = rng.choice([-1.0, -0.3, 0.5, 1.0], (3, 10)).astype(np.float32)
        together = batch.step(actions)
        alone = env.step(actions[1])
        np.testing.assert_array_equal(together[0][1], alone[0])
        assert together[1][1] == np.float32(alone[1])


# When changes come


def run(emulator, command, periods):
    found = []
    for _ in range(periods):
        emulator.apply(command)
        telemetry = emulator.advance()
        found.append(replace(telemetry, phase=telemetry.phase.copy()))
    return found


def test_knobs_change_between_optimiser_steps_only():
    emulator = started(build(physics={"step_s": 11.0}))
    held = run(emulator, whole(emulator, micro_batch=8), 12)
    sizes = [int(t.in_force.micro_batch[0, 0]) for t in held]
    changed = sizes.index(8)
    # 11 s are five periods of 2 s and a half: the step ends in the sixth period.
    assert sizes == [128] * 5 + [8] * 7
    assert changed == 5
    # The power limit does not wait.
    assert run(emulator, whole(emulator, micro_batch=8, limit_w=150), 1)[0].limit_w[0, 0] == 150.0


def test_a_change_costs_training_time_once():
    costly = started(build(physics={"active_gpus_switch_s": 3.0}))
    free = started(build())
    change = whole(costly, active_gpus=4)
    lost = [
        2.0 * (a.throughput[0, 0] - b.throughput[0, 0])
        for a, b in zip(run(free, change, 10), run(costly, change, 10), strict=True)
    ]
    # Three seconds: all of the first period (which begins at full speed), half of the second, nothing after.
    assert lost[0] > 0.0
    assert lost[1] == pytest.approx(1.0 * free._speed[0])
    assert lost[2:] == pytest.approx([0.0] * 8, abs=1e-12)
    assert run(costly, change, 1)[0].throughput[0, 0] > 0.0


def test_knob_commands_are_late_and_lost_as_limits_are():
    late = started(build(control_delay_periods=(3, 3)))
    duties = [float(t.in_force.duty[0, 0]) for t in run(late, whole(late, duty=0.5), 6)]
    assert duties == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    lossy = started(build(command_loss=0.6), batch=200)
    first, *_, last = run(lossy, whole(lossy, duty=0.5), 25)
    kept = (first.in_force.duty == 1.0).mean()
    assert 0.45 < kept < 0.75
    assert (last.in_force.duty == 0.5).all()  # the whole setting is told again each period


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"micro_batch": 24}, r"micro-batch of 24: its 128 samples .* allow 8, 16, 32, 64, 128; nearest: 16, 32"),
        ({"micro_batch": 500}, r"nearest: 128"),
        ({"active_gpus": 9}, r"active GPUs of 9; valid: 1 to 8"),
        ({"duty": 0.05}, r"duty of 0.05; valid: 0.1 to 1 or 0 \(paused\)"),
        ({"duty": np.nan}, r"duty of nan"),
        ({"local_steps": 0}, r"local steps of 0; valid: 1 to 8"),
    ],
)
def test_a_setting_that_a_job_cannot_have_is_refused_and_changes_nothing(setting, message):
    emulator = started(build())
    before = run(emulator, whole(emulator, duty=0.5), 3)[-1].in_force
    with pytest.raises(UserError, match=message):
        emulator.apply(whole(emulator, **setting))
    after = emulator.advance().in_force
    for name in ("micro_batch", "active_gpus", "duty", "local_steps"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


@given(st.integers(1, 4096), st.integers(1, 512))
def test_micro_batches_divide_the_samples_of_an_update(samples, largest):
    sizes = spaced_divisors(samples, largest)
    assert sizes
    assert sizes[0] <= largest
    assert all(samples % size == 0 for size in sizes)
    assert all(b * 1.4 <= a for a, b in itertools.pairwise(sizes))
    below_and_above = nearest(largest, sizes)
    assert below_and_above == [sizes[0]]


def test_a_paused_job_takes_nothing_else_up_until_it_goes_on():
    emulator = started(build())
    paused = run(emulator, whole(emulator, micro_batch=8, active_gpus=4, duty=0.0), 4)[-1].in_force
    assert (paused.micro_batch[0, 0], paused.active_gpus[0, 0], paused.duty[0, 0]) == (128, 8, 0.0)
    on = run(emulator, whole(emulator, micro_batch=8, active_gpus=4, duty=1.0), 1)[-1].in_force
    assert (on.micro_batch[0, 0], on.active_gpus[0, 0], on.duty[0, 0]) == (8, 4, 1.0)


# From actions to settings


def asked(rules=None, **site):
    spec = started(build(**site)).spec
    return KnobSettings(KnobRules(**(rules or {})), BESIDE, spec), spec


def positions(**given):
    return {name: np.array([[given.get(name, 1.0)]]) for name in BESIDE}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-0.5, 1.5), min_size=5, max_size=60), st.sampled_from([0.0, 7.0, 30.0]))
def test_discrete_knobs_dwell_and_stay_within_their_settings(wanted, dwell_s):
    settings_, spec = asked({"active_gpus_dwell_s": dwell_s})
    found = [int(settings_.command(spec.max_limit_w, positions(active_gpus=w)).active_gpus[0, 0]) for w in wanted]
    assert all(1 <= gpus <= 8 for gpus in found)
    changes = [k for k in range(1, len(found)) if found[k] != found[k - 1]]
    first = [] if found[0] == 8 else [0]
    least = max(int(np.ceil(dwell_s / spec.period_s)), 1)
    assert all(b - a >= least for a, b in itertools.pairwise(first + changes))


def test_hysteresis_keeps_a_setting_until_it_is_clearly_left():
    settings_, spec = asked({"hysteresis": 0.2, "active_gpus_dwell_s": 0.0})

    def gpus(wanted):
        # Eight settings: 8 at position 1, 1 at position 0.
        return int(settings_.command(spec.max_limit_w, positions(active_gpus=(wanted - 1) / 7)).active_gpus[0, 0])

    assert [gpus(8), gpus(7.4), gpus(7.31), gpus(7.2), gpus(7.6), gpus(7.69), gpus(7.71)] == [8, 8, 8, 7, 7, 7, 8]
    assert gpus(1) == 1
    assert gpus(8) == 8


def test_duty_has_a_dead_band_but_reaches_its_ends_and_pauses_only_where_it_may():
    settings_, spec = asked({"duty_dead_band": 0.05})

    def duty(settings_, position):
        return float(settings_.command(spec.max_limit_w, positions(duty_cycle=position)).duty[0, 0])

    found = [duty(settings_, p) for p in (0.97, 0.9, 0.93, 1.0, 0.0)]
    assert found == pytest.approx([1.0, 0.91, 0.91, 1.0, 0.1])
    pausing, _ = asked({"min_duty": 0.0})
    assert [duty(pausing, p) for p in (0.5, 0.06, 0.04, 0.0)] == [0.5, 0.1, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["absolute", "delta", "residual"])
def test_a_command_becomes_an_action_becomes_that_command(kind):
    config = build().model_copy(update={"knob_rules": KnobRules(min_duty=0.0)})
    config = config.model_copy(update={"action": config.action.model_copy(update={"kind": kind, "scale": 1.0})})
    shaping = PowerShaping(config, Emulator(config), 1)
    observation = shaping.reset([0])
    task, spec = shaping.task, shaping.task.spec
    last = None
    for micro, gpus, duty, steps, limit_w in ((32, 5, 0.4, 3, 220.0), (128, 8, 1.0, 1, 300.0), (8, 1, 0.1, 8, 160.0)):
        row = np.array([[1]])
        command = Command(row * limit_w, row * micro, row * gpus, row * duty, row * steps)
        centre = (observation[:, task.layout.site("feed_forward")] + 1.0) / 2.0
        # Beyond the dwell times, then one more for delta actions, which are told what was asked for last.
        for k in range(20):
            before = last if k == 0 else command
            outcome = shaping.step(task.action_of(command, centre, before))
            centre = (outcome.observation[:, task.layout.site("feed_forward")] + 1.0) / 2.0
        found = outcome.telemetry.in_force
        assert (found.micro_batch, found.active_gpus, found.local_steps) == (micro, gpus, steps)
        assert found.duty[0, 0] == pytest.approx(duty, abs=0.011)
        assert outcome.telemetry.limit_w[0, 0] == pytest.approx(limit_w, abs=1e-4)
        shown = {name: outcome.observation[0, task.layout.job(name)][0] for name in BESIDE}
        assert shown["active_gpus"] == pytest.approx(2.0 * (gpus - 1) / 7 - 1.0, abs=1e-6)
        assert shown["duty_cycle"] == pytest.approx(2.0 * duty - 1.0, abs=0.03)
        observation, last = outcome.observation, command
    assert spec.knobs.micro_batch[0, 0].tolist()[:5] == [128, 64, 32, 16, 8]


def test_knobs_that_are_left_out_become_neutral_and_dwell_shows():
    env = PowerShapingEnv({"site": {"jobs": 2, **CERTAIN}, "action": {"knobs": KNOBS}})
    env.reset(seed=0)
    action = np.concatenate([np.zeros(2), -np.ones(8)]).astype(np.float32)
    for _ in range(3):
        observation, *_ = env.step(action)
    layout = env.layout
    assert (observation[layout.job("active_gpus")] == -1.0).all()
    # Dwell times of 30 s, of which the command of the first of three periods of 2 s is 6 s old.
    np.testing.assert_allclose(observation[layout.job("active_gpus_dwell")], 1.0 - 6.0 / 30.0, rtol=1e-6)
    full = env.task.action_for(np.ones((1, 2)), np.zeros(1), np.ones((1, 2)))
    np.testing.assert_array_equal(full, np.ones((1, 10)))
    with pytest.raises(
        UserError, match=r"shape \(1, 2\); valid: \(1, 10\), one number per environment and knob and job"
    ):
        env.step(np.zeros(2, np.float32))
    with pytest.raises(UserError, match="job 1, active_gpus is nan"):
        env.step(np.where(np.arange(10) == 5, np.nan, 0.0).astype(np.float32))


# The band


def test_offers_are_those_of_power_limits_alone_unless_asked_otherwise():
    def task(**changes):
        config = {"site": {"jobs": 3}, **changes}
        env = PowerShapingEnv(config)
        env.reset(seed=2)
        return env.task

    plain, shaped = task(), task(action={"knobs": KNOBS})
    assert (plain.base_w, plain.capacity_w) == (shaped.base_w, shaped.capacity_w)
    deep = task(action={"knobs": KNOBS}, signal={"band": "knobs"})
    low, high = reachable_w(KnobRules(), KNOBS, deep.spec)
    assert low[0] < 0.5 * plain.spec.floor_w[0]
    assert deep.base_w[0] == pytest.approx((low[0] + high[0]) / 2)
    # One GPU at a tenth of the time: nearly nothing above idle.
    idle_w = deep.spec.knobs.idle_w.sum()
    assert idle_w < low[0] < 1.02 * idle_w


def test_an_infeasible_band_is_tracked_as_far_as_it_goes_and_the_rest_is_told():
    offer = {"synthetic_regd": {"base": 0.2, "capacity": 0.5, "of": "base"}}
    config = {"site": {"jobs": 2}, "signal": {"offers": offer}}
    with pytest.raises(UserError, match=r"leaves the feasible band .* track what can be had with signal.infeasible"):
        PowerShapingEnv(config).reset(seed=0)
    env = PowerShapingEnv({**config, "signal": {"offers": offer, "infeasible": "track"}})
    _, info = env.reset(seed=0)
    shaping, task = env._shaping, env.task
    assert info["shortfall_w"] == task.shortfall_w[0] > 0.0
    wanted = task.base_w[:, None] - task.capacity_w[:, None] * shaping.signal
    assert shaping.targets_w.min() == pytest.approx(task.spec.floor_w[0])
    np.testing.assert_allclose(task.shortfall_w, (np.clip(wanted, task.spec.floor_w[0], None) - wanted).mean(axis=1))
    # With knobs that reach as low, nothing is missing and nothing is cut.
    shaped = PowerShapingEnv({**config, "action": {"knobs": ("power_limit", "duty_cycle")}})
    shaped.reset(seed=0)
    assert shaped.task.shortfall_w is None
    np.testing.assert_allclose(shaped._shaping.targets_w, wanted)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"action": {"knobs": ["power_limit", "power_limit"]}}, "once each and in this order"),
        ({"action": {"knobs": []}}, "knobs must be some of power_limit, micro_batch"),
        (
            {"action": {"knobs": ["duty_cycle"], "kind": "advice", "loop": {}}},
            "about power limits; knobs must have power_limit",
        ),
        ({"action": {"knobs": ["micro_batch", "power_limit"]}}, "in this order"),
        ({"action": {"knobs": ["clock"]}}, "clock"),
        ({"knob_rules": {"min_duty": 0.2}}, "knob_rules is set, but action.knobs enables no knob"),
        ({"signal": {"band": "knobs"}}, "signal.band is set, but"),
        ({"action": {"knobs": ["duty_cycle"]}, "knob_rules": {"min_duty": 0.05}}, "min_duty must be 0"),
        ({"action": {"knobs": ["duty_cycle"]}, "site": {"knobs": {"comm_share": [0.3, 0.1]}}}, "comm_share needs 0 <="),
    ],
)
def test_configurations_that_make_no_sense_are_refused(data, message):
    with pytest.raises(UserError, match=message):
        PowerShapingEnv(data)

"""`wattgym score` on files a user might have."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from wattgym.cli.score import score
from wattgym.errors import UserError

app = typer.Typer()
app.command()(score)

PULSE = np.zeros(60)
PULSE[5:15] = 1.0


def write(path: Path, values: object, *, step: float = 10.0, start: float = 0.0, name: str = "value") -> Path:
    rows = [f"{start + i * step:g},{v}" for i, v in enumerate(np.asarray(values))]  # type: ignore[arg-type]
    path.write_text("\n".join([f"t_s,{name}", *rows]) + "\n")
    return path


def run(*options: object) -> str:
    result = CliRunner().invoke(app, [str(o) for o in options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run_json(*options: object) -> dict[str, object]:
    found: dict[str, object] = json.loads(run(*options, "--json"))
    return found


@pytest.fixture
def signal(tmp_path: Path) -> Path:
    return write(tmp_path / "s.csv", PULSE, name="regd")


def test_response_per_unit_of_capacity(tmp_path: Path, signal: Path) -> None:
    response = write(tmp_path / "r.csv", 0.5 * PULSE)
    found = run_json("--signal", signal, "--response", response)
    assert found["composite"] == pytest.approx(5 / 6)
    assert found["precision"] == pytest.approx(0.5)
    assert found["assumed"] is False
    assert found["tracking"]["mae"] == pytest.approx(10 * 0.5 / 60)  # type: ignore[index]
    text = run("--signal", signal, "--response", response)
    assert "composite    0.8333" in text
    assert "1 scored" in text


def test_metered_power_of_a_load_falls_when_the_signal_rises(tmp_path: Path, signal: Path) -> None:
    follower = write(tmp_path / "p.csv", 1000.0 - 200.0 * PULSE, name="power_w")
    opposite = write(tmp_path / "q.csv", 1000.0 + 200.0 * PULSE, name="power_w")
    options = ("--base", 1000, "--capacity", 200)
    assert run_json("--signal", signal, "--response", follower, *options)["composite"] == 1.0
    assert run_json("--signal", signal, "--response", opposite, *options)["precision"] == 0.0


def test_delivered_regulation_in_megawatts(tmp_path: Path, signal: Path) -> None:
    response = write(tmp_path / "mw.csv", 10.0 * PULSE)
    assert run_json("--signal", signal, "--response", response, "--capacity", 10)["composite"] == 1.0


def test_two_second_files_are_decimated_and_variants_apply(tmp_path: Path) -> None:
    fine = np.repeat(PULSE, 5)
    signal = write(tmp_path / "s.csv", fine, step=2)
    response = write(tmp_path / "r.csv", np.concatenate([np.zeros(15), fine[:-15]]), step=2)
    found = run_json("--signal", signal, "--response", response)
    assert (found["delay"], found["precision"]) == (pytest.approx(0.9), pytest.approx(0.4))
    only = run_json("--signal", signal, "--response", response, "--variant", "precision_only")
    assert (only["composite"], only["assumed"]) == (pytest.approx(0.4), True)
    assert "assumed" in run("--signal", signal, "--response", response, "--variant", "precision_only")
    grace = run_json("--signal", signal, "--response", response, "--set", "grace_samples=1")
    assert grace["delay"] == pytest.approx(1 - 2 / 30)


def test_files_without_times_need_the_interval(tmp_path: Path) -> None:
    bare = tmp_path / "bare.csv"
    bare.write_text("r\n" + "\n".join(f"{v:g}" for v in PULSE) + "\n")
    timed = write(tmp_path / "timed.csv", PULSE)
    assert run_json("--signal", bare, "--response", bare, "--interval", 10)["composite"] == 1.0
    assert run_json("--signal", timed, "--response", bare, "--interval", 10)["composite"] == 1.0
    with pytest.raises(UserError, match=r"bare\.csv"):
        run("--signal", bare, "--response", bare)
    bare.write_text("r\n0.5\noops\n0.5\n")
    with pytest.raises(UserError, match=r"bare\.csv.*3"):
        run("--signal", bare, "--response", bare, "--interval", 10)


def test_one_file_with_both_columns(tmp_path: Path) -> None:
    both = tmp_path / "both.csv"
    rows = [f"{i * 10},{u:g},{1000 - 200 * u:g}" for i, u in enumerate(PULSE)]
    both.write_text("\n".join(["t_s,r,power_w", *rows]))
    options = ("--signal", both, "--response", both, "--base", 1000, "--capacity", 200)
    assert run_json(*options, "--signal-column", "r", "--response-column", "power_w")["composite"] == 1.0
    with pytest.raises(UserError, match="--response-column"):
        run(*options, "--signal-column", "r")


def test_gaps_are_refused_or_scored_by_the_rules(tmp_path: Path, signal: Path) -> None:
    values = [f"{0.5 * v:g}" for v in PULSE]
    for missing in (7, 8, 20):
        values[missing] = ""
    response = tmp_path / "r.csv"
    response.write_text("t_s,r\n" + "\n".join(f"{10 * i},{v}" for i, v in enumerate(values)) + "\n")
    with pytest.raises(UserError, match="empty or NaN"):
        run("--signal", signal, "--response", response)
    options = ("--signal", signal, "--response", response, "--allow-gaps")
    assert run_json(*options)["precision"] == pytest.approx(0.5)
    assert run_json(*options, "--set", "missing=zero")["precision"] == pytest.approx(0.4)
    response.write_text("t_s,r\n" + "\n".join(f"{10 * i},{v:g}" for i, v in enumerate(PULSE) if not 8 <= i < 24))
    found = run_json(*options)
    assert found["composite"] is None
    assert found["windows_by_status"]["missing"] == 1  # type: ignore[index]
    assert "not scored" in run(*options)


def test_alignment_is_explicit(tmp_path: Path) -> None:
    signal = write(tmp_path / "s.csv", PULSE)
    later = write(tmp_path / "later.csv", PULSE, start=100)
    longer = write(tmp_path / "longer.csv", np.concatenate([PULSE, PULSE]))
    finer = write(tmp_path / "finer.csv", np.repeat(PULSE, 5), step=2)
    calendar = tmp_path / "calendar.csv"
    stamps = [f"2024-01-01T00:{i // 6:02d}:{i % 6 * 10:02d}Z,{v:g}" for i, v in enumerate(PULSE)]
    calendar.write_text("time,r\n" + "\n".join(stamps))
    for response, message in (
        (later, "starts 100 s after"),
        (longer, "60 samples and the response 120"),
        (finer, "every 10 s, the response every 2 s"),
        (calendar, "clocks cannot be compared"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            run("--signal", signal, "--response", response)
        assert "\n" not in str(caught.value)
    for response in (longer, finer):
        assert run_json("--signal", signal, "--response", response, "--align", "overlap")["composite"] == 1.0
    for response in (later, longer, calendar):
        assert run_json("--signal", signal, "--response", response, "--align", "index")["composite"] == 1.0
    with pytest.raises(UserError, match="50 samples of 10 s are too few"):
        run("--signal", signal, "--response", later, "--align", "overlap")
    far = write(tmp_path / "far.csv", PULSE, start=5000)
    with pytest.raises(UserError, match="no time in common"):
        run("--signal", signal, "--response", far, "--align", "overlap")
    with pytest.raises(UserError, match="exact, overlap, index"):
        run("--signal", signal, "--response", far, "--align", "nearest")


def test_calendar_clocks_are_compared(tmp_path: Path) -> None:
    """The same instants, once with an offset and once in UTC."""
    seconds = [(i // 360, i // 6 % 60, i % 6 * 10) for i in range(66)]
    values = np.concatenate([np.zeros(6), PULSE])
    utc = tmp_path / "utc.csv"
    utc.write_text("time,r\n" + "\n".join(f"2024-01-01T0{h}:{m:02d}:{s:02d}Z,{v:g}" for (h, m, s), v in zip(
        seconds[6:], PULSE, strict=False)))  # fmt: skip
    offset = tmp_path / "offset.csv.gz"
    text = "time,r\n" + "\n".join(f"2024-01-01T0{h + 2}:{m:02d}:{s:02d}+02:00,{v:g}" for (h, m, s), v in zip(
        seconds, values, strict=False))  # fmt: skip
    offset.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(UserError, match="starts -60 s after"):
        run("--signal", utc, "--response", offset)
    assert run_json("--signal", utc, "--response", offset, "--align", "overlap")["composite"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--variant", "legcy"), "legacy"),
        (("--set", "grace_samples=2"), "grace_samples"),
        (("--set", "grace_sample=1"), "did you mean 'grace_samples'"),
        (("--set", "windows"), "KEY=VALUE"),
        (("--set", "windows=[a"), "not a value"),
        (("--capacity", "0"), "--capacity must be positive"),
        (("--capacity", "nan"), "--capacity must be positive"),
        (("--base", "100"), "needs --capacity"),
        (("--interval", "2"), "every 10 s, but --interval says 2 s"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, signal: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        run("--signal", signal, "--response", signal, *options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_signal_outside_its_range_names_the_row(tmp_path: Path) -> None:
    bad = PULSE.copy()
    bad[3] = 1.5
    path = write(tmp_path / "bad.csv", bad)
    with pytest.raises(UserError, match=r"bad\.csv.*5.*1\.5"):
        run("--signal", path, "--response", path)
    with pytest.raises(UserError, match="missing"):
        run("--signal", tmp_path / "missing.csv", "--response", path)

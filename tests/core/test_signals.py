"""Signals: sign, bounds, splits, timing, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.signals import SIGNAL_FAMILIES, Signal, draw_signal, named_signal, response, signal_from_trace, target_w
from wattgym.signals.droop import DROOP_CURVES, DroopOptions, droop_response
from wattgym.signals.events import EmergencyOptions, PeakEventOptions
from wattgym.signals.renewable import RenewableOptions, production_share
from wattgym.signals.synthetic import SyntheticRegdOptions
from wattgym.traces import list_traces, load_table, load_trace, split_windows
from wattgym.traces.trace import Trace

SETTINGS = settings(max_examples=40, deadline=None)
RECORDED = {"regd": ("test",), "rega": ("train", "validation", "test"), "droop": ("train", "validation", "test"),
            "renewable": ("train", "validation", "test")}  # fmt: skip
EVENTS = ("peak_event", "emergency")
DRAWN = [
    *((family, split) for family, splits in RECORDED.items() for split in splits),
    *((family, split) for family in EVENTS for split in ("train", "validation", "test")),
    ("synthetic_regd", "train"),
]


def draw(family: str, split: str, seed: int = 0, **options: object) -> Signal:
    settings_: dict[str, object] = {"duration_s": 1200.0, "period_s": 2.0, **options}
    return draw_signal(family, split, rng=np.random.default_rng(seed), **settings_)  # type: ignore[arg-type]


def test_sign_convention_for_a_load() -> None:
    """Base 100 MW, capacity 10 MW."""
    r = [0.0, 1.0, 0.5, -1.0]
    targets = target_w(100e6, 10e6, r)
    assert targets.tolist() == [100e6, 90e6, 95e6, 110e6]
    assert response(100e6, targets, 10e6).tolist() == r


@SETTINGS
@given(st.floats(1, 1e9), st.floats(1, 1e9), st.floats(-1, 1))
def test_drawing_the_target_is_a_perfect_response(base_w: float, capacity_w: float, r: float) -> None:
    power = target_w(base_w, capacity_w, r)
    assert float(response(base_w, power, capacity_w)) == pytest.approx(r, abs=1e-6 * max(1, base_w / capacity_w))


@pytest.mark.parametrize(("family", "split"), DRAWN)
@SETTINGS
@given(seed=st.integers(0, 2**32 - 1), period_s=st.sampled_from([1.0, 2.0, 5.0, 10.0]), minutes=st.integers(5, 35))
def test_draws_are_bounded_whole_and_repeatable(
    family: str, split: str, seed: int, period_s: float, minutes: int
) -> None:
    one = draw(family, split, seed, duration_s=minutes * 60.0, period_s=period_s)
    assert one.values.shape == (int(minutes * 60 / period_s),)
    assert np.all(np.abs(one.values) <= 1)
    assert not one.values.flags.writeable
    assert (one.family, one.split, one.period_s) == (family, split, period_s)
    again = draw(family, split, seed, duration_s=minutes * 60.0, period_s=period_s)
    assert np.array_equal(one.values, again.values)
    assert (one.start_s, one.trace_id, one.meta) == (again.start_s, again.trace_id, again.meta)


def test_every_family_is_covered_by_these_tests() -> None:
    assert {family for family, _ in DRAWN} == set(SIGNAL_FAMILIES)


@pytest.mark.parametrize("family", ["rega", "droop", "renewable"])
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_draws_stay_inside_their_split(family: str, split: str) -> None:
    for seed in range(60):
        signal = draw(family, split, seed, duration_s=1800.0)
        assert signal.trace_id is not None
        windows = split_windows(signal.trace_id, split)
        end_s = signal.start_s + signal.duration_s
        assert any(start <= signal.start_s and end_s <= end + 1e-6 for start, end in windows)


@pytest.mark.parametrize("family", ["regd", "rega", "droop", "renewable"])
def test_nothing_outside_the_split_is_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison every sample outside the split: draws must not change."""
    import wattgym.signals.windows as windows_module

    split = RECORDED[family][0]
    options = {"options": RenewableOptions(reference="day")} if family == "renewable" else {}
    before = [draw(family, split, seed, **options) for seed in range(30)]

    def poisoned(trace_id: str) -> Trace:
        trace = load_trace(trace_id)
        times = trace.start_s + np.arange(trace.values.size) * trace.interval_s
        inside = np.zeros(trace.values.size, dtype=bool)
        for start, end in split_windows(trace_id, split):
            inside |= (times >= start - 1e-6) & (times < end - 1e-6)
        values = np.where(inside, trace.values, trace.values.max() + 1e6)
        return Trace(trace.id, trace.kind, trace.unit, trace.interval_s, values, trace.start_s, trace.meta)

    caches = [windows_module.cached_trace, windows_module.recorded_windows]
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(windows_module, "load_trace", poisoned)
    try:
        after = [draw(family, split, seed, **options) for seed in range(30)]
    finally:
        for cache in caches:
            cache.cache_clear()
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one.values, other.values)


@pytest.mark.parametrize("family", EVENTS)
def test_events_come_from_their_split_only(family: str) -> None:
    tables = {split: load_table("reserve-events/pjm-synchronized", split) for split in ("train", "validation", "test")}
    starts = {split: set(table["t_s"]) for split, table in tables.items()}
    assert not (starts["train"] & starts["validation"]) | (starts["train"] & starts["test"])
    for split, own in starts.items():
        for seed in range(40):
            signal = draw(family, split, seed, duration_s=3600.0)
            assert signal.start_s + signal.meta["onset_s"] in own


def test_regd_is_the_recorded_wave_at_its_own_ticks() -> None:
    trace = load_trace("regulation/pjm-regd-test-wave")
    wave = named_signal("regd", period_s=2.0)
    assert np.array_equal(wave.values, trace.values)
    assert named_signal(trace.id, period_s=2.0).values.tolist() == wave.values.tolist()
    slow = named_signal("regd", period_s=10.0)
    assert np.array_equal(slow.values, trace.values[: slow.values.size * 5 : 5])
    fast = named_signal("regd", period_s=1.0, start_s=100.0, duration_s=20.0)
    assert np.array_equal(fast.values, np.repeat(trace.values[50:60], 2))


def test_every_beginning_of_a_window_can_be_drawn() -> None:
    starts = {draw("regd", "test", seed, duration_s=2396.0).start_s for seed in range(200)}
    assert starts == {0.0, 2.0, 4.0, 6.0}  # 2402 s recorded


def test_droop_pushes_the_load_against_the_frequency() -> None:
    curve = DROOP_CURVES["dynamic_containment"].curve
    deviation = np.array([-0.6, -0.5, -0.2, -0.015, -0.01, 0.0, 0.01, 0.2, 0.35, 0.5, 0.6])
    expected = [1, 1, 0.05, 0, 0, 0, 0, -0.05, -0.525, -1, -1]
    assert droop_response(50.0 + deviation, 50.0, curve) == pytest.approx(expected, abs=1e-12)
    record = load_trace("frequency/day-1s")
    signal = named_signal("droop", period_s=1.0)
    assert np.all(signal.values[record.values < 59.98] > 0)
    assert np.all(signal.values[record.values > 60.02] < 0)
    assert np.all(signal.values[np.abs(record.values - 60.0) <= 0.015 - 1e-9] == 0)


@SETTINGS
@given(st.floats(40, 70), st.sampled_from(sorted(DROOP_CURVES)))
def test_droop_is_odd_and_never_helps_the_deviation(frequency_hz: float, name: str) -> None:
    curve = DROOP_CURVES[name].curve
    r = float(droop_response(frequency_hz, 55.0, curve))
    mirrored = float(droop_response(110.0 - frequency_hz, 55.0, curve))
    assert r == pytest.approx(-mirrored, abs=1e-9)
    assert r * (55.0 - frequency_hz) >= 0


def test_renewable_spans_the_feasible_band() -> None:
    values = np.array([-0.3, 0.0, 25.0, 50.0, 60.0, 10.0, 20.0, 0.0])
    site = Trace("site", "solar_power", "MW", 43_200.0, values, 0.0, {"capacity_mw": 50})
    assert production_share(site, "capacity").tolist() == [0, 0, 0.5, 1, 1, 0.2, 0.4, 0]
    # Two samples a day: the second day's highest is 50, the third's 60, the fourth's 20; the first has no sun.
    assert production_share(site, "day").tolist() == pytest.approx([0, 0, 0.5, 1, 1, 1 / 6, 1, 0])
    day = named_signal("renewable", period_s=900.0)
    recorded = load_trace("solar/csg-site1").values[:96]
    assert day.values == pytest.approx(1 - 2 * np.clip(recorded / 50.0, 0, 1))
    assert day.values[0] == 1.0  # midnight: the floor


def test_renewable_skips_nights_and_compresses_time() -> None:
    options = RenewableOptions(reference="day", time_compression=24.0, min_daylight_share=0.3)
    for seed in range(40):
        signal = draw("renewable", "train", seed, duration_s=3600.0, options=options)
        assert signal.trace_id is not None
        trace = load_trace(signal.trace_id)
        part = trace.window(signal.start_s, 86_400.0)
        assert signal.values[0] == pytest.approx(1 - 2 * production_share(trace, "day")[int(signal.start_s / 900)])
        assert (part.values > 0.02 * part.values.max()).mean() >= 0.3
    lit = [draw("renewable", "test", seed, duration_s=1800.0).values for seed in range(60)]
    assert all(values.min() < 1.0 for values in lit)


def test_peak_event_profile() -> None:
    """15 min in, 3 h hold, 1 h out, and nothing afterwards."""
    event = named_signal("peak_event", period_s=60.0, duration_s=18_000.0)
    minutes = np.arange(300)
    expected = np.interp(minutes, [0, 15, 195, 255, 300], [0, 1, 1, 0, 0])
    assert event.values == pytest.approx(expected, abs=1e-12)
    assert event.meta["capacity_share"] == 0.25
    assert named_signal("peak_event", period_s=60.0).values.size == 255


def test_emergency_is_full_within_thirty_seconds_and_holds_ten_minutes() -> None:
    event = named_signal("emergency", period_s=2.0)
    assert event.values[:16] == pytest.approx(np.arange(16) / 15)
    assert np.all(event.values[15:316] == 1.0)
    assert event.values[316] < 1.0
    assert event.meta["capacity_share"] == 0.30


def test_drawn_event_lengths_are_the_recorded_ones_around_the_nominal() -> None:
    table = load_table("reserve-events/pjm-synchronized", "train")
    median_min = float(np.median(table["duration_min"]))
    for seed in range(30):
        signal = draw("emergency", "train", seed, duration_s=7200.0)
        onset_s, hold_s = signal.meta["onset_s"], signal.meta["hold_s"]
        assert hold_s == pytest.approx(min(600.0 * signal.meta["recorded_length_s"] / 60 / median_min, 1800.0))
        begin = round((onset_s + 30) / 2)
        assert np.all(signal.values[begin : begin + int(hold_s / 2)] == 1.0)
        assert onset_s + 30 + hold_s + 300 <= 7200
    fixed = EmergencyOptions(lengths="nominal")
    assert {draw("emergency", "train", seed, options=fixed).meta["hold_s"] for seed in range(20)} == {600.0}


def test_an_event_that_just_fits_begins_at_once() -> None:
    fixed = EmergencyOptions(lengths="nominal")
    assert {draw("emergency", "train", s, duration_s=930.0, options=fixed).meta["onset_s"] for s in range(9)} == {0.0}
    roomy = {draw("emergency", "train", s, duration_s=936.0, options=fixed).meta["onset_s"] for s in range(99)}
    assert roomy == {0.0, 2.0, 4.0, 6.0}


def test_an_event_longer_than_the_episode_begins_in_its_first_half() -> None:
    onsets = []
    for seed in range(50):
        signal = draw("peak_event", "train", seed, duration_s=3600.0, options=PeakEventOptions(lengths="nominal"))
        onsets.append(signal.meta["onset_s"])
        assert signal.values[-1] == 1.0
    assert 0 <= min(onsets) < 600 < 1200 < max(onsets) <= 1800


def test_synthetic_signal_is_energy_neutral_and_like_the_recorded_wave() -> None:
    means, mileages, spreads = [], [], []
    for seed in range(200):
        values = draw("synthetic_regd", "train", seed, duration_s=1800.0).values
        means.append(values.mean())
        mileages.append(np.abs(np.diff(values)).sum() * 2)
        spreads.append(np.mean(values**2))
    wave = named_signal("regd", period_s=2.0).values
    assert abs(np.mean(means)) < 0.02
    assert np.std(means) < 0.12
    assert np.mean(mileages) == pytest.approx(np.abs(np.diff(wave)).sum() * 1.5, rel=0.1)
    assert np.sqrt(np.mean(spreads)) == pytest.approx(wave.std(), rel=0.05)


def test_the_energy_of_a_long_synthetic_signal_stays_bounded() -> None:
    """Without clipping, the integral is the time constant times the change of a bounded low-pass."""
    gentle = SyntheticRegdOptions(std=0.1)
    values = draw("synthetic_regd", "train", 3, duration_s=7 * 86_400.0, options=gentle).values
    energy_s = np.cumsum(values) * 2.0
    assert np.ptp(energy_s) < 10 * 0.1 * gentle.neutral_s * 3
    assert not np.any(np.abs(values) >= 1)


def test_the_synthetic_scale_does_not_depend_on_the_sample() -> None:
    """A prefix of the noise gives a prefix of the signal: nothing ahead is used."""
    short = draw("synthetic_regd", "train", 5, duration_s=600.0).values
    long = draw("synthetic_regd", "train", 5, duration_s=3600.0).values
    assert np.array_equal(short, long[: short.size])


def test_a_users_own_recording_becomes_a_signal() -> None:
    trace = Trace("mine", "regulation", "1", 2.0, np.linspace(-1, 1, 100), 50.0)
    signal = signal_from_trace(trace, period_s=4.0, start_s=60.0, duration_s=40.0)
    assert signal.values.tolist() == trace.values[5:25:2].tolist()
    assert (signal.family, signal.trace_id, signal.start_s) == ("recorded", "mine", 60.0)
    whole = Trace("mine", "regulation", "1", 2.0, [0.0, 1.5], 0.0)
    with pytest.raises(UserError, match=r"sample 1 is 1\.5"):
        signal_from_trace(whole, period_s=2.0)


def test_a_catalogued_recording_can_be_drawn_by_its_id() -> None:
    by_id = draw("regulation/pjm-rega-2017-08-02", "test", 4)
    assert by_id.trace_id == "regulation/pjm-rega-2017-08-02"
    for entry in list_traces():
        if entry.kind in ("regulation", "frequency", "solar_power"):
            assert named_signal(entry.id, period_s=1.0, duration_s=60.0).values.size == 60


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw("regd", "test", duration_s=3600.0), "longest recorded window is 2402 s"),
        (lambda: draw("regd", "train"), "only in: test; synthetic_regd"),
        (lambda: draw("rega", "train", duration_s=20_000.0), "longest recorded window is 18000 s"),
        (lambda: draw("renewable", "train", duration_s=1e8), "valid: 1 to"),
        (lambda: draw("renewable", "train", duration_s=3.2e7, period_s=60.0), "longest recorded window"),
        (
            lambda: draw("renewable", "train", options=RenewableOptions(min_daylight_share=1.0, daylight_level=0.99)),
            "min_daylight_share",
        ),
        (lambda: draw("regd", "all"), "unknown split 'all'"),
        (lambda: draw("regdd", "test"), "families: regd"),
        (lambda: draw("regd", "test", period_s=0.0), "period_s must be positive"),
        (lambda: draw("regd", "test", duration_s=1.0), "valid: 1 to"),
        (lambda: draw("regd", "test", duration_s=float("nan")), "duration_s must be finite"),
        (lambda: draw("regd", "test", options=DroopOptions()), "takes RecordedOptions, got DroopOptions"),
        (lambda: draw("synthetic_regd", "test"), "for training only"),
        (lambda: draw("reserve-events/pjm-synchronized", "test"), "needs a regulation, frequency or solar_power"),
        (lambda: named_signal("regd", period_s=2.0, duration_s=2500.0), "covers 0 s to 2402 s"),
        (lambda: named_signal("regd", period_s=2.0, start_s=-2.0), "covers 0 s to 2402 s"),
        (lambda: named_signal("synthetic_regd", period_s=2.0), "draw_signal"),
        (lambda: named_signal("peak_event", period_s=2.0, duration_s=1e9), "valid: 1 to"),
        (lambda: Signal("x", "x", 2.0, np.array([0.0, np.nan])), "sample 1 is nan"),
        (lambda: Signal("x", "x", 2.0, np.zeros((2, 2))), "one dimension"),
        (lambda: Signal("x", "x", 0.0, np.zeros(2)), "period must be positive"),
    ],
)
def test_refusals_are_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "curve",
    [
        ((0.1, 0.0),),
        ((0.2, 0.0), (0.1, 1.0)),
        ((0.1, 0.1), (0.2, 1.0)),
        ((0.1, 0.0), (0.2, 1.5)),
        ((-0.1, 0.0), (0.2, 1)),
    ],
)
def test_droop_curves_are_checked(curve: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="rising from"):
        DroopOptions(curve=curve)


def test_a_frequency_record_without_nominal_frequency_needs_the_option() -> None:
    from wattgym.signals.droop import droop_signal

    record = Trace("f", "frequency", "Hz", 1.0, np.full(10, 49.9))
    with pytest.raises(UserError, match="nominal_hz"):
        droop_signal(record, 0.0, 10.0, 2.0, DroopOptions())
    found = droop_signal(record, 0.0, 10.0, 2.0, DroopOptions(nominal_hz=50.0, curve=((0.0, 0.0), (0.2, 1.0))))
    assert found.values == pytest.approx([0.5] * 5)

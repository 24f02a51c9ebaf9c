import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.traces import Trace

TRACES = st.builds(
    lambda values, interval_s, start_s: Trace("x", "other", "1", interval_s, np.array(values), start_s),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.sampled_from([0.1, 1 / 30, 2.0, 300.0]),
    st.sampled_from([0.0, -54.605, 600.0, 1e6]),
)


@given(TRACES)
def test_every_sample_holds_until_the_next(trace):
    ticks = trace.start_s + np.arange(trace.values.size) * trace.interval_s
    np.testing.assert_array_equal(trace.at(ticks), trace.values)
    np.testing.assert_array_equal(trace.at(ticks + 0.5 * trace.interval_s), trace.values)
    assert trace.duration_s == pytest.approx(trace.end_s - trace.start_s)


@given(TRACES)
def test_times_outside_are_refused(trace):
    for outside in (trace.start_s - 0.01 * trace.interval_s, trace.end_s, trace.end_s + 5, np.nan, np.inf):
        with pytest.raises(UserError, match="covers"):
            trace.at([trace.start_s, outside])


@given(TRACES, st.data())
def test_a_window_keeps_clock_and_samples(trace, data):
    first = data.draw(st.integers(0, trace.values.size - 1))
    count = data.draw(st.integers(1, trace.values.size - first))
    part = trace.window(trace.start_s + first * trace.interval_s, count * trace.interval_s)
    np.testing.assert_array_equal(part.values, trace.values[first : first + count])
    assert part.start_s == pytest.approx(trace.start_s + first * trace.interval_s)
    for start_s, duration_s in (
        (trace.start_s - trace.interval_s, 1.0),
        (trace.start_s, trace.duration_s + trace.interval_s),
    ):
        with pytest.raises(UserError, match="not inside"):
            trace.window(start_s, duration_s)
    with pytest.raises(UserError, match="positive"):
        trace.window(trace.start_s, 0.0)


def test_a_trace_owns_its_samples_and_is_read_only():
    source = np.array([1.0, 2.0])
    trace = Trace("x", "other", "1", 1.0, source)
    source[0] = 9.0
    assert trace.values[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        trace.values[0] = 3.0


@pytest.mark.parametrize(
    ("values", "interval_s", "message"),
    [
        ([], 1.0, "at least one sample"),
        ([[1.0]], 1.0, "one dimension"),
        ([0.0, np.nan], 1.0, "sample 1 is nan"),
        ([np.inf], 1.0, "must be finite"),
        ([1.0], 0.0, "interval must be positive"),
        ([1.0], np.nan, "interval must be positive"),
    ],
)
def test_what_is_no_trace(values, interval_s, message):
    with pytest.raises(UserError, match=message):
        Trace("x", "other", "1", interval_s, np.array(values))

import gzip
import itertools
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.traces.gaps import fill_gaps
from wattgym.traces.table import check_file, read_trace_file

GOOD = "t_s,r\n0,0.1\n2,0.2\n4,-0.3\n6,1\n"


def errors(path, **options):
    found = [f for f in check_file(path, **options) if f.level == "error"]
    # What the check reports is what the reader refuses, and its first error is in the reader's message.
    if found:
        with pytest.raises(UserError) as caught:
            read_trace_file(path, **options)
        assert str(found[0]) in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        read_trace_file(path, **options)
    return found


def codes(path, **options):
    return [(f.code, f.row, f.column) for f in errors(path, **options)]


@pytest.fixture
def write(tmp_path):
    def write(data, name="a.csv"):
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write


def test_a_plain_file(write):
    trace = read_trace_file(write(GOOD), kind="regulation")
    assert (trace.interval_s, trace.start_s, trace.end_s) == (2.0, 0.0, 8.0)
    np.testing.assert_array_equal(trace.values, [0.1, 0.2, -0.3, 1.0])
    assert (trace.kind, trace.unit, trace.meta["gap_policy"]) == ("regulation", "1", "refuse")
    assert trace.meta["notes"] == []
    with pytest.raises(UserError, match="covers 0 s to 8 s"):
        trace.at(8)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("0,0.1\n2,0.2\n8,0.3\n10,1\n", [("gap", 3, "t_s")]),
        ("0,0.1\n2,0.2\n2,0.3\n4,1\n", [("duplicate-time", 4, "t_s")]),
        ("0,0.1\n2,0.2\n4,0.3\n3,1\n", [("backward-time", 5, "t_s")]),
        ("0,0.1\n2,0.2\n4,0.3\n7,1\n", [("uneven-time", 5, "t_s")]),
        ("0,0.1\n2,\n4,0.3\n6,1\n", [("missing-value", 3, "r")]),
        ("0,0.1\n2,NaN\n4,null\n6,1\n", [("missing-value", 3, "r")]),
        ("0,0.1\n2,1.5\n4,0.3\n6,-2\n", [("out-of-range", 3, "r"), ("out-of-range", 5, "r")]),
        ('0,0.1\n2,"0,2"\n4,0.3\n', [("decimal-comma", 3, "r")]),
        ("0,0.1\n2,0,2\n4,0.3\n", [("ragged", 3, None)]),
        ("0,0.1\n2,0.2\n4", [("ragged", 4, None)]),
        ("0,0.1\n2,inf\n4,0.3\n", [("not-a-number", 3, "r")]),
        ("0,0.1\n2,0.2 MW\n4,0.3\n", [("not-a-number", 3, "r")]),
        ("0,0.1\n2,abc\n4,0.3\n", [("not-a-number", 3, "r")]),
        ("0,0.1\n,0.2\n4,0.3\n", [("bad-time", 3, "t_s")]),
        ("0,0.1\n00:02,0.2\n4,0.3\n", [("bad-time", 3, "t_s")]),
        ("0,0.1\n", [("too-short", None, None)]),
        ("0,0.1\n2,0.2\n4,0.3\n1e15,1\n", [("too-long", None, None), ("gap", 4, "t_s")]),
    ],
)
def test_each_mistake_is_named_by_line_and_column(write, rows, expected):
    assert codes(write("t_s,r\n" + rows), kind="regulation") == expected


def test_all_mistakes_are_reported_not_the_first_only(write):
    path = write("t_s,r\n0,5\n2,x\n4,\n4,0\n6,0\n12,0\n10,0\nz,0\n1,2,3\n")
    found = {code for code, _, _ in codes(path, kind="regulation")}
    assert found >= {"out-of-range", "not-a-number", "missing-value", "duplicate-time", "gap", "backward-time",
                     "bad-time", "ragged"}  # fmt: skip
    with pytest.raises(UserError, match=r"and \d+ more; `wattgym traces check` lists them"):
        read_trace_file(path, kind="regulation")


def test_a_mistake_in_every_row_is_summed_up(write):
    path = write("t_s,r\n" + "".join(f"{i},5\n" for i in range(1000)))
    found = errors(path, kind="regulation")
    assert len(found) == 21
    assert found[-1].message == "and 980 more of kind out-of-range"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "the file is empty"),
        ("\n", "line 1 is blank"),
        ("t_s,r\n", "no row below the header"),
        ("0,0.1\n2,0.2\n", "not column names"),
        ("2024-01-01T00:00:00Z,0.1\n", "not column names"),
        (bytes(range(256)) * 20, "binary"),
        (b"t_s,r\n0,\x00\n", "line 2 holds NUL bytes"),
        (b"t_s,r\n0,\xff\n", "line 2 is not UTF-8"),
        (b"\xff\xfet\x00", "UTF-16"),
        (b"PK\x03\x04rest", "Excel workbook"),
        (b"PAR1nonsense", "not readable as Parquet"),
        (b"x" * (2**20 + 5), "longer than"),
        (gzip.compress(GOOD.encode() * 1000)[:-20], "cut short or damaged"),
        ("a,b,c\n1,2,3\n", "no column of times"),
        ("r\n1\n", "no column of times"),
        ("t_s,a,b\n0,1,2\n", "name one of: 'a', 'b'"),
        ("t_s,a,t_s\n0,1,2\n", "there twice"),
        ("time,r\n31.12.2024 00:00,1\n", "is not a time that can be read"),
        ('t_s,r\n0,0.1\n2,"0.2\n', "not readable as CSV"),
    ],
)
def test_a_file_that_is_no_table(write, data, message):
    found = errors(write(data))
    assert any(message in str(finding) for finding in found)


def test_a_missing_file_and_a_folder(tmp_path):
    assert "No such file" in str(errors(tmp_path / "none.csv")[0])
    assert "directory" in str(errors(tmp_path)[0])


def test_size_limit_counts_unpacked_bytes_and_can_be_raised(write):
    text = "t_s,r\n" + "".join(f"{i},0\n" for i in range(20_000))
    packed = write(gzip.compress(text.encode()), "a.csv.gz")
    assert packed.stat().st_size < 100_000 < len(text)
    assert "raise the size limit" in str(errors(packed, max_bytes=100_000)[0])
    assert read_trace_file(packed, max_bytes=len(text)).values.size == 20_000


def test_bom_crlf_and_semicolons_are_accepted_and_recorded(write):
    path = write(b"\xef\xbb\xbft_s;r\r\n0;0.1\r\n2;0.2\r\n\r\n")
    trace = read_trace_file(path, kind="regulation")
    np.testing.assert_array_equal(trace.values, [0.1, 0.2])
    notes = " ".join(trace.meta["notes"])
    assert "byte order mark" in notes
    assert "CR LF" in notes
    assert "';'" in notes
    assert {f.level for f in check_file(path)} == {"note"}


def test_columns_by_name(write):
    path = write("stamp,a,b\n0,1,2\n1,3,4\n")
    trace = read_trace_file(path, column="b", time_column="stamp")
    np.testing.assert_array_equal(trace.values, [2, 4])
    assert "column 'c' is missing; the header has: 'stamp', 'a', 'b'" in str(errors(path, column="c")[0])
    assert "both" in str(errors(path, column="a", time_column="a")[0])


def test_units(write):
    path = write("t_s,power_kw\n0,1\n1,2.5\n")
    assert "named in kW" in str(errors(path, kind="power")[0])
    trace = read_trace_file(path, kind="power", unit="kW")
    np.testing.assert_allclose(trace.values, [1000, 2500])
    assert (trace.unit, trace.meta["unit_in_file"]) == ("W", "kW")
    percent = write("t_s,u\n0,50\n1,75\n")
    assert "unit '%' for a percentage" in str(errors(percent, kind="power_utilisation")[0])
    np.testing.assert_allclose(read_trace_file(percent, kind="power_utilisation", unit="%").values, [0.5, 0.75])
    per_unit = write("t_s,frequency\n0,1.0\n1,0.999\n")
    assert [c for c, _, _ in codes(per_unit, kind="frequency")] == ["out-of-range"] * 2
    for wrong in (
        {"kind": "power", "unit": "hp"},
        {"kind": "powr"},
        {"kind": "reserve_events"},
        {"gap_policy": "guess"},
        {"gap_policy": "hold"},
        {"gap_policy": "hold", "max_gap_s": -1},
    ):
        with pytest.raises(UserError):
            check_file(path, **wrong)


@pytest.mark.parametrize(
    ("policy", "max_gap_s", "expected"),
    [("hold", 6, [0.1, 0.2, 0.2, 0.2, 0.8]), ("interpolate", 6, [0.1, 0.2, 0.4, 0.6, 0.8]), ("hold", 5.9, None),
     ("interpolate", 5.9, None)],
)  # fmt: skip
@pytest.mark.parametrize("rows", ["8,0.8\n", "4,\n6,\n8,0.8\n", "4,nan\n8,0.8\n"])
def test_gap_policies_fill_up_to_the_longest_gap_and_are_recorded(write, policy, max_gap_s, expected, rows):
    path = write("t_s,r\n0,0.1\n2,0.2\n" + rows)
    options = {"kind": "regulation", "gap_policy": policy, "max_gap_s": max_gap_s}
    if expected is None:
        assert "the hole is 6 s long and at most 5.9 s is filled" in str(errors(path, **options)[0])
        return
    trace = read_trace_file(path, **options)
    np.testing.assert_allclose(trace.values, expected)
    assert (trace.meta["gap_policy"], trace.meta["max_gap_s"], trace.meta["filled_samples"]) == (policy, max_gap_s, 2)
    assert trace.meta["filled_runs"] == [(2, 4)]


@pytest.mark.parametrize(("rows", "policy"), [("0,\n2,1\n4,1\n", "hold"), ("0,1\n2,1\n4,\n", "interpolate")])
def test_a_gap_at_the_edge_has_nothing_to_fill_it_from(write, rows, policy):
    found = errors(write("t_s,r\n" + rows), gap_policy=policy, max_gap_s=100)
    assert "there is no sample" in str(found[0])


def test_time_of_day_with_end_of_day(write):
    path = write("time,r\n23:59:54,0.1\n23:59:56,0.2\n23:59:58,0.3\n24:00:00,0.4\n")
    trace = read_trace_file(path, kind="regulation")
    np.testing.assert_array_equal(trace.values, [0.1, 0.2, 0.3])
    assert trace.meta["starts"] == "23:59:54"
    assert "line 5" in trace.meta["notes"][0]
    assert "dropped" in trace.meta["notes"][0]
    over = write("time,r\n23:59:56,0.1\n23:59:58,0.2\n00:00:00,0.3\n")
    assert "a new day seems to start" in str(errors(over)[0])
    inside = write("time,r\n23:59:58,0.1\n24:00:00,0.2\n24:00:02,0.2\n")
    assert ("bad-time", 4, "time") in codes(inside)


def test_iso_end_of_day_rolls_to_the_next_day(write):
    path = write("time,r\n2017-08-01 23:00,0.1\n2017-08-01 24:00:00,0.2\n2017-08-02T01:00:00,0.3\n")
    trace = read_trace_file(path, kind="regulation")
    assert (trace.interval_s, trace.values.size, trace.meta["starts"]) == (3600, 3, "2017-08-01T23:00:00")
    assert "next day (1 rows)" in trace.meta["notes"][0]
    both = write("time,r\n2017-08-01 23:00,0.1\n2017-08-01 24:00,0.2\n2017-08-02 00:00,0.3\n2017-08-02 01:00,0\n")
    assert codes(both) == [("duplicate-time", 4, "time")]


def test_offsets_become_utc_and_mixtures_with_local_times_are_refused(write):
    path = write("time,r\n2024-03-31T01:00:00+01:00,0.1\n2024-03-31T03:00:00+02:00,0.2\n2024-03-31T02:00:00Z,0.3\n")
    trace = read_trace_file(path)
    assert (trace.interval_s, trace.meta["starts"], trace.meta["clock"]) == (3600, "2024-03-31T00:00:00+00:00", "UTC")
    assert "+01:00, +02:00, Z" in trace.meta["notes"][0]
    mixed = write("time,r\n2024-03-31T01:00:00+01:00,0.1\n2024-03-31T03:00:00,0.2\n", "mixed.csv")
    assert ("mixed-time-zones", 3, "time") in codes(mixed)
    local = write("time,r\n2024-03-31 01:00,0.1\n2024-03-31 03:00,0.2\n", "local.csv")
    assert "unknown time zone" in str(errors(local, time_zone="Europe/Nowhere")[0])
    assert "leave the time zone away" in str(errors(path, time_zone="Europe/Berlin")[0])
    assert "does not apply" in str(errors(write(GOOD), time_zone="Europe/Berlin")[0])


def local_file(write, hours, day, minutes=(0, 15, 30, 45)):
    rows = [f"{day} {hour:02}:{minute:02}:00,0\n" for hour in hours for minute in minutes]
    return write("time,r\n" + "".join(rows))


def test_daylight_saving_steps_are_explained_and_solved_by_the_zone(write):
    spring = local_file(write, (0, 1, 3, 4), "2024-03-31")
    found = errors(spring)
    assert (found[0].code, found[0].row) == ("gap", 9)
    assert "when daylight saving starts" in found[0].message
    trace = read_trace_file(spring, time_zone="Europe/Berlin")
    assert (trace.values.size, trace.interval_s, trace.meta["clock"]) == (16, 900, "UTC")

    autumn = local_file(write, (0, 1, 2, 2, 3), "2024-10-27")
    found = errors(autumn)
    assert (found[0].code, found[0].row) == ("backward-time", 14)
    assert "when daylight saving ends" in found[0].message
    assert read_trace_file(autumn, time_zone="Europe/Berlin").values.size == 20

    hourly = local_file(write, (0, 1, 2, 2, 3), "2024-10-27", minutes=(0,))
    assert "when daylight saving ends" in str(errors(hourly)[0])
    assert read_trace_file(hourly, time_zone="Europe/Berlin").values.size == 5

    once = local_file(write, (0, 1, 2, 3), "2024-10-27")
    assert [c for c, _, _ in codes(once, time_zone="Europe/Berlin")][:4] == ["daylight-saving"] * 4
    skipped = local_file(write, (0, 1, 2, 3), "2024-03-31")
    assert [row for c, row, _ in codes(skipped, time_zone="Europe/Berlin") if c == "daylight-saving"] == [
        10,
        11,
        12,
        13,
    ]


def test_rounded_and_microsecond_clocks(write):
    rounded = write("t_s,r\n" + "".join(f"{i / 30:.3f},0\n" for i in range(1000)))
    trace = read_trace_file(rounded)
    assert trace.interval_s == pytest.approx(1 / 30, abs=1e-6)
    assert "even grid" in trace.meta["notes"][0]
    micro = read_trace_file(write("time_us,u\n600000000,0.5\n900000000,0.6\n"))
    assert (micro.interval_s, micro.start_s) == (300, 600)


def test_dates_far_away(write):
    rows = "9998-12-31T23:00:00,0\n9999-01-01T00:00:00,0\n"
    assert read_trace_file(write("time,r\n" + rows)).meta["starts"] == "9998-12-31T23:00:00"
    assert ("bad-time", 3, "time") in codes(write("time,r\n2024-02-28 00:00,0\n2024-02-30 00:00,0\n2024-03-01,0\n"))


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    times = pd.date_range("2024-01-01", periods=4, freq="15min", tz="Europe/Berlin")
    pd.DataFrame({"time": times, "r": [0.1, 0.2, None, 0.4]}).to_parquet(path)
    found = errors(path, kind="regulation")
    assert (found[0].code, found[0].row, found[0].word) == ("missing-value", 3, "row")
    trace = read_trace_file(path, kind="regulation", gap_policy="interpolate", max_gap_s=1800)
    np.testing.assert_allclose(trace.values, [0.1, 0.2, 0.3, 0.4])
    assert (trace.interval_s, trace.meta["starts"]) == (900, "2023-12-31T23:00:00+00:00")
    assert "raise the size limit" in str(errors(path, max_bytes=10)[0])
    path.write_bytes(path.read_bytes()[:-100])
    assert "cut short" in str(errors(path)[0])

    for column in ([0, 2, 4], ["0", "2", "4"], [0.0, 2.0, 4.0]):
        pd.DataFrame({"t_s": column, "r": ["0.1", "0,2", "x"]}).to_parquet(path)
        assert codes(path) == [("decimal-comma", 2, "r"), ("not-a-number", 3, "r")]
    pd.DataFrame({"t_s": [0, 1], "r": [np.inf, 1.0]}).to_parquet(path)
    assert codes(path) == [("not-a-number", 1, "r")]
    pd.DataFrame({"t_s": [0, 1], "r": [True, False]}).to_parquet(path)
    assert "not numbers" in str(errors(path)[0])
    pd.DataFrame({"t_s": [True, False], "r": [0.0, 1.0]}).to_parquet(path)
    assert "not times" in str(errors(path)[0])


# Properties. The file is made anew in each example, so sharing the folder between examples is safe.
LENIENT = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip
VALUES = st.lists(st.floats(-1, 1).map(lambda x: round(x, 6)), min_size=3, max_size=40)


def as_csv(rows):
    return "t_s,r\n" + "".join(f"{t},{v!r}\n" for t, v in rows)


@LENIENT
@given(VALUES, st.sampled_from([0.5, 1, 2, 300]), st.integers(-1000, 1000), st.sampled_from(["\n", "\r\n"]))
def test_what_is_written_is_read(write, values, interval_s, start_s, end):
    rows = [(start_s + i * interval_s, v) for i, v in enumerate(values)]
    trace = read_trace_file(write(as_csv(rows).replace("\n", end)), kind="regulation")
    np.testing.assert_array_equal(trace.values, values)
    assert (trace.interval_s, trace.start_s) == (interval_s, start_s)


@LENIENT
@given(VALUES, st.randoms(use_true_random=False))
def test_shuffled_rows_are_always_found(write, values, random):
    rows = [(2 * i, v) for i, v in enumerate(values)]
    shuffled = rows[:]
    random.shuffle(shuffled)
    found = {f.code for f in errors(write(as_csv(shuffled)), kind="regulation")}
    assert (shuffled == rows) == (not found)
    assert shuffled == rows or found & {"backward-time", "too-short"}


@LENIENT
@given(VALUES, st.data())
def test_a_repeated_row_is_always_found(write, values, data):
    rows = [(2 * i, v) for i, v in enumerate(values)]
    source = data.draw(st.integers(0, len(rows) - 1))
    rows.insert(data.draw(st.integers(0, len(rows))), rows[source])
    found = {f.code for f in errors(write(as_csv(rows)), kind="regulation")}
    assert found & {"duplicate-time", "backward-time"}


@LENIENT
@given(VALUES.filter(lambda v: len(v) >= 5), st.data())
def test_a_dropped_row_is_always_found_and_filled_where_asked(write, values, data):
    rows = [(2 * i, v) for i, v in enumerate(values)]
    lost = data.draw(st.integers(1, len(rows) - 2))
    path = write(as_csv(rows[:lost] + rows[lost + 1 :]))
    assert codes(path, kind="regulation") == [("gap", lost + 1, "t_s")]
    held = read_trace_file(path, kind="regulation", gap_policy="hold", max_gap_s=4)
    np.testing.assert_array_equal(held.values, [*values[:lost], values[lost - 1], *values[lost + 1 :]])


@LENIENT
@given(VALUES, st.data())
def test_one_value_out_of_range_is_named_by_its_line(write, values, data):
    bad = data.draw(st.integers(0, len(values) - 1))
    wrong = data.draw(st.floats(1.001, 1e6) | st.floats(-1e6, -1.001))
    rows = [(2 * i, wrong if i == bad else v) for i, v in enumerate(values)]
    assert codes(write(as_csv(rows)), kind="regulation") == [("out-of-range", bad + 2, "r")]


@LENIENT
@given(st.datetimes(datetime(2000, 1, 1), datetime(2030, 1, 1)), st.integers(2, 8), st.integers(-14 * 4, 14 * 4))
def test_any_offset_gives_the_same_utc_times(write, start, count, quarters):
    zone = timedelta(minutes=15 * quarters)
    sign, size = ("-" if quarters < 0 else "+"), abs(quarters)
    offset = f"{sign}{size // 4:02}:{size % 4 * 15:02}"
    start = start.replace(microsecond=0)
    rows = "".join(f"{(start + zone + i * timedelta(minutes=5)).isoformat()}{offset},0\n" for i in range(count))
    trace = read_trace_file(write("time,r\n" + rows))
    assert datetime.fromisoformat(trace.meta["starts"]) == start.replace(tzinfo=UTC)
    assert trace.interval_s == 300


@given(
    st.lists(st.floats(-10, 10) | st.just(float("nan")), min_size=1, max_size=30),
    st.sampled_from(["hold", "interpolate"]),
)
def test_filling_keeps_every_known_sample_and_leaves_no_hole(values, policy):
    array = np.array(values)
    longest = max((len(list(g)) for missing, g in itertools.groupby(np.isnan(array)) if missing), default=0)
    fillable = not np.isnan(array[0]) and not (policy == "interpolate" and np.isnan(array[-1]))
    limit_s = longest + 1.0
    if not fillable:
        with pytest.raises(UserError, match="no sample"):
            fill_gaps(array, 1.0, policy, limit_s, "x")
        return
    filled, count = fill_gaps(array, 1.0, policy, limit_s, "x")
    known = ~np.isnan(array)
    np.testing.assert_array_equal(filled[known], array[known])
    assert np.isfinite(filled).all()
    assert count == (~known).sum()
    if longest:
        with pytest.raises(UserError, match="at most"):
            fill_gaps(array, 1.0, policy, limit_s - 0.5, "x")


WORDS = """
    time r , ; " 0 1 2 1e308 -1e308 1e-320 - nan inf x 24:00:00 23:59:58 00:00 2024-03-31 2024-03-31T02:30:00
    +02:00 Z 9999-12-31 0001-01-01 +99:99 . 1_0 ٣ # 0.5 1,5 €
"""
TOKENS = st.sampled_from([*WORDS.split(), "\ufeff", "\0", " ", "\t", "\n", "\r\n", "\r"])


@settings(LENIENT, max_examples=400)
@given(
    st.booleans(),
    st.lists(TOKENS, max_size=40).map("".join) | st.text(max_size=40),
    st.sampled_from(
        [{}, {"kind": "regulation"}, {"time_zone": "Europe/Berlin"}, {"gap_policy": "hold", "max_gap_s": 1e9}]
    ),
)
def test_no_text_whatever_breaks_the_reader(write, header, text, options):
    path = write(("time,r\n" if header else "") + text)
    found = [f for f in check_file(path, **options) if f.level == "error"]
    if not found:
        assert np.isfinite(read_trace_file(path, **options).values).all()


@LENIENT
@given(st.binary(max_size=200))
def test_no_bytes_whatever_break_the_reader(write, data):
    path = write(data)
    for prefix in (b"", b"\x1f\x8b", b"PAR1", b"t_s,r\n"):
        path.write_bytes(prefix + data)
        assert isinstance(check_file(path), list)


TIME_CELLS = st.sampled_from(
    """
    0 2 4 6 1e308 -1e308 1e-320 nan inf 24:00:00 23:59:56 23:59:58 00:00:02 2024-03-31 2024-03-31T02:30:00
    2024-03-31T02:00:00 2024-10-27T02:00:00 2024-10-27T02:30:00 2024-10-27T03:00:00+02:00 2024-10-27T03:00:00Z
    2024-03-31T24:00 9999-12-31 0001-01-01 1_0 ٣
    """.split()  # noqa: SIM905
)
VALUE_CELLS = st.sampled_from(["0", "0.5", "", "nan", "inf", "1e308", "x", "1,5", "1_0", "٣"])


@settings(LENIENT, max_examples=300)
@given(
    st.lists(st.tuples(TIME_CELLS | st.just(""), VALUE_CELLS), max_size=6),
    st.sampled_from(
        [
            {},
            {"kind": "power", "unit": "MW"},
            {"time_zone": "Europe/Berlin"},
            {"gap_policy": "interpolate", "max_gap_s": 1e300},
        ]
    ),
)
def test_no_mixture_of_cells_breaks_the_reader(write, rows, options):
    path = write("time;r\n" + "".join(f"{time};{value}\n" for time, value in rows))
    if not [f for f in check_file(path, **options) if f.level == "error"]:
        assert np.isfinite(read_trace_file(path, **options).values).all()

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wattgym import files
from wattgym.errors import UserError
from wattgym.traces import importers, list_traces, load_trace, split_windows, store
from wattgym.traces.catalogue import find_trace
from wattgym.traces.importers import import_google_power, import_pjm_regulation
from wattgym.traces.table import read_trace_file

DAY_S = 86_400


@pytest.fixture
def out(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.setenv("WATTGYM_DATA", str(folder))
    return folder


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*")) if folder.exists() else []


def google_frame(bad=(), rows=8928):
    phase = np.arange(rows)
    return pd.DataFrame(
        {
            "time": 600_000_000 + 300_000_000 * phase,
            "cell": "a",
            "pdu": "pdu6",
            "measured_power_util": (0.7 + 0.05 * np.sin(phase / 45)).round(6),
            "production_power_util": (0.5 + 0.05 * np.cos(phase / 45)).round(6),
            "bad_measurement_data": np.isin(phase, bad),
            "bad_production_power_data": False,
        }
    )


def write_google(path, frame):
    path.write_bytes(gzip.compress(frame.to_csv(index=False).encode()))
    return path


def test_google_domain_imports_and_is_listed(tmp_path, out):
    frame = google_frame()
    ids = import_google_power(write_google(tmp_path / "cella_pdu6.csv.gz", frame), out)
    assert ids == ["power-util/google2019-cella-pdu6-measured", "power-util/google2019-cella-pdu6-production"]
    assert left_in(out) == ["google2019-cella-pdu6.parquet", "google2019-cella-pdu6.trace.yaml"]
    assert set(ids) <= {entry.id for entry in list_traces(kind="power_utilisation")}
    for trace_id, column in zip(ids, ("measured_power_util", "production_power_util"), strict=True):
        trace = load_trace(trace_id)
        np.testing.assert_array_equal(trace.values, frame[column])
        assert (trace.interval_s, trace.start_s, trace.end_s) == (300, 0, 31 * DAY_S)
        assert trace.meta["starts"] == "2019-05-01T00:00:00"
        # The same weeks as the shipped domains of that cell, so no week is in two splits.
        for split in ("train", "validation", "test"):
            assert split_windows(trace_id, split) == split_windows("power-util/google-cella-pdu6", split)


def test_google_rows_flagged_true_are_missing(tmp_path, out):
    frame = google_frame(bad=(100, 101))
    frame.loc[[100, 101], "measured_power_util"] = 0.0
    path = write_google(tmp_path / "a.csv.gz", frame)
    with pytest.raises(UserError, match="2 missing from sample 100"):
        import_google_power(path, out)
    assert left_in(out) == []
    ids = import_google_power(path, out, gap_policy="interpolate", max_gap_s=900)
    trace = load_trace(ids[0])
    before, after = frame["measured_power_util"][99], frame["measured_power_util"][102]
    np.testing.assert_allclose(
        trace.values[100:102], [before + (after - before) / 3, before + (after - before) * 2 / 3]
    )
    assert trace.meta["measured_filled_samples"] == 2
    assert trace.meta["import_gap_policy"] == "interpolate"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="bad_measurement_data"), "no column bad_measurement_data"),
        (lambda f: f.iloc[:5000], "5000 rows, the month has 8928"),
        (lambda f: google_frame(rows=9000), "8929 rows, the month has 8928"),
        (lambda f: f.iloc[1:], "line 2, column 'time': 900000000, expected 600000000"),
        (lambda f: f.iloc[::-1], "line 2, column 'time'"),
        (lambda f: f.assign(time=f["time"].replace(900_000_000, 600_000_000)), "line 3, column 'time'"),
        (lambda f: f.assign(measured_power_util=f["measured_power_util"] * 100), r"line 2, .*70 is outside \[0, 1\]"),
        (lambda f: f.assign(bad_measurement_data="maybe"), "'maybe' is neither true nor false"),
        (lambda f: f.assign(production_power_util="x"), "'x' is not a finite number"),
        (lambda f: f.assign(pdu=["pdu6", "pdu7"] * 4464), "2 power domains"),
        (lambda f: f.assign(pdu="../../etc"), "not names of a power domain"),
    ],
)
def test_what_is_no_google_domain_is_refused(tmp_path, out, change, message):
    path = write_google(tmp_path / "a.csv.gz", change(google_frame()))
    with pytest.raises(UserError, match=message):
        import_google_power(path, out)
    assert left_in(out) == []


def test_a_cut_download_is_refused(tmp_path, out):
    path = write_google(tmp_path / "a.csv.gz", google_frame())
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(UserError, match="cannot be read"):
        import_google_power(path, out)
    with pytest.raises(UserError, match="cannot be read"):
        import_google_power(tmp_path / "none.csv.gz", out)
    assert left_in(out) == []


TIMES = [f"{t // 3600:02}:{t // 60 % 60:02}:{t % 60:02}" for t in range(0, DAY_S, 2)]


def pjm_frame(days, end_row=True, scale=0.9):
    position = np.arange(43_200 + end_row)
    columns = {"": [*TIMES, "24:00:00"] if end_row else TIMES}
    for number, day in enumerate(days):
        columns[day] = (scale * np.sin(position / 300 + number)).round(6)
    return pd.DataFrame(columns)


@pytest.mark.parametrize("end_row", [True, False])
def test_pjm_sheet_as_csv(tmp_path, out, end_row):
    frame = pjm_frame(["1/17/2017", "1/19/2017", "1/21/2017", "1/31/2017"], end_row)
    path = tmp_path / "01 2017 Dynamic.csv"
    frame.to_csv(path, index=False)
    ids = import_pjm_regulation(path, out)
    assert ids == [f"regulation/pjm-regd-day-2017-01-{day}" for day in (17, 19, 21, 31)]
    assert [list(find_trace(i).splits) for i in ids] == [["train"], [], ["validation"], ["test"]]
    trace = load_trace(ids[2])
    np.testing.assert_array_equal(trace.values, frame["1/21/2017"][:43_200])
    assert (trace.interval_s, trace.end_s, trace.meta["starts"]) == (2, DAY_S, "2017-01-21T00:00:00")


def test_pjm_csv_needs_to_know_the_signal_and_keeps_shipped_test_days_apart(tmp_path, out):
    path = tmp_path / "08 2017.csv"
    pjm_frame(["8/1/2017", "8/2/2017", "8/3/2017"]).to_csv(path, index=False)
    with pytest.raises(UserError, match="--signal regd or --signal rega"):
        import_pjm_regulation(path, out)
    with pytest.raises(UserError, match="signals: regd, rega"):
        import_pjm_regulation(path, out, signal="RegA")
    ids = import_pjm_regulation(path, out, signal="rega")
    assert [list(find_trace(i).splits) for i in ids] == [[], ["test"], ["train"]]


def test_pjm_workbook(tmp_path, out):
    openpyxl = pytest.importorskip("openpyxl")
    from datetime import datetime, time, timedelta

    book = openpyxl.Workbook(write_only=True)
    for sheet, scale in (("Dynamic", 0.9), ("Traditional", 0.4)):
        page = book.create_sheet(sheet)
        page.append([None, datetime(2017, 1, 5)])
        for row in range(43_200):
            page.append([time(row * 2 // 3600, row * 2 // 60 % 60, row * 2 % 60), scale * ((row % 100) / 50 - 1)])
        page.append([timedelta(days=1), 0.0])
    path = tmp_path / "01 2017.xlsx"
    book.save(path)
    ids = import_pjm_regulation(path, out)
    assert ids == ["regulation/pjm-regd-day-2017-01-05", "regulation/pjm-rega-day-2017-01-05"]
    assert load_trace(ids[0]).values[:2] == pytest.approx([-0.9, -0.882])
    assert load_trace(ids[1]).values[0] == pytest.approx(-0.4)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match="not readable as a workbook"):
        import_pjm_regulation(path, out, force=True)


def test_a_workbook_without_openpyxl_names_the_extra(tmp_path, out, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    path = tmp_path / "a.xlsx"
    path.write_bytes(b"PK")
    with pytest.raises(UserError, match=r"pip install 'wattgym\[excel\]'"):
        import_pjm_regulation(path, out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.iloc[:100], "100 rows, a day has 43200"),
        (lambda f: f.drop(index=[5]), "line 7: the time is '00:00:12', expected 00:00:10"),
        (lambda f: f.assign(**{"1/2/2017": f["1/2/2017"].where(f.index != 7)}), "1 missing from sample 7"),
        (lambda f: f.assign(**{"1/2/2017": f["1/2/2017"] * 2}), "outside"),
        (lambda f: f.rename(columns={"1/2/2017": "Tuesday"}), "'Tuesday' is not a day"),
        (lambda f: f.rename(columns={"1/2/2017": "2/2/2017"}), "different days of one month"),
        (lambda f: f[[""]], "needs a column of times"),
    ],
)
def test_what_is_no_pjm_sheet_is_refused(tmp_path, out, change, message):
    path = tmp_path / "Dynamic.csv"
    change(pjm_frame(["1/1/2017", "1/2/2017"])).to_csv(path, index=False)
    with pytest.raises(UserError, match=message):
        import_pjm_regulation(path, out)
    assert left_in(out) == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=60), st.sampled_from([0.1, 1.0, 2.0, 300.0]), st.integers(-50, 50)
)
def test_a_series_survives_import_bit_for_bit(tmp_path, out, values, interval_s, start_s):
    path = tmp_path / "a.csv"
    path.write_text("t_s,r\n" + "".join(f"{start_s + i * interval_s!r},{v!r}\n" for i, v in enumerate(values)))
    trace = read_trace_file(path, kind="regulation")
    store.store_trace(trace, "my/trace", out, split=None, licence="CC0-1.0", force=True)
    loaded = load_trace("my/trace")
    np.testing.assert_array_equal(loaded.values, values)
    assert (loaded.interval_s, loaded.start_s, loaded.kind) == (trace.interval_s, trace.start_s, "regulation")
    assert loaded.meta["licence"] == "CC0-1.0"
    counts = np.zeros(len(values), dtype=int)
    for split in find_trace("my/trace").splits:
        for first_s, end_s in split_windows("my/trace", split):
            part = loaded.window(first_s, end_s - first_s)
            first = round((part.start_s - loaded.start_s) / interval_s)
            counts[first : first + part.values.size] += 1
    assert counts.max() == 1


def test_default_splits_of_a_hundred_samples(tmp_path, out):
    path = tmp_path / "a.csv"
    path.write_text("t_s,r\n" + "".join(f"{2 * i},0\n" for i in range(100)))
    trace = read_trace_file(path, kind="regulation")
    assert store.default_splits(trace) == {"train": [(0, 120)], "validation": [(124, 160)], "test": [(164, 200)]}
    store.store_trace(trace, "x", out, split="test", licence="", force=False)
    assert split_windows("x", "test") == [(0, 200)]
    assert list(find_trace("x").splits) == ["test"]


def small_trace(tmp_path):
    path = tmp_path / "small.csv"
    path.write_text("t_s,r\n0,0\n2,0\n4,0\n")
    return read_trace_file(path, kind="regulation")


def test_ids_are_checked_and_imports_not_overwritten(tmp_path, out):
    trace = small_trace(tmp_path)
    options = {"split": None, "licence": "", "force": False}
    for bad in ("", "../x", "a//b", "a b", "/a"):
        with pytest.raises(UserError, match="is not a trace id"):
            store.store_trace(trace, bad, out, **options)
    with pytest.raises(UserError, match="is taken by"):
        store.store_trace(trace, "frequency/day-1s", out, **options)
    with pytest.raises(UserError, match="splits: train, validation, test"):
        store.store_trace(trace, "mine", out, split="dev", licence="", force=False)
    assert left_in(out) == []
    store.store_trace(trace, "mine", out, **options)
    with pytest.raises(UserError, match="--force"):
        store.store_trace(trace, "mine", out, **options)
    store.store_trace(trace, "mine", out, **{**options, "force": True})
    assert store.default_id(Path("/x/My File (2).csv.gz")) == "imported/my-file-2"


@pytest.mark.parametrize("failing", ["to_parquet", "sidecar"])
def test_a_full_disk_leaves_nothing(tmp_path, out, monkeypatch, failing):
    trace = small_trace(tmp_path)
    real = files.flush

    def no_space(path):
        if (path.suffix == ".parquet") == (failing == "to_parquet") and path.is_file():
            raise OSError(28, "No space left on device")
        real(path)

    monkeypatch.setattr(files, "flush", no_space)
    with pytest.raises(UserError, match="No space left on device"):
        store.store_trace(trace, "mine", out, split=None, licence="", force=False)
    assert left_in(out) == []


def test_a_write_the_system_really_refuses_leaves_nothing(tmp_path, out):
    path = write_google(tmp_path / "a.csv.gz", google_frame())
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from wattgym.errors import UserError; from wattgym.traces.importers import import_google_power\n"
        "import pandas, pyarrow.parquet\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: import_google_power(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except UserError as error: sys.stdout.write(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path, out], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert "\n" not in done.stdout
    assert left_in(out) == []


def test_an_unwritable_folder_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("WATTGYM_DATA", raising=False)
    trace = small_trace(tmp_path)
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(UserError, match="cannot write"):
        store.store_trace(trace, "mine", blocker / "below", split=None, licence="", force=False)
    assert blocker.read_text() == ""
    if os.geteuid() != 0:  # root writes anywhere
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        with pytest.raises(UserError, match="cannot write"):
            store.store_trace(trace, "mine", locked, split=None, licence="", force=False)
        assert left_in(locked) == []


def test_a_failed_second_sheet_keeps_the_first_from_being_written(tmp_path, out, monkeypatch):
    good, bad = pjm_frame(["1/1/2017"]), pjm_frame(["1/1/2017"], scale=3.0)
    monkeypatch.setattr(importers, "_pjm_sheets", lambda path, signal: iter([("regd", good), ("rega", bad)]))
    with pytest.raises(UserError, match="outside"):
        import_pjm_regulation(tmp_path / "x.xlsx", out)
    assert left_in(out) == []


def test_import_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("WATTGYM_DATA", raising=False)
    assert store.import_folder() == Path("wattgym-data")
    monkeypatch.setenv("WATTGYM_DATA", str(tmp_path))
    assert store.import_folder() == tmp_path

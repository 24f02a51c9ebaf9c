import csv
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from wattgym import traces
from wattgym.errors import UserError
from wattgym.traces import catalogue, data_path, list_tables, list_traces, load_table, load_trace, split_windows
from wattgym.traces.kinds import KINDS
from wattgym.traces.model import Catalogue, find_overlap

ROOT = catalogue.data_root()
SPLITS = ("train", "validation", "test")
HOUR_S, DAY_S = 3600, 86_400


@pytest.fixture(autouse=True)
def _no_imports(monkeypatch):
    monkeypatch.delenv(catalogue.DATA_VARIABLE, raising=False)


def test_manifest_matches_every_file():
    with (ROOT / "MANIFEST.csv").open(newline="") as handle:
        listed = {row["path"]: row for row in csv.DictReader(handle)}
    present = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*")
        if path.is_file() and path.parent not in (ROOT, ROOT / "LICENSES")
    }
    assert set(listed) == present
    for name, row in listed.items():
        data = (ROOT / name).read_bytes()
        assert len(data) == int(row["bytes"]), name
        assert hashlib.sha256(data).hexdigest() == row["sha256"], name
    for table in list_tables():
        assert len(load_table(table.name)) == int(listed[table.file]["rows"]), table.name


def test_catalogue_manifest_readme_and_licences_name_the_same_files():
    with (ROOT / "MANIFEST.csv").open(newline="") as handle:
        listed = {row["path"] for row in csv.DictReader(handle)}
    assert {table.file for table in list_tables()} == listed
    readme = (ROOT / "README.md").read_text()
    for table in list_tables():
        stem = table.name.split("/")[1]
        assert stem in readme or (stem.startswith("carbon_intensity") and "carbon_intensity_" in readme), table.name
        assert table.licence_file is None or (ROOT / table.licence_file).is_file()


def test_data_folder_is_small_and_holds_no_code():
    files = [path for path in ROOT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 9e6
    assert not [path for path in files if path.suffix in (".py", ".pyc", ".so")]


@pytest.mark.parametrize("entry", [e for e in list_traces() if e.is_series], ids=lambda e: e.id)
def test_every_trace_loads_in_its_kind_and_covers_its_windows(entry):
    trace = load_trace(entry.id)
    kind = KINDS[entry.kind]
    assert (trace.kind, trace.unit, trace.interval_s) == (entry.kind, kind.unit, entry.interval_s)
    assert trace.values.min() >= kind.low
    assert trace.values.max() <= kind.high
    assert entry.splits, "every shipped trace belongs to a split"
    for split in entry.splits:
        for start_s, end_s in split_windows(entry.id, split):
            # `window` refuses what the trace does not cover.
            assert trace.window(start_s, end_s - start_s).values.size > 0
    assert trace.meta["source"]
    assert trace.meta["licence"]


@pytest.mark.parametrize("entry", list_traces(), ids=lambda e: e.id)
def test_no_sample_is_in_two_splits(entry):
    assert find_overlap(entry.splits) is None
    if not entry.is_series:
        tables = [load_table(entry.id, split) for split in entry.splits]
        assert sum(map(len, tables)) == len(load_table(entry.id))
        return
    trace = load_trace(entry.id)
    owner = np.zeros(trace.values.size, dtype=int)
    for split in entry.splits:
        for start_s, end_s in split_windows(entry.id, split):
            part = trace.window(start_s, end_s - start_s)
            first = round((part.start_s - trace.start_s) / trace.interval_s)
            owner[first : first + part.values.size] += 1
    assert owner.max() == 1


def test_autocorrelated_series_keep_a_hole_between_splits():
    for entry in list_traces():
        windows = sorted(
            (start, end, split)
            for split in entry.splits
            if entry.splits[split] != "all" and entry.is_series
            for start, end in entry.splits[split]
        )
        for (_, end, one), (start, _, other) in itertools.pairwise(windows):
            if one != other:
                assert start - end >= 15 * 60, entry.id


def test_find_overlap_sees_overlaps_empty_windows_and_the_whole_trace():
    assert find_overlap({"train": [(0, 10)], "test": [(10, 20)]}) is None
    assert "train" in find_overlap({"train": [(0, 10)], "test": [(9, 20)]})
    assert "empty" in find_overlap({"train": [(5, 5)]})
    assert find_overlap({"train": "all", "test": [(0, 1)]}) is not None
    assert find_overlap({"train": "all", "test": "all"}) is not None
    assert find_overlap({"train": [(0, 10), (5, 6)]}) is not None


def test_splits_of_the_regulation_signals():
    assert split_windows("regulation/pjm-rega-2017-08-01", "train") == [(0, 5 * HOUR_S)]
    assert split_windows("regulation/pjm-rega-2017-08-01", "validation") == [(5.25 * HOUR_S, 8 * HOUR_S)]
    assert split_windows("regulation/pjm-rega-2017-08-02", "test") == [(0, 8 * HOUR_S)]
    assert split_windows("regulation/pjm-regd-test-wave", "test") == [(0, 2402)]
    assert split_windows("frequency/day-1s", "validation") == [(14.5 * HOUR_S, 18 * HOUR_S)]
    with pytest.raises(UserError, match="no train split; it has: test"):
        split_windows("regulation/pjm-regd-test-wave", "train")


def test_reserve_events_split_by_year():
    years = {split: set(load_table("reserve-events/pjm-synchronized", split)["start_ept"].dt.year) for split in SPLITS}
    assert max(years["train"]) == 2012
    assert years["validation"] == {2013, 2014}
    assert min(years["test"]) == 2015
    events = load_table("reserve-events/pjm-synchronized")
    assert len(events) == 893
    assert events["duration_min"].median() == 9
    # 2002-12-02 13:04 is 335 days, 13 hours and 4 minutes into 2002.
    assert events["t_s"].iloc[0] == 335 * DAY_S + 13 * HOUR_S + 4 * 60
    with pytest.raises(UserError, match=r"load_table\('reserve-events/pjm-synchronized'\)"):
        load_trace("reserve-events/pjm-synchronized")


def test_solar_splits_by_site_and_year():
    assert split_windows("solar/csg-site1", "validation") == [(365 * DAY_S, 731 * DAY_S)]
    assert set(catalogue.find_trace("solar/csg-site3").splits) == {"test"}
    site5 = load_trace("solar/csg-site5")
    assert site5.meta["capacity_mw"] == 110
    assert site5.meta["filled_samples"] == 46
    assert site5.meta["gap_policy"] == "interpolate"
    # 2019-05-29 (day 148 from 0) holds 36 of the 46 filled samples and is in no window.
    for start_s, end_s in split_windows("solar/csg-site5", "test"):
        assert end_s <= 148 * DAY_S or start_s >= 149 * DAY_S


def test_known_values():
    regd = load_trace("regulation/pjm-regd-test-wave")
    assert regd.values.size == 1201
    np.testing.assert_allclose(regd.values[:2], [0.0, 0.056169])
    assert np.abs(np.diff(regd.values)).sum() == pytest.approx(10.8, abs=0.05)
    assert regd.values.mean() == pytest.approx(0.07, abs=0.005)
    utilisation = load_trace("machine-util/google-cpu")
    assert utilisation.values[0] == pytest.approx(0.441616)
    run = load_trace("llm-power/lora-8xh100-run9-ac")
    assert run.start_s == pytest.approx(-55.131)
    assert run.meta["gpus"] == 8
    assert len(list_traces(kind="power_utilisation")) == 5


def test_runs_of_one_benchmark_are_in_different_splits():
    splits = [list(catalogue.find_trace(f"llm-power/lora-8xh100-run{run}-ac").splits) for run in range(10)]
    assert splits == [["train"]] * 6 + [["validation"]] * 2 + [["test"]] * 2


def test_reading_outside_the_range_states_it():
    trace = load_trace("regulation/pjm-rega-2017-08-01")
    with pytest.raises(UserError, match=r"covers 0 s to 28800 s .*28800 s is outside"):
        trace.at(28_800)
    with pytest.raises(UserError, match="not inside"):
        trace.window(28_000, 1_000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_trace("regulation/pjm-regd-test-wav"), "did you mean regulation/pjm-regd-test-wave"),
        (lambda: load_trace("zzz"), "wattgym traces list"),
        (lambda: list_traces(kind="regulatoin"), "kinds: regulation"),
        (lambda: list_traces(split="dev"), "splits: train, validation, test"),
        (lambda: split_windows("frequency/day-1s", "dev"), "splits: train, validation, test"),
        (lambda: load_table("gpu_power/zeus_power_limit"), "did you mean gpu_power/zeus_power_limit_batch_size"),
        (lambda: load_table("gpu_power/zeus_power_limit_batch_size", "train"), "has no splits"),
        (lambda: data_path("nothing.csv"), "no data file"),
        (lambda: data_path("../pyproject.toml"), "no data file"),
    ],
)
def test_wrong_names_are_user_errors(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_filters_of_the_list():
    tests = list_traces(kind="regulation", split="test")
    assert [e.id for e in tests] == ["regulation/pjm-regd-test-wave", "regulation/pjm-rega-2017-08-02"]


def copy_of_data(folder: Path, **changes):
    """A data folder with the RegD wave only; `changes` replace keys of its catalogue entry."""
    (folder / "regulation").mkdir(parents=True)
    name = "regulation/pjm_regd_test_wave_40min_2s.csv.gz"
    shutil.copy(ROOT / name, folder / name)
    entry = {
        "file": name, "licence": "MIT", "source": "test", "kind": "regulation", "unit": "1", "interval_s": 2,
        "time": {"column": "t_s", "format": "seconds"},
        "traces": {"a/b": {"column": "regd", "splits": {"test": "all"}}},
    }  # fmt: skip
    entry.update(changes)
    (folder / "catalogue.yaml").write_text(yaml.safe_dump({"files": [entry]}))
    return folder


def test_data_are_found_beside_the_package_then_at_the_root_then_by_the_variable(tmp_path, monkeypatch):
    package = tmp_path / "site" / "wattgym"
    package.mkdir(parents=True)
    monkeypatch.setattr(catalogue.wattgym, "__file__", str(package / "__init__.py"))
    # Hugging Face's package of the same name lies where a checkout has its data; it is not taken for them.
    (tmp_path / "site" / "datasets").mkdir()
    with pytest.raises(UserError, match="set WATTGYM_DATA"):
        catalogue.data_root()
    named = copy_of_data(tmp_path / "named")
    monkeypatch.setenv("WATTGYM_DATA", str(named))
    assert catalogue.data_root() == named
    assert load_trace("a/b").values.size == 1201
    shutil.rmtree(tmp_path / "site" / "datasets")
    checkout = copy_of_data(tmp_path / "site" / "datasets")
    assert catalogue.data_root() == checkout
    wheel = copy_of_data(package / "datasets")
    assert catalogue.data_root() == wheel


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": "MW"}, "kept in 1, not MW"),
        ({"kind": "regulatoin"}, "unknown kind"),
        ({"intervall_s": 2}, "did you mean 'interval_s'"),
        ({"interval_s": 1}, "expected 1 s"),
        ({"scale": 2}, r"lies within \[-1, 1\]"),
        ({"file": "regulation/none.csv"}, "not in"),
        ({"time": {"column": "t", "format": "seconds"}}, "no column 't'; it has: t_s, regd"),
        ({"time": {"format": "seconds"}}, "a time column is needed"),
        ({"traces": {"a/b": {"column": "regd", "where": {"regd": 7}}}}, "no row with"),
        ({"traces": {"a/b": {"column": "regd", "splits": {"test": [[0, 9]], "train": [[8, 20]]}}}}, "window"),
    ],
)
def test_a_wrong_catalogue_is_named(tmp_path, monkeypatch, changes, message):
    folder = copy_of_data(tmp_path / "data", **changes)
    monkeypatch.setattr(catalogue.wattgym, "__file__", str(tmp_path / "nowhere" / "wattgym" / "__init__.py"))
    monkeypatch.setenv("WATTGYM_DATA", str(folder))
    with pytest.raises(UserError, match=message):
        load_trace("a/b")


def test_a_damaged_data_file_is_a_user_error(tmp_path, monkeypatch):
    folder = copy_of_data(tmp_path / "data")
    file = folder / "regulation" / "pjm_regd_test_wave_40min_2s.csv.gz"
    file.write_bytes(file.read_bytes()[:1000])
    monkeypatch.setattr(catalogue.wattgym, "__file__", str(tmp_path / "nowhere" / "wattgym" / "__init__.py"))
    monkeypatch.setenv("WATTGYM_DATA", str(folder))
    with pytest.raises(UserError, match="cannot be read"):
        load_trace("a/b")


def test_a_variable_that_names_no_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WATTGYM_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="not a folder"):
        list_traces()


def test_catalogue_yaml_survives_its_own_form():
    model = catalogue.load_config(Catalogue, ROOT / "catalogue.yaml")
    assert Catalogue.model_validate(model.model_dump(mode="json", exclude_defaults=True)) == model


def test_listing_traces_needs_no_pandas():
    code = (
        "import sys; from wattgym.traces import list_traces; import wattgym.cli.traces; list_traces();"
        "assert not {'pandas', 'pyarrow', 'matplotlib', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "WATTGYM_DATA": ""})


def test_public_names_exist():
    assert all(hasattr(traces, name) for name in traces.__all__)

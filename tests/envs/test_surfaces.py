"""Response surfaces against the published measurements, and the properties every surface must have."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.envs.emulator.surfaces import SPLITS, load_surfaces, surface_library
from wattgym.errors import UserError

ALL = load_surfaces()
SURFACES = st.sampled_from(ALL)


def energy_per_work(surface):
    return surface.power_w / surface.throughput / surface.power_w[-1]


def at(surface, caps_w):
    return np.searchsorted(surface.caps_w, caps_w)


def test_v100_bert_squad_follows_the_zeus_table():
    surface = surface_library().get("v100/bert_base_squad/b56")
    assert surface.caps_w.tolist() == [100, 125, 150, 175, 200, 225, 250]
    assert surface.throughput.round(2).tolist() == [0.47, 0.60, 0.76, 0.88, 0.94, 0.98, 1.0]
    assert energy_per_work(surface).round(2).tolist() == [0.96, 0.88, 0.85, 0.85, 0.89, 0.95, 1.0]
    assert surface.power_w[-1] == pytest.approx(227, abs=0.5)
    ratio = (surface.power_w / surface.caps_w)[at(surface, [150, 200])]
    assert ratio == pytest.approx([0.977, 0.944], abs=0.003)


def test_v100_resnet50_at_60_70_80_percent_cap():
    surface = surface_library().get("v100/resnet50/b360")
    assert surface.throughput[at(surface, [100, 125, 150, 175, 200])].round(2).tolist() == [
        0.52, 0.68, 0.84, 0.91, 0.95,
    ]  # fmt: skip


def test_a40_bert_squad_follows_the_zeus_table():
    surface = surface_library().get("a40/bert_base_squad/b72")
    assert surface.throughput.round(2).tolist() == [0.26, 0.37, 0.54, 0.73, 0.91, 0.94, 0.98, 1.0, 1.0]
    assert energy_per_work(surface).round(2).tolist() == [1.62, 1.27, 1.02, 0.86, 0.78, 0.84, 0.88, 0.95, 1.0]
    assert surface.power_w[-1] == pytest.approx(266, abs=0.5)


def test_a40_cannot_hold_its_lowest_cap():
    for surface_id in ("a40/bert_base_squad/b72", "a40/resnet50/b360", "a40/resnet50/b512", "a40/deepspeech2/b192"):
        assert 106.9 <= surface_library().get(surface_id).power_w[0] <= 119.5  # published: 107 to 119 W
    a40, v100 = surface_library().envelope("a40"), surface_library().envelope("v100")
    assert not a40.floor_held
    assert v100.floor_held
    assert (a40.cap_min_w, a40.cap_max_w, v100.cap_min_w, v100.cap_max_w) == (100, 300, 100, 250)


def test_perseus_surface_is_per_gpu_and_measured_over_the_whole_job():
    surface = surface_library().get("a40/gpt3_2.7b/b1024")
    assert surface.n_gpus == 8
    assert (surface.cap_min_w, surface.cap_max_w) == (125, 300)
    # 6.7933 samples/s at 300 W and 5.7935 at 200 W; 260.65 W and 183.19 W per GPU.
    assert surface.samples_per_s_full == pytest.approx(6.7933)
    power, throughput = surface.tabulate([200.0, 300.0])
    assert power == pytest.approx([183.19, 260.65])
    assert throughput == pytest.approx([5.7935 / 6.7933, 1.0])


def test_a_job_fastest_below_the_top_cap_is_kept_as_measured():
    surface = surface_library().get("a40/t5_3b/b128")
    assert surface.caps_w[surface.throughput.argmax()] == 200
    assert surface.throughput.max() == pytest.approx(5.3039 / 5.1097)


def test_assumed_boards_say_so_and_carry_their_band():
    compute = surface_library().get("h100-sxm/assumed/compute_bound")
    assert not compute.measured
    assert compute.caps_w / 700 == pytest.approx([0.5, 0.6, 0.7, 0.85, 1.0])
    assert compute.throughput.tolist() == [0.62, 0.78, 0.88, 0.96, 1.0]
    assert compute.throughput_sd.tolist() == [0.10, 0.07, 0.05, 0.02, 0.0]
    assert compute.power_w[-1] == 620
    memory = surface_library().get("h200-sxm/assumed/memory_bound")
    assert memory.throughput.tolist() == [0.85, 0.93, 0.97, 0.99, 1.0]
    assert {s.gpu for s in ALL if not s.measured} == {"a100-sxm", "h100-sxm", "h200-sxm"}


def test_jobs_that_ignore_caps_are_flagged():
    assert not any(s.cap_sensitive for s in ALL if s.workload == "ncf")
    assert all(s.cap_sensitive for s in ALL if s.source.startswith("Perseus"))
    for surface in ALL:
        if surface.cap_sensitive:
            assert surface.power_w[0] < 0.98 * surface.power_w[-1]
            assert surface.throughput[0] < 0.95 * surface.throughput.max()


def test_only_disturbed_timings_are_dropped_and_every_drop_is_named():
    library = surface_library()
    assert len(library.dropped_rows) == 6
    assert library.dropped_surfaces == ("rtx6000/ncf/b4",)
    zeus_rows, perseus_rows, rows_of_dropped_surface = 1609, 78, 2
    kept = sum(s.caps_w.size for s in ALL if s.measured)
    assert kept == zeus_rows + perseus_rows - rows_of_dropped_surface - len(library.dropped_rows)


def test_held_out_plants_share_no_workload_or_gpu_with_training():
    by_split = {split: surface_library().select(split=split) for split in SPLITS}
    assert all(by_split.values())
    assert {s.gpu for s in by_split["test"]} >= {"rtx6000", "v100", "a40", "a100-pcie-80gb"}
    order = {split: i for i, split in enumerate(SPLITS)}
    trained_workloads = {s.workload for s in by_split["train"]}
    trained_gpus = {s.gpu for s in by_split["train"]}
    for surface in by_split["validation"] + by_split["test"]:
        assert surface.workload not in trained_workloads or surface.gpu not in trained_gpus
    for surface in ALL:
        same_gpu = [order[s.split] for s in ALL if s.gpu == surface.gpu]
        same_workload = [order[s.split] for s in ALL if s.workload == surface.workload]
        assert order[surface.split] == max(min(same_gpu), min(same_workload))


def test_every_surface_is_positive_finite_and_unique():
    assert len({s.id for s in ALL}) == len(ALL)
    for surface in ALL:
        for values in (surface.caps_w, surface.power_w, surface.throughput):
            assert np.isfinite(values).all()
            assert (values > 0).all()
        assert surface.throughput[-1] == 1
        assert surface.caps_w.size >= 4
        assert surface.power_w.max() < 1.02 * surface.cap_max_w


@given(SURFACES)
def test_interpolation_passes_through_the_points(surface):
    power, throughput = surface.tabulate(surface.caps_w)
    np.testing.assert_allclose(power, surface.power_w)
    np.testing.assert_allclose(throughput, surface.throughput)


@given(SURFACES, st.floats(0, 1))
def test_interpolation_stays_between_neighbours(surface, position):
    cap = surface.cap_min_w + position * (surface.cap_max_w - surface.cap_min_w)
    right = int(np.clip(np.searchsorted(surface.caps_w, cap), 1, surface.caps_w.size - 1))
    for value, points in zip(surface.tabulate(cap), (surface.power_w, surface.throughput), strict=True):
        low, high = sorted(points[right - 1 : right + 1])
        assert low - 1e-9 <= value <= high + 1e-9


@given(SURFACES, st.floats(0.01, 1000), st.booleans())
def test_nothing_is_extrapolated(surface, beyond_w, above):
    cap = surface.cap_max_w + beyond_w if above else surface.cap_min_w - beyond_w
    with pytest.raises(UserError, match="is outside"):
        surface.tabulate([surface.cap_max_w, cap])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"caps_w": [100, 100, 150, 200]}, "ascending caps"),
        ({"caps_w": [100, 150, 200]}, "at least 4"),
        ({"power_w": [90, np.nan, 140, 190]}, "power_w must be 4 positive finite"),
        ({"throughput": [0.0, 0.5, 0.8, 1.0]}, "throughput must be"),
        ({"throughput_sd": [-0.1, 0, 0, 0]}, "throughput_sd must be"),
    ],
)
def test_an_impossible_surface_is_refused(change, message):
    good = dataclasses.replace(
        ALL[0], caps_w=[100, 125, 150, 200], power_w=[90, 110, 140, 190],
        throughput=[0.4, 0.6, 0.8, 1.0], throughput_sd=[0, 0, 0, 0],
    )  # fmt: skip
    with pytest.raises(UserError, match=message):
        dataclasses.replace(good, **change)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'h100-sxm'"):
        load_surfaces("h100-smx")
    with pytest.raises(UserError, match="unknown workload 'gpt4'"):
        surface_library().select(workload="gpt4")

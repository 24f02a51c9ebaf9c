"""The emulated plant against published measurements, and what limits, phases and randomisation do to it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.draw import GAIN_CLIP
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.emulator.jitter import BLOCK
from wattgym.envs.emulator.library import RANGED
from wattgym.envs.emulator.phases import load_phase_families
from wattgym.envs.emulator.surfaces import surface_library
from wattgym.envs.plant import Command, Phase
from wattgym.errors import UserError
from wattgym.hw.limits import Decision
from wattgym.traces import load_table

OPEN = {"floor_fraction": 0.0, "raise_fraction_per_s": 50.0, "dead_band_fraction": 0.0, "dead_band_w": 0.0}
CERTAIN = {"command_loss": 0.0, "control_delay_periods": (0, 0)}


def build(*, rules=None, period_s=2.0, **site):
    return PowerShapingConfig.model_validate(
        {
            "site": {**CERTAIN, **site},
            "rules": {**OPEN, **(rules or {})},
            "period_s": period_s,
            "episode_s": 600 * period_s,
        }
    )


def started(config, *, batch=1, seed=0):
    emulator = Emulator(config)
    emulator.reset([np.random.default_rng(seed + i) for i in range(batch)])
    return emulator


def run(emulator, limit_w, ticks):
    """Telemetry of some ticks under a constant limit per GPU (or one array for all jobs)."""
    shape = emulator.spec.n_gpus.shape
    telemetry = []
    for _ in range(ticks):
        emulator.apply(Command(np.broadcast_to(np.asarray(limit_w, dtype=float), shape)))
        got = emulator.advance()
        telemetry.append(replace(got, phase=got.phase.copy()))  # the plant reuses this array
    return telemetry


def computing(telemetry):
    """Jobs that computed in the whole of the last two periods, as far as phases tell."""
    return np.all([t.phase == Phase.COMPUTE for t in telemetry[-3:]], axis=0)


def settled(config, limit_w, *, batch=48):
    """Power per GPU and throughput of jobs that compute, once a limit has settled."""
    emulator = started(config, batch=batch)
    telemetry = run(emulator, limit_w, 6)
    use = computing(telemetry)
    power = np.median(np.stack([t.meter_w for t in telemetry[-2:]]), axis=0) / emulator.spec.n_gpus
    return power[use], telemetry[-1].throughput[use]


@pytest.mark.parametrize(
    ("surface", "limit_w", "relative"),
    [
        ("v100/bert_base_squad/b56", 150.0, 0.76),
        ("v100/bert_base_squad/b56", 175.0, 0.88),
        ("v100/bert_base_squad/b56", 200.0, 0.94),
        ("a40/bert_base_squad/b72", 150.0, 0.54),
        ("a40/bert_base_squad/b72", 175.0, 0.73),
        ("a40/bert_base_squad/b72", 200.0, 0.91),
    ],
)
def test_throughput_under_a_cap_is_the_published_one(surface, limit_w, relative):
    power, throughput = settled(build(surfaces=(surface,), randomise=0.0), limit_w)
    assert throughput.size > 20
    np.testing.assert_allclose(throughput, relative, atol=0.006)
    assert (power <= limit_w).all()


@pytest.mark.parametrize("surface", ["a40/bert_base_squad/b72", "a40/resnet50/b360", "a40/resnet50/b512"])
def test_an_a40_cannot_hold_a_cap_of_100_w(surface):
    power, _ = settled(build(surfaces=(surface,), randomise=0.0), 100.0)
    assert power.size > 20
    assert (power >= 106.9).all()
    assert (power <= 119.5).all()


def test_the_command_rules_keep_policies_away_from_that_floor():
    config = build(surfaces=("a40/bert_base_squad/b72",), randomise=0.0, rules={"floor_fraction": 0.5})
    emulator = started(config)
    (telemetry,) = run(emulator, 100.0, 1)
    assert (telemetry.limit_w == 150.0).all()
    assert (telemetry.decisions == Decision.CLIPPED_LOW).all()


def test_a_v100_draws_the_measured_share_of_a_binding_cap():
    power, _ = settled(build(surfaces=("v100/bert_base_squad/b56",), randomise=0.0), 150.0)
    assert np.median(power) == pytest.approx(0.977 * 150.0, abs=0.5)


def test_a_cap_is_a_ceiling_for_a_job_that_asks_for_less():
    """A checkpoint draws what it draws: a limit above that neither pulls it up nor down."""
    config = build(surfaces=("v100/bert_base_squad/b56",), jobs=64, rules={"floor_fraction": 0.5})
    emulator = started(config, seed=3)
    low, high = emulator.spec.min_limit_w, emulator.spec.max_limit_w
    rest = np.zeros(emulator.spec.n_gpus.shape, dtype=int)  # ticks that a job has spent in one checkpoint
    segment, last, compared = emulator._segment.copy(), run(emulator, high, 1)[-1], 0
    for tick in range(1500):
        telemetry = run(emulator, low if tick % 8 < 4 else high, 1)[-1]
        stays = (telemetry.phase == Phase.CHECKPOINT) & (emulator._segment == segment).reshape(rest.shape)
        rest = np.where(stays, rest + 1, 0)
        same = rest > 2
        np.testing.assert_allclose(telemetry.meter_w[same], last.meter_w[same], rtol=1e-6)
        compared += int(same.sum()) if tick % 4 == 0 else 0
        segment, last = emulator._segment.copy(), telemetry
    assert compared > 100


def test_power_never_exceeds_what_the_limit_allows():
    config = build(jobs=8, rules={"floor_fraction": 0.5})
    emulator = started(config, batch=16)
    spec = emulator.spec
    limit = spec.min_limit_w + 0.3 * (spec.max_limit_w - spec.min_limit_w)
    ceiling = run(emulator, limit, 3) and emulator._ceiling.reshape(spec.n_gpus.shape)
    for telemetry in run(emulator, limit, 300):
        assert (telemetry.meter_w <= ceiling * (1.0 + 1e-6)).all()
    assert (ceiling <= spec.max_limit_w * spec.n_gpus).all()


def first_long_evaluation(emulator, limit_w):
    for tick in itertools.count():
        telemetry = run(emulator, limit_w, 1)[-1]
        if telemetry.phase[0, 0] == Phase.EVALUATE:
            return tick


def test_a_capped_job_reaches_its_evaluation_later_in_proportion_to_its_speed():
    site = {"surfaces": ("v100/bert_base_squad/b56",), "jobs": 1, "phase_families": ("lora_8xh100",), "randomise": 0.0}
    for seed in range(3):
        free = first_long_evaluation(started(build(**site), seed=seed), 250.0)
        capped = first_long_evaluation(started(build(**site), seed=seed), 150.0)
        stop_s = 2.0 * 2  # stalls are not slowed: they and the rounding to whole periods blur the ratio
        assert 0.76 * capped * 2.0 == pytest.approx(free * 2.0, abs=stop_s + 2.0)


def test_the_sequence_of_phases_does_not_depend_on_the_limits():
    config = build(jobs=3, phase_families=("lora_64xh100",))

    def sequence(fraction):
        emulator = started(config, seed=11)
        spec = emulator.spec
        limit = spec.min_limit_w + fraction * (spec.max_limit_w - spec.min_limit_w)
        phases = np.array([t.phase[0] for t in run(emulator, limit, 900)])
        # Stalls shorter than a period may pass unseen between two ticks; evaluations and checkpoints do not.
        seen = [[p for p, _ in itertools.groupby(column)] for column in phases.T]
        return [[p for p in row if p in (Phase.EVALUATE, Phase.CHECKPOINT)] for row in seen]

    for slow, fast in zip(sequence(0.3), sequence(1.0), strict=True):
        assert len(fast) > len(slow) > 5
        assert fast[: len(slow)] == slow


def test_lost_commands_leave_the_previous_limit_in_force():
    config = build(jobs=4, command_loss=0.3, surfaces=("v100/bert_base_squad/b56",))
    emulator = started(config, batch=8)
    last = run(emulator, 250.0, 1)[-1].limit_w
    lost, commands = 0, 0
    for tick in range(200):
        wanted = 150.0 if tick % 2 else 220.0
        limit = run(emulator, wanted, 1)[-1].limit_w
        assert ((limit == wanted) | (limit == last)).all()
        lost += int((limit[last != wanted] != wanted).sum())
        commands += int((last != wanted).sum())
        last = limit
    assert lost / commands == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_commands_act_after_the_configured_number_of_periods(delay):
    config = build(surfaces=("v100/bert_base_squad/b56",), randomise=0.0, control_delay_periods=(delay, delay))
    emulator = started(config, batch=16)
    run(emulator, 250.0, 4)
    telemetry = run(emulator, 125.0, 6)
    use = np.all([t.phase == Phase.COMPUTE for t in telemetry], axis=0)
    power = np.array([(t.meter_w / emulator.spec.n_gpus)[use] for t in telemetry])
    assert use.sum() > 5
    assert (power[delay:] < 135.0).all()
    assert (np.median(power[:delay], axis=1) > 200.0).all()
    assert all((t.limit_w == 125.0).all() for t in telemetry)


def test_a_delay_is_drawn_from_its_range():
    emulator = started(build(jobs=16, control_delay_periods=(1, 3)), batch=16)
    assert set(np.unique(emulator._site.delay)) == {1, 2, 3}


def test_host_power_comes_on_top():
    bare, hosted = (started(build(host_w_per_gpu=w), seed=2) for w in (0.0, 250.0))
    spec = hosted.spec
    np.testing.assert_allclose(spec.host_w, 250.0 * spec.n_gpus.sum(axis=1))
    np.testing.assert_allclose(spec.full_w - bare.spec.full_w, spec.host_w)
    np.testing.assert_allclose(spec.floor_w - bare.spec.floor_w, spec.host_w)
    a, b = run(bare, 200.0, 20), run(hosted, 200.0, 20)
    np.testing.assert_array_equal(a[-1].meter_w, b[-1].meter_w)
    assert (a[-1].host_w == 0.0).all()
    np.testing.assert_array_equal(b[-1].host_w, spec.host_w)


def test_sensor_and_meter_differ_by_the_boards_gain_and_offset():
    config = build(surfaces=("v100/bert_base_squad/b56",), jobs=64)
    emulator = started(config, batch=4, seed=1)
    telemetry = run(emulator, 125.0, 8)
    site, last = emulator._site, telemetry[-1]
    steady = computing(telemetry) & (np.abs(telemetry[-2].meter_w / last.meter_w - 1.0) < 1e-9)
    assert steady.sum() > 100
    expected = site.sensor_gain * last.meter_w + site.sensor_offset_w
    np.testing.assert_allclose(last.sensor_w[steady], expected[steady], rtol=1e-6)
    error = last.sensor_w[steady] / last.meter_w[steady] - 1.0
    assert 0.02 < error.std() < 0.05
    assert (np.abs(site.sensor_gain - 1.0) <= GAIN_CLIP + 1e-12).all()


def test_the_choice_of_reading_changes_what_is_seen_but_not_what_is_drawn():
    runs = [run(started(build(surfaces=("a40/resnet50/b360",), sensor=s)), 200.0, 6) for s in ("instant", "average")]
    np.testing.assert_array_equal(runs[0][0].meter_w, runs[1][0].meter_w)
    assert (runs[0][0].sensor_w != runs[1][0].sensor_w).all()


def test_randomise_zero_pins_every_parameter_of_a_plant():
    config = build(surfaces=("h100-sxm/assumed/compute_bound",), gpus_per_job=(8,), randomise=0.0, jobs=16)
    site = started(config, batch=4)._site
    for row in (*site.actuator, site.sensor_gain, site.sensor_offset_w, site.demand_w):
        assert np.unique(row).size == 1
    assert (site.sensor_gain == 1.0).all()
    assert np.unique(site.tables.speed.reshape(-1, site.grid.size), axis=0).shape[0] == 1
    np.testing.assert_allclose(site.demand_w, site.tables.nominal_w[..., -1])
    binding = site.tables.nominal_w < 0.9 * site.tables.nominal_w[..., -1:]
    np.testing.assert_allclose(site.tables.ceiling_w[binding], site.tables.nominal_w[binding])


def test_randomised_parameters_stay_in_their_ranges_and_use_them():
    config = build(jobs=64)
    emulator = started(config, batch=16)
    site, library = emulator._site, emulator._library
    ranges = library.ranges[:, site.surface]
    for row, drawn in enumerate(site.actuator):
        low, high = ranges[row, ..., 1], ranges[row, ..., 2]
        assert ((drawn >= low - 1e-12) & (drawn <= high + 1e-12)).all(), RANGED[row]
        position = (drawn - low) / np.maximum(high - low, 1e-12)
        assert position.min() < 0.05, RANGED[row]
        assert position.max() > 0.95, RANGED[row]
    assert set(np.unique(site.surface)) == set(range(len(library.surfaces)))
    assert set(np.unique(site.n_gpus)) == {8, 16, 32}
    assert set(np.unique(site.family)) == {0, 1, 2}


def test_half_the_randomisation_is_half_the_spread():
    wide, narrow = (started(build(jobs=32, randomise=r), seed=4)._site for r in (1.0, 0.5))
    centre = started(build(jobs=32, randomise=0.0), seed=4)._site
    np.testing.assert_allclose(narrow.demand_w - centre.demand_w, 0.5 * (wide.demand_w - centre.demand_w), rtol=1e-9)
    np.testing.assert_allclose(
        narrow.actuator - centre.actuator, 0.5 * (wide.actuator - centre.actuator), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(("period_s", "ticks"), [(2.0, 8_000), (60.0, 3_000), (0.2, 2_000)])
def test_long_runs_stay_finite_and_steady(period_s, ticks):
    rules = {"interval_s": 0.2}
    emulator = started(build(jobs=2, rules=rules, period_s=period_s), batch=2, seed=9)
    full = emulator.spec.power_table_w[:, :, -1]
    for telemetry in run(emulator, 200.0, ticks):
        for values in (telemetry.meter_w, telemetry.sensor_w, telemetry.throughput):
            assert np.isfinite(values).all()
        assert (telemetry.meter_w > 0.05 * full).all()
        assert (telemetry.meter_w < 1.3 * full).all()
        assert (np.abs(telemetry.sensor_w - telemetry.meter_w) < 0.9 * full).all()


def uncapped_power(family, *, period_s=2.0, ticks=1_500):
    """Power relative to the job's demand in whole periods of compute, and in all periods, without a binding limit."""
    site = {"surfaces": ("h100-sxm/assumed/compute_bound",), "phase_families": (family,), "randomise": 0.0, "jobs": 8}
    emulator = started(build(**site, period_s=period_s), batch=4)
    telemetry = run(emulator, 700.0, ticks)
    demand = emulator.spec.power_table_w[:, :, -1]
    relative = np.stack([t.meter_w for t in telemetry]) / demand
    compute = np.stack([t.phase == Phase.COMPUTE for t in telemetry])
    whole = compute[2:] & compute[1:-1] & compute[:-2]
    return relative[2:][whole], relative


@pytest.mark.parametrize("family", sorted(load_phase_families()))
@pytest.mark.parametrize("period_s", [1.0, 2.0, 20.0])
def test_compute_has_the_fitted_mean_power_at_any_period(family, period_s):
    power, _ = uncapped_power(family, period_s=period_s, ticks=600)
    # Level at the boards' own demand; within a job's compute the fit makes the mean over all time 1.
    assert power.mean() == pytest.approx(1.0, abs=0.004)


@pytest.mark.parametrize("family", sorted(load_phase_families()))
def test_compute_has_the_fitted_noise(family):
    power, _ = uncapped_power(family)
    fit = load_phase_families()[family]
    noise = fit.noise
    mean_square = 4.0 / 3.0 * noise.dip_depth**2  # uniform from 0 to twice the mean
    variance = noise.innovation_sd**2 / (1.0 - noise.ar1**2)
    variance += noise.dip_probability * mean_square - (noise.dip_probability * noise.dip_depth) ** 2
    if fit.ripple is not None:
        # Mean over 2 s of a dip of `dip_s` every `period_s`: what a boxcar leaves of a rectangular wave.
        left = np.linspace(0.0, fit.ripple.period_s, 2_001)[:-1, None] + np.linspace(0.0, 2.0, 401)[None]
        variance += (fit.ripple.depth * ((left % fit.ripple.period_s) < fit.ripple.dip_s).mean(axis=1)).var()
    assert power.std() == pytest.approx(fit.gpu_gain * np.sqrt(variance), rel=0.06)


def test_noise_goes_on_over_blocks_without_repeating():
    site = {"surfaces": ("h100-sxm/assumed/compute_bound",), "phase_families": ("lora_8xh100",), "randomise": 0.0}
    emulator = started(build(**site, jobs=64), batch=4)
    telemetry = run(emulator, 700.0, 2 * BLOCK + 1)
    power = np.stack([t.meter_w for t in telemetry]) / emulator.spec.power_table_w[:, :, -1]
    compute = np.stack([t.phase == Phase.COMPUTE for t in telemetry])
    whole = np.zeros_like(compute)
    whole[2:] = compute[2:] & compute[1:-1] & compute[:-2]
    both = whole[:BLOCK] & whole[BLOCK : 2 * BLOCK]
    assert both.sum() > 2_000
    a, b = power[:BLOCK][both], power[BLOCK : 2 * BLOCK][both]
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.1
    assert b.std() == pytest.approx(a.std(), rel=0.15)


def test_simulated_lora_power_is_distributed_as_measured():
    """2-s node power above the stalls, relative to its median: ten measured runs against the emulator."""
    table = load_table("llm_training_power/mlperf_llama2_70b_lora_8xH100_1node_2s")
    measured = table.ac_w[table.t_s > 30.0] / table.ac_w[table.t_s > 30.0].median()
    measured = measured[measured > 0.7]
    _, relative = uncapped_power("lora_8xh100")
    node = 1.0 - (1.0 - relative) / load_phase_families()["lora_8xh100"].gpu_gain
    node = node / np.median(node)
    node = node[node > 0.7]
    for q in (0.02, 0.05, 0.25, 0.75, 0.95, 0.99):
        assert np.quantile(node, q) == pytest.approx(np.quantile(measured, q), abs=0.03), q
    assert node.std() == pytest.approx(measured.std(), rel=0.35)


def test_same_seed_same_plant_bit_for_bit_at_any_place_of_any_batch():
    config = build(jobs=7, control_delay_periods=(0, 2), command_loss=0.1)
    alone = Emulator(config)
    alone.reset([np.random.default_rng(42)])
    crowd = Emulator(config)
    crowd.reset([np.random.default_rng(seed) for seed in (*range(100, 137), 42, *range(200, 226))])
    rng = np.random.default_rng(0)
    for _ in range(150):
        limit = rng.uniform(80.0, 700.0, (1, 7))
        telemetry = []
        for emulator, batch in ((alone, 1), (crowd, 64)):
            emulator.apply(Command(np.repeat(limit, batch, axis=0)))
            telemetry.append(emulator.advance())
        for name in ("sensor_w", "meter_w", "throughput", "phase", "limit_w", "decisions"):
            one, many = (getattr(t, name) for t in telemetry)
            np.testing.assert_array_equal(one[0], many[37], err_msg=name)


def test_a_plant_runs_on_under_its_last_limit_without_a_new_command():
    config = build(surfaces=("v100/bert_base_squad/b56",))
    held, told = started(config), started(config)
    run(held, 150.0, 1), run(told, 150.0, 1)
    for _ in range(200):
        np.testing.assert_array_equal(held.advance().meter_w, run(told, 150.0, 1)[-1].meter_w)


def test_the_spec_describes_the_nominal_plant():
    emulator = started(build(surfaces=("v100/bert_base_squad/b56",), rules={"floor_fraction": 0.5}), batch=2)
    spec = emulator.spec
    power, throughput = surface_library().get("v100/bert_base_squad/b56").tabulate([125.0, 187.5, 250.0])
    assert (spec.min_limit_w == 125.0).all()
    assert (spec.max_limit_w == 250.0).all()
    for column, k in ((0, 0), (16, 1), (32, 2)):
        np.testing.assert_allclose(spec.power_table_w[..., column], power[k] * spec.n_gpus, rtol=2e-3)
        np.testing.assert_allclose(spec.throughput_table[..., column], throughput[k], atol=2e-3)
    assert (spec.floor_w < spec.full_w).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surfaces": ("v100/bert_base_squad/b57",)}, "did you mean 'v100/bert_base_squad/b56'"),
        ({"phase_families": ("lora",)}, "known: lora_8xh100, lora_64xh100, gpt3_512xh100"),
        ({"period_s": 0.5}, "period_s 0.5 is shorter than rules.interval_s 1"),
    ],
)
def test_unknown_names_and_too_short_periods_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        Emulator(build(**change))


def test_no_spec_before_the_first_reset():
    with pytest.raises(RuntimeError, match="before its first reset"):
        _ = Emulator(build()).spec

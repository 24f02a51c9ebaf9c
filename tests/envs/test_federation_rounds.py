"""How rounds pass: times against hand and brute force, dropouts, deadlines, energy, waits, and the oracle's view."""

import dataclasses

import numpy as np
import pytest

from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.emulator import FederationEmulator
from wattgym.envs.federation.workload import samples_per_joule

REGIONS = ("aws:us-east-1", "gcp:asia-south1-a", "azure:westus", "aws:sa-east-1")


def config(time_model="A", sites=None, **sections):
    named = [
        {"name": f"s{k}", "region": region, "capacity_w": 1e5 * (k + 1), "samples": 10_000.0 * (k + 1)}
        for k, region in enumerate(REGIONS)
    ]
    rounds = {"time_model": time_model, "work_samples": 4e5, **sections.pop("rounds", {})}
    learning = {"noise": (0.0, 0.0), "randomise": 0.0, **sections.pop("learning", {})}
    base = {"sites": {"named": sites or named}, "rounds": rounds, "learning": learning}
    network = {"aggregator": "aws:us-east-1", **sections.pop("network", {})}
    return SiteSelectionConfig.model_validate({**base, "network": network, **sections})


def emulator(settings, utilisation=None, batch=1):
    """An emulator whose traces hold the given utilisation from the episode's start on (for every site alike)."""
    made = FederationEmulator(settings)
    made.reset(range(batch))
    if utilisation is not None:
        # One trace a site, laid end to end, so that the drawn positions can be replaced by known ones.
        steps, n = made.library.steps, settings.sites.size
        values = (
            np.broadcast_to(np.asarray(utilisation, dtype=float), (n, steps))
            if np.ndim(utilisation) < 2
            else utilisation
        )
        values = np.concatenate([values, np.repeat(values[:, -1:], steps - values.shape[1], axis=1)], axis=1)
        made.library.source = dataclasses.replace(made.library.source, values=values.ravel())
        draw = made.library.draw

        def pinned(rngs):
            federation, curve = draw(rngs)
            federation.first_sample = np.tile(np.arange(n) * steps, (len(rngs), 1))
            return federation, curve

        made.library.draw = pinned
        made.reset(range(batch))
    return made


def rate(power_w, pue=1.2):
    return power_w * samples_per_joule("h100-sxm", SiteSelectionConfig().workload) / pue


def choose(*sites, n=4):
    chosen = np.zeros((1, n), dtype=bool)
    chosen[0, list(sites)] = True
    return chosen


def test_model_a_by_hand():
    """T = W / sum of rates + slowest link; shares of the work in proportion to power."""
    made = emulator(config(), 0.75)
    power = 1e5 * np.arange(1, 5) * 0.2
    np.testing.assert_allclose(made.telemetry.power_w[0], power)
    result = made.step(choose(0, 1, 3))
    used = power[[0, 1, 3]]
    compute = 4e5 / rate(used.sum())
    comm = made.federation.comm_s[0, [0, 1, 3]]
    assert result.seconds[0] == pytest.approx(compute + comm.max())
    np.testing.assert_allclose(result.played.samples[0, [0, 1, 3]], 4e5 * used / used.sum())
    np.testing.assert_allclose(result.played.compute_s[0, [0, 1, 3]], compute)
    assert result.communication_s[0] == pytest.approx(comm.max())
    assert result.energy_kwh[0] == pytest.approx(4e5 / rate(1.0) / 3.6e6)
    assert result.unused_kwh[0] == pytest.approx(power.sum() * result.seconds[0] / 3.6e6 - result.energy_kwh[0])


def test_model_b_by_hand():
    """T = max (E D_k / rate_k + c_k)."""
    made = emulator(config("B", rounds={"epochs": 2.0}), 0.75)
    result = made.step(choose(1, 2))
    power, comm = 1e5 * np.array([2, 3]) * 0.2, made.federation.comm_s[0, [1, 2]]
    each = 2.0 * np.array([20_000, 30_000]) / rate(power) + comm
    np.testing.assert_allclose(result.played.busy_s[0, [1, 2]], each)
    assert result.seconds[0] == pytest.approx(each.max())
    np.testing.assert_allclose(result.played.samples[0], [0, 40_000, 60_000, 0])


def test_communication_by_hand():
    made = emulator(config(rounds={"overhead_s": 3.0}), 0.75)
    network = made.library.network
    k, centre = made.federation.region[0, 1], made.federation.aggregator[0]
    size = 32 * 2_621_440 * 2
    expected = (
        size / network.bytes_per_s[k, centre] + size / network.bytes_per_s[centre, k] + 2 * network.rtt_s[k, centre]
    )
    assert made.federation.comm_s[0, 1] == pytest.approx(expected + 3.0)
    egress = network.egress_usd_per_gb[k, centre] + network.egress_usd_per_gb[centre, k]
    assert made.federation.egress_usd[0, 1] == pytest.approx(size / 1e9 * egress)


def test_cost_and_carbon_by_hand():
    made = emulator(config(), 0.75)
    price, carbon = made.telemetry.price_usd_per_mwh[0, 2], made.telemetry.carbon_g_per_kwh[0, 2]
    result = made.step(choose(2))
    assert result.carbon_kg[0] == pytest.approx(result.energy_kwh[0] * carbon / 1000)
    assert result.cost_usd[0] == pytest.approx(result.energy_kwh[0] * price / 1000 + made.federation.egress_usd[0, 2])


def brute_seconds(need_j, power_w, start_s, limit_s, step_s=0.05):
    """Adds up power in small steps until the need is met."""
    drawn, t = 0.0, 0.0
    while t < limit_s:
        drawn += power_w[int((start_s + t + 1e-9) // 300)] * step_s
        t += step_s
        if drawn >= need_j:
            return t
    return np.inf


@pytest.mark.parametrize("time_model", ["A", "B"])
def test_power_that_moves_within_a_round_is_integrated_exactly(time_model):
    rng = np.random.default_rng(3)
    utilisation = rng.uniform(0.72, 0.99, (4, 60))
    utilisation[:, 0] = 0.7
    # Rounds of about 15 minutes at the start's power.
    rounds = {"work_samples": 3e6, "epochs": 100.0, "deadline_s": 5000.0}
    settings = config(time_model, rounds=rounds, power={"min_gpus": 8.0})
    made = emulator(settings, utilisation)
    for _ in range(3):
        start, eligible = float(made.telemetry.time_s[0]), made.telemetry.eligible
        chosen = eligible.copy()
        work = made.model.work(made.federation, made.telemetry.power_w * eligible, chosen)[0]
        result = made.step(chosen)
        minimum = made.federation.min_power_w[0]
        for k in np.flatnonzero(chosen[0]):
            power = 1e5 * (k + 1) * np.maximum(0.95 - utilisation[k], 0.0)
            power = np.where(power >= minimum[k], power, 0.0)
            seconds = brute_seconds(work[k] / rate(1.0), power, start, 5000.0)
            ours = result.played.compute_s[0, k]
            assert ours == pytest.approx(seconds, abs=0.5) or (np.isinf(ours) and np.isinf(seconds)), (k, ours, seconds)
        assert result.seconds[0] > 300.0


def test_late_sites_do_not_count_and_pay_for_what_they_drew():
    settings = config("B", rounds={"epochs": 100.0, "deadline_s": 400.0})
    utilisation = np.full((4, 20), 0.75)
    utilisation[0] = 0.86  # 9 kW: too slow for the deadline
    made = emulator(settings, utilisation)
    result = made.step(choose(0, 3))
    played = result.played
    need = 1e6 / rate(1.0)
    if need / 9000.0 <= 400.0:
        pytest.fail("the case is not late")
    assert played.late[0].tolist() == [True, False, False, need * 4 / 80_000.0 > 400.0]
    assert result.seconds[0] == 400.0
    assert played.energy_j[0, 0] == pytest.approx(9000.0 * 400.0)
    assert not played.counted[0, 0]
    assert played.samples[0, 0] == 0.0
    assert made.telemetry.failed[0, 0]


def test_dropouts_are_found_out_stay_away_and_come_back():
    settings = config("B", rounds={"epochs": 20.0, "dropouts_per_hour": 30.0, "detect_s": 41.0, "outage_s": 700.0})
    made = emulator(settings, 0.75, batch=64)
    lost_after = made.moment().lost_after_s
    chosen = made.telemetry.eligible.copy()
    result = made.step(chosen)
    played = result.played
    full = played.compute_s + made.federation.comm_s
    np.testing.assert_array_equal(played.lost, chosen & (lost_after < full))
    assert 0.2 < played.lost.mean() < 0.99
    np.testing.assert_allclose(played.busy_s[played.lost], lost_after[played.lost] + 41.0)
    assert (played.samples[played.lost] == 0).all()
    np.testing.assert_allclose(
        played.energy_j[played.lost],
        np.minimum(lost_after * made.telemetry.power_w, played.energy_j + 1e18)[played.lost],
        rtol=1e-9,
    )
    back = played.busy_s + 700.0
    np.testing.assert_array_equal(made.telemetry.eligible, ~played.lost | (back <= result.seconds[:, None]))
    # The rate is that of a Poisson process.
    assert made._noise.lost_after_s.mean() == pytest.approx(120.0, rel=0.05)


def test_stragglers_slow_down_and_draw_for_longer():
    settings = config("B", rounds={"straggler_sigma": 0.5})
    made = emulator(settings, 0.75)
    slow = made.moment().slow[0]
    result = made.step(choose(0, 1, 2, 3))
    plain = 10_000.0 * np.arange(1, 5) / rate(1e5 * np.arange(1, 5) * 0.2)
    np.testing.assert_allclose(result.played.compute_s[0], plain * slow)


def test_a_federation_without_power_waits_and_counts():
    utilisation = np.full((4, 40), 0.95)
    utilisation[:, 12:] = 0.7
    made = emulator(config(), utilisation)
    nothing = np.zeros((1, 4), dtype=bool)
    for k in range(12):
        assert not made.telemetry.eligible.any()
        result = made.step(nothing)
        assert result.waited[0]
        assert result.seconds[0] == 300.0
        assert result.log_progress[0] == result.energy_kwh[0] == 0.0
        assert made.telemetry.waits[0] == k + 1
        assert made.telemetry.rounds[0] == 0
        assert np.isfinite(made.telemetry.loss).all()
    assert made.telemetry.eligible.all()
    assert made.telemetry.time_s[0] == 3600.0


def test_power_below_the_smallest_job_pauses_a_site():
    """From minute 5 to 10 the site has less than its minimum, so the round takes 300 s longer."""
    utilisation = np.full((4, 20), 0.75)
    utilisation[:, 1] = 0.949
    settings = config(rounds={"work_samples": 3e6})
    paused, steady = emulator(settings, utilisation), emulator(settings, 0.75)
    one, other = paused.step(choose(0, 1, 2, 3)), steady.step(choose(0, 1, 2, 3))
    assert other.seconds[0] > 330.0
    assert one.seconds[0] == pytest.approx(other.seconds[0] + 300.0)


def test_imagining_changes_nothing_and_is_what_happens():
    settings = config("B", rounds={"dropouts_per_hour": 5.0, "straggler_sigma": 0.3, "epochs": 10.0})
    struck, twin = (emulator(settings, 0.75, batch=3) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(5):
        candidates = rng.random((3, 6, 4)) < 0.6
        candidates[:, 0] = struck.telemetry.eligible
        imagined = struck.imagine(candidates, foresee=True)
        pick = candidates[:, 2] & struck.telemetry.eligible
        pick[~pick.any(axis=1)] = struck.telemetry.eligible[~pick.any(axis=1)]
        again = struck.imagine(pick[:, None], foresee=True)
        result, other = struck.step(pick), twin.step(pick)
        np.testing.assert_array_equal(result.seconds, other.seconds)
        np.testing.assert_array_equal(result.log_progress, other.log_progress)
        np.testing.assert_array_equal(again.log_progress[:, 0], result.log_progress)
        happened = pick.any(axis=1)
        np.testing.assert_array_equal(again.seconds[happened, 0], result.seconds[happened])
        assert imagined.per_second.shape == (3, 6)
    calm = struck.imagine(candidates)
    assert (calm.log_progress >= struck.imagine(candidates, foresee=True).log_progress - 1e-12).all()


def test_nothing_chosen_is_worth_nothing():
    made = emulator(config(), 0.75)
    imagined = made.imagine(np.zeros((1, 2, 4), dtype=bool))
    assert (imagined.per_second == 0).all()
    assert (imagined.seconds == 0).all()


def test_market_moves_with_the_hour():
    made = emulator(config("B", rounds={"epochs": 1.0}), 0.75)
    region = made.federation.region[0]
    for _ in range(200):
        made.step(choose(0, 1, 2, 3))
        hour = int(
            made.federation.first_hour[0]
            + (made.federation.start_of_day_s[0] % 3600 + made.telemetry.time_s[0]) // 3600
        )
        np.testing.assert_array_equal(
            made.telemetry.price_usd_per_mwh[0], made.library.market.price_usd_per_mwh[region, hour]
        )
    assert made.telemetry.time_s[0] > 3600.0

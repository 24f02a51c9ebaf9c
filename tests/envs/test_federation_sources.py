"""What federations are drawn from: workloads, power traces and their weeks, links, markets."""

import itertools

import numpy as np
import pandas as pd
import pytest

from wattgym.envs.federation.config import (
    MarketConfig,
    NetworkConfig,
    PowerConfig,
    SiteSelectionConfig,
    WorkloadConfig,
)
from wattgym.envs.federation.draw import FederationLibrary
from wattgym.envs.federation.emulator import FederationEmulator
from wattgym.envs.federation.market import Market
from wattgym.envs.federation.network import Network, gazetteer, places_by_region, pool
from wattgym.envs.federation.power import STEPS_A_DAY, PowerSource, available_power_w
from wattgym.envs.federation.workload import flop_per_sample, gpu_power_w, samples_per_joule, transfer_bytes
from wattgym.errors import UserError
from wattgym.traces import load_table, load_trace, split_windows

SPLITS = ("train", "validation", "test")


@pytest.mark.parametrize(
    ("model", "adapter", "rank", "bytes_per_value", "megabytes"),
    [
        # Sizes of public adapters, decimal megabytes.
        ("mistral-7b", "lora_qv", 32, 2, 27.3),
        ("mistral-7b", "lora_qv", 32, 4, 54.5),
        ("llama-3-8b", "lora_all", 16, 2, 83.9),
        ("qwen2.5-0.5b", "lora_qv", 8, 2, 1.1),
        ("llama-3-70b", "lora_all", 32, 2, 828.4),
        ("llama-3-8b", "full", 16, 2, 16_060.6),
    ],
)
def test_bytes_of_a_transfer(model, adapter, rank, bytes_per_value, megabytes):
    config = WorkloadConfig(model=model, adapter=adapter, rank=rank, bytes_per_value=bytes_per_value)
    assert transfer_bytes(config) / 1e6 == pytest.approx(megabytes, rel=0.03)


def test_adapter_counts_follow_from_the_model_s_shape():
    """Mistral-7B: 32 layers, hidden 4096, key-value width 1024, feed-forward 14336."""
    h, kv, f, layers = 4096, 1024, 14336, 32
    qv = layers * ((h + h) + (h + kv))
    every = layers * ((h + h) + 2 * (h + kv) + (h + h) + 2 * (h + f) + (f + h))
    one = WorkloadConfig(rank=1, bytes_per_value=1.0)
    assert transfer_bytes(one.model_copy(update={"adapter": "lora_qv"})) == qv
    assert transfer_bytes(one.model_copy(update={"adapter": "lora_all"})) == every


def test_samples_per_joule_by_hand():
    config = WorkloadConfig(model="mistral-7b", adapter="lora_all", sequence_tokens=512, mfu=0.4, host_share=0.3)
    assert flop_per_sample(config) == pytest.approx(4 * 7.248e9 * 512)
    # One H100 at 620 W in training with 30 % for its host.
    assert gpu_power_w("h100-sxm", config) == pytest.approx(620 * 1.3)
    assert samples_per_joule("h100-sxm", config) == pytest.approx(989.4e12 * 0.4 / (4 * 7.248e9 * 512) / 806)
    full = config.model_copy(update={"adapter": "full"})
    assert flop_per_sample(full) == pytest.approx(1.5 * flop_per_sample(config))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [25.0, 0.0]),
        ({"u_max": 0.8}, [10.0, 0.0]),
        ({"reading": "non_production", "production_share": 0.5}, [60.0, 46.0]),
        ({"reading": "utilisation"}, [70.0, 98.0]),
    ],
)
def test_three_readings_of_power(keys, expected):
    power = available_power_w(PowerConfig(**keys), np.array(100.0), np.array([0.70, 0.98]))
    np.testing.assert_allclose(power, expected)


@pytest.mark.parametrize("alignment", ["hour_of_day", "none"])
@pytest.mark.parametrize("split", SPLITS)
def test_no_episode_leaves_the_weeks_of_its_split(split, alignment):
    steps = 150
    source = PowerSource.build(PowerConfig(split=split, alignment=alignment), (), steps)
    length = load_trace(source.ids[0]).values.size
    windows = split_windows(source.ids[0], split)
    for i in range(len(source.ids)):
        for phase in range(source.counts.shape[1]):
            starts = source.starts[i, phase, : source.counts[i, phase]] - i * length
            inside = [(s * 300 >= a) & ((s + steps) * 300 <= b) for s in starts for a, b in windows]
            assert sum(map(int, inside)) == starts.size
    u = np.random.default_rng(0).random((1000, 7))
    trace = np.tile(np.arange(7) % 5, (1000, 1))
    drawn = source.draw(trace, np.random.default_rng(1).integers(-200, 500, trace.shape), u)
    own = (drawn - trace * length) * 300
    assert all(any(a <= t and t + steps * 300 <= b for a, b in windows) for t in np.unique(own))


def test_test_weeks_do_not_meet_training_weeks_in_drawn_federations():
    used = {}
    for split in SPLITS:
        config = SiteSelectionConfig(
            power={"split": split}, market={"split": split}, network={"split": split}, sites={"count": (20, 20)}
        )
        library = FederationLibrary(config)
        federation, _ = library.draw([np.random.default_rng(seed) for seed in range(200)])
        length = load_trace(library.source.ids[0]).values.size
        samples = federation.first_sample - federation.trace * length
        hours = federation.first_hour
        used[split] = (
            (samples.min(), samples.max() + library.steps),
            (hours.min() - 24, hours.max() + library.hours + 24),
            {library.network.regions[r] for r in np.unique(federation.region)},
        )
        assert used[split][2] == set(pool(NetworkConfig(split=split)))
    for one, other in itertools.combinations(SPLITS, 2):
        for a, b in zip(used[one][:2], used[other][:2], strict=True):
            assert a[1] <= b[0] or b[1] <= a[0]
        assert not used[one][2] & used[other][2]


def test_few_distinct_regions_gather_sites_around_the_aggregator():
    def drawn(**network):
        library = FederationLibrary(SiteSelectionConfig(sites={"count": (12, 20)}, network=network))
        return library.draw([np.random.default_rng(s) for s in range(200)])[0]

    federation, seen = drawn(distinct_regions=(3, 5)), set()
    for row in range(200):
        regions = set(federation.region[row, federation.exists[row]].tolist())
        seen.add(len(regions))
        assert federation.aggregator[row] in regions
        # As evenly as it goes.
        counts = np.bincount(federation.region[row, federation.exists[row]])
        assert np.ptp(counts[counts > 0]) <= 1
        local = federation.region[row] == federation.aggregator[row]
        assert federation.rtt_s[row, local].max() == 1e-3
    assert seen == {3, 4, 5}
    assert len(set(drawn(distinct_regions=(3, 3), aggregator="aws:us-east-1").aggregator.tolist())) == 1
    # More than there are draws as without the key.
    whole, plain = drawn(distinct_regions=(99, 99)), drawn()
    np.testing.assert_array_equal(whole.region, plain.region)


def test_a_trace_is_read_at_the_site_s_own_hour():
    """Two sites in Tokyo (UTC+9) and Cape Town (UTC+2) on one trace: 7 h apart within a day."""
    sites = [
        {"name": name, "region": region, "capacity_w": 1e5, "trace": "power-util/google-cella-pdu6"}
        for name, region in (("t", "aws:ap-northeast-1"), ("c", "aws:af-south-1"))
    ]
    library = FederationLibrary(SiteSelectionConfig(sites={"named": sites}))
    federation, _ = library.draw([np.random.default_rng(s) for s in range(50)])
    assert set((federation.first_sample[:, 0] - federation.first_sample[:, 1]) % STEPS_A_DAY) == {7 * 12}
    # Local time of cell a is three hours ahead of the trace's clock.
    local = (federation.start_of_day_s / 300 + 9 * 12).astype(int)
    np.testing.assert_array_equal((federation.first_sample[:, 0] + 3 * 12) % STEPS_A_DAY, local % STEPS_A_DAY)


def test_a_trace_shorter_than_the_job_is_refused():
    config = SiteSelectionConfig(power={"split": "validation"}, goal={"time_limit_s": 6 * 86_400})
    with pytest.raises(
        UserError, match=r"shorter than the job.*validation weeks hold 432000 s.*lower goal.time_limit_s"
    ):
        FederationEmulator(config)


def own_trace(folder, monkeypatch, values):
    pd.DataFrame({"t_s": np.arange(len(values)) * 300, "util": values}).to_csv(folder / "own.csv", index=False)
    (folder / "own.trace.yaml").write_text(
        "files:\n- file: own.csv\n  licence: own\n  source: own\n  kind: power_utilisation\n  unit: '1'\n"
        "  interval_s: 300\n  time: {column: t_s, format: seconds}\n  splits: {train: all}\n"
        "  traces:\n    own/power: {column: util}\n"
    )
    monkeypatch.setenv("WATTGYM_DATA", str(folder))


@pytest.mark.parametrize("value", [-0.01, 1.01])
def test_utilisation_out_of_range_is_refused(tmp_path, monkeypatch, value):
    values = np.full(4000, 0.5)
    values[17] = value
    own_trace(tmp_path, monkeypatch, values)
    with pytest.raises(UserError, match=rf"sample 17 of 'own/power' is {value:g} 1; .*within \[0, 1\]"):
        FederationEmulator(SiteSelectionConfig(power={"traces": ["own/power"]}))


def test_traces_of_another_kind_or_interval_are_refused():
    with pytest.raises(UserError, match="kind price; power needs a utilisation"):
        FederationEmulator(SiteSelectionConfig(power={"traces": ["price/ca-on-2023"]}))
    with pytest.raises(UserError, match="no trace 'power-util/gogle'"):
        FederationEmulator(SiteSelectionConfig(power={"traces": ["power-util/gogle"]}))


def test_places_hold_every_fully_measured_region_once():
    regions = [r for place in gazetteer().places.values() for r in place.regions]
    assert len(regions) == len(set(regions)) == 62
    rtt = load_table("network/skyplane_cloud_region_rtt_2022")
    assert len(set(rtt.src_region)) == 69
    assert set(regions) <= set(rtt.src_region)
    # Every pair is there in both campaigns' tables or the constructor would name the one that is not.
    assert len(Network.build(NetworkConfig(), regions).regions) == 62
    sizes = {split: len(pool(NetworkConfig(split=split))) for split in SPLITS}
    assert sizes == {"train": 37, "validation": 10, "test": 15}
    assert len(pool(NetworkConfig(split="all"))) == 62


def test_links_are_the_measured_ones_in_both_directions():
    src, dst = "aws:us-east-1", "gcp:asia-south1-a"
    network = Network.build(NetworkConfig(bandwidth_share=0.5), (src, dst))
    rtt = load_table("network/skyplane_cloud_region_rtt_2022")
    speed = load_table("network/skyplane_cloud_region_throughput_2022-11")
    cost = load_table("network/skyplane_cloud_egress_cost")
    for i, (a, b) in enumerate(((src, dst), (dst, src))):
        row = rtt[
            (rtt.src_region == a) & (rtt.dst_region == b) & (rtt.src_tier == "PREMIUM") & (rtt.dst_tier == "PREMIUM")
        ]
        assert network.rtt_s[i, 1 - i] == pytest.approx(float(row.avg_rtt_ms.median()) / 1000)
        fast = float(speed[(speed.src_region == a) & (speed.dst_region == b)].throughput_received_gbps.iloc[0])
        assert network.bytes_per_s[i, 1 - i] == pytest.approx(fast * 1e9 / 8 * 0.5)
        price = float(cost[(cost.src_region == a) & (cost.dst_region == b)].egress_usd_per_gb.iloc[0])
        assert network.egress_usd_per_gb[i, 1 - i] == pytest.approx(price)
    assert network.bytes_per_s[0, 1] != network.bytes_per_s[1, 0]
    window = Network.build(NetworkConfig(bandwidth_share=0.5, tcp_window_bytes=1e6), (src, dst))
    assert window.bytes_per_s[0, 1] == pytest.approx(1e6 / network.rtt_s[0, 1])


def test_missing_pairs_are_named(tmp_path):
    # January's campaign lacks regions that November's has.
    with pytest.raises(UserError, match=r"throughput_2022-01: no gbps from '.+' to '.+'"):
        Network.build(NetworkConfig(throughput="2022-01"), pool(NetworkConfig(split="all")))
    with pytest.raises(UserError, match="unknown region 'aws:mars-1'"):
        Network.build(NetworkConfig(), ("aws:mars-1",))
    table = tmp_path / "links.csv"
    table.write_text("src_region,dst_region,rtt_ms,gbps,egress_usd_per_gb\naws:us-east-1,aws:us-west-1,60,5,0.02\n")
    config = NetworkConfig(table=str(table), regions=("aws:us-east-1", "aws:us-west-1"))
    with pytest.raises(UserError, match=r"links.csv: no rtt_ms from 'aws:us-west-1' to 'aws:us-east-1'"):
        FederationEmulator(SiteSelectionConfig(network=config.model_dump()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("src_region,dst_region,rtt_ms,gbps\n", "no column 'egress_usd_per_gb'"),
        ("src_region,dst_region,rtt_ms,gbps,egress_usd_per_gb\na,b,-1,1,0\n", "line 2: rtt_ms is '-1'; valid: above 0"),
        ("src_region,dst_region,rtt_ms,gbps,egress_usd_per_gb\na,b,1,x,0\n", "line 2: gbps is 'x'"),
        ("", "cannot read the network table"),
    ],
)
def test_bad_network_tables_are_refused(tmp_path, text, message):
    table = tmp_path / "links.csv"
    table.write_text(text)
    with pytest.raises(UserError, match=message):
        Network.build(NetworkConfig(table=str(table)), ("aws:us-east-1", "aws:us-west-1"))


def test_stand_ins_are_read_at_the_same_local_hour():
    # Oregon stands in on California's zone (same offset), Iowa on Texas' (same), Dubai on Texas' ten hours away.
    market = Market.build(MarketConfig(), ("azure:uaenorth", "aws:us-west-1"), 24)
    ercot = load_trace("price/us-tex-erco-2023").values
    assert market.price_usd_per_mwh[0, 1000] == ercot[1010]
    caiso = load_trace("carbon-lca/us-cal-ciso-2023").values
    np.testing.assert_array_equal(market.carbon_g_per_kwh[1], caiso)
    direct = Market.build(MarketConfig(carbon="direct"), ("aws:us-west-1",), 24)
    assert (direct.carbon_g_per_kwh < market.carbon_g_per_kwh[1]).mean() > 0.99


def test_every_zone_is_shipped():
    for place in gazetteer().places.values():
        load_trace(f"price/{place.price.lower()}-2023")
        load_trace(f"carbon-lca/{place.carbon.lower()}-2023")
        assert {place.price, place.carbon} <= set(gazetteer().zones)
        for kind, zone in (("price", place.price), ("carbon", place.carbon)):
            if kind not in place.stand_in:
                assert abs(gazetteer().zones[zone] - place.utc_offset_h) <= 1, place
    assert len(places_by_region()) == 62


def test_draws_do_not_depend_on_the_batch_and_spread_as_configured():
    library = FederationLibrary(SiteSelectionConfig(sites={"count": (4, 30), "alpha": 0.3}))
    rngs = [np.random.default_rng(s) for s in range(400)]
    federation, curve = library.draw(rngs)
    alone, own = library.draw([np.random.default_rng(7)])
    for name, value in vars(alone).items():
        np.testing.assert_array_equal(value[0], getattr(federation, name)[7], err_msg=name)
    assert own.phi[0] == curve.phi[7]
    assert set(federation.count) == set(range(4, 31))
    np.testing.assert_array_equal(federation.exists.sum(axis=1), federation.count)
    there = federation.exists
    log_capacity = np.log(federation.capacity_w[there] / 100_000)
    assert abs(log_capacity.mean()) < 0.03
    assert log_capacity.std() == pytest.approx(0.7, rel=0.03)
    np.testing.assert_allclose(federation.mix[there].sum(axis=1), 1.0)
    assert (federation.capacity_w[~there] == 0).all()
    # Var of a Dirichlet share: (1/D)(1 - 1/D) / (D alpha + 1).
    assert federation.mix[there].var() == pytest.approx(1 / 8 * 7 / 8 / (8 * 0.3 + 1), rel=0.05)
    # 30 sites of 37 regions: none twice.
    big = federation.region[federation.count == 30]
    assert all(len(set(row)) == 30 for row in big.tolist())
    assert abs(curve.s0 / 13.3 - 1).max() <= 0.2

"""Power of all sites together against the sum of their targets."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml

from wattgym.cli import main
from wattgym.errors import UserError
from wattgym.federated.fleet import read_fleet
from wattgym.federated.site.ticks import PowerTicks

HEADER = "unix_s,power_w,target_w,available_w,limit_w\n"


def write(folder, name, rows, end="\n"):
    (folder / name).mkdir()
    lines = [",".join(map(str, row)) for row in rows]
    (folder / name / "power.csv").write_text(HEADER + "\n".join(lines) + end, encoding="utf-8")


def test_errors_that_do_not_move_together_cancel_in_the_fleet(tmp_path):
    """One site 10 W above its 100 W, the other 10 W below its 200 W: 10 % and 5 % off, together nothing."""
    write(tmp_path, "a", [(1000.0 + 2 * k, 110.0, 100.0, 500.0, 400.0) for k in range(10)])
    write(tmp_path, "b", [(1001.0 + 2 * k, 190.0, 200.0, 500.0, 400.0) for k in range(10)])
    fleet = read_fleet(tmp_path)
    assert fleet.unix_s == 1001.0
    assert fleet.t_s.tolist() == list(np.arange(0.0, 17.0, 2.0))
    assert fleet.total_w.tolist() == fleet.total_target_w.tolist() == [300.0] * 9
    assert fleet.errors() == {"fleet": 0.0, "sites_mean": pytest.approx(0.075), "seconds": 16.0}


def test_sites_without_a_target_and_cut_lines_are_left_out(tmp_path):
    assert read_fleet(tmp_path) is None
    write(tmp_path, "budget", [(1000.0 + k, 50.0, "nan", 500.0, 400.0) for k in range(5)])
    assert read_fleet(tmp_path) is None
    write(tmp_path, "cut", [(1000.0 + 2 * k, 110.0, 100.0, 500.0, 400.0) for k in range(4)], end="\n1008.0,11")
    assert list(read_fleet(tmp_path).power_w) == ["cut"]
    (tmp_path / "cut" / "power.csv").write_text("something else\n")
    with pytest.raises(UserError, match="is no table of a site's power"):
        read_fleet(tmp_path)


def test_a_process_that_is_started_again_goes_on_in_the_same_table(tmp_path):
    for power_w in (10.0, 20.0):
        PowerTicks(tmp_path / "power.csv").add(power_w, float("nan"), 30.0, 40.0)
    table = pd.read_csv(tmp_path / "power.csv")
    assert table["power_w"].tolist() == [10.0, 20.0]
    assert table["target_w"].isna().all()


@pytest.mark.slow
def test_both_controllers_at_once(federation, tmp_path, capsys):
    """Each site follows a signal of its own while a selector picks who trains."""
    config = federation(names=("a", "b"), network={"split": "all"}, local_steps=20).model_dump(mode="json")
    for k, site in enumerate(config["sites"]):
        site["capacity_w"] = 2000.0
        site["shaping"] = {
            "devices": [f"h100-sxm:0@{k}"], "controller": "feed-forward + PI", "signal": "regd",
            "signal_start_s": 300.0 * k, "period_s": 0.5, "pace": 0.2,
        }  # fmt: skip
    config |= {
        "selection": {"goal": {"target_loss": 0.5}, "rounds": {"work_samples": 60000.0}},
        "power": {"min_gpus": 0.5},
    }
    sites = tmp_path / "federation.yaml"
    sites.write_text(yaml.safe_dump(config), encoding="utf-8")
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["federate", "--sites", str(sites), "--policy", "PowerTrip predicted", "--rounds", "2", "--out", str(out)])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "fleet of 2 sites over" in shown
    table = pd.read_csv(out / "fleet.csv")
    assert {"a.power_w", "b.power_w", "a.target_w", "b.target_w"} < set(table)
    np.testing.assert_allclose(table["target_w"], table["a.target_w"] + table["b.target_w"], rtol=1e-6)
    assert (table["a.target_w"] - table["b.target_w"]).abs().max() > 1.0
    assert json.loads((out / "fleet.json").read_text())["seconds"] > 0.0
    assert (out / "fleet.svg").stat().st_size > 5_000

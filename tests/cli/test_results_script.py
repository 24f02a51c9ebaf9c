import csv
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from wattgym.errors import UserError
from wattgym.metrics.statistics import iqm

SHAPING = "PowerMorph (reconstruction), all knobs"
SCRIPTS = Path(__file__).parents[2] / "scripts"
RECIPE = {
    "env": {
        "site": {"jobs": 2},
        "action": {"kind": "residual_pi", "gains": {"identify": 0.1}},
        "period_s": 10.0,
        "episode_s": 600.0,
    },
    "train": {"total_steps": 64, "num_envs": 4, "hyperparameters": {"n_steps": 16}},
    "network": {"hidden": [8]},
    "validation": {"every_steps": 64, "scenarios": 1, "episode_s": 600.0, "families": ["rega"]},
}
SHAPED = {
    **RECIPE,
    "env": {
        **RECIPE["env"],
        "action": {"knobs": ["power_limit", "duty_cycle", "local_steps"]},
        "knob_rules": {"hysteresis": 0.4},
    },
}
PLAN = {
    "site": {"jobs": 2},
    "families": ["rega", "peak_event"],
    "episode_s": {"rega": 600, "peak_event": 3600},
    "scenarios": 3,
    "period_s": 10.0,
    "learned": [
        {"recipe": "tiny", "steps": 64, "seeds": 2},
        {"recipe": "tiny_knobs", "steps": 64, "seeds": 1},
    ],
    "shaped": {"recipe": "tiny_knobs", "baselines": ["PowerMorph (reconstruction)", "pause/resume"]},
    "references": ["static cap", "PowerMorph (reconstruction)"],
    "gpus": ["all", "v100"],
    "baselines": ["static cap", "feed-forward + PI", "PowerMorph (reconstruction)", "pause/resume"],
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = importlib.util.spec_from_file_location("results_script", SCRIPTS / "results.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (tmp_path / "configs" / "recipes").mkdir(parents=True)
    for name, recipe in (("tiny", RECIPE), ("tiny_knobs", SHAPED)):
        (tmp_path / "configs" / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    yield module
    for name in ("results_page", "results_curves"):
        sys.modules.pop(name, None)


def make(results, tmp_path, **options):
    page = tmp_path / "results.md"
    results.main(plan=tmp_path / "plan.yaml", cache=tmp_path / "results", page=page, **options)
    rows = list(csv.DictReader(page.with_suffix(".csv").read_text().splitlines()))
    return page.read_text(), {(r["family"], r["gpu"], r["controller"], r["metric"]): r for r in rows}


@pytest.mark.slow
def test_the_page_is_made_from_finished_pieces_and_says_what_is_missing(results, tmp_path, monkeypatch):
    # No time: nothing is run, and the page says so of everything that was planned.
    text, rows = make(results, tmp_path, minutes=0.0)
    assert not rows
    assert "- tiny: 0 of 2 seeds are trained" in text
    assert "- rega, all: every controller (no time)" in text
    assert "- peak_event, v100: every controller (no time)" in text

    text, rows = make(results, tmp_path)
    assert "Everything planned was run." in text
    assert "**tiny**: ppo, 64 steps, 2 seeds; validation reward" in text
    assert "the same 3 scenarios" in text
    for family, gpu, name in (("rega", "all", "tiny"), ("rega", "v100", "static cap"), ("peak_event", "all", "tiny")):
        assert rows[family, gpu, name, "throughput_retained"]["scenarios"] == "3"
        assert rows[family, gpu, name, "nrmse"]["runs"] == ("2" if name == "tiny" else "1")
    assert ("peak_event", "all", "static cap", "pjm_composite") not in rows
    assert "| tiny | static cap |" in text
    # Whoever sets more than the limit is compared with those who do, in the same scenarios.
    assert "| tiny_knobs | PowerMorph (reconstruction), all knobs |" in text
    assert "| tiny | PowerMorph (reconstruction) |" in text
    assert "| PowerMorph (reconstruction), all knobs | PowerMorph (reconstruction) |" in text
    power = {name: float(rows["rega", "all", name, "energy_kwh"]["value"]) for name in ("static cap", SHAPING)}
    assert power[SHAPING] == pytest.approx(power["static cap"], rel=0.2)
    assert float(rows["rega", "all", SHAPING, "throughput_retained"]["value"]) > float(
        rows["rega", "all", "PowerMorph (reconstruction)", "throughput_retained"]["value"]
    )
    assert ("rega", "all", "pause/resume, all knobs", "nrmse") in rows
    assert ("rega", "all", "pause/resume", "nrmse") not in rows
    # What the logs said, in a table, a figure and the page.
    curves = list(csv.DictReader((tmp_path / "learning_curves.csv").read_text().splitlines()))
    assert {(c["recipe"], c["run"]) for c in curves} == {
        ("tiny", "tiny-64-seed0"), ("tiny", "tiny-64-seed1"), ("tiny_knobs", "tiny_knobs-64-seed0")
    }  # fmt: skip
    best = max(float(c["validation_reward"]) for c in curves if c["recipe"] == "tiny_knobs")
    assert re.search(rf"\| tiny_knobs \|.*\| {best:.3f} \|", text)
    assert (tmp_path / "images" / "learning_curves.svg").read_text().startswith("<?xml")
    # The table is what the pieces hold.
    piece = results.read_json_object(tmp_path / "results" / "pieces" / "rega-all" / "static-cap.json")
    kept = [x for x in piece["rows"][""]["nrmse"] if x is not None]
    assert float(rows["rega", "all", "static cap", "nrmse"]["value"]) == pytest.approx(
        float(iqm(np.array(kept))), rel=1e-5
    )

    # A residual is shown beside what it is added to.
    assert ("rega", "all", "tiny without learning", "pjm_composite") in rows

    # What is finished is not done again; fewer scenarios are other scenarios.
    monkeypatch.setattr(results, "Stage", None)
    again, _ = make(results, tmp_path)
    assert again.partition("## ")[2] == text.partition("## ")[2]
    assert "No regulation signal was planned." in make(results, tmp_path, families="peak_event")[0]
    with pytest.raises(TypeError):
        make(results, tmp_path, scenarios=2)


def test_a_plan_that_does_not_fit_is_one_line(results, tmp_path):
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**PLAN, "familys": []}))
    with pytest.raises(UserError, match="did you mean 'families'"):
        make(results, tmp_path)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**PLAN, "shaped": {**PLAN["shaped"], "recipe": "tiny"}}))
    with pytest.raises(UserError, match=r"tiny.yaml enables no knob beside the power limit"):
        make(results, tmp_path, minutes=0.0)

"""The pages on training and evaluation say what the code does."""

import re
from pathlib import Path

from wattgym.agents.baselines import BASELINES, make_baseline
from wattgym.agents.config import (
    DEFAULTS,
    ImitationConfig,
    NetworkConfig,
    SelectionValidationConfig,
    TrainConfig,
    ValidationConfig,
)
from wattgym.agents.episodes import METRICS
from wattgym.agents.results import EvaluationResult
from wattgym.agents.rollout import Arena
from wattgym.agents.scoring import scenario_metrics
from wattgym.agents.validation import SELECTION_SHOWN, SHOWN
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.federation.reward import TERMS as SELECTION_TERMS
from wattgym.envs.reward import TERMS

DOCS = Path(__file__).parents[2] / "docs"
TRAINING, EVALUATION = ((DOCS / name).read_text() for name in ("training.md", "evaluation.md"))


def rows(text):
    """First cell's code words and second cell of every table row."""
    return {match[0]: match[1].strip() for match in re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE)}


def shown(value):
    """A default as the page prints it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) if isinstance(value[0], str) else str(list(value))
    if isinstance(value, str):
        return f"`{value}`"
    text = f"{value:,}".replace(",", " ") if value >= 10_000 else f"{value:g}"
    return text.replace("-", "−")


def test_every_key_is_listed_with_its_default():
    table = rows(TRAINING)
    for group, model in (("train", TrainConfig), ("network", NetworkConfig), ("validation", ValidationConfig)):
        for name, value in dict(model()).items():
            if name != "hyperparameters":
                assert table[f"{group}.{name}"] == shown(value), name


def test_every_algorithm_and_hyperparameter_is_listed():
    for algorithm, settings in DEFAULTS.items():
        assert f"`{algorithm}`" in TRAINING
        for name, value in settings.items():
            if name not in ("train_freq", "gradient_steps"):
                number = "1e-3" if value == 1e-3 else shown(value)
                assert re.search(rf"`{name}` {re.escape(number)}\b", TRAINING), (algorithm, name)


def test_every_tag_is_listed():
    for name in TERMS:
        assert f"`reward/{name}`" in TRAINING
    for name in SHOWN:
        assert f"`{name}`" in TRAINING


def test_site_selection_is_listed():
    for name, value in dict(ImitationConfig()).items():
        assert f"`imitation.{name}`" in TRAINING
        if name in ("steps", "passes", "window"):
            assert rows(TRAINING)[f"imitation.{name}"] == shown(value)
    for name in SELECTION_TERMS:
        assert f"`reward/{name}`" in TRAINING
    for name in SELECTION_SHOWN:
        assert f"`{name}`" in TRAINING
    defaults = SelectionValidationConfig()
    assert f"is {shown(defaults.every_steps)} here" in TRAINING
    assert f"counts {defaults.scenarios} for each family" in TRAINING


def test_every_baseline_and_metric_is_listed():
    for name in BASELINES:
        assert f"| {name} |" in EVALUATION
    config = PowerShapingConfig.model_validate({"site": {"jobs": 1}, "period_s": 10.0, "episode_s": 600.0})
    rollout = Arena(config).run(make_baseline("uncapped"), [0])
    for name in scenario_metrics(rollout, rollout):
        (line,) = (line for line in EVALUATION.splitlines() if line.startswith("| `") and f"`{name}`" in line)
        assert line.endswith(f"| {METRICS[name].better} |")


def test_the_example_controller_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", EVALUATION, re.DOTALL)
    exec(compile(example, "docs/evaluation.md", "exec"), {})
    assert "'slow feed-forward'" in capsys.readouterr().out
    result = EvaluationResult.load("my-evaluation")
    assert result.candidates == ("slow feed-forward",)
    assert len(result.rows) == 4 * 2 * 4
    assert Path("my-evaluation/report.html").stat().st_size > 10_000
    nrmse = {name: result.summary.estimates[name, "nrmse"].value for name in result.controllers}
    assert nrmse["feed-forward"] < nrmse["uncapped"]

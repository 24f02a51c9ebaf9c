"""docs/live_job.md is what the code does."""

import re
from pathlib import Path

import pytest
import yaml

from wattgym.live.channel import JobStatus, Knobs
from wattgym.live.config import MAY_CHANGE, JobConfig
from wattgym.phase import Phase

PAGE = (Path(__file__).parents[2] / "docs" / "live_job.md").read_text(encoding="utf-8")


def test_the_configuration_on_the_page_is_valid():
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = JobConfig.model_validate(yaml.safe_load(block))
    # What the page spells out and what it leaves to the defaults.
    assert config.lora == JobConfig().lora
    assert config.optimiser.warmup_steps == 10


def test_knobs_phases_and_keys_are_all_there():
    knobs = PAGE.split("## Knobs")[1].split("## What is published")[0]
    assert re.findall(r"^\| `(\w+)` \|", knobs, re.MULTILINE) == list(Knobs.model_fields)
    assert all(f"`{phase.name}`" in PAGE for phase in Phase)
    assert all(f"`{key}`" in PAGE for key in MAY_CHANGE)
    assert {"speed_held_s", "duty_held_s", "knobs_sequence"} <= set(JobStatus.__dataclass_fields__)


@pytest.mark.slow
def test_the_example_on_the_page_runs(tmp_path, capsys):
    pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "docs/live_job.md", "exec"), {"folder": tmp_path / "run"})
    steps, _loss, phase, _tokens = capsys.readouterr().out.split()
    assert int(steps) >= 0
    assert phase in Phase.__members__

from dataclasses import replace

import numpy as np
import pytest

from wattgym.agents.baselines import make_baseline
from wattgym.agents.deploy_report import write_reports
from wattgym.agents.results import EvaluationResult
from wattgym.agents.rollout import Arena
from wattgym.envs.config import PowerShapingConfig
from wattgym.metrics.pjm import pjm_variant

CONFIG = PowerShapingConfig.model_validate(
    {"site": {"jobs": 2}, "episode_s": 700.0, "signal": {"trace": "regd"}, "period_s": 2.0}
)


class Run:
    """A live run whose record comes from the emulator."""

    variant = pjm_variant("legacy")

    def __init__(self, name, ticks=None):
        self.record = Arena(CONFIG).run(make_baseline(name), [1]) if name else None
        if ticks is not None:
            cut = ("signal", "target_w", "power_w", "throughput", "reward", "limit", "knobs", "changed")
            self.record = replace(self.record, **{key: getattr(self.record, key)[:, :ticks] for key in cut})

    def rollout(self):
        return self.record


def test_a_run_of_ten_minutes_is_scored_beside_the_uncapped_one(tmp_path):
    assert write_reports("PI", Run("PI"), Run("uncapped"), tmp_path, {"command": "test"})
    result = EvaluationResult.load(tmp_path)
    assert result.controllers == ("PI", "uncapped")
    assert (result.baselines, result.headline) == (("uncapped",), "pjm_composite")
    assert result.scores("PI", "pjm_composite").item() > result.scores("uncapped", "pjm_composite").item()
    assert 0.5 < result.scores("PI", "throughput_retained").item() < 1.0
    assert result.scores("uncapped", "throughput_retained").item() == 1.0
    assert "PI" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("other", [None, "uncapped"])
def test_a_short_run_has_no_score_and_is_compared_over_what_both_have(tmp_path, other):
    assert write_reports("PI", Run("PI", 20), Run(other) if other else None, tmp_path, {})
    result = EvaluationResult.load(tmp_path)
    assert result.headline == "nrmse"
    assert "pjm_composite" not in result.metrics
    assert [trace.t_s.size for trace in result.traces] == [20] * len(result.controllers)
    assert ("throughput_retained" in result.metrics) == (other is not None)
    assert np.isfinite(result.scores("PI", "nrmse")).all()


def test_a_run_that_never_began_has_no_report(tmp_path):
    assert not write_reports("PI", Run(None), None, tmp_path, {})
    assert list(tmp_path.iterdir()) == []

import json

import pytest

from wattgym.live.config import JobConfig


@pytest.fixture
def records(tmp_path):
    """Thirty short sums as JSON lines."""
    path = tmp_path / "sums.jsonl"
    sums = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a in range(1, 7) for b in range(1, 6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in sums), encoding="utf-8")
    return path


@pytest.fixture
def config(records):
    """Configuration of a tiny job on the sums; keyword arguments replace top-level keys."""

    def make(**changes):
        values = {
            "seed": 3,
            "model": {"source": "tiny", "tiny": {"hidden_size": 32, "layers": 2, "heads": 2}},
            "data": {"source": "file", "path": str(records), "max_tokens": 64, "holdout": 4},
            "lora": {"targets": "all-linear"},
            "optimiser": {"learning_rate": 0.02},
            "samples_per_update": 8,
            "micro_batch": 4,
            "checkpoint_every": None,
            "device": "cpu",
        }
        return JobConfig.model_validate({**values, **changes})

    return make

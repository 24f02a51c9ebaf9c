import pytest

from wattgym.config import parse_config
from wattgym.federated.config import FederationConfig

REGIONS = ("aws:us-east-1", "aws:eu-west-1", "aws:ap-northeast-1", "aws:us-west-2")


@pytest.fixture(scope="session")
def federation():
    """Configuration of a federation of tiny sites; keyword arguments replace top-level keys."""

    def make(names=("a", "b", "c"), **changes):
        values = {
            "seed": 3,
            "sites": [{"name": name, "region": REGIONS[i]} for i, name in enumerate(names)],
            "model": {"source": "tiny", "tiny": {"hidden_size": 32, "layers": 1, "heads": 2}},
            "data": {"source": "tasks", "records": 400, "max_tokens": 96, "evaluation": 16},
            "lora": {"targets": "all-linear", "rank": 4},
            "optimiser": {"learning_rate": 0.01},
            "samples_per_update": 4,
            "micro_batch": 4,
            "local_steps": 3,
            "deadline_s": 120.0,
            "backoff_s": 0.0,
            "device": "cpu",
        }
        return parse_config(FederationConfig, {**values, **changes}, "federation")

    return make

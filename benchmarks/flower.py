"""SmolLM2 fine-tuned at two sites over a SuperLink and SuperNodes on loopback: does it learn, and where does time go?

    python benchmarks/flower.py

prints the loss before and after, whether stock peft loads the adapter and finds the same loss lower, the peak memory of
all processes together (proportional set size), and the seconds of a round: compute (the slower site's training),
transfer (moving the adapter between aggregator, relays and trainers), and what Flower adds (polling, starting a process
for each message).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

MARK = "WATTGYM_BENCHMARK"


def federation(steps: int) -> dict[str, Any]:
    """Two sites, half of GSM8K's first 400 records each."""
    return {
        "sites": [{"name": "virginia", "region": "aws:us-east-1"}, {"name": "ireland", "region": "aws:eu-west-1"}],
        "model": {"source": "smollm2"},
        "data": {"source": "gsm8k", "max_records": 400, "max_tokens": 128, "evaluation": 8, "split": {"kind": "iid"}},
        "lora": {"targets": "all-linear", "rank": 8},
        "optimiser": {"learning_rate": 5e-4},
        "samples_per_update": 4,
        "micro_batch": 4,
        "local_steps": steps,
        # Work of a round for two sites: local_steps each, where their power is the same.
        "selection": {"learning": {"reference_samples": 1000.0}, "rounds": {"work_samples": 2000.0}},
        "deadline_s": 3600.0,
        "evaluation_s": 3600.0,
        "device": "cpu",
    }


def memory_mb(mark: str) -> float:
    """Proportional set size of all processes that carry a mark, MB: shared pages count once."""
    wanted, total_kb = f"{MARK}={mark}".encode(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total_kb += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb / 1024


@contextmanager
def peak_memory(mark: str) -> Iterator[list[float]]:
    """Watches the memory of marked processes; the list's one entry is the peak."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            peak[0] = max(peak[0], memory_mb(mark))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def split(rounds: list[dict[str, Any]], timings: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Seconds of each round by what they were spent on."""
    table = []
    for record in rounds:
        answers = [t for t in timings if t["kind"] == "train" and t["round"] == record["round"]]
        trained = {o["site"]: o["metrics"]["train_s"] for o in record["outcomes"] if o["metrics"]}
        slowest = max(answers, key=lambda t: t["total_s"])
        compute_s = trained[slowest["site"]]
        transfer_s = slowest["push_s"] + slowest["pull_s"] + slowest["relay_s"] - compute_s
        table.append(
            {
                "round": record["seconds"],
                "compute": compute_s,
                "transfer": transfer_s,
                "engine": slowest["total_s"] - compute_s - transfer_s,
                "evaluation": record["seconds"] - slowest["total_s"],
            }
        )
    return table


def stock_peft_loss(adapter: Path) -> tuple[float, float]:
    """Loss of one sentence, nats per token, without and with the adapter, by transformers and peft alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from wattgym.live.models import smollm2_folder

    folder = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = (
        "Question: Tom has 3 boxes of 12 pens. How many pens has he?\nAnswer: He has 3*12=<<3*12=36>>36 pens.\n#### 36"
    )
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids).loss.item()
        after = PeftModel.from_pretrained(model, adapter)(input_ids=ids, labels=ids).loss.item()
    return before, after


def main() -> None:
    """Runs it and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="local steps of a round")
    parser.add_argument("--out", type=Path, help="run folder, kept; a temporary one if left out")
    options = parser.parse_args()
    mark = secrets.token_hex(8)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # The command that it runs ends with it.
    with tempfile.TemporaryDirectory(prefix="wattgym-flower-") as temporary:
        out = options.out or Path(temporary) / "run"
        file = Path(temporary) / "federation.json"
        file.write_text(json.dumps(federation(options.steps)))
        command = [str(Path(sys.executable).parent / "wattgym"), "federate", "--sites", str(file)]
        command += ["--policy", "all sites", "--rounds", str(options.rounds), "--engine", "flower", "--out", str(out)]
        command += ["--join-s", "3600"]
        with peak_memory(mark) as peak:
            subprocess.run(command, env={**os.environ, MARK: mark}, check=True)
        rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        timings = [json.loads(line) for line in (out / "flower.jsonl").read_text().splitlines()]
        before, after = stock_peft_loss(out / "adapter")
    table = split(rounds[1:], timings)
    print(
        f"\nloss on the evaluation records: {rounds[0]['evaluation']['loss']:.4f} before, "
        f"{rounds[-1]['evaluation']['loss']:.4f} after {len(table)} rounds"
    )
    print(f"stock peft, one sentence: {before:.4f} without the adapter, {after:.4f} with it")
    print(
        f"peak memory of all processes: {peak[0] / 1024:.2f} GB; adapter "
        f"{rounds[1]['outcomes'][0]['bytes_each_way'] / 1e6:.1f} MB each way"
    )
    for part in ("round", "compute", "transfer", "engine", "evaluation"):
        values = [row[part] for row in table]
        print(f"{part:11} {median(values):7.1f} s median   {min(values):7.1f} to {max(values):.1f}")


if __name__ == "__main__":
    main()

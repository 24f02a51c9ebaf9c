"""The README's commands and code run as they stand there, only made short."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

SHORT = {
    "train": "--steps 500 --set train.num_envs=4 --set env.site.jobs=2 --set env.episode_s=200 "
    "--set network.hidden=[8] --set validation.scenarios=1 --set validation.episode_s=1200 "
    "--set train.hyperparameters.n_steps=64",
    "evaluate": "--seeds 1 --episode-s 1200 --families regd",
    "deploy": "--duration 6s --job tiny",
    "federate": "--rounds 1",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    lines = [line.split("  #")[0] for block in blocks("") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("wattgym ")]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert targets == ["quickstart", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_commands_run_one_after_another(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    t_s = np.arange(0, 1800, 2.0)
    signal = np.sin(t_s / 90.0)
    for name, values in (("signal.csv", signal), ("response.csv", 0.9 * signal)):
        rows = [f"{t:.0f},{v:.6f}" for t, v in zip(t_s, values, strict=True)]
        (tmp_path / name).write_text("t_s,r\n" + "\n".join(rows) + "\n")
    seen = []
    for command in commands():
        # An option that comes twice counts as given last.
        short = shlex.split(SHORT.get(command[1], ""))
        done = subprocess.run(
            [sys.executable, "-m", *command, *short], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (command, done.stderr[-2000:])
        seen.append(command[1])
    assert seen == ["train", "evaluate", "export", "deploy", "score", "federate", "traces", "hw"]
    assert (tmp_path / "evaluation" / "report.html").is_file()


def test_the_python_example_runs():
    (code,) = blocks("python")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target

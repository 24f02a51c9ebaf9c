"""Turns a trained site-selection policy into the content of a bundle."""

from __future__ import annotations

import copy
import hashlib
import io
import warnings
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import nn

from wattgym.agents.bundle import GOLDEN, PARITY, POLICY, SCHEMA_VERSION, Parity
from wattgym.agents.checkpoint import Checkpoint
from wattgym.agents.config import SelectionTrainingConfig
from wattgym.agents.export import OPSET, provenance
from wattgym.agents.onnx_policy import Float32Array, OnnxPolicy
from wattgym.agents.selection_bundle import (
    GOLDEN_EACH,
    GOLDEN_SIZES,
    Pairs,
    SelectionContract,
    SelectionManifest,
    difference,
    write_pairs,
)
from wattgym.agents.set_features import split
from wattgym.agents.set_policy import SetPolicy
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.selection import SiteSelection
from wattgym.errors import UserError
from wattgym.runs import RunFolder, installed_versions

PARITY_EACH = 512
"""Observations that the exported network is compared on at each number of sites."""


class ScoringPolicy(nn.Module):
    """Observations to a score for each slot, `tanh(logit / 2)`: twice the probability of being chosen, minus 1.

    Positive scores are what stable-baselines3's deterministic `predict` chooses. In double precision inside, for the
    same reasons as `wattgym.agents.export.BundledPolicy`.
    """

    def __init__(self, policy: SetPolicy) -> None:
        """Takes over a policy's actor; the policy stays as it is."""
        super().__init__()
        self.layout = policy.layout
        self.actor = copy.deepcopy(policy.actor).double()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Scores, shape `(B, N)`, for observations of any length that fits."""
        return torch.tanh(0.5 * self.actor(split(self.layout, observation.double()))).float()


def selection_content(
    checkpoint: Checkpoint, config: SelectionTrainingConfig, run: RunFolder, source: Path
) -> tuple[SelectionManifest, dict[str, bytes]]:
    """Manifest (without its digest) and files of a bundle.

    Args:
        checkpoint: The policy.
        config: Its training.
        run: The training's run.
        source: The checkpoint's folder, for messages.

    Raises:
        UserError: The policy is none over sites, or the network's scores differ from the original's.
    """
    policy = checkpoint.model.policy
    if not isinstance(policy, SetPolicy):
        raise UserError(f"{source}: only policies over sites are exported; this one is '{config.network.architecture}'")
    env = next(iter(config.envs.values()))
    module = ScoringPolicy(policy).eval()
    model = onnx_model(module, policy.layout.size(3))
    network = OnnxPolicy(model, "size", "slots", None)
    compared, single = _pairs(module, env, PARITY_EACH, seed=0), 0.0
    for observation, score in compared.values():
        with torch.no_grad():
            logits = policy.actor(policy.sites(torch.from_numpy(observation)))
        single = max(single, float((torch.tanh(0.5 * logits) - torch.from_numpy(score)).abs().max()))
    apart = difference(compared, network)
    if apart > PARITY:
        raise UserError(
            f"{source}: the exported network's scores differ from the original's by {apart:.2g}, allowed is "
            f"{PARITY:g}; no bundle was written"
        )
    files = {POLICY: model, GOLDEN: write_pairs(_pairs(module, env, GOLDEN_EACH, seed=1))}
    manifest = SelectionManifest(
        schema_version=SCHEMA_VERSION,
        kind="site_selection",
        name=run.path.resolve().name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        packages={**installed_versions(), "onnx": metadata.version("onnx")},
        contract=SelectionContract.of(env, SiteSelection(env).layout),
        training=provenance(checkpoint, run),
        parity=Parity(observations=PARITY_EACH * len(GOLDEN_SIZES), largest_difference=apart, rounding=single),
        sha256={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        digest="",
    )
    return manifest, files


def onnx_model(module: ScoringPolicy, size: int) -> bytes:
    """A policy as an ONNX file with a batch, and a federation, of any size."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            module,
            (torch.zeros(2, size),),
            file,  # type: ignore[arg-type]  # the tracer takes open files too
            dynamo=False,
            opset_version=OPSET,
            input_names=["observation"],
            output_names=["action"],
            dynamic_axes={"observation": {0: "batch", 1: "size"}, "action": {0: "batch", 1: "slots"}},
        )
    return file.getvalue()


def _pairs(module: ScoringPolicy, env: SiteSelectionConfig, count: int, seed: int) -> Pairs:
    """Observations of federations of each golden size, as its own choices lead to them, with the module's scores."""
    pairs: Pairs = {}
    for n in GOLDEN_SIZES:
        sites = env.sites.model_copy(update={"named": (), "count": (n, n), "slots": n})
        selection = SiteSelection(env.model_copy(update={"sites": sites}))
        seen: list[Float32Array] = []
        batch = min(count, 32)
        observation = selection.reset(range(seed * 1000, seed * 1000 + batch))
        for k in range(-(-count // batch)):
            seen.append(observation.copy())
            with torch.no_grad():
                score = module(torch.from_numpy(observation)).numpy()
            outcome = selection.step(score)
            over = np.flatnonzero(outcome.terminated | outcome.truncated)
            seeds = [seed * 1000 + batch * (k + 1) + int(row) for row in over]
            observation = selection.reset(seeds, over) if over.size else outcome.observation
        shown = np.concatenate(seen)[:count]
        with torch.no_grad():
            pairs[n] = shown, module(torch.from_numpy(shown)).numpy()
    return pairs

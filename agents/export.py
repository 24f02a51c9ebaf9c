"""Turns a training run's policy into a bundle: one network with everything inside, held against the original."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import secrets
import shutil
import warnings
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from wattgym.agents.bundle import (
    GOLDEN,
    MANIFEST,
    PARITY,
    POLICY,
    SCHEMA_VERSION,
    BaseManifest,
    Bundle,
    BundleManifest,
    Contract,
    Parity,
    Training,
    load_bundle,
    manifest_digest,
)
from wattgym.agents.checkpoint import Checkpoint, Normaliser, load_checkpoint
from wattgym.agents.config import SelectionTrainingConfig
from wattgym.agents.onnx_policy import GOLDEN_PAIRS, Float32Array, Golden, OnnxPolicy, Recurrence, State
from wattgym.agents.policy import Which, checkpoint_folder, training_config
from wattgym.agents.selection_bundle import SelectionBundle, load_selection_bundle
from wattgym.envs.observation import BOUND, ObservationLayout
from wattgym.errors import UserError
from wattgym.files import atomic_write_json
from wattgym.runs import RunFolder, installed_versions

PARITY_OBSERVATIONS = 10_000
OPSET = 17
"""Version of ONNX's operators; every ONNX Runtime since 1.12 (2022) runs it."""


class BundledPolicy(nn.Module):
    """Observations to actions as stable-baselines3's deterministic `predict` computes them, normaliser included.

    Everything inside is in double precision. What single precision gives depends on the order of sums, and thus on
    batch size and processor: by some 1e-7, and by 1e-5 where a steep network sees what it never saw in training.
    A bundle acts the same everywhere; what differs from the original is the original's own rounding alone.
    """

    mean: torch.Tensor
    spread: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, policy: Any, normaliser: Normaliser | None) -> None:
        """Takes over a policy's actor.

        Args:
            policy: Policy of PPO, RecurrentPPO, SAC or TQC; it stays as it is.
            normaliser: Statistics that observations are scaled by; None: not scaled.
        """
        super().__init__()
        self._normaliser = normaliser
        if normaliser is not None:
            self.register_buffer("mean", torch.tensor(normaliser.mean, dtype=torch.float64))
            self.register_buffer("spread", torch.from_numpy(normaliser.spread))
        self.register_buffer("low", torch.from_numpy(policy.action_space.low))
        self.register_buffer("high", torch.from_numpy(policy.action_space.high))
        self._squashed = bool(policy.squash_output)
        if hasattr(policy, "actor"):  # SAC and TQC
            actor = policy.actor
            modules = (actor.features_extractor, actor.latent_pi, actor.mu)
        else:
            modules = (policy.pi_features_extractor, policy.mlp_extractor.policy_net, policy.action_net)
        self.features, self.latent, self.mean_action = copy.deepcopy(modules)
        self.lstm = copy.deepcopy(getattr(policy, "lstm_actor", None))
        self.double()

    def forward(
        self,
        observation: torch.Tensor,
        hidden: torch.Tensor | None = None,
        cell: torch.Tensor | None = None,
        episode_start: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions, and for recurrent policies the next hidden and cell state."""
        x = self.features(self._normalised(observation))
        if self.lstm is None:
            return self._action(x).float()
        assert hidden is not None
        assert cell is not None
        assert episode_start is not None
        kept = (1.0 - episode_start.double()).unsqueeze(1)
        x, hidden, cell = _lstm_step(self.lstm, x, hidden.double() * kept, cell.double() * kept)
        return self._action(x).float(), hidden.float(), cell.float()

    def _normalised(self, observation: torch.Tensor) -> torch.Tensor:
        if self._normaliser is None:
            return observation.double()
        scaled = (observation.double() - self.mean) / self.spread
        # The original's network is given these in single precision.
        return scaled.clamp(-self._normaliser.clip, self._normaliser.clip).float().double()

    def _action(self, x: torch.Tensor) -> torch.Tensor:
        action = self.mean_action(self.latent(x))
        if self._squashed:
            action = self.low + 0.5 * (torch.tanh(action) + 1.0) * (self.high - self.low)
        return torch.minimum(torch.maximum(action, self.low), self.high)


def _lstm_step(
    lstm: nn.LSTM, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One time step of a batch, spelt out, because a traced `nn.LSTM` is tied to the batch size it was traced with."""
    hiddens, cells = [], []
    for layer in range(lstm.num_layers):
        from_input = nn.functional.linear(x, getattr(lstm, f"weight_ih_l{layer}"), getattr(lstm, f"bias_ih_l{layer}"))
        from_state = nn.functional.linear(
            hidden[layer], getattr(lstm, f"weight_hh_l{layer}"), getattr(lstm, f"bias_hh_l{layer}")
        )
        take, keep, new, show = (from_input + from_state).split(lstm.hidden_size, dim=1)  # type: ignore[no-untyped-call]
        c = torch.sigmoid(keep) * cell[layer] + torch.sigmoid(take) * torch.tanh(new)
        x = torch.sigmoid(show) * torch.tanh(c)
        hiddens.append(x)
        cells.append(c)
    return x, torch.stack(hiddens), torch.stack(cells)


def export_bundle(run_path: str | Path, out: str | Path, which: Which = "best") -> Bundle | SelectionBundle:
    """Writes a run's policy as a bundle, whole or not at all, and loads it back.

    Args:
        run_path: Training run folder.
        out: The bundle's folder, new or empty.
        which: The best checkpoint on validation, or the last.

    Raises:
        UserError: The run has no such policy, the target holds something or cannot be written, an optional package is
            missing, or the network's actions differ from the original's by more than `PARITY`.
    """
    _require_packages()
    folder = Path(out).absolute()
    _check_target(folder, out)
    run = RunFolder.open(run_path, kind="training")
    config = training_config(run)
    source = checkpoint_folder(run, which)
    checkpoint = load_checkpoint(source)
    if isinstance(config, SelectionTrainingConfig):
        from wattgym.agents.selection_export import selection_content

        selection, files = selection_content(checkpoint, config, run, source)
        _write(folder, out, files, selection)
        return load_selection_bundle(folder)
    contract = Contract.of(config.env, ObservationLayout.of(config.env))
    names = tuple(feature.name for feature in contract.features)
    if names != checkpoint.manifest.features:
        raise UserError(f"{source}: its features are not those of the run's configuration")
    recurrence = _recurrence(checkpoint.model.policy)
    model = onnx_model(checkpoint, recurrence)
    policy = OnnxPolicy(model, len(names), contract.actions, recurrence)
    single = record(checkpoint, np.random.default_rng(0), PARITY_OBSERVATIONS)
    to_double(checkpoint.model.policy)
    exact = record(checkpoint, np.random.default_rng(0), PARITY_OBSERVATIONS)
    difference = exact.difference(policy)
    if difference > PARITY:
        raise UserError(
            f"{source}: the exported network's actions differ from the original's by {difference:.2g}, allowed is "
            f"{PARITY:g}; no bundle was written"
        )
    golden = io.BytesIO()
    np.savez(golden, **record(checkpoint, np.random.default_rng(1), GOLDEN_PAIRS).arrays())  # type: ignore[arg-type]
    files = {POLICY: model, GOLDEN: golden.getvalue()}
    manifest = BundleManifest(
        schema_version=SCHEMA_VERSION,
        kind="power_shaping",
        name=run.path.resolve().name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        packages={**installed_versions(), "onnx": metadata.version("onnx")},
        contract=contract,
        recurrence=recurrence,
        training=provenance(checkpoint, run),
        parity=Parity(
            observations=PARITY_OBSERVATIONS,
            largest_difference=difference,
            rounding=float(np.abs(single.action - exact.action).max()),
        ),
        sha256={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        digest="",
    )
    _write(folder, out, files, manifest)
    return load_bundle(folder)


def provenance(checkpoint: Checkpoint, run: RunFolder) -> Training:
    """Where a checkpoint's policy comes from."""
    return Training(
        algorithm=checkpoint.manifest.algorithm,
        steps=checkpoint.manifest.steps,
        checkpoint="last" if checkpoint.folder.parent.name == "checkpoints" else "best",
        run=run.info,
        config=run.config,
    )


def onnx_model(checkpoint: Checkpoint, recurrence: Recurrence | None) -> bytes:
    """A policy as an ONNX file with a batch of any size."""
    policy = checkpoint.model.policy
    features = policy.observation_space.shape[0]
    inputs: dict[str, torch.Tensor] = {"observation": torch.zeros(2, features)}
    batch = {"observation": {0: "batch"}, "action": {0: "batch"}}
    outputs = ["action"]
    if recurrence is not None:
        state = torch.zeros(recurrence.layers, 2, recurrence.size)
        inputs |= {"hidden": state, "cell": state.clone(), "episode_start": torch.zeros(2)}
        outputs += ["next_hidden", "next_cell"]
        batch |= {name: {1: "batch"} for name in ("hidden", "cell", "next_hidden", "next_cell")}
        batch |= {"episode_start": {0: "batch"}}
    file = io.BytesIO()
    with warnings.catch_warnings():
        # PyTorch's newer exporter needs one more package and gains nothing for a network without control flow.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            BundledPolicy(policy, checkpoint.manifest.normaliser).eval(),
            tuple(inputs.values()),
            file,  # type: ignore[arg-type]  # the tracer takes open files too
            dynamo=False,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=outputs,
            dynamic_axes=batch,
        )
    return file.getvalue()


def to_double(policy: Any) -> None:
    """Lets a policy's own code compute in double precision, so that its rounding hides no difference.

    Args:
        policy: Policy of PPO, RecurrentPPO, SAC or TQC; changed for good.
    """
    policy.double()
    actor = getattr(policy, "actor", None)
    entries = [policy.pi_features_extractor if actor is None else actor.features_extractor]
    entries += [policy.lstm_actor] if hasattr(policy, "lstm_actor") else []
    for module in entries:
        # The library casts observations and LSTM states to single precision on their way in.
        module.register_forward_pre_hook(lambda _, inputs: _doubled(inputs))


def _doubled(value: Any) -> Any:
    return tuple(_doubled(item) for item in value) if isinstance(value, tuple) else value.double()


def record(checkpoint: Checkpoint, rng: np.random.Generator, count: int) -> Golden:
    """What a policy's own library answers to random observations.

    Args:
        checkpoint: The policy.
        rng: Draws observations, and for recurrent policies first states and where episodes begin.
        count: Observations, a square number; a recurrent policy sees them as `√count` sequences of `√count` steps.
    """
    model, normaliser = checkpoint.model, checkpoint.manifest.normaliser
    observation = sample_observations(rng, count, model.observation_space.shape[0], normaliser)
    recurrence = _recurrence(model.policy)
    steps = 1 if recurrence is None else round(count**0.5)
    observation = observation.reshape(steps, count // steps, -1)
    batch = observation.shape[1]
    start = (rng.random((steps, batch)) < 0.1).astype(np.float32)
    first: State | None = None
    if recurrence is not None:
        hidden, cell = rng.uniform(-1.0, 1.0, (2, recurrence.layers, batch, recurrence.size)).astype(np.float32)
        first = (hidden, cell)
    state: Any = first
    actions = []
    for seen, begins in zip(observation, start, strict=True):
        shown = seen if normaliser is None else normaliser.apply(seen)
        action, state = model.predict(shown, state=state, episode_start=begins, deterministic=True)
        actions.append(action)
    action = np.stack(actions).astype(np.float32)
    return Golden(observation, action, start, first)


def sample_observations(
    rng: np.random.Generator, count: int, features: int, normaliser: Normaliser | None
) -> Float32Array:
    """Random observations within bounds: ordinary, anywhere, at the bounds, and where the normaliser clips.

    Args:
        rng: Source of randomness.
        count: Observations.
        features: Length D of the vector.
        normaliser: Its statistics say what is ordinary.

    Returns:
        Shape `(count, D)`, shuffled, within ±`BOUND`.
    """
    centre = np.zeros(features) if normaliser is None else np.array(normaliser.mean)
    spread = np.ones(features) if normaliser is None else np.sqrt(np.array(normaliser.var))
    clip = 10.0 if normaliser is None else normaliser.clip
    kinds = [
        rng.normal(centre, spread, (count, features)),
        rng.uniform(-BOUND, BOUND, (count, features)),
        rng.choice([-BOUND, 0.0, BOUND], (count, features)),
        centre + rng.choice([-2.0, -1.0, 1.0, 2.0], (count, features)) * clip * spread,
    ]
    chosen = rng.choice(4, count, p=[0.5, 0.2, 0.15, 0.15])
    drawn = np.stack(kinds)[chosen, np.arange(count)]
    within: Float32Array = np.clip(drawn, -BOUND, BOUND).astype(np.float32)
    return within


def _recurrence(policy: Any) -> Recurrence | None:
    lstm = getattr(policy, "lstm_actor", None)
    return None if lstm is None else Recurrence(layers=lstm.num_layers, size=lstm.hidden_size)


def _require_packages() -> None:
    for package in ("onnx", "onnxruntime"):
        if util.find_spec(package) is None:
            raise UserError(f"exporting a policy needs {package}: pip install 'wattgym[export]'")


def _check_target(folder: Path, named: str | Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise UserError(f"{named}: {what}; a bundle needs a new or empty folder, choose another --out")


def _write(folder: Path, named: str | Path, files: dict[str, bytes], manifest: BaseManifest) -> None:
    """Writes all files beside the target and moves the folder there in one step."""
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
        for name, content in files.items():
            with (draft / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        data = manifest.model_dump(mode="json")
        atomic_write_json(draft / MANIFEST, {**data, "digest": manifest_digest(data)})
        # A folder that is not empty is never replaced: the operating system refuses.
        draft.rename(folder)
    except OSError as error:
        raise UserError(f"{named}: cannot write the bundle: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)

"""A saved policy: network and normaliser side by side, so that one cannot be loaded without the other."""

from __future__ import annotations

import pickle
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wattgym.agents.config import Algorithm
from wattgym.config import FrozenModel, parse_config
from wattgym.envs.plant import FloatArray
from wattgym.errors import UserError
from wattgym.files import atomic_write_json, read_json_object, sha256

SCHEMA_VERSION = 1
MANIFEST, POLICY, RESUME, REPLAY = "checkpoint.json", "policy.zip", "resume.pkl", "replay.pkl"


STEADY = 1e-3
"""A feature with a smaller standard deviation than this did not vary in training; features are of the order of 1."""


class Normaliser(FrozenModel):
    """Running statistics of observations as they were when the policy was saved.

    A feature that did not vary in training is shown to the policy as 0 whatever it is. Its network had nothing to learn
    the feature's weights from, and scaled by a spread of nearly 0, the age of a real sensor's value or another offer
    than the training's would come out as the largest number that there is.

    Attributes:
        mean: Means, one per feature.
        var: Variances, one per feature.
        epsilon: Added to the variance.
        clip: Normalised features are clipped to ±clip.
    """

    mean: tuple[float, ...]
    var: tuple[float, ...]
    epsilon: float
    clip: float

    @property
    def spread(self) -> NDArray[np.float64]:
        """What deviations from the mean are divided by, shape `(D,)`; infinite for features that did not vary."""
        var = np.array(self.var)
        return np.where(var < STEADY**2, np.inf, np.sqrt(var + self.epsilon))

    def apply(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalises observations, shape `(B, D)`."""
        scaled = (observation - np.array(self.mean)) / self.spread
        normalised: NDArray[np.float32] = np.clip(scaled, -self.clip, self.clip).astype(np.float32)
        return normalised


class Manifest(FrozenModel):
    """Content of `checkpoint.json`.

    Attributes:
        schema_version: Version of the folder's layout.
        algorithm: Algorithm that trained the policy.
        steps: Environment steps trained.
        normaliser: Observation statistics; None if the policy sees raw observations.
        features: Names of the observation's features, in order.
        sha256: Checksum of each file beside this one.
    """

    schema_version: int
    algorithm: Algorithm
    steps: int
    normaliser: Normaliser | None
    features: tuple[str, ...]
    sha256: dict[str, str]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded policy.

    Attributes:
        manifest: What the folder says of it.
        model: The stable-baselines3 model.
        folder: Where it came from.
    """

    manifest: Manifest
    model: Any
    folder: Path


class Task(Protocol):
    """What a policy looks at in the task of either control problem: the observation's layout."""

    @property
    def layout(self) -> Any:
        """Which feature lies where."""
        ...


class PolicyController:
    """Acts as a model's deterministic mode does, on observations normalised by the policy's own statistics.

    A policy over sites acts on federations of any number of slots.
    """

    def __init__(self, model: Any, normaliser: Normaliser | None, features: tuple[str, ...], name: str) -> None:
        """Wraps a stable-baselines3 model.

        Args:
            model: The model.
            normaliser: Statistics that observations are scaled by.
            features: Names of the features that the policy was trained on.
            name: Name in tables.
        """
        self.name = name
        self._model = model
        self._normaliser = normaliser
        self._features = features
        self._policy = model.policy
        self._state: Any = None

    def reset(self, task: Task) -> None:
        """Checks that the environment shows what the policy was trained on, and forgets the last episode.

        Raises:
            UserError: The observation differs; the message names the first feature that does.
        """
        self._state = None
        layout = task.layout
        over_sites = hasattr(self._model.policy, "for_slots")
        shown = shown_names(layout, over_sites)
        if shown != self._features:
            pairs = zip(shown, self._features, strict=False)
            first = next((f"'{a}' where the policy expects '{b}'" for a, b in pairs if a != b), None)
            detail = first or f"{len(shown)} features where the policy expects {len(self._features)}"
            raise UserError(f"'{self.name}': the environment's observation has {detail}")
        if over_sites and (layout.size,) != self._policy.observation_space.shape:
            self._policy = self._model.policy.for_slots(layout.slots)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """The policy's deterministic actions."""
        seen = observation if self._normaliser is None else self._normaliser.apply(observation)
        # Recurrent policies start from zeros when there is no state; the others never have one.
        action, self._state = self._policy.predict(seen, state=self._state, deterministic=True)
        return np.asarray(action, dtype=np.float64)


def shown_names(layout: Any, over_sites: bool = False) -> tuple[str, ...]:
    """What an environment shows a policy, by name.

    Args:
        layout: The observation's layout.
        over_sites: Whether the policy sees a set of sites; a site's features are then named once, not for each slot.
    """
    if over_sites:
        return tuple(f.name for f in layout.global_features) + tuple(f"site.{f.name}" for f in layout.site_features)
    return tuple(feature.name for feature in layout.features)


def policy_controller(model: Any, features: tuple[str, ...], name: str) -> PolicyController:
    """A model in training as a controller, with its statistics as they are now."""
    return PolicyController(model, _normaliser_of(model), features, name)


def algorithm_class(name: Algorithm) -> Any:
    """The stable-baselines3 (or contrib) class of an algorithm."""
    import sb3_contrib
    import stable_baselines3

    return {
        "ppo": stable_baselines3.PPO,
        "recurrent_ppo": sb3_contrib.RecurrentPPO,
        "sac": stable_baselines3.SAC,
        "tqc": sb3_contrib.TQC,
    }[name]


def save_checkpoint(
    folder: Path, model: Any, algorithm: Algorithm, features: tuple[str, ...], resume_state: dict[str, Any] | None
) -> None:
    """Saves a policy, and with `resume_state` all that an identical continuation needs; whole or not at all.

    Args:
        folder: Target; an older checkpoint there is replaced.
        model: stable-baselines3 model.
        algorithm: Its name.
        features: Names of the observation's features.
        resume_state: State beside the model's own, or None for a policy that is only to be used.

    Raises:
        UserError: The folder cannot be written; an older checkpoint stays as it was.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Drafts of a process that was killed while it saved this very checkpoint.
        for leftover in folder.parent.glob(f".{folder.name}.*"):
            if leftover != replaced_folder(folder):
                shutil.rmtree(leftover, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            model.save(draft / POLICY)
            if resume_state is not None:
                (draft / RESUME).write_bytes(pickle.dumps({**resume_state, "rng": _rng_state(model)}))
                if getattr(model, "replay_buffer", None) is not None:
                    model.save_replay_buffer(draft / REPLAY)
            manifest = Manifest(
                schema_version=SCHEMA_VERSION,
                algorithm=algorithm,
                steps=model.num_timesteps,
                normaliser=_normaliser_of(model),
                features=features,
                sha256={path.name: sha256(path) for path in sorted(draft.iterdir())},
            )
            atomic_write_json(draft / MANIFEST, manifest.model_dump(mode="json"))
            _replace_folder(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot save the checkpoint: {error.strerror or error}") from None


def load_checkpoint(folder: Path, env: Any = None) -> Checkpoint:
    """Loads a policy with its normaliser.

    Args:
        folder: A folder that `save_checkpoint` wrote.
        env: Environment to continue training in, or None to only act.

    Raises:
        UserError: The folder is no checkpoint, of another version, or a file is missing or differs from its checksum.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.sha256.items():
        if not (folder / name).is_file():
            raise UserError(f"{folder}: '{name}' is missing")
        if sha256(folder / name) != expected:
            raise UserError(
                f"{folder / name}: damaged, it differs from the checksum in {MANIFEST}; "
                "without this folder an earlier checkpoint of the run is used, if there is one"
            )
    model = algorithm_class(manifest.algorithm).load(folder / POLICY, env=env, device="cpu", force_reset=False)
    return Checkpoint(manifest, model, folder)


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint folder says of itself.

    Raises:
        UserError: It is no checkpoint, or of another schema version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder}: not a checkpoint (it has no {MANIFEST})")
    data = read_json_object(path)
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema version {data.get('schema_version')!r}, this WattGym reads version {SCHEMA_VERSION}"
        )
    return parse_config(Manifest, data, str(path))


def load_resume_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Restores the random generators and returns the state that was saved for continuing.

    The file is a pickle of the user's own run: never resume a folder from a source that is not trusted.

    Raises:
        UserError: The checkpoint was saved for use only.
    """
    path = checkpoint.folder / RESUME
    if not path.is_file():
        raise UserError(f"{checkpoint.folder}: holds no state to resume from")
    state: dict[str, Any] = pickle.loads(path.read_bytes())
    _set_rng_state(checkpoint.model, state.pop("rng"))
    if (checkpoint.folder / REPLAY).is_file():
        checkpoint.model.load_replay_buffer(checkpoint.folder / REPLAY)
    return state


def replaced_folder(folder: Path) -> Path:
    """Where a checkpoint lies while another one takes its place, and still lies if a crash came between."""
    return folder.with_name(f".{folder.name}.old")


def _normaliser_of(model: Any) -> Normaliser | None:
    vec_normalize = model.get_vec_normalize_env()
    if vec_normalize is None or not vec_normalize.norm_obs:
        return None
    return Normaliser(
        mean=tuple(vec_normalize.obs_rms.mean.tolist()),
        var=tuple(vec_normalize.obs_rms.var.tolist()),
        epsilon=vec_normalize.epsilon,
        clip=vec_normalize.clip_obs,
    )


def _replace_folder(draft: Path, folder: Path) -> None:
    """Puts the draft in the folder's place; a crash leaves the old one or the new one, at worst under a dot name."""
    old = replaced_folder(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    draft.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def _rng_state(model: Any) -> dict[str, Any]:
    import torch

    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (stable-baselines3 draws from it)
        "python": random.getstate(),
        # Off-policy algorithms draw their first actions from the space; loading a model seeds it anew.
        "action_space": model.action_space.np_random.bit_generator.state,
    }


def _set_rng_state(model: Any, state: dict[str, Any]) -> None:
    import torch

    model.action_space.np_random.bit_generator.state = state["action_space"]

    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 (stable-baselines3 draws from it)
    random.setstate(state["python"])

"""A policy bundle: a trained power-shaping policy as a folder that runs without the library it was trained with.

`policy.onnx` is the whole way from an observation to an action, `bundle.json` says what both mean and where the policy
comes from, `golden.npz` holds inputs with the outputs that the training library gave. docs/bundle.md has the format.
Nothing in a bundle is executed: JSON, plain arrays, and a network of listed operators.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from wattgym.agents.config import Algorithm
from wattgym.agents.onnx_policy import Float32Array, OnnxPolicy, Recurrence, State, read_golden
from wattgym.config import FrozenModel, parse_config
from wattgym.envs.config import ActionConfig, KnobRules, ObservationConfig, PowerShapingConfig
from wattgym.envs.observation import BOUND, ObservationLayout
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask
from wattgym.errors import UserError
from wattgym.files import read_json_object
from wattgym.hw.limits import CommandRules
from wattgym.runs import RunInfo

SCHEMA_VERSION = 1
"""Version of the folder's layout; another one is refused, never guessed at."""

MANIFEST, POLICY, GOLDEN = "bundle.json", "policy.onnx", "golden.npz"
PARITY = 1e-6
"""Largest difference from the training library's actions in double precision, absolute; a job's actions span 2."""

MAX_FILE_BYTES = 64 * 2**20
"""No file of a bundle is larger; it keeps a bad one from filling the memory of the machine that controls power."""


class BoundedFeature(FrozenModel):
    """One entry of the observation vector.

    Attributes:
        name: Its name, `job0.power` for features of a job.
        unit: What 1 means.
        low: Smallest value that is shown.
        high: Largest value that is shown.
    """

    name: str
    unit: str
    low: float
    high: float


class Contract(FrozenModel):
    """What a plant must agree on with a policy.

    Attributes:
        jobs: Jobs J; the action holds one number for each of them and each knob of `action.knobs`, knob by knob.
        period_s: Control period, seconds.
        action: Meaning of an action.
        action_bounds: Smallest and largest number in an action.
        observation: Optional parts of the observation and how they are computed.
        features: The observation vector, in order.
        rules: Safety limits that commands pass on their way to the devices.
        knob_rules: Rules for the knobs beside the power limit.
    """

    jobs: int = Field(ge=1)
    period_s: float = Field(gt=0.0)
    action: ActionConfig
    action_bounds: tuple[float, float]
    observation: ObservationConfig
    features: tuple[BoundedFeature, ...] = Field(min_length=1)
    rules: CommandRules
    knob_rules: KnobRules = Field(default_factory=KnobRules)

    @property
    def actions(self) -> int:
        """Numbers in an action."""
        return self.jobs * len(self.action.knobs)

    @classmethod
    def of(cls, config: PowerShapingConfig, layout: ObservationLayout) -> Contract:
        """What an environment or a live plant offers."""
        return cls(
            jobs=layout.jobs,
            period_s=config.period_s,
            action=config.action,
            action_bounds=(-1.0, 1.0),
            observation=layout.config,
            features=tuple(BoundedFeature(name=f.name, unit=f.unit, low=-BOUND, high=BOUND) for f in layout.features),
            rules=config.rules,
            knob_rules=config.knob_rules,
        )

    def difference(self, other: Contract) -> tuple[str, Any, Any] | None:
        """Name of the first field that differs, with this contract's value and the other's; None if they agree."""
        mine, theirs = flat(self.model_dump(mode="json")), flat(other.model_dump(mode="json"))
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            if mine.get(key) != theirs.get(key):
                return key, mine.get(key), theirs.get(key)
        return None


class Training(FrozenModel):
    """Where a policy comes from.

    Attributes:
        algorithm: Algorithm that trained it.
        steps: Environment steps trained.
        checkpoint: Which of the run's checkpoints it is.
        run: The training run: seed, commit, versions, command.
        config: The run's resolved configuration.
    """

    algorithm: Algorithm
    steps: int
    checkpoint: Literal["best", "last"]
    run: RunInfo
    config: dict[str, Any]


class Parity(FrozenModel):
    """How closely the network repeats the training library's deterministic actions.

    Attributes:
        observations: Random observations compared when the bundle was made.
        largest_difference: Largest difference found, absolute; the library computing in double precision.
        rounding: How far the library's actions in single precision, as it was trained, are from its own in double.
    """

    observations: int
    largest_difference: float
    rounding: float


class BaseManifest(FrozenModel):
    """Content of `bundle.json` that does not depend on the control problem.

    Attributes:
        schema_version: Version of the folder's layout.
        name: Name in tables and logs.
        created: When the bundle was made, ISO 8601, UTC.
        packages: Versions of the libraries that made it.
        training: Where the policy comes from.
        parity: What the comparison with the training library found.
        sha256: Checksum of each file beside this one.
        digest: Checksum of everything else in the manifest.
    """

    schema_version: int
    name: str = Field(min_length=1)
    created: str
    packages: dict[str, str]
    training: Training
    parity: Parity
    sha256: dict[str, str]
    digest: str


ManifestT = TypeVar("ManifestT", bound=BaseManifest)


class BundleManifest(BaseManifest):
    """Content of `bundle.json` of a power-shaping policy.

    Attributes:
        kind: Control problem.
        contract: What a plant must agree on.
        recurrence: The policy's memory; None if it has none.
    """

    kind: Literal["power_shaping"]
    contract: Contract
    recurrence: Recurrence | None


@dataclass(frozen=True, eq=False)
class Bundle:
    """A loaded bundle whose files, checksums and golden pairs are in order.

    Attributes:
        manifest: What the folder says of itself.
        policy: The network.
        folder: Where it came from.
    """

    manifest: BundleManifest
    policy: OnnxPolicy
    folder: Path


class BundleController:
    """A bundle as a controller of any plant that agrees with its contract."""

    def __init__(self, bundle: Bundle, name: str | None = None) -> None:
        """Wraps a bundle.

        Args:
            bundle: The bundle.
            name: Name in tables and logs; the bundle's own if None.
        """
        self.name = name or bundle.manifest.name
        self._bundle = bundle
        self._state: State | None = None

    def reset(self, task: ControlTask) -> None:
        """Forgets the last episode and checks that the plant is one that the policy can run.

        Raises:
            UserError: The plant differs from what the policy was trained with; the message names the field.
        """
        self._state = None
        found = self._bundle.manifest.contract.difference(Contract.of(task.config, task.layout))
        if found is not None:
            field, wanted, shown = found
            raise UserError(f"{self._bundle.folder}: the plant's {field} is {shown!r}, the policy needs {wanted!r}")

    def act(self, observation: Float32Array) -> FloatArray:
        """The policy's deterministic actions, shape `(B, A)`."""
        action, self._state = self._bundle.policy.step(observation, self._state)
        return action.astype(np.float64)


def is_bundle(folder: str | Path) -> bool:
    """Whether a folder claims to be a bundle."""
    return (Path(folder) / MANIFEST).is_file()


def bundle_kind(folder: str | Path) -> Any:
    """The control problem that a bundle claims to be for."""
    return read_json_object(Path(folder) / MANIFEST).get("kind")


def load_bundle(folder: str | Path) -> Bundle:
    """Loads a bundle and proves that it is whole and computes what it did when it was made.

    Files other than the three of a bundle are never opened.

    Raises:
        UserError: The folder is no bundle or of another schema version, a file is missing or differs from its checksum,
            the network holds what is not allowed or does not fit the manifest, an output differs from its golden
            pair, or the runtime is not installed.
    """
    path = Path(folder)
    manifest = read_bundle_manifest(path, BundleManifest)
    content = {name: read_checked(path / name, manifest.sha256.get(name)) for name in (POLICY, GOLDEN)}
    shape = (len(manifest.contract.features), manifest.contract.actions, manifest.recurrence)
    name = GOLDEN
    try:
        golden = read_golden(content[GOLDEN], *shape)
        name = POLICY
        policy = OnnxPolicy(content[POLICY], *shape)
        difference = golden.difference(policy)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path / name}: refused: {error}") from None
    if difference > PARITY:
        raise UserError(
            f"{path}: {POLICY} differs from the golden pairs in {GOLDEN} by {difference:.2g}, allowed is {PARITY:g}"
        )
    return Bundle(manifest, policy, path)


def read_bundle_manifest(folder: Path, model: type[ManifestT]) -> ManifestT:
    """What a bundle says of itself.

    Args:
        folder: The bundle.
        model: Manifest of the kind that is wanted.

    Raises:
        UserError: It is no bundle, of another schema version, or `bundle.json` was changed after it was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder}: not a policy bundle (it has no {MANIFEST})")
    data = read_json_object(path)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema version {version!r}, this WattGym reads version {SCHEMA_VERSION}")
    manifest = parse_config(model, data, str(path))
    if manifest.digest != manifest_digest(data):
        raise UserError(f"{path}: differs from its own checksum 'digest'; it was edited or damaged")
    return manifest


def manifest_digest(data: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content without its digest, in one canonical spelling."""
    content = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_checked(path: Path, expected: str | None) -> bytes:
    """A file's content, read once, so that what was checked is what is used."""
    if expected is None:
        raise UserError(f"{path.parent / MANIFEST}: sha256 has no entry for '{path.name}'")
    if not path.is_file():
        raise UserError(f"{path.parent}: '{path.name}' is missing")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path}: larger than {MAX_FILE_BYTES // 2**20} MiB, no policy of WattGym is")
    if hashlib.sha256(content).hexdigest() != expected:
        raise UserError(f"{path}: differs from its checksum in {MANIFEST}; it was changed, damaged or cut short")
    return content


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested mappings and lists."""
    if isinstance(value, dict):
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        pairs = [(str(i), item) for i, item in enumerate(value)]
    else:
        return {prefix: value}
    joined = (flat(item, f"{prefix}.{key}" if prefix else key) for key, item in pairs)
    return {key: item for part in joined for key, item in part.items()}

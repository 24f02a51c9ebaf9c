"""A bundle of a site-selection policy: one network for any number of sites, held against the original at several.

The folder is that of every bundle (`wattgym.agents.bundle`). What differs: the contract lists the features of the
federation and those of a site once, not for each slot; the network's input has any length that fits them, and its
output is a score for each slot, positive where the site takes part; golden pairs are there for several numbers of
sites.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from wattgym.agents.bundle import (
    GOLDEN,
    PARITY,
    POLICY,
    BaseManifest,
    BoundedFeature,
    flat,
    read_bundle_manifest,
    read_checked,
)
from wattgym.agents.onnx_policy import Float32Array, OnnxPolicy, read_arrays
from wattgym.config import FrozenModel
from wattgym.envs.federation.config import SelectionObservationConfig, SiteSelectionConfig
from wattgym.envs.federation.observation import SelectionLayout
from wattgym.envs.observation import BOUND
from wattgym.errors import UserError

GOLDEN_SIZES = (1, 5, 20, 57)
"""Numbers of sites that golden pairs are recorded at."""

GOLDEN_EACH = 64
"""Golden pairs of each."""


class SelectionContract(FrozenModel):
    """What a federation must agree on with a policy.

    Attributes:
        observation: Optional parts of the observation.
        domains: Learning domains.
        federation: Features of the whole federation, in order.
        site: Features of a site, in order; the vector holds them feature by feature, each for all slots.
    """

    observation: SelectionObservationConfig
    domains: int = Field(ge=1)
    federation: tuple[BoundedFeature, ...] = Field(min_length=1)
    site: tuple[BoundedFeature, ...] = Field(min_length=1)

    @classmethod
    def of(cls, config: SiteSelectionConfig, layout: SelectionLayout) -> SelectionContract:
        """What an environment or a live federation offers."""
        federation, site = (
            tuple(BoundedFeature(name=f.name, unit=f.unit, low=-BOUND, high=BOUND) for f in features)
            for features in (layout.global_features, layout.site_features)
        )
        return cls(observation=config.observation, domains=layout.domains, federation=federation, site=site)

    def difference(self, other: SelectionContract) -> tuple[str, Any, Any] | None:
        """Name of the first field that differs, with this contract's value and the other's; None if they agree."""
        mine, theirs = flat(self.model_dump(mode="json")), flat(other.model_dump(mode="json"))
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            if mine.get(key) != theirs.get(key):
                return key, mine.get(key), theirs.get(key)
        return None

    def size(self, slots: int) -> int:
        """Length of an observation with so many slots."""
        return len(self.federation) + len(self.site) * slots


class SelectionManifest(BaseManifest):
    """Content of `bundle.json` of a site-selection policy.

    Attributes:
        kind: Control problem.
        contract: What a federation must agree on.
    """

    kind: Literal["site_selection"]
    contract: SelectionContract


@dataclass(frozen=True, eq=False)
class SelectionBundle:
    """A loaded bundle whose files, checksums and golden pairs are in order.

    Attributes:
        manifest: What the folder says of itself.
        policy: The network.
        folder: Where it came from.
    """

    manifest: SelectionManifest
    policy: OnnxPolicy
    folder: Path


class SelectionBundleController:
    """A bundle as a policy of any federation that agrees with its contract, whatever its number of sites."""

    def __init__(self, bundle: SelectionBundle, name: str | None = None) -> None:
        """Wraps a bundle.

        Args:
            bundle: The bundle.
            name: Name in tables and logs; the bundle's own if None.
        """
        self.name = name or bundle.manifest.name
        self._bundle = bundle

    def reset(self, task: Any) -> None:
        """Checks that the federation is one that the policy can run.

        Raises:
            UserError: It differs from what the policy was trained with; the message names the field.
        """
        found = self._bundle.manifest.contract.difference(SelectionContract.of(task.config, task.layout))
        if found is not None:
            field, wanted, shown = found
            raise UserError(
                f"{self._bundle.folder}: the federation's {field} is {shown!r}, the policy needs {wanted!r}"
            )

    def act(self, observation: Float32Array) -> Float32Array:
        """Scores, shape `(B, N)`, positive where a site takes part."""
        return self._bundle.policy.step(observation)[0]


Pairs = dict[int, tuple[Float32Array, Float32Array]]
"""Observations `(B, D)` and scores `(B, N)` by number of sites N."""


def difference(pairs: Pairs, policy: OnnxPolicy) -> float:
    """Largest absolute difference between recorded scores and a network's own (NaN counts as infinite).

    Raises:
        ValueError: The network cannot be run.
    """
    worst = 0.0
    for observation, score in pairs.values():
        own = policy.step(observation)[0]
        apart = float(np.abs(own.astype(np.float64) - score).max()) if own.shape == score.shape else float("inf")
        worst = max(worst, apart if np.isfinite(apart) else float("inf"))
    return worst


def write_pairs(pairs: Pairs) -> bytes:
    """Golden pairs as the content of an `.npz` file."""
    file = io.BytesIO()
    arrays = {f"observation_{n}": pair[0] for n, pair in pairs.items()} | {f"score_{n}": p[1] for n, p in pairs.items()}
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def read_pairs(content: bytes, contract: SelectionContract) -> Pairs:
    """Reads golden pairs: arrays of numbers only, of exactly the shapes that the contract implies.

    Raises:
        ValueError: The file is damaged, or an array is missing or of another shape or type.
    """
    arrays, pairs = read_arrays(content), {}
    for n in GOLDEN_SIZES:
        found = []
        for name, width in ((f"observation_{n}", contract.size(n)), (f"score_{n}", n)):
            array = arrays.get(name)
            if array is None or array.shape != (GOLDEN_EACH, width) or array.dtype != np.float32:
                shown = "missing" if array is None else f"{array.dtype} of shape {array.shape}"
                raise ValueError(f"'{name}' is {shown}, expected float32 of shape {(GOLDEN_EACH, width)}")
            found.append(array)
        pairs[n] = (found[0], found[1])
    return pairs


def load_selection_bundle(folder: str | Path) -> SelectionBundle:
    """Loads a bundle and proves that it is whole and computes what it did when it was made.

    Raises:
        UserError: As `wattgym.agents.bundle.load_bundle`.
    """
    path = Path(folder)
    manifest = read_bundle_manifest(path, SelectionManifest)
    content = {name: read_checked(path / name, manifest.sha256.get(name)) for name in (POLICY, GOLDEN)}
    name = GOLDEN
    try:
        pairs = read_pairs(content[GOLDEN], manifest.contract)
        name = POLICY
        policy = OnnxPolicy(content[POLICY], "size", "slots", None)
        apart = difference(pairs, policy)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path / name}: refused: {error}") from None
    if apart > PARITY:
        raise UserError(
            f"{path}: {POLICY} differs from the golden pairs in {GOLDEN} by {apart:.2g}, allowed is {PARITY:g}"
        )
    return SelectionBundle(manifest, policy, path)

"""Which records each site has, and which are kept for evaluation; decided by the federation file alone.

Every site that holds the shared source finds its own slice by itself, so nothing but adapters ever crosses the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from wattgym.errors import UserError
from wattgym.federated.config import FederatedData, FederationConfig, SplitConfig
from wattgym.federated.tasks import generate
from wattgym.live.records import Example, read_labelled

Record = tuple[Example, str]
"""An example and its domain."""

ALL = "all"
"""Domain of records that say nothing of theirs."""

_MOST_CALCULATIONS = 6


class Partition:
    """The records of a federation, dealt out.

    Attributes:
        domains: Names of the domains of the shared source, sorted; those of sites' own records where there is none.
        evaluation: Records kept for evaluation.
    """

    def __init__(self, config: FederationConfig) -> None:
        """Reads the shared source and deals it out.

        Raises:
            UserError: The source cannot be read, has too few records, or leaves a site without any.
        """
        self._config = config
        records = shared_records(config.data, config.seed)
        self.domains = tuple(sorted({domain for _, domain in records}))
        rng = np.random.default_rng([config.seed, 11])
        held_out = _even(records, config.data.evaluation, rng)
        if len(held_out) == len(records):
            raise UserError(
                f"data: {len(records)} records, but data.evaluation keeps {config.data.evaluation} of them and at "
                "least one must be left to train on"
            )
        self.evaluation: list[Record] = [records[i] for i in sorted(held_out)]
        rest = [records[i] for i in range(len(records)) if i not in held_out]
        sharing = [site.name for site in config.sites if site.data is None]
        self._slices: dict[str, list[Record]] = {name: [] for name in sharing}
        owners = deal([domain for _, domain in rest], len(sharing), config.data.split, rng)
        for record, owner in zip(rest, owners, strict=bool(sharing)):
            self._slices[sharing[owner]].append(record)

    def slice(self, name: str) -> list[Record]:
        """Records of a site.

        Raises:
            UserError: It has none, or its own file cannot be read.
        """
        data = self._config.data
        own = self._config.site(name).data
        if own is not None:
            return read_labelled(data.records_of(own), _labeller(data))
        found = self._slices[name]
        if not found:
            raise UserError(
                f"site '{name}': its data slice has no samples (split '{data.split.kind}', seed {self._config.seed}); "
                "use more records, a larger alpha or another seed"
            )
        return found


def shared_records(data: FederatedData, seed: int) -> list[Record]:
    """All records of the federation's source, each with its domain.

    Raises:
        UserError: The source cannot be read.
    """
    if data.source == "tasks":
        return generate(data.families, data.records, seed)
    return read_labelled(data.records_of(data.path), _labeller(data))


def deal(domains: list[str], sites: int, split: SplitConfig, rng: np.random.Generator) -> list[int]:
    """Which site gets which record.

    Args:
        domains: Domain of each record.
        sites: How many sites share them; with none, nothing is dealt.
        split: How.
        rng: Draws.

    Returns:
        Index of a site for each record; empty without sites.
    """
    if not sites:
        return []
    n = len(domains)
    owner = np.zeros(n, dtype=np.int64)
    if split.kind in ("iid", "quantity"):
        share = np.exp(split.sigma * rng.standard_normal(sites)) if split.kind == "quantity" else np.ones(sites)
        owner[rng.permutation(n)] = _cut(n, share / share.sum())
        return owner.tolist()
    for d, domain in enumerate(sorted(set(domains))):
        members = rng.permutation(np.flatnonzero(np.array(domains) == domain))
        if split.kind == "category":
            kinds = len(set(domains))
            # With more sites than domains, those whose turn falls on a domain share it.
            owners = [site for site in range(sites) if site % kinds == d] or [d % sites]
            owner[members] = np.array(owners)[np.arange(members.size) % len(owners)]
        else:
            owner[members] = _cut(members.size, rng.dirichlet(np.full(sites, split.alpha)))
    return owner.tolist()


def domain_counts(records: list[Record]) -> dict[str, int]:
    """How many records each domain has."""
    return dict(sorted(Counter(domain for _, domain in records).items()))


def _cut(n: int, shares: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Owners of `n` records in a row, in amounts as near to the shares as whole records allow."""
    ends = np.round(np.cumsum(shares) * n).astype(np.int64)
    return np.searchsorted(ends, np.arange(n), side="right").astype(np.int64)


def _even(records: list[Record], count: int, rng: np.random.Generator) -> set[int]:
    """Positions of some records, as many of each domain as the domains allow."""
    order = rng.permutation(len(records)).tolist()
    by_domain: dict[str, list[int]] = {}
    for i in order:
        by_domain.setdefault(records[i][1], []).append(i)
    chosen: set[int] = set()
    # A domain gives half of its records at most, so that it does not vanish from training.
    room = {domain: max(len(members) // 2, 1) for domain, members in by_domain.items()}
    turn = 0
    while len(chosen) < count and any(turn < room[domain] for domain in room):
        for domain in sorted(by_domain):
            if turn < room[domain] and len(chosen) < count:
                chosen.add(by_domain[domain][turn])
        turn += 1
    return chosen


def _labeller(data: FederatedData) -> Any:
    def by_field(fields: Mapping[str, Any], example: Example) -> str | None:
        value = fields.get(str(data.domain_field))
        return None if value is None else str(value)

    def calculations(fields: Mapping[str, Any], example: Example) -> str:
        count = min(max(example.response.count("<<"), 2), _MOST_CALCULATIONS)
        return f"{count}+ steps" if count == _MOST_CALCULATIONS else f"{count} steps"

    def kind(fields: Mapping[str, Any], example: Example) -> str:
        if "motivation_app" in fields:
            return "user-oriented"
        return "classification" if fields.get("is_classification") else "generation"

    def none(fields: Mapping[str, Any], example: Example) -> str:
        return ALL

    if data.domain_field is not None:
        return by_field
    return {"gsm8k": calculations, "self_instruct": kind}.get(data.source, none)

"""What a site-selection observation says of each site, as tensors: what is shown, and what follows from it.

Everything is shared over sites and depends on a federation only through sums, largest values and comparisons over its
sites, so permuting sites permutes the rows, padding changes nothing and any number of sites fits.

The derived columns are a planner's view at the present power, in the terms of `wattgym.envs.federation`: sites are
joined in the order of what they would make a round wait for (communication where a round's work is shared out, their
whole time where each trains on its own data), which contains the best set of the first kind when data are alike; the
best of these sets is the base, and for each site the change by joining or leaving the base is predicted. From the base,
sites that are better in or out are moved, as long as that helps: the plan, with the same prediction around it. It is
what the present power and the learning model's central values say; what to make of that is learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from wattgym.envs.federation.config import LearningConfig
from wattgym.envs.federation.observation import SelectionLayout

DERIVED = ("worth", "work", "round_time", "cohort", "behind_best", "from_best", "base", "joining", "plan", "change")
"""Names of the derived columns, in order."""

_TINY = 1e-9
_WORSE = -20.0
_LEAST = -20.0
_MOST = 3.0
_MOVES = 5 * (0.3, 0.7, 1.0)
_GAIN = 1e-5
_PER_DECADE = 0.43429448190325176


@dataclass(frozen=True)
class SetLayout:
    """Which parts of an observation vector are what, whatever the number of slots, and the learning model's constants.

    Attributes:
        glob: Names of the global features, in order.
        site: Names of the features of a site, in order.
        domains: Learning domains D.
        phi: Central noise scale, sites.
        beta: Central exponent of the power law.
        transfer: Share of a round's progress that reaches every domain.
        work_exponent: Exponent of local work beyond the reference.
    """

    glob: tuple[str, ...]
    site: tuple[str, ...]
    domains: int
    phi: float
    beta: float
    transfer: float
    work_exponent: float

    @classmethod
    def of(cls, layout: SelectionLayout, learning: LearningConfig) -> SetLayout:
        """Of an environment's observation and learning model."""
        return cls(
            glob=tuple(feature.name for feature in layout.global_features),
            site=tuple(feature.name for feature in layout.site_features),
            domains=layout.domains,
            phi=learning.phi,
            beta=learning.beta,
            transfer=learning.transfer,
            work_exponent=learning.work_exponent,
        )

    def plain(self) -> dict[str, Any]:
        """As keyword arguments of plain values, which a saved model can hold."""
        return asdict(self)

    def slots(self, size: int) -> int:
        """Site slots in a vector of a length."""
        return (size - len(self.glob)) // len(self.site)

    def size(self, slots: int) -> int:
        """Length of a vector with room for so many sites."""
        return len(self.glob) + len(self.site) * slots


Efficiency = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Logarithm of progress over time, time (minutes) and effective sites of sets, each `(B, C)`, by their sums `(B, C, 4)`
and what they wait for, minutes, `(B, C)`."""


@dataclass(eq=False)
class Sites:
    """A batch of observations taken apart.

    Attributes:
        glob: Global features, shape `(B, G)`.
        site: Shown and derived features of each site, shape `(B, N, F)`; 0 where there is none.
        exists: 1 where a slot holds a site, shape `(B, N, 1)`.
        eligible: Whether a site may be chosen, shape `(B, N)`.
    """

    glob: Tensor
    site: Tensor
    exists: Tensor
    eligible: Tensor


def split(layout: SetLayout, observation: Tensor) -> Sites:
    """Takes observations apart and adds the derived columns.

    Args:
        layout: What is where.
        observation: Shape `(B, D)`.
    """
    first, width = len(layout.glob), len(layout.site)
    glob = observation[:, :first]
    # The vector holds feature by feature, each for all slots.
    shown = observation[:, first:].reshape(observation.shape[0], width, -1).transpose(1, 2)
    columns = {name: shown[:, :, i] for i, name in enumerate(layout.site)}
    exists = columns["exists"].unsqueeze(2)
    extra = _derived(layout, columns, dict(zip(layout.glob, glob.unbind(1), strict=True)))
    # Their number is kept from the network, which would meet one that it never saw among more sites than in training.
    k = layout.glob.index("sites")
    return Sites(
        glob=torch.cat([glob[:, :k], 0.0 * glob[:, k : k + 1], glob[:, k + 1 :]], dim=1),
        site=torch.cat([shown, extra], dim=2) * exists,
        exists=exists,
        eligible=columns["eligible"] > 0.5,
    )


def _derived(layout: SetLayout, site: dict[str, Tensor], glob: dict[str, Tensor]) -> Tensor:
    """The derived columns, shape `(B, N, len(DERIVED))`."""
    open_ = site["eligible"]
    comm, compute, alone = (10.0 ** site[name] for name in ("communication", "compute", "alone"))
    rate = open_ / compute
    # Reference amounts that the site would train in a round of its own: all alike where the work is shared out.
    work = (alone - comm).clamp(min=_TINY) / compute
    shared = _alike(_log10(work), open_)
    own = 1.0 - shared
    whole = (work * open_).amax(dim=1, keepdim=True)
    worth = _worth(layout, site, glob)
    # What a round waits for. It is compared as it is shown: a power of equal numbers need not be equal to the last bit.
    order = shared * site["communication"] + own * site["alone"]
    cost = shared * comm + own * alone
    # What weighs in the round's average.
    weight = open_ * (shared * rate + own * work)
    weighed = weight / weight.sum(dim=1, keepdim=True).clamp(min=_TINY)

    joined = (order.unsqueeze(1) <= order.unsqueeze(2)).to(cost.dtype) * open_.unsqueeze(1)
    sums = torch.stack([rate, weighed, weighed * weighed, weighed * worth], dim=2)
    scale = weight.sum(dim=1, keepdim=True)

    def efficiency(parts: Tensor, wait: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logarithm of progress over time, time (minutes) and effective sites of sets with these sums."""
        total_rate, total, squares, value = (part.clamp(min=_TINY) for part in parts.unbind(2))
        sites = total * total / squares
        time = shared * (whole / total_rate + wait) + own * wait
        amount = shared * whole / sites + own * scale * squares / total
        done = torch.where(amount > 1.0, amount.clamp(min=_TINY) ** layout.work_exponent, amount)
        gain = done * sites * (1.0 + layout.phi) / (sites + layout.phi) * value / total
        return torch.log(gain.clamp(min=_TINY)) - torch.log(time.clamp(min=_TINY)), time, sites

    prefix = joined @ sums
    score, time, sites = efficiency(prefix, cost)
    score = torch.where(open_ > 0.5, score, _WORSE)
    best = score.amax(dim=1, keepdim=True)
    last = torch.where(score >= best, order, _LEAST).amax(dim=1, keepdim=True)
    limit = 10.0**last
    base = open_ * (order <= last)
    joining = _moving(base, sums, order, open_, efficiency) - best
    plan, change = _improved(base, best, sums, order, open_, efficiency)
    columns = (
        torch.log(worth.clamp(min=0.05)),
        _log10(work).clamp(-3.0, 3.0),
        _log10(time.clamp(min=_TINY)).clamp(-3.0, 3.0),
        torch.log(sites.clamp(min=1.0)) * 0.5,
        (score - best).clamp(min=-3.0),
        _log10(cost / limit.clamp(min=_TINY)).clamp(-2.0, 2.0) * 2.0,
        base,
        _towards(base, joining) * 4.0,
        plan,
        _towards(plan, change) * 4.0,
    )
    return torch.stack([column * open_ for column in columns], dim=2)


def _moving(chosen: Tensor, sums: Tensor, order: Tensor, open_: Tensor, efficiency: Efficiency) -> Tensor:
    """Efficiency of a set with each site joining it, or leaving it, shape `(B, N)`; never good for its only site."""
    member = chosen > 0.5
    sign = 1.0 - 2.0 * chosen
    longest = _longest(order, member)
    last = member & (order >= longest)
    several = last.to(order.dtype).sum(dim=1, keepdim=True) > 1.5
    without = torch.where(several, longest, _longest(order, member & (order < longest)))
    wait = torch.where(member, torch.where(last, without, longest), torch.maximum(order, longest))
    value, _, _ = efficiency((chosen.unsqueeze(1) @ sums) + sign.unsqueeze(2) * sums, 10.0**wait)
    others = chosen.sum(dim=1, keepdim=True) - chosen
    return torch.where((open_ > 0.5) & (sign + others > -0.5), value, _WORSE)


def _improved(
    base: Tensor, best: Tensor, sums: Tensor, order: Tensor, open_: Tensor, efficiency: Efficiency
) -> tuple[Tensor, Tensor]:
    """The set that hill climbing from another one ends at, and what moving each site would change.

    A step moves all sites that on their own would gain a share of what the best one would; sites that are alike move
    together, so that their order does not matter. It is taken back where it does not help, and a higher share is next.
    """
    plan = base
    for share in _MOVES:
        value = _moving(plan, sums, order, open_, efficiency)
        most = value.amax(dim=1, keepdim=True)
        bar = best + share * (most - best) - 1e-6
        moved = ((value >= bar) & (value > best)).to(plan.dtype)
        tried = plan + moved * (1.0 - 2.0 * plan)
        reached, _, _ = efficiency(tried.unsqueeze(1) @ sums, 10.0 ** _longest(order, tried > 0.5))
        better = (reached > best + _GAIN) & (tried.sum(dim=1, keepdim=True) > 0.5)
        plan = torch.where(better, tried, plan)
        best = torch.where(better, reached, best)
    return plan, _moving(plan, sums, order, open_, efficiency) - best


def _longest(order: Tensor, member: Tensor) -> Tensor:
    """What a set waits for, shape `(B, 1)`."""
    return torch.where(member, order, _LEAST).amax(dim=1, keepdim=True)


def _towards(chosen: Tensor, change: Tensor) -> Tensor:
    """What being in the set is worth, from what changing sides would bring."""
    return (1.0 - 2.0 * chosen) * change.clamp(-_MOST, _MOST)


def _log10(value: Tensor) -> Tensor:
    """Spelt out, because ONNX's exporter divides by a logarithm of 10 in single precision."""
    return torch.log(value) * _PER_DECADE


def _alike(value: Tensor, open_: Tensor) -> Tensor:
    """1 where the values of open sites agree, else 0, shape `(B, 1)`."""
    high = torch.where(open_ > 0.5, value, -9.0).amax(dim=1, keepdim=True)
    low = torch.where(open_ > 0.5, value, 9.0).amin(dim=1, keepdim=True)
    return (high - low < 0.02).to(value.dtype)


def _worth(layout: SetLayout, site: dict[str, Tensor], glob: dict[str, Tensor]) -> Tensor:
    """Progress of the evaluated loss by work on the site's data, relative to work on an even mix, shape `(B, N)`.

    With a power law, a domain's loss falls with its progress in proportion to `loss ** (1 + 1 / beta)`.
    """
    steep = 1.0 + 1.0 / layout.beta
    if "domain0" not in glob or "mix0" not in site:
        return layout.transfer + (1.0 - layout.transfer) * torch.exp(steep * site["need"])
    slope = torch.stack([torch.exp(steep * glob[f"domain{d}"]) for d in range(layout.domains)], dim=1)
    slope = slope / slope.mean(dim=1, keepdim=True)
    mix = torch.stack([site[f"mix{d}"] for d in range(layout.domains)], dim=2)
    own = (mix * slope.unsqueeze(1)).sum(dim=2)
    return layout.transfer + (1.0 - layout.transfer) * own

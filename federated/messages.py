"""What aggregator and sites say to each other, and what is recorded of a round. NumPy only: no torch, no peft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Adapter = dict[str, NDArray[np.float32]]
"""Adapter weights by the names that peft's state dict gives them."""


@dataclass(frozen=True)
class SiteInfo:
    """What a site tells when it joins.

    Attributes:
        name: The site's name, unique in the federation.
        samples: Training samples it holds.
        domain_samples: How many of them belong to each domain.
        model_hash: Hash of the base model's weights and adapter settings; it must be the same at all sites.
        shapes: Shapes of the adapter's arrays.
        device: What it trains on.
        pid: Process of the trainer; 0 where there is none of its own.
    """

    name: str
    samples: int
    domain_samples: Mapping[str, int]
    model_hash: str
    shapes: Mapping[str, tuple[int, ...]]
    device: str
    pid: int = 0


@dataclass(frozen=True)
class Assignment:
    """What one site is asked to do in a round, apart from the weights.

    Attributes:
        local_steps: Optimiser steps before it replies.
        learning_rate: Learning rate of the round; None: the site's own.
        power_w: Power that it may draw in this round, W; None: as much as its own source says.
    """

    local_steps: int
    learning_rate: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A round's work for one site.

    Attributes:
        run_id: Run that the request belongs to.
        round: Number of the round, from 1.
        adapter: The global adapter.
        assignment: What to do.
        link_s: Where a slow link is emulated in real time: seconds that the site waits before it trains and before it
            replies, as if request and reply were on their way.
    """

    run_id: str
    round: int
    adapter: Adapter
    assignment: Assignment
    link_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class SiteMetrics:
    """What a site measured while it trained.

    Attributes:
        samples: Samples trained on.
        tokens: Tokens of those samples.
        steps: Optimiser steps done.
        loss: Mean loss over the round's steps, nats.
        train_s: Time in which it trained, s.
        energy_j: Energy of its devices over that time by their meters, J.
        power_w: Mean power of its devices, W.
        available_w: Power that was available to it at the end of the round, W.
        peak_memory_mb: Highest resident memory of the trainer, MB.
        target_error_w: Mean absolute difference of power and the target of its own shaping controller, W; NaN without.
    """

    samples: int
    tokens: int
    steps: int
    loss: float
    train_s: float
    energy_j: float = float("nan")
    power_w: float = float("nan")
    available_w: float = float("nan")
    peak_memory_mb: float = float("nan")
    target_error_w: float = float("nan")


@dataclass(frozen=True, eq=False)
class TrainReply:
    """A site's answer.

    Attributes:
        run_id: Run of the request.
        round: Round of the request.
        site: Who answers.
        adapter: The adapter after local training.
        metrics: What was measured.
    """

    run_id: str
    round: int
    site: str
    adapter: Adapter
    metrics: SiteMetrics


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The global adapter on the records that all sites keep for evaluation.

    Attributes:
        loss: Mean loss, domains weighing the same, nats.
        domain_loss: Loss by domain, nats.
        accuracy: Share of answers that are exactly right under greedy decoding by teacher forcing; NaN if not measured.
        site: Who evaluated; empty if nobody says.
    """

    loss: float
    domain_loss: Mapping[str, float]
    accuracy: float = float("nan")
    site: str = ""


class Fate(StrEnum):
    """What became of a chosen site in a round."""

    COUNTED = "counted"
    LATE = "late"
    FAILED = "failed"
    LOST = "lost"
    REJECTED = "rejected"


@dataclass(frozen=True)
class SiteFailure:
    """No usable answer of a site.

    Attributes:
        fate: `LATE` (no answer by the deadline), `FAILED` (the site said so), `LOST` (the site is gone) or `REJECTED`
            (an answer that must not be used).
        reason: One line.
    """

    fate: Fate
    reason: str


@dataclass(frozen=True)
class SiteOutcome:
    """A chosen site in the record of a round.

    Attributes:
        site: Its name.
        fate: What became of it.
        reason: Why, if it did not count.
        assignment: What it was asked to do.
        metrics: What it measured; None without a reply.
        delta_norm: Norm of its adapter minus the global one; NaN without a reply.
        round_trip_s: From request to reply by the aggregator's clock, s; NaN without a reply.
        transfer_s: Time of both transfers, s.
        transfer_emulated: Whether that time is the network table's rather than measured.
        bytes_each_way: Size of the adapter on the wire, bytes.
    """

    site: str
    fate: Fate
    reason: str
    assignment: Assignment
    metrics: SiteMetrics | None = None
    delta_norm: float = float("nan")
    round_trip_s: float = float("nan")
    transfer_s: float = float("nan")
    transfer_emulated: bool = False
    bytes_each_way: int = 0


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """A round as it is logged, one JSON line each.

    Attributes:
        round: Number, from 1; 0 is the evaluation before training.
        seconds: Length of the round, s.
        time_s: Time since the run began at the end of the round, s.
        outcomes: The chosen sites.
        evaluation: The global adapter after the round.
        effective_sites: `(sum w)² / sum w²` of the samples of the sites that counted; 0 if none did.
        noise_scale: φ estimated from the deltas' norms; NaN with fewer than two sites.
        emulated_clock: Whether the times are those of the emulated federation rather than the wall clock's.
        attempt: How often the round has been tried, this time included; a round in which nobody counted is tried again.
    """

    round: int
    seconds: float
    time_s: float
    outcomes: tuple[SiteOutcome, ...]
    evaluation: Evaluation
    effective_sites: float
    noise_scale: float
    emulated_clock: bool = False
    attempt: int = 1

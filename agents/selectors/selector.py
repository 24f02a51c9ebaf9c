"""What chooses sites: rules, bandits, oracles and learned policies behind one interface, for batches of federations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.federation.arrays import IntArray
from wattgym.envs.federation.emulator import FederationEmulator
from wattgym.envs.federation.view import SelectionTask, SelectionView


@dataclass(frozen=True, eq=False)
class Turn:
    """What a selector is asked with, before a round.

    Attributes:
        view: What the aggregator knows, in natural units. Its arrays belong to the federation: copy what is kept.
        observation: The same as observation vectors, shape `(B, D)`; what learned policies read.
        truth: The emulated federation itself, for oracles alone; None where there is none (a live federation).
    """

    view: SelectionView
    observation: NDArray[np.float32]
    truth: FederationEmulator | None = None


class Selector(Protocol):
    """Chooses the sites of the coming round, for a batch of federations whose episodes begin and end on their own."""

    @property
    def name(self) -> str:
        """Name in tables and logs."""
        ...

    def reset(self, task: SelectionTask, rows: IntArray | None = None) -> None:
        """Forgets earlier episodes.

        Args:
            task: The task of all environments of the batch.
            rows: Environments whose episode begins; None: all of them, of a new batch.
        """
        ...

    def act(self, turn: Turn) -> NDArray[np.generic]:
        """Chooses.

        Args:
            turn: What is known.

        Returns:
            Shape `(B, N)`: a site takes part where its number is above 0. Where it is nowhere, the environment's repair
            decides.
        """
        ...


class ObservationPolicy(Protocol):
    """A policy that reads observation vectors, such as a trained one or a bundle."""

    @property
    def name(self) -> str:
        """Name in tables and logs."""
        ...

    def reset(self, task: Any) -> None:
        """Prepares for the episodes of a task."""
        ...

    def act(self, observation: NDArray[np.float32]) -> NDArray[Any]:
        """Actions, shape `(B, N)`, for observations of shape `(B, D)`."""
        ...


class Observing:
    """A learned policy as a selector: it sees the observation and nothing else.

    The policy must not carry memory from step to step, because episodes of a batch end on their own.
    """

    def __init__(self, policy: ObservationPolicy) -> None:
        self.name = policy.name
        self._policy = policy

    def reset(self, task: SelectionTask, rows: IntArray | None = None) -> None:
        """Prepares the policy; a single episode that begins changes nothing for it."""
        if rows is None:
            self._policy.reset(task)

    def act(self, turn: Turn) -> NDArray[np.generic]:
        """The policy's actions."""
        return self._policy.act(turn.observation)


class Memoryless:
    """Base of selectors that decide on the present view alone."""

    name: str

    def reset(self, task: SelectionTask, rows: IntArray | None = None) -> None:
        """Nothing to forget."""

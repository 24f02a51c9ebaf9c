"""Engines: what carries a round's messages to the sites and back, behind one small interface.

An engine knows nothing of adapters, weights or policies: it delivers, waits and reports who answered. What a round
means (checks, aggregation, record) is one class above all engines, `wattgym.federated.federation.Federation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from wattgym.federated.messages import Adapter, Evaluation, SiteFailure, SiteInfo, TrainReply, TrainRequest


class Engine(ABC):
    """Carries messages between the aggregator and the sites of one federation.

    Attributes:
        name: Name of the kind of engine, as the command line gives it.
    """

    name: str

    @abstractmethod
    def members(self) -> Mapping[str, SiteInfo]:
        """The sites that are there now, by name; one that is lost is missing until it is back."""

    @abstractmethod
    def exchange(
        self, requests: Mapping[str, TrainRequest], deadline_s: float
    ) -> Mapping[str, tuple[TrainReply | SiteFailure, float]]:
        """Sends every site its request and waits until all have answered, failed or the deadline has passed.

        A site never makes the others wait beyond the deadline, and no fault of a site raises. An answer that comes
        after the deadline is dropped, in this exchange and in every later one.

        Args:
            requests: By site name.
            deadline_s: Longest wait, s.

        Returns:
            For every requested site its reply or failure, and the seconds from request to answer.
        """

    @abstractmethod
    def evaluate(
        self, adapter: Adapter, deadline_s: float, links_s: Mapping[str, float] | None = None
    ) -> Evaluation | SiteFailure:
        """Has a present site evaluate an adapter on the evaluation records, which all sites share.

        Args:
            adapter: The adapter.
            deadline_s: Longest wait, s.
            links_s: By site name, how long the adapter's way to it takes on an emulated link, s; None: no time.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends what the engine started; safe to call twice."""

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

"""The engine without processes: all sites train one after another in this one, as if side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from wattgym.errors import UserError
from wattgym.federated.config import FederationConfig
from wattgym.federated.engine import Engine
from wattgym.federated.messages import Adapter, Evaluation, Fate, SiteFailure, SiteInfo, TrainReply, TrainRequest
from wattgym.federated.partition import Partition
from wattgym.federated.site.client import SOCKET_FILE, SiteClient
from wattgym.federated.site.store import REPLIES
from wattgym.federated.site.trainer import AbandonedError, SiteTrainer
from wattgym.live.learner import LoadedModel


class InProcessEngine(Engine):
    """Many small sites in one process; they share one copy of the model.

    The time of an answer is the site's own, as if it had the machine for itself; devices are not held.
    """

    name = "local"

    def __init__(self, config: FederationConfig, folder: Path | None = None) -> None:
        """Loads the model and every site's records.

        Args:
            config: The federation.
            folder: Where sites keep their place in the data, one folder for each as a `ProcessEngine` has them; None:
                a site's place is forgotten when this engine goes, and a resumed run sees its data from the beginning.

        Raises:
            UserError: The model or the data cannot be used, the folder holds other sites, or sites run in it.
        """
        homes = {name: None if folder is None else folder / name for name in config.names}
        for name, home in homes.items():
            if home is not None and SiteClient(home / SOCKET_FILE).is_there():
                raise UserError(
                    f"{home}: a process of site '{name}' runs there; stop it first, or choose another folder"
                )
        partition = Partition(config)
        loaded = LoadedModel(config.job(config.names[0]))
        self._sites = {
            name: SiteTrainer(config, name, partition, loaded, folder=home and home / REPLIES)
            for name, home in homes.items()
        }

    def members(self) -> Mapping[str, SiteInfo]:
        """All sites, always."""
        return {name: site.info() for name, site in self._sites.items()}

    def exchange(
        self, requests: Mapping[str, TrainRequest], deadline_s: float
    ) -> Mapping[str, tuple[TrainReply | SiteFailure, float]]:
        """See `Engine.exchange`; a site that reaches the deadline is stopped there and loses the round."""
        return {name: self._ask(name, request, deadline_s) for name, request in sorted(requests.items())}

    def evaluate(
        self, adapter: Adapter, deadline_s: float, links_s: Mapping[str, float] | None = None
    ) -> Evaluation | SiteFailure:
        """See `Engine.evaluate`."""
        name, site = next(iter(self._sites.items()))
        time.sleep((links_s or {}).get(name, 0.0))
        try:
            return site.evaluate(adapter)
        except UserError as error:
            return SiteFailure(Fate.FAILED, str(error))

    def close(self) -> None:
        """Lets go of the model."""
        self._sites = {}

    def _ask(self, name: str, request: TrainRequest, deadline_s: float) -> tuple[TrainReply | SiteFailure, float]:
        site = self._sites.get(name)
        if site is None:
            return SiteFailure(Fate.LOST, "there is no such site"), 0.0
        start_s = time.monotonic()
        wait_s = sum(request.link_s)
        try:
            site.stop.until(start_s + deadline_s - wait_s)
            reply = site.train(request)
            site.keep(request, reply)
        except AbandonedError:
            return SiteFailure(Fate.LATE, f"no answer within {deadline_s:g} s"), deadline_s
        except UserError as error:
            return SiteFailure(Fate.FAILED, str(error)), time.monotonic() - start_s
        finally:
            site.stop.until(None)
        # The site is as far as if its link had taken that long; nobody else need wait for it here.
        time.sleep(wait_s)
        return reply, time.monotonic() - start_s

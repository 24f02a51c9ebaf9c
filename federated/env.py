"""`wattgym/SiteSelectionLive-v0`: the site-selection environment over a federation that really trains."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wattgym.config import parse_config
from wattgym.envs.site_selection import SiteSelectionEnv
from wattgym.errors import UserError
from wattgym.federated.config import FederationConfig, check_federation, load_federation
from wattgym.federated.engine import Engine
from wattgym.federated.federation import Federation
from wattgym.federated.messages import Assignment, RoundRecord
from wattgym.federated.partition import Partition
from wattgym.federated.plan import selection_plan
from wattgym.federated.selection import LiveFederation


class SiteSelectionLiveEnv(SiteSelectionEnv):
    """One live federation: a step is a round of real training. Close it, or use it as a context manager.

    Every reset begins a new run from a fresh adapter; sites stay up between runs. The observation, the repair of
    actions, the reward and `info` are those of `wattgym/SiteSelection-v0`; `info["record"]` is the round's record.
    """

    def __init__(
        self,
        federation: FederationConfig | Mapping[str, Any] | str | Path,
        engine: Engine | Literal["local", "process"] = "local",
        rounds: int = 50,
        folder: str | Path | None = None,
    ) -> None:
        """Starts the sites and evaluates the model once.

        Args:
            federation: The federation: a model, the mapping that a YAML file holds, or the file.
            engine: A ready engine, which is not closed with the environment, or the kind of one to start.
            rounds: Rounds after which an episode is truncated.
            folder: Folder of site processes; a temporary one if None.

        Raises:
            UserError: The federation cannot be used.
        """
        self.federation_config = _as_federation(federation)
        self._rounds = rounds
        self._own = not isinstance(engine, Engine)
        self._engine = engine if isinstance(engine, Engine) else _start(self.federation_config, engine, folder)
        try:
            self._training = Federation(self.federation_config, self._engine)
            plan = selection_plan(
                self.federation_config,
                self._training.members(),
                Partition(self.federation_config).domains,
                self._training.evaluation.loss,
                rounds=rounds,
                seed=0,
            )
            live = LiveFederation(
                plan.env,
                plan.domains,
                self._training.evaluation,
                self._play,
                reference_steps=plan.reference_steps,
                wall_clock=plan.wall_clock,
            )
            super().__init__(plan.env, live)
        except BaseException:
            self.close()
            raise
        self._live = live
        self._fresh = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Starts a run from a fresh adapter; the seed drives what the emulated federation draws."""
        if not self._fresh:
            self._training = Federation(self.federation_config, self._engine)
        self._fresh = False
        return super().reset(seed=seed, options=options)

    def step(self, action: NDArray[Any]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Plays one round."""
        observation, reward, terminated, truncated, info = super().step(action)
        truncated = truncated or (self._training.round >= self._rounds and not terminated)
        return observation, reward, terminated, truncated, {**info, "record": self._live.record}

    def close(self) -> None:
        """Ends the sites that the environment started."""
        if self._own:
            self._engine.close()
        super().close()

    def _play(self, assignments: Mapping[str, Assignment]) -> RoundRecord:
        return self._training.run_round(assignments)


def _as_federation(federation: FederationConfig | Mapping[str, Any] | str | Path) -> FederationConfig:
    if isinstance(federation, FederationConfig):
        return federation
    if isinstance(federation, Mapping):
        config = parse_config(FederationConfig, dict(federation), "federation")
        check_federation(config)
        return config
    return load_federation(federation)


def _start(config: FederationConfig, kind: str, folder: str | Path | None) -> Engine:
    if kind == "local":
        from wattgym.federated.in_process import InProcessEngine

        return InProcessEngine(config)
    if kind == "process":
        from wattgym.federated.processes import ProcessEngine

        return ProcessEngine(config, Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="wattgym-")))
    raise UserError(f"engine '{kind}': valid are local, process, or an engine that is ready")

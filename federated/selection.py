"""The live federation behind the site-selection environment: one step is one real round of training.

Power, network, market and absences are the emulated federation's, so that observation, repair, reward and accounting
are the emulator's own code. What a round does to the model is not emulated: the chosen sites train, and the loss is
the one that was evaluated. On the emulated clock a round lasts as long as the emulated federation says; on the wall
clock as long as it took, with the energy that the sites' meters counted, and what sites tell of their power, speed and
transfers replaces what was assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.emulator import FederationEmulator
from wattgym.envs.federation.rounds import Played
from wattgym.errors import UserError
from wattgym.federated.messages import Assignment, Evaluation, Fate, RoundRecord, SiteMetrics

PlayRound = Callable[[Mapping[str, Assignment]], RoundRecord]
"""Plays one round with the sites named, each with what it is asked to do, and tells what came of it."""


class LiveFederation(FederationEmulator):
    """A federation of named sites that really train; a batch of one.

    Attributes:
        record: Record of the last round; None before the first, or if nobody trained.
        evaluation: The model as it was evaluated last.
    """

    def __init__(
        self,
        config: SiteSelectionConfig,
        domains: Sequence[str],
        start: Evaluation,
        play: PlayRound,
        *,
        reference_steps: int,
        wall_clock: bool = False,
    ) -> None:
        """Prepares.

        Args:
            config: The environment; its sites are named, its `learning` describes the task that is trained.
            domains: Names of the learning domains, at most as many as `config.learning.domains`; a policy that knows
                more of them sees the others at the mean loss.
            start: The model before the first round.
            play: Plays a round.
            reference_steps: Local steps that stand for `learning.reference_samples` emulated samples.
            wall_clock: Whether time and energy are the measured ones rather than the emulated federation's.

        Raises:
            UserError: The configuration cannot be met, or has fewer domains than the data.
        """
        if not config.sites.named:
            raise UserError("a live federation needs named sites; the configuration draws them")
        if len(domains) > config.learning.domains:
            raise UserError(
                f"the data have {len(domains)} domains ({', '.join(domains)}), the selection's learning model "
                f"{config.learning.domains}; set learning.domains to {len(domains)} or more"
            )
        super().__init__(config)
        self.record: RoundRecord | None = None
        self._domains = tuple(domains)
        self.evaluation = self._start = start
        self._play_round = play
        self._per_step = self.library.learning.reference_samples / reference_steps
        self._wall_clock = wall_clock

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sites in the order of their slots."""
        return tuple(site.name for site in self.config.sites.named)

    def reset(self, seeds: Sequence[int], rows: IntArray | None = None) -> None:
        """Begins the one episode that a live federation has.

        Raises:
            UserError: More than one federation was asked for.
        """
        if len(seeds) != 1:
            raise UserError(f"a live federation is one environment, not {len(seeds)}")
        super().reset(seeds, rows)
        self.record, self.evaluation = None, self._start
        known, by_domain = self.telemetry, self._losses(self._start)
        self._hidden.loss = np.array([self._start.loss])
        known.loss, known.domain_loss = self._hidden.loss.copy(), by_domain
        known.mix_loss = self._local(by_domain)
        known.site_loss = known.mix_loss.copy()

    def _play(self, chosen: BoolArray) -> Played:
        self.record = None
        emulated = super()._play(chosen)
        # A site that the emulated federation loses or finds late must not reach the model, so it does not train.
        trains = chosen if self._wall_clock else emulated.counted
        samples = self.model.work(self.federation, self.moment().power_w, chosen)
        present = np.flatnonzero(trains[0]).tolist()
        if not present:
            return emulated
        assignments = {
            self.names[k]: Assignment(
                local_steps=max(1, round(float(samples[0, k]) / self._per_step)),
                power_w=float(self.telemetry.power_w[0, k]),
            )
            for k in present
        }
        self.record = self._play_round(assignments)
        self.evaluation = self.record.evaluation
        return self._as_played(emulated, self.record)

    def _as_played(self, emulated: Played, record: RoundRecord) -> Played:
        """The emulated round with everything replaced that was measured."""
        outcomes = {outcome.site: outcome for outcome in record.outcomes}
        fates = np.array([[outcomes[name].fate if name in outcomes else "" for name in self.names]])
        counted = fates == Fate.COUNTED
        by_domain = self._losses(record.evaluation) if counted.any() else self.telemetry.domain_loss.copy()
        loss = np.array([record.evaluation.loss]) if counted.any() else self._hidden.loss.copy()
        measured = {
            "counted": counted,
            "lost": emulated.lost | np.isin(fates, (Fate.LOST, Fate.FAILED, Fate.REJECTED)),
            "late": emulated.late | (fates == Fate.LATE),
            "domain_loss": by_domain,
            "loss": loss,
            "effective_sites": np.array([record.effective_sites]),
        }
        if self._wall_clock:
            busy, energy, compute = (np.zeros((1, len(self.names))) for _ in range(3))
            for k, name in enumerate(self.names):
                outcome = outcomes.get(name)
                if outcome is None:
                    continue
                answered = np.isfinite(outcome.round_trip_s)
                busy[0, k] = outcome.round_trip_s if answered else record.seconds
                if outcome.metrics is not None:
                    compute[0, k] = outcome.metrics.train_s
                    energy[0, k] = np.nan_to_num(outcome.metrics.energy_j)
            measured |= {
                "busy_s": busy,
                "compute_s": compute,
                "energy_j": energy,
                "duration_s": np.array([record.seconds]),
            }
        return replace(emulated, **measured)

    def _learn(self, played: Played) -> None:
        super()._learn(played)
        for k, metrics in self._heard(played):
            self.telemetry.site_loss[0, k] = metrics.loss

    def _look(self) -> None:
        super()._look()
        if not self._wall_clock or self.record is None:
            return
        federation, known = self.federation, self.telemetry
        for outcome in self.record.outcomes:
            k, metrics = self.names.index(outcome.site), outcome.metrics
            if metrics is None:
                continue
            if np.isfinite(metrics.available_w):
                known.power_w[0, k] = metrics.available_w
            if np.isfinite(outcome.transfer_s):
                federation.comm_s[0, k] = outcome.transfer_s
            if metrics.train_s > 0.0 and known.power_w[0, k] > 0.0:
                rate = metrics.steps * self._per_step / metrics.train_s
                federation.samples_per_joule[0, k] = rate / known.power_w[0, k]
        known.eligible = known.eligible & (known.power_w >= federation.min_power_w)

    def _heard(self, played: Played) -> Iterator[tuple[int, SiteMetrics]]:
        """Slots that counted in the round, with what they measured."""
        if self.record is None:
            return
        for outcome in self.record.outcomes:
            k = self.names.index(outcome.site)
            if played.counted[0, k] and outcome.metrics is not None:
                yield k, outcome.metrics

    def _losses(self, evaluation: Evaluation) -> FloatArray:
        """Loss by learning domain, shape `(1, D)`."""
        losses = np.full((1, self.library.learning.domains), evaluation.loss)
        for d, name in enumerate(self._domains):
            losses[0, d] = evaluation.domain_loss[name]
        return losses

    def _local(self, by_domain: FloatArray) -> FloatArray:
        local: FloatArray = np.matmul(self.federation.mix, by_domain[:, :, None])[..., 0]
        return local

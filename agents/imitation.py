"""Warm start of a policy over sites on training scenarios: from an expert, then from its own counterfactuals.

First the expert plays, and the policy learns its decisions (behaviour cloning). What counts is what a mistake costs:
the oracle's decision on a site weighs as much as the share of progress per second that the opposite one would lose, so
that sites that hardly matter do not drown the ones that do. An oracle knows what nobody can, such as power to come, and
looks no further than a round. So then the policy plays itself, and for every site of every round the emulator tells
what the opposite decision would have brought, power, stragglers and dropouts as they came. With `g` the part of the
remaining way that the round covers (`remaining_progress`), `T` its length, and `λ = g / T` over the last rounds,

    (g(S + k) - g(S - k)) - λ (T(S + k) - T(S - k))

is what choosing site k was worth; over a whole episode, which needs the same progress whoever plays it, that is time
saved. Its sign is the label and its size the weight, so the policy learns to choose where choosing pays on average over
what it cannot foresee. The critic learns the discounted rewards that followed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from torch import nn

from wattgym.agents.callbacks import StopFlag, StopTraining
from wattgym.agents.config import ImitationConfig, SelectionTrainingConfig
from wattgym.agents.problem import SelectionProblem, selections
from wattgym.agents.selectors.oracle import best_sets
from wattgym.agents.selectors.powertrip import GreedySettings
from wattgym.agents.selectors.powertrip_predicted import predicted_greedy
from wattgym.agents.set_policy import SetPolicy
from wattgym.config import FrozenModel
from wattgym.envs.federation.arrays import BoolArray, FloatArray
from wattgym.envs.federation.learning import remaining_progress
from wattgym.envs.site_selection_vector import SiteSelectionVecEnv

FLOOR, CEILING = 0.005, 5.0
"""Least weight of a decision, and largest: a site that pauses can cost a round many times its length."""

MEMORY = 0.4
"""What an earlier round counts against the next one in the rate of progress."""

WARMTH = 0.3
"""Spread of what is added to the policy's logits while it plays, so that it meets sets beside its own."""

_TINY = 1e-12
_STREAM = 0x1417
"""Keeps the scenarios of the warm start apart from those of the training that follows."""


class ImitationRecord(FrozenModel):
    """What a warm start did; `imitation.json` in the run folder.

    Attributes:
        expert: Who was imitated first.
        decisions: Environment steps learnt from, the expert's and the policy's own.
        agreement: Share of eligible sites on which the policy agrees with the last labels.
        loss: Mean weighted cross-entropy of the last sweep.
        value_error: Root mean square error of the critic in the last sweep.
        seconds: Time it took.
    """

    expert: str
    decisions: int
    agreement: float
    loss: float
    value_error: float
    seconds: float


@dataclass(eq=False)
class _Decisions:
    """Decisions of `M` steps: observations `(M, D)`, labels and weights `(M, N)`, returns `(M,)`.

    Returns are NaN where the episode did not end while decisions were collected.
    """

    observation: NDArray[np.float32]
    chosen: BoolArray
    weight: NDArray[np.float32]
    returns: NDArray[np.float32]


def _joined(shares: list[_Decisions]) -> _Decisions:
    names = ("observation", "chosen", "weight", "returns")
    return _Decisions(*(np.concatenate([getattr(share, name) for share in shares]) for name in names))


def imitate(model: Any, config: SelectionTrainingConfig, stop: StopFlag, *, progress: bool = True) -> ImitationRecord:
    """Trains a fresh model's policy, in place, to choose as the configured expert does.

    Args:
        model: PPO with a `SetPolicy`.
        config: The training.
        stop: Looked at between steps.
        progress: Show a progress bar on stderr.

    Raises:
        StopTraining: A stop was asked for; the warm start begins anew when the run is taken up again.
    """
    from tqdm import tqdm

    settings, begun = config.imitation, time.monotonic()
    rng = np.random.default_rng([config.seed, _STREAM])
    policy: SetPolicy = model.policy
    batch = SelectionProblem(config).batch()
    batch.seed(int(rng.integers(2**31)))
    play = _Play(np.asarray(batch.reset()), np.ones(batch.num_envs, dtype=bool))
    shares: list[_Decisions] = []
    # Adam's memory of this phase is not the training's.
    optimiser = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate, eps=1e-5)
    steps = max(settings.steps // batch.num_envs, 1)
    decisions = 0
    with tqdm(total=(settings.passes + 1) * steps, desc="warm start", unit="step", disable=not progress) as bar:
        for index in range(settings.passes + 1):
            advisors: list[_Advisor] = [
                _Expert(part, settings) if index == 0 else _Counterfactual(part, policy, rng)
                for part in selections(batch).values()
            ]
            shares.append(_collect(batch, play, advisors, model.gamma, steps, stop, bar.update))
            del shares[: -settings.window]
            decisions += steps * batch.num_envs
            known = _joined(shares)
            for group in optimiser.param_groups:
                group["lr"] = settings.learning_rate * (1.0 - 0.9 * index / max(settings.passes, 1))
            for _ in range(settings.epochs):
                loss, error = _sweep(policy, optimiser, known, settings, rng, stop)
    policy.set_training_mode(False)
    return ImitationRecord(
        expert=str(settings.expert),
        decisions=decisions,
        agreement=_agreement(policy, known),
        loss=loss,
        value_error=error,
        seconds=round(time.monotonic() - begun, 1),
    )


@dataclass(eq=False)
class _Advice:
    """What is played in a round, and what is learnt from it: labels and weights, each `(B, N)`."""

    action: BoolArray
    chosen: BoolArray
    weight: FloatArray


class _Advisor(Protocol):
    """Says what to play and what to learn from it."""

    def advise(self, observation: NDArray[np.float32], begins: BoolArray) -> _Advice:
        """The coming round's advice, for observations `(B, D)`; `begins`: an episode does."""
        ...


class _Expert:
    """The expert plays; its choices are the labels."""

    def __init__(self, part: SiteSelectionVecEnv, settings: ImitationConfig) -> None:
        self._part = part
        self._expert = settings.expert

    def advise(self, observation: NDArray[np.float32], begins: BoolArray) -> _Advice:
        """The coming round's choices and what the opposite of each would lose."""
        view, emulator = self._part.view, self._part.selection.emulator
        eligible = view.known.eligible
        if self._expert == "powertrip":
            best = predicted_greedy(view, GreedySettings())
            return _Advice(best, best, eligible.astype(np.float64))
        # Local search alone finds what trying every set does, nearly always, in a fraction of the time.
        best = best_sets(emulator, view, exhaustive=0)
        worth = emulator.imagine(_with_flips(best)).per_second
        # Leaving the only member leaves nothing, which loses all there is.
        lost = 1.0 - worth[:, 1:] / np.maximum(worth[:, :1], _TINY)
        weight: FloatArray = np.clip(lost, FLOOR, CEILING) * eligible
        return _Advice(best, best, weight)


class _Counterfactual:
    """The policy plays; the labels are what would have been better."""

    def __init__(self, part: SiteSelectionVecEnv, policy: SetPolicy, rng: np.random.Generator) -> None:
        self._part, self._policy, self._rng = part, policy, rng
        self._progress, self._seconds = np.zeros(part.num_envs), np.zeros(part.num_envs)

    def advise(self, observation: NDArray[np.float32], begins: BoolArray) -> _Advice:
        """The coming round's choices and what each was worth."""
        view, emulator = self._part.view, self._part.selection.emulator
        eligible = view.known.eligible
        with torch.no_grad():
            logits = self._policy.actor(self._policy.sites(torch.from_numpy(observation))).numpy()
        played = eligible & (logits + self._rng.logistic(0.0, WARMTH, logits.shape) > 0.0)
        nobody = ~played.any(axis=1)
        played[nobody, view.best_site()[nobody]] = True
        played &= eligible
        round_ = emulator.imagine(_with_flips(played), foresee=True)
        gain, seconds = self._gain(round_.progress), round_.seconds
        self._progress = np.where(begins, 0.0, MEMORY * self._progress) + gain[:, 0]
        self._seconds = np.where(begins, 0.0, MEMORY * self._seconds) + seconds[:, 0]
        rate = np.maximum(self._progress, 0.0) / np.maximum(self._seconds, _TINY)
        sign = np.where(played, -1.0, 1.0)
        worth = sign * ((gain[:, 1:] - gain[:, :1]) - rate[:, None] * (seconds[:, 1:] - seconds[:, :1]))
        # In shares of a round of the present length.
        worth = worth / np.maximum(rate * seconds[:, 0], _TINY)[:, None]
        # Nothing to compare with where a site is the only one: without it, the environment would choose.
        alone = played & (played.sum(axis=1, keepdims=True) == 1)
        worth = np.where(alone, FLOOR, worth)
        weight: FloatArray = np.minimum(np.abs(worth), CEILING) * eligible
        return _Advice(played, worth > 0.0, weight)

    def _gain(self, after: FloatArray) -> FloatArray:
        """By how much rounds that end with this domain progress, `(B, C, D)`, shorten the way, shape `(B, C)`."""
        emulator = self._part.selection.emulator
        learning, target = emulator.library.learning, emulator.library.target_loss
        before = emulator.moment().progress
        batch, count, domains = after.shape
        curve = emulator.curve.take(np.repeat(np.arange(batch), count))
        left = remaining_progress(learning, curve, after.reshape(-1, domains), target).reshape(batch, count)
        gain: FloatArray = remaining_progress(learning, emulator.curve, before, target)[:, None] - left
        return gain


def _with_flips(chosen: BoolArray) -> BoolArray:
    """A choice, and the choices with one site's decision turned, shape `(B, 1 + N, N)`."""
    flips = chosen[:, None, :] ^ np.eye(chosen.shape[1], dtype=bool)
    return np.concatenate([chosen[:, None, :], flips], axis=1)


@dataclass(eq=False)
class _Play:
    """Where the batch stands: its observation, and which episodes are about to begin.

    Episodes go on from share to share, so that long ones are seen to their end.
    """

    observation: NDArray[np.float32]
    begins: BoolArray


def _collect(
    batch: VecEnv, play: _Play, advisors: list[_Advisor], gamma: float, steps: int, stop: StopFlag, done: Any
) -> _Decisions:
    """Plays on, and takes advice in every state."""
    sizes = np.cumsum([part.num_envs for part in selections(batch).values()])[:-1]
    seen, chosen, weight, reward, ended = [], [], [], [], []
    for _ in range(steps):
        if stop.requested:
            raise StopTraining
        advice = [
            advisor.advise(rows, begins)
            for advisor, rows, begins in zip(
                advisors, np.split(play.observation, sizes), np.split(play.begins, sizes), strict=True
            )
        ]
        seen.append(play.observation.copy())
        chosen.append(np.concatenate([a.chosen for a in advice]))
        weight.append(np.concatenate([a.weight for a in advice]).astype(np.float32))
        following, gain, over, _ = batch.step(np.concatenate([a.action for a in advice]))
        play.observation, play.begins = np.asarray(following), over
        reward.append(gain)
        ended.append(over)
        done()
    returns = _returns(np.stack(reward), np.stack(ended), gamma)
    stacked = [np.concatenate(rows) for rows in (seen, chosen, weight)]
    return _Decisions(stacked[0], stacked[1], stacked[2], returns.reshape(-1).astype(np.float32))


def _returns(reward: FloatArray, ended: BoolArray, gamma: float) -> FloatArray:
    """Discounted rewards to the end of each episode, shape `(T, B)`; NaN where it lies beyond the last step."""
    returns = np.empty(reward.shape)
    following = np.full(reward.shape[1], np.nan)
    for t in range(reward.shape[0] - 1, -1, -1):
        following = reward[t] + gamma * np.where(ended[t], 0.0, following)
        returns[t] = following
    return returns


def _batches(count: int, size: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    order = rng.permutation(count)
    for start in range(0, count, size):
        yield order[start : start + size]


def _sweep(
    policy: SetPolicy,
    optimiser: torch.optim.Optimizer,
    known: _Decisions,
    settings: ImitationConfig,
    rng: np.random.Generator,
    stop: StopFlag,
) -> tuple[float, float]:
    """One pass over all decisions; mean loss of the choices and root mean square error of the values."""
    policy.set_training_mode(True)
    losses, errors = [], []
    for rows in _batches(known.observation.shape[0], settings.batch_size, rng):
        if stop.requested:
            raise StopTraining
        sites = policy.sites(torch.from_numpy(known.observation[rows]))
        bits = torch.from_numpy(known.chosen[rows]).float()
        weight = torch.from_numpy(known.weight[rows])
        returns = torch.from_numpy(known.returns[rows])
        ends = torch.isfinite(returns)
        each = nn.functional.binary_cross_entropy_with_logits(policy.actor(sites), bits, reduction="none")
        loss = (each * weight).sum() / weight.sum().clamp(min=1e-9)
        square = (policy.critic(sites).squeeze(1)[ends] - returns[ends]) ** 2
        error = square.sum() / max(int(ends.sum()), 1)
        optimiser.zero_grad()
        (loss + error).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
        errors.append(float(error.detach()))
    return float(np.mean(losses)), float(np.sqrt(np.mean(errors)))


def _agreement(policy: SetPolicy, known: _Decisions) -> float:
    agree = open_ = 0
    for start in range(0, known.observation.shape[0], 4096):
        rows = slice(start, start + 4096)
        with torch.no_grad():
            sites = policy.sites(torch.from_numpy(known.observation[rows]))
            bits = (policy.actor(sites) > 0.0).numpy()
        eligible = sites.eligible.numpy()
        agree += int(((bits == known.chosen[rows]) & eligible).sum())
        open_ += int(eligible.sum())
    return agree / max(open_, 1)

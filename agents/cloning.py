"""Warm start of a power-shaping policy: it learns to act as a controller does, before it learns from rewards.

First the expert plays and the policy learns its actions (behaviour cloning). Small differences lead a policy to where
the expert never was, so then the policy plays, and the expert tells what it would have done there (DAgger: Ross,
Gordon, Bagnell, "A Reduction of Imitation Learning and Structured Prediction to No-Regret Online Learning", AISTATS
2011). The critic learns the discounted rewards that followed, scaled as they will be in training, so that the first
gradient steps after the warm start do not undo it. The statistics that observations are scaled by are those of the
states met.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecNormalize

from wattgym.agents.adviser import ADVISER, OracleAdviser
from wattgym.agents.baselines import make_baseline
from wattgym.agents.callbacks import StopFlag, StopTraining
from wattgym.agents.config import ON_POLICY, TrainingConfig
from wattgym.agents.controller import Controller
from wattgym.agents.truth import Informed, Truth
from wattgym.config import FrozenModel
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.vector import PowerShapingVecEnv

WANDER = 0.05
"""Spread of what is added to the policy's actions while it plays, so that it meets states beside its own path."""

_STREAM = 0xC10E
"""Keeps the scenarios of the warm start apart from those of the training that follows."""

_FORGOTTEN = 0.05
"""A return counts once this share of its weight has been seen."""


class CloningRecord(FrozenModel):
    """What a warm start did; `imitation.json` in the run folder.

    Attributes:
        expert: Who was imitated.
        decisions: Environment steps learnt from.
        error: Root mean square difference of the policy's actions from the expert's in the last share, before it was
            learnt from; a job's actions span 2.
        value_error: Root mean square error of the critic in the last sweep; 0 where there is no critic of values.
        seconds: Time it took.
    """

    expert: str
    decisions: int
    error: float
    value_error: float
    seconds: float


@dataclass(eq=False)
class _Share:
    """Steps of a batch: observations `(T, B, D)`, the expert's actions `(T, B, A)`, rewards `(T, B)`, ends `(T,)`."""

    observation: NDArray[np.float32]
    action: NDArray[np.float32]
    reward: NDArray[np.float64]
    ended: NDArray[np.bool_]


def clone(model: Any, config: TrainingConfig, stop: StopFlag, *, progress: bool = True) -> CloningRecord:
    """Trains a fresh model, in place, to act as the configured expert does.

    Args:
        model: Any algorithm's but a recurrent one's.
        config: The training.
        stop: Looked at between steps.
        progress: Show a progress bar on stderr.

    Raises:
        StopTraining: A stop was asked for; the warm start begins anew when the run is taken up again.
    """
    from tqdm import tqdm

    settings, begun = config.imitation, time.monotonic()
    assert settings.expert is not None
    rng = np.random.default_rng([config.seed, _STREAM])
    wrapper: VecNormalize = model.get_vec_normalize_env()
    batch = PowerShapingVecEnv(config.env, config.train.num_envs)
    batch.seed(int(rng.integers(2**31)))
    expert: Controller = OracleAdviser() if settings.expert == ADVISER else make_baseline(settings.expert)
    parameters = [p for p in model.policy.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=settings.learning_rate)
    steps = max(settings.steps // batch.num_envs, 1)
    shares: list[_Share] = []
    error = value_error = 0.0
    with tqdm(total=(settings.passes + 1) * steps, desc="warm start", unit="step", disable=not progress) as bar:
        for index in range(settings.passes + 1):
            share, error = _play(model, batch, expert, wrapper, steps, index > 0, rng, stop, bar)
            shares.append(share)
            for _ in range(settings.epochs):
                value_error = _sweep(model, config, wrapper, shares, optimiser, rng, stop)
    return CloningRecord(
        expert=settings.expert,
        decisions=(settings.passes + 1) * steps * batch.num_envs,
        error=error,
        value_error=value_error,
        seconds=round(time.monotonic() - begun, 3),
    )


def _play(
    model: Any,
    batch: PowerShapingVecEnv,
    expert: Controller,
    wrapper: VecNormalize,
    steps: int,
    alone: bool,
    rng: np.random.Generator,
    stop: StopFlag,
    bar: Any,
) -> tuple[_Share, float]:
    """Some steps of new episodes, with the expert's actions for all of them, and how far the policy's were from those.

    Args:
        model: Whose policy is compared, and plays if `alone`.
        batch: Environments.
        expert: Who says what should be done.
        wrapper: Statistics that learn from what is met.
        steps: Steps of the batch.
        alone: The policy's actions are carried out, not the expert's.
        rng: Generator of what is added to them.
        stop: Looked at between steps.
        bar: Progress.
    """
    # Its spaces are boxes, so observations are arrays.
    observation = cast("NDArray[np.float32]", batch.reset())
    _begin(expert, batch)
    seen, told, rewards, ends, square = [], [], [], [], 0.0
    for _ in range(steps):
        if stop.requested:
            raise StopTraining
        wanted = expert.act(observation).astype(np.float32)
        if wrapper.norm_obs:
            wrapper.obs_rms.update(observation)
        mine, _ = model.policy.predict(wrapper.normalize_obs(observation), deterministic=True)
        square += float(((mine - wanted) ** 2).mean())
        seen.append(observation)
        told.append(wanted)
        played = np.clip(mine + rng.normal(0.0, WANDER, mine.shape), -1.0, 1.0) if alone else wanted
        following, reward, done, _ = batch.step(played.astype(np.float32))
        observation = cast("NDArray[np.float32]", following)
        wrapper._update_reward(reward)
        rewards.append(reward)
        ends.append(bool(done[0]))
        if done[0]:
            # Episodes end together.
            wrapper.returns[:] = 0.0
            _begin(expert, batch)
        bar.update()
    share = _Share(np.stack(seen), np.stack(told), np.stack(rewards).astype(np.float64), np.array(ends))
    return share, float(np.sqrt(square / steps))


def _begin(expert: Controller, batch: PowerShapingVecEnv) -> None:
    """Prepares the expert for the episodes that have just begun; an oracle is told the truth."""
    expert.reset(batch.task)
    plant = batch.shaping.plant
    if isinstance(expert, Informed) and isinstance(plant, Emulator):
        expert.inform(Truth(plant, batch.shaping.targets_w))


def _sweep(
    model: Any,
    config: TrainingConfig,
    wrapper: VecNormalize,
    shares: list[_Share],
    optimiser: torch.optim.Optimizer,
    rng: np.random.Generator,
    stop: StopFlag,
) -> float:
    """One sweep over all shares; returns the critic's root mean square error."""
    size = config.imitation.batch_size
    valued = config.train.algorithm in ON_POLICY
    observation = np.concatenate([share.observation.reshape(-1, share.observation.shape[2]) for share in shares])
    action = np.concatenate([share.action.reshape(-1, share.action.shape[2]) for share in shares])
    returns = np.concatenate([_returns(share, model.gamma).ravel() for share in shares])
    if wrapper.norm_reward:
        returns = returns / np.sqrt(wrapper.ret_rms.var + wrapper.epsilon)
    order, squares = rng.permutation(len(observation)), []
    for start in range(0, len(order), size):
        if stop.requested:
            raise StopTraining
        rows = order[start : start + size]
        x = torch.from_numpy(np.asarray(wrapper.normalize_obs(observation[rows]), dtype=np.float32))
        wanted = torch.from_numpy(action[rows])
        if valued:
            mean = model.policy.get_distribution(x).distribution.mean
            value = torch.from_numpy(returns[rows].astype(np.float32))
            known = torch.isfinite(value)
            square = ((model.policy.predict_values(x).squeeze(1) - value)[known] ** 2).sum() / max(int(known.sum()), 1)
            squares.append(float(square.detach()))
        else:
            mean, square = model.policy.actor(x, deterministic=True), torch.zeros(())
        loss = ((mean - wanted) ** 2).mean() + square
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.policy.parameters(), 1.0)
        optimiser.step()
    return float(np.sqrt(np.mean(squares))) if squares else 0.0


def _returns(share: _Share, gamma: float) -> NDArray[np.float64]:
    """Discounted rewards that followed each step, shape `(T, B)`; NaN where too few of them were seen."""
    steps = share.reward.shape[0]
    returns = np.empty_like(share.reward)
    following = np.zeros(share.reward.shape[1])
    weight = 0.0
    for t in range(steps - 1, -1, -1):
        if share.ended[t]:
            # Episodes are cut off at a time limit: what would have followed is not known.
            following, weight = np.zeros_like(following), 0.0
        following = share.reward[t] + gamma * following
        weight = 1.0 - gamma + gamma * weight
        returns[t] = following if weight >= 1.0 - _FORGOTTEN else np.nan
    return returns

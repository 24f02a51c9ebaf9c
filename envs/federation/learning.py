"""What a round does to the model: a rectified power law in effective site-rounds, by domain.

One round in which site i trains on w_i samples, with e_i = w_i / reference_samples and domain mix m_{i,d} of D domains:

    K_eff = (Σ w)² / Σ w²                                  effective number of sites
    s     = K_eff (1 + φ) / (K_eff + φ)                     cohort factor: s(1) = 1, s(∞) = 1 + φ
    u     = Σ w g(e) / Σ w,  g(e) = e up to 1, then e^κ     local work with diminishing returns
    m_d   = Σ w m_{i,d} / Σ w                               domain mix of the round
    ΔS_d  = u s [(1 − t) D m_d + t] − ρ S_d max(0, 1 − D m_d)
    L_d   = E + (L₀ − E) (1 + S_d / S₀)^−β,   L = Σ π_d L_d

The saturating cohort factor is the noise-scale form of large-batch training (arXiv 1812.06162) in units of sites. The
form and the defaults φ 6.3, S₀ 13.3, β 1.04, L₀ 4.13 were fitted to federated LoRA runs of a byte-level Llama of 0.33 M
parameters over 8 sites and 8 task families at a Dirichlet concentration of 0.3 (log residual 0.2 rms; near IID: φ 2.6).
Transfer t, forgetting ρ and the work exponent κ are assumptions: no fit supports their values. Forgetting is in
proportion to what a domain lacks of its even share, so it vanishes for an even mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattgym.config import FrozenModel, load_config
from wattgym.envs.federation.arrays import FloatArray, Rows
from wattgym.envs.federation.config import GoalConfig, LearningConfig
from wattgym.errors import UserError

_TINY = 1e-12


class LearningProfile(FrozenModel):
    """Fitted parameters of one learning task, as `fit_learning` finds them and `learning.profile` names them.

    Attributes:
        loss_start: Loss before the first round, nats.
        loss_floor: Loss that no training goes below, nats.
        s0: Effective site-rounds after which the power law sets in.
        beta: Exponent of the power law.
        phi: Noise scale, sites.
    """

    loss_start: float
    loss_floor: float
    s0: float
    beta: float
    phi: float


def resolved(config: LearningConfig) -> LearningConfig:
    """The configuration with its profile's values in place.

    Raises:
        UserError: The profile cannot be read or its values are not valid.
    """
    if config.profile is None:
        return config
    profile = load_config(LearningProfile, config.profile)
    try:
        return LearningConfig.model_validate({**config.model_dump(), **profile.model_dump(), "profile": None})
    except ValueError as error:
        raise UserError(f"{config.profile}: {' '.join(str(error).split())}") from None


@dataclass(eq=False)
class Curve(Rows):
    """Learning parameters of each environment, shape `(B,)`; `weights` is `(B, D)`.

    Attributes:
        s0: Effective site-rounds.
        beta: Exponent.
        phi: Noise scale.
        weights: Weights π of the domains in the loss.
    """

    s0: FloatArray
    beta: FloatArray
    phi: FloatArray
    weights: FloatArray


def cohort_factor(k_eff: FloatArray, phi: FloatArray) -> FloatArray:
    """Progress of a round of `k_eff` sites over that of one site."""
    factor: FloatArray = k_eff * (1.0 + phi) / (k_eff + phi)
    return factor


def local_work(share: FloatArray, exponent: float) -> FloatArray:
    """What local work of `share` reference amounts counts for: itself up to 1, its power beyond."""
    if exponent == 1.0:
        return share
    work: FloatArray = np.minimum(share, 1.0) * np.maximum(share, 1.0) ** exponent
    return work


def domain_progress(
    config: LearningConfig, curve: Curve, progress: FloatArray, loss: FloatArray, samples: FloatArray, mix: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Domain progress after a round.

    Args:
        config: Learning model.
        curve: Parameters of the environments.
        progress: Domain progress S before the round, shape `(B, D)`.
        loss: Loss before the round, shape `(B,)`.
        samples: Samples that each site contributes, shape `(B, N)`; none at all leaves everything as it was.
        mix: Domain mixes, shape `(B, N, D)`.

    Returns:
        Progress after the round, shape `(B, D)`, and the effective number of sites, shape `(B,)`.
    """
    total = samples.sum(axis=1)
    per_total = 1.0 / np.maximum(total, _TINY)
    k_eff = total * total / np.maximum((samples * samples).sum(axis=1), _TINY)
    work = (samples * local_work(samples * (1.0 / config.reference_samples), config.work_exponent)).sum(axis=1)
    phi = curve.phi
    if config.phi_growth > 0.0:
        phi = phi * (config.loss_start / loss) ** config.phi_growth
    gain = work * per_total * cohort_factor(k_eff, phi)
    # D m_d: 1 for an even mix.
    relative = np.matmul(samples[:, None, :], mix)[:, 0] * (config.domains * per_total)[:, None]
    lacking = np.maximum(1.0 - relative, 0.0)
    trained = (total > 0.0)[:, None]
    added = gain[:, None] * ((1.0 - config.transfer) * relative + config.transfer)
    after = progress + trained * (added - config.forgetting * progress * lacking)
    return np.maximum(after, 0.0), k_eff


def domain_loss(config: LearningConfig, curve: Curve, progress: FloatArray) -> FloatArray:
    """Loss of each domain, shape `(B, D)`, nats."""
    decay = np.exp(-curve.beta[:, None] * np.log1p(progress / curve.s0[:, None]))
    loss: FloatArray = config.loss_floor + (config.loss_start - config.loss_floor) * decay
    return loss


def remaining_progress(config: LearningConfig, curve: Curve, progress: FloatArray, target_loss: float) -> FloatArray:
    """Even progress of all domains that is still missing to a target loss, effective site-rounds.

    It is the `n` with `Σ π_d L_d(S_d + n) = L_target`: what is left to do if all that comes is evenly mixed. Its
    decrease measures a round by what it spares the rest of the way, whereas the loss itself flatters whoever serves the
    domain that is furthest behind.

    Args:
        config: Learning model.
        curve: Parameters, shape `(B,)`.
        progress: Domain progress, shape `(B, D)`.
        target_loss: Loss to reach, above the floor, nats.

    Returns:
        Shape `(B,)`; 0 where the target is reached.
    """
    missing = np.zeros(progress.shape[0])
    s0, beta = curve.s0[:, None], curve.beta[:, None]
    # Loss is convex and falls in n, so that Newton's steps from 0 never pass the target.
    for _ in range(8):
        way = progress + missing[:, None]
        above = domain_loss(config, curve, way) - config.loss_floor
        loss = (above * curve.weights).sum(axis=1) + config.loss_floor
        slope = (above * curve.weights * beta / (s0 + way)).sum(axis=1)
        missing = missing + np.maximum(loss - target_loss, 0.0) / np.maximum(slope, _TINY)
    return missing


def accuracy(config: LearningConfig, loss: FloatArray) -> FloatArray:
    """Accuracy that goes with a loss: `accuracy_max / (1 + exp(slope (L − L_half)))`."""
    value: FloatArray = config.accuracy_max / (1.0 + np.exp(config.accuracy_slope * (loss - config.accuracy_half_loss)))
    return value


def target_loss(config: LearningConfig, goal: GoalConfig) -> float:
    """The loss at which the goal is reached, nats.

    Raises:
        UserError: The model never gets there (the message states its ceiling or floor), or begins there.
    """
    floor, start = config.loss_floor, config.loss_start
    ceiling, begin = (float(accuracy(config, np.array(loss))) for loss in (floor, start))
    if goal.target_accuracy is not None:
        if goal.target_accuracy >= ceiling:
            raise UserError(
                f"goal.target_accuracy {goal.target_accuracy:g} is above the model's ceiling of {ceiling:.4f} "
                f"(accuracy at the loss floor {floor:g})"
            )
        if goal.target_accuracy <= begin:
            raise UserError(
                f"goal.target_accuracy {goal.target_accuracy:g} is already reached before the first round, with "
                f"{begin:.4f}; valid: up to the ceiling of {ceiling:.4f}"
            )
        odds = config.accuracy_max / goal.target_accuracy - 1.0
        return config.accuracy_half_loss + float(np.log(odds)) / config.accuracy_slope
    assert goal.target_loss is not None
    if not floor < goal.target_loss < start:
        raise UserError(
            f"goal.target_loss {goal.target_loss:g} is out of the model's reach; valid: between the floor {floor:g} "
            f"(accuracy ceiling {ceiling:.4f}) and the start {start:g}"
        )
    return goal.target_loss

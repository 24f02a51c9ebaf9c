"""Fits the learning model to recorded federated rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wattgym.envs.federation.arrays import FloatArray, IntArray
from wattgym.envs.federation.learning import LearningProfile, cohort_factor
from wattgym.errors import UserError
from wattgym.files import atomic_write_text

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("round", "loss", "sites")
"""Columns that a table of rounds must have; `run` and `work` are optional."""

_PRIOR_LOG_BETA = (0.0, 0.25)
_PRIOR_LOG_PHI = (float(np.log(4.0)), 1.0)
"""Centre and spread of the priors: β near 1, φ between about 1.5 and 11 sites."""

_MEASURED_LOG_PHI_SD = 0.5
"""Spread of a measured φ: it grows several-fold in the course of training, and one number stands for all of it."""

_MIN_ROUNDS = 5


@dataclass(frozen=True)
class LearningFit:
    """A fitted profile and how far to trust it.

    Attributes:
        profile: The parameters.
        early_slope: β / S₀, which the data determine better than either.
        rms_log_residual: Root mean square of the residual of the logarithm of the loss.
        sd_log: Standard deviations of log S₀, log β and log φ, by name.
        phi_identified: Whether the cohort size varied; if not, φ is the prior's.
        rounds: Rounds that the fit rests on.
    """

    profile: LearningProfile
    early_slope: float
    rms_log_residual: float
    sd_log: dict[str, float]
    phi_identified: bool
    rounds: int

    def rms_on(self, rounds: pd.DataFrame, source: str = "rounds table") -> float:
        """Root mean square of the residual of the log loss on rounds that the fit has not seen.

        Args:
            rounds: As for `fit_learning`; the loss before training is their own.
            source: Name of the table for messages.

        Raises:
            UserError: As for `fit_learning`.
        """
        data, profile = _checked(rounds, source), self.profile
        start = float(np.mean(data.loss[data.trained == 0]))
        theta = np.log([profile.s0, profile.beta, profile.phi])
        expected = _curve(data, theta, start, min(profile.loss_floor, 0.99 * start))
        residual = np.log(expected) - np.log(data.loss[data.trained > 0])
        return float(np.sqrt(np.mean(residual**2)))

    def save(self, path: str | Path) -> None:
        """Writes the profile as YAML for `learning.profile`.

        Raises:
            UserError: The file cannot be written.
        """
        lines = [
            f"# Fitted to {self.rounds} rounds; rms log residual {self.rms_log_residual:.3f}, "
            f"early slope {self.early_slope:.4f}" + ("" if self.phi_identified else "; phi is the prior's"),
            *(f"{name}: {value!r}" for name, value in self.profile.model_dump().items()),
        ]
        atomic_write_text(path, "\n".join(lines) + "\n")


@dataclass(frozen=True, eq=False)
class _Rounds:
    """Rounds in order of run and number: whether it is the last before training, cohort size, work, log loss."""

    run: IntArray
    sites: FloatArray
    work: FloatArray
    loss: FloatArray
    trained: FloatArray


def check_rounds(rounds: pd.DataFrame, source: str) -> None:
    """Makes sure that a table can be fitted to.

    Raises:
        UserError: As for `fit_learning`.
    """
    _checked(rounds, source)


def fit_learning(rounds: pd.DataFrame, source: str = "rounds table", noise_scale: float | None = None) -> LearningFit:
    """Fits `L = E + (L₀ − E)(1 + S / S₀)^−β`, `S = Σ u K (1 + φ) / (K + φ)`, to recorded rounds.

    Least squares on the logarithm of the loss over all rounds. L₀ is the mean of the rounds numbered 0 (the evaluation
    before training). β and S₀ trade off against each other, so β has a tight prior (log-normal around 1) and the
    early slope β / S₀ is reported; φ has a wide one, and shows only where the number of sites varies, within or
    between runs.

    Args:
        rounds: Columns `round` (0 = before training), `loss` (nats) and `sites` (effective number of sites that
            counted), optionally `run` (default: one run) and `work` (mean local work over the reference, default 1).
        source: Name of the table for messages.
        noise_scale: φ as the norms of the sites' deltas tell it; the prior of φ is then close around it.

    Returns:
        The fit.

    Raises:
        UserError: A column is missing, a value is not valid, or there are too few rounds.
    """
    from scipy.optimize import least_squares

    data = _checked(rounds, source)
    start = float(np.mean(data.loss[data.trained == 0]))
    lowest = float(data.loss.min())
    trained = data.trained > 0
    varied = np.unique(np.round(data.sites[trained], 6)).size > 1
    log_loss = np.log(data.loss[trained])

    def predicted(theta: FloatArray) -> FloatArray:
        return _curve(data, theta, start, float(theta[3]) * lowest)

    prior_phi = _PRIOR_LOG_PHI if noise_scale is None else (float(np.log(noise_scale)), _MEASURED_LOG_PHI_SD)
    # A residual of the loss has about this spread; it sets how much the priors weigh against the rounds.
    sigma = 0.1

    def residuals(theta: FloatArray) -> FloatArray:
        fit = (np.log(predicted(theta)) - log_loss) / sigma
        priors = [(theta[k] - centre) / sd for k, (centre, sd) in ((1, _PRIOR_LOG_BETA), (2, prior_phi))]
        return np.concatenate([fit, priors])

    middle = max(float(np.cumsum(data.sites * data.trained)[-1]) / 10.0, 1.0)
    first = np.array([np.log(middle), _PRIOR_LOG_BETA[0], prior_phi[0], 0.3])
    bounds = ([-5.0, -3.0, -3.0, 0.0], [15.0, 2.0, 6.0, 0.99])
    found = least_squares(residuals, np.clip(first, *bounds), bounds=bounds, x_scale="jac")
    theta = np.asarray(found.x, dtype=np.float64)
    s0, beta, phi = (float(v) for v in np.exp(theta[:3]))
    covariance = np.linalg.pinv(found.jac.T @ found.jac)
    residual = np.log(predicted(theta)) - log_loss
    profile = LearningProfile(loss_start=start, loss_floor=float(theta[3] * lowest), s0=s0, beta=beta, phi=phi)
    return LearningFit(
        profile=profile,
        early_slope=beta / s0,
        rms_log_residual=float(np.sqrt(np.mean(residual**2))),
        sd_log={name: float(np.sqrt(covariance[k, k])) for k, name in enumerate(("s0", "beta", "phi"))},
        phi_identified=bool(varied),
        rounds=int(trained.sum()),
    )


def _curve(data: _Rounds, theta: FloatArray, start: float, floor: float) -> FloatArray:
    """Loss after each round of training, nats; `theta` is log S₀, log β, log φ."""
    s0, beta, phi = np.exp(theta[:3])
    step = data.work * cohort_factor(data.sites, phi) * data.trained
    total = np.concatenate([np.cumsum(step[data.run == run]) for run in np.unique(data.run)])
    loss: FloatArray = floor + (start - floor) * (1.0 + total[data.trained > 0] / s0) ** -beta
    return loss


def _checked(rounds: pd.DataFrame, source: str) -> _Rounds:
    for column in COLUMNS:
        if column not in rounds:
            raise UserError(f"{source}: no column '{column}'; needed: {', '.join(COLUMNS)} (optional: run, work)")
    table = rounds.assign(run=rounds["run"].astype(str) if "run" in rounds else "0", work=rounds.get("work", 1.0))
    table = table.sort_values(["run", "round"], kind="stable")
    runs = np.unique(table["run"].to_numpy(str), return_inverse=True)[1]
    number, loss, sites, work = (table[name].to_numpy(np.float64) for name in ("round", "loss", "sites", "work"))
    trained = number > 0
    for name, values, valid, bad in (
        ("round", number, "a whole number from 0", ~(np.isfinite(number) & (number >= 0) & (number % 1 == 0))),
        ("loss", loss, "above 0", ~(np.isfinite(loss) & (loss > 0))),
        ("sites", sites, "above 0 from round 1", ~(np.isfinite(sites) & (sites >= 0)) | (trained & (sites <= 0))),
        ("work", work, "above 0", ~(np.isfinite(work) & (work > 0))),
    ):
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            raise UserError(f"{source}: {name} is {values[first]:g} in round {number[first]:g}; valid: {valid}")
    if not (~trained).any():
        raise UserError(f"{source}: no round 0; the loss before training is needed")
    if trained.sum() < _MIN_ROUNDS:
        raise UserError(f"{source}: {int(trained.sum())} rounds of training; a fit needs at least {_MIN_ROUNDS}")
    return _Rounds(runs.astype(np.int64), sites, work, loss, trained.astype(np.float64))

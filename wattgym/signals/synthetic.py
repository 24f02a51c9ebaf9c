"""A RegD-like generator for training, so that recorded signals stay unseen until evaluation.

An area control error is modelled as white noise through two first-order low-passes of `smooth_s`; the fast
product is what is left after removing the slow part (a first-order low-pass of `neutral_s`), as a market operator
splits its error between a slow and a fast signal. Removing the slow part makes the result energy neutral: the integral
of `x − lowpass(x)` over any window equals `neutral_s` times the change of the low-pass, which stays bounded
however long the window is. The result is divided by its own analytic standard deviation (a fixed scale: the
sample's maximum would leak the future), multiplied by `std` and clipped to ±1.

The defaults give the standard deviation (0.46 after clipping), the mileage (about 16 per hour) and the time for
which the autocorrelation stays above one half (about 2 min) of the recorded 40-minute RegD wave; nothing else of it
is used. The mean over 30 minutes has a standard deviation of about 0.09.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.errors import UserError
from wattgym.signals.signal import Signal, tick_times

GRID_S = 2.0
"""Interval at which the signal is generated; markets send it every 2 s."""


class SyntheticRegdOptions(FrozenModel):
    """Parameters of the generator.

    Attributes:
        smooth_s: Time constant of each of the two smoothing low-passes.
        neutral_s: Time constant of the slow part that is removed.
        std: Standard deviation before clipping.
    """

    smooth_s: float = Field(120.0, gt=0)
    neutral_s: float = Field(200.0, gt=0)
    std: float = Field(0.47, gt=0, le=1)


@lru_cache(maxsize=32)
def _filter(options: SyntheticRegdOptions) -> tuple[NDArray[np.float64], NDArray[np.float64], float, int]:
    """Numerator, denominator, standard deviation for unit white noise, and settling length in samples."""
    from scipy.signal import lfilter

    smooth = np.exp(-GRID_S / options.smooth_s)
    slow = np.exp(-GRID_S / options.neutral_s)
    denominator = np.convolve(np.convolve([1.0, -smooth], [1.0, -smooth]), [1.0, -slow])
    numerator = np.array([slow, -slow])  # x - lowpass(x), with lowpass gain (1 - slow) / (1 - slow z^-1)
    settle = int(np.ceil(8 * max(options.smooth_s, options.neutral_s) / GRID_S))
    impulse = lfilter(numerator, denominator, np.eye(1, 2 * settle)[0])
    return numerator, denominator, float(np.sqrt(np.sum(impulse**2))), settle


def synthetic_regd(
    split: str, duration_s: float, period_s: float, rng: np.random.Generator, options: SyntheticRegdOptions
) -> Signal:
    """Generates one signal; ticks take the latest generated sample (zero-order hold).

    Raises:
        UserError: `split` is not `train`: controllers are evaluated on recorded signals only.
    """
    from scipy.signal import lfilter  # Half a second: every command imports this module, few generate signals.

    if split != "train":
        raise UserError(f"synthetic_regd is for training only; split '{split}' needs a recorded family such as regd")
    times = tick_times(duration_s, period_s)
    index = np.floor(times / GRID_S + 1e-6).astype(np.intp)
    numerator, denominator, scale, settle = _filter(options)
    noise = rng.standard_normal(settle + int(index[-1]) + 1)
    fast = lfilter(numerator, denominator, noise)[settle:] * (options.std / scale)
    return Signal(
        "synthetic_regd", "synthetic_regd", period_s, np.clip(fast, -1.0, 1.0)[index], None, 0.0, split,
        {"options": options.model_dump()},
    )  # fmt: skip

"""From replies to the next global adapter: which may count, their mean, and how much they disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wattgym.federated.adapters import FACTOR_A, FACTOR_B, AdapterError, difference, norm
from wattgym.federated.config import AggregationConfig
from wattgym.federated.messages import Adapter


def aggregate(method: str, adapters: Mapping[str, Adapter], samples: Mapping[str, int]) -> Adapter:
    """The next global adapter.

    Sites are added up in the order of their names and in double precision, so that the result has the same bits
    whatever the order in which replies came.

    Args:
        method: `factors` or `svd` (see `AggregationConfig`).
        adapters: Replies by site; all of one form.
        samples: Samples that each trained on, above 0.
    """
    names = sorted(adapters)
    weights = np.array([samples[name] for name in names], dtype=np.float64)
    weights /= weights.sum()
    ordered = [adapters[name] for name in names]
    if method == "svd":
        return _product_mean(ordered, weights)
    return {key: _mean([adapter[key] for adapter in ordered], weights) for key in ordered[0]}


def effective_sites(samples: Sequence[int]) -> float:
    """`(Σ w)² / Σ w²`; 0 without any."""
    total = float(sum(samples))
    return total * total / sum(float(n) * n for n in samples) if total > 0.0 else 0.0


def noise_scale(deltas: Sequence[Adapter]) -> float:
    """How many sites it takes until their updates agree as much as they differ, in units of one site's round.

    From K updates d with mean m: `|G|² = (K|m|² − mean|d|²)/(K−1)`, `tr = (mean|d|² − |m|²) K/(K−1)`, `φ = tr/|G|²`
    (McCandlish et al., arXiv 1812.06162, with a site's round in place of a sample).

    Returns:
        φ; NaN with fewer than two updates, infinity where they share no direction.
    """
    k = len(deltas)
    if k < 2:
        return math.nan
    squares = sum(norm(delta) ** 2 for delta in deltas) / k
    mean = {key: np.mean([delta[key] for delta in deltas], axis=0, dtype=np.float64) for key in deltas[0]}
    square = float(sum(np.sum(np.square(array)) for array in mean.values()))
    signal = (k * square - squares) / (k - 1)
    noise = (squares - square) * k / (k - 1)
    if noise <= 0.0:
        return 0.0
    return noise / signal if signal > 0.0 else math.inf


class NormLimit:
    """Refuses updates that are too large to be what training made of the global adapter.

    Attributes:
        history: Change per step of the replies that counted lately, oldest first.
    """

    WINDOW = 64

    def __init__(self, config: AggregationConfig, history: Sequence[float] = ()) -> None:
        self._config = config
        self.history = list(history)

    def check(self, adapter: Adapter, reference: Adapter, steps: int, learning_rate: float) -> float:
        """Checks one reply.

        AdamW moves a weight by about the learning rate in a step, so `steps · rate · sqrt(weights)` bounds the change
        but for a factor; after a first round, the replies that counted say more.

        Returns:
            Norm of the change.

        Raises:
            AdapterError: The change is too large; the message says by how much.
        """
        change = norm(difference(adapter, reference))
        weights = sum(array.size for array in reference.values())
        possible = self._config.step_ratio * steps * learning_rate * math.sqrt(weights)
        if not change <= possible:
            raise AdapterError(f"adapter moved by {change:.3g}, at most {possible:.3g} is plausible in {steps} steps")
        if self.history:
            usual = float(np.median(self.history)) * steps
            if change > self._config.history_ratio * usual:
                raise AdapterError(
                    f"adapter moved by {change:.3g}, {change / max(usual, 1e-30):.0f} times as far as usual "
                    f"(limit {self._config.history_ratio:g})"
                )
        return change

    def learn(self, changes: Sequence[tuple[float, int]]) -> None:
        """Takes in the replies that counted: the norm of each change and its steps."""
        self.history = [*self.history, *(change / steps for change, steps in changes)][-self.WINDOW :]


def _mean(arrays: Sequence[NDArray[np.float32]], weights: NDArray[np.float64]) -> NDArray[np.float32]:
    total = np.zeros(arrays[0].shape, dtype=np.float64)
    for array, weight in zip(arrays, weights, strict=True):
        total += weight * array
    return total.astype(np.float32)


def _product_mean(adapters: Sequence[Adapter], weights: NDArray[np.float64]) -> Adapter:
    """Mean of the products, layer by layer; arrays that are no LoRA factors are averaged by themselves."""
    result: Adapter = {}
    for key in adapters[0]:
        if key.endswith(FACTOR_A):
            other = key.removesuffix(FACTOR_A) + FACTOR_B
            a = [adapter[key] for adapter in adapters]
            result[key], result[other] = _product(a, [adapter[other] for adapter in adapters], weights)
        elif not key.endswith(FACTOR_B):
            result[key] = _mean([adapter[key] for adapter in adapters], weights)
    return {key: result[key] for key in adapters[0]}


def _product(
    a: Sequence[NDArray[np.float32]], b: Sequence[NDArray[np.float32]], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Factors of rank r nearest to `Σ w B A`, by way of the stacked factors; the full matrix is never made.

    The rows of A are orthonormal and B carries the singular values: a direction that nothing was learned in keeps an A
    to learn with, as in a fresh adapter.
    """
    rank = a[0].shape[0]
    scaled = [w * each.astype(np.float64) for w, each in zip(weights, b, strict=True)]
    left_q, left_r = np.linalg.qr(np.concatenate(scaled, axis=1))
    right_q, right_r = np.linalg.qr(np.concatenate([each.astype(np.float64) for each in a], axis=0).T)
    u, s, vt = np.linalg.svd(left_r @ right_r.T)
    found = min(rank, s.size)  # a rank above the layer's own leaves the rest of it empty
    new_b, new_a = np.zeros((b[0].shape[0], rank)), np.zeros((rank, a[0].shape[1]))
    new_b[:, :found] = (left_q @ u)[:, :found] * s[:found]
    new_a[:found] = (right_q @ vt.T)[:, :found].T
    # Singular vectors are defined up to their sign; the largest entry of each row of A is positive.
    signs = np.sign(new_a[np.arange(rank), np.abs(new_a).argmax(axis=1)])
    signs[signs == 0.0] = 1.0
    return (new_a * signs[:, None]).astype(np.float32), (new_b * signs).astype(np.float32)

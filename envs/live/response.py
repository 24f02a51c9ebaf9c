"""From a calibration's samples to a job's profile: power, speed, delay and sensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from wattgym.envs.live.activity import BoolArray, busy_s, is_clean
from wattgym.envs.live.phase_fit import fit_phases
from wattgym.envs.plant import FloatArray
from wattgym.envs.profile import HeldOut, JobProfile
from wattgym.errors import UserError

DEAD_BAND = 0.01
"""Limits that differ by less than this share are the same."""

_LEAST_COMPUTING_S = 1.0

_STEP_SHARE = 0.1
"""A fall of power counts as a step response if it is at least this share of the power before."""

REAL_REVERSAL = 3.0
"""Standard errors by which means must fall with a rising limit to be taken as they are."""

SETTLED_S = 2.5
"""Time after a command at which a lowered draw stands still; several time constants of every known board."""


@dataclass(frozen=True, eq=False)
class Dwell:
    """One limit, held for a while.

    Attributes:
        number: Its place in the sweep.
        wanted_w: Limit that was commanded, W per GPU.
        limit_w: Mean limit in force, W per GPU.
        power_w: Mean power of the job while computing, W.
        rate: Samples (of mean length) per second while computing.
    """

    number: int
    wanted_w: float
    limit_w: float
    power_w: float
    rate: float


def fit_job(nominal: JobProfile, rows: pd.DataFrame) -> JobProfile:
    """A job's profile from its samples.

    Args:
        nominal: What is known of the job: devices, training, actuator.
        rows: Samples of the whole sweep, in order.

    Raises:
        UserError: The job hardly computed at some limit, or made no progress.
    """
    dwells = measure_dwells(rows)
    table = _table(dwells)
    full = float(table["rate"].iloc[-1])
    n_gpus = nominal.n_gpus
    limit, power = table["limit_w"].to_numpy(), table["power_w"].to_numpy()
    measured = {
        "limit_w": _numbers(limit),
        "power_w": _numbers(power / n_gpus),
        "throughput": _numbers(table["rate"] / full),
        "power_sd_w": _numbers(table["power_sd_w"] / n_gpus),
        "throughput_sd": _numbers(table["rate_sd"] / full),
        "full_samples_per_s": full,
        "sensor_period_s": sensor_period_s(rows),
        "sensor_gain": sensor_gain(rows),
        "delay_s": response_delay_s(rows, dwells, nominal.sensor_window_s, nominal.delay_s),
    }
    computing_w = {dwell.number: dwell.power_w for dwell in dwells}
    profile = JobProfile.model_validate(nominal.model_dump() | measured)
    return profile.model_copy(update={"phases": fit_phases(profile, rows, computing_w)})


def measure_dwells(rows: pd.DataFrame) -> list[Dwell]:
    """Power and speed at each limit visited.

    A text may take time by its length (a GPU), or as long as any other (a job that is held to a pace in samples), so
    speeds are compared in the unit that scatters less from visit to visit of a limit, and told in samples.

    Raises:
        UserError: A job hardly computed in a dwell, or its progress cannot be told.
    """
    busy = busy_s(rows)
    clean = is_clean(rows)
    units = rows[["samples", "tokens"]].iloc[-1] - rows[["samples", "tokens"]].iloc[0]
    measured = [
        [
            _measure(part, busy, clean, str(unit), units["samples"] / done)
            for _, part in rows[rows["measuring"]].groupby("dwell")
        ]
        for unit, done in units.items()
        if done > 0
    ]
    return min(measured, key=_scatter)


def _scatter(dwells: Sequence[Dwell]) -> float:
    """Mean square deviation of speeds from their limit's mean, relative."""
    data = pd.DataFrame([vars(dwell) for dwell in dwells])
    mean = data.groupby("wanted_w")["rate"].transform("mean")
    return float(((data["rate"] / mean - 1.0) ** 2).mean())


def _measure(part: pd.DataFrame, busy: FloatArray, clean: BoolArray, unit: str, samples: float) -> Dwell:
    where, steps = part.index.to_numpy(), part["steps"].to_numpy()
    pairs = clean[where[1:]] & clean[where[:-1]] & (np.diff(where) == 1)
    joules, seconds = np.diff(part["energy_j"])[pairs].sum(), np.diff(part["metered_s"])[pairs].sum()
    if not (seconds > _LEAST_COMPUTING_S and np.isfinite(joules)):
        raise UserError(
            f"job {part['job'].iloc[0]:.0f}: hardly computed at {part['wanted_w'].iloc[0]:.0f} W, so that its power "
            "cannot be told; evaluate and save less often while calibrating"
        )
    edges = np.flatnonzero(np.diff(steps) > 0)
    # A step ended between two looks at the job: in the middle, on average.
    at_s = 0.5 * (busy[where[edges]] + busy[where[edges + 1]])
    done = part[unit].to_numpy()[edges + 1]
    rate = samples * (done[-1] - done[0]) / (at_s[-1] - at_s[0])
    limit_w = float(part["limit_w"].mean())
    return Dwell(
        int(part["dwell"].iloc[0]), float(part["wanted_w"].iloc[0]), limit_w, float(joules / seconds), float(rate)
    )


def held_out_error(jobs: Sequence[pd.DataFrame]) -> HeldOut | None:
    """Error with which two thirds of the dwells, drawn by their place in the random order, predict the rest.

    Args:
        jobs: Samples of each job.

    Returns:
        The errors; None if nothing can be predicted, because every visit of an outermost limit was held out.
    """
    power: list[float] = []
    speed: list[float] = []
    for rows in jobs:
        dwells = measure_dwells(rows)
        fitted = [dwell for dwell in dwells if dwell.number % 3 != 2]
        table = _table(fitted)
        low, high = table["limit_w"].iloc[0] - 1.0, table["limit_w"].iloc[-1] + 1.0
        for dwell in dwells:
            # Nothing is extrapolated: the outermost limit is not predicted if it was held out every time.
            if dwell.number % 3 == 2 and low <= dwell.limit_w <= high:
                for errors, column, truth in ((power, "power_w", dwell.power_w), (speed, "rate", dwell.rate)):
                    errors.append(abs(np.interp(dwell.limit_w, table["limit_w"], table[column]) / truth - 1.0))
    if not power:
        return None
    return HeldOut(dwells=len(power), power=float(np.mean(power)), throughput=float(np.mean(speed)))


def response_delay_s(rows: pd.DataFrame, dwells: Sequence[Dwell], window_s: float, unknown_s: float) -> float:
    """Time from a command to lower the limit until the draw has fallen half-way, s.

    Cuts only: raises are slowed by the command rules. The sensor's readings are means over a window, so each belongs
    to the window's middle; between two of them the draw is taken as linear. Commands came at random phases of the
    sensor's period, so the median over many steps is finer than that.

    Args:
        rows: Samples of the whole sweep.
        dwells: What was measured.
        window_s: Window of the sensor.
        unknown_s: Returned where there was no clear step.
    """
    at_s = rows["t_s"].to_numpy()
    away = np.append(True, np.abs(np.diff(busy_s(rows)) - np.diff(at_s)) > 0.02)
    delays = []
    for before, after in itertools.pairwise(dwells):
        if after.power_w > (1.0 - _STEP_SHARE) * before.power_w:
            continue
        command_s = rows.loc[rows["dwell"] == after.number, "commanded_s"].max()
        near = (at_s > command_s - 1.0) & (at_s < command_s + SETTLED_S)
        if away[near].any():
            continue
        readings = rows[near].drop_duplicates("published_s")
        read_s = readings["published_s"].to_numpy() - 0.5 * window_s - command_s
        # The sensor's own view of both levels: its gain does not matter.
        level = readings["sensor_w"].to_numpy()
        half = 0.5 * (level[read_s < 0.0].mean() + level[-3:].mean())
        i = int(np.argmax((level < half) & (read_s > 0.0)))
        share = (level[i - 1] - half) / max(level[i - 1] - level[i], 1e-9)
        delays.append(read_s[i - 1] + share * (read_s[i] - read_s[i - 1]))
    return max(float(np.median(delays)), 0.0) if delays else unknown_s


def sensor_period_s(rows: pd.DataFrame) -> float:
    """Time between publications of the sensor, s, as far as polling shows it.

    Where readings change almost every time, changes are publications; where a steady draw reads the same for long,
    the ages that the device tells are.
    """
    for column in ("sensor_w", "published_s"):
        fresh = rows.loc[np.append(True, np.diff(rows[column]) != 0.0), "t_s" if column == "sensor_w" else column]
        if fresh.size > 0.2 * len(rows):
            return float(np.median(np.diff(fresh)))
    return float(np.median(np.diff(rows["t_s"])))


def sensor_gain(rows: pd.DataFrame) -> float:
    """Sensor's mean power over the meter's, while limits are held and the job computes."""
    clean = is_clean(rows) & rows["measuring"].to_numpy()
    pairs = clean[1:] & clean[:-1]
    meter_w = np.diff(rows["energy_j"])[pairs].sum() / np.diff(rows["metered_s"])[pairs].sum()
    return float(np.nanmean(rows["sensor_w"].to_numpy()[clean]) / meter_w)


def _table(dwells: Sequence[Dwell]) -> pd.DataFrame:
    """Means and spreads by limit, ascending."""
    data = pd.DataFrame([vars(dwell) for dwell in dwells])
    groups = data.groupby("wanted_w")
    table = groups[["limit_w", "power_w", "rate"]].mean()
    # Rules leave differences alone that are not worth a write; what was commanded is then as good a name for it.
    near = np.abs(table["limit_w"] - table.index) <= DEAD_BAND * table.index
    table["limit_w"] = np.where(near, table.index, table["limit_w"])
    spread = groups[["power_w", "rate"]].std().fillna(0.0)
    for column in ("power_w", "rate"):
        table[column] = _rising(table[column].to_numpy(), spread[column].to_numpy(), groups.size().to_numpy())
    return table.assign(power_sd_w=spread["power_w"], rate_sd=spread["rate"]).reset_index()


def _rising(means: FloatArray, sd: FloatArray, visits: NDArray[np.integer]) -> FloatArray:
    """Means by ascending limit, rising as far as their scatter allows.

    A higher limit hardly ever lowers power or speed, so reversals within the scatter are pooled (isotonic regression);
    a job that is really faster below the top keeps its curve.
    """
    error = np.sqrt(np.mean(sd**2) / visits)
    rising: FloatArray = isotonic_regression(means, weights=visits).x
    return rising if (np.abs(rising - means) <= REAL_REVERSAL * error).all() else means


def _numbers(values: FloatArray | pd.Series) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in np.asarray(values))

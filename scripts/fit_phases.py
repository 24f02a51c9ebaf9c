"""Fits the emulator's phase families to measured MLPerf runs and prints how well they fit held-out runs.

Usage: python scripts/fit_phases.py [--out envs/emulator/phases.yaml]

Data: node AC power at 2 s and training logs of the Sustainable Metal Cloud submissions to MLPerf Training v4.0 (8x
H100-SXM5-80GB per node; Apache-2.0). Parameters come from the fitting runs only; residuals from the others.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from wattgym.envs.emulator.phases import PhaseFamily, PhaseTable
from wattgym.errors import UserError
from wattgym.files import atomic_write_text
from wattgym.traces import load_table

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "envs" / "emulator" / "phases.yaml"

SAMPLE_S = 2.0
STALLED = 0.45
"""Relative node power below which the GPUs only hold their contexts; the measured gap lies between 0.42 and 0.5."""

HOST_W_PER_GPU = 250.0
"""Assumed. A node idles at 2,340 W with 8 GPUs of about 70 W and at 2,870 W with contexts of about 110 W each: 222 and
249 W per GPU are not the GPU's. Training at 7,230 W with 570 to 700 W per GPU leaves 204 to 334 W."""

CHECKPOINT = {"level": [0.40, 0.60], "duration_s": [5.0, 120.0], "compute_work_s": [900.0, 3600.0]}
"""Assumed: seconds to minutes near idle with a context, every quarter of an hour to every hour."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Source:
    """Where a family's runs are, and the trims around its transients, seconds."""

    file: str
    column: str
    benchmark: str
    nodes: int
    fit_runs: range
    held_out: range
    start_trim_s: float
    first_lead_s: float
    lead_s: float
    settle_s: float
    evaluate_settle_s: float


SOURCES = {
    "lora_8xh100": Source(
        "mlperf_llama2_70b_lora_8xH100_1node_2s", "ac_w", "llama2_70b_lora", 1, range(7), range(7, 10),
        30, 18, 3, 4, 10,
    ),
    "lora_64xh100": Source(
        "mlperf_llama2_70b_lora_8node_64xH100_total_2s", "ac_total_w", "llama2_70b_lora", 8, range(7), range(7, 10),
        30, 22, 3, 5, 3,
    ),
    "gpt3_512xh100": Source(
        "mlperf_gpt3_175b_64node_512xH100_total_2s", "ac_total_w", "gpt3", 64, range(2), range(2, 3),
        15, 4, 4, 6, 5,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One measured run: sample times, node-total power, evaluation spans and optimiser-step ends."""

    t_s: FloatArray
    power_w: FloatArray
    evaluations: list[tuple[float, float]]
    log_start_s: float
    step_ends_s: FloatArray

    def compute_mask(self, source: Source) -> NDArray[np.bool_]:
        """Samples inside compute and clear of its transients."""
        mask = (self.t_s > source.start_trim_s) & (self.t_s < self.evaluations[-1][1])
        for i, (start, stop) in enumerate(self.evaluations):
            lead = source.lead_s if i else source.first_lead_s
            mask &= ~((self.t_s > start - lead) & (self.t_s < stop + source.settle_s))
        return mask


def read_runs(source: Source) -> dict[int, Run]:
    """All runs of one family, without repeated time stamps (the logger repeats one after each of its gaps)."""
    table = load_table(f"llm_training_power/{source.file}").drop_duplicates(["run", "t_s"])
    events = load_table("llm_training_power/mlperf_events")
    events = events[(events["benchmark"] == source.benchmark) & (events["nodes"] == source.nodes)]
    steps = load_table("llm_training_power/mlperf_gpt3_175b_64node_512xH100_step_times")
    runs = {}
    for run, rows in table.groupby("run"):
        log = events[events["run"] == run]
        spans = [log.loc[log["event"] == name, "t_s"].tolist() for name in ("eval_start", "eval_stop")]
        ends = steps.loc[steps["run"] == run, "t_s"].to_numpy() if source.benchmark == "gpt3" else np.zeros(0)
        runs[int(str(run))] = Run(
            rows["t_s"].to_numpy(float), rows[source.column].to_numpy(float), list(zip(*spans, strict=True)),
            float(log["t_s"].min()), ends,
        )  # fmt: skip
    return runs


def fit_family(source: Source, runs: list[Run], node: dict[str, float] | None) -> dict[str, Any]:
    """Parameters of one family.

    Args:
        source: The family's data and trims.
        runs: The fitting runs.
        node: Watts per GPU and transition times of the same node type, for what these runs do not show.
    """
    means = np.array([run.power_w[run.compute_mask(source)].mean() for run in runs])
    relative = [run.power_w / mean for run, mean in zip(runs, means, strict=True)]
    gpus = 8 * source.nodes
    watts = float(means.mean()) / gpus
    load_level = _pooled_median(
        [r[(r < STALLED) & (run.t_s < run.evaluations[-1][1])] for run, r in zip(runs, relative, strict=True)]
    )
    ended = [r[(run.t_s > run.evaluations[-1][1] + 45)] for run, r in zip(runs, relative, strict=True)]
    idle_level = _pooled_median(ended)
    if node is not None:
        load_level = node["load_w"] / watts if np.isnan(load_level) else load_level
        idle_level = node["idle_w"] / watts
    evaluate = [
        r[_between(run.t_s, start + source.evaluate_settle_s, stop)]
        for run, r in zip(runs, relative, strict=True)
        for start, stop in run.evaluations
    ]
    evaluate_level = _pooled_median(evaluate)
    stalls = [
        _stalls(run, r, source, load_level, evaluate_level) for run, r in zip(runs, relative, strict=True)
    ]  # per run: start, before and after each evaluation's start, seconds
    ripple = fit_ripple(source, runs, relative) if runs[0].step_ends_s.size else None
    fall, rise = _transitions(source, runs, relative, load_level, evaluate_level)
    start_stall = [s[0] for s in stalls]
    before = np.array([s[1] for s in stalls])
    after = np.array([s[2] for s in stalls])
    spans = np.array([[stop - start for start, stop in run.evaluations] for run in runs])
    blocks = np.array([_blocks(run) for run in runs])
    warm_up = [SAMPLE_S * np.sum((run.t_s < 0) & (r > 0.8)) for run, r in zip(runs, relative, strict=True)]
    return {
        "gpus": gpus,
        "compute_w_per_gpu": watts,
        "host_w_per_gpu": HOST_W_PER_GPU,
        "run_level_sd": float(means.std(ddof=1) / means.mean()),
        "load_level": load_level,
        "evaluate_level": evaluate_level,
        "idle_level": idle_level,
        "load_s": _spread([-run.log_start_s - w for run, w in zip(runs, warm_up, strict=True)]),
        "start_stall_s": _spread(start_stall),
        "first_evaluate_stall_s": _spread(before[:, 0] + after[:, 0]),
        "evaluate_stall_s": _spread(before[:, 1:] + after[:, 1:]),
        "evaluate_s": _spread(spans - after),
        "first_compute_work_s": _spread(blocks[:, 0] - before[:, 0] - start_stall),
        "compute_work_s": _spread(blocks[:, 1:] - before[:, 1:]),
        "fall_s": node["fall_s"] if node is not None and np.isnan(fall) else fall,
        "rise_s": node["rise_s"] if node is not None and np.isnan(rise) else rise,
        "ripple": ripple,
        "noise": fit_noise(source, runs, relative, ripple),
        "checkpoint": CHECKPOINT,
    }


def _blocks(run: Run) -> list[float]:
    """Seconds from the start of the run, or the end of an evaluation, to the next evaluation."""
    starts = [0.0, *(stop for _, stop in run.evaluations[:-1])]
    return [evaluation[0] - start for start, evaluation in zip(starts, run.evaluations, strict=True)]


def _stalls(
    run: Run, relative: FloatArray, source: Source, load: float, evaluate: float
) -> tuple[float, list[float], list[float]]:
    """Equivalent seconds at `load`: at the start of the run, and before and after the start of each evaluation."""
    start = _deficit(run.t_s, relative, 0.0, source.start_trim_s, 1.0, load)
    before, after = [], []
    for i, (begin, stop) in enumerate(run.evaluations):
        lead = source.lead_s if i else source.first_lead_s
        until = min(begin + source.evaluate_settle_s, stop)
        before.append(_deficit(run.t_s, relative, begin - lead, begin, 1.0, load))
        after.append(_deficit(run.t_s, relative, begin, until, evaluate, load))
    return start, before, after


def _deficit(t_s: FloatArray, relative: FloatArray, start: float, stop: float, usual: float, load: float) -> float:
    """Seconds at `load` that lose as much energy against `usual` as was measured between two times."""
    fine = np.arange(start, stop, 0.1)
    values = np.interp(fine, t_s, relative)
    return max(0.0, float((usual - values).mean() * (stop - start) / (usual - load)))


def _transitions(
    source: Source, runs: list[Run], relative: list[FloatArray], load: float, evaluate: float
) -> tuple[float, float]:
    """Mean 90-to-10 % fall into, and 10-to-90 % rise out of, the stall around the first evaluation; NaN without one."""
    before, after, low = load + 0.9 * (1 - load), load + 0.9 * (evaluate - load), load + 0.1 * (1 - load)
    falls, rises = [], []
    for run, r in zip(runs, relative, strict=True):
        begin = run.evaluations[0][0]
        fine = np.arange(begin - source.first_lead_s - 10, begin + 30, 0.05)
        values = np.interp(fine, run.t_s, r)
        deep = np.flatnonzero(values < low)
        if deep.size == 0:
            continue
        into = np.flatnonzero(values[: deep[0]] > before)
        out = np.flatnonzero(values[deep[-1] :] > after)
        if into.size:
            falls.append((deep[0] - into[-1]) * 0.05)
        if out.size:
            rises.append(out[0] * 0.05)
    return (float(np.mean(falls)) if falls else np.nan), (float(np.mean(rises)) if rises else np.nan)


def ripple_at(since_step_s: FloatArray, dip_s: float, depth: float, period_s: float, centre_s: float) -> FloatArray:
    """Mean-free relative power of a rectangular dip once a step, averaged over the sampling interval."""
    distance = np.abs((since_step_s - centre_s + period_s / 2) % period_s - period_s / 2)
    overlap = np.minimum(distance + SAMPLE_S / 2, dip_s / 2) - np.maximum(distance - SAMPLE_S / 2, -dip_s / 2)
    level: FloatArray = depth * (dip_s / period_s - np.clip(overlap, 0, None) / SAMPLE_S)
    return level


def fit_ripple(source: Source, runs: list[Run], relative: list[FloatArray]) -> dict[str, float]:
    """Least squares of the step dip's length, depth and place against the time since the last optimiser step."""
    since, values = [], []
    for run, r in zip(runs, relative, strict=True):
        phase, inside = _since_step(run, source)
        since.append(phase[inside])
        values.append(r[inside] - r[inside].mean())
    x, y = np.concatenate(since), np.concatenate(values)
    period = float(np.median(np.concatenate([_step_lengths(run) for run in runs])))
    fit = least_squares(
        lambda p: ripple_at(x, p[0], p[1], period, p[2]) - y, [2.0, 0.1, 1.0], bounds=([0, 0, -2], [8, 0.6, 3])
    )
    return {"period_s": period, "dip_s": float(fit.x[0]), "depth": float(fit.x[1]), "centre_s": float(fit.x[2])}


def _step_lengths(run: Run) -> FloatArray:
    lengths = np.diff(run.step_ends_s)
    return lengths[lengths < 1.2 * np.median(lengths)]  # an evaluation lies inside the others


def _since_step(run: Run, source: Source) -> tuple[FloatArray, NDArray[np.bool_]]:
    index = np.searchsorted(run.step_ends_s, run.t_s)
    phase = run.t_s - run.step_ends_s[np.maximum(index - 1, 0)]
    return phase, run.compute_mask(source) & (index > 0) & (phase < 11)


def fit_noise(
    source: Source, runs: list[Run], relative: list[FloatArray], ripple: dict[str, float] | None
) -> dict[str, float]:
    """Splits one-sample dips (beyond four robust standard deviations) from the rest, and fits AR(1) to the rest."""
    first, second, residuals, dips = [], [], [], []
    for run, r in zip(runs, relative, strict=True):
        mask, rest = run.compute_mask(source), r.copy()
        if ripple is not None:
            phase, mask = _since_step(run, source)
            rest = rest - ripple_at(phase, ripple["dip_s"], ripple["depth"], ripple["period_s"], ripple["centre_s"])
        centre = np.median(rest[mask])
        rest = rest - centre
        deep = rest < -4 * 1.4826 * np.median(np.abs(rest[mask]))
        body = mask & ~deep
        adjacent = body[:-1] & body[1:] & (np.abs(np.diff(run.t_s) - SAMPLE_S) < 0.3)
        first.append(rest[:-1][adjacent])
        second.append(rest[1:][adjacent])
        residuals.append(rest[body])
        dips.append((deep[mask], -rest[mask & deep]))
    x, y = np.concatenate(first), np.concatenate(second)
    ar1 = float(np.corrcoef(x, y)[0, 1])
    sd = float(np.concatenate(residuals).std())
    depths = np.concatenate([depth for _, depth in dips])
    return {
        "sample_s": SAMPLE_S,
        "ar1": ar1,
        "innovation_sd": sd * (1 - ar1**2) ** 0.5,
        "dip_probability": float(np.concatenate([hit for hit, _ in dips]).mean()),
        "dip_depth": float(depths.mean()) if depths.size else 0.0,
    }


def simulate_compute(family: PhaseFamily, t_s: FloatArray, seed: list[int]) -> FloatArray:
    """Relative node power within compute at the given sample times, by the emulator's model."""
    rng = np.random.default_rng(seed)
    noise = family.noise
    jitter = np.empty(t_s.size)
    state = rng.normal(0, noise.innovation_sd / (1 - noise.ar1**2) ** 0.5)
    for i in range(t_s.size):
        state = noise.ar1 * state + noise.innovation_sd * rng.normal()
        jitter[i] = state
    dips = (rng.random(t_s.size) < noise.dip_probability) * rng.uniform(0, 2 * noise.dip_depth, t_s.size)
    level = 1.0 + noise.dip_probability * noise.dip_depth + jitter - dips
    if family.ripple is not None:
        ripple = family.ripple
        level = level + ripple_at(t_s, ripple.dip_s, ripple.depth, ripple.period_s, 0.0)
    return level


REPLICATES = 20
"""Simulated runs per held-out run, so that the residual shows the model's error, not one draw's."""

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def residuals(family: PhaseFamily, source: Source, run: Run, seed: int) -> dict[str, Any]:
    """How far a run that the fit has not seen lies from the family."""
    mask = run.compute_mask(source)
    measured_mean = float(run.power_w[mask].mean())
    measured = run.power_w[mask] / measured_mean
    t_s = run.t_s[mask]
    simulated = [simulate_compute(family, t_s, [seed, i]) for i in range(REPLICATES)]
    adjacent = np.abs(np.diff(t_s) - SAMPLE_S) < 0.3
    end_s = run.evaluations[-1][1]
    fine = np.arange(0.0, end_s, 0.5)
    run_mean = np.interp(fine, run.t_s, run.power_w).mean() / measured_mean
    later = len(run.evaluations) - 1
    low = family.start_stall_s.mean + family.first_evaluate_stall_s.mean + later * family.evaluate_stall_s.mean
    evaluating = family.evaluate_s.mean * (later + 1)
    computing = family.first_compute_work_s.mean + later * family.compute_work_s.mean
    energy = computing + evaluating * family.evaluate_level + low * family.load_level
    return {
        "level": measured_mean / (family.compute_w_per_gpu * family.gpus) - 1,
        "run_mean": energy / (computing + evaluating + low) / run_mean - 1,
        "length": (computing + evaluating + low) / end_s - 1,
        "quantiles": np.quantile(np.concatenate(simulated), QUANTILES) - np.quantile(measured, QUANTILES),
        "acf_measured": [_lagged(measured, adjacent, k) for k in range(1, 6)],
        "acf_simulated": [float(np.mean([_lagged(one, adjacent, k) for one in simulated])) for k in range(1, 6)],
    }


def _lagged(values: FloatArray, adjacent: NDArray[np.bool_], lag: int) -> float:
    """Correlation at a lag, over pairs with no gap between them."""
    whole = np.lib.stride_tricks.sliding_window_view(adjacent, lag).all(axis=1)
    return float(np.corrcoef(values[:-lag][whole], values[lag:][whole])[0, 1])


def _between(t_s: FloatArray, start: float, stop: float) -> NDArray[np.bool_]:
    return (t_s > start) & (t_s < stop)


def _pooled_median(parts: list[FloatArray]) -> float:
    pooled = np.concatenate(parts)
    return float(np.median(pooled)) if pooled.size else float("nan")


def _spread(values: Any) -> dict[str, float]:
    array = np.asarray(values, dtype=float).ravel()
    return {"mean": float(array.mean()), "sd": float(array.std(ddof=1))}


def _rounded(value: Any) -> Any:
    """Four significant digits: more than the fit is worth, and the same on every machine."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def fit_all() -> tuple[dict[str, Any], dict[str, dict[int, dict[str, Any]]]]:
    """Parameters of every family, and the residuals of its held-out runs.

    Returns:
        `(table, residuals)`: the content of `phases.yaml`, and per family and run the output of `residuals`.
    """
    families: dict[str, Any] = {}
    errors: dict[str, dict[int, dict[str, Any]]] = {}
    node: dict[str, float] | None = None
    for name, source in SOURCES.items():
        runs = read_runs(source)
        fitted = fit_family(source, [runs[i] for i in source.fit_runs], node)
        if node is None:
            watts = fitted["compute_w_per_gpu"]
            node = {"load_w": fitted["load_level"] * watts, "idle_w": fitted["idle_level"] * watts}
        node |= {key: fitted[key] for key in ("fall_s", "rise_s")}
        if fitted["ripple"] is not None:
            del fitted["ripple"]["centre_s"]  # where the dip lies after a step's log line is of no use to the emulator
        families[name] = _rounded(fitted)
        family = PhaseTable.model_validate({"families": families}).families[name]
        errors[name] = {i: residuals(family, source, runs[i], seed=i) for i in source.held_out}
    return {"families": families}, errors


def render(table: dict[str, Any]) -> str:
    """The text of `phases.yaml`."""
    header = "# Written by scripts/fit_phases.py; edit that, not this. Meanings: PhaseFamily in phases.py.\n"
    return header + yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=110)


def main() -> None:
    """Fits, prints parameters and residuals, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="file to write (default: %(default)s)")
    out: Path = parser.parse_args().out
    table, errors = fit_all()
    text = render(table)
    print(text)
    for name, runs in errors.items():
        print(f"{name}: runs not used by the fit")
        for run, e in runs.items():
            print(f"  run {run}: " + ", ".join(f"{key} {e[key]:+.2%}" for key in ("level", "run_mean", "length")))
            errors_text = " ".join(f"{q:.0%}:{d:+.4f}" for q, d in zip(QUANTILES, e["quantiles"], strict=True))
            print(f"    simulated minus measured quantiles  {errors_text}")
            for kind in ("measured", "simulated"):
                print(f"    autocorrelation lags 1-5, {kind:9s} " + " ".join(f"{a:+.2f}" for a in e[f"acf_{kind}"]))
    try:
        atomic_write_text(out, text)
    except UserError as error:
        parser.error(str(error))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()

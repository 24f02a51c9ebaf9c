"""Response surfaces: what a power cap does to one training workload on one GPU.

Measured surfaces come from two open data sets (both Apache-2.0):

- Zeus (You et al., NSDI 2023): one GPU, six workloads, every batch size that fits, on V100, A40, RTX 6000 and P100.
- Perseus (Chung et al., SOSP 2024): pipeline-parallel training of language models and a wide ResNet on A100-PCIe-80GB
  and A40, one limit for all GPUs of the job; power is the mean per GPU.

A100-SXM, H100-SXM and H200-SXM have no openly licensed capped-training measurements; their surfaces are assumptions
with a stated band (`measured=False`). `surfaces.yaml` beside this module holds names, splits and assumptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wattgym.config import read_yaml
from wattgym.errors import UserError
from wattgym.traces import load_table

FloatArray = NDArray[np.float64]
Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""From least to most protected."""

OUTLIER_DIP = 0.10
"""A point whose throughput lies more than this (of the full throughput) below *both* neighbours is dropped: a cap
between two others cannot be slower than both, so the timing was disturbed."""

MIN_CAPS = 4
"""A surface needs at least this many caps after dropping outliers."""

_ZEUS_TABLE = "gpu_power/zeus_power_limit_batch_size"
_PERSEUS_TABLE = "gpu_power/perseus_power_limit_training"


@dataclass(frozen=True, eq=False)
class Surface:
    """Mean power and throughput against the power cap, per GPU, while the job computes.

    The `k` caps ascend. Measured values are kept as measured: some jobs are fastest below the top cap.

    Attributes:
        id: `gpu/workload/b<batch size>` for measured surfaces, `gpu/assumed/<curve>` for assumed ones.
        gpu: Board, for example `v100`.
        workload: Training job, for example `gpt3_2.7b`.
        batch_size: Samples per optimiser step of the whole job; 0 for an assumed surface.
        micro_batch: Samples of one pass; the whole batch where nothing was accumulated, 0 for an assumed surface.
        n_gpus: GPUs the measured job ran on.
        caps_w: Power caps, shape `(k,)`, watts.
        power_w: Mean power per GPU at each cap, shape `(k,)`, watts.
        throughput: Throughput relative to that at the highest cap, shape `(k,)`; the last entry is 1.
        throughput_sd: Standard deviation to randomise `throughput` with, shape `(k,)`; zeros where measured.
        power_range_w: Range of the power at the highest cap to randomise with, watts; both ends equal where measured.
        samples_per_s_full: Throughput of the whole job at the highest cap, samples per second; NaN where assumed.
        source: Data set that the values come from.
        measured: False for an assumption.
        cap_sensitive: Whether the caps bind and slow the job by clearly more than the scatter of its own timings.
        split: `train`, `validation` or `test`; held out by whole workload and whole GPU.
    """

    id: str
    gpu: str
    workload: str
    batch_size: int
    micro_batch: int
    n_gpus: int
    caps_w: FloatArray
    power_w: FloatArray
    throughput: FloatArray
    throughput_sd: FloatArray
    power_range_w: tuple[float, float]
    samples_per_s_full: float
    source: str
    measured: bool
    cap_sensitive: bool
    split: Split

    def __post_init__(self) -> None:
        arrays = {name: np.array(getattr(self, name), dtype=np.float64) for name in _ARRAYS}
        caps = arrays["caps_w"]
        if caps.ndim != 1 or caps.size < MIN_CAPS or not (np.diff(caps) > 0).all():
            raise UserError(f"surface '{self.id}': needs at least {MIN_CAPS} ascending caps, got {caps.tolist()}")
        for name, values in arrays.items():
            lowest_ok = values >= 0 if name == "throughput_sd" else values > 0
            if values.shape != caps.shape or not (np.isfinite(values) & lowest_ok).all():
                raise UserError(f"surface '{self.id}': {name} must be {caps.size} positive finite numbers")
            values.setflags(write=False)
            object.__setattr__(self, name, values)

    @property
    def cap_min_w(self) -> float:
        """Lowest measured (or assumed) cap, watts."""
        return float(self.caps_w[0])

    @property
    def cap_max_w(self) -> float:
        """Highest cap, watts."""
        return float(self.caps_w[-1])

    @property
    def floor_power_w(self) -> float:
        """Lowest mean power that any of the caps brings about, watts."""
        return float(self.power_w.min())

    def tabulate(self, cap_grid_w: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Power and relative throughput at given caps, by monotone cubic interpolation (Fritsch-Carlson).

        The interpolant passes through every point and stays between its two neighbours, so it adds no extremum.

        Args:
            cap_grid_w: Caps in watts, any shape, within `[cap_min_w, cap_max_w]`.

        Returns:
            `(power_w, throughput)`, each with the shape of `cap_grid_w`.

        Raises:
            UserError: A cap lies outside the surface's range; nothing is extrapolated.
        """
        from scipy.interpolate import PchipInterpolator

        grid = np.asarray(cap_grid_w, dtype=np.float64)
        inside = (grid >= self.cap_min_w - 1e-6) & (grid <= self.cap_max_w + 1e-6)
        if not inside.all():
            raise UserError(
                f"surface '{self.id}' covers caps from {self.cap_min_w:g} W to {self.cap_max_w:g} W; "
                f"{grid[~inside].flat[0]:g} W is outside"
            )
        grid = np.clip(grid, self.cap_min_w, self.cap_max_w)
        return PchipInterpolator(self.caps_w, self.power_w)(grid), PchipInterpolator(self.caps_w, self.throughput)(grid)


_ARRAYS = ("caps_w", "power_w", "throughput", "throughput_sd")


@dataclass(frozen=True)
class GpuEnvelope:
    """What the cap-sensitive surfaces of one GPU say about the board itself.

    Attributes:
        gpu: Board.
        cap_min_w: Lowest cap, watts.
        cap_max_w: Highest cap, watts.
        floor_power_w: Lowest and highest mean power that jobs draw at the lowest cap, watts.
        floor_held: Whether the median job stays within 2 % of the lowest cap; if not, the board cannot hold it.
        draw_over_cap: Median ratio of power to cap where the cap binds: power below 98 % of the job's highest and above
            90 % of the cap, the lowest cap left out.
        full_power_w: Lowest, median and highest power at the highest cap, watts.
    """

    gpu: str
    cap_min_w: float
    cap_max_w: float
    floor_power_w: tuple[float, float]
    floor_held: bool
    draw_over_cap: float
    full_power_w: tuple[float, float, float]


@dataclass(frozen=True)
class SurfaceLibrary:
    """All surfaces, with the rows that were refused.

    Attributes:
        surfaces: Every surface, ordered by id.
        dropped_rows: Measured rows left out by the `OUTLIER_DIP` rule, as `surface id @ cap W`.
        dropped_surfaces: Surfaces left with fewer than `MIN_CAPS` caps, by id.
    """

    surfaces: tuple[Surface, ...]
    dropped_rows: tuple[str, ...]
    dropped_surfaces: tuple[str, ...]

    def select(
        self,
        gpu: str | None = None,
        workload: str | None = None,
        split: Split | None = None,
        measured: bool | None = None,
        cap_sensitive: bool | None = None,
    ) -> list[Surface]:
        """Surfaces that match every condition given, ordered by id.

        Raises:
            UserError: `gpu`, `workload` or `split` names nothing in the library.
        """
        _check_known("GPU", gpu, (s.gpu for s in self.surfaces))
        _check_known("workload", workload, (s.workload for s in self.surfaces))
        _check_known("split", split, SPLITS)
        wanted = {"gpu": gpu, "workload": workload, "split": split, "measured": measured}
        wanted["cap_sensitive"] = cap_sensitive
        conditions = {name: value for name, value in wanted.items() if value is not None}
        return [s for s in self.surfaces if all(getattr(s, name) == value for name, value in conditions.items())]

    def get(self, surface_id: str) -> Surface:
        """The surface with the given id.

        Raises:
            UserError: There is none.
        """
        _check_known("surface", surface_id, (s.id for s in self.surfaces))
        return next(s for s in self.surfaces if s.id == surface_id)

    def envelope(self, gpu: str) -> GpuEnvelope:
        """Board-level properties of a GPU, from its cap-sensitive surfaces.

        Raises:
            UserError: No surface of that GPU.
        """
        surfaces = self.select(gpu=gpu, cap_sensitive=True)
        cap_min = min(s.cap_min_w for s in surfaces)
        floors = np.array([s.power_w[0] for s in surfaces if s.cap_min_w == cap_min])
        full = np.array([s.power_w[-1] for s in surfaces])
        ratios = np.concatenate([_binding_ratio(s) for s in surfaces])
        return GpuEnvelope(
            gpu=gpu,
            cap_min_w=cap_min,
            cap_max_w=max(s.cap_max_w for s in surfaces),
            floor_power_w=(float(floors.min()), float(floors.max())),
            floor_held=bool(np.median(floors) <= 1.02 * cap_min),
            draw_over_cap=float(np.median(ratios)),
            full_power_w=(float(full.min()), float(np.median(full)), float(full.max())),
        )


@cache
def surface_library() -> SurfaceLibrary:
    """Reads and builds the library once per process.

    Raises:
        UserError: A data file is missing or does not fit.
    """
    spec = read_yaml(Path(__file__).with_name("surfaces.yaml"))
    rows = _zeus_rows(spec["zeus"]) + _perseus_rows(spec["perseus"])
    surfaces, dropped_rows, dropped_surfaces = [], [], []
    for row in rows:
        keep = ~_dips(row["samples_per_s"])
        dropped_rows += [f"{row['id']} @ {cap:g} W" for cap in row["caps_w"][~keep]]
        if keep.sum() < MIN_CAPS:
            dropped_surfaces.append(row["id"])
        else:
            surfaces.append(_measured_surface(row, keep, spec))
    surfaces += _assumed_surfaces(spec)
    surfaces.sort(key=lambda s: s.id)
    return SurfaceLibrary(tuple(surfaces), tuple(dropped_rows), tuple(dropped_surfaces))


def load_surfaces(gpu: str | None = None) -> list[Surface]:
    """All surfaces, or those of one GPU, ordered by id.

    Raises:
        UserError: Unknown GPU, or a data file is missing or does not fit.
    """
    return surface_library().select(gpu=gpu)


def _zeus_rows(spec: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    keys = ["gpu", "dataset", "network", "optimizer", "batch_size"]
    for (gpu, dataset, network, optimizer, batch), group in load_table(_ZEUS_TABLE).groupby(keys):
        job = spec["workloads"][f"{dataset}/{network}/{optimizer}"]
        group = group.sort_values("power_limit_w")
        rows.append(
            _row(
                spec["gpus"][gpu], job["workload"], int(str(batch)), int(str(batch)), 1, "Zeus (NSDI 2023)",
                group["power_limit_w"].to_numpy(float), group["average_power_w"].to_numpy(float),
                job["epoch_samples"] / group["time_per_epoch_s"].to_numpy(float),
            )
        )  # fmt: skip
    return rows


def _perseus_rows(spec: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    table = load_table(_PERSEUS_TABLE)
    table = table[table["policy"] == "global"]
    table = table.assign(cap_w=[float(limits.split("|")[0]) for limits in table["power_limits_w"]])
    keys = ["gpu", "model_name", "batch_size", "microbatch_size", "n_gpus"]
    for (gpu, model, batch, micro, n_gpus), group in table.groupby(keys):
        group = group.sort_values("cap_w")
        rows.append(
            _row(
                spec["gpus"][gpu], spec["workloads"][model], int(str(batch)), int(str(micro)), int(str(n_gpus)),
                "Perseus (SOSP 2024)", group["cap_w"].to_numpy(float), group["mean_power_per_gpu_w"].to_numpy(float),
                group["samples_per_s"].to_numpy(float),
            )
        )  # fmt: skip
    return rows


def _row(
    gpu: str, workload: str, batch_size: int, micro_batch: int, n_gpus: int, source: str,
    caps_w: FloatArray, power_w: FloatArray, samples_per_s: FloatArray,
) -> dict[str, Any]:  # fmt: skip
    surface_id = f"{gpu}/{workload}/b{batch_size}"
    return {
        "id": surface_id, "gpu": gpu, "workload": workload, "batch_size": batch_size,
        "micro_batch": micro_batch, "n_gpus": n_gpus, "source": source, "caps_w": caps_w, "power_w": power_w,
        "samples_per_s": samples_per_s,
    }  # fmt: skip


def _measured_surface(row: dict[str, Any], keep: NDArray[np.bool_], spec: dict[str, Any]) -> Surface:
    caps, power, rate = (row[name][keep] for name in ("caps_w", "power_w", "samples_per_s"))
    throughput = rate / rate[-1]
    return Surface(
        id=row["id"], gpu=row["gpu"], workload=row["workload"], batch_size=row["batch_size"],
        micro_batch=row["micro_batch"], n_gpus=row["n_gpus"],
        caps_w=caps, power_w=power, throughput=throughput, throughput_sd=np.zeros_like(caps),
        power_range_w=(float(power[-1]), float(power[-1])), samples_per_s_full=float(rate[-1]),
        source=row["source"], measured=True, cap_sensitive=_is_cap_sensitive(power, throughput),
        split=_split(spec, row["gpu"], row["workload"]),
    )  # fmt: skip


def _assumed_surfaces(spec: dict[str, Any]) -> list[Surface]:
    assumed = spec["assumed"]
    surfaces = []
    for gpu, board in assumed["gpus"].items():
        for name, curve in assumed["curves"].items():
            caps = np.array(assumed["cap_fraction"]) * board["cap_max_w"]
            low, high = board["full_power_range_w"][name]
            surfaces.append(
                Surface(
                    id=f"{gpu}/assumed/{name}", gpu=gpu, workload=f"assumed_{name}", batch_size=0, micro_batch=0,
                    n_gpus=1,
                    caps_w=caps, power_w=np.minimum(board["full_power_w"][name], assumed["draw_over_cap"] * caps),
                    throughput=np.array(curve["throughput"]), throughput_sd=np.array(curve["throughput_sd"]),
                    power_range_w=(float(low), float(high)), samples_per_s_full=float("nan"),
                    source="assumption from V100 and A40 measurements", measured=False, cap_sensitive=True,
                    split=spec["gpu_split"][gpu],
                )
            )  # fmt: skip
    return surfaces


def _split(spec: dict[str, Any], gpu: str, workload: str) -> Split:
    return max(spec["gpu_split"][gpu], spec["workload_split"][workload], key=SPLITS.index)


def _dips(samples_per_s: FloatArray) -> NDArray[np.bool_]:
    """Points whose throughput falls below both neighbours by more than `OUTLIER_DIP` of the last one."""
    lower_neighbour = np.minimum(samples_per_s[:-2], samples_per_s[2:])
    dips = np.zeros(samples_per_s.size, dtype=bool)
    dips[1:-1] = lower_neighbour - samples_per_s[1:-1] > OUTLIER_DIP * samples_per_s[-1]
    return dips


def _is_cap_sensitive(power_w: FloatArray, throughput: FloatArray) -> bool:
    """The caps cut at least 10 % of the power and 5 % of the throughput, and twice the timings' own reversals."""
    loss = throughput.max() - throughput[0]
    reversal = np.max(np.maximum.accumulate(throughput) - throughput)
    return bool(power_w[0] < 0.9 * power_w[-1] and loss > 0.05 and reversal < 0.5 * loss)


def _binding_ratio(surface: Surface) -> FloatArray:
    """Power over cap where the cap binds, without the lowest cap (which the board may be unable to hold)."""
    binds = surface.power_w < 0.98 * surface.power_w.max()
    binds[0] = False
    ratio: FloatArray = (surface.power_w / surface.caps_w)[binds]
    return ratio[ratio > 0.9]


def _check_known(what: str, value: str | None, known: Iterable[str]) -> None:
    choices = sorted(set(known))
    if value is not None and value not in choices:
        import difflib

        close = difflib.get_close_matches(value, choices, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(choices[:20])}"
        raise UserError(f"unknown {what} '{value}', {hint}")

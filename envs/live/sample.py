"""A live job at a moment between control periods, as a calibration wants it."""

from __future__ import annotations

from dataclasses import dataclass

from wattgym.live.channel import JobStatus


@dataclass(frozen=True, eq=False)
class JobSample:
    """One look at a job and its devices.

    Attributes:
        t_s: When the sample was taken, on the monotonic clock, seconds.
        age_s: Time since the oldest of its devices' readings was published, as far as they tell, seconds.
        sensor_w: Power of all devices by their sensors, the last good values, W.
        energy_j: Metered energy of all devices since the plant's start, J; NaN before it is known.
        metered_s: When that was published, on the same clock, seconds.
        limit_w: Limit in force, W per GPU.
        status: The training job's status.
    """

    t_s: float
    age_s: float
    sensor_w: float
    energy_j: float
    metered_s: float
    limit_w: float
    status: JobStatus

"""`wattgym/PowerShapingLive-v0`: the power-shaping environment over a live plant."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wattgym.config import parse_config
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.live.config import LiveConfig
from wattgym.envs.live.plant import LivePlant
from wattgym.envs.power_shaping import PowerShapingEnv, as_config
from wattgym.errors import UserError


class PowerShapingLiveEnv(PowerShapingEnv):
    """One live site: a step takes one control period of wall-clock time. Close it, or use it as a context manager."""

    def __init__(
        self,
        live: LiveConfig | Mapping[str, Any],
        config: PowerShapingConfig | Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """Prepares; jobs start and devices are opened at the first reset.

        Args:
            live: Jobs, devices, actuator.
            config: Environment; its `site.jobs` must be the number of live jobs, the rest of `site` is not used.
            folder: Run folder of the jobs; a temporary one if None.

        Raises:
            UserError: The configuration is invalid.
        """
        settings = as_config(config)
        plant_config = live if isinstance(live, LiveConfig) else parse_config(LiveConfig, dict(live), "live config")
        if settings.site.jobs != len(plant_config.jobs):
            raise UserError(f"site.jobs is {settings.site.jobs}, the live plant has {len(plant_config.jobs)} jobs")
        jobs_folder = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="wattgym-live-"))
        self.plant = LivePlant(
            plant_config, settings.period_s, settings.rules, jobs_folder, knobs=settings.action.knobs
        )
        super().__init__(settings, self.plant)

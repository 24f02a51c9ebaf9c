"""What a site's power controller is made of: plant, environment and who acts, settled before anything starts."""

from __future__ import annotations

from pathlib import Path

from wattgym.agents.baselines import BASELINES, ENERGY_MATCHED, make_baseline
from wattgym.agents.bundle import Bundle, BundleController, Contract, is_bundle, load_bundle
from wattgym.agents.controller import Controller
from wattgym.config import parse_config
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.knobs import KnobName
from wattgym.envs.live.config import LiveConfig
from wattgym.envs.observation import ObservationLayout
from wattgym.envs.shaping import configured_signal
from wattgym.errors import UserError
from wattgym.federated.config import FederatedSite, FederationConfig, SiteShaping
from wattgym.hw.limits import MIN_INTERVAL_S, CommandRules

DEVICES = "devices"
"""State of a site's simulated devices, in its folder."""

EPISODE_S = 600.0
"""A shaping controller begins anew at least this often; the signal goes on where it was."""

_ANY_OFFER = (0.5, 0.25)


class ShapingPlan:
    """A site's controller, ready to act.

    Attributes:
        rules: Command rules of the devices' guards.
        knobs: Knobs that the controller sets.
        shaping: The configuration.
    """

    def __init__(self, site: FederatedSite) -> None:
        """Settles everything that the configuration names.

        Raises:
            UserError: There is no such controller or signal, or a bundle was made for something else.
        """
        assert site.shaping is not None
        self.shaping: SiteShaping = site.shaping
        self._whose = f"site '{site.name}'"
        self._bundle: Bundle | None = None
        interval_s = max(min(1.0, self.shaping.period_s), MIN_INTERVAL_S)
        self.rules = CommandRules(interval_s=interval_s, raise_window_s=max(self.shaping.period_s, interval_s))
        self.knobs: tuple[KnobName, ...] = ("power_limit",)
        name = self.shaping.controller
        if name is None:
            return
        known = [each for each in BASELINES if each != ENERGY_MATCHED]
        if name not in known:
            if not is_bundle(name):
                raise UserError(
                    f"{self._whose}: unknown policy '{name}'; a policy bundle's folder, or one of: {', '.join(known)}"
                )
            self._bundle = load_bundle(name)
        env = self.environment(_ANY_OFFER, self.shaping.signal_start_s)
        self.rules, self.knobs = env.rules, env.action.knobs
        if self._bundle is not None:
            found = self._bundle.manifest.contract.difference(Contract.of(env, ObservationLayout.of(env)))
            if found is not None:
                field, wanted, shown = found
                raise UserError(f"{self._whose}: its {field} is {shown!r}, the policy {name} needs {wanted!r}")

    def controller(self) -> Controller:
        """Who acts, without memory of anything before."""
        return make_baseline(str(self.shaping.controller)) if self._bundle is None else BundleController(self._bundle)

    def environment(self, offer: tuple[float, float], start_s: float) -> PowerShapingConfig:
        """The controller's environment.

        Args:
            offer: Base and capacity, as positions in the feasible band.
            start_s: Where in the signal it begins, s.

        Raises:
            UserError: There is no such signal, or it ends before the episode does.
        """
        shaping = self.shaping
        trained = {} if self._bundle is None else dict(self._bundle.manifest.training.config.get("env", {}))
        data = {"rules": self.rules.model_dump()} | trained
        data |= {
            "signal": {"trace": shaping.signal, "start_s": start_s},
            "episode_s": max(round(EPISODE_S / shaping.period_s), 2) * shaping.period_s,
            "site": {"jobs": 1},
            "period_s": shaping.period_s,
        }
        family = configured_signal(parse_config(PowerShapingConfig, data, self._whose)).family
        offers = {family: {"base": offer[0], "capacity": offer[1]}}
        return parse_config(PowerShapingConfig, data | {"signal": {**data["signal"], "offers": offers}}, self._whose)


def live_config(config: FederationConfig, name: str, folder: Path) -> LiveConfig:
    """The live plant of a site: one job, its trainer, on the site's devices.

    Args:
        config: The federation.
        name: The site.
        folder: The site's folder.

    Raises:
        UserError: The devices do not fit the training.
    """
    shaping = config.site(name).shaping
    assert shaping is not None
    job = {
        "devices": shaping.devices,
        "training": config.job(name).model_dump(),
        "surface": shaping.surface,
        "pace": shaping.pace,
    }
    data = {
        "backend": shaping.backend,
        "arm": shaping.arm,
        "jobs": [job],
        # Beside the site, so that watchdog, audit log and `wattgym hw restore` work as they do on real devices.
        "state_dir": str(folder / DEVICES) if shaping.backend == "simulated" else None,
    }
    return parse_config(LiveConfig, data, f"site '{name}'")


def check_shaping(config: FederationConfig, name: str) -> None:
    """Looks at everything that a site's power controller needs, but for the devices, which may be elsewhere.

    Raises:
        UserError: Something is missing or does not fit.
    """
    site = config.site(name)
    if site.shaping is not None:
        live_config(config, name, Path())
        ShapingPlan(site)

"""From federated episodes to metrics, by one accounting for every selector."""

from __future__ import annotations

from collections.abc import Mapping

from wattgym.agents.selection_rollout import SelectionEpisode
from wattgym.envs.federation.config import SelectionRewardConfig


def expense(metrics: Mapping[str, float], weights: SelectionRewardConfig) -> float:
    """What the way to the target cost: its time over the reward's time scale, plus whatever the reward puts a price on.

    A target that was missed counts as twice the time limit.

    Args:
        metrics: Of `episode_metrics`.
        weights: The reward.
    """
    return (
        metrics["time_to_target_s"] * (2.0 - metrics["target_reached"]) / weights.time_scale_s
        + metrics["energy_kwh"] * weights.energy_per_kwh
        + metrics["carbon_kg"] * weights.carbon_per_kg
        + metrics["cost_usd"] * weights.cost_per_usd
    )


def episode_metrics(episode: SelectionEpisode) -> Mapping[str, float]:
    """Metrics of one episode by name (`wattgym.agents.episodes.METRICS`).

    An episode that ended without reaching the target, by time or by rounds, is censored: its time to target is the time
    limit. That favours whoever does not arrive, so the share that reached the target stands beside it.
    """
    seconds = float(episode.seconds.sum())
    hours = seconds / 3600.0
    played = ~episode.waited
    used, unused = float(episode.energy_kwh.sum()), float(episode.unused_kwh.sum())
    members = episode.chosen[played]
    changes = float((members[1:] != members[:-1]).sum())
    return {
        "time_to_target_s": seconds if episode.reached else episode.time_limit_s,
        "target_reached": float(episode.reached),
        "rounds": float(played.sum()),
        "participants_mean": float(members.sum(axis=1).mean()) if played.any() else 0.0,
        "communication_share": float(episode.communication_s[played].sum() / max(episode.seconds[played].sum(), 1e-9)),
        "site_churn_per_h": changes / hours,
        "energy_kwh": used,
        "carbon_kg": float(episode.carbon_kg.sum()),
        "cost_usd": float(episode.cost_usd.sum()),
        "unused_power_share": unused / max(used + unused, 1e-12),
        "final_loss": float(episode.true_loss[-1]),
        "final_accuracy": float(episode.accuracy[-1]),
        "waits": float(episode.waited.sum()),
        "repairs": float(episode.repaired.sum()),
        "return": float(episode.reward.sum()),
    }

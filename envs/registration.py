"""Gymnasium ids of the package's environments."""


def register_envs() -> None:
    """Registers every environment with Gymnasium, once."""
    import gymnasium as gym

    if "wattgym/PowerShaping-v0" in gym.registry:
        return
    gym.register(
        id="wattgym/PowerShaping-v0",
        entry_point="wattgym.envs.power_shaping:PowerShapingEnv",
        vector_entry_point="wattgym.envs.vector:PowerShapingVectorEnv",
    )
    gym.register(id="wattgym/PowerShapingLive-v0", entry_point="wattgym.envs.live.env:PowerShapingLiveEnv")
    if "wattgym/SiteSelection-v0" not in gym.registry:
        gym.register(
            id="wattgym/SiteSelection-v0",
            entry_point="wattgym.envs.site_selection:SiteSelectionEnv",
            vector_entry_point="wattgym.envs.site_selection_vector:SiteSelectionVectorEnv",
        )
        # Named only: nothing of the federated package is imported before somebody makes it.
        gym.register(id="wattgym/SiteSelectionLive-v0", entry_point="wattgym.federated.env:SiteSelectionLiveEnv")

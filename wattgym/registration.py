"""Gymnasium ids; Gymnasium calls this through the package's `gymnasium.envs` entry point when it is imported."""


def register_envs() -> None:
    """Registers every environment of the package once."""
    import gymnasium as gym

    if "wattgym/PowerShaping-v0" not in gym.registry:
        gym.register(
            id="wattgym/PowerShaping-v0",
            entry_point="wattgym.envs.power_shaping:PowerShapingEnv",
            vector_entry_point="wattgym.envs.vector:PowerShapingVectorEnv",
            # The environment truncates by itself and checks its own actions; wrappers would only cost steps.
            order_enforce=False,
        )

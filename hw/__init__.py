"""Devices (NVML and simulated), guard, watchdog: everything that touches a GPU's power settings."""

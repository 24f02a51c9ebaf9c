"""Plants, the emulator, and the Gymnasium and batched environments over them.

Importing this package registers its environments with Gymnasium.
"""

from wattgym.envs.registration import register_envs

register_envs()

"""WattGym: reinforcement-learning controllers for the electric power of LLM training.

`import wattgym.envs` registers the environments with Gymnasium; so does `import wattgym` after `import gymnasium`.
"""

import sys

__version__ = "0.1.0"

# A watchdog process imports this package too and must stay small, so Gymnasium is never loaded for its own sake.
if "gymnasium" in sys.modules:
    import wattgym.envs  # noqa: F401

"""WattGym: reinforcement-learning controllers for the electric power of LLM training."""

__version__ = "0.1.0"

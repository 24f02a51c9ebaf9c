"""Baselines, SB3 training, evaluation and reports."""

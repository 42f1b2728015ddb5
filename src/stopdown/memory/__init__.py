"""Prediction of a run's peak memory, strategies to stay below a limit, and their costs."""

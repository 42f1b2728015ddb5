"""Batches of prompts for one model: items, workers that each load it once, and results."""

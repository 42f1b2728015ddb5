"""Many prompts by one model: items, workers that each load it once, and what came of them."""

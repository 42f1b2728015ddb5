"""`compare`: the same prompts, seeds and noise under several precisions, measured side by side."""

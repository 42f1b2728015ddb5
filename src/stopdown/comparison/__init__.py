"""`compare`: run the same prompts, seeds and noise in several precisions, and measure the differences."""

"""What will go wrong with dtypes, found without weights and before a run, and how it is mended."""

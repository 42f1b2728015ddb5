"""Detection of dtype problems before a run and without weights, and their repair."""

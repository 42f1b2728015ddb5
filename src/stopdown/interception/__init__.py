"""What is put on modules and calls of PyTorch, and comes off again: the undo stack, hooks, casts, sums."""

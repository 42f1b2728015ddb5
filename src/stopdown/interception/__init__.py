"""Reversible changes to PyTorch modules and calls: undo stack, hooks, casts, sums in fp16."""

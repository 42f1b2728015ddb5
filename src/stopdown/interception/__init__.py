"""Reversible changes to PyTorch modules and calls: undo stack, hooks, casts."""

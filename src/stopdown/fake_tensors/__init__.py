"""Modules and calls on fake tensors, which have no memory, and the values that can still be known."""

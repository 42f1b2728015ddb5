"""Modules and calls on tensors without memory: built, run, and the values that are known of them."""

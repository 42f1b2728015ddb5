"""Bounds of every value of a call that hold for every input, from the weights alone."""

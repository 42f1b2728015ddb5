"""Conversion of checkpoints: exponents of a plan written into weights, for programs without Stopdown."""

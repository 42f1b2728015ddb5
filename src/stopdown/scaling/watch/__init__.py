"""Checks whether the exponents in a module hold for each of its calls."""

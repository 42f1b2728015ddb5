"""Equations between exponents, and their solution."""

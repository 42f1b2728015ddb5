"""Calls of a scaled module, each held against the calls that its exponents are for."""

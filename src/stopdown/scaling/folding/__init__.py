"""Exponents, casts and fp32 streams put into the weights and attributes of a module."""

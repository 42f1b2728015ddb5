"""Toy networks and tiny files, written once."""

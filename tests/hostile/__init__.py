"""Hostile inputs of every kind, as rows of one table; `runner` runs a row and judges what it left."""

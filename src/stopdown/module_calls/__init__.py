"""Calls of modules as values, layers around them, their signatures, and the state that they start from."""

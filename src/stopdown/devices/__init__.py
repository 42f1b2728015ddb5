"""Devices of this machine, profiles of others, their number formats and memory, and builds of PyTorch."""

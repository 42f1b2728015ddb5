"""Devices: what this machine has and computes in, what is known of others, builds of PyTorch, memory."""

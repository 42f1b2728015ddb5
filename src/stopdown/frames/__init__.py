"""Finished frames: read, written, and looked at for faults."""

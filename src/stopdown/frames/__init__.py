"""Reading, writing and fault detection of finished frames and sound."""

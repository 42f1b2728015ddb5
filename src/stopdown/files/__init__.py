"""Files that are read or written: JSON and TOML with limits, and places for results."""

"""Reading of JSON and TOML files within limits, and writing of results."""

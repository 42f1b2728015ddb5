"""A package that is run by its name."""

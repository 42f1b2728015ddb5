"""Where a model comes from: found, checked and described before anything of it is loaded."""

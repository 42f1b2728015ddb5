"""Sources of models, which are found, checked and described before any of their files is loaded."""

"""One call of a module as a value, what is put around it, and the state that it begins from."""

"""The components of a program and their calls: found, named, intercepted, counted."""

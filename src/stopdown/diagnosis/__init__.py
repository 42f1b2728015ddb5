"""Explain: a message, a log or a picture to its cause and remedy."""

"""Candidates for a module: searched, tried by a call, and compared with its fp32 output."""

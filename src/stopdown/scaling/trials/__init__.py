"""Search for exponents of a module's calls, with trials against its fp32 output."""

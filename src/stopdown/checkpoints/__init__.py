"""Plans written into weight files, for programs that know nothing of plans."""

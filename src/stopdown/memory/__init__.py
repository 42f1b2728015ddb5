"""Peak memory known before a run, ways to stay below a limit, and what they cost."""

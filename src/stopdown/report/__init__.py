"""Records as pages and as text: one HTML file that needs nothing else, and tables for a terminal."""

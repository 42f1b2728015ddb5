"""Scripts that tests start, and what starts them."""

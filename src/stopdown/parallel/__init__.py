"""One run on several ranks: what they agree on, who of them is gone, and guidance on two of them."""

"""Graph of one captured component call: nodes, blocks with their own exponents, and ranges."""

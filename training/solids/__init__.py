"""The successor of `shapes`: shaded solids in a landscape, drawn, learnt, checked."""

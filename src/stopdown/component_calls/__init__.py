"""Components of a program and their calls: discovery, names, interception, counting of steps."""

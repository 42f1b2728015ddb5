"""Leave with a number that a byte cannot hold."""

import sys

sys.exit(int(sys.argv[1]))

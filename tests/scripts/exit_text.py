"""Leave with a text, which goes to standard error."""

import sys

print("before")
sys.exit("no such model")

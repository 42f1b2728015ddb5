"""Read all of standard input."""

import sys

for number, line in enumerate(sys.stdin, 1):
    print(number, line.strip().upper())
print(input.__module__, sys.stdin.closed)

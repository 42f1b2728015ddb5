"""Imports of neighbours, and what `-m` gives a module."""

import os
import sys

from . import neighbour

print(
    neighbour.WORD,
    __name__,
    __package__,
    __spec__.name,
    os.path.basename(sys.argv[0]),
    sys.argv[1:],
)
print(type(__builtins__).__name__, type(__loader__).__name__, sys.path[0] == os.getcwd())
sys.exit(6)

"""What `__main__` holds, by name and kind."""

import sys

import __main__

number: int = 3
name: "str" = "x"

print(sorted(x for x in vars(__main__) if x.startswith("__")))
print(__name__, __package__, __spec__, __doc__, __annotations__, type(__builtins__).__name__)
print(type(__loader__).__name__, __file__ == sys.argv[0], sys.modules["__main__"] is __main__)
__builtins__.shown = 4
print(shown, vars(__main__)["number"], len(sys.argv))  # noqa: F821

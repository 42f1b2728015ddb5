"""Warnings, each once, and as errors."""

import warnings

warnings.showwarning = lambda text, kind, *_: print("warned:", kind.__name__, text)
for _ in range(2):
    warnings.warn("its own", stacklevel=1)
warnings.simplefilter("error")
try:
    warnings.warn("as an error", DeprecationWarning, stacklevel=1)
except DeprecationWarning as error:
    print("raised", error)

"""Report exceptions in a way of its own, and at the end."""

import atexit
import sys

sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error, trace.tb_lineno)
atexit.register(print, "at exit")
raise RuntimeError("its own")

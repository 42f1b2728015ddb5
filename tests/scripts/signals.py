"""Handlers of its own, and a signal that it sends to itself."""

import os
import signal

signal.signal(signal.SIGTERM, lambda number, frame: print("got", number))
os.kill(os.getpid(), signal.SIGTERM)
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10**7):
        pass
except KeyboardInterrupt:
    print("interrupted")

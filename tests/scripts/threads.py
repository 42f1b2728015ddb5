"""A thread that goes on when the script is over, and one that fails."""

import atexit
import sys
import threading
import time


def work():
    time.sleep(0.05)
    import __main__

    print("thread ends", hasattr(__main__, "work"), sys.argv[1:])


threading.excepthook = lambda args: print("thread failed:", args.exc_value)
threading.Thread(target=work).start()
failing = threading.Thread(target=lambda: 1 / 0)
failing.start()
failing.join()
atexit.register(print, "at exit")
print("script ends")

"""A script as Python runs it, in a process that has imported what scripts import."""

from __future__ import annotations

import runpy
import sys
import threading


def main() -> None:
    """Run the script that the words name: its exceptions and its exit code are this process's."""
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()

"""A script run as it is, but for what it sends to CUDA, which goes to the CPU; nothing is guarded.

python tests/processes/cpu_run.py SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from stopdown.component_calls.pipeline_interception import redirect_devices
from stopdown.interception.patches import Patches


def run(words: list[str]) -> None:
    """The script's own run, with its arguments."""
    with Patches() as patches:
        redirect_devices("cpu", lambda text: None, patches)
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])

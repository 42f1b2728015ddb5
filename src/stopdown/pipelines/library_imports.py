"""PyTorch and Diffusers imported with a line before each, because both take seconds."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable

from stopdown.devices.environment import read_version
from stopdown.sources.sources import check_libraries


def import_libraries(report: Callable[[str], None], *, has_pipelines: bool = True) -> None:
    """Import PyTorch and Diffusers, which takes seconds.

    What they make stays, so garbage is not looked for among it: that took a quarter of a command's start.
    """
    if has_pipelines:
        check_libraries()
    needed = "diffusers.pipelines.pipeline_utils" if has_pipelines else "diffusers"
    is_new, collects = needed not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        report("PyTorch")
        import torch  # noqa: F401

        if has_pipelines or read_version("diffusers") is not None:
            report("Diffusers")
            importlib.import_module(needed)
        if is_new:
            gc.freeze()
    finally:
        if collects:
            gc.enable()

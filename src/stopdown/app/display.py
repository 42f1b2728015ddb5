"""Interface of the progress displays. `Display` itself shows nothing; `progress` has the visible ones."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from typing import Self

from stopdown.devices.environment import read_version
from stopdown.errors import OutputError
from stopdown.plans.plan_files import write_cached_plan, write_plan
from stopdown.records import Plan
from stopdown.sources.sources import check_libraries


class Display:
    """Display of a run's progress and messages that shows nothing; a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: this display holds no resources."""

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        """Show the progress of a stage (`load`, `encode`, `denoise`, `decode`).

        Args:
            total: 0 if the number of steps is unknown.
        """

    def announce(self, text: str) -> None:
        """Show an urgent message, for example about a repair."""

    def inform(self, text: str) -> None:
        """Show information before a long operation begins."""

    def detail(self, text: str) -> None:
        """Show a detail; only verbose output includes it."""


def load_libraries(display: Display, *, has_pipelines: bool = True) -> None:
    """Announce and run the import of PyTorch and Diffusers, which takes seconds.

    Commands validate their options and files before this. Imported objects are excluded from garbage
    collection, which took a quarter of a command's start.
    """
    if has_pipelines:
        check_libraries()
    needed = "diffusers.pipelines.pipeline_utils" if has_pipelines else "diffusers"
    is_new, collects = needed not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        display.progress("import", "PyTorch", 0, 0)
        import torch  # noqa: F401

        if has_pipelines or read_version("diffusers") is not None:
            display.progress("import", "Diffusers", 0, 0)
            importlib.import_module(needed)
        if is_new:
            gc.freeze()
    finally:
        if collects:
            gc.enable()


def keep_updated(
    updated: Plan, path: str | None, keeps: bool, announce: Callable[[str], None]
) -> str | None:
    """Write a plan with the repairs of a run, for the next run; return its path, or None if not written.

    Args:
        path: the plan file that the user named; None to write the plan into the cache.
        keeps: whether the file at `path` may be overwritten.
        announce: shows a message about the result.
    """
    if path is None:
        try:
            path = str(write_cached_plan(updated))
        except OutputError as error:  # it costs the next run a repair, and this one nothing
            announce(f"The repair only lasts for this run, and wasn't kept. {error.what}")
            return None
    elif keeps:
        write_plan(updated, path)
    else:
        announce(f"The repair only lasts for this run; --keep-repairs writes it into {path}.")
        return None
    announce(f"The repair was written into {path}, for the next run.")
    return path

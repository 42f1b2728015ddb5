"""What a run tells a person while it goes on; this display shows nothing, others of `progress` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from stopdown.errors import OutputError
from stopdown.pipelines.library_imports import import_libraries
from stopdown.plans.plan_files import write_cached_plan, write_plan
from stopdown.records import Plan


class Display:
    """What a run tells a person while it goes on; a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        """A stage (`load`, `encode`, `denoise`, `decode`) has come this far; `total` 0 when its end is
        unknown."""

    def announce(self, text: str) -> None:
        """Something that a person must hear now: a repair."""

    def detail(self, text: str) -> None:
        """Details, for verbose output."""


def load_libraries(display: Display, *, has_pipelines: bool = True) -> None:
    """Import PyTorch and Diffusers, which takes seconds, and say so before.

    Whatever a command refuses by looking at its options and files comes before this.
    """
    import_libraries(
        lambda name: display.progress("import", name, 0, 0), has_pipelines=has_pipelines
    )


def keep_updated(
    updated: Plan, path: str | None, keeps: bool, announce: Callable[[str], None]
) -> str | None:
    """Write a plan with the repairs of a run for the next one; return its path, None if it was not kept.

    Args:
        path: of the plan that was named; None for one that `auto` made.
        keeps: whether that one may be written.
    """
    if path is None:
        try:
            path = str(write_cached_plan(updated))
        except OutputError as error:  # it costs the next run a repair, and this one nothing
            announce(f"The repair only lasts for this run, and was not kept. {error.what}")
            return None
    elif keeps:
        write_plan(updated, path)
    else:
        announce(f"The repair only lasts for this run; --keep-repairs writes it into {path}.")
        return None
    announce(f"The repair was written into {path}, for the next run.")
    return path

"""What a run tells a person while it goes on; this display shows nothing, others of `progress` do."""

from __future__ import annotations

from typing import Self

from stopdown.pipelines.library_imports import import_libraries


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
        """Something that is of use to whoever wants to know more."""


def load_libraries(display: Display, *, has_pipelines: bool = True) -> None:
    """Import PyTorch and Diffusers, which takes seconds, and say so before.

    Whatever a command refuses by looking at its options and files comes before this.

    Args:
        has_pipelines: a pipeline will be made.
    """
    import_libraries(
        lambda name: display.progress("import", name, 0, 0), has_pipelines=has_pipelines
    )

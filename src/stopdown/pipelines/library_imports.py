"""PyTorch and Diffusers imported with a word before each: whoever waits knows for what."""

from __future__ import annotations

from collections.abc import Callable


def import_libraries(report: Callable[[str], None]) -> None:
    """Import PyTorch and Diffusers, which takes seconds.

    Args:
        report: told the name of each before.
    """
    report("PyTorch")
    import torch  # noqa: F401

    report("Diffusers")
    import diffusers  # noqa: F401

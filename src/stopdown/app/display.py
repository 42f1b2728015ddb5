"""What a run tells a person while it goes on: the protocol, and a display that shows nothing."""

from __future__ import annotations

from typing import Protocol


class Display(Protocol):
    """What a run tells a person while it goes on."""

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        """A stage (`load`, `encode`, `denoise`, `decode`) has come this far."""

    def announce(self, text: str) -> None:
        """Something that a person must hear now: a repair."""


class Silent:
    """A display that shows nothing."""

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        """Nothing."""

    def announce(self, text: str) -> None:
        """Nothing."""

"""Batches of tiny pipelines: prompts, options, and what is read of an output folder."""

from __future__ import annotations

from pathlib import Path

from stopdown.batch.records import BatchRecord
from stopdown.records import from_json

PICTURE = ("--height", "32", "--width", "32", "--steps", "1", "--precision", "fp32")
SIZES = ("--frames", "9", *PICTURE)
PROMPTS = "a red circle moving left\na blue square\na green circle\n"


def read_summary(folder: str | Path = "out") -> BatchRecord:
    return from_json((Path(folder) / "batch.json").read_bytes(), BatchRecord)


def read_outputs(folder: str | Path = "out") -> dict[str, bytes]:
    """The videos of a batch, by name."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.mp4"))}

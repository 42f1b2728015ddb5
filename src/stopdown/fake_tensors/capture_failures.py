"""Errors of calls that can't be captured, with the line of the model's code that fails."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stopdown.errors import CaptureError, take_first_line


def describe_failure(error: Exception, module: torch.nn.Module) -> CaptureError:
    """Make the error for a module whose code failed on fake tensors, with the line that failed."""
    reason = take_first_line(error)
    return CaptureError(
        f"{type(module).__name__} can't be captured as a graph: {reason} ({_blame(error)}).",
        expected="Capturing needs code whose control flow doesn't depend on the values of tensors.",
        remedy="Run it in bf16 or fp32, or keep the module at fault outside the captured call.",
    )


def _blame(error: BaseException) -> str:
    """Return the innermost line of model code in an error's traceback, as `file:line: text`."""
    frames = list(_frames(error))
    here = str(Path(__file__).parents[1])
    ours = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(here)]
    frame = (ours or frames)[-1] if frames else None
    if frame is None:
        return "no line is known"
    return f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}: {frame.line}"


def _frames(error: BaseException | None) -> Iterator[traceback.FrameSummary]:
    while error is not None:
        yield from traceback.extract_tb(error.__traceback__)
        error = error.__cause__


def name_class(kind: Any) -> str:
    """Return the name of a class, or the last part of another object's text."""
    return kind.__name__ if inspect.isclass(kind) else str(kind).rpartition(".")[2]

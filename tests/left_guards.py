"""Whether a test left a guard on, which would watch the tests after it, in the order of that run only."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def leaving_no_guard() -> Iterator[None]:
    """A failed assertion where a guard is on at the end that was not at the beginning."""
    before = torch.nan_to_num
    yield
    if torch.nan_to_num is not before:
        gc.collect()
    assert torch.nan_to_num is before, "a guard is left on"

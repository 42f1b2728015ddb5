"""Whether a test left a guard on, which would watch the tests after it, in the order of that run only."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def leaving_no_guard() -> Iterator[None]:
    """A failed assertion where a guard is on at the end that was not at the beginning."""
    before = _count()
    yield
    if _count() > before:
        gc.collect()
    assert _count() <= before, "a guard is left on"


def _count() -> int:
    """How many are on; none where their module was never loaded."""
    guards = sys.modules.get("stopdown.runtime.guard")
    return len(guards.LEFT_ON) if guards is not None else 0

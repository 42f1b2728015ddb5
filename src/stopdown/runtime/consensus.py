"""Decisions that several processes take together when they make one result; one process takes them alone.

`ranks` brings the decisions of processes that `torchrun` started. Nothing else asks how many there are.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from stopdown.extensions import find_offer

if TYPE_CHECKING:
    from stopdown.component_calls.call import ComponentCall
    from stopdown.records import Plan
    from stopdown.runtime.call_check import CallCheck
    from stopdown.runtime.culprit import Culprit
    from stopdown.runtime.fault_texts import Fault

_T = TypeVar("_T")


class Consensus:
    """Decisions of a process alone: each stands as it is. `number` counts the processes from 0."""

    is_alone = True
    number, count = 0, 1

    def begin(self, pipe: Any, plan: Plan | None) -> None:
        """Agree that all ranks were started alike, when a guard is put on: a process alone was."""

    def begin_run(self) -> None:
        """Prepare for one call of the pipeline."""

    def begin_call(self, call: ComponentCall) -> None:
        """Agree that the first denoising step begins from the same values: that of one process does."""

    def running(self) -> AbstractContextManager[None]:
        """Enter around one call of the pipeline: a process alone has no others to lose."""
        return contextlib.nullcontext()

    def raise_if_lost(self, error: Exception) -> None:
        """Raise an error which says that another process is gone."""

    # What each process found, as all of them go by it

    def agree_on_check(self, check: CallCheck) -> CallCheck:
        """Return what a call showed in any process."""
        return check

    def agree_on_counts(self, counts: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the worst counts (NaN, Inf, values) of the pipeline's result in any process."""
        return counts

    def agree_on_fault(self, fault: Fault) -> Fault:
        """Return a fault in the words of the first process that has it."""
        return fault

    def agree_on_culprit(self, culprit: Culprit) -> Culprit:
        """Return the earliest culprit that any process found."""
        return culprit

    def agree_on_failure(self, told: str) -> str:
        """Return why something failed in any process; "" if it failed in none."""
        return told

    # What one process does for all

    def lead(self, action: Callable[[], _T]) -> _T | None:
        """Do what only one process may do; return the result there, and None in the others."""
        return action()

    def follow(self, action: Callable[[], _T]) -> _T:
        """Do something in the first process, then in the others, which find it done."""
        return action()

    def share(self, value: _T) -> _T:
        """Return the value of the first process in all of them."""
        return value

    @contextlib.contextmanager
    def spread(self, pipe: Any) -> Iterator[str]:
        """Spread each step over the processes; yield how in words, "" for a process alone."""
        yield ""


ALONE = Consensus()


def find_consensus(pipe: Any) -> Consensus:
    """Return the consensus of the processes over which calls of a pipeline are spread."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return ALONE
    find_ranks = find_offer("find_ranks")
    return (find_ranks is not None and find_ranks(pipe)) or ALONE

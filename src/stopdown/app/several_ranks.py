"""A command that `torchrun` started several times: one process speaks, and what ends one ends all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stopdown.devices.environment import choose_device, read_rank
from stopdown.errors import OptionError, RankError, StopdownError

if TYPE_CHECKING:
    from stopdown.parallel.ranks import Ranks

WAYS = ("auto", "context", "guidance")
"""How a step is spread: by its tokens, by its rows, or by tokens where the model has a plan for that."""


@contextlib.contextmanager
def joined_ranks(
    device: str, memory: str | None, parallel: str
) -> Iterator[tuple[str, Ranks | None]]:
    """The device of this process, and the ranks that it belongs to; None for a process alone.

    Args:
        device, memory, parallel: the options.

    Raises:
        OptionError: there are fewer devices than processes, or the options do not fit their number.
        RankError: another process is gone or failed.
    """
    settings = read_rank()
    if parallel not in WAYS:
        raise OptionError(
            f"--parallel {parallel} is unknown.",
            expected=f"Known values are {', '.join(WAYS)}.",
            remedy="Use --parallel auto.",
        )
    if settings is None and parallel != "auto":
        raise OptionError(
            f"--parallel {parallel} was given to one process.",
            expected="Each device needs its own process.",
            remedy="Start it with torchrun --nproc-per-node 2 -m stopdown generate …",
        )
    if settings is None:
        yield device, None
        return
    if memory is not None:
        raise OptionError(
            f"--memory {memory} was given to {settings.count} processes.",
            expected="Offloading does not work with several processes.",
            remedy="Leave --memory out, or start one process.",
        )
    from stopdown.interception.patches import Patches
    from stopdown.parallel.process_group import joined, name_device

    device = name_device(device, settings)
    with joined(choose_device(device)) as ranks, Patches() as patches:
        ranks.watch(patches)
        with ranks.ending():
            try:
                yield device, ranks
            except RankError:
                raise
            except StopdownError as error:  # of every rank, or of one that the first one then names
                raise ranks.told_by_first(error) from None


def lead(ranks: Ranks | None, action: Callable[[], Any]) -> Any:
    """What rank 0 gets of doing something that only one may do, or a process alone; else None."""
    return action() if ranks is None else ranks.lead(action)


def follow(ranks: Ranks | None, action: Callable[[], Any]) -> Any:
    """What doing something gives, which rank 0 does first and the others then find done."""
    return action() if ranks is None else ranks.follow(action)

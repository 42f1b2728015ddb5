"""The processes that `torchrun` started: joined in a group, and each call spread over them.

    torchrun --nproc-per-node 2 -m stopdown generate SOURCE PROMPT -o clip.mp4

Each process loads the whole model on a device of its own. The first one plans, writes and speaks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from stopdown.devices.environment import Device, RankSettings, choose_device
from stopdown.errors import OptionError, RankError, StopdownError
from stopdown.ranks.ranks import Ranks

_LIMIT_S = 1800.0
"""How long a rank waits for another one: planning and loading lie between exchanges."""

_TOGETHER_S = 5.0
"""How long a rank that fails waits for the others to fail as well."""


def name_device(asked: str, settings: RankSettings) -> str:
    """The device of one process: of `auto` and `cuda` the one with its number on this machine."""
    count = torch.cuda.device_count()
    if asked not in ("auto", "cuda") or (asked == "auto" and not count):
        return asked
    if settings.local >= count:
        raise OptionError(
            f"This machine has {count} CUDA device{'s' * (count != 1)}, and at least "
            f"{settings.local + 1} processes were started.",
            expected="Each process needs its own device.",
            remedy=f'Use torchrun --nproc-per-node {max(1, count)}, or device="cpu".',
        )
    return f"cuda:{settings.local}"


@contextlib.contextmanager
def joined(device: Device, limit_s: float = _LIMIT_S) -> Iterator[Ranks]:
    """The ranks of this process and of those that were started with it.

    Args:
        device: of this process; CUDA devices exchange through NCCL, others through gloo.
        limit_s: after which an exchange that does not come is an error.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device.torch_name)
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    yield Ranks()
    dist.destroy_process_group()  # not after an error: ranks that are gone would be waited for


@contextlib.contextmanager
def join_ranks(
    device: str, memory: str | None, journal: Path | None, settings: RankSettings
) -> Iterator[tuple[str, Ranks]]:
    """Join the processes that were started with this one; yield its device, and the ranks."""
    for option, given, expected in (
        ("--memory", memory, "Offloading does not work with several processes."),
        ("--journal", journal, "A journal contains the calls of one process."),
    ):
        if given is not None:
            raise OptionError(
                f"{option} {given} was given to {settings.count} processes.",
                expected=expected,
                remedy=f"Leave {option} out, or start one process.",
            )
    device = name_device(device, settings)
    with joined(choose_device(device)) as ranks, ranks.running():
        try:
            yield device, ranks
        except RankError:
            raise
        except StopdownError as error:
            raise ranks.told_by_first(error) if _have_all_failed() else error from None


def _have_all_failed() -> bool:
    """Wait for the other ranks to end with an error, too; return whether all of them do."""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=_TOGETHER_S))
    except Exception:  # some rank goes on, or is gone: this one has to speak for itself
        return False
    return True

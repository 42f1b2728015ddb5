"""The processes that `torchrun` started: joined in a group, and each call spread over them.

    torchrun --nproc-per-node 2 -m stopdown generate SOURCE PROMPT -o clip.mp4

Each process loads the whole model on a device of its own. The first one plans, writes and speaks.

**Catches** more processes than devices, and models that cannot be spread in the way that was asked for.
**Does not catch** machines of several speeds: every step waits for the slowest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from stopdown.component_calls.components import find_callees
from stopdown.devices.environment import Device, RankSettings
from stopdown.errors import OptionError
from stopdown.interception.patches import Patches
from stopdown.parallel.guidance import put_guidance_parallel
from stopdown.parallel.ranks import Ranks
from stopdown.pipelines.context_parallel import find_plan, put_context_parallel

_LIMIT_S = 1800.0
"""How long a rank waits for another one: planning and loading lie between exchanges."""


def name_device(asked: str, settings: RankSettings) -> str:
    """The device of one process: of `auto` and `cuda` the one with its number on this machine.

    Raises:
        OptionError: there are fewer devices than processes.
    """
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


def put_parallel(
    pipe: Any, way: str, patches: Patches, announce: Callable[[str], None]
) -> Literal["context", "guidance"]:
    """Spread each denoiser call of a pipeline over all ranks; how it was done comes back.

    Args:
        way: `context`, `guidance`, or `auto`: context where the model has a plan for it.

    Raises:
        OptionError: the model cannot be spread so.
    """
    denoisers = [callee.owner for callee in find_callees(pipe) if callee.stage == "denoise"]
    if way == "guidance" or (way == "auto" and not all(map(_has_plan, denoisers))):
        put_guidance_parallel(pipe, patches, announce=announce)
        return "guidance"
    for denoiser in denoisers:
        put_context_parallel(denoiser, patches)
    return "context"


def _has_plan(denoiser: torch.nn.Module) -> bool:
    try:
        find_plan(denoiser)
    except OptionError:
        return False
    return True

"""The branches of guidance on several devices: each rank computes its rows of a denoiser's batch.

Most pipelines stack the branches with and without the prompt, and several prompts, as rows of one call.
Rows do not depend on each other, so each rank computes its share, and the outputs are gathered: every
rank goes on with the whole. On two ranks a guided step takes about half as long. Nothing of a model has to
be known, so it works where no context-parallel plan is, and beside one (`mesh`).

**Catches** batches that the ranks do not divide: each rank computes them in full, and it is said once.
**Does not catch** pipelines that call the denoiser once a branch (Wan, Qwen-Image): their batch is one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stopdown.arguments import put_back, replace_tensors
from stopdown.numerics import iterate_tensors
from stopdown.parallel.ranks import GROUP
from stopdown.patches import Patches
from stopdown.pipelines.call_interception import (
    Call,
    Rank,
    find_argument_names,
    intercept,
    map_tensors,
)
from stopdown.pipelines.components import Callee, find_callees

_WHOLE = ("rotary", "freqs", "img_ids", "txt_ids")
"""Arguments that all rows share."""


def put_guidance_parallel(
    pipe: Any, patches: Patches, *, group: Any = None, announce: Callable[[str], None] = print
) -> None:
    """Share the rows of each denoiser call among the ranks, until `patches` is undone.

    Put it on before a guard, and take it off after that.

    Args:
        group: process group; None for that of all ranks.
        announce: told once of a batch that cannot be shared.
    """
    said: set[str] = set()

    def tell(text: str) -> None:
        if text not in said:
            said.add(text)
            announce(text)

    for callee in find_callees(pipe):
        if callee.stage == "denoise":
            whole = group or dist.group.WORLD
            patches.set_attribute(callee.owner, GROUP, whole)
            intercept(
                callee, functools.partial(_share_rows, callee, whole, tell), patches, Rank.DEVICES
            )


def _share_rows(
    callee: Callee,
    group: Any,
    tell: Callable[[str], None],
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = _count_rows(args, kwargs)
    if rows % ranks:
        tell(
            f"`{callee.component}` is called with {rows} row{'s' * (rows != 1)}, which {ranks} ranks "
            "cannot share: every rank computes the whole call."
        )
        return call(*args, **kwargs)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        is_row = tensor.dim() > 0 and tensor.shape[0] == rows
        return tensor.chunk(ranks)[rank] if is_row else tensor

    def keeps(name: str) -> bool:
        return any(part in name for part in _WHOLE)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows // ranks:
            return tensor
        mine = tensor.contiguous()
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts)

    names = find_argument_names(callee)
    args, kwargs, replaced = replace_tensors(args, kwargs, take, names=names, keeps=keeps)
    try:
        output = call(*args, **kwargs)
    finally:
        put_back(replaced)
    return map_tensors(output, gather)


def _count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of the first tensor that has any: the noise that is to be predicted."""
    tensors = (tensor for tensor in iterate_tensors((args, kwargs)) if tensor.dim() > 1)
    first = next(tensors, None)
    return 1 if first is None else int(first.shape[0])

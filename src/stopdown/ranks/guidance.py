"""The branches of guidance on several devices: with and without the prompt, each rank its share.

Most pipelines stack the branches, and several prompts, as rows of one call of their denoiser. Rows do not
depend on each other, so each rank computes its rows, and the outputs are gathered. Some pipelines (Wan,
Qwen-Image) call the denoiser once a branch. There the first call returns at once with outputs that are
pending; at the second call one rank computes the first branch and the others the second one, and what
they gave is exchanged. A pending output that is used earlier is computed there and then, on every rank.

Nothing of a model has to be known, so this works where no context-parallel plan is. Every rank goes on
with the whole result, and on two of them a guided step takes about half as long.

Not covered: arguments that a pipeline changes in place between the calls of two branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from stopdown.component_calls.call import ComponentCall, map_tensors
from stopdown.component_calls.call_interception import (
    Rank,
    intercept,
)
from stopdown.component_calls.components import Callee, find_callees
from stopdown.interception.patches import Patches
from stopdown.numerics import iterate_tensors

GROUP = "stopdown_group"
"""Attribute of a component that is spread by Stopdown alone: its process group."""

_WHOLE = ("rotary", "freqs", "img_ids", "txt_ids")
"""Arguments that all rows share."""


def put_guidance_parallel(
    pipe: Any, patches: Patches, *, group: Any = None, announce: Callable[[str], None] = print
) -> None:
    """Share the branches of each denoiser call among the ranks, until `patches` is undone.

    Put it on before a guard, and take it off after that.

    Args:
        group: process group; None for that of all ranks.
        announce: told once of calls that cannot be shared.
    """
    whole = group or dist.group.WORLD
    for callee in find_callees(pipe):
        if callee.stage == "denoise":
            patches.set_attribute(callee.owner, GROUP, whole)
            rows = functools.partial(_share_rows, whole)
            intercept(callee, rows, patches, Rank.DEVICES)
            branches = _Branches(callee, whole, announce)
            intercept(callee, branches.call, patches, Rank.BRANCHES)


def _share_rows(group: Any, call: ComponentCall) -> Any:
    """Compute this rank's rows of a call, and gather those of all."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = _count_rows(call)
    if rows % ranks:
        return call.proceed()

    def take(tensor: torch.Tensor) -> torch.Tensor:
        is_row = tensor.dim() > 0 and tensor.shape[0] == rows
        return tensor.chunk(ranks)[rank] if is_row else tensor

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        is_row = tensor.dim() > 0 and tensor.shape[0] == rows // ranks
        return torch.cat(_gather(tensor, group)) if is_row else tensor

    return map_tensors(
        call.proceed_with(take, lambda name: any(part in name for part in _WHOLE)), gather
    )


_ALONE = 2
"""The first call shows what comes back, so a second branch after it is alone once."""


class _Branches:
    """The calls of a denoiser that come one after the other, a branch each."""

    def __init__(self, callee: Callee, group: Any, announce: Callable[[str], None]) -> None:
        self._callee, self._group, self._announce = callee, group, announce
        self._signature = ""  # of the calls whose outputs are known
        self._like: Any = None  # their shapes, on no device
        self._pending: _Branch | None = None
        self._alone = 0

    def call(self, call: ComponentCall) -> Any:
        """An output: whole, pending, or of the second of two branches."""
        keeps_states = getattr(self._callee.owner, "is_cache_enabled", False)
        if keeps_states or _count_rows(call) % dist.get_world_size(self._group) == 0:
            return call.proceed()
        signature, make = call.key, call.proceed
        if signature != self._signature:  # the first call shows what comes back
            output = make()
            self._signature = signature
            self._like = map_tensors(output, lambda x: torch.empty_like(x, device="meta"))
            return output
        first, self._pending = self._pending, None
        if first is not None and first.tensors is None:
            return self._share(first, make)
        device = next(x.device for x in iterate_tensors((call.args, call.kwargs)))
        self._pending = _Branch(make, self._report)
        numbers = iter(range(len(list(iterate_tensors(self._like)))))
        branch = self._pending
        return map_tensors(self._like, lambda x: _Pending(x, device, branch, next(numbers)))

    def _share(self, first: _Branch, make_second: Callable[[], Any]) -> Any:
        """Both branches, of which each rank computes one; the output of the second comes back."""
        is_first = dist.get_rank(self._group) == 0
        output = first.make() if is_first else make_second()
        both = [_gather(tensor, self._group)[:2] for tensor in iterate_tensors(output)]
        first.tensors = [pair[0] for pair in both]
        seconds = iter([pair[1] for pair in both])
        return map_tensors(output, lambda _: next(seconds))

    def _report(self) -> None:
        self._alone += 1
        if self._alone == _ALONE:
            self._announce(
                f"`{self._callee.name}` is called once a step, with rows that the ranks cannot "
                "share: every rank computes the whole call."
            )


class _Branch:
    """One call that is still to be made, or what it gave."""

    def __init__(self, make: Callable[[], Any], report: Callable[[], None]) -> None:
        self.make, self._report = make, report
        self.tensors: list[torch.Tensor] | None = None

    def find(self, number: int) -> torch.Tensor:
        """A tensor of its output; the call is made unless it was made already."""
        if self.tensors is None:
            self._report()
            self.tensors = list(iterate_tensors(self.make()))
        return self.tensors[number]


class _Pending(torch.Tensor):
    """A tensor of an output that is there as soon as it is used."""

    branch: _Branch
    number: int

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, device: torch.device, branch: _Branch, number: int
    ) -> _Pending:
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
        )
        made.branch, made.number = branch, number
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # what Tensor says of it is not how it is called
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def find(leaf: Any) -> Any:
            return leaf.branch.find(leaf.number) if isinstance(leaf, _Pending) else leaf

        return func(*pytree.tree_map(find, args), **pytree.tree_map(find, kwargs or {}))


def _gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    mine = tensor.contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return parts


def _count_rows(call: ComponentCall) -> int:
    """Count the rows of the first tensor that has any: the noise that is to be predicted."""
    tensors = (x for x in iterate_tensors((call.args, call.kwargs)) if x.dim() > 1)
    first = next(tensors, None)
    return 1 if first is None else int(first.shape[0])

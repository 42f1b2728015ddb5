"""The weights of a component as they were at its first call, to be compared when something went wrong.

**Catches** a change of any value that is compared: some of each tensor, and after a comparison of the
whole all of them.
**Does not catch** weights that wait elsewhere without values, are quantised, or have another dtype than
before.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from stopdown.numerics import count_writes, has_values

SAMPLES = 64
"""Values of each weight that are kept from the first call."""

_PIECE = 2**17
"""Values of which one sum is kept."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Weight:
    """A weight as it was; its sums are known once there was a fault."""

    tensor: weakref.ref[torch.Tensor]
    sample: torch.Tensor
    version: int | None
    sums: torch.Tensor | None = None


@dataclass
class WeightHistory:
    """The weights of a component at its first call under the same plan and repairs."""

    _state: object = None
    _known: dict[str, _Weight] = field(default_factory=dict)

    def note(self, module: torch.nn.Module, state: object) -> None:
        """A call begins: keep a sample of each weight, unless that was done for this state.

        Args:
            state: what was put on the module, which changes its weights.

        Cost: the first time one operation a weight, which copies `SAMPLES` values; no host read.
        """
        if not self._known or self._state != state:
            self._state = state
            self._known = {
                name: _Weight(weakref.ref(tensor), sample_bits(tensor), count_writes(tensor))
                for name, tensor in _list_weights(module)
            }

    def find_changed(self, module: torch.nn.Module, *, whole: bool) -> list[str]:
        """Weights that are not what they were; of another dtype or size than before none is.

        Args:
            whole: look at all values, too, and keep their sums for the next time.

        Cost: a host read a weight; with `whole` a pass over all weights.
        """
        return [
            name
            for name, tensor in _list_weights(module)
            if (known := self._known.get(name))
            and known.sample.dtype == _BITS[tensor.element_size()]
            and known.sample.numel() == math.ceil(tensor.numel() / _find_stride(tensor))
            and _differs(known, tensor, whole)
        ]

    def were_written(self, module: torch.nn.Module, names: Iterable[str]) -> bool:
        """Whether PyTorch counted a write to each of these, or another tensor is in its place."""
        now = dict(_list_weights(module))
        return all(
            now[name] is not (known := self._known[name]).tensor()
            or (known.version is not None and count_writes(now[name]) != known.version)
            for name in names
        )

    def __len__(self) -> int:
        return len(self._known)


def _list_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain floating parameters that have values."""
    for name, tensor in module.named_parameters():
        if not tensor.is_floating_point() or not has_values(tensor):
            continue
        if type(tensor.data) is torch.Tensor:
            yield name, tensor


def _flatten_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat.view(_BITS[flat.element_size()])


def sample_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Copy up to `SAMPLES` values of a tensor of any shape, as whole numbers of the same size."""
    flat = _flatten_bits(tensor)
    return flat[:: _find_stride(tensor)].clone()


def _find_stride(tensor: torch.Tensor) -> int:
    return max(1, math.ceil(tensor.numel() / SAMPLES))


def _sum_pieces(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of the bits, piece by piece, on the CPU.

    Cost: one pass; several values are added as one number of 64 bits, which a CPU does much faster.
    """
    bits = _flatten_bits(tensor)
    several = 8 // bits.element_size()
    if bits.numel() % several == 0 and bits.storage_offset() % several == 0:
        bits = bits.view(torch.int64)
    return torch.stack([x.sum(dtype=torch.int64) for x in bits.split(_PIECE)]).cpu()


def _differs(known: _Weight, tensor: torch.Tensor, whole: bool) -> bool:
    has_changed = not torch.equal(sample_bits(tensor).cpu(), known.sample.cpu())
    if whole:
        sums, before = _sum_pieces(tensor), known.sums
        known.sums = sums
        has_changed |= before is not None and not torch.equal(sums, before)
    return has_changed

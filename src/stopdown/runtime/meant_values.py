"""Tell NaN and Inf that a model returns on purpose (-Inf in logits, log(0), NaN as a marker) from faults.

A value that isn't finite in fp32 either, with finite arguments and undamaged weights, is no fault. The call
is repeated in fp32 with every operation inspected: each NaN or Inf in its output must originate where the
code writes such a value, or at an operation without a finite result. The 16-bit output must be as close
to the fp32 output as bf16's is.

**Catches** faults among such values: weights and arguments that aren't finite, sums and products beyond
fp32's maximum, elements that are finite in fp32.

**Does not catch** a fault that produces as many values of the same kind as the model does on purpose; after
`BELIEVED_AFTER` calls of a model in 16 bits, one that produces any number of values of the same kind.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from stopdown.numerics import LARGEST_ERROR, ROUNDED_ONCE, relative_l2
from stopdown.runtime.call_check import list_readable

MEANT = frozenset({"mask", "written", "undefined"})
"""Kinds of origins (`culprit.find_origins`) of NaN and Inf that a model produces on purpose."""

BELIEVED_AFTER = 3
"""Number of different counts of such values that are compared with fp32; then any count is accepted."""

MEANT_STAGES = ("call",)
"""Stages whose calls may return NaN or Inf on purpose; in a pipeline, they would spoil the sampling."""

_KINDS = {"NaN": torch.isnan, "+Inf": torch.isposinf, "-Inf": torch.isneginf}


@dataclass
class Meaning:
    """The NaN and Inf that a module was found to return on purpose.

    Attributes:
        kinds: `NaN`, `+Inf`, `-Inf`.
        counts: the numbers of such values in the compared calls.
    """

    kinds: set[str] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)

    def covers(self, output: Any, precision: str) -> bool:
        """Return whether an output's NaN and Inf are like those that the module was found to return on
        purpose.

        Args:
            precision: that the module computes in.

        Cost: for each tensor, three passes and as many host reads.
        """
        found = _count_kinds(output)
        is_told = precision == "fp32" or len(self.counts) >= BELIEVED_AFTER
        return self.kinds >= found.keys() and (is_told or sum(found.values()) in self.counts)

    def add(self, output: Any) -> None:
        found = _count_kinds(output)
        self.kinds.update(found)
        self.counts.add(sum(found.values()))


_MEANINGS: MutableMapping[torch.nn.Module, Meaning] = WeakKeyDictionary()
"""Module → its intended NaN and Inf, for all guards, because a script has a new guard for each call."""


def find_meaning(module: torch.nn.Module) -> Meaning:
    """Return the NaN and Inf that a module is known to return on purpose; none before a call was
    compared.
    """
    return _MEANINGS.setdefault(module, Meaning())


def _count_kinds(output: Any) -> dict[str, int]:
    """Count an output's NaN, +Inf and -Inf by kind; kinds that don't occur are left out."""
    tensors = list_readable(output)
    found = {name: sum(int(of(x).sum()) for x in tensors) for name, of in _KINDS.items()}
    return {name: count for name, count in found.items() if count}


@dataclass(frozen=True)
class Difference:
    """How much a call's output differs from its output in fp32.

    Attributes:
        places: number of elements at which one isn't finite, and the other differs.
        error: relative 2-norm of the difference of the other elements, for the worst tensor.
    """

    places: int
    error: float

    def is_within(self, other: Difference | None) -> bool:
        """Return whether two outputs differ no more than `other` says, or `LARGEST_ERROR` for None."""
        if other is None:
            return self.places == 0 and self.error <= LARGEST_ERROR
        return self.places <= other.places and self.error <= max(ROUNDED_ONCE, other.error)


def compare_with_fp32(output: Any, wide: Any) -> Difference:
    """Compare a call's output with its output in fp32 (`wide`).

    Raises:
        ValueError: they have different numbers of tensors.
    """
    places, errors = 0, [0.0]
    for one, other in zip(list_readable(output), list_readable(wide), strict=True):
        mine, right = one.cpu().double(), other.cpu().double()
        finite = mine.isfinite() & right.isfinite()
        is_same = finite | (mine == right) | (mine.isnan() & right.isnan())
        places += int((~is_same).sum())
        mine, right = torch.where(finite, mine, 0.0), torch.where(finite, right, 0.0)
        if not torch.equal(mine, right):
            errors.append(relative_l2(mine, right))
    return Difference(places, max(errors))

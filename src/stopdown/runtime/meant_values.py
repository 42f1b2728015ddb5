"""Values that a model means although they are not finite: -Inf in logits, the log of 0, NaN as a mark.

A value that is not finite in fp32 either, from finite arguments and undamaged weights, is what the model
computes, and no fault. The call is made again in fp32 and looked at operation by operation: everything
that is not finite in what it returns has to begin where its code writes such a value, or at an operation
that has no finite result there. What was computed in 16 bits has to agree with that as well as bf16 does.

**Catches** faults beside what is meant: weights and arguments that are not finite, sums and products beyond
fp32's largest value, places where fp32 is finite.
**Does not catch** a fault that gives as many values of the same kind as the model means; after
`BELIEVED_AFTER` calls of a model in 16 bits, one that gives values of the same kind.
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
"""Kinds of origins (`culprit.find_origins`) that a model means."""

BELIEVED_AFTER = 3
"""Calls with another number of such values, each compared with fp32, after which any number will do."""

MEANT_STAGES = ("call",)
"""Stages whose calls may mean such values. A component of a pipeline feeds a sampler, which one spoils."""

_KINDS = {"NaN": torch.isnan, "+Inf": torch.isposinf, "-Inf": torch.isneginf}


@dataclass
class Meaning:
    """What the calls of one module were found to mean.

    Attributes:
        kinds: of values that are not finite.
        counts: how many there were in one call.
    """

    kinds: set[str] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)

    def covers(self, output: Any, precision: str) -> bool:
        """Return whether an output's values that are not finite are like those of compared calls.

        Cost: three passes, and as many host reads.
        """
        found = _count_kinds(output)
        is_told = precision == "fp32" or len(self.counts) >= BELIEVED_AFTER
        return self.kinds >= found.keys() and (is_told or sum(found.values()) in self.counts)

    def add(self, output: Any) -> None:
        found = _count_kinds(output)
        self.kinds.update(found)
        self.counts.add(sum(found.values()))


_MEANINGS: MutableMapping[torch.nn.Module, Meaning] = WeakKeyDictionary()
"""Of modules, for all guards: a run of a script puts a guard on for each call."""


def find_meaning(module: torch.nn.Module) -> Meaning:
    """Find the known meaning of a module's values."""
    return _MEANINGS.setdefault(module, Meaning())


def _count_kinds(output: Any) -> dict[str, int]:
    """Count the values that are NaN, Inf and -Inf; kinds without a value are left out."""
    tensors = list_readable(output)
    found = {name: sum(int(of(x).sum()) for x in tensors) for name, of in _KINDS.items()}
    return {name: count for name, count in found.items() if count}


@dataclass(frozen=True)
class Difference:
    """How far an output is from that in fp32.

    Attributes:
        places: where one of the two is not finite, and the other is not the same.
        error: relative 2-norm of the others, of the worst tensor.
    """

    places: int
    error: float

    def is_within(self, other: Difference | None) -> bool:
        """Return whether it is no larger than another difference; without one, than the believed error."""
        if other is None:
            return self.places == 0 and self.error <= LARGEST_ERROR
        return self.places <= other.places and self.error <= max(ROUNDED_ONCE, other.error)


def compare_with_fp32(output: Any, wide: Any) -> Difference:
    """Compare a call's output with its output in fp32."""
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

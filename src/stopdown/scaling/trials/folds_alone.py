"""Find powers of two that weight files alone can hold: nothing is multiplied at run time, and few eps
change.

Converted checkpoints then run in any program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.errors import ScalingError
from stopdown.fold_names import read_clamp
from stopdown.module_calls.call import PlainCall
from stopdown.number_formats import FP16
from stopdown.scaling.certificate import describe_solution
from stopdown.scaling.exponents.linear_system import ZERO
from stopdown.scaling.exponents.problem import MeasuredCall, state_problem
from stopdown.scaling.exponents.solver import solve_problem
from stopdown.scaling.trials.bounded_search import scale_by_bounds
from stopdown.scaling.trials.measurement import Captures, measure_kinds
from stopdown.scaling.trials.search import RELAXATIONS, list_foldings
from stopdown.scaling_records import Scaling


@dataclass
class FoldsAlone:
    """Measured calls of one module, and the exponents for them that folding alone can give.

    Weights scaled by these can be saved, and run in fp16 in programs without Stopdown.

    Args:
        module: module with unscaled, finite weights in any floating dtype; it is left unchanged.
        kinds: calls that were measured before; `measure` adds to them.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 1e5 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> folds = FoldsAlone(module)
        >>> folds.measure([(module, (x,), {})])
        >>> folds.find() is None  # without a change of eps
        True
        >>> scaling = folds.find(free=None)
        >>> scaling.exponents, scaling.eps
        ({'0.weight': -7}, {'1.eps': -14})
    """

    module: torch.nn.Module
    kinds: list[MeasuredCall] = field(default_factory=list)

    def measure(self, calls: Sequence[PlainCall]) -> None:
        """Run calls of one graph in fp32 and record the magnitudes of their activations, for `find`.

        Raises:
            CaptureError: the code cannot be traced.

        Cost: a capture (seconds), and a forward in fp32 for each call.
        """
        self.kinds += measure_kinds(self.module, [calls], Captures(), None)

    @property
    def signatures(self) -> tuple[str, ...]:
        """Signatures of the measured calls, sorted."""
        return tuple(sorted({kind.capture.signature for kind in self.kinds}))

    def find(
        self,
        groups: Sequence[Collection[str]] = (),
        free: Collection[str] | None = (),
        narrow: Collection[str] = (),
        *,
        calls: Sequence[MeasuredCall] | None = None,
    ) -> Scaling | None:
        """Find powers of two that weights and eps alone can be multiplied by, so that the measured
        calls fit in fp16.

        A weight file can store the result, without casts or multiplies at run time. Return None if
        there are none.

        Args:
            groups: groups of `module.path.attribute` of eps that change by the same factor.
            free: further eps that may change independently; None for all. The rest stays fixed.
            narrow: classes of modules inside which fp32 activations must fit in fp16 as well.
            calls: with other ranges than those that were measured; None for `kinds`.
        """
        problem = state_problem(self.module, calls or self.kinds, narrow=narrow)
        places = {".".join(filter(None, key)): unknown for key, unknown in problem.eps.items()}
        for group in groups:
            problem.system.equate(*[places.pop(name, ZERO) for name in group])
        fixed = () if free is None else {x for x in places if x not in free and _must_keep(x)}
        problem.system.pin(*[places[name] for name in sorted(fixed)])
        for bits in (x.headroom_bits for x in RELAXATIONS if not x.fp32_flops):
            for tried in list_foldings(problem):
                if solution := solve_problem(tried, hard_top_bits=bits, fp32_modules=False):
                    return describe_solution(tried, solution)
        return None

    def find_bounded(
        self, ranges: str, accepts: Callable[[Scaling], bool], **freedom: Any
    ) -> Scaling:
        """Find scale exponents as `find` does, but for proven bounds of the activations where these are
        acceptable.

        Args:
            ranges: `bound` (wherever possible) or `auto` (only at almost no cost).
            accepts: decides whether the caller can use these exponents.
            freedom: arguments of `find`.

        Raises:
            ScalingError: there are none.

        Cost: passes over the weights and solutions, as for `scale_by_bounds`, and a call of `accepts` after
            each solution.
        """

        def demand(_: torch.nn.Module, calls: Sequence[MeasuredCall]) -> Scaling:
            if (found := self.find(calls=calls, **freedom)) is None:
                raise ScalingError("Folds alone don't keep it in range.")
            if not accepts(found):
                raise ScalingError("Its eps would have to change with it.")
            return found

        return scale_by_bounds(self.module, self.kinds, ranges, demand)


def _must_keep(place: str) -> bool:
    """Return whether an eps must keep its value, since programs that load a weight file can't change it.

    A clamp's limit that fp16 rounds to 0 needn't: no positive fp16 value is below it.

    Args:
        place: `module.path.attribute` of the eps.
    """
    number = read_clamp(place.rpartition(".")[2])
    return number is None or number > FP16.smallest / 2

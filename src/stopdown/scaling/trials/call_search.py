"""Search for the exponents of a module's calls: capture, measure, solve, and run the calls with the result.

Strategies are tried in this order: an fp32 residual stream if requested, the stream in the model's dtype,
an fp32 stream if that was worse than bf16, hooks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from stopdown.errors import CaptureError, InputError, ScalingError, TrialError
from stopdown.module_calls.call import PlainCall
from stopdown.scaling.exponents.problem import MeasuredCall, Statements
from stopdown.scaling.trials.bounded_search import scale_by_bounds
from stopdown.scaling.trials.fallback import scale_by_hooks
from stopdown.scaling.trials.measurement import Captures, measure_kinds
from stopdown.scaling.trials.residual import (
    demand_agreement,
    find_stream,
    measure_wide_flops,
    open_fp32_modules,
)
from stopdown.scaling.trials.search import StopReason, find_scaling, take_first
from stopdown.scaling.trials.trial import Run, run_reference, try_scaling
from stopdown.scaling_records import ResidualStream, Scaling


def scale_calls(
    module: torch.nn.Module,
    kinds: Sequence[Sequence[PlainCall]],
    residual: str = "native",
    ranges: str = "measured",
) -> Scaling:
    """Find exponents and test them by running the first call of each group, first with the requested
    residual dtype.

    If that fails, the other dtype is tried, and then forward hooks, which find the weight matrices that
    fp16 can represent. These serve modules that can't be captured or whose code doesn't run with
    exponents.

    Args:
        module: module in any floating dtype, with finite weights; it is left unchanged.
        kinds: calls (function, args, kwargs) in groups; those in one group run the same graph. The
            function is the module or a bound method, and floating tensors have the module's dtype.
        residual: dtype of the residual stream, `native` or `fp32`.
        ranges: `measured`, `bound` or `auto`, as for `rescale_`.

    Returns:
        The scaling, for `fold_scaling` and `cast_`. Its `trial` has fp16's and bf16's error.

    Source: an integer program, which HiGHS solves through `scipy.optimize.milp`.

    Raises:
        InputError: if there is no group, or one without calls.
        CaptureError: if the code can't be traced, and hooks don't suffice either.
        ScalingError: if there are no exponents, they are not exact, or the module doesn't run with
            them.

    Cost: a capture for each group (two or three with an fp32 residual), a forward in fp32 for each
    call, and those of `try_scaling`.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 1e5 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> scaling = scale_calls(module, [[(module, (x,), {})]])
        >>> scaling.exponents, float(linear.weight.max())  # found, not folded
        ({'0.weight': -7}, 100000.0)
    """
    if not (kinds and all(kinds)):
        raise InputError(
            f"scale_calls was given {'a group without calls' if kinds else 'no calls'}.",
            expected="Exponents are found for calls, and hold for calls of the same graph.",
            remedy="Give each group a call: [[(module, args, kwargs)]].",
        )
    search = _CallSearch(module, kinds, ranges)
    return take_first(search.list_strategies(residual), left=search.left)


@dataclass
class _CallSearch:
    """Search for scale exponents of one module's calls by several strategies, with trial runs.

    Attributes:
        left: errors of the strategies that failed.
        captures: cache of captures.
        unsolved: error of a problem without a solution, after which hooks are tried.
    """

    module: torch.nn.Module
    kinds: Sequence[Sequence[PlainCall]]
    ranges: str
    left: list[StopReason] = field(default_factory=list)
    captures: Captures = field(default_factory=Captures)
    unsolved: ScalingError | None = None

    def list_strategies(self, residual: str) -> Iterator[Callable[[], Scaling]]:
        """Yield ways to find a scaling, in the order in which they are tried.

        The residual stream is first kept in the requested dtype, then in the other one. At last, forward
        hooks choose matrices for fp16. A way that an earlier failure makes hopeless is left out.

        Args:
            residual: dtype of the residual stream, `native` or `fp32`.
        """
        if residual == "fp32":
            yield self._find_streamed
        if not self._failed(CaptureError):
            yield partial(self._find_tried, None, "isn't kept in fp32")
        if residual != "fp32" and self._failed(TrialError):
            yield self._find_streamed
        if self._failed(CaptureError, TrialError) or self.unsolved is not None:
            yield self._find_by_hooks

    def _failed(self, *kinds: type[StopReason]) -> list[StopReason]:
        return [x for x in self.left if isinstance(x, kinds)]

    @cached_property
    def _reference(self) -> list[Run]:
        return run_reference(self.module, [kind[0] for kind in self.kinds])

    def _find_streamed(self) -> Scaling:
        stream = plan_stream(self.module, [kind[0] for kind in self.kinds], self.captures)
        return self._find_tried(stream, "is kept in fp32")

    def _find_tried(self, stream: ResidualStream | None, what: str) -> Scaling:
        found = self._scale(stream)
        trial = try_scaling(self.module, found, self._reference)
        why = f"The residual stream {what}: {self.left[0].what}" if self.left else ""
        return replace(found, trial=trial, note=why)

    def _find_by_hooks(self) -> Scaling:
        calls = [call for kind in self.kinds for call in kind]
        reason = self.unsolved or self._failed(CaptureError, TrialError)[0]
        return scale_by_hooks(self.module, calls, reason, lambda: self._reference)

    def _scale(self, stream: ResidualStream | None) -> Scaling:
        """Find scale exponents, with whole modules in fp32 if needed.

        If some are in fp32, search again with the matrix products of these modules in 16 bits. That
        result is preferred if less of the work is in fp32.

        Args:
            stream: casts that keep the residual stream in fp32; None for none.
        """
        kinds = measure_kinds(self.module, self.kinds, self.captures, stream)
        whole = self._solve(kinds, stream)
        if not whole.fp32_modules:
            return whole
        with contextlib.suppress(CaptureError, ScalingError):
            opened = self._open(kinds, stream, whole)
            whole = opened if opened.fp32_flops < whole.fp32_flops else whole
        return whole

    def _open(
        self, kinds: Sequence[MeasuredCall], stream: ResidualStream | None, whole: Scaling
    ) -> Scaling:
        captures = [x.capture for x in kinds]
        opened = open_fp32_modules(self.module, stream, whole.fp32_modules, captures)
        if opened is None:
            raise ScalingError("No module that is kept in fp32 has products inside.")
        again = measure_kinds(self.module, self.kinds, self.captures, opened)
        for one, other in zip(kinds, again, strict=True):
            demand_agreement(one.capture, other.capture)
        inside = self._solve(again, opened)
        wide = [max(measure_wide_flops(x.capture) for x in y) for y in (kinds, again)]
        return replace(inside, fp32_flops=inside.fp32_flops + max(wide[1] - wide[0], 0.0))

    def _solve(self, kinds: Sequence[MeasuredCall], stream: ResidualStream | None) -> Scaling:
        try:
            return self._find(kinds, stream)
        except ScalingError as error:
            self.unsolved = error if self.ranges != "bound" else None  # hooks can't certify
            raise

    def _find(self, kinds: Sequence[MeasuredCall], stream: ResidualStream | None) -> Scaling:
        if self.ranges == "measured":
            return find_scaling(self.module, kinds, stream)
        find = partial(find_scaling, stream=stream, statements=Statements())
        in_fp16 = partial(find, fp32_modules=False)
        return scale_by_bounds(self.module, kinds, self.ranges, find, in_fp16)


def plan_stream(
    module: torch.nn.Module, calls: Sequence[PlainCall], captures: Captures
) -> ResidualStream:
    """Choose the casts of an fp32 residual stream with which these calls of a module can run.

    Args:
        captures: cache that receives the captures with and without the stream.

    Raises:
        CaptureError: if the code can't be traced, whatever the stream.
        ScalingError: if the stream can't be fp32; its text has the reason.

    Cost: two to five captures for each call (seconds).
    """
    plain = [captures.take_short(call) for call in calls]

    def find(rows: bool, attention: bool) -> ResidualStream:
        stream = find_stream(module, plain, attention=attention, rows=rows)
        for bare, call in zip(plain, calls, strict=True):
            demand_agreement(bare, captures.take(call, stream))
        return stream

    left: list[StopReason] = []
    ways = itertools.product((True, False), (False, True))
    try:
        return take_first((partial(find, *way) for way in ways), left=left)
    except (CaptureError, ScalingError) as error:
        raise ScalingError(left[0].what) from error

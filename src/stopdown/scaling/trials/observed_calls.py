"""Measure a module's calls while a program makes them, and find scale exponents for all of them together.

A guard uses this to repair a module after an overflow.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.errors import CaptureError
from stopdown.interception.autocast import without_autocast
from stopdown.module_calls.call import ComponentCall, cast_floats
from stopdown.scaling.exponents.problem import MeasuredCall
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.trials.call_search import plan_stream
from stopdown.scaling.trials.fallback import scale_by_hooks
from stopdown.scaling.trials.measurement import Captures, add_call, list_read
from stopdown.scaling.trials.residual import demand_agreement
from stopdown.scaling.trials.search import find_scaling
from stopdown.scaling_records import ResidualStream, Scaling


@dataclass
class ObservedCalls:
    """Magnitudes of the activations in a module's calls so far, from which exponents are found.

    Attributes:
        calls: number of calls that were measured.
        residual: dtype of the residual stream: `native` (that of the module) or `fp32`.
        stream: casts that keep it in fp32; None before the first call, and for `native`.

    Raises:
        CaptureError: from `observe`, if the code can't be traced; `find_by_hooks` serves such modules.
        ScalingError: from `find_exponents`, if no exponents keep the calls in range.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 1e5 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> callee = Callee("denoiser", module, "forward", "denoise")
        >>> observed = ObservedCalls()
        >>> observed.observe(module, ComponentCall(callee, (x,)))
        >>> observed.find_exponents(module).exponents
        {'0.weight': -7}
    """

    calls: int = 0
    residual: str = "native"
    stream: ResidualStream | None = None
    _kinds: dict[Hashable, list[MeasuredCall]] = field(default_factory=dict)
    _untraced: dict[Hashable, tuple[str, Any, Any]] = field(default_factory=dict)

    def observe(
        self,
        module: torch.nn.Module,
        call: ComponentCall,
    ) -> None:
        """Measure one call that a program made, and merge the magnitudes of its activations with
        earlier calls'.

        Args:
            module: the module to call, in place of the one in `call`.

        Cost: one forward in fp32; for the first call of a kind a capture as well (seconds), with an fp32
            residual stream three.
        """
        kind = self._kinds.setdefault(call.key, [])
        captures = Captures()
        one = call.callee.bind(module), call.args, call.kwargs
        with without_autocast():
            if self.residual == "fp32" and not kind:
                if self.stream is None:
                    self.stream = plan_stream(module, [one], captures)
                else:  # other sizes may share out the work differently, and need the same casts
                    demand_agreement(captures.take(one), captures.take(one, self.stream))
            add_call(kind, module, one, captures, self.stream)
        self.calls += 1

    def find_by_hooks(
        self, module: torch.nn.Module, call: ComponentCall, failure: CaptureError
    ) -> Scaling:
        """Find which matrices of a module can run in fp16, if it can't be captured; the rest runs in fp32.

        Args:
            failure: the error of its capture.

        Cost: a forward in fp32 for each kind of call that failed; the latest of each is kept.
        """
        args, kwargs = cast_floats((call.args, call.kwargs), torch.float32)
        self._untraced[call.key] = call.callee.method, args, kwargs
        calls = [
            (module if method == "forward" else getattr(module, method), *given)
            for method, *given in self._untraced.values()
        ]
        with without_autocast(), cast_(module, torch.float32):
            return scale_by_hooks(module, calls, failure)

    def find_exponents(self, module: torch.nn.Module) -> Scaling:
        """Find the cheapest scale exponents that keep the observed calls in range.

        Raises:
            ScalingError: there are none.
        """
        return find_scaling(module, self.measured, self.stream)

    @property
    def measured(self) -> list[MeasuredCall]:
        """One entry for each kind of call, its ranges merged over the calls."""
        return [entry for kind in self._kinds.values() for entry in kind]

    @property
    def methods(self) -> set[str]:
        """Names of the methods that were called; `forward` for the module itself."""
        return {x.capture.method or "forward" for x in self.measured}

    @property
    def used(self) -> set[str]:
        """Names of the module's parameters that the observed calls read."""
        return {name for known in self.measured for name in list_read(known.capture)}

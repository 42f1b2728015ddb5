"""Find scale exponents for a module's example calls from the weights alone, without running the module.

Each call is captured once, also for a signature of its graph and for a certificate file.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import stopdown_verify
from stopdown.errors import ScalingError
from stopdown.mapped_weights import Load
from stopdown.module_calls.call import ComponentCall, PlainCall
from stopdown.module_calls.call_inputs import read_call_sizes
from stopdown.scaling.certificate_graphs import export_graphs
from stopdown.scaling.exponents.problem import Statements
from stopdown.scaling.graph.capture import Capture, sign_capture
from stopdown.scaling.trials.bounded_search import scale_unmeasured
from stopdown.scaling.trials.call_search import plan_stream
from stopdown.scaling.trials.measurement import Captures
from stopdown.scaling.trials.search import find_scaling
from stopdown.scaling_records import ResidualStream, Scaling


class TracedCalls:
    """Example calls of one module, from whose graphs and weights exponents with proven bounds are found.

    Each call is captured once. The module isn't run and isn't changed.

    Args:
        module: module with weights in any floating dtype, or on `meta` if `certify` loads them from files.
        made: example calls. Only shapes and dtypes of their tensors matter.

    Source: `docs/certificates.md` has the bounds, their proofs and the assumptions.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 1e5 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> callee = Callee("denoiser", module, "forward", "denoise")
        >>> traced = TracedCalls(module, [ComponentCall(callee, (torch.ones(1, 4),))])
        >>> scaling = traced.certify("native", module.get_parameter)  # the module isn't run
        >>> scaling.certified, scaling.exponents
        (True, {'0.weight': -11})
    """

    def __init__(self, module: torch.nn.Module, made: Sequence[ComponentCall]) -> None:
        self.module = module
        self.calls: list[PlainCall] = [(x.callee.bind(module), x.args, x.kwargs) for x in made]
        self.captures = Captures()
        self._made = made

    def capture(
        self, stream: ResidualStream | None
    ) -> list[tuple[Capture, tuple[Any, ...], Mapping[str, Any]]]:
        """Return the graph of each call with its residual stream cast as given, and the call's arguments.

        Args:
            stream: casts that keep the residual stream in fp32; None for none.

        Cost: a capture for each call (seconds) that has none yet.
        """
        return [(self.captures.take(x, stream), *x[1:]) for x in self.calls]

    def sign(self) -> tuple[object, ...]:
        """Return a signature of the calls' graphs and sizes; a stored result holds for calls with an
        equal one.

        Raises:
            CaptureError: the code cannot be traced.

        Cost: a capture for each call (seconds).
        """
        signs: list[object] = [*read_call_sizes(self._made)]
        for call in self.calls:
            made = self.captures.take_short(call)
            signs += [sign_capture(made), self.captures.keeps_clamps(call, made)]
        return tuple(signs)

    def certify(self, residual: str, load: Load, *, hands_over: bool = False) -> Scaling:
        """Find scale exponents that proven bounds rest on, with the residual stream in fp32 if
        requested and possible.

        Args:
            residual: `native` or `fp32`.
            load: returns a weight by its name.
            hands_over: an encoder of the pipeline returns hidden states, which no norm has made small.
                Outputs of encoders are then assumed to have any fp16 value, if exponents for that cost
                nothing.

        Raises:
            CaptureError: the code cannot be traced.
            ScalingError: there are none, or only with the whole module in fp32.

        Cost: a capture for each call, three with an fp32 residual; one or two passes over the weights for
            each, and up to a dozen solutions after each.
        """
        if residual == "native":
            return self._certify(None, load, hands_over)
        try:
            stream = plan_stream(self.module, self.calls, self.captures)
            return self._certify(stream, load, hands_over)
        except ScalingError as error:
            why = error.what
        found = self._certify(None, load, hands_over)
        return replace(found, note=f"The residual stream isn't kept in fp32: {why}")

    def _certify(self, stream: ResidualStream | None, load: Load, hands_over: bool) -> Scaling:
        captured = self.capture(stream)
        find = functools.partial(find_scaling, stream=stream, whole=False, statements=Statements())
        return scale_unmeasured(self.module, captured, load, find, hands_over=hands_over)

    def export(
        self,
        scaling: Scaling,
        tensors: Mapping[str, stopdown_verify.Weight],
        tied: Mapping[str, tuple[str, ...]],
        load: Load,
    ) -> dict[str, Any]:
        """Write the calls as rules for the checker `stopdown_verify`, as `export_graphs` does."""
        captured = self.capture(scaling.stream)
        return export_graphs(self.module, scaling, captured, tensors, tied, load)

"""Ranges of a component over the calls of it that failed: steps, guidance branches, resolutions.

Each call is run once more as its captured graph in fp32, and of every value only three figures are
kept, so that no more than the component and one call are in memory. Calls of one kind (the same
method, sizes and options) share a capture and merge their figures; kinds of different lengths stay
apart as values and meet in the parameters, where the solver sees them together.

Not covered: what other prompts reach: exponents from here keep headroom and say that they rest
on measurements.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from stopdown.component_calls.call import ComponentCall
from stopdown.errors import ScalingError
from stopdown.interception.autocast import without_autocast
from stopdown.records import ResidualStream
from stopdown.scaling import Measured
from stopdown.scaling.measurement import Captures, add_call
from stopdown.scaling.search import plan_stream


@dataclass
class Calibration:
    """What the calls of one module have reached so far.

    Attributes:
        residual: what the residual stream is kept in: `native` or `fp32`.
        stream: where it becomes fp32; None before the first call, and for `native`.
    """

    calls: int = 0
    residual: str = "native"
    stream: ResidualStream | None = None
    _kinds: dict[Hashable, list[Measured]] = field(default_factory=dict)

    def observe(
        self,
        module: torch.nn.Module,
        call: ComponentCall,
    ) -> None:
        """Measure one call of the module, and merge what it reached.

        Args:
            module: in the place of the callee's owner.

        Cost: one forward in fp32; for the first call of a kind a capture as well (seconds), with an fp32
            residual stream three.
        """
        kind = self._kinds.setdefault(call.key, [])
        captures = Captures(torch.float16)
        one = call.callee.bind(module), call.args, call.kwargs
        with without_autocast():
            if self.residual == "fp32" and not kind:
                found = plan_stream(module, [one], captures)
                if self.stream not in (None, found):
                    raise ScalingError("Other calls that failed have a different residual stream.")
                self.stream = found
            add_call(kind, module, one, captures, self.stream)
        self.calls += 1

    @property
    def measured(self) -> list[Measured]:
        """One entry for each kind of call, its ranges merged over the calls."""
        return [entry for kind in self._kinds.values() for entry in kind]

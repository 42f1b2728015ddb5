"""Ranges of a component over the calls of it that failed: steps, guidance branches, resolutions.

Each call is run once more as its captured graph in fp32, and of every value only three figures are
kept, so that no more than the component and one call are in memory. Calls of one kind (the same
method, sizes and options) share a capture and merge their figures; kinds of different lengths stay
apart as values and meet in the parameters, where the solver sees them together.

**Catches** what these calls reach.
**Does not catch** what other prompts reach: exponents from here keep headroom and say that they rest
on measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from stopdown.autocast import without_autocast
from stopdown.graph.capture import owner_of
from stopdown.pipelines.call_interception import sign_arguments
from stopdown.records import Scaling
from stopdown.scaling import Measured, find_scaling
from stopdown.scaling.measurement import add_call


class Calibration:
    """What the calls of one module have reached so far."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype = torch.float16) -> None:
        self.module, self.dtype = module, dtype
        self._kinds: dict[Hashable, list[Measured]] = {}
        self.calls = 0

    def observe(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Measure one call of the module, or of a method of it, and merge what it reached.

        Raises:
            CaptureError: the code cannot be traced.
            ScalingError: a weight or an output is NaN or Inf in fp32.

        Cost: one forward in fp32; for the first call of a kind a capture as well (seconds).
        """
        kwargs = kwargs or {}
        method = "forward" if call is owner_of(call) else getattr(call, "__name__", "")
        kind = self._kinds.setdefault((method, sign_arguments(args, kwargs)), [])
        with without_autocast():
            add_call(kind, self.module, (call, args, kwargs), self.dtype)
        self.calls += 1

    @property
    def measured(self) -> list[Measured]:
        """One entry for each kind of call, its ranges merged over the calls."""
        return [entry for kind in self._kinds.values() for entry in kind]

    def find_scaling(self) -> Scaling:
        """The cheapest exponents that keep everything measured so far in range.

        Raises:
            ScalingError: there are none.
        """
        return find_scaling(self.module, self.measured)

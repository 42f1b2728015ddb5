"""Repairs that hold on from one guard of a component to the next.

A script calls its pipeline again and again, with a guard of its own each time. What one call repaired is
put on from the start of the next, as long as the component still has the weights that it was found for.

**Catches** weights that were changed in between: trained, fused with a LoRA, cast, replaced.
**Does not catch** a change that spares all values that are compared, some of each tensor. Components
whose weights wait elsewhere (offloaded to disk or layer by layer) cannot be compared: each guard
begins anew there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from stopdown.component_calls.components import read_precisions
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan
from stopdown.runtime.failed_call_ranges import Calibration
from stopdown.runtime.repairs import ComponentState


@dataclass
class RepairCache:
    """What guards found so far, by component; forgotten with the component.

    Attributes:
        outdated: classes of components whose weights were others when they came again.
    """

    outdated: list[str] = field(default_factory=list)
    _kept: WeakKeyDictionary[
        torch.nn.Module, tuple[str, tuple[ComponentPlan, ...], Calibration]
    ] = field(default_factory=WeakKeyDictionary)

    def put_on(self, state: ComponentState) -> tuple[ComponentPlan, ...]:
        """Put on what an earlier guard found; what that was, empty for nothing."""
        if state.module not in self._kept:
            return ()
        weights, applied, calibration = self._kept[state.module]
        if weights != _sign(state.module):
            del self._kept[state.module]
            self.outdated.append(type(state.module).__name__)
            return ()
        state.put_on(applied)
        state.calibration = calibration
        return applied

    def keep(self, state: ComponentState, applied: tuple[ComponentPlan, ...]) -> None:
        """Keep what was in force on a component that is as it was before its guard."""
        weights = _sign(state.module)
        if weights:
            self._kept[state.module] = weights, applied, state.calibration


def _sign(module: torch.nn.Module) -> str:
    """What its weights are known by; empty when they are not there."""
    if any(tensor.is_meta for tensor in module.parameters()):
        return ""
    return f"{sample_weights(module)} {read_precisions(module)}"

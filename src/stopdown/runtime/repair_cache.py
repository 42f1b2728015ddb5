"""Cache repairs of a component, so that its next guard begins with those that the last one found.

They are applied only if the weights (by samples of each) and the code are unchanged. Components with
weights on `meta` can't be compared, so each guard starts without cached repairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from stopdown.component_calls.components import read_precisions
from stopdown.module_calls.module_settings import sign_settings
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan
from stopdown.runtime.kept_code import KeptCode
from stopdown.runtime.repairs import Calibration, Component


@dataclass
class RepairCache:
    """Repairs that guards found, for the next guard of the same component.

    Attributes:
        outdated: class names of components whose weights or code have changed.
        code: cache of their compiled code.
    """

    outdated: list[str] = field(default_factory=list)
    code: KeptCode = field(default_factory=lambda: KeptCode(is_kept=True))
    _kept: WeakKeyDictionary[
        torch.nn.Module, tuple[tuple[object, ...], tuple[ComponentPlan, ...], Calibration]
    ] = field(default_factory=WeakKeyDictionary)

    def put_on(self, state: Component) -> tuple[ComponentPlan, ...]:
        """Apply the repairs that an earlier guard found for this component, if its weights and code are
        unchanged.

        Return the repairs; () if there are none.
        """
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

    def keep(self, state: Component, applied: tuple[ComponentPlan, ...]) -> None:
        """Store the repairs of a component whose guard is removed, for its next guard."""
        weights = _sign(state.module)
        if weights:
            self._kept[state.module] = weights, applied, state.calibration


def _sign(module: torch.nn.Module) -> tuple[object, ...]:
    """Return a key that changes with a module's weights or code; () if the weights are not loaded."""
    if any(tensor.is_meta for tensor in module.parameters()):
        return ()
    return sample_weights(module), read_precisions(module), *sign_settings(module)

"""Scale literal eps constants of clamps in a module's code, such as `h.norm().clamp(min=1e-6)`, during
its calls.

`functional.normalize(h)` and `h / h.norm().clamp(min=1e-6)` compare a norm with a number in the code.
If the norm is stored times a power of two, the number must be multiplied by the same power.

Not covered: constants in code that no module call runs, such as that of `vae.decode` itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stopdown.interception.autocast import run_within
from stopdown.interception.patches import Patches
from stopdown.number_formats import FP16

_CLAMPS = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_")
)
_NORMALIZE = inspect.signature(functional.normalize)


def scale_clamps(module: torch.nn.Module, factors: Mapping[float, float], patches: Patches) -> None:
    """Multiply the lower limits of `clamp` and `normalize` calls by given factors whenever a module's
    `forward` runs.

    Args:
        factors: maps each constant in the code to its factor.
        patches: undoing it ends this.
    """
    run_within(module, partial(_ScaledClamps, factors), patches)


class _ScaledClamps(TorchFunctionMode):
    def __init__(self, factors: Mapping[float, float]) -> None:
        super().__init__()
        self.factors = factors

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.normalize:
            given = _NORMALIZE.bind(*args, **kwargs)
            given.apply_defaults()
            given.arguments["eps"] = self._scale(given.args[0], given.arguments["eps"])
            args, kwargs = given.args, given.kwargs
        elif func in _CLAMPS and len(args) < 3 and kwargs.get("max") is None:
            if len(args) == 2:
                args = args[0], self._scale(*args)
            elif "min" in kwargs:
                value = args[0] if args else kwargs["input"]
                kwargs = {**kwargs, "min": self._scale(value, kwargs["min"])}
        return func(*args, **kwargs)

    def _scale(self, value: torch.Tensor, bound: Any) -> Any:
        """Multiply a clamp's lower limit by its factor; in fp16 keep it above 0, or a division could be
        0 / 0.

        Limits without a factor are returned unchanged.

        Args:
            value: tensor that is clamped.
        """
        if not isinstance(bound, int | float) or not value.is_floating_point():
            return bound
        if bound not in self.factors:
            return bound
        scaled = bound * self.factors[bound]
        return max(scaled, FP16.smallest) if value.dtype == torch.float16 else scaled

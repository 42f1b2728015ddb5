"""Accept arguments that a component's fp16 can't represent: pass them on in fp32 up to the first norm.

An encoder may return states beyond 65504 to a denoiser in fp16. Most denoisers apply a norm to such
states, or one matrix and then a norm. So the states are passed on in fp32, and the layers that receive them
compute in fp32, up to the first output that fp16 can represent.

**Catches** linear layers, convolutions and norms of PyTorch; norms that upcast their inputs themselves;
by its output, code that casts to fp16 itself or doesn't accept two dtypes: such a call is refused, or left
to a guard.

**Does not catch** masks, whose casts keep them finite (`cast_mask`); Inf that code computes from an
argument and then hides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stopdown.errors import ScalingError, take_first_line
from stopdown.interception.autocast import without_autocast
from stopdown.interception.patches import CHANGING, Patches, call_while_alive
from stopdown.interception.tracing import is_traced
from stopdown.module_calls.call import ComponentCall, are_finite, cast_floats, narrow_if_finite
from stopdown.module_calls.kept_state import HeldContainers
from stopdown.numerics import iterate_tensors, measure_amax


class ReplacedError(Exception):
    """Raised if a module's exponents were replaced or removed while a call waited: the call is made
    again.
    """


class BeyondError(ScalingError):
    """Raised if a component receives values beyond its format's range, and doesn't accept them in fp32."""


@dataclass
class Entrance:
    """Casts the arguments of a component's calls to its dtype, but passes those that would overflow on
    in fp32.

    Attributes:
        dtype: to which arguments are cast; None if it's passed for each call.
        wide: indices of the output tensors that the component's code returns in fp32 by itself.
    """

    module: nn.Module
    patches: Patches
    dtype: torch.dtype | None = None
    wide: Collection[int] = ()
    _layers: dict[nn.Module, _WideLayer] = field(default_factory=dict)
    _running: int = 0

    def proceed(
        self,
        call: ComponentCall,
        dtype: torch.dtype,
        is_refusal: Callable[[Exception], bool] | None,
    ) -> Any:
        """Continue a call with its arguments cast to `dtype`; those that would overflow stay in fp32.

        Args:
            is_refusal: recognises torch's error for two dtypes in one operation. `BeyondError` is raised in
                its place, and if the output isn't finite. None returns the output, for a guard to repair.
        """
        beyond = call.list_beyond(dtype)
        if not beyond:
            return call.proceed_in(dtype, wide=self.wide)
        held, restores = HeldContainers((call.args, call.kwargs)), call.save(self.module)
        self._put_on()
        refused: Exception | None = None
        try:
            output = _widen(call, beyond).proceed_in(dtype, beyond, self.wide)
            if is_refusal is None or are_finite(output):
                return output
            why = "what it gives then isn't finite"
        except Exception as error:
            if is_refusal is None or not is_refusal(error):
                raise
            refused, why = error, take_first_line(error).rstrip(".")
        finally:
            self._keep_used()
        for restore in (*restores, held.restore):
            restore()
        raise _explain(call, beyond, why) from refused

    def _put_on(self) -> None:
        with CHANGING:
            self._running += 1
            if not self._layers:
                self.patches.defer(call_while_alive(self._take_off))
            for layer in self.module.modules():
                if type(layer) in _IN_FP32 and "forward" not in vars(layer):
                    self._layers[layer] = made = _WideLayer(layer, layer.forward)
                    made.off.set_attribute(layer, "forward", made)

    def _keep_used(self) -> None:
        """Restore the layers that were given no fp32, once no thread is in a call that may do so."""
        with CHANGING:
            self._running -= 1
            if not self._running:
                for layer in [x for x, made in self._layers.items() if not made.is_used]:
                    self._layers.pop(layer).off.undo()

    def _take_off(self) -> None:
        while self._layers:
            self._layers.popitem()[1].off.undo()


@dataclass
class _WideLayer:
    """A replacement of an fp16 layer's `forward` that computes in fp32 for fp32 inputs.

    The output is cast to fp16 unless it would overflow. A deep copy is the original `forward`.
    """

    layer: Any
    plain: Callable[..., Any]
    is_used: bool = False
    off: Patches = field(default_factory=Patches)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight, given = self.layer.weight, next(iter((*args, *kwargs.values())))
        is_narrow = weight is not None and weight.dtype == torch.float16
        if not is_narrow or given.dtype != torch.float32:
            return self.plain(*args, **kwargs)
        self.is_used = True
        bias = getattr(self.layer, "bias", None)
        wide = weight.float(), None if bias is None else bias.float()
        with without_autocast():
            made = _IN_FP32[type(self.layer)](self.layer, given, *wide)
        return made if is_traced() else narrow_if_finite(made, torch.float16)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)


def _widen(call: ComponentCall, beyond: list[str]) -> ComponentCall:
    """Return the call with the arguments named in `beyond` cast to fp32, also from bf16."""
    return call.with_arguments(
        lambda name, x: cast_floats(x, torch.float32) if name in beyond else x
    )


def _convolve(layer: Any, given: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    made: torch.Tensor = layer._conv_forward(given, weight, bias)
    return made


_IN_FP32: dict[type, Callable[..., torch.Tensor]] = {
    nn.Linear: lambda layer, given, weight, bias: F.linear(given, weight, bias),
    nn.Conv1d: _convolve,
    nn.Conv2d: _convolve,
    nn.Conv3d: _convolve,
    nn.LayerNorm: lambda layer, given, weight, bias: F.layer_norm(
        given, layer.normalized_shape, weight, bias, layer.eps
    ),
    nn.RMSNorm: lambda layer, given, weight, bias: F.rms_norm(
        given, layer.normalized_shape, weight, layer.eps
    ),
    nn.GroupNorm: lambda layer, given, weight, bias: F.group_norm(
        given, layer.num_groups, weight, bias, layer.eps
    ),
}
"""Class of a layer → function that computes it with other weights."""


def _explain(call: ComponentCall, beyond: list[str], why: str) -> BeyondError:
    name, given = call.callee.component_name, call.named
    amax = max(measure_amax(x) for key in beyond for x in iterate_tensors(given[key]))
    return BeyondError(
        f"{name} was given {' and '.join(beyond)} up to {amax:.3g}, which fp16 can't hold, and it doesn't "
        f"take fp32 there: {why}.",
        expected="Values between components stay as they are, and fp16 holds them up to 65504.",
        remedy=f"Run it under the guard, stopdown.guard(pipe, plan) or quantization(SOURCE, guard=True), "
        f"which repairs such calls, or run {name} in bf16 or fp32.",
    )

"""Calls of a component that go wrong on purpose: NaN, Inf, a bad frame or row, overflow, saturation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from stopdown.component_call_names import split_call
from stopdown.component_calls.components import find_callees
from stopdown.fold_names import name_parameters
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.call_interception import Rank, find_module, intercept
from stopdown.module_calls.callee import Callee
from stopdown.numerics import iterate_tensors
from stopdown.pipelines.tiny_pipelines import overflow_
from stopdown.runtime.fault_texts import name_axes


@contextmanager
def inject(
    pipe: Any,
    component: str,
    *,
    step: int,
    kind: Literal["nan", "inf", "row", "frame", "range", "clamp"] = "nan",
    module_path: str = "",
    lasting: bool = False,
) -> Iterator[None]:
    """Make one call of a component go wrong, inside the `with` block.

    Put it on before a guard: the fault belongs to the component, beneath what watches it.

    Args:
        component: `text_encoder`, `transformer`, `unet`, `vae.encode`, `vae.decode`…
        step: index of the call, from 0, counted from here on.
        kind: `nan`, `inf`: every seventh value of the output becomes NaN, or +Inf. `row`, `frame`:
            the last row of the batch, or the last frame (of a text the last token), becomes NaN.
            `range`: from that call on the weights are so large that fp16 overflows, as `overflow`
            of `testing.make_pipeline` makes them. `clamp`: in fp16 values reach the maximum and
            are clamped there, so that the output is finite and wrong; fp32 and bf16 stay right.
        module_path: dotted path of a submodule that it happens in; then its calls are counted. For `clamp`
            a linear or convolution, without it the first one.
        lasting: in that call and every later one as long as the module computes in the same format,
            as a fault of range does. Otherwise in that call alone: a second one is right.

    Raises:
        ValueError: there is no rule to make the component overflow, or it has no frames.
    """
    callee = next(found for found in find_callees(pipe) if found.name == component)
    with Patches() as patches:
        if kind == "range":
            _overflow_from(callee, step, patches)
        elif kind == "clamp":
            _saturate_from(callee, module_path, step, lasting, patches)
        else:
            _spoil_from(callee, module_path, step, lasting, kind, patches)
        yield


def _spoil_from(
    callee: Callee, module_path: str, step: int, lasting: bool, kind: str, patches: Patches
) -> None:
    target = callee.owner.get_submodule(module_path)
    method = "forward" if module_path else callee.method
    formats: set[torch.dtype] = set()  # in which it goes wrong

    def spoil(call: int, output: Any, kwargs: dict[str, Any]) -> None:
        tensor = next(x for x in iterate_tensors(output) if x.is_floating_point() and x.numel())
        if call == step:
            formats.add(tensor.dtype)
        if call == step or (lasting and call > step and tensor.dtype in formats):
            with torch.no_grad():
                _spoil(tensor, kind, callee, kwargs)

    patches.set_attribute(target, method, _follow_calls(getattr(target, method), spoil))


def _follow_calls(
    call: Callable[..., Any], follow: Callable[[int, Any, dict[str, Any]], None]
) -> Callable[..., Any]:
    """The same function, with each call's number, output and keyword arguments shown to `follow`."""
    calls = 0

    @functools.wraps(call)
    def followed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        output = call(*args, **kwargs)
        follow(calls, output, kwargs)
        calls += 1
        return output

    return followed


def _spoil(tensor: torch.Tensor, kind: str, callee: Callee, kwargs: dict[str, Any]) -> None:
    if kind == "row":
        tensor[-1].fill_(torch.nan)
    elif kind == "frame":
        axes = name_axes(callee, tuple(tensor.shape), kwargs)
        named = [axis for axis, name in enumerate(axes) if name in ("frame", "token")]
        if not named:
            raise ValueError(f"what {callee.name} gives has no frames: {tuple(tensor.shape)}")
        tensor.select(named[0], -1).fill_(torch.nan)
    else:
        mask = torch.arange(tensor.numel(), device=tensor.device) % 7 == 0
        tensor.masked_fill_(mask.view(tensor.shape), float(kind))


def _overflow_from(callee: Callee, step: int, patches: Patches) -> None:
    module, calls = find_module(callee), 0

    def overflowing(call: ComponentCall) -> Any:
        nonlocal calls
        if calls == step:
            for tensor in name_parameters(module).values():
                patches.defer(functools.partial(_put_values, tensor, tensor.detach().clone()))
            overflow_(module)
        calls += 1
        return call.proceed()

    intercept(callee, overflowing, patches, Rank.FAULT)


def _put_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values)


class Saturation(torch.nn.Module):
    """Clamps at the maximum of its argument's format, as authors of models do against Inf."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same values `x`, none beyond the end."""
        return x.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)


_GROWTH = 2.0**18


class _Saturating:
    """Mixed into the class of a linear or convolution: its values grow, are clamped, and shrink."""

    saturation: Saturation
    is_saturating: Callable[[], bool]

    def forward(self, *args: Any) -> torch.Tensor:
        output: torch.Tensor = super().forward(*args)  # type: ignore[misc]
        if not self.is_saturating():
            return output
        return self.saturation(output * _GROWTH) / _GROWTH


def _saturate_from(
    callee: Callee, module_path: str, step: int, lasting: bool, patches: Patches
) -> None:
    module = find_module(callee)
    layer = module.get_submodule(module_path or find_first_layer(module, callee.name))
    calls = 0

    def is_saturating() -> bool:
        nonlocal calls
        calls += 1
        return calls > step if lasting else calls == step + 1

    before = type(layer)
    patches.set_item(layer._modules, "saturation", Saturation())
    patches.set_attribute(layer, "is_saturating", is_saturating)
    patches.defer(lambda: setattr(layer, "__class__", before))
    layer.__class__ = type(before.__name__, (_Saturating, before), {})


def find_first_layer(module: torch.nn.Module, component: str) -> str:
    """Path of the first linear or convolution of a component; of the right half of an autoencoder."""
    part = {"encode": "encoder.", "decode": "decoder."}.get(split_call(component)[1], "")
    layers = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
    found = module.named_modules()
    return next(p for p, child in found if p.startswith(part) and isinstance(child, layers))

"""Helpers for tests: tiny real pipelines, overflow on demand, injected faults, untouched or not.

`make_pipeline` and `save_pipeline` give pipelines of real Diffusers classes with small random
weights; `overflow` names a component that then overflows in fp16 only. `inject` makes one call of a
component go wrong: NaN, Inf, a bad frame or row, overflow, saturation. `summing_in_fp16` makes products
sum in fp16, as some hardware and compilers do. `assert_untouched` proves that what was put on a pipeline
came off again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from stopdown.component_call_names import name_module_path, split_call
from stopdown.component_calls.call import ComponentCall
from stopdown.component_calls.call_interception import Rank, find_module, intercept
from stopdown.component_calls.components import Callee, find_callees, find_components
from stopdown.graph.capture import name_parameters
from stopdown.interception.accumulation import summing_in_fp16 as summing_in_fp16
from stopdown.interception.patches import Patches
from stopdown.numerics import iterate_tensors
from stopdown.pipelines.tiny_pipelines import build_pipeline, list_names, overflow_
from stopdown.runtime.fault_texts import name_axes
from stopdown.sources.library_messages import drop_empty_remarks

PIPELINE_NAMES = list_names()
"""What `make_pipeline` and `save_pipeline` can build."""


def make_pipeline(
    name: str,
    *,
    overflow: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A tiny pipeline of real Diffusers classes with random weights.

    Args:
        name: one of `PIPELINE_NAMES`.
        overflow: component (`transformer`, `text_encoder`, `vae`…) that overflows in fp16 only.
        seed: of the weights.
        dtype: what the weights are cast to.

    Raises:
        ValueError: the name is unknown, or there is no rule to make the component overflow.
    """
    if name not in PIPELINE_NAMES:
        raise ValueError(f"no tiny pipeline is called {name!r}; known: {', '.join(PIPELINE_NAMES)}")
    pipe = build_pipeline(name, seed=seed)
    if overflow is not None:
        overflow_(getattr(pipe, overflow))
    with Patches() as patches:
        drop_empty_remarks(patches)
        for component in _find_modules(pipe).values():
            component.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save_pipeline(
    name: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    overflow: str | None = None,
    seed: int = 0,
) -> Path:
    """The folder that a tiny pipeline was saved to, in the layout of Diffusers."""
    make_pipeline(name, overflow=overflow, seed=seed, dtype=dtype).save_pretrained(folder)
    return Path(folder)


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
            of `make_pipeline` makes them. `clamp`: in fp16 values reach the maximum and
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


@contextmanager
def assert_untouched(pipe: Any) -> Iterator[None]:
    """Assert that a pipeline leaves the `with` block as it entered it, also after an exception.

    Raises:
        AssertionError: something differs; the message lists every difference by path.
    """
    before = take_snapshot(pipe)
    try:
        yield
    finally:
        differences = compare_snapshot(before, pipe)
        if differences:
            raise AssertionError("\n".join(["the pipeline was changed:", *differences]))


@dataclass(frozen=True)
class Snapshot:
    """What a pipeline looked like: attributes of every object, and every tensor's bits.

    Attributes:
        attributes: path → attribute name → value (kept alive, compared by identity).
        contents: path → copies of the hooks and other containers.
        tensors: path → tensor object and a clone of it.
    """

    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def take_snapshot(pipe: Any) -> Snapshot:
    """What a pipeline (or a single module) looks like now.

    Cost: a copy of every parameter and buffer.
    """
    snapshot = Snapshot()
    for path, target in _find_objects(pipe):
        snapshot.attributes[path] = _read_attributes(pipe, target)
        for name, value in snapshot.attributes[path].items():
            if isinstance(value, (dict, list, set)):
                snapshot.contents[f"{path}.{name}"] = type(value)(value)
        if isinstance(target, torch.nn.Module):
            for name, tensor in _own_tensors(target):
                snapshot.tensors[f"{path}.{name}"] = (tensor, tensor.detach().clone())
    return snapshot


def compare_snapshot(before: Snapshot, pipe: Any) -> list[str]:
    """Every difference between a snapshot and the pipeline as it is now, by path."""
    after = take_snapshot(pipe)
    return [
        *_compare_attributes(before, after),
        *_compare_contents(before, after),
        *_compare_tensors(before, after),
    ]


def _find_modules(pipe: Any) -> dict[str, torch.nn.Module]:
    return {"module": pipe} if isinstance(pipe, torch.nn.Module) else find_components(pipe)


def _find_objects(pipe: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(pipe, torch.nn.Module):
        if hasattr(pipe, "__dict__"):
            yield "pipe", pipe
        for name, component in getattr(pipe, "components", {}).items():
            if hasattr(component, "__dict__") and not isinstance(component, torch.nn.Module):
                yield name, component
    for name, module in _find_modules(pipe).items():
        for path, child in module.named_modules():
            yield name_module_path(name, path), child


_SCRATCH = frozenset(
    f"_{half}{name}" for half in ("", "enc_") for name in ("conv_num", "conv_idx", "feat_map")
)
"""What the autoencoder of Wan keeps in itself from frame to frame, from its first run on."""


def _read_attributes(pipe: Any, target: Any) -> dict[str, Any]:
    """An object's own attributes; of a pipeline and its schedulers without the notes of a run."""
    if isinstance(target, torch.nn.Module):
        own = dict(vars(target))
        registry = own.get("_diffusers_hook")
        if registry is not None and not registry.hooks:
            del own["_diffusers_hook"]  # Diffusers leaves an empty one behind after any run
        return {name: value for name, value in own.items() if name not in _SCRATCH}
    is_pipe = target is pipe
    return {
        name: value
        for name, value in vars(target).items()
        if callable(value) or (is_pipe and not name.startswith("_"))
    }


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield name, tensor
    waiting = getattr(vars(module).get("_hf_hook"), "weights_map", None)
    if waiting is None:
        return
    for name, tensor in module._parameters.items():
        if tensor is not None and tensor.is_meta:  # Accelerate has its values until it is called
            yield f"{name} (waiting)", waiting[name]


def _compare_attributes(before: Snapshot, after: Snapshot) -> Iterator[str]:
    for path in sorted(before.attributes.keys() | after.attributes.keys()):
        old, new = before.attributes.get(path, {}), after.attributes.get(path, {})
        for name in sorted(old.keys() | new.keys()):
            if name not in new:
                yield f"{path}.{name} is gone"
            elif name not in old:
                yield f"{path}.{name} is new"
            elif old[name] is not new[name] and not _is_same_plain(old[name], new[name]):
                yield f"{path}.{name} is another object"


def _is_same_plain(old: Any, new: Any) -> bool:
    plain = (bool, int, float, str, bytes, tuple, type(None), torch.dtype, torch.device)
    if isinstance(old, plain) and type(old) is type(new):
        return bool(old == new)
    # A bound method is made anew at every access.
    is_bound = getattr(old, "__self__", None) is not None
    return is_bound and bool(old == new)


def _compare_contents(before: Snapshot, after: Snapshot) -> Iterator[str]:
    for path in sorted(before.contents.keys() & after.contents.keys()):
        old, new = before.contents[path], after.contents[path]
        if _identify(old) != _identify(new):
            yield f"{path} has other contents"


def _identify(container: Any) -> Any:
    """A container's keys and the identity of what is not plain data in it."""
    if isinstance(container, dict):
        return [(str(key), _identify(value)) for key, value in container.items()]
    if isinstance(container, list):
        return [_identify(value) for value in container]
    if isinstance(container, (bool, int, float, str, bytes, type(None))):
        return container
    if isinstance(container, (set, frozenset, tuple)):
        return repr(container)
    if isinstance(container, torch.Tensor) and container.is_meta:  # made anew at each call
        return container.shape, container.dtype
    return id(container)


def _compare_tensors(before: Snapshot, after: Snapshot) -> Iterator[str]:
    for path in sorted(before.tensors.keys() & after.tensors.keys()):
        (old, old_values), (new, new_values) = before.tensors[path], after.tensors[path]
        if old is not new and not new.is_meta:
            yield f"{path} is another tensor"
        if old_values.dtype != new_values.dtype:
            yield f"{path} is {new_values.dtype} and was {old_values.dtype}"
        elif old_values.device != new_values.device:
            yield f"{path} is on {new_values.device} and was on {old_values.device}"
        elif not new.is_meta and not torch.equal(_view_bits(old_values), _view_bits(new_values)):
            yield f"{path} has other values"


def _view_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)

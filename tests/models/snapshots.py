"""Whether what was put on a pipeline came off again: attributes, containers, the bits of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.component_call_names import name_module_path
from stopdown.component_calls.components import find_components


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

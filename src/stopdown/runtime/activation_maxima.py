"""Hooks that record the smallest and largest activation of some modules during a call: clamping ones
and blocks.

The guard needs the former to notice an overflow that a clamp hides, the latter for a record of maxima.
Each note is two scalars on the device. All notes of a call are read in the same transfer as the
output's own range. Blocks are the members of a component's outermost `ModuleList`s:
`transformer_blocks.7`, `encoder.block.3`, `down_blocks.0`.

Not covered: modules inside compiled code, where hooks would not run.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.component_call_names import is_inside
from stopdown.component_calls.components import list_block_paths
from stopdown.interception.module_paths import list_modules
from stopdown.interception.patches import Patches, refuse_pickling
from stopdown.interception.tracing import is_traced
from stopdown.module_calls.call_interception import find_code
from stopdown.number_formats import FP16
from stopdown.numerics import has_values, is_readable, iterate_tensors
from stopdown.operations import keeps_clamps

Bounds = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Notes(threading.local):
    """The activation ranges recorded during a component's call, separately for each thread.

    A range is the smallest and the largest value, as two scalars on the device.

    Attributes:
        clamping: path and output range of each module that clamps at fp16's maximum. For an operation that
            can turn Inf into a finite value, such as `tanh()`, a range that is large or infinite if it did.
        meant: such operations in which that is no fault, so that they aren't recorded.
        blocks: path, dtype and output range of each block.
        inputs: name of each argument, the limit up to which a plan's bounds hold for it, and its range.
        oversizes: argument → its size and the sizes that a plan's bounds hold for, in words, for each
            argument that exceeds them.
    """

    clamping: list[tuple[str, Bounds]] = field(default_factory=list)
    blocks: list[tuple[str, torch.dtype, Bounds]] = field(default_factory=list)
    inputs: list[tuple[str, float | None, Bounds]] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)
    oversizes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> Notes:
        return Notes()  # a copy of a module has the hooks of what it is made of

    def __reduce_ex__(self, protocol: object) -> str:
        refuse_pickling()

    def clear(self) -> None:
        self.clamping.clear()
        self.blocks.clear()
        self.inputs.clear()

    @property
    def bounds(self) -> list[Bounds]:
        """The ranges of the clamping modules, then of the blocks, then of the inputs."""
        seen = [seen for _, seen in self.clamping]
        return [*seen, *(seen for *_, seen in self.blocks), *(seen for *_, seen in self.inputs)]

    def note_hidden(self, operation: str, given: torch.Tensor) -> None:
        """Record the range of a tensor that an operation such as `tanh` receives and whose Inf it may hide.

        No device value is read.
        """
        if f"{operation}()" not in self.meant and is_readable(given):
            self.clamping.append((f"{operation}()", _bound(given)))

    def note_inputs(
        self, limits: Mapping[str, float], given: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Record the range of each floating argument of a call, without reading device values.

        Args:
            limits: largest magnitude of an argument, by name, up to which a plan's bounds hold.
            given: names and tensors of the arguments.
        """
        for name, tensor in given:
            is_limited = name in limits and not tensor.is_complex() and has_values(tensor)
            if is_limited or is_readable(tensor):
                self.inputs.append((name, limits.get(name), _bound(tensor)))


def put_sensors(module: torch.nn.Module, notes: Notes, patches: Patches, *, maxima: bool) -> None:
    """Hook a module's clamping submodules, so that each call records the ranges of their outputs in
    `notes`.

    Compiled modules are left out.

    Args:
        maxima: hook blocks as well.
    """
    compiled = find_compiled(module)
    for path in find_clamping(module):
        if not is_inside(path, *compiled):
            _hook(module, path, functools.partial(_note_clamp, notes, path), patches)
    for path in list_block_paths(module) if maxima else ():
        if not is_inside(path, *compiled):
            _hook(module, path, functools.partial(_note_block, notes, path), patches)


def _hook(module: torch.nn.Module, path: str, note: Any, patches: Patches) -> None:
    handle = module.get_submodule(path).register_forward_hook(note)
    patches.defer(handle.remove)


def _note_clamp(notes: Notes, path: str, module: torch.nn.Module, args: Any, output: Any) -> None:
    if is_traced():  # reading a tensor's state would break the graph
        return
    for tensor in iterate_tensors(output):
        if tensor.dtype == torch.float16 and is_readable(tensor):
            notes.clamping.append((path, _bound(tensor)))


def _note_block(notes: Notes, path: str, module: torch.nn.Module, args: Any, output: Any) -> None:
    if is_traced():
        return
    for tensor in iterate_tensors(output):
        if is_readable(tensor):
            notes.blocks.append((path, tensor.dtype, _bound(tensor)))


def _bound(tensor: torch.Tensor) -> Bounds:
    low, high = torch.aminmax(tensor.detach())
    return low, high


def find_compiled(module: torch.nn.Module) -> tuple[str, ...]:
    """List the paths of a component's modules that run as compiled code, where hooks don't run; "" for
    the component.
    """
    if not any(map(is_compiled, list_modules(module))):
        return ()
    return tuple(path for path, child in module.named_modules() if is_compiled(child))


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calls of a module run as compiled code, by `torch.compile` or its own `compile`."""
    own = vars(module)
    if type(module).__name__ == "OptimizedModule":  # its home takes seconds to import
        return True
    return find_code(module) is not None or any(
        hasattr(own.get(name), "_torchdynamo_orig_callable")
        for name in ("forward", "encode", "decode")
    )


CLAMPED_FROM = FP16.largest - 1000
"""An output of a clamping module with at least this magnitude was clamped; the value is T5's bound."""

_CLAMP = re.compile(r"\b(clamp|clip|nan_to_num)_?\(")
_END = re.compile(r"\bfinfo\b|\b(?:64[5-9]\d\d|65[0-4]\d\d|6550[0-4])(?:\.\d*)?\b|\b6\.5e\+?4\b")
"""Notations of fp16's maximum in code: `finfo`, or a number from 64500 to 65504, also as 6.5e4."""


def find_clamping(component: torch.nn.Module) -> tuple[str, ...]:
    """List the paths of the modules whose `forward` clamps at fp16's maximum, by its source code.

    T5 replaces Inf by 64504; CogView3-Plus, Flux and Qwen-Image clip to 65504. A module counts if its
    source has a `clamp`, `clip` or `nan_to_num` and such a number or `finfo`. Functions that `forward`
    calls aren't searched.
    """
    kinds: set[Any] = {type(part) for part in list_modules(component)}
    if keeps_clamps(type(component).__name__) or not any(map(_clamps, kinds)):
        return ()
    return tuple(path for path, module in component.named_modules() if _clamps(type(module)))  # type: ignore[arg-type]


@functools.cache
def _clamps(module_class: Any) -> bool:
    try:
        source = inspect.getsource(module_class.forward)
    except (OSError, TypeError, AttributeError):  # code without a file, as of TorchScript
        return False
    return bool(_CLAMP.search(source) and _END.search(source))

"""Keep pipelines from casting large activations to fp16 between components: report fp32 as a
component's `dtype`.

Some pipelines cast an encoder's output to `text_encoder.dtype` (LTX-2, Qwen-Image) or `transformer.dtype`
(Kandinsky 5, Wan) in their own code, before Stopdown sees it. If the output may overflow in fp16,
components in fp16 report fp32 instead. The values then reach the next component unchanged, which casts its
arguments itself (`entrances`).

**Catches** code that reads a component's `dtype` between calls.

**Does not catch** code that reads a parameter's dtype, or names fp16 itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from stopdown.interception.patches import CHANGING, Patches
from stopdown.interception.tracing import is_traced
from stopdown.module_calls.call_interception import is_in_call

_PLACING = (
    "accelerate.",
    "diffusers.hooks.",
    "diffusers.loaders.",
    "diffusers.models.",
    "diffusers.pipelines.pipeline_utils.",
    "diffusers.quantizers.",
    "peft.",
    "stopdown.",
    "transformers.",
)
"""Python modules that load, place and cast modules: they get the true dtype."""

_narrow: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Module in fp16 whose arguments Stopdown casts → number of pipelines for which it does; without copies."""

_wide: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Module that may return values beyond fp16's range → number of pipelines."""

_classes: dict[type, Patches] = {}
"""Classes whose property `dtype` is replaced; empty while `_wide` is."""


def state_dtypes(
    narrow: Collection[nn.Module], wide: Collection[nn.Module], patches: Patches
) -> None:
    """Keep pipelines from casting values beyond fp16's range: let fp16 modules report fp32 as their dtype.

    They do so to pipelines that contain a `wide` module, until `patches` is undone. Inside of their own
    calls, and to libraries that load and place them, they report their true dtype. So does an autoencoder
    that pipelines bring to fp32 themselves if it reports fp16 (SVD's).

    Args:
        narrow: modules whose arguments are cast at their entrance, in fp16 now or later.
        wide: modules that may return values beyond fp16.
    """
    held = WeakSet(narrow), WeakSet(wide)
    with CHANGING:
        for known, modules in zip((_narrow, _wide), held, strict=True):
            for module in modules:
                known[module] = known.get(module, 0) + 1
        _update_classes()
    patches.defer(partial(_leave, *held))


def _leave(narrow: WeakSet[nn.Module], wide: WeakSet[nn.Module]) -> None:
    with CHANGING:
        for known, modules in ((_narrow, narrow), (_wide, wide)):
            for module in modules:
                known[module] -= 1
                if not known[module]:
                    del known[module]
        _update_classes()


def _update_classes() -> None:
    kinds = {type(x) for x in _narrow} if _wide else set()
    for kind in _classes.keys() - kinds:
        _classes.pop(kind).undo()
    for kind in kinds - _classes.keys():
        stated = inspect.getattr_static(kind, "dtype", None)
        if isinstance(stated, property) and stated.fget is not None:
            _classes[kind] = Patches()
            _classes[kind].set_class_attribute(kind, "dtype", property(_make_getter(stated.fget)))


def _make_getter(original: Callable[[Any], torch.dtype]) -> Callable[[Any], torch.dtype]:
    def dtype(self: nn.Module) -> torch.dtype:
        found = original(self)
        if is_traced() or found != torch.float16 or self not in _narrow or _is_upcast(self):
            return found
        asking = sys._getframe(1)
        is_placing = f"{asking.f_globals.get('__name__')}.".startswith(_PLACING)
        is_own = is_placing or is_in_call(self) or not _is_beside_wide(self, asking)
        return found if is_own else torch.float32

    return dtype


def _is_beside_wide(module: nn.Module, frame: FrameType | None) -> bool:
    """Return whether the running code uses a module together with one that may return values beyond fp16.

    The stack is searched for an object that holds the module in an attribute, usually the pipeline, or else
    for a function that has it in a variable; its other attributes or variables are checked.

    Args:
        frame: the innermost frame to search.
    """
    is_beside: bool | None = None
    while frame is not None:
        values = list(frame.f_locals.values())
        parts = [_list_parts(value) for value in values]
        for held in parts:
            if any(x is module for x in held):
                return any(map(_is_wide, held))
        if is_beside is None and any(x is module for x in values):
            is_beside = any(_is_wide(x) for held in (values, *parts) for x in held)
        frame = frame.f_back
    return bool(_wide) if is_beside is None else is_beside  # None: nothing that is known has it


def _is_upcast(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "force_upcast", False))


def _list_parts(value: Any) -> list[Any]:
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values(), *vars(value).get("_modules", {}).values()]


def _is_wide(value: Any) -> bool:
    return isinstance(value, nn.Module) and value in _wide

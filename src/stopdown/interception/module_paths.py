"""`ModulePaths`: the stack of the submodules that are running in a component's call.

Hooks on every submodule record the paths of those that were entered and not yet left, for the thread that
registered the hooks.

Not covered: modules whose `forward` is called directly.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stopdown.interception.patches import Patches

OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
"""Attributes that every `torch.nn.Module` has; others belong to a class, or were set on an instance."""


def list_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """List a module and all of its submodules, each once, in a fifth of the time of `module.modules()`."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def list_tensor_places(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name, holding dict and key of each parameter and buffer; a tied one has several places."""
    for path, part in module.named_modules():
        for holder in (part._parameters, part._buffers):
            for key in [key for key, tensor in holder.items() if tensor is not None]:
                yield f"{path}.{key}".removeprefix("."), holder, key


class ModulePaths:
    """The paths of a component's running submodules, recorded by hooks until `patches` is undone.

    Args:
        on_enter: called with the path of each submodule after it was pushed on the stack.
        on_leave: called with the path and the output (None after an exception) after it was popped.

    Attributes:
        stack: paths, the innermost last; "" is the component itself.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        patches: Patches,
        on_enter: Callable[[str], None] = lambda path: None,
        on_leave: Callable[[str, Any], None] = lambda path, output: None,
    ) -> None:
        self.stack = [""]
        self._thread = threading.get_ident()
        self._on_enter, self._on_leave = on_enter, on_leave
        for path, part in module.named_modules():
            if path:
                enter = functools.partial(self._enter, path)
                patches.defer(part.register_forward_pre_hook(enter, prepend=True).remove)
                patches.defer(part.register_forward_hook(self._leave, always_call=True).remove)

    @property
    def current(self) -> str:
        """The path of the innermost running module."""
        return self.stack[-1]

    def _enter(self, path: str, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.stack.append(path)
        self._on_enter(path)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if (
            len(self.stack) > 1 and threading.get_ident() == self._thread
        ):  # a hook in front of ours may have raised
            self._on_leave(self.stack.pop(), output)


def casts_weights(module: torch.nn.Module) -> bool:
    """Return whether a module casts its weights to the input's dtype at each call, as ComfyUI's layers do.

    Such a module computes in the dtype of its arguments, so its weights keep their stored dtype.
    """
    return any(getattr(part, "comfy_cast_weights", False) for part in list_modules(module))

"""Copy modules for tracing, with functions that were assigned to their parts bound to the copy.

`copy.deepcopy` doesn't copy functions, so a function in the copy would call parts of the original. A trace
would then record the original's weights as constants, into which no scale can be folded.

**Catches** functions and methods assigned to a part, and hooks, with their closures and defaults: the
module's parts and tensors, methods of parts, further functions, and short lists and mappings of those.

**Does not catch** functions of classes and of Python modules; parts that an object outside the module
holds, unless the function is a method of it.
"""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

_MOST_ITEMS = 64


def copy_module(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """Return a deep copy of a module whose assigned functions and hooks refer to the copy's parts.

    Args:
        memo: initial memo of `copy.deepcopy`: id of an object to its copy.
    """
    made = copy.deepcopy(module, memo)
    binder = _Binder(memo)
    for part in module.modules():
        copied = memo.get(id(part))
        for name, value in list(vars(part).items()) if copied is not None else ():
            value = getattr(getattr(value, "stopdown_stack", None), "original", value)
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                vars(copied)[name] = binder.bind(value)
        for name in ("_forward_hooks", "_forward_pre_hooks") if copied is not None else ():
            for number, hook in getattr(part, name).items():
                if isinstance(hook, FunctionType):
                    getattr(copied, name)[number] = binder.bind(hook)
    return made


class _Binder:
    """Replaces a module's parts and tensors by their copies in functions' closures and defaults."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo, self._bound = memo, dict[int, Any]()

    def bind(self, value: Any) -> Any:
        """Return a part's or tensor's copy, or a function, container or partial that refers to copies.

        Any other value is returned unchanged.
        """
        if id(value) in self._bound:
            return self._bound[id(value)]
        if isinstance(value, (torch.nn.Module, torch.Tensor)):
            return self._memo.get(id(value), value)
        if isinstance(value, FunctionType):
            return self._bind_function(value)
        if isinstance(value, MethodType):
            owner = value.__self__
            is_module = isinstance(owner, torch.nn.Module)  # perhaps an adapter that holds a part
            known = self._memo.get(id(owner), owner)
            owner = copy.deepcopy(owner, self._memo) if is_module else known
            return MethodType(self.bind(value.__func__), owner)
        if type(value) is functools.partial:
            named = {name: self.bind(x) for name, x in value.keywords.items()}
            return functools.partial(self.bind(value.func), *map(self.bind, value.args), **named)
        if type(value) in (list, tuple) and len(value) <= _MOST_ITEMS:
            return type(value)(map(self.bind, value))
        if type(value) is dict and len(value) <= _MOST_ITEMS:
            return {name: self.bind(x) for name, x in value.items()}
        return value

    def _bind_function(self, function: FunctionType) -> FunctionType:
        cells = function.__closure__ or ()
        if not (cells or function.__defaults__ or function.__kwdefaults__):
            return function
        known = tuple(CellType() for _ in cells)
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, known or None
        )
        self._bound[id(function)] = made  # its closure may contain it
        made.__defaults__ = self.bind(function.__defaults__)
        made.__kwdefaults__ = self.bind(function.__kwdefaults__)
        vars(made).update(vars(function))
        for cell, one in zip(cells, known, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # the cell is still empty
                continue
            one.cell_contents = self.bind(content)
        return made

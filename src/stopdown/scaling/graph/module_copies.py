"""Copy a module with the functions that somebody set on its parts.

`copy.deepcopy` leaves functions as they are, so the copy's code would call the parts of the module that it
was made of: in a trace their weights are constants, to which no exponent belongs.

**Catches** functions and methods that are set on a part, and hooks, with what they close over and take as
defaults: the module's parts and tensors, methods of parts, further functions, and short lists and mappings
of those.
**Does not catch** functions of classes and of modules of Python; parts that an object from outside of the
module holds, unless the function is a method of it.
"""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

_MOST_ITEMS = 64


def copy_module(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """Copy a module.

    Args:
        memo: what `copy.deepcopy` is to begin with, by the number of what is copied.
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
    """Leads functions to the copies of what they know."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo, self._bound = memo, dict[int, Any]()

    def bind(self, value: Any) -> Any:
        """Return the counterpart of a value in the copied module; the value itself if it has none."""
        if id(value) in self._bound:
            return self._bound[id(value)]
        if isinstance(value, (torch.nn.Module, torch.Tensor)):
            return self._memo.get(id(value), value)
        if isinstance(value, FunctionType):
            return self._bind_function(value)
        if isinstance(value, MethodType):
            owner = value.__self__
            is_module = isinstance(owner, torch.nn.Module)  # maybe an adapter that holds a part
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
        self._bound[id(function)] = made  # it may close over itself
        made.__defaults__ = self.bind(function.__defaults__)
        made.__kwdefaults__ = self.bind(function.__kwdefaults__)
        vars(made).update(vars(function))
        for cell, one in zip(cells, known, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # nothing is there yet
                continue
            one.cell_contents = self.bind(content)
        return made

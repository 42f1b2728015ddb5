"""Find the modules of any program, which isn't a pipeline, by walking its attributes.

Not covered: modules behind properties, closures and slots: give them by name, in a dict.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stopdown.errors import InputError

_MOST_OBJECTS = 10_000
_DEEPEST = 5
_OPAQUE = (
    *(str, bytes, int, float, complex, type(None)),
    *(torch.Tensor, torch.dtype, torch.device),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
_TAKEN = (
    'Accepted are a Diffusers pipeline, a module, a dict such as {"unet": module, "vae.decode": '
    '(vae, "decode")}, and an object that holds modules.'
)


class Parts(NamedTuple):
    """The modules and named methods of a program.

    Attributes:
        modules: attribute path → module, for every module; a program that is a module has its class's name.
        methods: name in the program's dict → module and name of its method.
    """

    modules: dict[str, torch.nn.Module]
    methods: dict[str, tuple[torch.nn.Module, str]]


def find_parts(program: Any) -> Parts:
    """Find the modules of a program, and the methods that it names if it is a dict.

    Raises:
        InputError: the program has no module, or a named method doesn't exist.
    """
    held = dict(program) if isinstance(program, Mapping) else {"": program}
    methods = {
        str(name): value
        for name, value in held.items()
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)
    }
    modules: dict[str, torch.nn.Module] = {}
    for name, value in held.items():
        if str(name) not in methods:
            modules |= _name_modules(value, str(name))
    for name, (owner, method) in methods.items():
        is_module = isinstance(owner, torch.nn.Module)
        if not is_module or not callable(getattr(owner, method, None)):
            why = f"has no method {method}" if is_module else "is no module"
            raise _make_error(f"`{name}`: a {type(owner).__name__} {why}.")
    if not held:
        raise _make_error("An empty dict holds no module.")
    return Parts(modules, methods)


def find_modules(program: Any) -> dict[str, torch.nn.Module]:
    """Find the outermost modules reachable through an object's attributes, the nearest first.

    Args:
        program: any object; for a module, the result is the module itself under "".

    Returns:
        Attribute path → module.
    """
    found: dict[str, torch.nn.Module] = {}
    known: set[int] = set()
    level: list[tuple[str, Any]] = [("", program)]
    for _ in range(_DEEPEST):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in known or len(known) > _MOST_OBJECTS:
                continue
            known.add(id(value))
            if isinstance(value, torch.nn.Module):
                found[path] = value
            else:
                below += [(_join(path, name), held) for name, held in _list_held(value)]
        level = below
    return found


def _name_modules(value: Any, name: str) -> dict[str, torch.nn.Module]:
    """Map names to all modules reachable from a value; each module once, by its shortest path."""
    outermost = find_modules(value)
    if not outermost:
        if isinstance(value, (str, Path)):
            raise _make_error(f"{str(value)[:60]!r} is a name, not a model: load it first.")
        what = f"`{name}`" if name else "The argument"
        raise _make_error(f"{what} ({type(value).__name__}) holds no module.")
    named: dict[str, torch.nn.Module] = {}
    known: set[int] = set()
    for path, module in outermost.items():
        for inner, part in module.named_modules():
            if id(part) not in known:
                known.add(id(part))
                named[_join(name, _join(path, inner)) or type(part).__name__] = part
    return named


def _make_error(what: str) -> InputError:
    return InputError(
        what,
        expected=_TAKEN,
        remedy="Give the module that the program calls, or a method of it that is called.",
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _list_held(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _OPAQUE):
        return
    if isinstance(value, Mapping):
        yield from ((str(key), held) for key, held in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), held) for index, held in enumerate(value))
    else:
        yield from dict(getattr(value, "__dict__", {})).items()

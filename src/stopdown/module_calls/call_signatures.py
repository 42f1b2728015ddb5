"""Signatures of calls: the arguments that differ from the method's defaults, and their kinds.

Exponents hold for the branches that code took, and optional arguments select others: a tensor that is
added to a scaled one must be scaled too, and an additional output must be scaled back. Dtypes and values
of tensors aren't part of a signature. Sizes (`list_argument_sizes`) are separate, because most select no
other branch.

**Catches** which tensors are passed, also in lists, tuples, mappings and dataclasses; their kind and number
of dimensions; flags, strings, integers, members of enums and kinds of objects; floats that are 0, with
which code skips work; flags that the module's config decides.

**Does not catch** branches on any other float or on the values of a tensor; integers that are times or
strengths by their names; attributes of a module (`module_settings`).
"""

from __future__ import annotations

import enum
import fnmatch
import functools
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_CONTAINER = "return_dict"
"""An argument that changes only the type in which the same tensors are returned."""

_AMOUNTS = (
    *("*time*", "*step*", "*sigma*", "*scale*", "*strength*", "*guidance*", "*size*", "*length*"),
    *("*frame*", "*height*", "*width*", "*ratio*", "*fps*", "*seed*", "t", "s"),
)
"""Patterns of names of numbers that select no branch; each step of a run may have its own."""

_TIMES = ("*time*", "*step*", "*sigma*", "t", "s")
"""Patterns of names of floats that are 0 at the end of a run without selecting another branch."""

_SIZES = ("*size*", "*length*", "*frame*", "*height*", "*width*")
"""Patterns of names of integers that are sizes."""

_MOST_NUMBERS = 32

Sizes = tuple[tuple[int, ...], ...]
"""The shapes of a call's tensors and its integers that are sizes, sorted by the arguments' names."""


def sign_call(
    module: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return the signature of a method call, such as `forward(encoder_hidden_states[3d], sample[4d])`.

    Cost: some microseconds, without a device synchronisation.
    """
    names, defaults, flags = _read_parameters(type(module), method)  # type: ignore[arg-type]
    given = _name_arguments(names, args, kwargs)
    config = getattr(module, "config", None)
    parts: list[str] = []
    for name, value in given.items():
        if value is None or name == _CONTAINER:
            continue
        kind = type(value)
        default = defaults.get(name)
        if kind in _PLAIN and (
            value == default
            if type(default) is kind
            else default is None and name in flags and getattr(config, name, None) is value
        ):
            continue
        parts += describe_argument(name, value)
    for name in flags if config is not None else ():
        if given.get(name) is None and getattr(config, name, None) is True:
            parts.append(f"{name} of its configuration")
    return f"{method}({', '.join(sorted(parts))})"


def _name_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    given = dict(zip(names, args, strict=False))
    given.update(kwargs)
    given.update((f"*{i}", x) for i, x in enumerate(args[len(names) :]))
    return given


def list_argument_sizes(
    module: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Sizes:
    """Return the sizes of a method call's arguments, sorted by the arguments' names.

    Cost: some microseconds.
    """
    names = _read_parameters(type(module), method)[0]  # type: ignore[arg-type]
    given = _name_arguments(names, args, kwargs)
    found: list[tuple[int, ...]] = []
    for name in sorted(given):
        _add_sizes(found, name, given[name])
    return tuple(found)


def _add_sizes(found: list[tuple[int, ...]], name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.append(tuple(value.shape))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add_sizes(found, f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add_sizes(found, name, item)
    elif type(value) is int and _is_like(name, _SIZES):
        found.append((value,))


def resize_call(
    module: torch.nn.Module,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sizes: Sizes,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a call's arguments with its tensors in other sizes, on `meta`, to run it without values.

    Return None if the sizes don't match the arguments.

    Args:
        sizes: from `list_argument_sizes`.
    """
    names = _read_parameters(type(module), method)[0]  # type: ignore[arg-type]
    given, left = _name_arguments(names, args, kwargs), iter(sizes)

    def resize(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(next(left), dtype=value.dtype, device="meta")
        if isinstance(value, Mapping):
            return {key: resize(f"{name}.{key}", item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)([resize(name, item) for item in value])
        return next(left)[0] if type(value) is int and _is_like(name, _SIZES) else value

    try:
        made = {name: resize(name, given[name]) for name in sorted(given)}
    except StopIteration:
        return None
    if next(left, None) is not None:
        return None
    places = [*names, *(f"*{i}" for i in range(len(args) - len(names)))][: len(args)]
    return tuple(made.pop(name) for name in places), made


def list_other_arguments(owner: type, signatures: Collection[str]) -> tuple[str, ...]:
    """List a class's arguments that may select other branches and that none of the known signatures
    contains.

    Args:
        owner: the class of the module.
        signatures: from `sign_call`.
    """
    found: dict[str, None] = {}
    for method in sorted({x.partition("(")[0] for x in signatures}):
        mine = [x for x in signatures if x.startswith(f"{method}(")]
        known = {name for x in mine for name in re.findall(r"[(, ](\w+)", x)}
        names, defaults, flags = _read_parameters(owner, method)
        for name in dict.fromkeys((*names, *defaults, *flags)):
            if not (name in known or name == _CONTAINER or _is_amount(name)):
                found[name if method == "forward" else f"{method}'s {name}"] = None
    return tuple(found)


_PLAIN = (bool, int, float, str)


@functools.cache
def _read_parameters(
    owner: type, method: str
) -> tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]:
    """Return a method's positional parameters, its defaults, and the flags that the config may decide."""
    parameters = list(inspect.signature(getattr(owner, method)).parameters.values())[1:]
    named = [x for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    defaults = {x.name: x.default for x in named if x.default is not x.empty}
    asked = (x.name for x in named if x.name.startswith(("output_", "return_", "use_")))
    flags = tuple(x for x in asked if defaults.get(x, ...) is None and x != _CONTAINER)
    places = tuple(x.name for x in named if x.kind is not x.KEYWORD_ONLY)
    return places, defaults, flags


def describe_argument(name: str, value: Any) -> Iterator[str]:
    """Yield what a call signature says of an argument: its name and kind, as `mask[2d]`, also of nested
    values.
    """
    if isinstance(value, torch.Tensor):
        kind = "bool" if value.dtype == torch.bool else f"{max(value.dim(), 1)}d"
        yield f"{name}[{kind}]"
    elif isinstance(value, (Mapping, list, tuple)):
        yield from _describe_items(name, value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{name}:{type(value).__name__}"
        for field in fields(value):
            yield from describe_argument(f"{name}.{field.name}", getattr(value, field.name, None))
    elif isinstance(value, (bool, str, enum.Enum)):
        yield f"{name}={value}"
    elif isinstance(value, int):
        yield name if _is_amount(name) else f"{name}={value}"
    elif isinstance(value, float):
        yield name if value or _is_like(name, _TIMES) else f"{name}=0"
    elif value is not None:
        yield f"{name}:{value if isinstance(value, torch.dtype) else type(value).__name__}"


def _describe_items(name: str, value: Any) -> Iterator[str]:
    if not value:
        if not isinstance(value, tuple):  # a call may fill it
            yield f"{name}={value}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from describe_argument(f"{name}.{key}", item)
    elif len(value) <= _MOST_NUMBERS and all(type(x) in (bool, int, str) for x in value):
        yield name if _is_amount(name) else f"{name}={list(value)}"
    elif _has_zero(value) and not _is_like(name, _TIMES):
        yield f"{name}=[{', '.join('…' if x else '0' for x in value)}]"
    else:
        yield from sorted({part for item in value for part in describe_argument(f"{name}[]", item)})


def _has_zero(value: Any) -> bool:
    """Return whether a short sequence holds only integers and floats, at least one of them 0."""
    return (
        len(value) <= _MOST_NUMBERS and all(type(x) in (int, float) for x in value) and 0 in value
    )


def _is_amount(name: str) -> bool:
    return _is_like(name, _AMOUNTS)


@functools.cache
def _is_like(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name.rpartition(".")[2], pattern) for pattern in patterns)

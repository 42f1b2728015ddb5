"""The signature of a call: which arguments it has beside its module's defaults, and of what kind.

Exponents are found for the path that code takes, and optional arguments lead it elsewhere: what is added
to a scaled value has to be scaled, and what leaves at another place has to be scaled back. Dtypes and
values of tensors are no part of it. Sizes (`list_argument_sizes`) are beside it: most lead code nowhere
else.

**Catches** tensors that are given or not, also in lists, tuples and mappings; their kind and number of
dimensions; flags, words, whole numbers and objects; fractions that are 0, by which code leaves work out;
flags that a configuration decides.
**Does not catch** a path that any other fraction or the values of a tensor decide; whole numbers whose name
says that they are times or strengths; attributes of a module (`module_settings`).
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

_CONTAINER = "return_dict"
"""Says in what the same tensors are returned."""

_AMOUNTS = (
    *("*time*", "*step*", "*sigma*", "*scale*", "*strength*", "*guidance*", "*size*", "*length*"),
    *("*frame*", "*height*", "*width*", "*ratio*", "*fps*", "*seed*", "t", "s"),
)
"""Names of numbers that lead no code elsewhere: each step of a run may have its own."""

_TIMES = ("*time*", "*step*", "*sigma*", "t", "s")
"""Names of fractions that are 0 at the end of a run, as at any other of its steps."""

_SIZES = ("*size*", "*length*", "*frame*", "*height*", "*width*")
"""Names of whole numbers that are sizes."""

_MOST_NUMBERS = 32

Sizes = tuple[tuple[int, ...], ...]
"""The shapes of a call's tensors, and its numbers that are sizes, in the order of its arguments' names."""


def sign_call(
    module: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return the signature of a method call: `forward(encoder_hidden_states[3d], sample[4d])`.

    Cost: some microseconds; no device is asked.
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
    """Return the sizes of the arguments of a call of a module's method, in the order of their names.

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
    """Return the same arguments in other sizes, tensors on `meta`; None if the sizes do not match them."""
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
    """List the arguments of the signatures' methods that may change the code path and that none has."""
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
    """Return a method's positional names, its defaults, and the flags that a configuration decides."""
    parameters = list(inspect.signature(getattr(owner, method)).parameters.values())[1:]
    named = [x for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    defaults = {x.name: x.default for x in named if x.default is not x.empty}
    asked = (x.name for x in named if x.name.startswith(("output_", "return_", "use_")))
    flags = tuple(x for x in asked if defaults.get(x, ...) is None and x != _CONTAINER)
    places = tuple(x.name for x in named if x.kind is not x.KEYWORD_ONLY)
    return places, defaults, flags


def describe_argument(name: str, value: Any) -> Iterator[str]:
    """Describe an argument by name and kind; of a nest of them each kind once."""
    if isinstance(value, torch.Tensor):
        kind = "bool" if value.dtype == torch.bool else f"{max(value.dim(), 1)}d"
        yield f"{name}[{kind}]"
    elif isinstance(value, (Mapping, list, tuple)):
        yield from _describe_items(name, value)
    elif isinstance(value, (bool, str)):
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
    """Return whether a short sequence holds only integers and floats, one of them 0."""
    return (
        len(value) <= _MOST_NUMBERS and all(type(x) in (int, float) for x in value) and 0 in value
    )


def _is_amount(name: str) -> bool:
    return _is_like(name, _AMOUNTS)


@functools.cache
def _is_like(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name.rpartition(".")[2], pattern) for pattern in patterns)

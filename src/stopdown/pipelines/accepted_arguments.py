"""Arguments that a pipeline's call reads, from its signature and the code behind its `**kwargs`.

Diffusers' calls often end in `**kwargs` for a few deprecated names, and ignore every other name in
silence. So a misspelt option would change nothing, and nobody would know.

**Does not catch** names of calls that pass their `**kwargs` on, or whose code can't be read.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Any

from stopdown.errors import OptionError

_NUMBERS = {int, float, "int", "float"}
"""Annotations of a number, as types or as text."""


def read_signature(pipeline_class: type) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a pipeline's call."""
    taken = inspect.signature(pipeline_class.__call__).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: x for n, x in taken.items() if n != "self" and x.kind not in kinds}


def refuse_unknown(pipeline_class: type, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a pipeline's call doesn't read, and text where it expects a number.

    Raises:
        OptionError: with the closest name, if there is one.
    """
    taken, keywords = read_signature(pipeline_class), read_keywords(pipeline_class.__call__)
    for name, value in arguments.items():
        if name in taken:
            _refuse_text(pipeline_class, taken[name], value)
        elif keywords is not None and name not in keywords:
            near = difflib.get_close_matches(name, taken, n=1)
            raise OptionError(
                f"{pipeline_class.__name__} doesn't take the argument {name}.",
                expected=f"Its call takes {', '.join(taken)}.",
                remedy=f"Give {near[0]} instead." if near else f"Leave {name} out.",
            )


@functools.cache
def read_keywords(call: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names that a function reads from its `**kwargs`; empty without such a parameter.

    Return None if it may read any name: it hands its `**kwargs` on, or its source can't be read.
    """
    parameters = inspect.signature(call).parameters.values()
    own = next((x.name for x in parameters if x.kind == inspect.Parameter.VAR_KEYWORD), None)
    if own is None:
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(call))))
    except (OSError, TypeError, SyntaxError):  # a function without a file
        return None
    uses = sum(isinstance(x, ast.Name) and x.id == own for x in ast.walk(tree))
    names = [name for x in ast.walk(tree) if (name := _read_name(x, own)) is not None]
    return frozenset(names) if len(names) == uses else None


def _read_name(node: ast.AST, own: str) -> str | None:
    """Return the name that an expression looks up in a mapping; None for other expressions."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=place), attr="get" | "pop"),
            args=[ast.Constant(value=str(name)), *_],
        ) if place == own:
            return name
        case ast.Subscript(value=ast.Name(id=place), slice=ast.Constant(value=str(name))) if (
            place == own
        ):
            return name
        case ast.Compare(
            left=ast.Constant(value=str(name)),
            ops=[ast.In() | ast.NotIn()],
            comparators=[ast.Name(id=place)],
        ) if place == own:
            return name
    return None


def _refuse_text(pipeline_class: type, parameter: inspect.Parameter, value: Any) -> None:
    """Refuse text for an argument that the signature states to be a number or a function."""
    if not isinstance(value, str):
        return
    name, has_number = parameter.name, type(parameter.default) in (int, float)
    kinds = {*(typing.get_args(parameter.annotation) or (parameter.annotation,))} - {type(None)}
    if has_number or kinds <= _NUMBERS:
        default = f"{parameter.default:g}" if has_number else "1"
        raise OptionError(
            f"{pipeline_class.__name__} expects a number for {name}, not {value!r}.",
            remedy=f"Give a number, such as {name}={default}.",
        )
    if "Callable" in str(parameter.annotation):
        raise OptionError(
            f"{pipeline_class.__name__} expects a function for {name}, not {value!r}.",
            remedy=f"Leave {name} out, or call the pipeline from Python.",
        )

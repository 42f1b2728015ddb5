"""Names of calls and of places in them, written and read here alone.

A call is a component, `transformer`, or one method of it, `vae.decode`. A module path is a call or a
component, and a module inside: `transformer:blocks.1.ff`. In code both parts have fields of their own;
records, messages and the command line hold these texts. A component of a pipeline has no dot in its
name; where another program's has, its calls know their names, and these functions are not asked.
"""

from __future__ import annotations

from collections.abc import Iterable

QUANT_METHOD = "stopdown"
"""What `quant_method` is in a `config.json` that carries a plan."""


def name_call(component: str, method: str = "") -> str:
    """Name a call: `vae.decode`; the component alone for its `forward` or without a method."""
    return component if method in ("", "forward") else f"{component}.{method}"


def name_component(call: str) -> str:
    """Return the component in the name of a call: `vae` for `vae.decode`."""
    return split_call(call)[0]


def split_call(name: str) -> tuple[str, str]:
    """Split the name of a call into component and method; the method of a component's name is ""."""
    component, _, method = name.partition(".")
    return component, method


def name_module_path(call: str, path: str) -> str:
    """Name a module in a call: `transformer:blocks.1.ff`; the call alone for the component itself."""
    return f"{call}:{path}" if path else call


def split_module_path(text: str) -> tuple[str, str]:
    """Split a module path into the call and the path inside it, "" for the component itself."""
    call, _, path = text.partition(":")
    return call, path


def is_inside(path: str, *ancestors: str) -> bool:
    """Return whether a dotted path is one of the given paths or lies inside one."""
    return any(not x or path == x or path.startswith(f"{x}.") for x in ancestors)


def list_outermost(paths: Iterable[str]) -> list[str]:
    """List the paths that do not lie inside another one of them."""
    known = list(paths)
    return [path for path in known if not is_inside(path, *(x for x in known if x != path))]

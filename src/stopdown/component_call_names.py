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
    """`vae.decode`; the component alone for its `forward`, or for no method."""
    return component if method in ("", "forward") else f"{component}.{method}"


def name_component(call: str) -> str:
    """`vae` of `vae.decode`."""
    return split_call(call)[0]


def split_call(name: str) -> tuple[str, str]:
    """Component and method of a call's name; the method is "" where the name is a component's."""
    component, _, method = name.partition(".")
    return component, method


def name_module_path(call: str, path: str) -> str:
    """`transformer:blocks.1.ff`; the call alone for the component itself, whose path is ""."""
    return f"{call}:{path}" if path else call


def split_module_path(text: str) -> tuple[str, str]:
    """Call and path inside of a module path; the path is "" for the component itself."""
    call, _, path = text.partition(":")
    return call, path


def is_inside(path: str, *ancestors: str) -> bool:
    """Whether a dotted path is that of one of these modules, or of something inside one."""
    return any(not x or path == x or path.startswith(f"{x}.") for x in ancestors)


def list_outermost(paths: Iterable[str]) -> list[str]:
    """The paths that do not lie inside another one of them."""
    known = list(paths)
    return [path for path in known if not is_inside(path, *(x for x in known if x != path))]

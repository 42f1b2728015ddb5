"""Names of component calls, and of modules inside them; only these functions build and parse them.

A call is named by its component, `transformer`, or by component and method, `vae.decode`. A module path is
a component or call, followed by the path of a module in it: `transformer:blocks.1.ff`. Code has separate
fields for the parts; records, messages and the command line use these names. A component of a pipeline has
no dot in its name. In other programs it may have one; their calls know their parts, and these functions are
not used.
"""

from __future__ import annotations

from collections.abc import Iterable

QUANT_METHOD = "stopdown"
"""Value of `quant_method` in a `config.json` that contains a plan."""


def name_call(component: str, method: str = "") -> str:
    """Return the name of a call: `vae.decode`, or just the component for `forward` or no method."""
    return component if method in ("", "forward") else f"{component}.{method}"


def name_component(call: str) -> str:
    """Return the component in the name of a call: `vae` for `vae.decode`."""
    return split_call(call)[0]


def split_call(name: str) -> tuple[str, str]:
    """Split the name of a call into component and method; the method is "" if the name has none."""
    component, _, method = name.partition(".")
    return component, method


def name_module_path(call: str, path: str) -> str:
    """Return the module path of a module in a call: `transformer:blocks.1.ff`; the call if `path` is ""."""
    return f"{call}:{path}" if path else call


def split_module_path(text: str) -> tuple[str, str]:
    """Split a module path into the call and the path inside it, which is "" for the component itself."""
    call, _, path = text.partition(":")
    return call, path


def is_inside(path: str, *ancestors: str) -> bool:
    """Return whether a dotted path is one of the given paths or lies inside one."""
    return any(not x or path == x or path.startswith(f"{x}.") for x in ancestors)


def list_outermost(paths: Iterable[str]) -> list[str]:
    """Return the dotted paths that do not lie inside another one of them."""
    known = list(paths)
    return [path for path in known if not is_inside(path, *(x for x in known if x != path))]

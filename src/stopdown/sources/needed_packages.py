"""Packages that a pipeline needs and that are not here, read from its classes before anything is loaded.

Diffusers and Transformers put an object that raises in the place of a class whose packages are missing, and
name the packages there. The module of a pipeline imports some under `if is_ftfy_available():`, and its code
calls them anyway.

**Catches** both, and processors that make a processor of videos of their own.
**Does not catch** imports inside of functions. A module that asks a second time whether the package is here
does without it, and is left to do so.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any

from stopdown.errors import SourceError
from stopdown.sources.component_classes import find_class
from stopdown.sources.descriptions import read_description
from stopdown.sources.source import Source

_ASKS = re.compile(r"is_(\w+)_available")
_PACKAGES = {"opencv": "opencv-python"}
"""Names that the libraries have no words on how to install for."""

_INSTALLS = re.compile(r"pip install ([\w.-]+)")


def refuse_missing_packages(source: Source) -> None:
    """Refuse a pipeline whose classes need packages that are not installed.

    Args:
        source: without weights, or with them.
    """
    pipeline_class = find_class("diffusers", source.pipeline_class)
    path = source.described / "model_index.json"
    index = read_description(path) if path.is_file() else {}
    off = {name for name, value in index.items() if value is False or value == [None, False]}
    found = dict.fromkeys(list_missing(pipeline_class, off))
    for library, class_name in source.components.values():
        with contextlib.suppress(SourceError):  # refused when it is loaded, with what is wrong
            found |= dict.fromkeys(list_missing(find_class(library, class_name)))
    if found:
        names = " and ".join(found)
        raise SourceError(
            f"{pipeline_class.__name__} needs {names}, which this Python does not have.",
            expected="Its code or its processors call what is in there.",
            remedy=f"Install with: pip install {' '.join(found)}",
        )


def list_missing(kind: Any, off: Collection[str] = ()) -> list[str]:
    """List the missing packages that a class of Diffusers or Transformers needs, by their pip names.

    Args:
        off: switches of the class that are off: packages for them alone are not needed.
    """
    names = _list_backends(kind)
    if "video_processor" in inspect.signature(kind.__init__).parameters:
        from transformers import video_processing_utils

        names += _list_backends(video_processing_utils.BaseVideoProcessor)
    own = [x for x in kind.__mro__ if x.__module__.startswith("diffusers.pipelines.")]
    for module in dict.fromkeys(x.__module__ for x in own):
        names += _list_unguarded(sys.modules[module], off)
    return [_name_package(name) for name in dict.fromkeys(names)]


def _list_backends(kind: type) -> list[str]:
    """List the missing backends of a placeholder class."""
    asked = vars(kind).get("_backends") or vars(kind).get("__backends") or ()
    return [x for x in asked if isinstance(x, str) and not _is_here(x)]


def _is_here(name: str) -> bool:
    known = [table[name][0] for table in _list_tables() if name in table]
    return not known or any(asks() for asks in known)


def _name_package(name: str) -> str:
    for table in _list_tables():
        found = _INSTALLS.search(table[name][1]) if name in table else None
        if found is not None:
            return found[1]
    return _PACKAGES.get(name, name)


def _list_tables() -> Iterator[Any]:
    from diffusers.utils import import_utils as of_diffusers
    from transformers.utils import import_utils as of_transformers

    yield of_diffusers.BACKENDS_MAPPING
    yield of_transformers.BACKENDS_MAPPING


def _list_unguarded(module: Any, off: Collection[str]) -> list[str]:
    """List optional packages that a module imports only if present but uses in any case."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, SyntaxError):
        return []
    asked = [x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and _ASKS.fullmatch(x.id)]
    found = []
    for node in tree.body:
        name = _find_guard(node)
        if name is None or asked.count(f"is_{name}_available") != 1:
            continue
        assert isinstance(node, ast.If)
        imported, flags = _list_imports(node.body), {*_list_flags(node.body), *off}
        lacking = {x for x in imported if _is_lacking(module, x)}
        if any(_is_used(tree, node, x, flags) for x in lacking):
            found.append(name)
    return found


def _find_guard(node: ast.stmt) -> str | None:
    """Return the package in a guard: `ftfy` in `if is_ftfy_available():`; None for other statements."""
    test = node.test if isinstance(node, ast.If) else None
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
        found = _ASKS.fullmatch(test.func.id)
        return found[1] if found else None
    return None


def _list_imports(body: list[ast.stmt]) -> set[str]:
    imports = [x for x in body if isinstance(x, (ast.Import, ast.ImportFrom))]
    return {(x.asname or x.name).partition(".")[0] for one in imports for x in one.names}


def _list_flags(body: list[ast.stmt]) -> set[str]:
    """Return the names that the guard sets to tell whether the package is present: `XLA_AVAILABLE`."""
    targets = [x for one in body if isinstance(one, ast.Assign) for x in one.targets]
    return {x.id for x in targets if isinstance(x, ast.Name)}


def _is_lacking(module: Any, name: str) -> bool:
    """Check whether a name is absent, or a class of the module's own that only raises."""
    value: Any = getattr(module, name, None)
    if value is None:
        return True
    if getattr(value, "__module__", None) != module.__name__ or not isinstance(value, type):
        return False
    code = getattr(vars(value).get("__init__"), "__code__", None)
    return code is not None and "ImportError" in code.co_names


def _is_used(tree: ast.Module, guard: ast.stmt, name: str, flags: set[str]) -> bool:
    """Check whether code uses a name outside of the guard, and not under a flag that the guard sets."""
    waiting: list[ast.AST] = [node for node in tree.body if node is not guard]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If):
            asked = {x.id for x in ast.walk(node.test) if isinstance(x, ast.Name)}
            if asked & flags:
                continue
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            return True
        waiting.extend(ast.iter_child_nodes(node))
    return False

"""Detection of missing packages that a pipeline needs, from its classes, before anything is loaded.

If packages are missing, Diffusers and Transformers replace a class by a placeholder that raises and lists
them. A pipeline's module imports some packages under `if is_ftfy_available():`, but its code calls them
unconditionally.

**Catches** both, and processors that create a video processor.
**Does not catch** imports inside functions. If a module checks a package's presence twice, it is assumed to
work without it.
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
"""pip names of packages for which the libraries have no installation message."""

_INSTALLS = re.compile(r"pip install ([\w.-]+)")


def refuse_missing_packages(source: Source) -> None:
    """Raise `SourceError` if a pipeline's classes need packages that are not installed.

    Args:
        source: the source, whose weights are not needed.
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
            f"{pipeline_class.__name__} needs {names}, which this Python doesn't have.",
            expected="Its code or its processors call what is in there.",
            remedy=f"Install with: pip install {' '.join(found)}",
        )


def list_missing(kind: Any, off: Collection[str] = ()) -> list[str]:
    """List the missing packages that a class of Diffusers or Transformers needs, by their pip names.

    Args:
        off: names of the pipeline's options that are off; packages used only under these aren't needed.
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
    """List the missing packages for lack of which a library has only a placeholder of a class.

    The list is empty for a real class.
    """
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
    """List packages that a module imports only if present but uses unconditionally.

    Args:
        off: names of options that are off; code under these is ignored.
    """
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
    """Return the package that an `if` checks: `ftfy` in `if is_ftfy_available():`; None for others."""
    test = node.test if isinstance(node, ast.If) else None
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
        found = _ASKS.fullmatch(test.func.id)
        return found[1] if found else None
    return None


def _list_imports(body: list[ast.stmt]) -> set[str]:
    imports = [x for x in body if isinstance(x, (ast.Import, ast.ImportFrom))]
    return {(x.asname or x.name).partition(".")[0] for one in imports for x in one.names}


def _list_flags(body: list[ast.stmt]) -> set[str]:
    """Return the names that an `if` sets when a package is installed, such as `XLA_AVAILABLE`.

    Args:
        body: the statements of the `if`.
    """
    targets = [x for one in body if isinstance(one, ast.Assign) for x in one.targets]
    return {x.id for x in targets if isinstance(x, ast.Name)}


def _is_lacking(module: Any, name: str) -> bool:
    """Return whether a name is missing in a module, or is a placeholder class that raises `ImportError`."""
    value: Any = getattr(module, name, None)
    if value is None:
        return True
    if getattr(value, "__module__", None) != module.__name__ or not isinstance(value, type):
        return False
    code = getattr(vars(value).get("__init__"), "__code__", None)
    return code is not None and "ImportError" in code.co_names


def _is_used(tree: ast.Module, guard: ast.stmt, name: str, flags: set[str]) -> bool:
    """Return whether a module uses an imported name even if the package of that name is missing.

    Uses inside of the `if` that imports it don't count, nor those under a flag that says so.

    Args:
        tree: the module's code.
        guard: the `if`, such as `if is_ftfy_available():`.
        flags: names that are only true if the package is there, such as `XLA_AVAILABLE`.
    """
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

"""Names of Diffusers' classes, read from its source text without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

from stopdown.errors import SourceError


def list_pipeline_classes() -> tuple[str, ...]:
    """List the names of the pipeline classes of the installed Diffusers without importing it."""
    return list_library_classes(r"Pipeline\w*")


@functools.cache
def list_library_classes(ending: str) -> tuple[str, ...]:
    """List the names of the installed Diffusers' classes that end with a pattern, without importing it.

    Args:
        ending: regular expression, such as `Pipeline\\w*`; "" for all classes.
    """
    text = (find_diffusers() / "__init__.py").read_text(encoding="utf-8")
    names = set(re.findall(rf'"([A-Z]\w*{ending})"', text))
    return tuple(sorted(name for name in names if not name.startswith(("Flax", "Onnx"))))


@functools.cache
def list_pipeline_modules() -> frozenset[str]:
    folder = find_diffusers() / "pipelines"
    return frozenset(path.name for path in folder.iterdir() if path.is_dir())


def list_modules_with(class_name: str) -> list[str]:
    """List Diffusers' pipeline packages whose `__init__.py` mentions a class."""
    return [
        name
        for name in sorted(list_pipeline_modules())
        if (path := find_diffusers() / "pipelines" / name / "__init__.py").is_file()
        and re.search(rf"\b{re.escape(class_name)}\b", path.read_text(encoding="utf-8"))
    ]


@functools.cache
def is_deprecated(class_name: str) -> bool:
    """Return whether Diffusers can't load a class, because it's only among the deprecated pipelines."""
    folder = find_diffusers() / "pipelines" / "deprecated"
    texts = (path.read_text(encoding="utf-8") for path in folder.glob("*/__init__.py"))
    found = any(re.search(rf'"{re.escape(class_name)}"', text) for text in texts)
    return (
        found and not list_modules_with(class_name) and class_name not in list_library_classes("")
    )


def find_diffusers() -> Path:
    found = importlib.util.find_spec("diffusers")
    if found is None or not found.submodule_search_locations:
        raise SourceError("Diffusers isn't installed.", remedy="Run: pip install diffusers")
    return Path(next(iter(found.submodule_search_locations)))


def makes_itself(pipeline_class: str, name: str) -> bool:
    """Return whether a pipeline's `__init__` makes a component by default, as LongCat's does a scheduler.

    The index names such a component, but `save_pretrained` writes no folder for it. This is read from the
    source text of the class; an inherited `__init__` is not considered.
    """
    taken = _read_arguments(pipeline_class)
    if taken is None or name in list_optional_components(pipeline_class):
        return False
    return name in _list_defaults(taken)


def needs_component(pipeline_class: str, name: str) -> bool:
    """Return whether a pipeline's own `__init__` needs a component, by the source text of the class."""
    taken = _read_arguments(pipeline_class)
    if taken is None or name in list_optional_components(pipeline_class):
        return False
    names = {x.arg for x in (*taken.args, *taken.kwonlyargs)}
    return name in names - _list_defaults(taken)


def _read_arguments(pipeline_class: str) -> ast.arguments | None:
    """Read the arguments of a class's own `__init__`; None without one."""
    found = _read_class(pipeline_class)
    functions = (x for x in found.body if isinstance(x, ast.FunctionDef)) if found else ()
    return next((x.args for x in functions if x.name == "__init__"), None)


def list_optional_components(pipeline_class: str) -> list[str]:
    """List the components that a pipeline runs without, by the source text of its class."""
    found = _read_class(pipeline_class)
    assigned = [x for x in found.body if isinstance(x, ast.Assign)] if found is not None else []
    return [y for x in assigned if _is_optional(x) for y in ast.literal_eval(x.value)]


def _is_optional(node: ast.Assign) -> bool:
    return any(isinstance(x, ast.Name) and x.id == "_optional_components" for x in node.targets)


def _list_defaults(given: ast.arguments) -> set[str]:
    """Return the names of the arguments of a function definition that have a default value."""
    last = given.args[len(given.args) - len(given.defaults) :]
    named = (x for x, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value)
    return {x.arg for x in (*last, *named)}


@functools.cache
def _read_class(class_name: str) -> ast.ClassDef | None:
    line = re.compile(rf"^class {re.escape(class_name)}\b", re.MULTILINE)
    for name in list_modules_with(class_name):
        for path in sorted((find_diffusers() / "pipelines" / name).glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if line.search(text):
                tree = ast.parse(text).body
                return next(x for x in tree if isinstance(x, ast.ClassDef) and x.name == class_name)
    return None

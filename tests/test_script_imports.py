"""Scripts beside the package: whatever they take from it is there, in functions that rarely run as well."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "training", "integrations")
SCRIPTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def find_missing(tree: ast.AST) -> Iterator[str]:
    """What a script imports from the package that is not in it."""
    for node in ast.walk(tree):
        for home, name in _list_taken(node):
            if not hasattr(importlib.import_module(home), name) and not _is_module(
                f"{home}.{name}"
            ):
                yield f"line {node.lineno}: {home} has no {name}"


def _list_taken(node: Any) -> list[tuple[str, str]]:
    """Modules of the package and the names that a statement or expression takes from them."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "stopdown":
        return [(str(node.module), alias.name) for alias in node.names]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [("stopdown", node.attr)] if node.value.id == "stopdown" else []
    return []


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_script_imports_is_there(path: Path) -> None:
    """A benchmark or a training script breaks here, and not when somebody wants its figures."""
    assert list(find_missing(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_what_is_missing_is_found() -> None:
    """A name that moved is named with its line; a submodule is no missing name."""
    text = (
        "def f():\n    from stopdown.frames.media import draw\n"
        "from stopdown.scaling.graph import nodes"
    )
    assert list(find_missing(ast.parse(text))) == ["line 2: stopdown.frames.media has no draw"]
    text = "import stopdown\nstopdown.load\nstopdown.paint('a')"
    assert list(find_missing(ast.parse(text))) == ["line 3: stopdown has no paint"]

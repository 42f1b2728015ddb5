"""Scripts beside the package: whatever they take from it is there, in functions that rarely run as well."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("training/*.py")])


def find_missing(tree: ast.AST) -> Iterator[str]:
    """What a script imports from the package that is not in it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("stopdown"):
            continue
        module = importlib.import_module(str(node.module))
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name) and not _is_module(f"{node.module}.{name}"):
                yield f"line {node.lineno}: {node.module} has no {name}"


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
    text = "def f():\n    from stopdown.media import draw\nfrom stopdown.graph import nodes"
    assert list(find_missing(ast.parse(text))) == ["line 2: stopdown.media has no draw"]

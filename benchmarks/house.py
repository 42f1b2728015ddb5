"""Count what the package consists of: lines, modules, functions used once, dataclasses, parameters, tests.

Lines are physical lines. A private function is used once if its name is read once in its module and in no
other module; calls through tables count as reads. Parameters leave out `self` and `cls`. Each row is one
revision, counted from its files in git, so that rows stay comparable:

    python benchmarks/house.py bded623 HEAD
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "house.json"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_revision(revision: str, folder: str) -> dict[str, str]:
    """Return the Python files below a folder of a revision, by path."""
    listed = _git("ls-tree", "-r", "--name-only", revision, "--", folder).splitlines()
    return {path: _git("show", f"{revision}:{path}") for path in listed if path.endswith(".py")}


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def count_sources(sources: Mapping[str, str]) -> dict[str, int]:
    """Count a package's lines, modules and definitions.

    Args:
        sources: path to the text of a module.
    """
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    nodes = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    functions = [node for found in nodes.values() for node in found if isinstance(node, Function)]
    return {
        "lines": sum(text.count("\n") for text in sources.values()),
        "modules": len(sources),
        "functions": len(functions),
        "private_functions_used_once": _count_used_once(nodes),
        "dataclasses": sum(_is_dataclass(node) for found in nodes.values() for node in found),
        "parameters": sum(len(list(_list_parameters(node))) for node in functions),
        "docstring_lines": sum(
            _count_docstring(node) for found in nodes.values() for node in found
        ),
    }


def _count_used_once(nodes: Mapping[str, list[ast.AST]]) -> int:
    reads = {path: Counter(filter(None, map(_read_name, found))) for path, found in nodes.items()}
    everywhere = sum(reads.values(), Counter())
    return sum(
        reads[path][node.name] == everywhere[node.name] == 1
        for path, found in nodes.items()
        for node in found
        if isinstance(node, Function) and node.name.startswith("_") and not node.name.endswith("__")
    )


def _read_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def _list_parameters(node: Function) -> Iterator[str]:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    yield from (one.arg for one in named if one is not None and one.arg not in ("self", "cls"))


def _count_docstring(node: ast.AST) -> int:
    if not isinstance(node, ast.Module | ast.ClassDef | Function):
        return 0
    text = ast.get_docstring(node, clean=False)
    return 0 if text is None else text.count("\n") + 1


def count_revision(revision: str) -> dict[str, object]:
    """Count one revision's package, tests and benchmark scripts."""
    tests = read_revision(revision, "tests")
    scripts = read_revision(revision, "benchmarks")
    return {
        "revision": _git("rev-parse", "--short", revision).strip(),
        "date": _git("log", "-1", "--format=%cs", revision).strip(),
        **count_sources(read_revision(revision, "src")),
        "test_lines": sum(text.count("\n") for text in tests.values()),
        "benchmark_scripts": len(scripts),
        "benchmark_lines": sum(text.count("\n") for text in scripts.values()),
    }


def main() -> None:
    """Print a table of the revisions, and store it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="*", default=["HEAD"])
    revisions = parser.parse_args().revisions
    rows = [count_revision(revision) for revision in revisions]
    for key in rows[0]:
        print(f"{key:32}", *(f"{row[key]!s:>12}" for row in rows))
    command = f"python benchmarks/house.py {' '.join(revisions)}"
    RESULT.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

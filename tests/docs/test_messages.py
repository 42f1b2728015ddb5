"""Words of messages: people contract, and one voice runs through pages and messages."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
WRITTEN_OUT = re.compile(r"\bcannot\b|\b(?:do|does|did|is|are|was|were|has|have|had|could) not\b")
QUOTED = (
    "is not None",
    "shapes cannot be multiplied",
    "were not initialized from the model checkpoint",
    "were not used when initializing",
    "Decoding without tiling has not been implemented",
    "(?i)",
)
"""Code, patterns, and messages of other libraries."""


def list_strings(tree: ast.AST) -> Iterator[str]:
    """List the strings of a module that are not docstrings, f-strings' parts included."""
    said = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def list_texts(table: Any) -> Iterator[str]:
    """List the texts of a table, without patterns that match other programs' messages."""
    if isinstance(table, str):
        yield table
    elif isinstance(table, dict):
        for name, value in table.items():
            if name not in ("messages", "match", "needs", "name"):
                yield from list_texts(value)
    elif isinstance(table, list):
        for value in table:
            yield from list_texts(value)


def find_written_out(texts: Iterator[str]) -> list[str]:
    """Return the texts in which a person would contract, and which quote nobody."""
    return [x for x in texts if WRITTEN_OUT.search(x) and not any(y in x for y in QUOTED)]


def test_messages_contract() -> None:
    """No message writes out what pages contract: a reader takes both for one author's."""
    modules, tables = sorted(SOURCE.rglob("*.py")), sorted(SOURCE.rglob("*.toml"))
    assert (len(modules) > 200, len(tables) > 20) == (True, True)
    found = {
        path.name: find_written_out(list_strings(ast.parse(path.read_text(encoding="utf-8"))))
        for path in modules
    }
    found |= {
        path.name: find_written_out(list_texts(tomllib.loads(path.read_text(encoding="utf-8"))))
        for path in tables
    }
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_a_message_that_is_written_out_is_found() -> None:
    """In a string and in a table; a docstring and a pattern are not."""
    code = 'def f():\n    """It is not."""\n    raise E(f"{x} cannot be read", "it isn\'t here")\n'
    assert find_written_out(list_strings(ast.parse(code))) == [" cannot be read"]
    table = {"a": [{"what": "It does not fit.", "messages": ["it is not"]}]}
    assert find_written_out(list_texts(table)) == ["It does not fit."]

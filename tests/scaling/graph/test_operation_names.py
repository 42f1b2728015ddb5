"""Names of operations: each name in a table of them exists in torch.

The tables are found in the source: every collection of strings, and every text of several words, of
which seven in ten are operations of ATen. A name that torch does not have stands for a rule that is never
applied, without a word.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stopdown
from stopdown.operations import read_calls

SOURCE = Path(stopdown.__file__).parent
NO_OPERATIONS = {"cpu", "cuda", "mps"}
"""Words of tables that are not about operations, although ATen has two of them."""


@functools.cache
def is_aten(name: str) -> bool:
    """Whether a captured graph can have an operation of this name."""
    return hasattr(torch.ops.aten, name) or name == "getitem"


def is_torch(name: str) -> bool:
    """Whether code can call a function or method of this name, or give a tensor to it."""
    places = (torch, torch.Tensor, torch.nn.functional)
    return is_aten(name) or any(hasattr(place, name) for place in places) or name.startswith("__")


def read_words(node: ast.AST) -> list[str]:
    """The names that a literal holds: of a collection, of a dictionary's keys, of a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = node.value.split()
        return words if all(word.isidentifier() for word in words) else []
    entries: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        entries = node.keys
    elif isinstance(node, (ast.Set, ast.List, ast.Tuple)):
        entries = list(node.elts)
    values = [x.value for x in entries if isinstance(x, ast.Constant)]
    return [x for x in values if isinstance(x, str) and x.isidentifier()]


def read_compared(node: ast.AST) -> list[str]:
    """The names that a node's operation is compared with."""
    if not isinstance(node, ast.Compare) or "operation(" not in ast.unparse(node.left):
        return []
    single = [x.value for x in node.comparators if isinstance(x, ast.Constant)]
    return [x for x in single if isinstance(x, str)] + [
        word for x in node.comparators for word in read_words(x)
    ]


def find_tables(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and names of each table of operations in a file of Python."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        words = read_words(node)
        known = [word for word in words if is_aten(word)]
        if len(known) >= max(2, 0.7 * len(words)) and not set(known) <= NO_OPERATIONS:
            yield node.lineno, words  # type: ignore[attr-defined]
        if words := read_compared(node):
            yield node.lineno, words  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_each_name_of_an_operation_exists_in_torch() -> None:
    """Tables beside that of `operations` name functions and methods that torch has."""
    unknown = [
        f"{path.relative_to(SOURCE)}:{line}: {x}"
        for path in sorted(SOURCE.rglob("*.py"))
        # the last two have names of rules
        if path.name not in ("operations.py", "propagation.py", "row_lengths.py")
        for line, words in find_tables(path)
        for x in words
        if not is_torch(x)
    ]
    assert unknown == []


def test_the_tables_are_found() -> None:
    """What a check observes is among what is looked at, and a wrong name would be found."""
    path = SOURCE / "dtype_rules" / "observations.py"
    found = {word for _, words in find_tables(path) for word in words}
    assert found >= {"masked_fill", "where", "arange"}
    assert not is_torch("upsample_nearest_exact2d")


def test_what_stands_beside_the_table_exists_in_torch() -> None:
    """The functions and methods by which Python code calls operations."""
    calls = read_calls()
    named = {*calls.asks, *calls.makes, *calls.called, *calls.called.values()}
    assert len(named) > 40
    assert [x for x in sorted(named) if not is_torch(x)] == []


@pytest.mark.parametrize("package", ["runtime", "scaling"])
def test_code_that_reads_graphs_asks_for_kinds(package: str) -> None:
    """It compares no operation's name: the table says of which kind it is."""
    found = [
        f"{path.name}:{node.lineno}: {words}"  # type: ignore[attr-defined]
        for path in sorted((SOURCE / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (words := read_compared(node))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["operation(x) == 'linear'", "operation(n).rstrip('_') in ('add', 'sub')"]
)
def test_a_comparison_is_found(text: str) -> None:
    """The search sees a name beside `==`, and names in a collection."""
    assert any(read_compared(node) for node in ast.walk(ast.parse(text)))

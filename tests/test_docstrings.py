"""The first words of docstrings: verbs in the imperative, as readers of a list of functions want them."""

from __future__ import annotations

import ast

from test_layers import SOURCES, Sources, parse

NO_VERBS = {
    "a", "after", "all", "an", "around", "as", "at", "before", "bits", "by", "bytes", "during",
    "each", "every", "everything", "findings", "formats", "how", "if", "it", "its", "largest", "names",
    "no", "none", "of", "one", "path", "paths", "seconds", "so", "some", "that", "the", "these",
    "they", "this", "those", "true", "values", "what", "when", "where", "whether", "which",
    "while", "who", "why", "with", "without",
}  # fmt: skip
"""First words of sentences that say what something is, and not what a function does."""


def list_nouns(sources: Sources) -> list[str]:
    """Return the functions whose docstrings do not begin with a verb; properties may be noun phrases."""
    return [
        f"{name}.{node.name}: {text.splitlines()[0]}"
        for name, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("property" in ast.unparse(x) for x in node.decorator_list)
        and (text := ast.get_docstring(node) or "")
        and (text.startswith("`") or text.split()[0].strip(",.:;").lower() in NO_VERBS)
    ]


def test_docstrings_begin_with_a_verb() -> None:
    """A function's docstring says what it does, and not what something is."""
    assert list_nouns(SOURCES) == []


def test_a_noun_is_found() -> None:
    """A relative clause, an article and an example are found; a verb and a property are not."""
    found = list_nouns(
        parse(
            a='def f():\n    """What it gives."""',
            b='def f():\n    """The sum."""',
            c='def f():\n    """`a.b` of two names."""',
            d='def f():\n    """Return the sum."""',
            e='class A:\n    @property\n    def f(self):\n        """The sum."""',
        )
    )
    assert [x.split(":")[0] for x in found] == ["a.f", "b.f", "c.f"]

"""Display of records: a short text in a console, tables in a notebook."""

from __future__ import annotations

import dataclasses
import html
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_WIDTH = 80
_LINES = 22
"""Lines of a `repr`, which leaves two for the prompt in a terminal of 80 by 24."""

_TEXT = 60
"""Number of characters above which texts are cut."""

_ROWS = 12
"""Number of entries of a tuple that are listed; the rest is counted."""


class Displayed:
    """Base class of records, with a `repr` that fits a terminal, and tables in notebooks.

    Both leave out fields with default values, and cut long ones. The record itself is complete.
    """

    def __rich_repr__(self) -> Iterator[tuple[str, Any]]:
        yield from _list_fields(self)

    def __repr__(self) -> str:
        try:
            from rich.pretty import pretty_repr
        except ImportError:  # it comes with the command line
            fields = ", ".join(f"{name}={value!r}" for name, value in _list_fields(self))
            return f"{type(self).__name__}({_shorten(fields)})"
        for depth in (4, 3, 2, 1):
            text: str = pretty_repr(
                self, max_width=_WIDTH, max_length=6, max_string=_TEXT, max_depth=depth
            )
            lines = [
                line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
                for line in text.split("\n")
            ]
            if len(lines) <= _LINES:
                break
        return "\n".join(lines if len(lines) <= _LINES else [*lines[: _LINES - 2], "    …", ")"])

    def __str__(self) -> str:
        return repr(self) if (summary := self.summarise()) is None else summary.format()

    def _repr_html_(self) -> str:
        title, summary = f"<b>{type(self).__name__}</b>", self.summarise()
        shown = _make_table(self) if summary is None else summary.format_html()
        return f"<div style='max-width:100%;overflow-x:auto'>{title}{shown}</div>"

    def summarise(self) -> Summary | None:
        """Return the summary that the command line shows; None to show only the fields."""
        return None


@dataclasses.dataclass(frozen=True)
class Summary:
    """A table with notes below it.

    Attributes:
        headings: headings of the columns.
        rows: texts of the cells, as many in each row as there are headings.
        notes: pairs of a name, or "", and a text about it.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[tuple[str, str], ...] = ()

    def format(self) -> str:
        """Format the table and the notes as plain text, in 80 columns unless the table is wider."""
        lines = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        pairs = (zip(line, widths, strict=True) for line in lines)
        table = ["  ".join(text.ljust(width) for text, width in pair).rstrip() for pair in pairs]
        notes = [textwrap.fill(text, _WIDTH) for text in self.list_sentences()]
        return "\n\n".join(["\n".join(table), *notes])

    def list_sentences(self) -> list[str]:
        """List the notes as texts, each with its name in front."""
        return [f"{name}: {said}" if name else said for name, said in self.notes]

    def format_html(self) -> str:
        """Format the table and the notes as HTML."""
        rows = "".join(_make_row(row, "td") for row in self.rows)
        notes = "".join(
            "<p style='text-align:left;overflow-wrap:anywhere'>"
            f"{f'<b>{html.escape(name)}</b>: ' if name else ''}{html.escape(said)}</p>"
            for name, said in self.notes
        )
        return f"<table>{_make_row(self.headings, 'th')}{rows}</table>{notes}"


def _make_row(texts: Iterable[str], tag: str) -> str:
    cells = (f"<{tag} style='text-align:left'>{html.escape(text)}</{tag}>" for text in texts)
    return f"<tr>{''.join(cells)}</tr>"


def _list_fields(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the fields that differ from their defaults."""
    for entry in dataclasses.fields(record):
        value = getattr(record, entry.name)
        default = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        if default is dataclasses.MISSING or value != default:
            yield entry.name, value


def _make_table(record: Any) -> str:
    rows = "".join(
        "<tr><th style='text-align:left;vertical-align:top;white-space:nowrap'>"
        f"{name.replace('_', ' ')}</th>"
        f"<td style='text-align:left;overflow-wrap:anywhere'>{_format_value(value)}</td></tr>"
        for name, value in _list_fields(record)
        if not _is_digest(value)
    )
    return f"<table>{rows}</table>"


def _format_value(value: Any) -> str:
    """Format one value as HTML: a table of records, a list, or its text."""
    if isinstance(value, tuple) and value and all(isinstance(item, Displayed) for item in value):
        return _make_list(value)
    if isinstance(value, Displayed):
        return _make_table(value)
    if isinstance(value, Mapping):
        value = tuple(f"{name}: {item}" for name, item in value.items())
    if isinstance(value, tuple):
        shown = [_format_value(item) for item in value[:_ROWS]]
        return "<br>".join([*shown, *_count_rest(value)])
    if isinstance(value, float):
        return f"{value:.4g}"
    return html.escape(_shorten(str(value)))


def _is_digest(value: Any) -> bool:
    """Return whether a value is a hash, which isn't shown as it means nothing to a reader."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


_DIGEST = re.compile("[0-9a-f]{40,}")


def _shorten(text: str) -> str:
    """Cut a long text between two words; for data without spaces, return its number of characters."""
    most = 4 * _TEXT
    if len(text) <= most:
        return text
    start, space, _ = text[:most].rpartition(" ")
    return f"{start} …" if space else f"{len(text):,} characters"


def _make_list(records: tuple[Any, ...]) -> str:
    """Format records of one class as an HTML table with a row for each record."""
    shown = [pair for item in records for pair in _list_fields(item)]
    told = {name for name, value in shown if not _is_digest(value)}
    names = [entry.name for entry in dataclasses.fields(records[0]) if entry.name in told]
    head = "".join(
        f"<th style='white-space:nowrap'>{name.replace('_', ' ')}</th>" for name in names
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td style='text-align:left;overflow-wrap:anywhere;min-width:6em'>"
            f"{_format_value(getattr(item, name))}</td>"
            for name in names
        )
        + "</tr>"
        for item in records[:_ROWS]
    )
    return f"<table><tr>{head}</tr>{rows}</table>{' '.join(_count_rest(records))}"


def _count_rest(items: tuple[Any, ...]) -> list[str]:
    return [f"and {len(items) - _ROWS} more"] if len(items) > _ROWS else []

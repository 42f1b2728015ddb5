"""`stopdown report`: the page of a record that was written before; no model and no torch."""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stopdown.app.compare_command import check_page, write_page
from stopdown.app.flags import RecordJsonOption
from stopdown.comparison.records import Comparison
from stopdown.outputs import find_free
from stopdown.records import RunRecord, to_json

_MEDIA = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png"}
_MOST_BYTES = 22_000_000


@dataclass(frozen=True)
class ReportOptions:
    """Make the page of a record again: of a comparison, or of one run of generate."""

    record: Annotated[
        Path,
        typer.Argument(
            metavar="RECORD.json", help="What compare or generate wrote beside its output."
        ),
    ]
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Page to write, ending in .html, also over another page of Stopdown. Without it the "
            "record's name, numbered when that is taken.",
        ),
    ] = None
    json: RecordJsonOption = False


def main(options: ReportOptions) -> int:
    """Run the command and print the record."""
    from stopdown.app.comparison_cards import print_record, strip_pictures
    from stopdown.app.progress import open_console

    found, page = report(options.record, options.output)
    if options.json:
        sys.stdout.write(to_json(strip_pictures(found)))
    else:
        print_record(found, page, open_console())
    return 0


def report(record: Path, output: Path | None) -> tuple[Comparison | RunRecord, Path]:
    """The record, and the page that was written of it.

    Args:
        record: JSON of `compare`, or of `generate`, whose output is shown when it lies beside.
        output: page to write; None takes the record's name, numbered when that is taken.

    Raises:
        InputError: it is no record; the page cannot be written.
    """
    from stopdown.report.pages import read_any, render_comparison, render_run

    if output is not None:
        check_page(output)
    found = read_any(record)
    page = output or find_free(name_page(record))
    check_page(page)
    if isinstance(found, Comparison):
        text = render_comparison(found)
    else:
        text = render_run(found, _read_media(record))
    return found, write_page(page, text, numbered=output is None)


def name_page(record: Path) -> Path:
    """`circle.html` for `circle.mp4.json`, `report.html` for `report.html.json`."""
    stem = record.with_suffix("") if record.suffix == ".json" else record
    return stem.with_suffix(".html")


def _read_media(record: Path) -> tuple[str, str] | None:
    """The output that a run's record stands beside, when a page can hold it."""
    output = record.with_suffix("")
    kind = _MEDIA.get(output.suffix)
    if kind is None or not output.is_file() or output.stat().st_size > _MOST_BYTES:
        return None
    return kind, base64.b64encode(output.read_bytes()).decode("ascii")

"""Implementation of `stopdown report`: make an HTML page from a stored record, without PyTorch."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stopdown.app.flags import CommandOptions, ForceOption
from stopdown.comparison.records import Comparison
from stopdown.files.outputs import find_free, find_record_path
from stopdown.records import RunRecord
from stopdown.report.pages import (
    check_page,
    read_any,
    render_comparison,
    render_run,
    write_page,
)

if TYPE_CHECKING:
    from rich.console import Console

_MOST_BYTES = 22_000_000


@dataclass(frozen=True)
class ReportOptions(CommandOptions):
    """Make an HTML page from the record of a run or a comparison.

    Examples:
      stopdown report video.mp4.json -o video.html
      stopdown report report.html.json -o again.html
    """

    record: Annotated[
        Path,
        typer.Argument(
            metavar="RECORD.json",
            help="Record that generate or compare wrote next to its output; you can also give "
            "the output.",
        ),
    ]
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Page to write, ending in .html. By default named after the record, with a "
            "number if that exists.",
        ),
    ] = None
    force: ForceOption = False


def run_report_command(options: ReportOptions) -> int:
    from stopdown.app.cards import print_record, strip_pictures
    from stopdown.app.progress import print_result

    found, page = report(options.record, options.output, force=options.force)

    def draw(console: Console) -> None:
        print_record(found, page, console)
        named = name_page(find_record(options.record))
        if options.output is None and page != named:
            console.print(f"{named} already exists and was left as it is.", soft_wrap=True)

    print_result(options, strip_pictures(found), draw, name=page)
    return 0


def report(
    record: Path, output: Path | None, *, force: bool = False
) -> tuple[Comparison | RunRecord, Path]:
    """Render a stored record as an HTML page; return the record and the path of the page.

    Args:
        record: JSON file that `compare` or `generate` wrote. The output of `generate` is embedded if it is
            in the same folder.
        output: page to write; None for the record's name, with a number if that file exists.
    """
    if output is not None:
        check_page(output, force=force)
    record = find_record(record)
    found = read_any(record)
    page = output or find_free(name_page(record))
    check_page(page)
    if isinstance(found, Comparison):
        text = render_comparison(found)
    else:
        text = render_run(found, _read_media(record))
    return found, write_page(page, text, numbered=output is None)


def find_record(path: Path) -> Path:
    """Return the path of a record: the path itself, or the record beside an output or page."""
    if not path.name or path.suffix == ".json":
        return path
    beside = find_record_path(path)
    return beside if beside.is_file() else path


def name_page(record: Path) -> Path:
    """Return the default page of a record: `circle.html` for `circle.mp4.json`.

    `report.html.json` becomes `report.html`.
    """
    stem = record.with_suffix("") if record.suffix == ".json" else record
    return stem.with_suffix(".html")


_TYPES = {
    **{".mp4": "video/mp4", ".webm": "video/webm", ".wav": "audio/wav", ".flac": "audio/flac"},
    **{".gif": "image/gif", ".png": "image/png", ".webp": "image/webp"},
    **dict.fromkeys((".jpg", ".jpeg"), "image/jpeg"),
}
"""Media types of the files that a page can embed. `mimetypes` is not used, as it differs by system."""


def _read_media(record: Path) -> tuple[str, str] | None:
    """Return the media type and base64 of the output beside a run's record.

    Returns None if there is no such file, a page cannot show its type, or it is too large.
    """
    output = record.with_suffix("")
    kind = _TYPES.get(output.suffix.lower())
    if kind is None or not output.is_file() or output.stat().st_size > _MOST_BYTES:
        return None
    return kind, base64.b64encode(output.read_bytes()).decode("ascii")

"""Rendering of records into HTML pages that are one file each and need no network."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from stopdown.batch.records import BatchRecord
from stopdown.comparison.records import (
    PARTING,
    SIGNS,
    WORDS,
    Cell,
    Comparison,
    Variant,
    find_median,
    find_tightest,
    format_bits,
    format_number,
    format_ratio,
    pick_cells,
    summarise_measure,
)
from stopdown.devices.environment import require_package
from stopdown.errors import InputError
from stopdown.files.json_files import UnreadableError, read_json_table
from stopdown.files.outputs import check_suffix, check_target, write_numbered, written_beside
from stopdown.number_formats import format_bytes
from stopdown.records import RunRecord, convert_record
from stopdown.report import figures

STAGES = ("encode", "denoise", "decode", "all")

_KINDS = ("comparison", "run")
_MOST_BYTES = 2**28
"""Size limit of a record; a comparison has 30 MB of pictures, and numbers for every call."""


_GIVE_RECORD = "Give the record: video.mp4.json for video.mp4, report.html.json for report.html."


def read_any(path: Path) -> Comparison | RunRecord:
    """Read the record in a JSON file; its `kind` decides the type.

    Raises:
        InputError: the file is not a record, has no report, or contradicts itself.
    """
    if not os.path.lexists(path):
        raise InputError(
            f"The file {path} doesn't exist.",
            expected="generate and compare write a JSON record next to their output.",
            remedy=_GIVE_RECORD,
        )
    try:
        raw = read_json_table(path, most_bytes=_MOST_BYTES)
    except UnreadableError as error:
        raise InputError(
            f"The file {path} isn't a record of Stopdown: {error}.",
            expected="generate and compare write a JSON record next to their output.",
            remedy=_GIVE_RECORD,
        ) from error
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputError(
            f"The file {path} holds a record of the kind {ascii(kind)[:60]}, which has no report.",
            expected=f"Kinds with a report are {', '.join(_KINDS)}.",
            remedy="Give the .json file next to an output of generate or compare.",
        )
    if kind == "run":
        return convert_record(raw, RunRecord)
    found = convert_record(raw, Comparison)
    if problem := find_problem(found):
        raise InputError(
            f"The comparison {path} is inconsistent: {problem}.",
            expected="Its parts must match, as compare writes them.",
            remedy="It may have been edited. Make it again: stopdown compare SOURCE -o report.html",
        )
    return found


def find_problem(comparison: Comparison) -> str:
    """Describe the first inconsistency of a comparison, or a value that cannot be drawn; "" if none."""
    names = [variant.name for variant in comparison.variants]
    cells = [cell for row in comparison.rows for cell in row.cells]
    heats = [heat for variant in comparison.variants for heat in variant.heats]
    verdicts = {entry.verdict for entry in comparison.variants} | {cell.verdict for cell in cells}
    checks = {
        f"the verdict {min(verdicts - set(WORDS), default='')[:60]!r} is unknown": verdicts
        <= set(WORDS),
        "two precisions have one name": len(set(names)) == len(names),
        "a prompt has other precisions than the comparison": all(
            [cell.precision for cell in row.cells] == names for row in comparison.rows
        ),
        "an error of the latents is below 0": all(
            error is None or error >= 0 for cell in cells for error in cell.latents_rel_err
        ),
        "a map of headroom doesn't have one row for each block": all(
            len(heat.module_paths) == len(heat.bits) for heat in heats
        ),
    }
    return next((said for said, is_right in checks.items() if not is_right), "")


def render_comparison(comparison: Comparison) -> str:
    versions = comparison.machine.get("versions")
    return _read_template("comparison.html").render(
        version=versions.get("stopdown") or "" if isinstance(versions, dict) else "",
        title=f"{comparison.source}: {', '.join(v.name for v in comparison.variants)}",
        c=comparison,
        summaries=[_summarise(v, comparison) for v in comparison.variants],
        chart=figures.draw_growth(comparison),
        maps=figures.draw_maps(comparison),
        bins=figures.BINS,
        pictures=[
            {
                "prompt": row.prompt,
                "seed": row.seed,
                "line": row.line,
                "reference": row.reference,
                "cells": [_describe_cell(cell) for cell in row.cells],
            }
            for row in comparison.rows
        ],
        partings=_list_partings(comparison),
        parting_limit=PARTING,
        plans=[v for v in comparison.variants if v.plan is not None],
        facts=_list_facts(comparison.machine),
        stages=STAGES,
    )


def render_run(record: RunRecord, media: tuple[str, str] | None = None) -> str:
    """Render one run of `generate` as an HTML page.

    Args:
        media: media type and base64 of its output, such as `("video/mp4", "AAAA…")`; None to leave it out.
    """
    whole = sum(record.stages_s.values()) or 1.0
    return _read_template("run.html").render(
        title=f"{record.source}: {record.request.get('prompt') or record.pipeline}",
        r=record,
        media=media,
        maps=figures.draw_run_maps(record.maxima),
        bins=figures.BINS,
        shares=[(name, s, 100 * s / whole) for name, s in record.stages_s.items()],
        facts=_list_facts(record.machine),
    )


def render_batch(record: BatchRecord) -> str:
    return _read_template("batch.html").render(
        title=f"{record.source}: {len(record.items)} items",
        b=record,
        facts=_list_facts(record.machine),
    )


@functools.cache
def _read_template(name: str) -> Any:
    require_package("jinja2", "compare", "A page")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"words": WORDS, "signs": SIGNS, "len": len, "round": round}
    environment.filters |= {
        "bytes": format_bytes,
        "ratio": format_ratio,
        "seconds": figures.format_seconds,
        "number": format_number,
        "bits": format_bits,
        "bin": figures.choose_bin,
        "least": figures.describe_least_headroom,
    }
    return environment.get_template(name)


def _summarise(variant: Variant, comparison: Comparison) -> dict[str, Any]:
    """Return the values of one precision for the page's tables."""
    cells = pick_cells(comparison.rows, variant.name)
    measured = {
        name: summarise_measure(cells, name)
        for name in ("psnr_db", "ssim", "flip", "flicker", "rmse")
    }
    headroom, tightest = find_tightest(cells)
    return {
        "variant": variant,
        "measures": measured,
        "headroom": headroom,
        "tightest": tightest,
        "counts": {
            name: sum(getattr(cell, name) for cell in cells)
            for name in ("non_finite", "saturated", "clamped")
        },
    }


def _describe_cell(cell: Cell) -> dict[str, Any]:
    """Return the data of a cell (one prompt in one precision) for the page's image and video player."""
    measures = cell.measures
    said = "" if measures is None else f"{format_number(measures.psnr_db, 1)} dB"
    if measures is not None and measures.identical:
        said = "identical"
    return {
        "name": cell.precision,
        "verdict": cell.verdict,
        "reason": " ".join(cell.reasons),
        "said": said,
        "frames": cell.sheet and dataclasses.asdict(cell.sheet),
        "difference": cell.difference and dataclasses.asdict(cell.difference),
    }


def _list_partings(comparison: Comparison) -> list[dict[str, Any]]:
    """List precisions with their first divergence, median error by component, and faulty modules.

    Precisions without any measured call or divergence, such as the reference, are left out.
    """
    found = []
    for variant in comparison.variants:
        cells = pick_cells(comparison.rows, variant.name)
        calls: dict[str, list[float | None]] = {}
        for cell in cells:
            for call in cell.calls:
                calls.setdefault(call.component, []).append(call.rel_err)
        if not calls and all(cell.parting is None for cell in cells):
            continue
        parting = next((cell.parting for cell in cells if cell.parting is not None), None)
        faults = list(dict.fromkeys(fault.module_path for cell in cells for fault in cell.faults))
        errors = {
            name: None if any(x is None for x in values) else find_median(values)
            for name, values in calls.items()
        }
        found.append({"name": variant.name, "parting": parting, "errors": errors, "faults": faults})
    return found


def _list_facts(machine: dict[str, Any]) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in machine.items():
        if isinstance(value, dict):
            flat += [(key, str(item)) for key, item in value.items() if item is not None]
        elif isinstance(value, (list, tuple)):
            flat.append((name, "; ".join(str(item) for item in value)))
        elif value is not None:
            is_size = name.endswith("bytes") and isinstance(value, (int, float))
            flat.append((name, format_bytes(value) if is_size else str(value)))
    return [(name.replace("_", " "), value) for name, value in flat]


def check_page(output: Path, *, force: bool = True) -> None:
    """Refuse a path to which no page can be written, before hours of computation."""
    check_suffix(output, ".html", ".htm", expected="A report is one HTML file.")
    check_target(output, replaces=describe_no_page, force=force)


def describe_no_page(path: Path) -> str:
    """Describe a file that a page must not replace; "" if it is empty or a page of Stopdown."""
    with path.open("rb") as file:
        head = file.read(4096)
    return "" if _GENERATOR in head or not head else "a file that is no page of Stopdown"


def write_page(path: Path, text: str, *companions: str, numbered: bool) -> Path:
    """Write a page, and return its path.

    Args:
        companions: suffixes of files beside the page whose names must be free, as for `write_numbered`.
        numbered: if the file exists, use the first free numbered name instead of replacing it.
    """
    content = text.encode(errors="replace")
    if numbered:
        return write_numbered(path, lambda part: part.write_bytes(content), *companions)
    with written_beside(path, replaces=describe_no_page) as part:
        part.write_bytes(content)
    return path


_GENERATOR = b'<meta name="generator" content="stopdown">'

"""How large a report of a comparison is, and how long it takes to open in Chromium.

Two reports of 20 prompts by 6 precisions: a record that `stopdown compare` wrote (`--record`), and
one whose clips are drawn in the size of CogVideoX-5B's (49 frames of 480x720, moving texture, which
compresses worse than most videos), so that the pictures fill the room that they are given. A page
has opened when its first prompt is decoded and drawn; each opening has a browser of its own.

    python benchmarks/compare.py --record twenty.html.json
    python benchmarks/compare.py --record one.html.json --picture docs/images/report.png
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from stopdown.comparison.cells import make_sheet, share_bytes
from stopdown.comparison.records import Cell, Comparison, Row
from stopdown.devices.environment import describe_machine
from stopdown.records import from_json
from stopdown.report.pages import render_comparison

RESULTS = Path(__file__).parent / "results"
PROMPTS, PRECISIONS = 20, 6


def draw_texture(seed: int, frames: int = 49, height: int = 480, width: int = 720) -> np.ndarray:
    """`[T, H, W, 3]` uint8: noise of several grains that moves, over a slow ramp."""
    random = np.random.default_rng(seed)
    still = np.zeros((height, width + 2 * frames, 3))
    for grain, weight in ((2, 10), (8, 20), (32, 35)):
        shape = (height // grain + 1, (width + 2 * frames) // grain + 1, 3)
        coarse = random.normal(size=shape) * weight
        still += np.kron(coarse, np.ones((grain, grain, 1)))[:height, : width + 2 * frames]
    still = np.clip(still + 128, 0, 255).astype(np.uint8)
    return np.stack([still[:, 2 * index : 2 * index + width] for index in range(frames)])


def fill_pictures(record: Comparison) -> Comparison:
    """The same record with 20 rows of 6 cells, each with frames and a map of a drawn clip."""
    most = share_bytes(PROMPTS * PRECISIONS)
    sheets = []
    for seed in range(PRECISIONS):
        clip = draw_texture(seed)
        sheets.append((make_sheet(clip, most), make_sheet(clip[..., 0], most // 3)))
    cells = list(record.rows[0].cells)
    filled = [
        dataclasses.replace(cell, sheet=sheet, difference=difference)
        for cell, (sheet, difference) in zip(_stretch(cells), sheets, strict=True)
    ]
    row = record.rows[0]
    rows = [
        Row(index + 1, f"{row.prompt} {index}", index, row.reference, tuple(filled))
        for index in range(PROMPTS)
    ]
    return dataclasses.replace(record, rows=tuple(rows))


def _stretch(cells: list[Cell]) -> list[Cell]:
    return [cells[index % len(cells)] for index in range(PRECISIONS)]


def time_opening(page: Path, times: int) -> list[float]:
    """Seconds from the address to the first prompt on the screen, each in a new browser."""
    found = []
    with sync_playwright() as driver:
        for _ in range(times):
            browser = driver.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            begun = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-ready='0']")
            found.append(round(time.perf_counter() - begun, 3))
            browser.close()
    return found


def draw_page(record: Comparison, picture: Path) -> None:
    """Write the first screens of a record's page as a picture."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = Path(folder) / "report.html"
        page.write_text(render_comparison(record), encoding="utf-8")
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 1200, "height": 1640})
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready='0']")
        tab.screenshot(path=picture)
        browser.close()


def measure(record: Comparison, times: int) -> dict[str, Any]:
    """Size and opening of a record's page."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(render_comparison(record), encoding="utf-8")
        opened = time_opening(page, times)
        sheet = next(c.sheet for row in record.rows for c in row.cells if c.sheet is not None)
        return {
            "prompts": len(record.rows),
            "precisions": len(record.rows[0].cells),
            "megabytes": round(page.stat().st_size / 1e6, 2),
            "opening_s": opened,
            "opening_median_s": statistics.median(opened),
            "kept": f"{sheet.frames} frames of {sheet.height}x{sheet.width}, 1 in {sheet.every}",
        }


def summarise(record: Comparison) -> dict[str, Any]:
    """The order of error of a record: verdicts, medians, and how often a plan is nearer than bf16."""
    found: dict[str, Any] = {"command": record.command, "elapsed_s": round(record.elapsed_s)}
    for variant in record.variants:
        cells = [c for row in record.rows for c in row.cells if c.precision == variant.name]
        known = [c.measures for c in cells if c.measures is not None]
        found[variant.name] = {
            "verdict": variant.verdict,
            "reasons": list(variant.reasons),
            "rmse_median": statistics.median(m.rmse for m in known) if known else None,
            "psnr_db_worst": min((m.psnr_db for m in known if m.psnr_db), default=None),
            "flip_worst": max((m.flip for m in known if m.flip is not None), default=None),
            "time_ratios": variant.time_ratios,
        }
    found["ratios_bf16_over_plan"] = sorted(_list_ratios(record))
    return found


def _list_ratios(record: Comparison) -> list[float]:
    ratios = []
    for row in record.rows:
        cells = {cell.precision: cell.measures for cell in row.cells}
        bf16, plan = cells.get("bf16"), cells.get("plan")
        if bf16 is not None and plan is not None:
            ratios.append(round(bf16.rmse / plan.rmse, 2))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "compare.json")
    parser.add_argument("--picture", type=Path, help="write the page as a picture, and end")
    options = parser.parse_args()
    record = from_json(options.record.read_bytes(), Comparison)
    if options.picture is not None:
        draw_page(record, options.picture)
        return
    report = {
        "command": f"python benchmarks/compare.py --record {options.record.name}",
        "machine": describe_machine(),
        "comparison": summarise(record),
        "report": measure(record, options.times),
        "report_filled": measure(fill_pictures(record), options.times),
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

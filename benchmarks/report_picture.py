"""The picture of a report on the site: the page of a record, opened in Chromium and drawn.

python benchmarks/report_picture.py twenty.html.json
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from stopdown.comparison.records import Comparison
from stopdown.records import from_json
from stopdown.report.pages import render_comparison

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def draw(page: Path, out: Path, scheme: str, width: int, height: int) -> None:
    """The top of a page at its sixth frame, one half sound and the other as naive fp16 has it."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready='0']")
        for _ in range(5):
            tab.keyboard.press("ArrowRight")
        tab.locator("#right").select_option("fp16")
        tab.locator("#gain").click()
        tab.evaluate("document.activeElement.blur()")
        tab.screenshot(path=str(out))
        browser.close()
    Image.open(out).quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        out, optimize=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, default=IMAGES / "report.png")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=2050)
    options = parser.parse_args()
    record = from_json(options.record.read_bytes(), Comparison)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(render_comparison(record), encoding="utf-8")
        draw(page, options.out, options.scheme, options.width, options.height)


if __name__ == "__main__":
    main()

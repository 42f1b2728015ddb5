"""The bundled model under all six precisions, and its report in a browser."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from stopdown import compare, load
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.results import read_frames
from stopdown.report.pages import render_comparison

PROMPT = "a red circle moving left on a grey background"
SIX = "fp32,bf16,fp16-plain,autocast,clamp,fp16"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_bundled_model_under_six_precisions(tmp_path: Path) -> None:
    """Naive fp16 fails, clamped fp16 shows another clip, rescaled fp16 is nearer than bf16; it opens."""
    import numpy as np
    import torch

    made = compare("shapes", [PROMPT], SIX, request=Request(steps=4, seed=3), device="cpu")
    verdicts = {variant.name: variant.verdict for variant in made.variants}
    assert verdicts == {
        "fp32": "reference",
        "bf16": "same",
        "fp16-plain": "broken",
        "autocast": "broken",
        "clamp": "other",
        "fp16": "same",
    }
    cells = {cell.precision: cell for cell in made.rows[0].cells}
    assert cells["fp16"].measures.rmse < cells["bf16"].measures.rmse
    frames = {}
    for name in ("fp32", "bf16"):
        pipe = load("shapes", precision=name, device="cpu")
        pipe.set_progress_bar_config(disable=True)
        with torch.no_grad():
            arguments = build_arguments(pipe, Request(prompt=PROMPT, steps=4, seed=3))
            frames[name] = read_frames(pipe(**arguments)).astype(np.float64)
    alone = math.sqrt(((frames["bf16"] - frames["fp32"]) ** 2).mean())
    assert cells["bf16"].measures.rmse == pytest.approx(alone, rel=1e-9)
    page = tmp_path / "report.html"
    page.write_text(render_comparison(made), encoding="utf-8")
    said, asked = visit(page)
    assert said == []
    assert asked == [page.as_uri()]


def visit(path: Path) -> tuple[list[str], list[str]]:
    """What a page says on the console, and what it asks for, once its first prompt is shown."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    said: list[str] = []
    asked: list[str] = []
    with driver.sync_playwright() as driven:
        browser = driven.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready='0']")
        browser.close()
    return said, asked

"""Tests of the example workflows: queued over the HTTP API, and from the page in Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comfyui.conftest import WAIT_S, Server
from comfyui.workflows import EXAMPLES, leave_out, read_workflow, write_prompt

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.json"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
NEAR = 0.5


@pytest.fixture(scope="module")
def classes(server: Server) -> Any:
    """What ComfyUI says of its nodes."""
    return server.ask("/object_info")


def compute_right(server: Server, classes: Any, name: str) -> Any:
    """The picture of a workflow in fp32."""
    workflow = leave_out(read_workflow(name))
    for node in workflow["nodes"]:
        if node["type"] == "ModelComputeDtype":
            node["widgets_values"] = ["fp32"]
    return server.run(write_prompt(workflow, classes))


@pytest.mark.parametrize("name", NAMES)
def test_over_the_api(server: Server, classes: Any, name: str) -> None:
    """Black without our nodes, and right with them."""
    right = compute_right(server, classes, name)
    workflow = read_workflow(name)
    without = server.run(write_prompt(leave_out(workflow), classes))
    assert without.picture is not None, without.error
    assert (without.picture == 0).all()
    found = server.run(write_prompt(workflow, classes))
    assert found.find_difference(right) < NEAR
    (report,) = found.texts
    assert report.startswith("model: diffusion_model in fp16: ")
    assert "vae: vae.decode in fp16: " in report


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    """ComfyUI's page in a browser without a window."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        opened = browser.new_page(viewport={"width": 1600, "height": 900})
        opened.set_default_timeout(1000 * WAIT_S)
        opened.goto(server.url)
        opened.wait_for_function("window.app?.graph && window.app.extensionManager")
        opened.keyboard.press("Escape")
        yield opened
        browser.close()


@pytest.mark.parametrize("name", NAMES)
def test_from_the_page(server: Server, classes: Any, page: Any, name: str, tmp_path: Path) -> None:
    """The page loads it with all nodes, queues it, and shows the report and the picture.

    STOPDOWN_SCREENSHOTS names a folder for what was seen.
    """
    right = compute_right(server, classes, name)
    page.evaluate(
        "async workflow => { await window.app.loadGraphData(workflow) }", read_workflow(name)
    )
    missing = page.evaluate("window.app.graph._nodes.filter(x => x.has_errors).map(x => x.type)")
    assert missing == []
    known = set(server.ask("/history"))
    page.evaluate("async () => { await window.app.queuePrompt(0) }")
    for kind in ("StopdownReport", "SaveImage"):
        page.wait_for_function(
            f"window.app.graph._nodes.find(x => x.type == '{kind}').imgs?.length > 0"
        )
    (number,) = set(server.ask("/history")) - known
    found = server.wait(number)
    assert found.find_difference(right) < NEAR
    assert "model: diffusion_model in fp16: " in found.texts[0]
    folder = Path(os.environ.get("STOPDOWN_SCREENSHOTS", tmp_path))
    page.keyboard.press("Escape")  # the templates open by themselves at a first visit
    page.screenshot(path=folder / f"{name}.png", animations="disabled")


def test_the_page_in_chinese(server: Server, page: Any) -> None:
    """ComfyUI gives the page our nodes' names in its language, and their help."""
    names = server.ask("/i18n")["zh"]["nodeDefs"]
    assert names["StopdownRunInFp16"]["display_name"] == "以 fp16 运行"
    folder = page.evaluate("async () => (await (await fetch('/extensions')).json()).length")
    assert folder > 0
    for path in ("StopdownRunInFp16.md", "StopdownRunInFp16/zh.md"):
        text = page.evaluate(
            "async path => await (await fetch(path)).text()", f"/extensions/stopdown/docs/{path}"
        )
        assert text.startswith("# ")

"""The report in a real browser: no errors, no requests, slider and player by mouse and keyboard.

Needs Chromium (`apt-get install chromium`) and playwright, which drives it; nothing is downloaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from models.comparisons import NAMES, RUN, make_comparison
from stopdown.report.pages import render_comparison, render_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium on this machine: apt-get install chromium"
)


class Visit:
    """One page, and what it said and asked for."""

    def __init__(self, page: Any, address: Path) -> None:
        self.page, self.said, self.asked = page, [], []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(address.as_uri())

    def read_frame(self) -> int:
        """The frame that is shown, from 1."""
        return int(self.page.locator("#count").inner_text().split()[0])

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Until something is so; the page's own policy forbids waiting inside of it.

        Raises:
            AssertionError: it was not so after ten seconds.
        """
        for _ in range(200):
            if is_there():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("it did not happen within ten seconds")

    def read_pixel(self, canvas: str, across: float, down: float) -> list[int]:
        """Red, green and blue at a share of a canvas's width and height."""
        return self.page.evaluate(
            """([id, x, y]) => {
                const c = document.querySelector(id), w = c.width, h = c.height;
                const at = [Math.floor(x * w), Math.floor(y * h), 1, 1];
                return [...c.getContext("2d").getImageData(...at).data].slice(0, 3);
            }""",
            [canvas, across, down],
        )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")
    with playwright.sync_playwright() as driver:
        # as root, as in CI, Chromium refuses its sandbox
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three drawn prompts, one cell of which failed."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_comparison(make_comparison(3, error="no room")), encoding="utf-8")
    return path


@pytest.fixture
def visit(browser: Any, address: Path) -> Iterator[Visit]:
    """The comparison, opened anew and ready."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    visited = Visit(page, address)
    page.wait_for_selector("body[data-ready='0']")
    yield visited
    page.close()


@pytest.mark.thorough
def test_the_page_opens_without_errors_and_requests(visit: Visit, address: Path) -> None:
    """Nothing is said on the console, and nothing but the file itself is asked for."""
    visit.page.wait_for_timeout(300)
    assert visit.said == []
    assert visit.asked == [address.as_uri()]
    assert visit.page.locator(".tile").count() == len(NAMES)


@pytest.mark.thorough
def test_the_player_works_by_mouse(visit: Visit) -> None:
    """Play moves all clips on and pauses again; the frame slider goes where it is clicked."""
    play, page = visit.page.locator("#play"), visit.page
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    assert visit.read_frame() == 1
    before = visit.read_pixel(".tile canvas", 0.5, 0.3)
    play.click()
    visit.wait(lambda: visit.read_frame() >= 3)
    play.click()
    assert play.get_attribute("aria-pressed") == "false"
    still = visit.read_frame()
    page.wait_for_timeout(400)
    assert visit.read_frame() == still
    box = page.locator("#seek").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
    assert page.locator("#count").inner_text() == "5 of 5"
    assert visit.read_pixel(".tile canvas", 0.5, 0.3) != before


def test_the_page_opens_on_the_worst_pair(visit: Visit) -> None:
    """The reference stands against black frames, in the middle of the clip, beside a map of a good one."""
    page = visit.page
    assert page.locator("#left").input_value() == "fp32"
    assert page.locator("#right").input_value() == "fp16-plain"
    assert page.locator("#mapped").input_value() not in ("fp32", "fp16-plain")
    assert visit.read_frame() == 3


def test_the_player_works_by_keyboard(visit: Visit) -> None:
    """Arrows go frame by frame and around the end, space plays and pauses, brackets change prompts."""
    page = visit.page
    page.keyboard.press("ArrowRight")
    assert visit.read_frame() == 4
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert visit.read_frame() == 1
    page.keyboard.press("ArrowLeft")
    assert visit.read_frame() == 5
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-pressed") == "true"
    visit.wait(lambda: visit.read_frame() != 5)
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-pressed") == "false"
    page.keyboard.press("]")
    page.wait_for_selector("body[data-ready='1']")
    assert page.locator("#prompt").input_value() == "1"
    page.locator("#seek").focus()
    before = visit.read_frame()
    page.keyboard.press("ArrowLeft")
    assert visit.read_frame() == max(1, before - 1)


def test_the_slider_divides_two_precisions(visit: Visit) -> None:
    """Left of the line stands the one, right of it the other, moved by mouse and by keyboard."""
    page = visit.page
    page.locator("#left").select_option("fp32")
    page.locator("#right").select_option("fp16-plain")  # black
    assert sum(visit.read_pixel("#wipe", 0.3, 0.9)) > 100
    assert sum(visit.read_pixel("#wipe", 0.7, 0.9)) == 0
    canvas = page.locator("#wipe")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 40, steps=3)
    page.mouse.up()
    assert sum(visit.read_pixel("#wipe", 0.7, 0.9)) > 100
    assert abs(int(page.locator("#divide").input_value()) - 900) < 10
    page.locator("#divide").focus()
    page.keyboard.press("Home")
    assert page.locator("#divide").input_value() == "0"
    assert sum(visit.read_pixel("#wipe", 0.3, 0.9)) == 0
    page.keyboard.press("End")
    assert sum(visit.read_pixel("#wipe", 0.7, 0.9)) > 100


def test_difference_maps_show_the_error(visit: Visit) -> None:
    """The map of black frames is bright, that of the plan dark, and eight times brighter on demand."""
    page = visit.page
    page.locator("#mapped").select_option("fp16-plain")
    bright = sum(visit.read_pixel("#map", 0.5, 0.5))
    page.locator("#mapped").select_option("fp16")
    dark = sum(visit.read_pixel("#map", 0.5, 0.5))
    page.locator("#gain").click()
    assert page.locator("#gain").get_attribute("aria-pressed") == "true"
    assert dark <= sum(visit.read_pixel("#map", 0.5, 0.5)) < bright
    assert bright > 200


def test_a_cell_without_frames_says_why(visit: Visit) -> None:
    """The prompt on which a precision failed shows its error where the picture would be."""
    page = visit.page
    page.locator("#prompt").select_option("2")
    page.wait_for_selector("body[data-ready='2']")
    assert page.locator(".tile .empty").inner_text() == "no room"
    assert page.locator(".tile canvas").count() == len(NAMES) - 1
    assert visit.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(browser: Any, address: Path, scheme: Any) -> None:
    """On 390 pixels nothing sticks out, and text stands off its ground by 4.5 to 1 at least."""
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    visited = Visit(page, address)
    page.wait_for_selector("body[data-ready='0']")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    for selector in ("h1", ".lede", ".note", ".badge.same", ".badge.broken", ".reason", "th small"):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector
    assert visited.said == []
    page.close()


def test_every_control_has_a_name(visit: Visit) -> None:
    """Buttons, lists and sliders have a label that a screen reader can say."""
    unnamed = visit.page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, canvas")].filter((x) =>
            !(x.ariaLabel || x.textContent.trim() && x.tagName === "BUTTON" || x.labels?.length)
        ).map((x) => x.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []


@pytest.mark.thorough
def test_the_page_of_a_run_opens(browser: Any, tmp_path: Path) -> None:
    """A report of generate asks for nothing and says nothing either."""
    path = tmp_path / "run.html"
    path.write_text(render_run(RUN), encoding="utf-8")
    page = browser.new_page()
    visited = Visit(page, path)
    assert visited.said == []
    assert visited.asked == [path.as_uri()]
    assert page.locator("h1").inner_text() == "a <red> circle & more"
    page.close()


CONTRAST = """(selector) => {
    const read = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (x) => {
        for (; x; x = x.parentElement) {
            const colour = read(getComputedStyle(x).backgroundColor);
            if (colour.length === 3 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
    };
    return Math.min(...[...document.querySelectorAll(selector)].map((x) => {
        const [one, other] = [light(read(getComputedStyle(x).color)), light(ground(x))];
        return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    }));
}"""
"""The least contrast among the elements of a selector, by WCAG 2.1."""

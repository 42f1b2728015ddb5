"""The site: built strictly, complete, nothing loaded from elsewhere; figures are those of the results.

The last test needs Chromium (`apt-get install chromium`); without one it is skipped.
"""

from __future__ import annotations

import functools
import html.parser
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stopdown

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors: a link to nothing or a page without a place ends it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What writes figures into the pages."""
    monkeypatch.syspath_prepend(str(DOCS))
    import figures

    return figures


@pytest.mark.thorough
def test_each_language_has_its_own_navigation(site: Path) -> None:
    """A Chinese page is marked as such and lists Chinese pages alone; both have under 30 entries."""
    for name, lang, other in (
        ("start.html", "en", "zh/"),
        ("zh/start.html", "zh", "../black.html"),
    ):
        page = (site / name).read_text(encoding="utf-8")
        assert f'<html lang="{lang}"' in page
        (listed,) = re.findall(r'<nav class="md-nav md-nav--primary.*?</nav>\s*</div>', page, re.S)
        links = set(re.findall(r'<a href="([^"#]+)" class="md-nav__link', listed))
        assert 5 < len(links) <= 30
        assert not [link for link in links if link.startswith(other)]
        assert 'hreflang="zh"' in page


@pytest.mark.thorough
def test_every_public_name_has_its_place(site: Path) -> None:
    """The Python reference documents each name of `stopdown.__all__`, and other pages can point at it."""
    from mkdocstrings import Inventory

    with (site / "objects.inv").open("rb") as file:
        known = Inventory.parse_sphinx(file)
    assert [name for name in stopdown.__all__ if f"stopdown.{name}" not in known] == []


@pytest.mark.thorough
def test_every_attribute_has_its_own_line(site: Path) -> None:
    """No docstring names two parameters or attributes before one colon: that reads as a name and a type."""
    page = (site / "api.html").read_text(encoding="utf-8")
    names = re.findall(r"<code>(\*{0,2}\w+,?)</code>", page)
    assert len(names) > 200
    assert [name for name in names if name.endswith(",")] == []


@pytest.mark.thorough
def test_every_command_and_flag_has_its_place(site: Path) -> None:
    """The reference of the command line is made of the commands: each of them, each option."""
    import typer

    from stopdown.app import commands

    page = (site / "commands.html").read_text(encoding="utf-8")
    root = typer.main.get_command(commands.app)
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        assert f'id="stopdown-{name}"' in page
        for option in command.params:
            assert all(flag in page for flag in option.opts if flag.startswith("--"))


def test_figures_are_those_of_the_results(figures: Any) -> None:
    """Writing the figures again changes no page: none is stale, none was edited by hand."""
    texts = {page.name: page.read_text(encoding="utf-8") for page in figures.PAGES}
    assert [name for name, text in texts.items() if figures.fill(text, name) != text] == []


def test_tables_say_where_they_come_from(figures: Any) -> None:
    """Each table of the results ends with command, machine and versions, as its JSON file has them."""
    texts = {table.stem: table.read_text(encoding="utf-8") for table in figures.TABLES}
    assert [name for name, text in texts.items() if figures.sign(text, name) != text] == []
    assert set(texts) == {table.stem for table in figures.RESULTS.glob("*.md")}
    unsigned = next(iter(texts.values())).rpartition(figures.ORIGIN)[0]
    assert figures.sign(unsigned, next(iter(texts))) != unsigned


def test_sizes_in_prose_are_those_of_the_model(figures: Any) -> None:
    """What pages say of CogVideoX-5B in GB is its stored number of parameters: all in 16 and in 32 bits,
    its transformer in 32 bits, one and a half times that for a plan's temporary file, and all weights
    with the smallest predicted peak where CPU and GPU share memory."""
    known = figures._read("memory_predicted")["results"]["CogVideoX-5B"]
    everything, transformer = sum(known["parameters"].values()), known["parameters"]["transformer"]
    shared = 2 * everything + min(known["peak_bytes"].values())
    sizes = {
        round(count / 1e9)
        for count in (2 * everything, 4 * everything, 4 * transformer, 6 * transformer, shared)
    }
    for page in figures.PAGES:
        prose = figures.MARK.sub("", page.read_text(encoding="utf-8"))
        assert {int(found) for found in re.findall(r"(?<![\d.])(\d+) GB\b", prose)} <= sizes, (
            page.name
        )


def test_a_figure_follows_its_result(figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another result gives another figure, and what someone typed in its place is gone."""
    monkeypatch.setattr(figures, "_read", lambda _: {"bf16_over_planned_median": 3.25})
    text = "It is <!-- figure: shapes_ratio -->9.9<!-- end --> times nearer."
    filled = "It is <!-- figure: shapes_ratio -->3.2<!-- end --> times nearer."
    assert figures.fill(text, "rescaling.md") == filled
    assert figures.fill(filled, "rescaling.md") == filled


@pytest.mark.parametrize(
    "text",
    [
        "<!-- figure: nothing -->1<!-- end -->",
        "<!-- figure: score -->97 %",
        "97 %<!-- end -->",
        "<!-- figure: score -->97 % <!-- figure: score -->97 %<!-- end -->",
        "<!-- figure: Score! -->97 %<!-- end -->",
    ],
)
def test_a_wrong_mark_is_an_error(figures: Any, text: str) -> None:
    """An unknown figure or half a mark is an error that names the page."""
    with pytest.raises(ValueError, match=r"^start\.md "):
        figures.fill(text, "start.md")


def test_every_figure_is_used(figures: Any) -> None:
    """No figure is computed that stands on no page."""
    pages = "".join(page.read_text(encoding="utf-8") for page in figures.PAGES)
    assert [name for name in figures.FIGURES if f"<!-- figure: {name} -->" not in pages] == []


def test_no_line_of_text_begins_with_a_figure(figures: Any) -> None:
    """A line that begins with a comment is HTML to a Git host, and its text loses its formatting."""
    lines = [line for page in figures.PAGES for line in page.read_text("utf-8").splitlines()]
    marked = [line for line in lines if re.match(r"[\s>*\-]*<!-- (figure|end)", line)]
    assert len(marked) > 20
    assert [line for line in marked if not re.fullmatch(r"<!-- [^>]* -->", line)] == []


@pytest.mark.thorough
def test_no_placeholder_is_left(site: Path) -> None:
    """Whatever is filled in while the site is built is filled in."""
    pages = list(site.glob("**/*.html"))
    assert "log.html" not in {page.name for page in pages}
    assert [page.name for page in pages if re.search(r"\{\{ \w+ \}\}", page.read_text())] == []


class _Addresses(html.parser.HTMLParser):
    """What a page loads: scripts, styles, pictures and frames."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video") and given.get("src"):
            self.found.append(str(given["src"]))
        if tag == "link" and given.get("rel") != "canonical":
            self.found.append(str(given["href"]))


@pytest.mark.thorough
def test_pages_name_nothing_from_elsewhere(site: Path) -> None:
    """No page names a script, style, font or picture of another server."""
    reader = _Addresses()
    for page in site.glob("**/*.html"):
        reader.feed(page.read_text(encoding="utf-8"))
    for style in site.glob("**/*.css"):
        reader.found += re.findall(r"url\(\"?([^)\"]+)", style.read_text(encoding="utf-8"))
    assert len(reader.found) > 100
    assert [x for x in reader.found if re.match(r"(https?:)?//", x)] == []


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site on a server of this machine, as a reader has it."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
def test_a_browser_asks_for_nothing_else(site: Path, address: str) -> None:
    """In a real browser, wide and narrow, pages ask nobody else, say nothing and are not too wide."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as made:
        browser = made.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        asked: list[str] = []
        said: list[str] = []
        for width in (1280, 390):
            page = browser.new_page(viewport={"width": width, "height": 844})
            page.on("request", lambda request: asked.append(request.url))
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            for file in ("index.html", "black.html", "rescaling.html", "commands.html", "api.html"):
                page.goto(f"{address}/{file}")
                over = page.evaluate(
                    "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                )
                assert (file, width, over) == (file, width, 0)
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith(address)] == []


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("word", ["黑屏", "黑图", "溢出"])
def test_one_chinese_word_finds_the_page(site: Path, address: str, word: str) -> None:
    """Chinese has no spaces: a word of two characters finds *My image is black* among the first pages."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as made:
        browser = made.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{address}/zh/start.html")
        page.fill("input.md-search__input", word)
        page.wait_for_selector(".md-search-result__link", state="attached")
        links = [
            x.get_attribute("href") for x in page.query_selector_all(".md-search-result__link")
        ]
        browser.close()
    pages = list(dict.fromkeys(re.sub(r"^.*/(zh/[\w/-]+\.html).*$", r"\1", x) for x in links))
    assert "zh/black.html" in pages[:4]

"""What the site has beyond its Markdown: figures, the command reference, drawn diagrams, linked files.

The pages are plain Markdown. While MkDocs builds the site,

- `{{ commands }}` becomes the reference of the command line, from its own help;
- a mermaid block becomes the drawing, and a formula MathML, so that a page loads nothing;
- a link to a file beside `docs/` gets that file: a page if it is Markdown, a copy otherwise;
- a page in Chinese has the navigation and the words of the theme in Chinese, and no other page has them.

A link to nothing ends the build. Figures stand in the Markdown itself (`figures.py`).
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import mmdr
import typer
import typer.cli
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import formulas

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
"""A link to a file: before it, its target, what follows."""

COMMANDS = "{{ commands }}"
"""Where the reference goes, on the page `commands.md`."""


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add every file beside `docs/` that a page links to, and what these link to in turn."""
    pages = files.documentation_pages()
    waiting = [(page.src_uri, page.content_string) for page in pages]
    while waiting:
        page, text = waiting.pop()
        for _, target, _ in LINK.findall(text):
            outside = _find_outside(page, target)
            if outside is None or files.get_file_from_path(f"repository/{outside}"):
                continue
            path = ROOT / outside
            if not path.is_file():
                raise PluginError(f"{page} links to {outside}, which is no file.")
            added = File.generated(config, f"repository/{outside}", abs_src_path=str(path))
            files.append(added)
            if added.is_documentation_page():
                waiting.append((added.src_uri, added.content_string))
    return files


def on_page_markdown(text: str, page: Page, **_: Any) -> str:
    """Fill in the command reference and drawings; point links at the added files."""
    name = page.file.src_uri
    if _is_beside(name):
        page.meta["search"] = {"exclude": True}
    if name == "commands.md":
        text = text.replace(COMMANDS, describe_commands())
    try:
        text = formulas.set_formulas(text)
    except ValueError as error:
        raise PluginError(f"{name}: {error}") from error
    text = LINK.sub(lambda found: _point(found, name), text)
    return re.sub(r"^```mermaid\n(.*?)^```$", _draw, text, flags=re.DOTALL | re.MULTILINE)


CHINESE = "中文"
"""The section of the navigation that Chinese pages have for their own."""


def on_page_context(context: Any, page: Page, config: Any, nav: Any, **_: Any) -> Any:
    """Give each language its own navigation, and the theme the language of the page."""
    is_chinese = page.file.src_uri.startswith("zh/")
    own = copy.copy(nav)
    chinese = [x for x in nav.items if x.title == CHINESE]
    others = [x for x in nav.items if x.title != CHINESE]
    own.items = [child for x in chinese for child in x.children] if is_chinese else others
    context["nav"] = own
    config.theme["language"] = "zh" if is_chinese else "en"
    return context


def on_post_build(config: Any, **_: Any) -> None:
    """Give Chinese pages a site map, for which the switch of languages asks, and a search by character."""
    site = Path(config.site_dir)
    shutil.copyfile(site / "sitemap.xml", site / "zh" / "sitemap.xml")
    path = site / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for entry in index["docs"]:
        if entry["location"].startswith("zh/"):
            entry |= {name: BESIDE_HAN.sub("\u200b", entry[name]) for name in ("title", "text")}
    path.write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")


BESIDE_HAN = re.compile(r"(?<=[\u4e00-\u9fff])(?=\w)|(?<=\w)(?=[\u4e00-\u9fff])")
"""Where the index of the search gets a break: there are no spaces between Chinese words."""


OPTION = re.compile(r"(?<![\w-])--?[\w-]+|'\.\[\w+\]'")
INLINE = re.compile(r"(?<!<pre>)<code>([^<\n]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Keep each option of inline code on one line: browsers break at hyphens."""
    return INLINE.sub(
        lambda found: f"<code>{OPTION.sub(_keep_whole, found[1])}</code>",
        html,
    )


def _keep_whole(found: re.Match[str]) -> str:
    return f'<span class="option">{found[0]}</span>'


def _find_outside(page: str, target: str) -> str | None:
    """The path below the repository of a link that leaves `docs/`; None for others."""
    if page.startswith("repository/"):
        home = PurePosixPath(page.removeprefix("repository/")).parent
    else:
        home = PurePosixPath("docs", page).parent
    path = os.path.normpath(home / target)
    return None if path.startswith(("docs/", "..")) else path


def _point(found: re.Match[str], page: str) -> str:
    before, target, after = found.groups()
    outside = _find_outside(page, target)
    aim = f"repository/{outside}"
    if outside is None:
        if not page.startswith("repository/"):
            return found[0]
        home = PurePosixPath(page.removeprefix("repository/")).parent
        aim = os.path.normpath(home / target).removeprefix("docs/")
    return before + os.path.relpath(aim, PurePosixPath(page).parent) + after


def _is_beside(page: str) -> bool:
    """Whether a page is a file of the repository, and no part of the documentation proper."""
    return page.startswith("repository/")


@functools.cache
def describe_commands() -> str:
    """The reference of every command, in Markdown, from what `--help` is made of."""
    from stopdown.app import commands

    root = typer.main.get_command(commands.app)
    parts = []
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        with command.make_context(name, ["--help"], resilient_parsing=True) as context:
            text = typer.cli.get_docs_for_click(
                obj=command, ctx=context, name=name, call_prefix="stopdown"
            )
        text = re.sub(r"\x08\nExamples:\n((?: +\S.*\n)+)", r"```text\n\1```\n", text)
        parts.append(re.sub(r"^# `", "## `", text, flags=re.MULTILINE))
    return "\n".join(parts)


def _draw(found: re.Match[str]) -> str:
    """A mermaid block as SVG."""
    drawing = mmdr.render(found[1]).svg().replace("\n", " ")
    return f'<div class="diagram">{drawing}</div>'

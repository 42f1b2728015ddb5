"""The README is true: its commands run, its Python runs, its tree and its links exist."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from docs.documentation import Run, find_missing_evidence

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
OTHER_PROGRAMS = (ROOT / "docs" / "other-programs.md").read_text(encoding="utf-8")
MAKE = ("demo", "test")
"""Not run here: the first installs everything anew, the second is this very run."""


def test_it_is_short() -> None:
    """The README has at most 150 lines: what is longer is on a page of its own."""
    assert len(README.splitlines()) <= 150


def test_it_has_the_two_commands() -> None:
    """The README has the two commands that need nothing else, and the Makefile has them."""
    assert tuple(re.findall(r"`make (\w+)`", README)) == MAKE
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(MAKE) <= set(targets)


def test_every_extra_is_named() -> None:
    """The quick start's table has each extra of the package, or the page of the programs that it is for."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(re.findall(r"'\.\[(\w+)\]'", START + OTHER_PROGRAMS)) == set(extras)


def test_every_command_is_named(run: Run) -> None:
    """The page of commands, or that of other programs, has each command with what it does."""
    from stopdown.app import commands

    known = {x.name or x.callback.__name__ for x in commands.app.registered_commands}
    table = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`stopdown (\w+)`", table + OTHER_PROGRAMS)) == known


def test_the_tree_is_true() -> None:
    """Every path of the drawn tree exists, and every module of the package stands in it."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = page.split("## The tree")[1].split("```")[1]
    named, above = set(), dict[int, str]()
    for line in tree.strip().splitlines():
        depth, path = len(line) - len(line.lstrip()), line.split()[0]
        above = {at: folder for at, folder in above.items() if at < depth}
        named.add(path := "".join([*list(above.values())[-1:], path]))
        above[depth] = path
    missing = [path for path in named if not (ROOT / path).exists()]
    assert missing == []
    package = ROOT / "src" / "stopdown"
    present = {
        f"src/stopdown/{p.name}{'/' if p.is_dir() else ''}"
        for p in package.iterdir()
        if not p.name.startswith(("_", ".")) and p.name not in ("py.typed", "models")
    }
    assert present <= named


def find_open_merges(text: str) -> list[int]:
    """Lines of a text that a merge left where two versions differed."""
    marks = tuple(mark * 7 + " " for mark in "<>")
    return [n for n, line in enumerate(text.splitlines(), 1) if line.startswith(marks)]


def test_no_merge_is_half_done() -> None:
    """No file of the project holds both versions of a part."""
    for folder in ("src", "tests", "docs", "benchmarks", "integrations", "training", "notebooks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".toml", ".json", ".ipynb", ".txt", ".sh"):
                assert find_open_merges(path.read_text(encoding="utf-8", errors="replace")) == [], (
                    path
                )
    assert find_open_merges("a\n" + "<" * 7 + " HEAD\nb\n") == [2]


def test_links_exist() -> None:
    """Every relative link and picture of the README exists."""
    links = re.findall(r"\]\(([^)#]+)\)", README)
    broken = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert broken == []


def test_every_option_is_documented(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stopdown generate --help` names every option of the command with a sentence."""
    monkeypatch.setenv("COLUMNS", "200")
    code, shown, _ = run("generate", "--help")
    assert code == 0
    from dataclasses import fields

    from stopdown.app.generate_command import GenerateOptions

    for entry in fields(GenerateOptions):
        flag = f"--{entry.name.replace('_', '-')}"
        name = {"source": "SOURCE", "prompt": "PROMPT"}.get(entry.name, flag)
        line = next(line for line in shown.splitlines() if name in line and "Usage" not in line)
        assert len(line.split()) > 3


IN_CHINESE = ("start.md", "black.md", "card.md", "glossary.md", "memory.md")
CHINESE = {
    ROOT / "README.md": ROOT / "README.zh-CN.md",
    **{DOCS / name: DOCS / "zh" / name for name in IN_CHINESE},
    **{page: DOCS / "zh" / "guides" / page.name for page in sorted(DOCS.glob("guides/*.md"))},
}
"""Each page that is there in Chinese, too."""

ALIKE = (
    r"^(?:<!-- not run: [^\n]* -->\n)?```.*?^```$",
    r"^#+ ",
    r"^\| `[^|]*\|",
    r"^(?:[-*]|\d\.) ",
    r"<!-- figure.*?end -->",
)
"""What both have in the same order: blocks, headings, rows of tables, items of lists, figures."""


def list_links(page: Path) -> list[str]:
    """What a page links to on other pages, by paths of the English ones."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"\]\(((?!#|README|http)[^)]+)\)", text)
    paths = (os.path.relpath(page.parent / link, ROOT) for link in found)
    return [path.replace("docs/zh/", "docs/") for path in paths]


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_the_chinese_page_is_the_same(page: Path) -> None:
    """It has the same blocks, headings, tables and lists in the same order, and the same links."""
    assert list_links(page) == list_links(CHINESE[page])
    both = [path.read_text(encoding="utf-8") for path in (page, CHINESE[page])]
    for pattern in ALIKE:
        english, chinese = (re.findall(pattern, x, re.DOTALL | re.MULTILINE) for x in both)
        assert english == [x.replace("、", ", ") for x in chinese], pattern


def test_every_chinese_page_is_one_of_them() -> None:
    """No page in Chinese is left without its English one, and no block of it is typed twice by tests."""
    assert set(CHINESE.values()) == {ROOT / "README.zh-CN.md", *DOCS.glob("zh/**/*.md")}


@pytest.mark.parametrize("page", CHINESE.values(), ids=lambda page: page.name)
def test_a_chinese_page_is_chinese(page: Path) -> None:
    """Each paragraph is translated; messages that are quoted as they are have less than 80 letters."""
    prose = re.sub(
        r"^ *```.*?^ *```$|<!--.*?-->|^\|.*$",
        "",
        page.read_text("utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    for paragraph in prose.split("\n\n"):
        assert len(paragraph) < 80 or re.search(r"[\u4e00-\u9fff]", paragraph), paragraph


CLAIMS = tomllib.loads((Path(__file__).parent / "readme_claims.toml").read_text(encoding="utf-8"))[
    "shown"
]
"""Each sentence of the README, and what shows it."""


def list_sentences(page: str) -> list[str]:
    """The sentences and rows of tables of a page, as they are read; a figure is `{name}`."""
    page = re.sub(r"<!-- figure: (\w+) -->.*?<!-- end -->", r"{\1}", page)
    page = re.sub(r"(?:<!-- not run[^\n]*-->\n)?```.*?```", "\n\n", page, flags=re.DOTALL)
    page = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"\1.", page)
    page = re.sub(r"[*`]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page))
    parts = (" ".join(x.split()) for x in re.split(r"\n\s*\n|\n(?=[-|])", page))
    found: list[str] = []
    for part in parts:
        if part.startswith("|"):
            found.append(part.strip("| "))
        elif not part.startswith("#"):
            found += re.split(r"(?<=[.:?!])\s+(?=[A-Z\[\"(])", part.removeprefix("- "))
    return [x for x in found if re.search(r"\w", x)]


def test_each_sentence_is_shown() -> None:
    """No sentence of the README is without a test, a command, a result or a page, and none is left over."""
    sentences = list(dict.fromkeys(list_sentences(README)))
    assert [x for x in sentences if x not in CLAIMS] == []
    assert [x for x in CLAIMS if x not in sentences] == []
    assert list_sentences("# A\n\nIt *runs*. It is [fast](x.md):\n\n| a | b |\n|---|--:|\n") == [
        "It runs.",
        "It is fast:",
        "a | b",
    ]


def test_what_shows_a_sentence_is_there() -> None:
    """Each test, command, figure, result and page behind a sentence exists."""
    wrong = {
        x: found for shown in CLAIMS.values() for x in shown if (found := find_missing_evidence(x))
    }
    assert wrong == {}
    assert all(CLAIMS.values())
    figures = (DOCS / "figures.py").read_text(encoding="utf-8")
    named = re.findall(r"\{(\w+)\}", " ".join(CLAIMS))
    assert [x for x in named if f"def {x}()" not in figures] == []
    assert find_missing_evidence("stopdown paint x")
    assert (
        find_missing_evidence("tests/docs/test_readme.py::test_nothing") == "there is no such test"
    )
    assert find_missing_evidence("tests/docs/nothing.py") == "there is no such file"
    assert find_missing_evidence("by hand: look")


def test_the_status_table_is_that_of_the_results() -> None:
    """Its numbers are those of the stored results: components at full size, planted faults, exact cases."""
    rows = {
        name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
        for name in ("full_size_runs", "fault_matrix", "rescale")
    }
    whole = {x.partition(",")[0] for x in rows["full_size_runs"]}
    cut = [x for x in rows["full_size_runs"] if "blocks" in x]
    assert (len(whole), len(cut)) == (11, 2)
    for page in (README, (DOCS / "support.md").read_text(encoding="utf-8")):
        assert re.search(
            r"eleven components\]\([^)]*\), two (?:of them )?cut to a few blocks", page
        )
    assert all(x["passes"] for x in rows["fault_matrix"])
    assert all(x["exact"] for x in rows["rescale"].values())

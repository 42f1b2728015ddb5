"""The README is true: its commands run, its Python runs, its tree and its links exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from documentation import Run, read_blocks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OTHER_PROGRAMS = (ROOT / "docs" / "other-programs.md").read_text(encoding="utf-8")
MAKE = ("make demo", "make test")
"""Not run here: the first installs everything anew, the second is this very run."""


def test_it_is_short() -> None:
    """The README has at most 200 lines: what is longer is on a page of its own."""
    assert len(README.splitlines()) <= 200


def test_it_has_the_two_commands() -> None:
    """The README has the two commands that need nothing else, and the Makefile has them."""
    (block,) = [b for b in read_blocks(README, "") if b.text.startswith("make")]
    assert tuple(line.split("#")[0].strip() for line in block.text.splitlines()) == MAKE
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


def test_every_extra_is_named() -> None:
    """The README's table has each extra of the package, or the page of the programs that it is for."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(re.findall(r"'\.\[(\w+)\]'", README + OTHER_PROGRAMS)) == set(extras)


def test_every_command_is_named(run: Run) -> None:
    """The README's table or the page of other programs has each command, with what it answers."""
    from stopdown.app import cli

    known = {x.name or x.callback.__name__ for x in cli.app.registered_commands}
    table = README.split("## All commands")[1] + OTHER_PROGRAMS
    assert set(re.findall(r"`stopdown (\w+)`", table)) == known


def test_the_tree_is_true() -> None:
    """Every path of the drawn tree exists, and every module of the package stands in it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.split("## The tree")[1].split("```")[1]
    named, parent = set(), ""
    for line in tree.strip().splitlines():
        path = line.split()[0]
        parent = path if not line.startswith(" ") else parent
        named.add(path if path == parent else parent + path)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert missing == []
    package = ROOT / "src" / "stopdown"
    present = {
        f"src/stopdown/{p.name}{'/' if p.is_dir() else ''}"
        for p in package.iterdir()
        if not p.name.startswith(("_", ".")) and p.name not in ("py.typed", "models")
    }
    assert present <= named


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


def test_the_chinese_readme_is_the_same() -> None:
    """It has the same blocks, in the same order, as many headings and the same links."""
    chinese = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    for pattern in (r"^```.*?^```$", r"^#+ ", r"\]\(((?!#|README)[^)]+)\)", r"^\| `[^|]*\|"):
        both = [re.findall(pattern, text, re.DOTALL | re.MULTILINE) for text in (README, chinese)]
        assert both[0] == [found.replace("、", ", ") for found in both[1]], pattern

"""The notebooks run: every cell, in order, with fewer steps."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import stopdown
from docs.documentation import Run

FOLDER = Path(__file__).parents[2] / "notebooks"


def read_cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell, without what installs packages."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [text for text in code if "%pip" not in text]


@pytest.mark.slow
@pytest.mark.filterwarnings("default::stopdown.StopdownWarning")
@pytest.mark.filterwarnings("default::ResourceWarning")  # a picture that a cell shows stays open
@pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_runs(
    path: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python cells run one after the other in one namespace, `!stopdown` as the command line runs it."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for text in read_cells(path):
        if text.startswith("!stopdown "):
            code, _, errors = run(*shlex.split(text.removeprefix("!stopdown ").format_map(scope)))
            assert code == 0, errors
        else:
            exec(compile(text, path.name, "exec"), scope)  # our own text
            if "STEPS" in scope:
                scope["STEPS"] = 2


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_shows_what_came_out(path: Path) -> None:
    """Each cell has its output, without an error, a path or a line that was written over; it is small."""
    text = path.read_text(encoding="utf-8")
    assert len(text) < 100_000
    assert not re.search(r"\\u001b\[\d*[AK]|/(root|home|tmp|work|usr)/|Traceback", text)
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    silent = [cell for cell in cells if not cell["outputs"]]
    assert ["".join(cell["source"]).split()[0] for cell in silent] == ["import", "import"]
    pictures = [x for cell in cells for x in cell["outputs"] if "image/jpeg" in x.get("data", {})]
    assert len(pictures) == 2


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_python(path: Path) -> None:
    """Each cell is Python or a command, and holds no output of somebody's machine's paths."""
    cells = read_cells(path)
    assert len(cells) >= 5
    for text in cells:
        if not text.startswith("!stopdown "):
            compile(text, path.name, "exec")
    assert "/home/" not in path.read_text(encoding="utf-8")


def test_the_quick_start_of_the_help_names_what_exists() -> None:
    """`help(stopdown)` begins with lines that are Python, and that call public names."""
    block = (stopdown.__doc__ or "").split("\n\n    ", 1)[1].split("\n\nThe command line")[0]
    code = "\n".join(line.removeprefix("    ") for line in block.splitlines())
    names = compile(code, "help", "exec").co_names
    called = {name for name in names if name not in {"stopdown", "print", "record", "frames"}}
    assert len(code.splitlines()) <= 12
    assert called - set(dir(stopdown)) <= {"pipe", "plan", "model", "x", "stopdown_guard"}

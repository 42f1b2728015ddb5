"""One runner lists the scripts of benchmarks/ and signs results; each script serves a page or a command."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
READ = (
    *(ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"),
    *(path for folder in ("docs", "tests", "src") for path in (ROOT / folder).rglob("*.*")),
)
"""Pages and commands that people read or type, data that a script writes, tests that hold a part of it."""


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_runner", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(FOLDER))
    return module


def list_unused(folder: Path, texts: list[str]) -> list[str]:
    """Return the scripts that no text names and no other script imports."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    words = "\n".join(texts)
    return [
        name
        for name in sorted(sources)
        if name != "run" and not re.search(rf"benchmarks/{name}\.py", words)
        if not any(
            re.search(rf"^\s*(from|import) {name}\b", text, re.MULTILINE)
            for other, text in sources.items()
            if other != name
        )
    ]


def test_every_script_is_read_by_somebody() -> None:
    """Each script has its result on a page, is typed by somebody, or is imported by one that is."""
    kinds = (".md", ".py", ".toml", "")
    texts = [path.read_text(encoding="utf-8") for path in READ if path.suffix in kinds]
    # a test of a script's name holds a part of it
    texts += [f"benchmarks/{x.stem.removeprefix('test_')}.py" for x in READ if "tests" in x.parts]
    assert list_unused(FOLDER, texts) == []


def test_an_unused_script_is_found(tmp_path: Path) -> None:
    """A script that nothing names is listed; one that another imports is not."""
    (tmp_path / "alone.py").write_text("")
    (tmp_path / "shared.py").write_text("")
    (tmp_path / "typed.py").write_text("from shared import x\n")
    assert list_unused(tmp_path, ["`python benchmarks/typed.py`"]) == ["alone"]


def test_every_script_says_what_it_measures(runner: ModuleType) -> None:
    """The runner lists each script with a sentence."""
    scripts = runner.list_scripts()
    assert "rescale" in scripts
    assert [name for name, purpose in scripts.items() if len(purpose) < 20] == []


def test_a_changed_result_is_signed(runner: ModuleType, tmp_path: Path) -> None:
    """A result that a run wrote states its arguments, seconds and code; others stay as they are."""
    (tmp_path / "old.json").write_text('{"rows": []}')
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    (tmp_path / "new.json").write_text('{"rows": [1]}')
    signed = runner.sign_changed(tmp_path, before, ["rescale", "--classes", "T5"], 12.34)
    assert [path.name for path in signed] == ["new.json"]
    made = json.loads((tmp_path / "new.json").read_text())["made"]
    assert (made["arguments"], made["elapsed_s"]) == (["rescale", "--classes", "T5"], 12.3)
    assert re.match(r"[0-9a-f]{7,} of \d{4}-\d\d-\d\d", made["code"])
    assert (tmp_path / "old.json").read_text() == '{"rows": []}'
    assert runner.read_seconds("rescale", tmp_path) == 12.3
    assert runner.read_seconds("speed", tmp_path) is None


@pytest.mark.thorough
def test_the_table_of_every_pipeline_is_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script draws from its stored rows is the stored table, to its last line."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import every_pipeline

    drawn = every_pipeline.draw_signed(every_pipeline.load())
    assert drawn == every_pipeline.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    assert drawn.splitlines()[-1].startswith("Stored by `python benchmarks/every_pipeline.py")
    assert "tests, which are those of Diffusers 0." in drawn

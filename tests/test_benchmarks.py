"""One runner lists the scripts of benchmarks/ and signs results; each script serves a page or a command."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("auto", "fp32", "word"),
    [
        ({"code": 0, "error": 0.1}, {"code": 0}, "right"),
        ({"code": 0, "error": 3.0}, {"code": 0}, "wrong"),
        ({"code": 1}, {"code": 0}, "failed"),
        ({"code": 2}, {"code": 2}, "refused"),
        ({"code": 1}, {"code": 1}, "stops in fp32"),
        ({"code": 1}, {"code": 70, "traceback": True}, "traceback"),
        ({"code": 70, "traceback": True}, {"code": 0}, "traceback"),
        ({"code": 0, "error": 0.1}, {"code": 1}, "no reference"),
    ],
)
def test_what_stops_in_fp32_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, auto: dict[str, Any], fp32: dict[str, Any], word: str
) -> None:
    """A row of every pipeline is judged by both runs: a traceback of either counts."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import every_pipeline

    row = {"auto": auto, "fp32": fp32, "bf16": {"code": 0, "error": 1.0}}
    assert every_pipeline.judge(row) == word
    rows = {"a": row | {"outcome": "refused"}, "b": {"outcome": "x"}}
    stored = every_pipeline.judge_again({"rows": rows})
    assert stored["counts"] == {word: 1, "x": 1}


@pytest.mark.thorough
def test_a_row_that_would_be_wrong_is_judged_by_other_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By medians of three: one lucky seed of bf16 says little. A run that stops changes nothing."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import every_pipeline

    values = {"auto": (0.125, 9.0, 0.25), "bf16": (0.25, 0.75, 0.5), "fp32": (0.0, 0.0, 0.0)}
    codes = {"code": 0}

    def read(path: Path) -> Any:
        name, seed = path.stem.split("-")
        return np.full((1, 2, 2, 3), values[name][int(seed) - 1])

    monkeypatch.setattr(every_pipeline, "run", lambda command, folder: dict(codes))
    monkeypatch.setattr(every_pipeline, "read", read)
    monkeypatch.setattr(every_pipeline, "simulated_t4", contextlib.nullcontext)
    row = {name: {"code": 0, "error": x} for name, x in (("auto", 1.5), ("bf16", 0.8))}
    row["fp32"] = {"code": 0}
    found = row | every_pipeline.compare_by_seeds(row, ["generate"], tmp_path, ".png")
    assert [found[x]["error"] for x in ("auto", "bf16")] == [0.25, 0.5]
    assert found["note"] == "Medians of three other seeds: with the first, 1.50 and 0.80 in bf16."
    assert [every_pipeline.judge(x) for x in (row, found)] == ["wrong", "right"]
    codes["code"] = 1
    assert every_pipeline.compare_by_seeds(row, ["generate"], tmp_path, ".png") == {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ({"error": 0.009, "repairs": 0}, "right"),
        ({"error": 0.011, "repairs": 0, "in_bf16": ["transformer"]}, "as bf16"),
        ({"error": 0.011, "repairs": 1}, "repaired"),
        ({"error": 0.011, "repairs": 0}, "wrong"),
        ({"error": None, "repairs": 0}, "wrong"),
        ({"error": None, "repairs": 0, "in_bf16": ["transformer"]}, "wrong"),
        ({"refused": "No.", "repairs": 0}, "refused"),
        ({"stopped": "TypeError: no", "repairs": 0}, "stopped"),
    ],
)
def test_other_ways_are_held_against_bf16(
    monkeypatch: pytest.MonkeyPatch, cell: dict[str, Any], word: str
) -> None:
    """A cell of the other ways is wrong beyond bf16's error or if not finite; the table is signed."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import every_way

    assert every_way.judge(cell, {"error": 0.01})["outcome"] == word
    unjudged = cell.get("in_bf16") and cell["error"] is not None
    other = every_way.judge(cell, {"stopped": "TypeError: BFloat16"})["outcome"]
    assert (other == "no reference") == bool(unjudged)
    stored = every_way.load()
    drawn = every_way.draw_signed(stored)
    assert drawn == every_way.RESULTS.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_rows_that_do_not_overflow_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that overflow in plain fp16 are counted among those that run in fp32; the others are named."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import every_pipeline

    def make(overflow: str, fp32: int, plain: int, said: str = "") -> dict[str, Any]:
        runs = {"fp32": {"code": fp32}, "plain": {"code": plain, "said": said}}
        auto = {"auto": {"precisions": ["fp16", "fp32"]}}
        return {"overflow": overflow, "outcome": "right", **runs, **auto}

    said = every_pipeline._draw_summary(
        {
            "A": make("residual", 0, 1, "`unet` gave 64 NaN in 64 values"),
            "B": make("", 0, 0) | {"ways": 9},
            "C": make("residual", 0, 0),
            "F": make("", 0, 0),
            "D": make("residual", 1, 1, "Overflow in the UNet"),
            "E": make("residual", 0, 1, "expected scalar type Half but found Float"),
        }
    )
    assert said[0] == (
        "Of 5 rows that run in fp32, 5 are right. Plain fp16 overflows and stops in 1 of them, of which 1 "
        "are right here. It runs in 3, without an overflow: 3 of those are right."
    )
    assert said[2].startswith("What those that overflow and are right ran in: 1 in fp16 and fp32.")
    assert re.search(r"Of \d+ runs \[at full size\]\(full_size_runs.md\), \d+ had", said[2])
    assert [x.rpartition(": ")[2] for x in said[4::2]] == ["B.", "F.", "C.", "E."]
    assert said[4].startswith("No weights that fp16 holds")
    assert said[6].startswith("These rows are from before")


@pytest.mark.thorough
def test_a_tiny_model_overflows_by_two_ways_or_a_smaller_last_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One way brings values near to fp16's maximum, two above it; noise stays where nothing normalises."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import every_pipeline
    import torch

    class Normed(torch.nn.Module):
        def __init__(self, *, is_normed: bool) -> None:
            super().__init__()
            self.to_v, self.out_proj = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.norm = torch.nn.LayerNorm(4) if is_normed else torch.nn.Identity()
            self.proj_out = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj_out(self.norm(self.out_proj(self.to_v(x))))

    torch.manual_seed(0)
    call = ((torch.randn(2, 4) * 0.3,), {})
    module = Normed(is_normed=True).requires_grad_(requires_grad=False)
    assert every_pipeline.overflow_by(module, call, step=2)[0] == "attention values and residual"
    assert not every_pipeline.is_finite_in_fp16(module, *call)
    assert every_pipeline.is_noise_in_fp32(module, *call)
    module = Normed(is_normed=False).requires_grad_(requires_grad=False)
    assert every_pipeline.overflow_by(module, call, step=2) is None
    module.proj_out.weight.mul_(0.125)
    every_pipeline.scale_weights(module, every_pipeline.LAST, -every_pipeline.SMALLER_BITS)
    assert every_pipeline.overflow_by(module, call, step=1) is not None
    assert every_pipeline.is_noise_in_fp32(module, *call)

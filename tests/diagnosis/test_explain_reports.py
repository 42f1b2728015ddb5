"""The benchmark of `explain` reads reports of both forms, and grades only what names a class."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

REPORTS = [
    {
        "repo": "Comfy-Org/ComfyUI",
        "number": 11920,
        "device": "RTX 5090",
        "model": "LTX-2",
        "text": "\"addmm_cuda\" not implemented for 'Float8_e4m3fn'",
        "expected_class": "not-implemented / quantised (either is right)",
    },
    {
        "source": "https://github.com/intel/torch-xpu-ops/issues/5220",
        "device": "Arc B580",
        "model": "one linear layer",
        "text": "(prose) linear layers give zeros in fp16 and NaN in bf16, and are right in fp32",
        "expected": "backend-kernel; fp32 on this card",
    },
    {
        "source": "https://github.com/ace-step/ACE-Step-1.5/issues/1260",
        "device": "GTX 1660 Ti",
        "model": "ACE-Step 1.5",
        "text": "Peak=nan",
        "expected": "sound that isn't finite",
    },
    {
        "source": "https://github.com/wildminder/ComfyUI-VibeVoice/issues/69",
        "device": "CUDA",
        "model": "VibeVoice",
        "text": "probability tensor contains either `inf`, `nan` or element < 0",
        "expected": "vae-range",
    },
]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("explain_benchmark", FOLDER / "explain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    sys.path.remove(str(FOLDER))
    return module


def test_both_forms_of_a_report_are_graded(
    benchmark: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Classes of either form are graded, a wrong one is listed, and a sentence without one is shown."""
    path = tmp_path / "reports.json"
    path.write_text(json.dumps(REPORTS), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["explain.py", "--reports", str(path)])
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    assert "with its facts: 2 of 3 right, 67%" in lines
    assert "its text alone: 2 of 3 right, 67%" in lines
    assert any(
        x.startswith("https://github.com/wildminder") and "answered encoder-range" in x
        for x in lines
    )
    judged = lines.index(
        "https://github.com/ace-step/ACE-Step-1.5/issues/1260, to be judged by a reader"
    )
    assert lines[judged + 2] == "  expected: sound that isn't finite"
    assert lines[judged + 3].startswith("  with its facts: ")


def test_the_mark_of_a_paraphrase_is_not_part_of_the_text(benchmark: ModuleType) -> None:
    """`(prose)` is a remark of the collector, and a remark behind a class is none of its names."""
    first, second = (benchmark.read_report(x, ["backend-kernel", "memory"]) for x in REPORTS[:2])
    assert second.text.startswith("linear layers")
    assert first.classes == {"not-implemented", "quantised"}
    assert second.classes == {"backend-kernel"}

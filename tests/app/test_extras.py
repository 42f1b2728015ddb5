"""What works with the hard dependencies alone, and what names the extra that it needs.

A package that is not installed is simulated in a process of its own: it cannot be imported or found there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CLI = ("typer", "rich", "av")
PIPELINES = ("diffusers", "transformers", "accelerate", "huggingface_hub", "PIL")


def run_without(missing: tuple[str, ...], code: str) -> Any:
    """Return what code prints as JSON in a process that does not have some packages."""
    gone = f"import json, sys\nfor name in {missing!r}: sys.modules[name] = None\n"
    command = [sys.executable, "-c", gone + textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def type_without(missing: tuple[str, ...], *words: str) -> tuple[int, str]:
    """Return exit code and standard error of a command without some packages."""
    gone = f"import sys\nfor name in {missing!r}: sys.modules[name] = None\n"
    code = f"{gone}from stopdown.app.cli import main\nmain({list(words)!r})"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["stopdown", "stopdown.scaling", "stopdown.scaling.rescale"])
def test_the_core_loads_no_command_line(name: str) -> None:
    """Importing the package or its core loads nothing of the command line, pages or media."""
    loaded = run_without((), f"import {name}\nprint(json.dumps(sorted(sys.modules)))")
    roots = {module.split(".")[0] for module in loaded}
    assert roots.isdisjoint({*CLI, "torchmetrics", "flip_evaluator", "psutil", *PIPELINES})
    assert name != "stopdown" or roots.isdisjoint({"jinja2", "torch"})


@pytest.mark.thorough
def test_a_module_is_scaled_and_guarded_without_extras() -> None:
    """`rescale_` and the guard need the hard dependencies alone; a record can still be printed."""
    found = run_without(
        (*CLI, "torchmetrics", "flip_evaluator", *PIPELINES),
        """
        import torch
        import stopdown
        torch.manual_seed(0)
        class Wide(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
                with torch.no_grad():
                    self.first.weight.mul_(1e5)
                    self.last.weight.mul_(1e-5)
            def forward(self, x):
                return self.last(self.first(x))
        model, half, x = Wide(), Wide(), torch.randn(4, 8)
        want = model(x)
        scaling = stopdown.rescale_(model, (x,))
        weight = half.first.weight.data
        weight.clamp_(-5e4, 5e4)
        half = half.half()
        with stopdown.guard(half, announce=lambda text: None) as guard, torch.no_grad():
            repaired = bool(half(100 * x.half()).isfinite().all())
        shown = [repr(scaling)[:10], repr(guard.record)[:12]]
        print(json.dumps([torch.equal(model(x), want), repaired, len(guard.repairs), *shown]))
        """,
    )
    assert found == [True, True, 1, "Rescaling(", "GuardRecord("]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("missing", "words", "said"),
    [
        (("typer",), ("doctor",), "The command stopdown needs the package typer"),
        (("rich",), ("explain", "NaN"), "The command stopdown needs the package rich"),
        (
            ("torchmetrics",),
            ("compare", "shapes", "--prompt", "a red circle"),
            "`stopdown compare` needs the package torchmetrics",
        ),
        (
            ("jinja2",),
            ("compare", "shapes", "--prompt", "a red circle"),
            "`stopdown compare` needs the package jinja2",
        ),
    ],
)
def test_a_command_names_the_extra_that_it_needs(
    missing: tuple[str, ...], words: tuple[str, ...], said: str
) -> None:
    """A command whose packages are missing ends with one sentence and what to type."""
    code, err = type_without(missing, *words)
    extra = "compare" if words[0] == "compare" else "cli"
    assert code == 2
    assert said in err
    assert f"pip install '.[{extra}]'" in err
    assert "Traceback" not in err


@pytest.mark.thorough
def test_a_picture_without_its_package_names_the_extra(tmp_path: Path) -> None:
    """Writing a video without PyAV names the extra that brings it."""
    target = str(tmp_path / "a.mp4")
    found = run_without(
        ("av",),
        f"""
        import numpy as np
        from stopdown.errors import OptionError
        from stopdown.frames.media import write_media
        try:
            write_media({target!r}, np.zeros((2, 16, 16, 3), np.uint8))
        except OptionError as error:
            print(json.dumps(str(error)))
        """,
    )
    assert found.startswith("Writing a video needs the package av, which isn't installed.")
    assert "pip install '.[cli]'" in found


def test_the_hard_dependencies_are_few() -> None:
    """`pip install stopdown` brings what the core and the guard import, and nothing else."""
    names = [x.partition(">")[0] for x in PROJECT["dependencies"]]
    core = ["torch", "safetensors", "scipy", "numpy", "msgspec"]
    assert names == [*core, "packaging", "psutil", "filelock"]


def test_extras_bring_those_that_they_rest_on() -> None:
    """`generate` has the command line, `compare` has `generate`, and developers have all three."""
    extras = PROJECT["optional-dependencies"]
    assert "stopdown[cli]" in extras["pipelines"]
    assert "stopdown[pipelines]" in extras["compare"]
    assert "stopdown[compare]" in extras["dev"]

"""stopdown convert: its summary, and one line for what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stopdown.app.convert_command import print_conversion
from stopdown.records import Conversion, ConvertedComponent

SaveTiny = Callable[..., Path]


@pytest.fixture
def plain_plan(save_tiny: SaveTiny, here: Path) -> tuple[Path, Path]:
    """A tiny model and a plan that scales nothing: fp16 for every component."""
    from models.conversions import plan_plainly
    from stopdown.plans.plan_files import write_plan

    folder = save_tiny("sd")
    return folder, write_plan(plan_plainly("sd", folder), here / "plan.json")


def test_the_summary_says_which_components_need_stopdown() -> None:
    """The code that loads the copy imports Stopdown, and the line under the table says what for."""
    console = Console(width=100, record=True, file=io.StringIO())
    parts = (
        ConvertedComponent("transformer", "as stored, plan in config.json"),
        ConvertedComponent("vae", "fp16", values=4),
    )
    made = Conversion("model", "out", "", components=parts, load="import stopdown; load()")
    print_conversion(made, console)
    said = console.export_text()
    assert "Stopdown applies the plan in config.json when it loads: transformer.\n" in said
    console = Console(width=100, record=True, file=io.StringIO())
    print_conversion(dataclasses.replace(made, components=parts[1:]), console)
    assert "Stopdown applies" not in console.export_text()


@pytest.mark.thorough
def test_convert_prints_a_summary(run: Any, plain_plan: tuple[Path, Path], here: Path) -> None:
    """Exit 0: a line for each component and how to load it on stdout, nothing on stderr."""
    folder, plan = plain_plan
    code, out, err = run("convert", folder, "out", "--plan", plan)
    assert (code, err) == (0, "")
    exact = "Apart from the rounding of its weights to fp16, it equals the original, bit for bit."
    for text in (
        "text_encoder",
        "unet",
        "vae",
        "aren't proven to stay in range, and without Stopdown nothing watches them.",
    ):
        assert text in " ".join(out.split())
    assert 'from_pretrained("out", dtype=torch.float16)\n' in out
    code, out, _ = run("convert", folder, "out", "--plan", plan, "--force", "--verbose")
    assert exact in " ".join(out.split())
    assert sorted(path.name for path in here.iterdir()) == ["out", "plan.json"]
    code, out, _ = run("convert", folder, "out", "--plan", plan, "--force", "--json")
    assert (code, json.loads(out)["kind"]) == (0, "conversion")


def test_convert_refuses_in_one_line(run: Any, plain_plan: tuple[Path, Path], here: Path) -> None:
    """An unknown component, and a file where a folder is asked for."""
    folder, plan = plain_plan
    for arguments, message in (
        (["out", "--leave", "me"], "--leave me names no component of "),
        (["out.safetensors", "--to", "diffusers"], "OUT out.safetensors is a "),
    ):
        code, out, err = run("convert", folder, *arguments, "--plan", plan)
        assert (code, out) == (2, "")
        assert err.startswith(f"stopdown: {message}")
        assert err.count("\n") == 1
    assert sorted(path.name for path in here.iterdir()) == ["plan.json"]

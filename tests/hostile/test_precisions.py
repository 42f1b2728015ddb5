"""What `--precision` may not be, in every command that has one: one message, and nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hostile.runner import Attack, copy_tiny, run_attack
from stopdown.plans.plan_files import read_class_versions, seal_plan, write_plan
from stopdown.records import ComponentPlan, Plan, Scaling

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate", "MODEL", "a", "--steps", "1", "-o", "OUT.mp4", "--precision"),
    "check": ("check", "MODEL", "--precision"),
    "fit": ("fit", "MODEL", "--memory", "1GiB", "--precision"),
    "compare": ("compare", "MODEL", "-o", "OUT.html", "--precision", "fp32", "--precision"),
    "run": ("run", "--precision", "PRECISION", "OUT.py"),
}
"""A command that takes a precision, with the words before it, or with its place."""

TEXTS: Mapping[str, tuple[str, str]] = {
    "format": ("fp12", "The precision 'fp12' is unknown. Known values are fp32, bf16, fp16, "),
    "8 bits": ("vae=fp8", "The precision 'fp8' is unknown."),
    "control sequence": ("\x1b[2J", "The precision '\\x1b[2J' is unknown."),
    "no component": ("=fp16", "The entry '=fp16' of a precision doesn't name"),
    "bare entry": ("vae=fp16,bf16", "The entry 'bf16' of a precision doesn't name"),
    "contradiction": ("vae=fp16,vae=bf16", "The precision asks for vae=fp16 and for vae=bf16."),
    "long": ("x" * 5000, "The precision 'xxxxx"),
}
"""What is wrong whatever the model is, and what is said of it."""


def fill(words: tuple[str, ...], precision: str, folder: Path) -> list[str]:
    """The words of a command with its files and its precision."""
    (folder / "out.py").write_text("raise SystemExit('was run')")
    places = {"MODEL": "model", "OUT.mp4": "out.mp4", "OUT.json": "out.json"}
    places |= {"OUT.html": "out.html", "OUT.py": "out.py"}
    filled = [str(folder / places[word]) if word in places else word for word in words]
    if "PRECISION" in filled:
        return [precision if word == "PRECISION" else word for word in filled]
    return [*filled, precision]


def make_row(name: str, command: str) -> Attack:
    """A row that gives a text as precision."""
    text, said = TEXTS[name]

    def build(folder: Path) -> list[str]:
        copy_tiny(folder)
        return fill(COMMANDS[command], text, folder)

    return Attack(f"{command}: {name}", build, 2, said)


ROWS = {(name, command): make_row(name, command) for name in TEXTS for command in COMMANDS}
del ROWS["bare entry", "compare"]  # there it is a list of two precisions
SAMPLE = [ROWS[name, [*COMMANDS][number % 5]] for number, name in enumerate(TEXTS)]
"""Each text by one command in turn; two by each."""


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_a_text_that_is_no_precision(row: Attack, tmp_path: Path) -> None:
    """The same words by every command."""
    run_attack(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for row in ROWS.values() if row not in SAMPLE], ids=lambda row: row.name
)
def test_a_text_that_is_no_precision_by_any_command(row: Attack, tmp_path: Path) -> None:
    """The whole product."""
    run_attack(row, tmp_path)


# ---------------------------------------------------------------------------------------------
# Plans

ENTRIES = {
    "text_encoder": "T5EncoderModel",
    "transformer": "CogVideoXTransformer3DModel",
    "vae": "AutoencoderKLCogVideoX",
}


def write_bare(path: Path, *fp32_modules: str, **classes: str) -> None:
    """A sealed plan without exponents, with other classes and fp32 modules than the model's."""
    entries = tuple(
        ComponentPlan(name, kind, "0" * 64, "fp16", Scaling(fp32_modules=fp32_modules))
        for name, kind in {**ENTRIES, **classes}.items()
        if kind
    )
    plan = Plan(
        *("model", "", "CogVideoXPipeline", "fp16", read_class_versions(), entries),
        *("cpu", 0.0),
    )
    write_plan(seal_plan(plan), path)


def remove_weights(folder: Path) -> None:
    """Leave the configs."""
    for path in (folder / "model").rglob("*.safetensors"):
        path.unlink()


DOES_NOT_BELONG = "The plan for model doesn't belong here: "
PLANS: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "The plan {folder}/plan.json can't be read"),
    "FIFO": (os.mkfifo, "The plan {folder}/plan.json can't be read"),
    "other class": (
        lambda path: write_bare(path, transformer="Other"),
        DOES_NOT_BELONG + "transformer was a Other",
    ),
    "fewer components": (lambda path: write_bare(path, vae=""), DOES_NOT_BELONG + "it has no vae"),
    "more components": (
        lambda path: write_bare(path, unet="UNet2DConditionModel"),
        DOES_NOT_BELONG + "unet was a UNet2DConditionModel, and {folder}/model has nothing",
    ),
    "no such module": (
        lambda path: write_bare(path, "nowhere.at_all"),
        "The plan for model doesn't fit the pipeline: ",
    ),
}
"""What stands where a plan should, and what `check` says of it, which needs no weights."""


def make_plan_row(name: str) -> Attack:
    """A row that checks configs by a plan."""
    write, said = PLANS[name]

    def build(folder: Path) -> list[str]:
        copy_tiny(folder)
        remove_weights(folder)
        write(folder / "plan.json")
        return ["check", str(folder / "model"), "--precision", str(folder / "plan.json")]

    return Attack(f"check by a plan: {name}", build, 2, said)


@pytest.mark.parametrize("row", [make_plan_row(name) for name in PLANS], ids=lambda row: row.name)
def test_a_plan_that_a_check_cannot_use(row: Attack, tmp_path: Path) -> None:
    """Refused by what differs, with configs alone."""
    run_attack(row, tmp_path)

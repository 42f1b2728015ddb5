"""Files and numbers that a run starts from: one message that names the flag, and nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hostile.runner import Attack, copy_tiny, run_attack

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate", "MODEL", "a", "--steps", "1", "-o", "out.png"),
    "compare": ("compare", "MODEL", "--prompt", "a", "--steps", "1", "-o", "out.html"),
}
FILES = ("--image", "--mask", "--control-image")

CONTENTS: Mapping[str, tuple[bytes | None, str]] = {
    "absent": (None, "The file {file} ("),
    "empty": (b"", "The file {file} can't be read as a picture: "),
    "text": (b"a picture", "The file {file} can't be read as a picture: "),
    "truncated": (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        "The file {file} can't be read as a picture: ",
    ),
}
"""What stands in a file, and what is said of it."""

NUMBERS: Mapping[str, str] = {
    "0": "--strength 0.0 isn't above 0 and at most 1.",
    "-1": "--strength -1.0 isn't above 0 and at most 1.",
    "2": "--strength 2.0 isn't above 0 and at most 1.",
    "nan": "--strength nan isn't a number.",
    "inf": "--strength inf isn't a number.",
}

UNWANTED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "mask alone": (("--mask", "PICTURE"), "StableDiffusionInpaintPipeline needs --image, "),
    "control picture": (
        ("--control-image", "PICTURE"),
        "StableDiffusionPipeline doesn't take --control-image.",
    ),
    "strength alone": (
        ("--strength", "0.5"),
        "StableDiffusionPipeline doesn't take --strength.",
    ),
    "no step": (
        ("--image", "PICTURE", "--strength", "0.5"),
        "1 step at a strength of 0.5 are less than one step.",
    ),
}
"""What this model does not take, or not so."""


def write_picture(path: Path) -> None:
    """A small grey png."""
    from PIL import Image

    Image.new("RGB", (16, 16), "grey").save(path)


def fill(command: str, folder: Path, *words: str) -> list[str]:
    """The words of a command with its model, its output and its picture in the folder."""
    places = {name: str(folder / name) for name in ("out.png", "out.json", "out.html")}
    places |= {"MODEL": str(folder / "model"), "PICTURE": str(folder / "picture.png")}
    return [places.get(word, word) for word in (*COMMANDS[command], *words)]


def make_file_row(command: str, flag: str, name: str) -> Attack:
    """A row whose file is no picture."""
    content, said = CONTENTS[name]

    def build(folder: Path) -> list[str]:
        (folder / "model").mkdir()  # it is refused before the model is looked at
        path = folder / "given.png"
        if content is not None:
            path.write_bytes(content)
        return fill(command, folder, flag, str(path))

    message = said.format(file="{folder}/given.png")
    return Attack(f"{command} {flag}: {name}", build, 2, message)


def make_number_row(command: str, number: str) -> Attack:
    """A row whose strength is none."""

    def build(folder: Path) -> list[str]:
        (folder / "model").mkdir()
        return fill(command, folder, "--strength", number)

    return Attack(f"{command} --strength {number}", build, 2, NUMBERS[number])


def make_unwanted_row(command: str, name: str) -> Attack:
    """A row that gives a tiny Stable Diffusion what it does not take."""
    words, said = UNWANTED[name]

    def build(folder: Path) -> list[str]:
        copy_tiny(folder, "sd")
        write_picture(folder / "picture.png")
        return fill(command, folder, *words)

    return Attack(f"{command}: {name}", build, 2, said)


ROWS = [
    *(make_file_row(c, flag, name) for c in COMMANDS for flag in FILES for name in CONTENTS),
    *(make_number_row(c, number) for c in COMMANDS for number in NUMBERS),
    *(make_unwanted_row(command, name) for command in COMMANDS for name in UNWANTED),
]
SAMPLE = ROWS[::5]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_an_input_that_cannot_be_used(row: Attack, tmp_path: Path) -> None:
    """Every flag and every command says the same."""
    run_attack(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", [x for x in ROWS if x not in SAMPLE], ids=lambda row: row.name)
def test_any_input_that_cannot_be_used(row: Attack, tmp_path: Path) -> None:
    """The rest of the table."""
    run_attack(row, tmp_path)

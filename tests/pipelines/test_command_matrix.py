"""Commands on every kind of pipeline, made to overflow in fp16: exit code, result, and a clean terminal.

The rows are generated. The default run takes the cheap commands on the kinds that once failed them; the
whole matrix is slow.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stopdown.media import read_video, write_media
from stopdown.testing import PIPELINE_NAMES

Run = Callable[..., tuple[int, str, str]]

DENOISER = {"sd": "unet", "sdxl": "unet", "svd": "unet"}
"""Name of a pipeline to the component that overflows; transformer for the others."""

SMALL = ("--height", "32", "--width", "32")
FRAMES = {"cogvideox": 9, "cogvideox-image": 9, "wan": 5, "svd": 2}
"""Kinds that take a number of frames."""

INPUTS = {"svd": "image", "cogvideox-image": "image", "cogvideox-video": "video"}
"""What a kind starts from beside its prompt."""

COMMANDS = ("fit", "check", "generate", "plan", "batch")

CHEAP = [("svd", "fit"), ("cogvideox-video", "fit"), ("wan", "check")]

ALL = [(name, command) for name in PIPELINE_NAMES for command in COMMANDS]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with a picture and a clip."""
    monkeypatch.chdir(tmp_path)
    frames = np.random.default_rng(0).integers(0, 255, (9, 32, 32, 3), np.uint8)
    write_media(tmp_path / "video.gif", frames, 8)
    write_media(tmp_path / "image.png", frames[:1])
    return tmp_path


def list_inputs(name: str) -> dict[str, str]:
    """Fields of a request that a kind needs, with what they are here."""
    given = {} if name == "svd" else {"prompt": "a red circle"}
    files = {"image": "image.png", "video": "video.gif"}
    return given | ({field: files[field]} if (field := INPUTS.get(name)) else {})


def list_words(name: str, command: str, model: Path) -> list[str]:
    """A command line for a kind."""
    given = list_inputs(name)
    frames = ("--frames", str(FRAMES[name])) if name in FRAMES else ()
    media = [
        word for field in INPUTS.values() if field in given for word in (f"--{field}", given[field])
    ]
    prompt = [given["prompt"]] if "prompt" in given else []
    run = [*frames, *SMALL, "--steps", "2"]
    if command == "fit":
        return ["fit", str(model), "--device", "t4", "--memory", "8GiB"]
    if command == "check":
        return ["check", str(model), "--precision", "fp16", "--device", "t4"]
    if command == "generate":
        out = [
            "--precision",
            "fp16",
            "-o",
            "out.gif" if name in FRAMES or "video" in given else "out.png",
        ]
        return ["generate", str(model), *prompt, *dict.fromkeys(media), *run, *out]
    if command == "plan":
        said = ["--prompt", prompt[0]] if prompt else []
        return ["plan", str(model), *said, *run, "-o", "plan.json"]
    Path("rows.jsonl").write_text(json.dumps(given) + "\n")
    return [
        "batch",
        str(model),
        "--prompts",
        "rows.jsonl",
        "-o",
        "made",
        *run,
        "--precision",
        "fp16",
    ]


def run_row(run: Run, model: Path, name: str, command: str) -> None:
    """Run a row, and look at what came of it."""
    code, out, err = run(*list_words(name, command, model))
    assert "Traceback" not in out + err
    assert "Error:" not in err, err
    if command == "check":
        assert code in (0, 1), err
        assert "stopped without values" not in out
        return
    assert code == 0, err
    if command == "fit":
        assert out.startswith("Fits: yes, ")
        assert all(f"--{x} {x.upper()}" in out for x in list_inputs(name) if x != "prompt")
        assert ("PROMPT" in out) == (name != "svd")
    elif command == "plan":
        assert json.loads(Path("plan.json").read_text())["kind"] == "plan"
    else:
        made = [*Path().glob("out.*"), *Path("made").glob("*.mp4"), *Path("made").glob("*.png")]
        made = [path for path in made if path.suffix != ".json"]
        assert len(made) == 1
        frames = read_video(made[0])
        assert frames.shape[1:] == (32, 32, 3)
        assert frames.std() > 0


@pytest.mark.parametrize(("name", "command"), CHEAP)
@pytest.mark.usefixtures("here")
def test_what_failed_once_works(
    run: Run, save_tiny: Callable[..., Path], name: str, command: str
) -> None:
    """Forecasts draw what a kind needs, and checks keep to the sizes that its configs allow."""
    model = save_tiny(name, "bf16", DENOISER.get(name, "transformer"))
    run_row(run, model, name, command)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), ALL)
@pytest.mark.usefixtures("here")
def test_every_command_on_every_kind(
    run: Run, save_tiny: Callable[..., Path], name: str, command: str
) -> None:
    """Each cell ends as it should, with nothing of other libraries' on the terminal."""
    run_row(run, save_tiny(name, "bf16", DENOISER.get(name, "transformer")), name, command)

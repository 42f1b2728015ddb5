"""Commands on every kind of pipeline, made to overflow in fp16: exit code, result, and a clean terminal.

The rows are generated. The default run takes the cheap commands on the kinds that once failed them; the
whole matrix is slow.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import stopdown
from models.pipeline_calls import name_denoiser
from stopdown.bench import WAYS
from stopdown.frames.media import read_video, write_media
from stopdown.testing import PIPELINE_NAMES

pytestmark = pytest.mark.thorough

Run = Callable[..., tuple[int, str, str]]

SMALL = ("--height", "32", "--width", "32")
FRAMES = {"cogvideox": 9, "cogvideox-image": 9, "wan": 5, "svd": 2}
"""Kinds that take a number of frames."""

INPUTS = {"svd": "image", "cogvideox-image": "image", "cogvideox-video": "video"}
"""What a kind starts from beside its prompt."""

COMMANDS = (
    *(
        "fit",
        "check",
        "check a plan",
        "plan",
        "convert",
        "compare",
        "bench",
    ),
    *("generate", "generate by a plan", "generate within memory", "generate with a journal"),
    *("generate converted", "batch", "report", "explain", "run", "load"),
)
"""Every command that takes a model or what was made of one, some in several ways; and `load`, in Python."""

REFUSED: dict[tuple[str, str], str] = {}
"""Cells that are refused, with the reason."""

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


def list_words(name: str, command: str, model: Path) -> list[list[str]]:
    """Command lines for a kind, the last of which is the cell's."""
    given, source = list_inputs(name), str(model)
    sizes = [*(("--frames", str(FRAMES[name])) if name in FRAMES else ()), *SMALL]
    media = [word for x in INPUTS.values() if x in given for word in (f"--{x}", given[x])]
    prompt = [given["prompt"]] if "prompt" in given else []
    said = ["--prompt", prompt[0]] if prompt else []
    run, out = [*media, *sizes, "--steps", "2"], name_output(name)
    plain = ["generate", source, *prompt, *run, "--precision", "fp16-plain", "-o", out]
    plan = ["plan", source, "-o", "plan.json"]
    convert = ["convert", source, "converted"]
    Path("rows.jsonl").write_text(json.dumps(given) + "\n")
    Path("script.py").write_text(SCRIPT)
    rows = {
        "fit": [["fit", source, "--device", "t4", "--memory", "8GiB"]],
        "check": [["check", source, "--precision", "fp16-plain", "--device", "t4"]],
        "check a plan": [plan, ["check", source, "--precision", "plan.json", "--device", "t4"]],
        "plan": [plan],
        "convert": [convert],
        "compare": [
            ["compare", source, *said, *run, "--precisions", "fp32,fp16-plain", "-o", "c.html"]
        ],
        "bench": [["bench", source, "--minutes", 1e-9]],
        "generate": [plain],
        "generate by a plan": [
            plan,
            ["generate", source, *prompt, *run, "--precision", "plan.json", "-o", out],
        ],
        "generate within memory": [
            ["generate", source, *prompt, *run, "--memory", "1GiB", "-o", out]
        ],
        "generate with a journal": [[*plain, "--journal", "journal"]],
        "generate converted": [convert, ["generate", "converted", *prompt, *run, "-o", out]],
        "batch": [
            *(["batch", source, "--prompts", "rows.jsonl", "-o", "made", *sizes, "--steps", "2"],),
        ],
        "report": [plain, ["report", f"{out}.json", "-o", "d.html"]],
        "explain": [plain, ["explain", out]],
        "run": [["run", "script.py", source, json.dumps({**given, "name": name})]],
    }
    return rows[command]


def name_output(name: str) -> str:
    """A file that holds what a kind makes."""
    return "out.gif" if name in FRAMES or INPUTS.get(name) == "video" else "out.png"


SCRIPT = """
import json, sys
import numpy as np
import torch
from diffusers import DiffusionPipeline
from stopdown.frames.media import read_image, read_video

given = json.loads(sys.argv[2])
name = given.pop("name")
pipe = DiffusionPipeline.from_pretrained(sys.argv[1], torch_dtype=torch.float16)
pipe.set_progress_bar_config(disable=True)
from PIL import Image
if "image" in given:
    given["image"] = Image.open(given["image"]).convert("RGB")
if "video" in given:
    given["video"] = [Image.fromarray(x) for x in read_video(given["video"])]
frames = {"cogvideox": 9, "cogvideox-image": 9, "wan": 5, "svd": 2}.get(name)
if frames:
    given["num_frames"] = frames
if name == "svd":
    given["decode_chunk_size"] = 1
made = pipe(**given, height=32, width=32, num_inference_steps=2, output_type="np")
values = np.asarray(made[0])
assert np.isfinite(values).all() and values.std() > 0
"""
"""A program that loads a kind in fp16 and runs it, as people write them."""


def load(model: Path, name: str) -> None:
    """Load a kind in Python, and run it."""
    given: dict[str, Any] = list_inputs(name)
    if "image" in given:
        given["image"] = Image.open(given["image"]).convert("RGB")
    if "video" in given:
        given["video"] = [Image.fromarray(x) for x in read_video(given["video"])]
    frames = {"num_frames": FRAMES[name]} if name in FRAMES else {}
    pipe = stopdown.load(str(model), precision="fp16")
    with (
        warnings.catch_warnings()
    ):  # what made-up weights give the autoencoder is beyond its limits
        warnings.filterwarnings("ignore", ".*vae.decode. not certified", stopdown.StopdownWarning)
        made = pipe(**given, **frames, height=32, width=32, num_inference_steps=2, output_type="np")
    values = np.asarray(made[0])
    assert np.isfinite(values).all()
    assert values.std() > 0
    component = getattr(pipe, name_denoiser(name))
    assert {x.dtype for x in component.parameters()} >= {torch.float16}


def run_row(run: Run, model: Path, name: str, command: str) -> None:
    """Run a cell, and look at what came of it."""
    if command == "load":
        load(model, name)
        return
    for words in list_words(name, command, model):
        code, out, err = run(*words)
        assert "Traceback" not in out + err
        assert "[transformers]" not in err
        if (reason := REFUSED.get((name, command))) and code:
            assert reason in err
            return
        if words[0] == "check":
            assert code in (0, 1), err
            assert "stopped without values" not in out
        else:
            assert code == 0, err
        assert "Error:" not in err, err
    look(name, command, out)


def look(name: str, command: str, out: str) -> None:
    """Look at what a cell that ended well has made, or said."""
    if command == "fit":
        assert out.startswith("Yes, it fits: ")
        assert all(f"--{x} {x.upper()}" in out for x in list_inputs(name) if x != "prompt")
        assert ("PROMPT" in out) == (name != "svd")
    elif command == "explain":
        assert out.rstrip().endswith("Kind repaired")
        assert name_denoiser(name) in out
    elif command in ("compare", "report"):
        page = Path("c.html" if command == "compare" else "d.html").read_text()
        assert "NaN" in page
    elif command == "bench":
        assert out.count("left out after") == 2 * len(WAYS) + 3
    elif command.startswith("plan"):
        assert json.loads(Path("plan.json").read_text())["kind"] == "plan"
    elif command == "convert":
        assert list(Path("converted").rglob("*.safetensors"))
    elif command == "batch" or command.startswith("generate"):
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
    model = save_tiny(name, "bf16", name_denoiser(name))
    run_row(run, model, name, command)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), ALL)
@pytest.mark.usefixtures("here")
def test_every_command_on_every_kind(
    run: Run, save_tiny: Callable[..., Path], record_property: Any, name: str, command: str
) -> None:
    """Each cell ends as it should, with nothing of other libraries' on the terminal."""
    model = save_tiny(name, "bf16", name_denoiser(name))
    begun = time.process_time()
    try:
        run_row(run, model, name, command)
    finally:
        record_property("cpu_s", round(time.process_time() - begun, 1))

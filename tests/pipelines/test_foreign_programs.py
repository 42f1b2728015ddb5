"""Whole programs of others, unedited, from checkouts that variables name, with tiny checkpoints.

Their own packages (deepspeed, triton, torchvision, imageio, datasets, wandb…) have to be importable, by
`PYTHONPATH` for example; a test without them is skipped and says which is missing.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_server import HubServer
from PIL import Image, ImageSequence

from models.foreign_models import VARIABLES, find_missing
from stopdown import testing
from stopdown.frames.media import read_video, write_media
from stopdown.records import ScriptRecord, from_json

TESTS = Path(__file__).parents[1]
CPU_RUN = TESTS / "processes" / "cpu_run.py"
NEEDS = {
    "cli_demo.py": (),
    "its Gradio demo": (
        "gradio",
        "gradio_client",
        "moviepy",
        "openai",
        "skvideo",
        "spandrel",
        "cv2",
    ),
    "aimg videogen": (
        "open_clip",
        "timm",
        "torchdiffeq",
        "click_shell",
        "omegaconf",
        "kornia",
        "cv2",
    ),
    "sample_video.py": ("deepspeed", "triton", "torchvision", "imageio", "datasets", "wandb"),
}
"""Program to what it imports and this project does not."""

GUARDED = ("-m", "stopdown", "run", "--json")
ON_CPU = (*GUARDED, "--device", "cpu")

pytestmark = pytest.mark.slow


def skip_without(checkout: str, program: str) -> dict[str, str]:
    """The environment that a program runs in; skips where a checkout or package is missing."""
    if missing := find_missing(checkout):
        pytest.skip(f"needs a checkout of {checkout}: {', '.join(missing)} not set")
    absent = [name for name in NEEDS[program] if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"needs the packages of {program}: {', '.join(absent)} cannot be imported")
    paths = [os.environ[name] for name in VARIABLES[checkout]]
    paths += [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu"}


def call(
    folder: Path, env: dict[str, str], *words: object, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """A process in a new folder, which ends with this code."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done


def read_record(output: str) -> ScriptRecord:
    """The record behind what the script printed."""
    return from_json(output[output.index('{\n  "script"') :], ScriptRecord)


def measure_psnr(path: Path, reference: Path) -> float:
    """Decibels between two videos."""
    one, other = (np.asarray(read_video(x), float) for x in (path, reference))
    return float(10 * np.log10(255**2 / np.mean((one - other) ** 2)))


@pytest.mark.timeout(1800)  # nine processes, each of which imports deepspeed
def test_sample_video_of_cogvideo(tmp_path: Path) -> None:
    """Healthy it writes the same file; an overflow of the transformer is black, and right when guarded."""
    env = skip_without("CogVideo SAT", "sample_video.py")
    script = Path(os.environ["STOPDOWN_COGVIDEO"]) / "sat" / "sample_video.py"
    made = tmp_path / "made"
    with_script = {**env, "PYTHONPATH": f"{script.parent}{os.pathsep}{env['PYTHONPATH']}"}
    made.mkdir()
    call(tmp_path / "make", with_script, CPU_RUN, TESTS / "processes" / "sat_program.py", made)

    def describe(*configs: str) -> list[object]:
        names = ("model", "inference", *configs)
        return [script, "--base", *(made / f"{name}.yaml" for name in names), "--seed", 5]

    def run_plain(name: str, *configs: str) -> Path:
        call(tmp_path / name, env, CPU_RUN, *describe(*configs))
        return next((tmp_path / name).rglob("*.mp4"))

    def run_guarded(name: str, *configs: str) -> tuple[Path, ScriptRecord]:
        done = call(tmp_path / name, env, *ON_CPU, *describe(*configs))
        return next((tmp_path / name).rglob("*.mp4")), read_record(done.stdout)

    video, record = run_guarded("healthy")
    assert video.read_bytes() == run_plain("plain").read_bytes()
    assert record.modules is not None
    calls = {call.component: call.precisions for call in record.modules.calls}
    assert calls == {
        "GeneralConditioner": ("fp16",),
        "OpenAIWrapper": ("fp16",),
        "VideoAutoencoderInferenceWrapper.decode": ("fp16",),
    }
    assert record.modules.repairs == ()

    wide = run_plain("wide", "overflow", "fp32")
    assert np.asarray(read_video(run_plain("black", "overflow"))).max() < 8
    video, record = run_guarded("repaired", "overflow")
    assert record.modules is not None
    (repair,) = record.modules.repairs
    assert (repair.component, repair.action) == ("OpenAIWrapper", "rescaled")
    assert "diffusion_model.transformer.layers.1" in repair.module_path
    assert measure_psnr(video, wide) > 25

    call(tmp_path / "wrong", env, CPU_RUN, script, "--nonsense", code=2)
    call(tmp_path / "wrong-guarded", env, *ON_CPU, script, "--nonsense", code=2)


def save_cogvideox(recipe: str, overflow: str | None, folder: Path) -> None:
    """A tiny one whose tiles are as large as those of the real one."""
    pipe = testing.make_pipeline(recipe, overflow=overflow, dtype=torch.bfloat16)
    pipe.vae.register_to_config(sample_height=480, sample_width=720)
    pipe.save_pretrained(folder)


@pytest.mark.timeout(1800)
def test_cli_demo_of_cogvideo(tmp_path: Path) -> None:
    """Healthy it writes the same file; an overflow of the transformer is black, and right when guarded."""
    env = skip_without("CogVideo", "cli_demo.py")
    script = Path(os.environ["STOPDOWN_COGVIDEO"]) / "inference" / "cli_demo.py"
    for kind, overflow in (("healthy", None), ("faulty", "transformer")):
        save_cogvideox("cogvideox-image", overflow, tmp_path / kind / "CogVideoX-5b-I2V")
    noise = np.random.default_rng(0).integers(0, 255, (1, 32, 32, 3), np.uint8)
    write_media(tmp_path / "picture.png", noise)

    def describe(kind: str) -> list[object]:
        words = "--generate_type i2v --num_frames 9 --width 32 --height 32 --dtype float16"
        paths = ["--model_path", tmp_path / kind / "CogVideoX-5b-I2V"]
        paths += ["--image_or_video_path", tmp_path / "picture.png"]
        return [script, "--prompt", "a bike", *words.split(), "--num_inference_steps", 2, *paths]

    def run(name: str, kind: str, *command: object) -> tuple[Path, str]:
        done = call(tmp_path / name, env, *command, *describe(kind))
        return tmp_path / name / "output.mp4", done.stdout

    video, output = run("guarded", "healthy", *ON_CPU)
    assert video.read_bytes() == run("plain", "healthy", CPU_RUN)[0].read_bytes()
    assert [run.repairs for run in read_record(output).runs] == [()]

    wide, _ = run("wide", "faulty", *ON_CPU, "--precision", "fp32")
    assert np.asarray(read_video(run("black", "faulty", CPU_RUN)[0])).max() < 8
    video, output = run("repaired", "faulty", *ON_CPU)
    (found,) = read_record(output).runs
    assert [(x.component, x.action) for x in found.repairs] == [("transformer", "rescaled")]
    assert measure_psnr(video, wide) > 25

    call(tmp_path / "wrong", env, CPU_RUN, script, "--nonsense", code=2)
    call(tmp_path / "wrong-guarded", env, *ON_CPU, script, "--nonsense", code=2)


def take_interrupts() -> None:
    """In a new process: Ctrl-C ends it, also where whoever started the tests ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def press_button(folder: Path, env: dict[str, str], *words: object) -> tuple[Path, str, int]:
    """Start a Gradio program, have it make a video, and end it as Ctrl-C does.

    Returns:
        The video, what the program printed, and its exit code.
    """
    folder.mkdir()
    for name in ("example_images", "example_videos"):
        (folder / name).symlink_to(find_gradio_demo() / name)
    port, video = find_port(), folder / "video.mp4"
    with (folder / "errors.txt").open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=folder,
            env={**env, "GRADIO_SERVER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=take_interrupts,
        )
    try:
        while not answers(port):
            assert server.poll() is None, (folder / "errors.txt").read_text()[-2000:]
            time.sleep(0.5)
        program = TESTS / "processes" / "gradio_program.py"
        call(folder / "press", env, program, "press", f"http://127.0.0.1:{port}", video)
    finally:
        server.send_signal(signal.SIGINT)
        output, _ = server.communicate()
    return video, output, server.returncode


def find_gradio_demo() -> Path:
    """The folder of the larger one; the button of the smaller one lacks an input."""
    return Path(os.environ["STOPDOWN_COGVIDEO"]) / "inference" / "gradio_composite_demo"


def find_port() -> int:
    """One that is free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overflow", [None, "transformer"], ids=["healthy", "faulty"])
def test_the_gradio_demo_of_cogvideo(tmp_path: Path, overflow: str | None) -> None:
    """Its button gives the same video under `run`; in fp16 a fault is black, and right when repaired."""
    env = skip_without("CogVideo", "its Gradio demo")
    script = find_gradio_demo() / "app.py"
    save_cogvideox("cogvideox", overflow, tmp_path / "cogvideox")
    call(
        tmp_path / "make",
        env,
        TESTS / "processes" / "gradio_program.py",
        "make",
        script.parent,
        tmp_path,
    )
    repositories = {
        "THUDM/CogVideoX-5b": tmp_path / "cogvideox",
        "ai-forever/Real-ESRGAN": tmp_path / "esrgan",
        "AlexWortega/RIFE": tmp_path / "rife",
    }
    with HubServer(repositories) as hub:
        env |= {
            "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub"),
            "GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_ANALYTICS_ENABLED": "False",
        }  # fmt: skip
        plain, _, code = press_button(tmp_path / "plain", env, script)
        if overflow is None:
            video, output, guarded_code = press_button(tmp_path / "guarded", env, *GUARDED, script)
            assert video.read_bytes() == plain.read_bytes()
            assert all(not run.repairs for run in read_record(output).runs)
            assert guarded_code == code
            return
        halves = (*GUARDED, "--precision", "fp16")
        black, _, _ = press_button(tmp_path / "black", env, *halves, "--components", "none", script)
        assert np.asarray(read_video(black)).max() < 8
        video, output, guarded_code = press_button(tmp_path / "repaired", env, *halves, script)
    (found,) = read_record(output).runs
    assert [(x.component, x.action) for x in found.repairs] == [("transformer", "rescaled")]
    assert measure_psnr(video, plain) > 20  # which is bf16
    assert guarded_code == code


def read_webp(path: Path) -> np.ndarray:
    """Its frames."""
    with Image.open(path) as opened:
        frames = [np.asarray(x.convert("RGB"), float) for x in ImageSequence.Iterator(opened)]
    return np.stack(frames)


@pytest.mark.timeout(1800)
def test_the_video_command_of_imaginairy(tmp_path: Path) -> None:
    """Without CUDA its UNet mixes dtypes, which is repaired; as on CUDA, under autocast, it is guarded.

    There the healthy run gives the same file, and what overflows is repaired.
    """
    env = skip_without("imaginAIry", "aimg videogen")
    checkout = Path(os.environ["STOPDOWN_IMAGINAIRY"])
    program, made = TESTS / "processes" / "imaginairy_program.py", tmp_path / "made"
    call(tmp_path / "make", env, program, "make", checkout, made)
    env |= {
        "PYTHONPATH": f"{made}{os.pathsep}{env['PYTHONPATH']}", "HF_HUB_OFFLINE": "1",
        "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "",
    }  # fmt: skip
    noise = np.random.default_rng(0).integers(0, 255, (1, 64, 64, 3), np.uint8)
    write_media(tmp_path / "picture.png", noise)
    size = "--num-frames 2 -s 2 --size 64,64 --seed 5 --fps 30 --output_folder videos"
    words = ["videogen", "--start-image", tmp_path / "picture.png", *size.split()]
    alone, as_on_cuda = (checkout / "imaginairy" / "cli" / "bin" / "aimg",), (program, "autocast")

    def run(name: str, weights: str, *command: object, code: int = 0) -> tuple[Path, str]:
        downloads = {**env, "XDG_CACHE_HOME": str(made / weights)}
        output = call(tmp_path / name, downloads, *command, *words, code=code).stdout
        return next((tmp_path / name).rglob("*.webp"), Path()), output

    run("mixed-plain", "cache", *alone, code=1)
    video, output = run("mixed", "cache", *GUARDED, *alone)
    found = read_record(output).modules
    assert found is not None
    assert {repair.action for repair in found.repairs} == {"cast-inputs"}
    assert found.repairs[0].component == "OpenAIWrapper"
    narrow, wide = (
        read_webp(video),
        read_webp(run("whole", "cache", *GUARDED, "--precision", "fp32", *alone)[0]),
    )
    assert 10 * np.log10(255**2 / np.mean((narrow - wide) ** 2)) > 25

    video, output = run("guarded", "cache", *GUARDED, *as_on_cuda)
    assert video.read_bytes() == run("plain", "cache", *as_on_cuda)[0].read_bytes()
    found = read_record(output).modules
    assert found is not None
    assert found.repairs == ()

    wide = read_webp(run("wide", "faulty", *GUARDED, "--precision", "fp32", *alone)[0])
    assert read_webp(run("black", "faulty", *as_on_cuda)[0]).max() < 8
    video, output = run("repaired", "faulty", *GUARDED, *as_on_cuda)
    found = read_record(output).modules
    assert found is not None
    (repair,) = found.repairs
    assert (repair.component, repair.kind) == ("OpenAIWrapper", "range")
    assert repair.action != "none"
    error = np.mean((read_webp(video) - wide) ** 2)
    assert 10 * np.log10(255**2 / error) > 25

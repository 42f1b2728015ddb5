"""Published scripts, run unedited with plain Python and with `stopdown run`.

    git clone https://github.com/zai-org/CogVideo cogvideo
    git -C cogvideo checkout e519eced782c08db81f45e5eb40baa45958087ae
    git clone https://github.com/huggingface/diffusers diffusers-source
    git -C diffusers-source checkout 58eb52c0803ea9af3abec60841c2a093bdf1f951
    pip install imageio imageio-ffmpeg
    python benchmarks/public_scripts.py --cogvideo cogvideo --diffusers diffusers-source \
        -o benchmarks/results/public_scripts

Neither repository is part of this one (both are Apache-2.0); the SHA-256 of each file is held against
the one written here. The ids of the models that the scripts name are answered by a small Hub on
loopback with small folders of the real classes, whose weights overflow in fp16. Each script is run
three times on the CPU, in a process of its own:

- *as it is*: nothing guarded (`stopdown run --device cpu --components none`, which only sends what goes to
  CUDA to the CPU and looks at the pictures);
- *stopdown run* (`--device cpu`);
- *the reference*: `torch.float16` names `torch.float32` before it starts (bf16 stays bf16).

Two are run once more by plain Python, Stopdown not imported and what needs an accelerator left out: the
one that fails by itself, and the one in bf16, which must give the same file.
"""

from __future__ import annotations

import argparse
import doctest
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from stopdown import testing
from stopdown.devices.environment import describe_machine
from stopdown.frames.media import read_image, read_video, write_media
from stopdown.records import ScriptRecord, from_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pipelines"))
from hub_server import HubServer

PICTURES = "huggingface/documentation-images"
"""The repository with the pictures of Diffusers' documentation; pictures of ours stand in for them."""


@dataclass(frozen=True)
class Case:
    """A public script: where it comes from, its arguments, and what stands in for its model.

    Attributes:
        origin: `cogvideo` or `diffusers`, with the path in it and the file's SHA-256.
        block: number of the Python block in a page, from 0; -1 for the example of a docstring;
            None for the whole file.
        model: id that it names; recipe and overflowing component of what stands in for it.
        output: file that it writes.
        arguments: on its command line.
        plain: run by plain Python as well.
    """

    name: str
    origin: str
    path: str
    sha256: str
    block: int | None
    model: str
    recipe: str
    overflow: str
    output: str
    arguments: str = ""
    plain: bool = False


CLI_DEMO = ("cogvideo", "inference/cli_demo.py")
CLI_DEMO_SHA = "8dc24b5ae672989a3abfbe2c2ca5fa3b51cbd0c59d306a89e576a2a29e803a18"
PAGE = "docs/source/en/using-diffusers/text-img2vid.md"
PAGE_SHA = "d9760091a50894af094c2fcc0756761f61bd8942dd15fac52455afd3a5e08f0b"
SVD = "docs/source/en/api/pipelines/stable_diffusion/svd.md"
SVD_SHA = "1afb1b088b6f3a58176d4d28974ad69f71dade0d107ae6e5eb7f0fa38141fab8"
CODE = "src/diffusers/pipelines"
SHORT = "--dtype float16 --num_inference_steps 2 --output_path output.mp4"
GIRL = "--prompt 'a girl riding a bike' --model_path THUDM/CogVideoX-5b"

CASES = (
    Case(
        *("cli_demo.py, text to video", *CLI_DEMO, CLI_DEMO_SHA, None),
        *("THUDM/CogVideoX-5b", "cogvideox", "transformer", "output.mp4"),
        f"{GIRL} --num_frames 1 {SHORT}",
    ),
    Case(
        *("cli_demo.py, image to video", *CLI_DEMO, CLI_DEMO_SHA, None),
        *("THUDM/CogVideoX-5b-I2V", "cogvideox-image", "transformer", "output.mp4"),
        f"{GIRL}-I2V --generate_type i2v --image_or_video_path picture.png --num_frames 9 "
        f"--width 32 --height 32 {SHORT}",
    ),
    Case(
        *("cli_demo.py, video to video", *CLI_DEMO, CLI_DEMO_SHA, None),
        *("THUDM/CogVideoX-5b", "cogvideox", "transformer", "output.mp4"),
        f"{GIRL} --generate_type v2v --image_or_video_path clip.mp4 --num_frames 9 {SHORT}",
        plain=True,
    ),
    Case(
        *("Diffusers' page on video, CogVideoX", "diffusers", PAGE, PAGE_SHA, 4),
        *("THUDM/CogVideoX-2b", "cogvideox", "transformer", "output.mp4"),
    ),
    Case(
        *("CogVideoXPipeline's docstring", "diffusers"),
        f"{CODE}/cogvideo/pipeline_cogvideox.py",
        "abd30e0f3ee65fa9c5e065d378c5c2b142843a0c0d195f4a3e7bcf71696d6562",
        *(-1, "THUDM/CogVideoX-2b", "cogvideox", "text_encoder", "output.mp4"),
    ),
    Case(
        *("CogView3PlusPipeline's docstring (bf16)", "diffusers"),
        f"{CODE}/cogview3/pipeline_cogview3plus.py",
        "52eb71e08b14ba213c5b2eeb410993290c5523dbc945f81b9bff1142be755fe1",
        *(-1, "THUDM/CogView3-Plus-3B", "cogview3plus", "vae", "output.png"),
        plain=True,
    ),
    Case(
        *("Diffusers' page on Stable Video Diffusion", "diffusers", SVD, SVD_SHA, 1),
        *("stabilityai/stable-video-diffusion-img2vid-xt", "svd", "unet", "generated.mp4"),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """One run: how it ended, what was found in its frames, and how near it is to fp32."""

    exit_code: int
    findings: tuple[str, ...]
    repairs: tuple[str, ...]
    error: str
    psnr: float | None
    seconds: float


def take_script(case: Case, root: Path, folder: Path) -> Path:
    """The script as a file in `folder`: a copy of it, or a block of its page, with nothing changed.

    Raises:
        SystemExit: the file is not the one that is meant here.
    """
    source = root / case.path
    content = source.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != case.sha256:
        raise SystemExit(f"{source} has SHA-256 {found}, and {case.sha256} is meant")
    text = content.decode()
    if case.block == -1:
        examples = re.search(r'^EXAMPLE_DOC_STRING = """(.*?)"""', text, re.DOTALL | re.MULTILINE)
        parsed = doctest.DocTestParser().get_examples(examples[1] if examples else "")
        text = "".join(example.source for example in parsed)
    elif case.block is not None:
        blocks = re.findall(r"^```(?:py|python)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        text = blocks[case.block]
    script = folder / source.with_suffix(".py").name
    script.write_text(text)
    return script


def save_model(case: Case, folder: Path) -> Path:
    """A small folder of the real classes that overflows in fp16, as the script expects to find it."""
    if case.recipe == "svd":
        return _save_svd(folder)
    pipe = testing.make_pipeline(case.recipe, overflow=case.overflow, dtype=torch.bfloat16)
    if case.recipe.startswith("cogvideox"):  # the tiles of the real one
        pipe.vae.register_to_config(sample_height=480, sample_width=720)
    pipe.save_pretrained(folder)
    return folder


def _save_svd(folder: Path) -> Path:
    """Two frames, and an autoencoder that shrinks 32 times: the page's 1024x576 pixels are few latents.

    32 channels are the fewest that its group norms take. What is left is its decoder in fp16: 190 GFLOP.
    """
    from diffusers import AutoencoderKLTemporalDecoder

    pipe = testing.make_pipeline("svd", overflow="unet")
    torch.manual_seed(0)
    vae = AutoencoderKLTemporalDecoder(
        down_block_types=("DownEncoderBlock2D",) * 6,
        block_out_channels=(32,) * 6,
        layers_per_block=1,
        sample_size=32,
        force_upcast=True,
    )
    pipe.register_modules(vae=vae.eval())
    pipe.unet.register_to_config(num_frames=2)
    pipe.to(torch.bfloat16).save_pretrained(folder, variant="fp16")
    return folder


def write_pictures(folder: Path, pictures: Path) -> None:
    """A picture and a clip to start from, and those that the documentation names."""
    noise = np.random.default_rng(0).integers(0, 255, (9, 8, 12, 3), np.uint8)
    clip = noise.repeat(60, 1).repeat(60, 2)
    write_media(folder / "picture.png", clip[:1, :32, :32])
    write_media(folder / "clip.mp4", clip)
    for name in ("svd/rocket.png",):
        target = pictures / "diffusers" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_media(target, clip[:1])


REDIRECT = """
import requests
import requests.sessions
_ask = requests.sessions.Session.request
def _redirect(self, method, url, *args, **kwargs):
    return _ask(self, method, url.replace("https://huggingface.co", {endpoint!r}), *args, **kwargs)
requests.sessions.Session.request = _redirect
import torch
torch.manual_seed(0)
"""
"""Read by Python at its start: pictures of the Hub come from the one on loopback, as models do, and
scripts that set no seed draw the same noise in each run."""

WITHOUT_ACCELERATOR = """
from diffusers import DiffusionPipeline
DiffusionPipeline.to = lambda self, *args, **kwargs: self
DiffusionPipeline.enable_sequential_cpu_offload = lambda self, *args, **kwargs: None
DiffusionPipeline.enable_model_cpu_offload = lambda self, *args, **kwargs: None
"""
"""For plain Python on the CPU, beside what `REDIRECT` does."""

AS_FP32 = """
import json, sys, torch
torch.float16 = torch.float32
from stopdown.app.run_command import ScriptOptions, run_script
from stopdown.records import to_json
options = ScriptOptions(sys.argv[1], tuple(sys.argv[2:]), components="none", device="cpu")
record = run_script(options, lambda text: None)
sys.stdout.write(to_json(record))
"""


def run_case(case: Case, root: Path, base: Path) -> dict[str, Any]:
    """All three runs of a script."""
    base.mkdir()
    script = take_script(case, root, base)
    model = save_model(case, base / "model")
    write_pictures(base, base / "pictures")
    with HubServer({case.model: model, PICTURES: base / "pictures"}) as hub:
        environment = os.environ | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(base / "hub"),
            "PYTHONPATH": write_site(base / "site", REDIRECT.format(endpoint=hub.endpoint)),
        }
        command = [sys.executable, "-m", "stopdown.app.cli", "run", "--device", "cpu", "--json"]
        words = [str(script), *shlex.split(case.arguments)]
        full = run_once([sys.executable, "-c", AS_FP32, *words], base, case, environment, None)
        plain_command = [*command, "--components", "none", *words]
        plain = run_once(plain_command, base, case, environment, full[1])
        guarded = run_once([*command, *words], base, case, environment, full[1])
        bare = None
        if case.plain:
            text = REDIRECT.format(endpoint=hub.endpoint) + WITHOUT_ACCELERATOR
            environment["PYTHONPATH"] = write_site(base / "plain", text)
            bare = run_once([sys.executable, *words], base, case, environment, full[1])[0]
    return {
        "name": case.name,
        "source": f"{case.origin}:{case.path}",
        "sha256": case.sha256,
        "arguments": case.arguments,
        "as it is": asdict(plain[0]),
        "stopdown run": asdict(guarded[0]),
        "in fp32": asdict(full[0]),
        "plain Python": asdict(bare) if bare else None,
    }


def write_site(folder: Path, text: str) -> str:
    """A search path for modules on which Python finds `text` when it starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def run_once(
    command: list[str],
    folder: Path,
    case: Case,
    environment: dict[str, str],
    reference: np.ndarray[Any, Any] | None,
) -> tuple[Outcome, np.ndarray[Any, Any] | None]:
    """One run, and the frames that it wrote; None without any."""
    output = folder / case.output
    output.unlink(missing_ok=True)
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    elapsed_s = time.perf_counter() - begun
    start = done.stdout.find('{\n  "script"')
    record = from_json(done.stdout[start:], ScriptRecord) if start >= 0 else None
    error = re.findall(r"^(\w*(?:Error|Exception): .*)$", done.stderr, re.MULTILINE)
    frames = None
    if output.exists():
        frames = read_image(output)[None] if output.suffix == ".png" else read_video(output)
    return (
        Outcome(
            record.exit_code if record else done.returncode,
            tuple(f"{found.kind}" for found in record.findings) if record else (),
            tuple(f"{x.module_path}: {x.action}" for run in record.runs for x in run.repairs)
            if record
            else (),
            error[-1][:200] if error else "",
            measure_psnr(frames, reference),
            round(elapsed_s, 1),
        ),
        frames,
    )


def measure_psnr(
    frames: np.ndarray[Any, Any] | None, reference: np.ndarray[Any, Any] | None
) -> float | None:
    """In dB, of the files as they were written; None without both."""
    if frames is None or reference is None or frames.shape != reference.shape:
        return None
    error = np.mean((frames.astype(np.float64) - reference) ** 2)
    return float("inf") if error == 0 else round(float(10 * np.log10(255**2 / error)), 1)


def describe(outcome: dict[str, Any]) -> str:
    """A cell of the table."""
    if outcome["error"]:
        return f"fails: `{outcome['error'][:70]}`"
    parts = [", ".join(sorted(set(outcome["findings"]))) or "a picture"]
    if outcome["repairs"] and not all(text.endswith("none") for text in outcome["repairs"]):
        parts.append(f"repaired: {', '.join(outcome['repairs'])}")
    if outcome["psnr"] is not None:
        psnr = outcome["psnr"]
        parts.append(
            "the same file as the reference" if psnr == float("inf") else f"{psnr} dB to fp32"
        )
    return "; ".join(parts)


def describe_plain(row: dict[str, Any]) -> str:
    """What plain Python gave, in whole; two spaces at its end break the line."""
    found = row["plain Python"]
    if found["error"]:
        return f"exit code {found['exit_code']}, `{found['error']}`.  "
    same = "the same file" if found["psnr"] == float("inf") else "another file"
    return f"{same} as the reference.  "


def write_results(rows: list[dict[str, Any]], output: Path) -> None:
    """The table for people, and all of it as JSON; rows that were made before and not now are kept."""
    machine, stored = describe_machine(), output.with_suffix(".json")
    kept = json.loads(stored.read_text())["rows"] if stored.exists() else []
    made = {row["name"]: row for row in [*kept, *rows]}
    rows = [made[case.name] for case in CASES if case.name in made]
    content = {"machine": machine, "command": "python benchmarks/public_scripts.py", "rows": rows}
    stored.write_text(json.dumps(content, indent=1, default=str) + "\n")
    lines = [
        "# Public scripts, unedited",
        "",
        "Made by `benchmarks/public_scripts.py`, which says what is run, and on which models.",
        "",
        "| script | as it is | `stopdown run` |",
        "|---|---|---|",
        *(
            f"| {row['name']} | {describe(row['as it is'])} | {describe(row['stopdown run'])} |"
            for row in rows
        ),
        "",
        *(
            f"{row['name']}, by plain Python without Stopdown: {describe_plain(row)}"
            for row in rows
            if row.get("plain Python")
        ),
        "",
    ]
    output.with_suffix(".md").write_text("\n".join(lines))


def main() -> None:
    """Run the cases whose repositories were named, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cogvideo", type=Path, required=True)
    parser.add_argument("--diffusers", type=Path, required=True)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("-o", "--output", type=Path, default=Path("public_scripts"))
    options = parser.parse_args()
    roots = {"cogvideo": options.cogvideo.absolute(), "diffusers": options.diffusers.absolute()}
    rows = []
    with TemporaryDirectory() as base:
        for number, case in enumerate(CASES):
            if options.only in case.name:
                rows.append(run_case(case, roots[case.origin], Path(base) / str(number)))
                print(json.dumps(rows[-1], indent=1), flush=True)
                write_results(rows, options.output)


if __name__ == "__main__":
    main()

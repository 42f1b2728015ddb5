"""Every pipeline of Diffusers through `generate` on a simulated T4, without a precision flag.

Each row takes a pipeline class with the tiny components and the arguments that Diffusers' own tests have,
makes its denoiser overflow in fp16, saves it in bf16, and gives the folder to `stopdown generate` with its
prompt, pictures and sizes. The same command is run in fp32 and in bf16 on the CPU, and with `fp16-plain`.
Diffusers' tests are no part of its package: take them from its repository, and install what they import
(`pip install parameterized requests torchvision`; without torchvision, ten classes can't be built).

    git clone --depth 1 https://github.com/huggingface/diffusers /tmp/diffusers
    python benchmarks/every_pipeline.py /tmp/diffusers             # rows that are not stored, an hour
    python benchmarks/every_pipeline.py /tmp/diffusers --only FluxPipeline SanaPipeline
    python benchmarks/every_pipeline.py --table                    # only write the table
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from tiny_checkpoints import answer_hub, fit_vocabularies  # noqa: E402

from models.rescaling_models import WAYS, cast_tree, scale_weights  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.interception.patches import Patches  # noqa: E402
from stopdown.interception.randomness import HALVES  # noqa: E402
from stopdown.numerics import iterate_tensors  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "every_pipeline.json"
LIMIT_SECONDS = 1500
"""Of processor time, which a busy machine doesn't change."""
MOST_BYTES = 12 * 2**30
"""Of address space: a row that wants more is a row, and not the end of the machine."""

DENOISERS = ("transformer", "unet", "prior", "decoder", "dit", "latent_upsampler")
MOST_BITS = 20
LARGEST_WEIGHT = 2.0**15
LARGEST_NOISE = 64.0
NEAR = 0.2
"""A mean difference, of 255, that is right in any case: pictures are rounded to whole numbers."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A pipeline class as Diffusers tests it.

    Attributes:
        name: of the class, numbered where several tests make one.
        path: of the module of its test, dotted.
        test: name of the test's class.
    """

    name: str
    path: str
    test: str


def import_torchvision() -> None:
    """Import torchvision where it is installed, if need be without its compiled operations.

    Its wheel for CUDA can't load them beside a PyTorch for CPUs, and then it lacks the names of two.
    Pictures are resized by PyTorch's own operations.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    with contextlib.suppress(RuntimeError):
        importlib.import_module("torchvision")
        return
    for name in [x for x in sys.modules if x.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float least) -> Tensor"
        )
    importlib.import_module("torchvision")


def list_subjects(checkout: Path) -> list[Subject]:
    """Every pipeline class that a test makes, by name, without importing one."""
    pattern = re.compile(r"^class (\w+)\(.*?(?=^class |\Z)", re.S | re.M)
    found: dict[str, Subject] = {}
    for path in sorted((checkout / "tests" / "pipelines").rglob("test_*.py")):
        dotted = ".".join(path.relative_to(checkout).with_suffix("").parts)
        text = path.read_text()
        if "ConsisID" in text or "def get_dummy_components" not in text:
            continue  # needs OpenCV
        for match in pattern.finditer(text):
            kind = re.search(r"^    pipeline_class = (\w+)", match[0], re.M)
            is_slow = re.match(r"class \w*(Slow|Integration|Nightly)", match[0])
            if kind is None or is_slow:
                continue
            names = [kind[1], *(f"{kind[1]} #{i}" for i in range(2, 9))]
            if not any(found[x].test == match[1] for x in names if x in found):
                name = next(x for x in names if x not in found)
                found[name] = Subject(name, dotted, match[1])
    families = Counter[str]()
    ranks = {}
    for name, subject in sorted(found.items()):
        family = subject.path.split(".")[2]
        families[family] += 1
        ranks[name] = (families[family], name)
    return sorted(found.values(), key=lambda x: ranks[x.name])  # one of each family first


def make_row(
    subject: Subject, folder: Path, find_part: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Build one pipeline, run it in every way, and say what came of it.

    Args:
        find_part: returns the component that is made to overflow; the denoiser by default.
    """
    row: dict[str, Any] = {}
    try:
        pipe, given = build(subject)
        row["class"] = type(pipe).__name__
        row["family"] = type(pipe).__module__.split(".")[2]
        row |= make_overflow(pipe, given, (find_part or find_denoiser)(pipe))
        save(pipe, folder / "model")
    except Exception as error:
        row |= {"outcome": "not built", "said": f"{type(error).__name__}: {error}"[:300]}
        return row | {"where": shorten(traceback.format_exc())}
    joins = type(getattr(pipe, "controlnet", None)).__name__.startswith("Multi")
    words = list_words(type(pipe), given, folder, least=1 if joins else 2)
    row["words"] = [x.replace(f"{folder}/", "") for x in words]
    suffix = choose_output(type(pipe), given)
    del pipe, given
    runs = {
        "auto": ("--device", "simulated"),
        "fp32": ("--device", "cpu", "--precision", "fp32"),
        "bf16": ("--device", "cpu", "--precision", "bf16"),
        "plain": ("--device", "simulated", "--precision", "fp16-plain", "--on-fault", "raise"),
    }
    for name, options in runs.items():
        output = folder / f"{name}{suffix}"
        ends = (*options, "-o", str(output), "--json")
        with simulated_t4():
            row[name] = run(["generate", str(folder / "model"), *words, *ends], folder)
            said = row[name].get("said", "")
            if row[name]["code"] == 2 and take_advice(words, said):
                row["note"] = "A size, or the steps, was changed as the first answer said."
                row[name] = run(["generate", str(folder / "model"), *words, *ends], folder)
    if "on simulated device" in row["auto"].get("said", ""):  # a kernel that CUDA has
        output = folder / f"auto{suffix}"
        words += ["--device", "cpu", "--precision", "fp16"]
        row["auto"] = run(
            ["generate", str(folder / "model"), *words, "-o", str(output), "--json"], folder
        )
        row["note"] = "fp16 on the CPU: the simulated device lacks a kernel."
    for name in ("auto", "bf16", "plain"):
        if row[name]["code"] == 0 and row["fp32"]["code"] == 0:
            one, other = (read(folder / f"{x}{suffix}") for x in (name, "fp32"))
            row[name]["error"] = measure(one, other)
    command = ["generate", str(folder / "model"), *words]
    if judge(row) == "wrong" and "note" not in row:
        row |= compare_again(row, command, folder, suffix)
    return row | {"outcome": judge(row)}


def compare_again(
    row: dict[str, Any], command: list[str], folder: Path, suffix: str
) -> dict[str, Any]:
    """Return what replaces a row's errors if its noise is another one on the device, or by other seeds."""
    output, ends = folder / f"there{suffix}", ("--device", "simulated", "--precision", "fp32")
    with simulated_t4():
        row["fp32 there"] = run([*command, *ends, "-o", str(output), "--json"], folder)
    there = read(output) if row["fp32 there"]["code"] == 0 else None
    if there is not None and not np.array_equal(there, read(folder / f"fp32{suffix}")):
        row["note"] = "It draws noise on the device: its errors there are to fp32 there."
        for name in (x for x in ("auto", "plain") if row[x]["code"] == 0):
            row[name]["error"] = measure(read(folder / f"{name}{suffix}"), there)
        return row
    if row["auto"].get("error") is None or row["bf16"].get("error") is None:
        return row
    return row | compare_by_seeds(row, command, folder, suffix)


SEEDS = (1, 2, 3)
"""Further seeds for a row that would be wrong: one error of two roundings says little about the next."""


def compare_by_seeds(
    row: dict[str, Any], command: list[str], folder: Path, suffix: str
) -> dict[str, Any]:
    """Replace a row's errors by their medians over `SEEDS`, if each of its runs writes a result."""
    errors: dict[str, list[float | None]] = {"auto": [], "bf16": []}
    devices = {"auto": ["simulated"], "bf16": ["cpu", "--precision", "bf16"]}
    devices["fp32"] = ["cpu", "--precision", "fp32"]
    for seed in SEEDS:
        pictures = dict[str, Any]()
        for name, device in devices.items():
            output = folder / f"{name}-{seed}{suffix}"
            ends = ["--seed", str(seed), "--device", *device, "-o", str(output), "--json"]
            with simulated_t4():
                if run([*command, *ends], folder)["code"] != 0:
                    return {}
            pictures[name] = read(output)
        for name, found in errors.items():
            found.append(measure(pictures[name], pictures["fp32"]))
    medians = {name: find_median(found) for name, found in errors.items()}
    note = f"Medians of three other seeds: with the first, {row['auto']['error']:.2f}"
    note += f" and {row['bf16']['error']:.2f} in bf16."
    return {name: row[name] | {"error": x} for name, x in medians.items()} | {"note": note}


def find_median(errors: list[float | None]) -> float | None:
    """Return the median of errors; None if one of the pictures had another size."""
    found = [x for x in errors if x is not None]
    return statistics.median(found) if len(found) == len(errors) else None


def take_advice(words: list[str], said: str) -> bool:
    """Change sizes and steps as a refusal says: a test's may be none that a real model has."""
    advised = re.findall(r"[Uu]se (--frames|--height|--width|--steps) (\d+)", said)
    least = re.search(r"must be at least (\d+)px", said)
    if least is not None:
        advised += [("--height", least[1]), ("--width", least[1])]
    for option, value in advised:
        at = words.index(option) + 1 if option in words else len(words)
        words[at : at + 1] = [value] if option in words else [option, value]
    return bool(advised)


def build(subject: Subject) -> tuple[Any, dict[str, Any]]:
    """The pipeline of a test in fp32, and the arguments of its call."""
    answer_hub()
    tests = importlib.import_module(subject.path)
    tester = getattr(tests, subject.test)()
    torch.use_deterministic_algorithms(True)  # fills what `torch.empty` makes with NaN
    torch.manual_seed(0)
    parts = tester.get_dummy_components()
    torch.use_deterministic_algorithms(False)
    inputs = tester.get_dummy_inputs
    given = inputs("cpu") if "device" in inspect.signature(inputs).parameters else inputs()
    for part in parts.values():
        if isinstance(part, torch.nn.Module) and next(part.parameters(), None) is not None:
            part.float().eval().requires_grad_(False)
            for value in part.parameters():
                if value.dim() > 1 and not bool(value.any()):
                    value.normal_(0, value[0].numel() ** -0.5)
                elif not bool((value.abs() < LARGEST_WEIGHT).all()):  # made by `torch.empty`
                    value.normal_(0, 0.02)
    fit_vocabularies(parts)
    scheduler = parts.get("scheduler")
    config: Any = getattr(scheduler, "config", {})
    if config.get("use_flow_sigmas") and config.get("prediction_type") == "epsilon":
        # as checkpoints have it: noise that is taken for a flow makes latents of millions
        parts["scheduler"] = type(scheduler).from_config(config, prediction_type="flow_prediction")
    kind = tester.pipeline_class
    own = next(x for x in kind.__mro__ if x.__module__.startswith("diffusers."))
    fit_parts(own, parts, given)
    if (
        own.__name__ == "Kandinsky5I2IPipeline"
    ):  # a letter is a token here, and its template is long
        given["max_sequence_length"] = 512
    pipe = own(**parts)
    make_sizes_small(own, pipe, given)
    pipe.set_progress_bar_config(disable=True)
    steps = given.get("num_inference_steps")
    if steps is not None:
        share = inspect.signature(own.__call__).parameters.get("strength")
        share = given.get("strength") or getattr(share, "default", 1.0)
        is_share = isinstance(share, (int, float)) and share > 0
        given["num_inference_steps"] = min(
            int(steps), max(2, math.ceil(1 / share) if is_share else 2)
        )
    return pipe, given


def fit_parts(kind: type, parts: dict[str, Any], given: dict[str, Any]) -> None:
    """Give a pipeline what its own code needs, and tests go round by tensors in the place of pictures."""
    if kind.__name__ in ("StableVideoDiffusionPipeline", "ShapEImg2ImgPipeline"):
        encoder = parts["image_encoder"]  # every picture is made 224 pixels wide
        encoder.config.update({"image_size": 224, "patch_size": 32})
        parts["image_encoder"] = type(encoder)(encoder.config).eval().requires_grad_(False)
        given["image"] = Image.fromarray(_list_pixels(given["image"])[0])
    if type(parts.get("text_encoder")).__name__ == "T5GemmaEncoder":
        give_whole_config(parts["text_encoder"])
    needed: Any = vars(kind).get("_optional_components", ())
    if "watermarker" in parts and "watermarker" not in needed:  # it isn't loaded without
        from diffusers.pipelines.deepfloyd_if.watermark import IFWatermarker

        parts["watermarker"] = IFWatermarker()


def give_whole_config(encoder: Any) -> None:
    """Give an encoder of T5Gemma the config of a whole one, as which Transformers reads what it saves."""
    from transformers import T5GemmaConfig

    own = encoder.config.to_dict()
    left = ("model_type", "dtype", "transformers_version", "architectures", "is_encoder_decoder")
    shared = {name: x for name, x in own.items() if name not in left}
    encoder.config = T5GemmaConfig(encoder=own, decoder=own, is_encoder_decoder=False, **shared)


MOST_PIXELS = 64 * 64
"""Of what a pipeline's own code makes of a picture that it is given: 1024 pixels a side."""


def make_sizes_small(kind: type, pipe: Any, given: dict[str, Any]) -> None:
    """Let classes that have a size of their own take that of a tiny model, in this process."""
    if hasattr(pipe, "resolutions"):
        sides = [(given.get("height") or 64, given.get("width") or 64)]
        make: Any = kind.__init__

        @functools.wraps(make)
        def make_small(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            self.resolutions = sides

        kind.__init__ = make_small  # type: ignore[misc]
        pipe.resolutions = sides
    module = sys.modules[kind.__module__]
    choose: Any = getattr(module, "calculate_dimensions", None)
    if choose is not None:
        module.calculate_dimensions = lambda area, ratio: choose(  # type: ignore[attr-defined]
            min(area, MOST_PIXELS), ratio
        )


def find_denoiser(pipe: Any) -> Any:
    """The first component that is called at each step."""
    names = [x for x in pipe.components if x.startswith(DENOISERS)]
    names.sort(key=lambda x: next(i for i, y in enumerate(DENOISERS) if x.startswith(y)))
    found = (getattr(pipe, x) for x in names)
    return next((x for x in found if isinstance(x, torch.nn.Module)), None)


def make_overflow(pipe: Any, given: dict[str, Any], module: Any) -> dict[str, Any]:
    """Scale weights of a component until it overflows in fp16 and not in fp32; which, and by how much."""
    if module is None:
        return {"overflow": "", "bits": 0}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(_: Any, args: Any, kwargs: Any) -> None:
        calls.append(copy_containers((args, kwargs)))

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
            pipe(**given)
    except Exception as error:
        note = f"{type(error).__name__}: {error}"[:200]
    else:
        note = ""
    hook.remove()
    row: dict[str, Any] = {"direct": note, "overflow": "", "bits": 0}
    row["ways"] = len(WAYS) + len(WAYS_TOGETHER)
    # the first call instead, where later ones need a cache that it fills
    call = next((x for x in (*calls[-1:], *calls[:1]) if is_noise_in_fp32(module, *x)), None)
    if call is None:
        return row
    found = overflow_by(module, call, step=2)
    if found is None and scale_weights(module, LAST, -SMALLER_BITS):
        found = overflow_by(module, call, step=1)
        if found is None:
            scale_weights(module, LAST, SMALLER_BITS)
    return row | {"overflow": found[0], "bits": found[1]} if found else row


def overflow_by(module: Any, call: tuple[Any, Any], *, step: int) -> tuple[str, int] | None:
    """Scale weights in the first way that makes a call overflow; that way and its bits, if there is one."""
    largest = max(float(x.abs().max()) for x in module.parameters())
    most = min(MOST_BITS, math.floor(math.log2(LARGEST_WEIGHT / max(largest, 1e-3))))
    for way, pattern in (WAYS | WAYS_TOGETHER).items():
        bits = most if scale_weights(module, pattern, most) else 0
        while bits > 0 and not is_noise_in_fp32(module, *call):
            scale_weights(module, pattern, -step)
            bits -= step
        if bits > 0 and not is_finite_in_fp16(module, *call):
            return way, bits
        if bits != 0:
            scale_weights(module, pattern, -bits)
    return None


LAST = r"^(proj_out|final_conv)\.weight"
SMALLER_BITS = 10
"""Of the last layer, where nothing normalises its input: large values inside have to make noise again."""


def copy_containers(value: Any) -> Any:
    """Copy a nested value without its tensors: some models empty the lists that they are given."""
    return torch.utils._pytree.tree_map(lambda x: x, value)


WAYS_TOGETHER = {
    "attention values and residual": f"{WAYS['attention values']}|{WAYS['residual']}",
    "gated product and last linear": f"{WAYS['gated product']}|{WAYS['last linear']}",
    "values and residual by their own names": r"(attention|feed_forward)\.out_layer|\.to_value"
    r"|attn\.to_out\.weight|ff\.proj_out|attn\.to_q?kv",
}
"""For values that one way alone brings near to fp16's maximum, with weights that fp16 holds."""


def is_noise_in_fp32(module: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call gives noise in fp32, and values inside whose squares fp32 holds."""
    inside, outputs = find_largest(module, args, kwargs)
    return inside < 2.0**56 and outputs < LARGEST_NOISE


def find_largest(module: Any, args: Any, kwargs: Any) -> tuple[float, float]:
    """The largest magnitudes inside a call in fp32 and of its outputs; Inf for NaN, and where it stops."""
    inside = 0.0

    def amax(values: Any) -> float:
        found = [
            float(x.abs().max())
            for x in iterate_tensors(values)
            if x.is_floating_point() and x.numel()
        ]
        return max((math.inf if math.isnan(x) else x for x in found), default=0.0)

    def look(_: Any, args: Any, output: Any) -> None:
        nonlocal inside
        inside = max(inside, amax(output))

    hooks = [x.register_forward_hook(look) for x in module.modules()]
    try:
        with torch.no_grad():
            own, named = copy_containers((args, kwargs))
            outputs = amax(module(*own, **named))
            return inside, outputs
    except Exception:
        return math.inf, math.inf
    finally:
        for hook in hooks:
            hook.remove()


def is_finite_in_fp16(module: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is finite in fp16; where it can't be called so, whether fp16 holds its values."""
    cast = _copy(module).half()
    for least_dim in (2, 0):  # timesteps and tables in fp32 first, as pipelines give them
        with contextlib.suppress(Exception), torch.no_grad():
            own, named = cast_tree((args, kwargs), torch.float16, least_dim)
            values = [x for x in iterate_tensors(cast(*own, **named)) if x.is_floating_point()]
            return all(bool(x.isfinite().all()) for x in values)
    return find_largest(module, args, kwargs)[0] < 2 * torch.finfo(torch.float16).max


def _copy(module: Any) -> Any:
    import copy

    return copy.deepcopy(module)


def save(pipe: Any, folder: Path) -> None:
    """Write the pipeline in bf16."""
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and next(part.parameters(), None) is not None:
            part.to(torch.bfloat16)
        elif isinstance(part, torch.nn.Module) and not hasattr(part, "save_pretrained"):
            pipe.register_modules(**{name: None})  # a stand-in of Cosmos' safety checker
    pipe.save_pretrained(folder)


LEFT = {
    "generator",
    "output_type",
    "return_dict",
    "prompt_embeds",
    "negative_prompt_embeds",
    "latents",
}
"""Arguments that `generate` gives itself, or that a prompt stands for."""


def list_words(kind: type, given: dict[str, Any], folder: Path, *, least: int = 2) -> list[str]:
    """The words behind `generate MODEL` that stand for the arguments of a test's call.

    Args:
        least: pictures that stay a list; one for ControlNets that are joined, of which there may be one.
    """
    from stopdown.pipelines.requests import FIELDS, find_pipeline_argument

    words, left = list[str](), {k: x for k, x in given.items() if k not in LEFT and x is not None}
    taken = inspect.signature(kind.__call__).parameters
    if "prompt" in taken and not left.get("prompt"):
        left["prompt"] = "a cat"
    if "use_resolution_binning" in taken:
        left["use_resolution_binning"] = False
    if "num_inference_steps" in taken:
        left.setdefault("num_inference_steps", 2)
    for field in (x for x in FIELDS if x.metadata["names"]):
        target = find_pipeline_argument(field.name, kind)
        if target not in left or (field.name.endswith("image") and is_list(left[target], least)):
            continue
        value = left.pop(target)
        value = (
            value[0] if field.name in ("prompt", "negative") and isinstance(value, list) else value
        )
        if field.metadata["kind"] is Path:
            value = write(value, folder / field.name, is_clip=field.name == "video")
        option = [] if field.name == "prompt" else [f"--{field.name.replace('_', '-')}"]
        words += [*option, str(value)] if value != "" or option else []
    for name, value in left.items():
        (folder / name).mkdir(exist_ok=True)
        text = describe(value, folder / name, least)
        if text is not None:
            words += ["--arg", f"{name}={text}"]
    return words


def is_list(value: Any, least: int = 2) -> bool:
    """Whether an argument is a list of so many pictures, or lists of a list."""
    return isinstance(value, list) and (len(value) >= least or isinstance(value[0], list))


def describe(value: Any, folder: Path, least: int = 2) -> str | None:
    """An argument as `--arg` takes it; None for what it has no form for."""
    with contextlib.suppress(TypeError, ValueError):
        return json.dumps(value)
    if isinstance(value, list) and getattr(value[0], "size", None) and len(value) > MOST_LISTED:
        return f"{write(value, folder / 'clip', is_clip=True)}/"
    if is_list(value, least):
        with contextlib.suppress(Exception):
            return json.dumps(list_pictures(value, folder))
    value = value[0] if isinstance(value, list) else value
    if isinstance(value, torch.Tensor) and (value.ndim < 3 or value.shape[-3] not in (1, 3)):
        return None  # embeddings, which another pipeline makes
    with contextlib.suppress(Exception):
        is_clip = getattr(value, "ndim", 0) == 5
        return f"{write(value, folder / 'file', is_clip=is_clip)}{'/' * is_clip}"
    return None


MOST_LISTED = 4
"""Pictures that are named one by one; more are a video."""


def list_pictures(value: Any, folder: Path) -> Any:
    """Lists of pictures as lists of their files."""
    if isinstance(value, (list, tuple)):
        return [list_pictures(x, folder / str(i)) for i, x in enumerate(value)]
    if value is None:
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    return str(write(value, folder, is_clip=False))


def write(value: Any, path: Path, *, is_clip: bool) -> Path:
    """A picture or clip of a test, as a file."""
    from stopdown.frames.media import write_media

    frames = value if isinstance(value, (list, tuple)) else [value]
    pixels = np.concatenate([_list_pixels(x) for x in frames])
    if pixels.min() == pixels.max():  # a norm of one colour is a norm of its rounding
        pixels = np.random.default_rng(0).integers(0, 256, pixels.shape, np.uint8)
    path = path if is_clip else path.with_suffix(".png")  # a folder keeps frames that are alike
    write_media(path, pixels if is_clip else pixels[:1], 8)
    return path


LATENTS_SIDE = 64
"""Of a picture in the place of latents, in pixels."""


def _list_pixels(value: Any) -> Any:
    """[T, H, W, 3] uint8."""
    if isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1] not in (1, 3):
        return np.zeros((1, LATENTS_SIDE, LATENTS_SIDE, 3), np.uint8)
    if isinstance(value, torch.Tensor):
        value = value.float().numpy()
        value = value.reshape(-1, *value.shape[-3:]) if value.ndim > 2 else value[None]
        if value.ndim == 4 and value.shape[1] in (1, 3):
            value = value.transpose(0, 2, 3, 1)
        value = np.clip(value, 0, 1) * 255
    elif not isinstance(value, np.ndarray):
        value = np.asarray(value.convert("RGB"))
    value = value if value.dtype == np.uint8 else np.clip(value, 0, 255).astype(np.uint8)
    value = value[None] if value.ndim < 4 else value
    value = value[..., None] if value.ndim == 3 else value
    return np.repeat(value, 3, -1) if value.shape[-1] == 1 else value[..., :3]


def choose_output(kind: type, given: dict[str, Any]) -> str:
    """The suffix of an output without loss: a picture, sound, or a folder of frames."""
    from stopdown.pipelines.results import find_output_kind

    return {"picture": ".png", "sound": ".wav"}.get(find_output_kind(kind), "")


def read(path: Path) -> Any:
    """All pixels of an output, or its samples times 255."""
    if path.suffix == ".wav":
        from stopdown.frames.sound import read_sound

        return read_sound(str(path)).samples * 255.0
    files = sorted(path.glob("*.png") if path.is_dir() else path.parent.glob(f"{path.stem}*.png"))
    return np.stack([np.asarray(Image.open(x).convert("RGB"), np.float32) for x in files])


def measure(one: Any, other: Any) -> float | None:
    """The mean difference, of 255."""
    return float(np.abs(one - other).mean()) if one.shape == other.shape else None


@contextlib.contextmanager
def simulated_t4() -> Iterator[None]:
    """A device that refuses what a T4 refuses, for one command."""
    from device.simulated_device import load_device
    from stopdown.devices.device_profiles import find_device_target
    from stopdown.memory import speed
    from stopdown.plans import calibrated, plan_choice

    cache = ROOT / ".pytest_cache" / "d" / "simulated-device"
    cache.mkdir(parents=True, exist_ok=True)
    supports = find_device_target("t4")[1].supports
    with load_device(cache).present() as devices, noise_of_fp32():
        devices.act_as("cuda", computes_not=[torch.bfloat16])
        kept = [(x, x.probe_formats) for x in (plan_choice, calibrated)]
        timed = speed.measure_speed
        speed.measure_speed = lambda *_: speed.Speed(1e11, 1e10, "Known.")  # type: ignore[assignment]
        try:
            for module, probe in kept:
                module.probe_formats = lambda device, probe=probe: (  # type: ignore[attr-defined]
                    supports if device.type == "simulated" else probe(device)
                )
            yield
        finally:
            speed.measure_speed = timed
            for module, probe in kept:
                module.probe_formats = probe  # type: ignore[attr-defined]


@contextlib.contextmanager
def noise_of_fp32() -> Iterator[None]:
    """Round fp32's noise in fp16 and bf16, as CUDA does: other numbers are no error of a format."""
    draw = torch.randn

    @functools.wraps(draw)
    def draw_in_fp32(*size: Any, dtype: Any = None, **options: Any) -> Any:
        if dtype not in HALVES or "out" in options:
            return draw(*size, dtype=dtype, **options)
        return draw(*size, dtype=torch.float32, **options).to(dtype)

    with Patches() as patches:
        patches.set_attribute(torch, "randn", draw_in_fp32)
        yield


def run(command: list[str], folder: Path) -> dict[str, Any]:
    """Run a command of the command line in this process; its exit code, last words and seconds."""
    from stopdown.app import cli

    started, code = time.perf_counter(), 0
    print("$ stopdown", " ".join(command), flush=True)
    sys.stdout.flush()
    with _captured(folder / "out.txt", folder / "err.txt"):
        try:
            cli.main(command)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 70
    said = (folder / "err.txt").read_text(errors="replace")
    print(said[-3000:], flush=True)
    row: dict[str, Any] = {"code": code, "seconds": round(time.perf_counter() - started, 1)}
    if code:
        row |= {"said": shorten(said), "traceback": "Traceback" in said}
    else:
        record = json.loads((folder / "out.txt").read_text())
        row["repairs"] = len(record.get("repairs", ()))
        row["findings"] = [x.get("kind", "") for x in record.get("findings", ())]
        row["precisions"] = sorted({x["precision"] for x in record.get("decisions", ())})
    return row


def shorten(text: str) -> str:
    """What a command said last, without paths: its one sentence, or the last line of a traceback."""
    found = text.rfind("stopdown: ")
    lines = [x for x in text[max(found, 0) :].splitlines() if x.strip()]
    said = " ".join(lines) if found >= 0 else (lines or [""])[-1]
    return re.sub(r"\s+", " ", re.sub(r"(?:/[\w.+-]+){2,}/", "", said))[:700]


@contextlib.contextmanager
def _captured(out: Path, err: Path) -> Iterator[None]:
    kept = [os.dup(1), os.dup(2)]
    try:
        for number, path in ((1, out), (2, err)):
            with path.open("w") as file:
                os.dup2(file.fileno(), number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, own in zip((1, 2), kept, strict=True):
            os.dup2(own, number)
            os.close(own)


def judge(row: dict[str, Any]) -> str:
    """One word for what came of a row."""
    auto, other = row["auto"], row["fp32"]
    if auto.get("traceback") or other.get("traceback"):
        return "traceback"
    if auto["code"]:
        if not other["code"]:
            return "failed"
        return "refused" if auto["code"] == other["code"] == 2 else "stops in fp32"
    if other["code"]:
        return "no reference"
    error, bf16 = auto.get("error"), row["bf16"].get("error")
    if error is None or error > max(NEAR, bf16 if bf16 is not None else 0.0):
        return "wrong"
    return "right"


def make_in_process(
    subject: Subject, make: Callable[[Subject, Path], dict[str, Any]] = make_row
) -> dict[str, Any]:
    """A row made by a child of its own, with a time limit: a crash or an endless loop is a row."""
    with tempfile.TemporaryDirectory(prefix="every-") as name:
        folder, started = Path(name), time.perf_counter()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
                os.environ["STOPDOWN_CACHE"] = str(folder / "cache")
                log = (folder / "log.txt").open("w")
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                row = make(subject, folder)
                (folder / "row.json").write_text(json.dumps(row))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = None
        while status is None and count_seconds(child, started) < LIMIT_SECONDS:
            done, found = os.waitpid(child, os.WNOHANG)
            status = found if done else None
            time.sleep(0.1)
        seconds = round(time.perf_counter() - started, 1)
        if status is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            row = {"outcome": "out of time", "said": f"More than {LIMIT_SECONDS} s of a processor."}
        elif (folder / "row.json").exists():
            row = json.loads((folder / "row.json").read_text())
        else:
            code = os.waitstatus_to_exitcode(status)
            row = {"outcome": "crashed", "said": f"The process ended with {code}."}
            row["where"] = shorten((folder / "log.txt").read_text(errors="replace"))
        if os.environ.get("EVERY_LOGS"):
            logs = Path(os.environ["EVERY_LOGS"])
            (logs / f"{subject.name}.log").write_bytes((folder / "log.txt").read_bytes())
        return {"name": subject.name, **row, "seconds": seconds}


def count_seconds(child: int, started: float) -> float:
    """Processor seconds of a process and of those that it started, or a thirtieth of the clock's.

    The clock ends what waits forever; on a busy machine a row gets a twentieth of a processor.
    """
    seconds = (time.perf_counter() - started) / 30
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(child)
        times = [x.cpu_times() for x in (first, *first.children(recursive=True))]
        seconds = max(seconds, sum(x.user + x.system for x in times))
    return seconds


def warm_up() -> None:
    """Run once what children run, so that each has it imported."""
    from stopdown.testing import save_pipeline

    with tempfile.TemporaryDirectory() as name, simulated_t4():
        os.environ["STOPDOWN_CACHE"] = f"{name}/cache"
        model = save_pipeline("sd", f"{name}/model", overflow="unet")
        words = ["a cat", "--steps", "2", "--device", "simulated", "-o", f"{name}/x.png", "--json"]
        run(["generate", str(model), *words], Path(name))


def main() -> None:
    """Fill the rows that are asked for, and store each with those that were stored before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="of Diffusers' repository")
    parser.add_argument("--only", nargs="+", help="these rows, again, in this order")
    parser.add_argument("--outcomes", nargs="+", help="rows with these outcomes, again")
    parser.add_argument("--part", default="0/1", help="one part of the rows: 0/2, 1/2")
    parser.add_argument(
        "--table", action="store_true", help="only judge the rows again, and write the table"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not options.table:
        import_torchvision()
        sys.path.insert(0, str(options.checkout))
        subjects, stored = list_subjects(options.checkout), load()
        listed = [x.name for x in subjects]
        if options.only:
            named = {x.name: x for x in subjects}
            subjects = [named[x] for x in options.only]
        elif options.outcomes:
            subjects = [
                x
                for x in subjects
                if stored["rows"].get(x.name, {}).get("outcome") in options.outcomes
            ]
        else:
            subjects = [x for x in subjects if x.name not in stored["rows"]]
        part, parts = map(int, options.part.split("/"))
        warm_up()
        for subject in subjects[part::parts]:
            if not (options.only or options.outcomes) and subject.name in load()["rows"]:
                continue  # made by another part
            row = make_in_process(subject)
            print(row["name"], row["outcome"], row.get("said", ""), row["seconds"], flush=True)
            store(row, listed, tests=find_version(options.checkout))
    elif options.checkout is not None:
        import_torchvision()
        listed = [x.name for x in list_subjects(options.checkout)]
        store(None, listed, tests=find_version(options.checkout))
    stored = load()
    RESULTS.write_text(json.dumps(judge_again(stored), indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(draw_signed(stored))


def judge_again(stored: dict[str, Any]) -> dict[str, Any]:
    """Give each stored row that ran the word that `judge` has for it today."""
    for row in stored["rows"].values():
        if "auto" in row:
            row["outcome"] = judge(row)
    stored["counts"] = dict(Counter(x["outcome"] for x in stored["rows"].values()))
    return stored


def load() -> dict[str, Any]:
    """What is stored."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}


def find_version(checkout: Path) -> str:
    """The version of Diffusers that a checkout is of."""
    text = (checkout / "src" / "diffusers" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"', text, re.M)
    assert found is not None
    return found[1]


def store(row: dict[str, Any] | None, listed: list[str], *, tests: str) -> None:
    """Write one row among those that are stored, by whichever process; or only what rows there are to make.

    Args:
        row: with its name.
        listed: the rows that there are to make.
        tests: the version of Diffusers whose tests have the tiny components.
    """
    from filelock import FileLock

    with FileLock(f"{RESULTS}.lock"):
        stored = load()
        if row is not None:
            stored["rows"][row.pop("name")] = row
            stored["rows"] = dict(sorted(stored["rows"].items()))
            stored |= {"machine": describe_machine(), "date": time.strftime("%Y-%m-%d")}
        stored |= {"command": "python benchmarks/every_pipeline.py CHECKOUT", "listed": listed}
        stored |= {"tests": tests, "classes": list_classes(), "others": list_other_classes()}
        RESULTS.write_text(json.dumps(judge_again(stored), indent=1) + "\n")


OUTCOMES = {
    "right": "ran, and is no further from fp32 than bf16 is, or within 0.2 of 255",
    "wrong": "ran, and is further from fp32",
    "failed": "stopped with a message, where fp32 runs",
    "traceback": "stopped with a traceback",
    "refused": "refused in one sentence, in fp32 as well",
    "stops in fp32": "stopped with a message, and plain fp32 stops too: no failure of a precision",
    "no reference": "ran, where fp32 did not",
    "out of time": "ended at the limit of processor time that they had, and are not judged",
    "crashed": "ended the process",
    "not built": "the tiny model could not be made here",
}


def draw_signed(stored: dict[str, Any]) -> str:
    """The table, with where it comes from as its last line."""
    return sign_table(draw(stored), RESULTS.stem)


def sign_table(text: str, result: str) -> str:
    """A table with a last line that says where it comes from, read from the stored result of that name."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        figures = importlib.import_module("figures")
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return str(figures.sign(text, result))


def draw(stored: dict[str, Any]) -> str:
    """The table, by family."""
    rows: dict[str, Any] = stored["rows"]
    counts = Counter(x["outcome"] for x in rows.values())
    versions = stored["machine"]["versions"]
    lines = [
        "# Every pipeline of Diffusers on a simulated T4",
        "",
        f"`{stored['command']}`, {stored['date']}: Diffusers {versions['diffusers']}, PyTorch "
        f"{versions['torch']}, Transformers {versions['transformers']}.",
        "",
        "Each row is a pipeline class with the tiny components and the arguments of Diffusers' own "
        f"tests, which are those of Diffusers {stored['tests']}. Weights of its denoiser are scaled until "
        "it overflows in fp16 and not in fp32, it is saved in bf16, and `stopdown generate` "
        "gets the folder and no option about precision. Errors are mean differences, of 255, to fp32 with "
        "the same seed. Where plain fp16 ran, the column gives its error.",
        "",
        *_draw_summary(rows),
        f"Rows that are not made yet: {len({*stored['listed']} - {*rows})} of {len(stored['listed'])}.",
        "",
        *(f"- {counts[x]} {x}: {text}." for x, text in OUTCOMES.items() if counts[x]),
    ]
    families: dict[str, list[str]] = {}
    for name, row in rows.items():
        families.setdefault(row.get("family") or "not built", []).append(name)
    shown = [x for x in OUTCOMES if counts[x]]
    lines += ["", "## By family", "", f"| family | rows | {' | '.join(shown)} |"]
    lines += [f"|---|--:|{'--:|' * len(shown)}"]
    for family, names in sorted(families.items()):
        found = Counter(rows[name]["outcome"] for name in names)
        cells = (str(found[x] or "") for x in shown)
        lines.append(f"| {family} | {len(names)} | {' | '.join(cells)} |")
    for family, names in sorted(families.items()):
        lines += [
            "",
            f"## {family}",
            "",
            "| class | outcome | error | bf16 | plain fp16 | what was said |",
        ]
        lines += ["|---|---|--:|--:|---|---|"]
        lines += [_draw_row(name, rows[name]) for name in names]
    return "\n".join(lines + _draw_classes(stored)) + "\n"


OVERFLOW = re.compile(r"\b(NaN|Inf)\b|[Oo]verflow|not finite|black|grey")
"""Words of what plain fp16 stopped with when values left its range."""


def _draw_summary(rows: dict[str, Any]) -> list[str]:
    """How many rows run in fp32, overflow in plain fp16 and are right; which don't overflow, and why."""
    ran = {name: x for name, x in rows.items() if x.get("fp32", {}).get("code") == 0}
    plain = {name: x.get("plain", {}).get("code") for name, x in ran.items()}
    stops = [name for name, code in plain.items() if code == 1]
    runs = [name for name, code in plain.items() if code == 0]
    others = [name for name, code in plain.items() if code not in (0, 1)]

    def count_right(names: list[str]) -> int:
        return sum(ran[name]["outcome"] == "right" for name in names)

    overflows = [x for x in stops if OVERFLOW.search(ran[x]["plain"]["said"])]
    others += [x for x in stops if x not in overflows]
    lines = [
        f"Of {len(ran)} rows that run in fp32, {count_right([*ran])} are right. Plain fp16 overflows and "
        f"stops in {len(overflows)} of them, of which {count_right(overflows)} are right here. It runs in "
        f"{len(runs)}, without an overflow: {count_right(runs)} of those are right.",
        "",
        f"What those that overflow and are right ran in: {count_formats(ran[x] for x in overflows)}. "
        f"{_count_full_size()}: bounds of a tiny model that was scaled up at random are looser.",
        "",
    ]
    never = [name for name in runs if not ran[name]["overflow"]]
    less = [name for name in runs if ran[name]["overflow"]]
    groups = {
        "No weights that fp16 holds make these overflow, with noise as their output in fp32": [
            x for x in never if "ways" in ran[x]
        ],
        "These rows are from before weights were scaled in several ways, and are to be made again": [
            x for x in never if "ways" not in ran[x]
        ],
        "The call of Diffusers' test overflows in these, and the call that `generate` makes doesn't": less,
        "Plain fp16 stops for another reason in these": others,
    }
    return lines + [
        y for x, names in groups.items() if names for y in (f"{x}: {', '.join(names)}.", "")
    ]


def _count_full_size() -> str:
    """Count the components of full size that were run with a module in fp32, from their stored results."""
    runs = json.loads((RESULTS.parent / "full_size_runs.json").read_text())["rows"].values()
    wide = [x for x in runs if x["certify, fp32 residual"]["fp32_modules"]]
    return (
        f"Of {len(runs)} runs [at full size](full_size_runs.md), {len(wide)} had a module in fp32"
    )


def count_formats(rows: Iterable[dict[str, Any]]) -> str:
    """Count the right rows that ran in fp16 alone, with some components in fp32, and in fp32 alone."""
    ran = Counter(tuple(x["auto"]["precisions"]) for x in rows if x["outcome"] == "right")
    words = {("fp16",): "fp16 alone", ("fp16", "fp32"): "fp16 and fp32", ("fp32",): "fp32 alone"}
    return ", ".join(f"{ran[x]} in {text}" for x, text in words.items() if ran[x])


def _draw_classes(stored: dict[str, Any]) -> list[str]:
    """Which class each row is, and why others have none."""
    rows, classes = stored["rows"], stored["classes"]
    made = {x.get("class", name.partition(" #")[0]) for name, x in rows.items()}
    waiting = {name.partition(" #")[0].removesuffix("Wrapper") for name in stored["listed"]} - made
    left = [x for x in classes if x not in made | waiting]
    lines = [
        "",
        f"## Classes: {len({*classes} & made)} of {len(classes)} have a row",
        "",
        'A row is the class of its name, and represents no other. Rows with a number, as "#2", are of '
        "the same class with other components.",
        "",
    ]
    groups = {
        "A test makes their components, and the row is not made yet": sorted({*classes} & waiting),
        "Diffusers' tests of that version make no components of them": [
            x for x in left if not classes[x].startswith("deprecated.")
        ],
        "Diffusers has deprecated them, and its tests make no components of them": [
            x for x in left if classes[x].startswith("deprecated.")
        ],
        "They are modular pipelines, which no row tries": stored["others"]["modular"],
        "They need packages that aren't installed here": stored["others"]["packages"],
    }
    for said, names in groups.items():
        if names:
            lines += [f"{said} ({len(names)}): {', '.join(names)}.", ""]
    return lines[:-1]


def list_classes() -> dict[str, str]:
    """Every pipeline class that Diffusers has, by name, with its module."""
    import diffusers

    kinds = {name: getattr(diffusers, name, None) for name in dir(diffusers)}
    base = diffusers.DiffusionPipeline
    return {
        name: kind.__module__.removeprefix("diffusers.pipelines.")
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }


def list_other_classes() -> dict[str, list[str]]:
    """What is called a pipeline, and is no class that `list_classes` has."""
    import diffusers

    kinds = {x: getattr(diffusers, x, None) for x in dir(diffusers) if x.endswith("Pipeline")}
    modular = [x for x, kind in kinds.items() if "Modular" in x]
    packages = [x for x, kind in kinds.items() if type(kind).__name__ == "DummyObject"]
    return {"modular": modular, "packages": packages}


def _draw_row(name: str, row: dict[str, Any]) -> str:
    cells = [name, row["outcome"]]
    for way in ("auto", "bf16"):
        error = row.get(way, {}).get("error")
        cells.append("" if error is None else f"{error:.3f}")
    plain = row.get("plain", {})
    stops = "stops" if plain.get("code") in (1, 70) else "refused"
    error = f"{plain.get('error') or 0.0:.3f}"
    cells.append("" if not plain else stops if plain["code"] else error)
    said = row.get("auto", {}).get("said") or row.get("said") or row.get("note", "")
    said = re.sub(r"^stopdown: ", "", said).replace("|", "/")[:300]
    return f"| {' | '.join([*cells, said])} |"


if __name__ == "__main__":
    main()

"""One table: every way in to fp16, beside every kind of change that a user's program makes.

Four tiny pipelines whose components overflow in fp16 are opened in ten ways. Then one change is made, as
programs make them: a second call, another size, other optional arguments, hidden states, a layer whose
`forward` is replaced, a LoRA. The result is compared with that of plain Diffusers in fp32 under the same
change, beside plain Diffusers in bf16.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import stopdown
from models.lora_cases import RANK, draw_lora, find_denoiser, name_lora
from models.pipeline_calls import CALLS, PICTURE, load_plain
from models.zimage import make_zimage
from stopdown.app import cli
from stopdown.app.run_command import ScriptOptions, run_script
from stopdown.errors import OptionError, StopdownError, take_first_line
from stopdown.frames.media import read_image
from stopdown.numerics import relative_l2
from stopdown.pipelines.tiny_pipelines import overflow_
from stopdown.testing import make_pipeline

REPAIR_SPREAD = 1.25
"""A repair in bf16 has weights and embeddings from fp16, and rounds at other places than a run in bf16."""

LEAST_ERROR = 2e-3
"""An error that is right in any case: two units of fp16's last place."""

Tensors = list[torch.Tensor]

PICTURES = ("sdxl", "zimage")
"""Models whose result is a picture, which is written without loss."""
Pipe = Any


def _make(name: str, *parts: str) -> Pipe:
    pipe = make_pipeline(name)
    for part in parts:
        overflow_(getattr(pipe, part))
    return pipe


@dataclass(frozen=True)
class Model:
    """A tiny pipeline, and how it is called.

    Attributes:
        make: builds it in fp32.
        call: arguments of its usual call.
        size: those that make another size.
        options: those that optional arguments add.
        family: of its LoRA layers, empty if none is drawn for it.
    """

    make: Callable[[], Pipe]
    call: dict[str, Any]
    size: dict[str, Any]
    options: dict[str, Any]
    family: str = ""


MODELS = {
    "cogvideox": Model(
        lambda: _make("cogvideox", "transformer", "text_encoder"),
        CALLS["cogvideox"],
        {"num_frames": 9, "height": 48, "width": 32},
        {"guidance_scale": 1.0, "negative_prompt": "b", "num_videos_per_prompt": 2},
        "cogvideox",
    ),
    "cogvideox-image": Model(
        lambda: _make("cogvideox-image", "transformer"),
        {**CALLS["cogvideox-image"], "image": PICTURE},
        {"num_frames": 9},
        {"guidance_scale": 1.0},
    ),
    "sdxl": Model(
        lambda: _make("sdxl", "unet"),
        CALLS["sdxl"],
        {"height": 64, "width": 32},
        {"guidance_scale": 1.0, "clip_skip": 1, "num_images_per_prompt": 2},
        "sdxl",
    ),
    "zimage": Model(
        make_zimage,
        {"prompt": "a fox", "height": 32, "width": 32, "max_sequence_length": 16},
        {"height": 48, "width": 32, "max_sequence_length": 24},
        {"guidance_scale": 2.0, "negative_prompt": "b"},
    ),
}
"""Overflow in the denoiser and the text encoder; the encoder of Z-Image returns more than fp16 holds."""


def call(pipe: Pipe, model: Model, seed: int = 0, **more: Any) -> torch.Tensor:
    """Make a picture or clip: [N, ..., H, W, C], in 0 to 1."""
    made = torch.Generator().manual_seed(seed)
    given = {"num_inference_steps": 2, **model.call, **more}
    result = pipe(generator=made, output_type="np", **given)
    frames = result.images if hasattr(result, "images") else result.frames
    return torch.as_tensor(frames).float()


def _first(pipe: Pipe, model: Model) -> Tensors:
    return [call(pipe, model)]


def _second(pipe: Pipe, model: Model) -> Tensors:
    prompt = {"prompt": "b c"} if "prompt" in model.call else {}
    return [call(pipe, model), call(pipe, model, 1, **prompt), call(pipe, model)]


def _size_first(pipe: Pipe, model: Model) -> Tensors:
    return [call(pipe, model, **model.size)]


def _size_after(pipe: Pipe, model: Model) -> Tensors:
    return [call(pipe, model), call(pipe, model, **model.size), call(pipe, model)]


def _options(pipe: Pipe, model: Model) -> Tensors:
    return [call(pipe, model), call(pipe, model, **model.options), call(pipe, model)]


def _hidden_states(pipe: Pipe, model: Model) -> Tensors:
    encoder = getattr(pipe, "text_encoder_2", None) or pipe.text_encoder
    ids = torch.tensor([[3, 5, 9, 2]])
    found = []
    for _ in range(2):
        states = encoder(ids, output_hidden_states=True).hidden_states
        found += [x.float() for x in states]
    return found


def _replaced_forward(pipe: Pipe, model: Model) -> Tensors:
    before, layer = call(pipe, model), find_linear(pipe)
    layer.forward = Branch(model, layer.forward).forward  # type: ignore[method-assign]
    return [before, call(pipe, model), call(pipe, model, 1)]


def _replaced_first(pipe: Pipe, model: Model) -> Tensors:
    layer = find_linear(pipe)
    layer.forward = Branch(model, layer.forward).forward  # type: ignore[method-assign]
    return [call(pipe, model), call(pipe, model, 1)]


def _replaced_class(pipe: Pipe, model: Model) -> Tensors:
    before, layer, own = call(pipe, model), find_linear(pipe), nn.Linear.forward
    branch = Branch(model, lambda x: own(layer, x))
    try:
        nn.Linear.forward = lambda self, x: branch(x) if self is layer else own(self, x)  # type: ignore[method-assign]
        return [before, call(pipe, model), call(pipe, model, 1)]
    finally:
        nn.Linear.forward = own  # type: ignore[method-assign]


def _foreign_hook(pipe: Pipe, model: Model) -> Tensors:
    before, layer = call(pipe, model), find_linear(pipe)
    branch = Branch(model, lambda x: 0)
    layer.register_forward_hook(lambda _, args, output: output + branch(args[0]))
    return [before, call(pipe, model), call(pipe, model, 1)]


class Branch(nn.Module):
    """Add a low-rank product to a linear layer by taking its `forward`, as trainers' LoRA modules do.

    Its size is that of the layer in the model as it was published, of which exponents know nothing.
    """

    def __init__(self, model: Model, forward: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        made, weight = torch.Generator().manual_seed(1), find_linear(model.make()).weight
        spread = float(weight.std())
        self.register_buffer("down", torch.randn(RANK, weight.shape[1], generator=made))
        up = torch.randn(weight.shape[0], RANK, generator=made) * spread * RANK**-0.5
        self.register_buffer("up", up)
        self.own = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = nn.functional.linear(x, self.down.to(x.dtype))
        return self.own(x) + nn.functional.linear(added, self.up.to(x.dtype))


def find_linear(pipe: Pipe) -> nn.Linear:
    """Return a linear layer of the denoiser whose output is added to its residual stream."""
    layers = find_denoiser(pipe)[1].named_modules()
    ends = ("attn1.to_out.0", "attention.to_out.0")
    return next(x for path, x in layers if path.endswith(ends) and isinstance(x, nn.Linear))


def load_lora(pipe: Pipe, model: Model) -> None:
    """Load a LoRA drawn for the denoiser through Diffusers."""
    pipe.load_lora_weights(draw_tensors(model))


def draw_tensors(model: Model) -> dict[str, torch.Tensor]:
    """Draw a LoRA for a model's denoiser, named as Diffusers names one."""
    return name_lora(draw_lora(model.make(), model.family), "diffusers", model.family)


def _lora_before(pipe: Pipe, model: Model) -> Tensors:
    return [call(pipe, model), call(pipe, model, 1)]


def _lora_after(pipe: Pipe, model: Model) -> Tensors:
    before = call(pipe, model)
    load_lora(pipe, model)
    loaded = [call(pipe, model), call(pipe, model, 1)]
    pipe.unload_lora_weights()
    return [before, *loaded, call(pipe, model)]


def _lora_fused(pipe: Pipe, model: Model) -> Tensors:
    load_lora(pipe, model)
    pipe.fuse_lora()
    fused = [call(pipe, model), call(pipe, model, 1)]
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    return [*fused, call(pipe, model)]


@dataclass(frozen=True)
class Change:
    """A change that a program makes to an open pipeline.

    Attributes:
        make: makes it and returns the results.
        prepare: is done before exponents are found; a way that opens a folder cannot do so.
        needs_family: whether the model has to have LoRA layers.
    """

    make: Callable[[Pipe, Model], Tensors]
    prepare: Callable[[Pipe, Model], None] | None = None
    needs_family: bool = False


CHANGES = {
    "first call": Change(_first),
    "second call": Change(_second),
    "another size first": Change(_size_first),
    "another size after": Change(_size_after),
    "optional arguments": Change(_options),
    "hidden states": Change(_hidden_states),
    "replaced forward": Change(_replaced_forward),
    "replaced forward first": Change(_replaced_first),
    "replaced class": Change(_replaced_class),
    "foreign hook": Change(_foreign_hook),
    "LoRA before": Change(_lora_before, load_lora, True),
    "LoRA after": Change(_lora_after, None, True),
    "LoRA fused": Change(_lora_fused, None, True),
}

Prepare = Callable[[Pipe], None]


@contextmanager
def _rescale(folder: Path, model: Model, prepare: Prepare) -> Iterator[Pipe]:
    pipe = load_plain(folder, torch.float32)
    prepare(pipe)
    for module, calls in record_calls(pipe, model):
        stopdown.rescale_(module, calls=calls, cast=True)
    yield pipe


def record_calls(pipe: Pipe, model: Model) -> list[tuple[nn.Module, list[Any]]]:
    """Return the calls of each component in one run, as `rescale_` takes calls."""
    seen: dict[str, tuple[nn.Module, list[Any]]] = {}

    def note(name: str, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls = seen.setdefault(name, (module, []))[1]
            calls.append((function, args, kwargs))
            return function(*args, **kwargs)

        return record

    put: list[tuple[nn.Module, str]] = []
    for name, module in pipe.components.items():
        if not isinstance(module, nn.Module):
            continue
        for method in ("forward", "encode", "decode"):
            if hasattr(module, method) and (method == "forward") != hasattr(module, "decode"):
                function = module if method == "forward" else getattr(module, method)
                inner = module.forward if method == "forward" else function
                recorded = note(name, module, inner)
                setattr(module, method, recorded)
                put.append((module, method))
    try:
        call(pipe, model)
    finally:
        for module, method in put:
            delattr(module, method)
    found = []
    for module, calls in seen.values():
        named = [(getattr(module, x.__name__), args, kwargs) for x, args, kwargs in calls]
        found.append((module, [(module if x == module.forward else x, a, k) for x, a, k in named]))
    return found


def _open(dtype: torch.dtype, put_on: Callable[[Pipe], Any]) -> Any:
    """Return a way that loads with plain Diffusers, prepares, and then puts something on."""

    @contextmanager
    def open_pipe(folder: Path, model: Model, prepare: Prepare) -> Iterator[Pipe]:
        pipe = load_plain(folder, dtype)
        prepare(pipe)
        with put_on(pipe):
            yield pipe

    return open_pipe


@contextmanager
def _load(folder: Path, model: Model, prepare: Prepare) -> Iterator[Pipe]:
    pipe = stopdown.load(folder, precision="fp16", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    try:
        yield pipe
    finally:
        pipe.stopdown_guard.remove()


@contextmanager
def _quantization(folder: Path, model: Model, prepare: Prepare) -> Iterator[Pipe]:
    config = stopdown.quantization(folder)
    yield load_plain(folder, torch.float16, quantization_config=config)


@contextmanager
def _convert(folder: Path, model: Model, prepare: Prepare) -> Iterator[Pipe]:
    converted = folder.with_name(f"{folder.name}-fp16")
    if not converted.exists():
        sides = {key: 32 for key in ("height", "width") if key in model.call}
        plan, request = stopdown.make_plan(folder), stopdown.Request(**sides)
        stopdown.convert(folder, converted, plan, request=request)
    yield load_plain(converted, torch.float16)


def run_command(*words: object) -> None:
    """Run a command of the command line in this process.

    Raises:
        OptionError: its exit code is not 0, with its last line.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            cli.main([str(x) for x in words])
    except SystemExit as ended:
        if ended.code:
            last = said.getvalue().strip().rpartition("\n")[2]
            assert "No such option" not in last, last  # a mistake of this table is no refusal
            raise OptionError(last, expected="", remedy="") from None


def _run_script(table: Table, name: str, change: str) -> Found:
    """Run a script that loads the pipeline in fp16 under `stopdown run`."""
    output = table.folder / f"{name}-{change}.pt".replace(" ", "-")
    script = Path(__file__).parents[1] / "processes" / "ways_script.py"
    words = tuple(map(str, (table.save(name), name, change, output)))
    said: list[str] = []
    record = run_script(ScriptOptions(str(script), words), said.append)
    if record.unrepaired or record.exit_code or not output.exists():
        raise OptionError(said[-1] if said else "", expected="", remedy="")
    runs = [*record.runs, *([record.modules] if record.modules else [])]
    return Found(torch.load(output), any(x.repairs for x in runs))


def _generate(table: Table, name: str, change: str, precision: str = "fp16") -> Found:
    """Make pictures by the command line, which takes a size, options and LoRAs."""
    frames = []
    for number, options in enumerate(list_commands(table, name)[change]):
        output = table.folder / f"{name}-{change}-{number}.png".replace(" ", "-")
        words = ["generate", table.save(name), *options, "--precision", precision, "-o", output]
        run_command(*words, "--steps", 2, "--force", "--quiet")
        frames.append(torch.as_tensor(read_image(output)).float() / 255)
    return Found(frames)


def list_commands(table: Table, name: str) -> dict[str, list[list[Any]]]:
    """Return what is typed after a model, by change, for pipelines whose result is a picture."""
    first = ["a", "--height", 32, "--width", 32]
    found = {
        "first call": [first],
        "second call": [first, [*first, "--seed", 1], first],
        "another size first": [["a", "--height", 64, "--width", 32]],
        "optional arguments": [[*first, "--guidance", 1, "--negative", "b"]],
    }
    if MODELS[name].family:
        found["LoRA before"] = [[*first, "--lora", table.save_lora(name)]]
    return found


leave_plain = _open(torch.float16, contextlib.nullcontext)
"""Plain Diffusers in fp16, with nothing of Stopdown."""

WAYS = {
    "rescale_": _rescale,
    "apply_plan": _open(torch.float32, lambda x: stopdown.apply_plan(x, stopdown.make_plan(x))),
    "guard": _open(torch.float16, stopdown.guard),
    "guard + plan": _open(torch.float32, lambda x: stopdown.guard(x, stopdown.make_plan(x))),
    "fp16": _open(torch.float32, stopdown.fp16),
    "load": _load,
    "quantization_config": _quantization,
    "convert": _convert,
}
"""Ways of a Python program."""

COMMANDS = ("run", "generate")
"""Ways of a command line."""

CONVERTED = ("first call", "second call", "another size first", "another size after")
"""Changes that a converted folder meets, with optional arguments: nothing of Stopdown runs there. Its LoRAs
are converted with it, and states inside of its encoder are those of its own weights."""

OPENS_FOLDER = ("load", "quantization_config", "convert")
"""Ways that leave no time between loading and finding exponents."""


@dataclass(frozen=True)
class Found:
    """The tensors of a cell, and whether something was repaired for them."""

    tensors: Tensors
    is_repaired: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of one cell of the table.

    Attributes:
        verdict: `right`, `repaired`, `refused` or `wrong`.
        error: largest relative error of its tensors, against fp32.
        bf16: that of bf16.
        reason: the refusal's first line, or how it went wrong.
    """

    verdict: str
    error: float = 0.0
    bf16: float = 0.0
    reason: str = ""


class Table:
    """Cells of the table, with the references that cells of one row share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: dict[tuple[str, ...], Tensors] = {}

    def save(self, name: str) -> Path:
        """Save a model's folder once, in bf16, as most are published."""
        folder = self.folder / name
        if not folder.exists():
            pipe = MODELS[name].make()
            pipe.to(torch.bfloat16)
            pipe.save_pretrained(folder)
        return folder

    def save_lora(self, name: str) -> Path:
        """Save a LoRA for a model's denoiser once."""
        path = self.folder / f"{name}-lora.safetensors"
        if not path.exists():
            save_file({k: x.contiguous() for k, x in draw_tensors(MODELS[name]).items()}, path)
        return path

    def refer(self, name: str, way: str, change: str, precision: str) -> Tensors:
        """Return what plain Diffusers gives in fp32 or bf16 under a change."""
        key = name, "generate" if way == "generate" else "", change, precision
        if key not in self._references:
            if way == "generate":
                made = _generate(self, name, change, precision).tensors
            else:
                dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
                pipe, model, row = load_plain(self.save(name), dtype), MODELS[name], CHANGES[change]
                if row.prepare:
                    row.prepare(pipe, model)
                made = row.make(pipe, model)
            self._references[key] = made
        return self._references[key]

    @torch.no_grad()
    def fill(self, name: str, way: str, change: str) -> Outcome:
        """Fill a cell: compare what comes out with fp32's, beside bf16's."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = self.refer(name, way, change, "fp32")
            bf16 = compare(self.refer(name, way, change, "bf16"), want)
            try:
                found = self._find(name, way, change)
            except StopdownError as error:
                return Outcome("refused", bf16=bf16, reason=take_first_line(error))
            except Exception as error:  # what plain Diffusers runs, and this does not
                reason = f"{type(error).__name__}: {error}"[:300]
                return Outcome("wrong", math.inf, bf16, reason)
        error = compare(found.tensors, want)
        if error <= max(bf16 * (REPAIR_SPREAD if found.is_repaired else 1), LEAST_ERROR):
            return Outcome("repaired" if found.is_repaired else "right", error, bf16)
        return Outcome("wrong", error, bf16, f"{error:.3g} off fp32, bf16 {bf16:.3g}")

    def _find(self, name: str, way: str, change: str) -> Found:
        if way == "run":
            return _run_script(self, name, change)
        if way == "generate":
            return _generate(self, name, change)
        model, row = MODELS[name], CHANGES[change]
        prepare = row.prepare or (lambda *_: None)
        opened = WAYS[way](self.save(name), model, lambda x: prepare(x, model))
        with hear_repairs() as repairs, opened as pipe:
            return Found(row.make(pipe, model), bool(repairs))


@contextmanager
def hear_repairs() -> Iterator[list[logging.LogRecord]]:
    """Collect the lines of the log that report repairs; some ways in have no handle to ask."""
    heard: list[logging.LogRecord] = []

    def note(record: logging.LogRecord) -> bool:
        heard.extend([record] if hasattr(record, "repair") else [])
        return True

    logger = logging.getLogger("stopdown")
    logger.addFilter(note)
    try:
        yield heard
    finally:
        logger.removeFilter(note)


def is_cell(name: str, way: str, change: str) -> bool:
    """Return whether a way can meet a change of this model."""
    row = CHANGES[change]
    if row.needs_family and not MODELS[name].family:
        return False
    if way == "generate":
        changes = ("first call", "second call", "another size first", "optional arguments")
        return name in PICTURES and change in (*changes, "LoRA before")
    if way == "convert":
        return change in (*CONVERTED, "optional arguments")
    return not (row.prepare and way in OPENS_FOLDER)


def list_cells() -> list[tuple[str, str, str]]:
    """Return each cell: model, way, change."""
    return [
        (m, w, c) for m in MODELS for w in (*WAYS, *COMMANDS) for c in CHANGES if is_cell(m, w, c)
    ]


def compare(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error of tensors; inf for other shapes and what is not finite."""
    if [x.shape for x in found] != [x.shape for x in want]:
        return math.inf
    errors = [relative_l2(x.float(), y.float()) for x, y in zip(found, want, strict=True)]
    return max(x if math.isfinite(x) else math.inf for x in errors)

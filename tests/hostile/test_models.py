"""Broken and hostile models: what every command that reads a SOURCE says, and that it leaves nothing.

Rows are generated: each JSON file of a model, each kind of breakage, each command. The default run takes
every breakage and every command at least once; the whole product is slow.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hostile.runner import MIB, Attack, copy_tiny, run_attack
from stopdown.plans.plan_files import seal_plan, write_plan
from stopdown.records import Plan

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate", "MODEL", "a circle", "--steps", "1", "-o", "OUT.mp4"),
    "check": ("check", "MODEL"),
    "plan": ("plan", "MODEL", "-o", "OUT.json"),
    "forecast": ("fit", "MODEL", "--memory", "8GiB"),
    "convert": ("convert", "MODEL", "OUT", "--plan", "PLAN"),
    "compare": ("compare", "MODEL", "--prompt", "a circle", "--steps", "1", "-o", "OUT.html"),
}
"""A command that reads a SOURCE, with the words that make it read all of it."""

Damage = Callable[[Path], None]


def edit(path: Path, **entries: Any) -> None:
    """Other values for fields of a JSON file; `a__b` is a field of the table `a`."""
    content = json.loads(path.read_text())
    for name, value in entries.items():
        *outer, last = name.split("__") if not name.startswith("_") else [name]
        table = content
        for part in outer:
            table = table.setdefault(part, {})
        table[last] = value
    path.write_text(json.dumps(content))


def write(content: bytes) -> Damage:
    return lambda path: void(path.write_bytes(content))


def void(_: object) -> None:
    """Nothing, whatever a call gave."""


def put_in(text: str) -> Damage:
    """Put a field with this text as its value before the others."""
    return lambda path: void(path.write_text('{"added": ' + text + "," + path.read_text()[1:]))


def replace(make: Callable[[Path], object]) -> Damage:
    """Something else in the place of a file."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def enlarge(path: Path) -> None:
    os.truncate(path, 70 * MIB)


UNREADABLE: Mapping[str, tuple[Damage, str]] = {
    "empty": (write(b""), "it isn't JSON at line 1, column 1"),
    "not JSON": (write(b"{"), "it isn't JSON at line 1"),
    "a list": (write(b"[]"), "it holds a list and not a table"),
    "a word": (write(b'"table"'), "it holds a str and not a table"),
    "deep": (write(b'{"a":' * 100_000), "it is nested deeper than 64"),
    "deep and whole": (put_in("[" * 500 + "]" * 500), "it is nested deeper than 64"),
    "NaN": (put_in("NaN"), "it holds the number NaN"),
    "5000 digits": (put_in("9" * 5000), "it holds an integer of 5000 digits"),
    "UTF-16": (write('{"a": 1}'.encode("utf-16")), "it isn't UTF-8 at byte 0"),
    "half a pair": (put_in('"\\ud83d"'), "it holds half of a surrogate pair"),
    "huge": (enlarge, "it has 73400320 bytes, and at most"),
    "pipe": (replace(os.mkfifo), "it isn't a regular file"),
    "folder": (replace(Path.mkdir), "is a directory"),
    "loop": (
        replace(lambda path: path.symlink_to(path.name)),
        "too many levels of symbolic links",
    ),
    "link to nothing": (
        replace(lambda path: path.symlink_to("nothing")),
        "no such file or directory",
    ),
}
"""What a JSON file may be instead of one, and what is said of it."""

FILES = (
    "model_index.json",
    "transformer/config.json",
    "text_encoder/config.json",
    "vae/config.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/tokenizer.json",
)


def make_row(
    name: str, command: str, damage: Damage, message: str, *, model: str = "cogvideox", **more: Any
) -> Attack:
    """A row that damages a tiny model, gives it to a command, and wants exit code 2 and nothing left."""

    def build(folder: Path) -> list[str]:
        damage(copy_tiny(folder, model))
        if command == "convert":
            empty = Plan("model", "", "CogVideoXPipeline", "fp16", {}, (), "cpu", 0.0)
            write_plan(seal_plan(empty), folder / "PLAN")
        return [place(word, folder) for word in COMMANDS[command]]

    return Attack(
        f"{command}: {name}", build, 2, message.replace("MODEL", "{folder}/model"), **more
    )


def place(word: str, folder: Path) -> str:
    """A word of a command with the row's folder before its paths."""
    is_path = word.startswith(("MODEL", "OUT", "PLAN"))
    return str(folder / word.replace("MODEL", "model").replace("OUT", "out")) if is_path else word


def damage_file(file: str, damage: Damage) -> Damage:
    return lambda model: damage(model / file)


PRODUCT = [
    make_row(
        f"{file} {kind}",
        command,
        damage_file(file, damage),
        f"MODEL/{file} can't be read as a JSON object: {said}",
    )
    for file in FILES
    for kind, (damage, said) in UNREADABLE.items()
    for command in COMMANDS
]
# 7 files, 15 kinds, 6 commands: a step without a common factor visits every file, kind and command.
SAMPLE = PRODUCT[::19]


@pytest.mark.default_rows(5)
@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_a_json_file_that_cannot_be_read(row: Attack, tmp_path: Path) -> None:
    """It is named with what is wrong with it, by every command, and nothing is left."""
    run_attack(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", PRODUCT, ids=lambda row: row.name)
def test_a_json_file_that_cannot_be_read_by_any_command(row: Attack, tmp_path: Path) -> None:
    """The whole product."""
    run_attack(row, tmp_path)


# What follows is whole JSON that says something hostile. Each row runs for the commands that it names.

BOTH = ("generate", "check")
ALL = tuple(COMMANDS)
INDEX, DENOISER, ENCODER = "model_index.json", "transformer/config.json", "text_encoder/config.json"
VAE, SCHEDULER = "vae/config.json", "scheduler/scheduler_config.json"
TOKENS = "tokenizer/tokenizer_config.json"
KERNEL = "which Transformers may fetch from the Hub and run."


def fields(file: str, **entries: Any) -> Damage:
    """Other fields in a JSON file of a model."""
    return lambda model: edit(model / file, **entries)


def grow_rows(
    cases: Sequence[tuple[str, Damage, str]], commands: Sequence[str] = BOTH, **more: Any
) -> list[Attack]:
    return [
        make_row(name, command, damage, message, **more)
        for name, damage, message in cases
        for command in commands
    ]


CLASSES = grow_rows(
    [
        (
            "a denoiser of a newer Diffusers",
            fields(INDEX, transformer=["diffusers", "FluxTransformer9D"]),
            "model_index.json names the class 'FluxTransformer9D' of diffusers, which diffusers",
        ),
        (
            "a function as encoder",
            fields(INDEX, text_encoder=["transformers", "pipeline"]),
            "model_index.json names transformers.pipeline, which isn't a component class.",
        ),
        (
            "a pipeline as denoiser",
            fields(INDEX, transformer=["diffusers", "CogVideoXPipeline"]),
            "MODEL/model_index.json asks for the pipeline CogVideoXPipeline as the component transformer.",
        ),
        (
            "a path as class",
            fields(INDEX, transformer=["diffusers", "../../evil"]),
            "MODEL/model_index.json names the class '../../evil' for the component transformer.",
        ),
        (
            "a private class",
            fields(INDEX, transformer=["diffusers", "__loader__"]),
            "MODEL/model_index.json names the class '__loader__' for the component transformer.",
        ),
        (
            "a library as path",
            fields(INDEX, transformer=["../evil", "Model"]),
            "MODEL/model_index.json asks for the component transformer as ../evil.Model.",
        ),
        (
            "an absolute component",
            fields(INDEX, **{"/etc": ["diffusers", "AutoencoderKL"]}),
            "MODEL/model_index.json names the component '/etc'.",
        ),
        (
            "a component above",
            fields(INDEX, **{"../model": ["diffusers", "AutoencoderKL"]}),
            "MODEL/model_index.json names the component '../model'.",
        ),
        (
            "a pipeline of a newer Diffusers",
            fields(INDEX, _class_name="CogVideoY"),
            "MODEL/model_index.json names the pipeline class 'CogVideoY', which Diffusers doesn't",
        ),
    ]
)

CODE = grow_rows(
    [
        (
            f"{file} {field}",
            fields(file, **{field: value}),
            f"MODEL/{file} {'requires' if said.startswith('classes') else 'asks for'} {said}",
        )
        for file, field, value, said in (
            (
                ENCODER,
                "attn_implementation",
                "owner/kernel",
                "attn_implementation = 'owner/kernel', " + KERNEL,
            ),
            (ENCODER, "_attn_implementation", "owner/kernel@main", "_attn_implementation = "),
            (
                ENCODER,
                "_attn_implementation_internal",
                "owner/kernel:f",
                "_attn_implementation_internal",
            ),
            (ENCODER, "experts_implementation", "owner/kernel", "experts_implementation = 'owner/"),
            (ENCODER, "text_config__attn_implementation", "owner/kernel", "text_config.attn_impl"),
            (
                DENOISER,
                "attn_implementation",
                "owner/kernel",
                "attn_implementation = 'owner/kernel'",
            ),
            (
                ENCODER,
                "text_config__auto_map",
                {},
                "classes of its own (text_config.auto_map), which",
            ),
            (SCHEDULER, "auto_map", {}, "classes of its own (auto_map), which"),
        )
    ],
    ALL,
)


def put_adapter(component: str) -> Damage:
    text = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/other"})
    return lambda model: void((model / component / "adapter_config.json").write_text(text))


ADAPTERS = grow_rows(
    [
        (
            f"an adapter beside {component}",
            put_adapter(component),
            f"MODEL/{component}/adapter_config.json belongs to an adapter, which would be put on",
        )
        for component in ("text_encoder", "transformer")
    ],
    ALL,
)

COUNTS = grow_rows(
    [
        (
            f"{file} {field} = {value!r}",
            fields(file, **{field: value}),
            f"MODEL/{file} asks for {said}.",
        )
        for file, field, value, said in (
            (DENOISER, "num_layers", 10**9, "num_layers = 1e+09"),
            (DENOISER, "num_layers", -1, "num_layers = -1"),
            (DENOISER, "patch_size", 0, "patch_size = 0"),
            (SCHEDULER, "num_train_timesteps", 0, "num_train_timesteps = 0"),
            (SCHEDULER, "beta_end", float("inf"), "beta_end = inf"),
            (TOKENS, "extra_ids", -1, "extra_ids = -1"),
            (DENOISER, "sample_height", 10**9, "sample_height = 1e+09"),
            (
                ENCODER,
                "text_config__num_hidden_layers",
                10**9,
                "text_config.num_hidden_layers = 1e+09",
            ),
            (VAE, "layers_per_block", [1, 10**9], "layers_per_block = 1e+09"),
            (VAE, "scaling_factor", 0.0, "scaling_factor = 0.0"),
            (TOKENS, "extra_ids", 1e9, "extra_ids = 1e+09"),
            (SCHEDULER, "num_train_timesteps", 10**12, "num_train_timesteps = 1e+12"),
        )
    ],
    ALL,
)

# Weights: headers, shards, dtypes, and configurations that they do not fit.

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
DAMAGED = f"The weights MODEL/{WEIGHTS} are damaged or cut off: "


def swap_header(text: str) -> Damage:
    """The denoiser's weights as a header alone."""
    content = struct.pack("<Q", len(text)) + text.encode()
    return lambda model: void((model / WEIGHTS).write_bytes(content))


def in_place(make: Callable[[Path], object], file: str = WEIGHTS) -> Damage:
    return lambda model: replace(make)(model / file)


HUGE = {"proj_out.bias": {"dtype": "F32", "shape": [2**62] * 64, "data_offsets": [0, 4]}}
HEADER = "its header can't be read as JSON: "
HEADERS = grow_rows(
    [
        (name, damage, DAMAGED + said)
        for name, damage, said in (
            ("a deep header", swap_header("[" * 100_000), HEADER + "it is nested deeper than 64"),
            (
                "a shape whose product is huge",
                swap_header(json.dumps(HUGE)),
                "the tensor 'proj_out.bias' takes",
            ),
            (
                "values cut off",
                lambda model: os.truncate(model / WEIGHTS, 9000),
                "its values should take",
            ),
            ("a pipe as weights", in_place(os.mkfifo), HEADER + "it isn't a regular file"),
            ("a folder as weights", in_place(Path.mkdir), HEADER + "is a directory"),
            (
                "weights that link to themselves",
                in_place(lambda path: path.symlink_to(path.name)),
                HEADER + "too many levels",
            ),
        )
    ],
    ("generate", "convert"),
)


def index_as(text: str) -> Damage:
    """An index of shards beside the denoiser's weights."""
    return lambda model: void((model / f"{WEIGHTS}.index.json").write_text(text))


INDEX_DAMAGED = f"MODEL/{WEIGHTS}.index.json is damaged: it "
SHARDS = grow_rows(
    [
        (name, damage, INDEX_DAMAGED + said)
        for name, damage, said in (
            (
                "a shard above",
                index_as('{"weight_map": {"a": "../../secret.safetensors"}}'),
                "names the file '../../secret.safetensors', which",
            ),
            (
                "a deep index",
                index_as("[" * 100_000),
                "can't be read as an index of shards: it is nested",
            ),
        )
    ],
    ("generate", "convert"),
)


def store_as(dtype: torch.dtype, name: str, file: str = WEIGHTS) -> Damage:
    """One tensor stored in another dtype."""

    def damage(model: Path) -> None:
        tensors = load_file(model / file)
        tensors[name] = tensors[name].to(dtype)
        save_file(tensors, model / file, {"format": "pt"})

    return damage


def add_tensor(name: str, file: str = WEIGHTS) -> Damage:
    def damage(model: Path) -> None:
        tensors = {**load_file(model / file), name: torch.ones(4)}
        save_file(tensors, model / file, {"format": "pt"})

    return damage


def misfit(component: str) -> str:
    return f"The weights in MODEL/{component} don't match the model: "


MISFITS = grow_rows(
    [
        (name, damage, misfit(component) + said)
        for name, component, damage, said in (
            (
                "a denoiser of 1 layer",
                "transformer",
                fields(DENOISER, num_layers=1),
                "the model has no place for transformer_blocks.1.",
            ),
            (
                "a denoiser of 3 layers",
                "transformer",
                fields(DENOISER, num_layers=3),
                "they lack transformer_blocks.2.",
            ),
            (
                "an encoder of 1 layer",
                "text_encoder",
                fields(ENCODER, num_layers=1),
                "the model has no place for encoder.block.1.",
            ),
            (
                "a denoiser's tensor too many",
                "transformer",
                add_tensor("more.weight"),
                "the model has no place for more.weight",
            ),
            (
                "int16 in a denoiser",
                "transformer",
                store_as(torch.int16, "proj_out.weight"),
                "proj_out.weight is stored as int16.",
            ),
        )
    ],
    ("generate", "plan"),
) + grow_rows(
    [
        (
            "a hundred thousand heads",
            fields(DENOISER, num_attention_heads=10**5),
            "A configuration describes 25600000 values",
        ),
        (
            "a vocabulary of 10**9",
            fields(ENCODER, vocab_size=10**9),
            "A configuration describes 32000000000 values",
        ),
        (
            "patches as text",
            fields(DENOISER, patch_size="big"),
            "The configurations of the model give no sizes: ",
        ),
    ],
    ("generate",),
)

UNBUILDABLE = [
    row
    for name, component, class_name, damage in (
        (
            "layers as text",
            "transformer",
            "CogVideoXTransformer3DModel",
            fields(DENOISER, num_layers="2"),
        ),
        (
            "widths of 10**18",
            "transformer",
            "CogVideoXTransformer3DModel",
            fields(DENOISER, attention_head_dim=10**18),
        ),
        (
            "an activation that is code",
            "transformer",
            "CogVideoXTransformer3DModel",
            fields(DENOISER, activation_fn="__import__('os')"),
        ),
        (
            "a vocabulary as text",
            "text_encoder",
            "T5EncoderModel",
            fields(ENCODER, vocab_size="all"),
        ),
        ("no blocks", "vae", "AutoencoderKLCogVideoX", fields(VAE, block_out_channels=[])),
        (
            "a ratio of 0",
            "vae",
            "AutoencoderKLCogVideoX",
            fields(VAE, temporal_compression_ratio=0),
        ),
    )
    for row in (
        *grow_rows([(name, damage, misfit(component))], ("generate",)),
        *grow_rows(
            [(name, damage, f"{class_name} couldn't be built from MODEL/{component}: ")],
            ("check", "plan"),
        ),
    )
]

PIPELINE = "CogVideoXPipeline couldn't be built from MODEL: "
SIDES = [
    row
    for name, damage, said in (
        (
            "a schedule of no kind",
            fields(SCHEDULER, beta_schedule="os.system"),
            "os.system isn't implemented",
        ),
        ("a schedule as text", fields(SCHEDULER, num_train_timesteps="many"), "linspace()"),
    )
    for row in (
        *grow_rows([(name, damage, PIPELINE + said)], ("generate",)),
        *grow_rows(
            [
                (
                    name,
                    damage,
                    f"CogVideoXDDIMScheduler couldn't be built from MODEL/scheduler: {said}",
                )
            ],
            ("check", "plan"),
        ),
    )
] + grow_rows(
    [
        ("ids as text", fields(TOKENS, extra_ids="many"), PIPELINE),
        (
            "a pre-tokenizer of no kind",
            fields("tokenizer/tokenizer.json", pre_tokenizer={"type": "os"}),
            PIPELINE,
        ),
    ],
    ("generate",),  # a plan is computed from weights, and needs no tokenizer
)

FORECASTS = [
    dataclasses.replace(make_row(name, "forecast", damage, message), exit_code=1)
    for name, damage, message in (
        (
            "sample sizes as text",
            fields(DENOISER, sample_height="tall"),
            "CogVideoXPipeline can't be run without values: not all arguments converted",
        ),
        (
            "a pipeline of other components",
            fields(INDEX, _class_name="StableDiffusionPipeline"),
            "StableDiffusionPipeline can't be run without values: 'NoneType' object has no",
        ),
    )
]

NEEDS = "needs a library that isn't here: "
QUANTISED = grow_rows(
    [
        (f"{file} quantised by {value!r:.40}", fields(file, quantization_config=value), said)
        for file, class_name, methods in (
            (ENCODER, "T5EncoderModel", ("bitsandbytes", "gptq", "awq", "quanto")),
            (DENOISER, "CogVideoXTransformer3DModel", ("bitsandbytes", "quanto")),
        )
        for method in methods
        for value in [
            {"quant_method": method, "load_in_4bit": True, "bits": 4, "weights_dtype": "int8"}
        ]
        for said in [f"{class_name} in MODEL/{file.partition('/')[0]} {NEEDS}"]
    ]
    + [
        (
            f"{file} quantised by {value!r}",
            fields(file, quantization_config=value),
            misfit(component),
        )
        for file, component in ((ENCODER, "text_encoder"), (DENOISER, "transformer"))
        for value in ({}, 5, [])
        if value != {} or file == ENCODER  # Diffusers takes none for no quantisation
    ],
    ("generate", "plan"),
)

# Places: what stands where a file or folder should, and words that are no SOURCE.


def swap(path: str, make: Callable[[Path], object]) -> Damage:
    """Something else in the place of a folder or file of the model; "" is the model itself."""

    def damage(model: Path) -> None:
        target = model / path if path else model
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        make(target)

    return damage


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


PLACES = grow_rows(
    [
        (
            "the model is a pipe",
            swap("", os.mkfifo),
            "The file MODEL isn't a .safetensors or .gguf file.",
        ),
        (
            "the model links to itself",
            swap("", link_to_itself),
            "There is no file or folder MODEL.",
        ),
        (
            "a component is a pipe",
            swap("vae", os.mkfifo),
            "The folder of the component vae is missing from MODEL.",
        ),
        (
            "a component is empty",
            swap("vae", Path.mkdir),
            "The model MODEL has 2 problems. (1) MODEL/vae has no config.json.",
        ),
        (
            "a vocabulary is a pipe",
            swap("tokenizer/spiece.model", os.mkfifo),
            "MODEL/tokenizer/spiece.model is no regular file.",
        ),
        (
            "a vocabulary is huge",
            swap("tokenizer/merges.txt", lambda path: (path.touch(), enlarge(path))),
            "MODEL/tokenizer/merges.txt has 73400320 bytes.",
        ),
        (
            "a generation config is a pipe",
            swap("text_encoder/generation_config.json", os.mkfifo),
            "MODEL/text_encoder/generation_config.json can't be read",
        ),
        (
            "an index of shards is a pipe",
            swap(f"{WEIGHTS}.index.json", os.mkfifo),
            "MODEL/transformer/diffusion_pytorch_model.safetensors.index.json is damaged",
        ),
    ],
    ("generate", "convert"),
)


def make_word_row(name: str, word: str, message: str) -> Attack:
    return Attack(f"check: {name}", lambda folder: ["check", word], 2, message)


WORDS = [
    make_word_row(name, word, message)
    for name, word, message in (
        ("no word", "", "The folder . has no model_index.json."),
        ("two dots", "..", "The folder .. has no model_index.json."),
        ("a device", "/dev/zero", "The file /dev/zero isn't a .safetensors or .gguf file."),
        (
            "a proc file",
            "/proc/self/mem",
            "The file /proc/self/mem isn't a .safetensors or .gguf file.",
        ),
        ("a long name", "a" * 5000, "The model 'aaaa"),
        ("control signs", "\x1b[2Jshapes", "The model '\\x1b[2Jshapes' is unknown."),
        ("a Hub id of dots", "owner/..", "The model owner/.. isn't complete on this computer"),
        ("a home of nobody", "~nobody-at-all/model", "There is no file or folder ~nobody-at-all"),
    )
]

EVERY = [
    *(*CLASSES, *CODE, *ADAPTERS, *COUNTS),
    *(*HEADERS, *SHARDS, *MISFITS, *UNBUILDABLE, *SIDES, *FORECASTS, *QUANTISED, *PLACES, *WORDS),
]


@pytest.mark.default_rows(5)
@pytest.mark.parametrize("row", [*EVERY[5::10], FORECASTS[1]], ids=lambda row: row.name)
def test_a_model_that_asks_for_what_it_may_not(row: Attack, tmp_path: Path) -> None:
    """Classes, code, adapters and counts are refused by name before anything is built."""
    run_attack(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_a_model_that_asks_for_what_it_may_not_by_any_command(row: Attack, tmp_path: Path) -> None:
    """The whole product."""
    run_attack(row, tmp_path)

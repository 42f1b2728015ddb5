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
    "plan": ("plan", "MODEL", "--steps", "1", "-o", "OUT.json"),
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
    "empty": (write(b""), "it is not JSON at line 1, column 1"),
    "not JSON": (write(b"{"), "it is not JSON at line 1"),
    "a list": (write(b"[]"), "it holds a list and not a table"),
    "a word": (write(b'"table"'), "it holds a str and not a table"),
    "deep": (write(b'{"a":' * 100_000), "it is nested deeper than 64"),
    "deep and whole": (put_in("[" * 500 + "]" * 500), "it is nested deeper than 64"),
    "NaN": (put_in("NaN"), "it holds the number NaN"),
    "5000 digits": (put_in("9" * 5000), "it holds an integer of 5000 digits"),
    "UTF-16": (write('{"a": 1}'.encode("utf-16")), "it is not UTF-8 at byte 0"),
    "half a pair": (put_in('"\\ud83d"'), "it holds half of a surrogate pair"),
    "huge": (enlarge, "it has 73400320 bytes, and at most"),
    "pipe": (replace(os.mkfifo), "it is not a regular file"),
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
            empty = Plan("model", "", "CogVideoXPipeline", "fp16", {}, (), (), 1, "cpu", 0.0)
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
        f"MODEL/{file} cannot be read as a table in JSON: {said}",
    )
    for file in FILES
    for kind, (damage, said) in UNREADABLE.items()
    for command in COMMANDS
]
# 7 files, 15 kinds, 6 commands: a step without a common factor visits every file, kind and command.
SAMPLE = PRODUCT[::19]


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
            "an encoder of a newer Transformers",
            fields(INDEX, text_encoder=["transformers", "T6EncoderModel"]),
            "model_index.json names the class 'T6EncoderModel' of transformers, which transformers",
        ),
        (
            "a scheduler of a newer Diffusers",
            fields(INDEX, scheduler=["diffusers", "NewScheduler"]),
            "model_index.json names the class 'NewScheduler' of diffusers, which diffusers",
        ),
        (
            "a tokenizer of a newer Transformers",
            fields(INDEX, tokenizer=["transformers", "NewTokenizer"]),
            "model_index.json names the class 'NewTokenizer' of transformers, which transformers",
        ),
        (
            "a function as encoder",
            fields(INDEX, text_encoder=["transformers", "pipeline"]),
            "model_index.json names transformers.pipeline, which is no class of components.",
        ),
        (
            "a module as denoiser",
            fields(INDEX, transformer=["diffusers", "utils"]),
            "model_index.json names diffusers.utils, which is no class of components.",
        ),
        (
            "a pipeline as denoiser",
            fields(INDEX, transformer=["diffusers", "CogVideoXPipeline"]),
            "MODEL/model_index.json asks for the pipeline CogVideoXPipeline as the component transformer.",
        ),
        (
            "any pipeline as vae",
            fields(INDEX, vae=["diffusers", "DiffusionPipeline"]),
            "MODEL/model_index.json asks for the pipeline DiffusionPipeline as the component vae.",
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
            "a submodule",
            fields(INDEX, transformer=["diffusers.utils", "logging"]),
            "MODEL/model_index.json asks for the component transformer as diffusers.utils.logging.",
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
            "a component with no name",
            fields(INDEX, **{"": ["diffusers", "AutoencoderKL"]}),
            "MODEL/model_index.json names the component ''.",
        ),
        (
            "a pipeline of a newer Diffusers",
            fields(INDEX, _class_name="CogVideoY"),
            "MODEL/model_index.json names the pipeline class 'CogVideoY', which Diffusers does not",
        ),
        (
            "a number as pipeline",
            fields(INDEX, _class_name=7),
            "MODEL/model_index.json names the pipeline class '', which Diffusers does not have.",
        ),
        (
            "a pipeline of its own",
            fields(INDEX, _class_name=["pipeline", "Mine"]),
            "MODEL/model_index.json requires a pipeline class of its own, which is code",
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
            (
                ENCODER,
                "attn_implementation",
                {"text_config": "o/k"},
                "attn_implementation = 'o/k', ",
            ),
            (ENCODER, "attn_implementation", "flash_attention_2", "attn_implementation = 'flash_"),
            (ENCODER, "experts_implementation", "owner/kernel", "experts_implementation = 'owner/"),
            (ENCODER, "text_config__attn_implementation", "owner/kernel", "text_config.attn_impl"),
            (
                ENCODER,
                "a__b__c__attn_implementation",
                "owner/kernel",
                "a.b.c.attn_implementation = ",
            ),
            (
                DENOISER,
                "attn_implementation",
                "owner/kernel",
                "attn_implementation = 'owner/kernel'",
            ),
            (VAE, "_attn_implementation", "owner/kernel", "_attn_implementation = 'owner/kernel'"),
            (
                ENCODER,
                "auto_map",
                {"AutoModel": "mine.Model"},
                "classes of its own (auto_map), which",
            ),
            (
                ENCODER,
                "text_config__auto_map",
                {},
                "classes of its own (text_config.auto_map), which",
            ),
            (
                TOKENS,
                "auto_map",
                {"AutoTokenizer": ["mine.T", None]},
                "classes of its own (auto_map)",
            ),
            (SCHEDULER, "auto_map", {}, "classes of its own (auto_map), which"),
            (VAE, "trust_remote_code", True, "classes of its own (trust_remote_code), which"),
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
            (DENOISER, "num_layers", 1e9, "num_layers = 1e+09"),
            (DENOISER, "num_layers", -1, "num_layers = -1"),
            (ENCODER, "num_layers", -1, "num_layers = -1"),
            (DENOISER, "patch_size", 0, "patch_size = 0"),
            (DENOISER, "sample_height", 0, "sample_height = 0"),
            (SCHEDULER, "num_train_timesteps", 0, "num_train_timesteps = 0"),
            (SCHEDULER, "beta_end", float("inf"), "beta_end = inf"),
            (TOKENS, "extra_ids", -1, "extra_ids = -1"),
            (DENOISER, "sample_height", 10**9, "sample_height = 1e+09"),
            (DENOISER, "sample_frames", 10**9, "sample_frames = 1e+09"),
            (ENCODER, "num_layers", 10**9, "num_layers = 1e+09"),
            (
                ENCODER,
                "text_config__num_hidden_layers",
                10**9,
                "text_config.num_hidden_layers = 1e+09",
            ),
            (VAE, "layers_per_block", 10**9, "layers_per_block = 1e+09"),
            (VAE, "layers_per_block", [1, 10**9], "layers_per_block = 1e+09"),
            (VAE, "scaling_factor", 0, "scaling_factor = 0"),
            (VAE, "scaling_factor", 0.0, "scaling_factor = 0.0"),
            (VAE, "scaling_factor", float("inf"), "scaling_factor = inf"),
            (TOKENS, "extra_ids", 10**9, "extra_ids = 1e+09"),
            (TOKENS, "extra_ids", 1e9, "extra_ids = 1e+09"),
            (SCHEDULER, "num_train_timesteps", 10**12, "num_train_timesteps = 1e+12"),
        )
    ],
    ALL,
)

# Weights: headers, shards, dtypes, and configurations that they do not fit.

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
ENCODER_WEIGHTS = "text_encoder/model.safetensors"
DAMAGED = f"The weights MODEL/{WEIGHTS} are damaged or cut off: "


def read_parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its values."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_parts(path: Path, header: str | bytes, values: bytes) -> None:
    text = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


def change_header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Another header for the weights of the denoiser, over the same values."""

    def damage(model: Path) -> None:
        header, values = read_parts(model / WEIGHTS)
        change(header)
        write_parts(model / WEIGHTS, json.dumps(header), values)

    return damage


def change_entry(**entries: Any) -> Damage:
    return change_header(lambda header: header["proj_out.bias"].update(entries))


def swap_header(text: str | bytes) -> Damage:
    return lambda model: write_parts(model / WEIGHTS, text, b"")


def in_place(make: Callable[[Path], object], file: str = WEIGHTS) -> Damage:
    return lambda model: replace(make)(model / file)


ENTRY = "its header does not describe the tensor 'proj_out.bias'"
HEADER = "its header cannot be read as JSON: "
HEADERS = grow_rows(
    [
        (name, damage, DAMAGED + said)
        for name, damage, said in (
            ("an empty file", in_place(Path.touch), "it has 0 bytes"),
            ("a short file", in_place(lambda path: path.write_bytes(b"1234567")), "it has 7 bytes"),
            (
                "a file of text",
                in_place(lambda path: path.write_bytes(b"version https://git-lfs")),
                "it does not begin",
            ),
            (
                "a header too long",
                in_place(lambda path: path.write_bytes(b"\xff" * 64)),
                "it does not begin",
            ),
            (
                "a header cut off",
                in_place(lambda path: path.write_bytes(struct.pack("<Q", 900) + b"{}")),
                "its header needs 900",
            ),
            ("a header that is a list", swap_header("[]"), "its header is not a table"),
            ("a header that is no JSON", swap_header("{"), HEADER + "it is not JSON"),
            ("a deep header", swap_header("[" * 100_000), HEADER + "it is nested deeper than 64"),
            ("a header in Latin-1", swap_header(b'{"\xe9": 1}'), HEADER + "it is not UTF-8"),
            ("a header with NaN", swap_header('{"a": NaN}'), HEADER + "it holds the number NaN"),
            (
                "a header with Infinity",
                change_entry(data_offsets=[0, float("inf")]),
                HEADER + "it holds the number Infinity",
            ),
            (
                "a header with 5000 digits",
                swap_header('{"a": %s}' % ("9" * 5000)),
                HEADER + "it holds an integer of 5000",
            ),
            (
                "a header with 1e999",
                swap_header(
                    '{"proj_out.bias": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'
                ),
                HEADER + "it holds the number 1e999",
            ),
            (
                "an entry that is text",
                change_header(lambda header: header.update({"proj_out.bias": "F32"})),
                ENTRY,
            ),
            (
                "an entry without a shape",
                change_header(lambda header: header["proj_out.bias"].pop("shape")),
                ENTRY,
            ),
            ("a shape that is text", change_entry(shape="16"), ENTRY),
            ("a shape below 0", change_entry(shape=[-16]), ENTRY),
            ("a shape of floats", change_entry(shape=[16.0]), ENTRY),
            ("a shape of digits as text", change_entry(shape=["16"]), ENTRY),
            ("a shape of truth", change_entry(shape=[True]), ENTRY),
            ("a shape beyond 64 bits", change_entry(shape=[2**64]), ENTRY),
            ("a shape of 100 sizes", change_entry(shape=[1] * 100), ENTRY),
            (
                "a shape whose product is huge",
                change_entry(shape=[2**62] * 64),
                "the tensor 'proj_out.bias' takes",
            ),
            ("three offsets", change_entry(data_offsets=[0, 1, 2]), ENTRY),
            ("offsets below 0", change_entry(data_offsets=[-4, 0]), ENTRY),
            (
                "offsets that go back",
                change_entry(data_offsets=[64, 0]),
                "its tensors overlap or leave a gap",
            ),
            (
                "offsets that overlap",
                change_entry(data_offsets=[0, 32]),
                "its tensors overlap or leave a gap",
            ),
            ("a dtype that is a number", change_entry(dtype=7), ENTRY),
            ("a dtype that is a sentence", change_entry(dtype="F32; rm -rf"), ENTRY),
            (
                "metadata that is a list",
                change_header(lambda header: header.update(__metadata__=[])),
                "its metadata is not a table of texts",
            ),
            (
                "metadata with numbers",
                change_header(lambda header: header.update(__metadata__={"a": 1})),
                "its metadata is not",
            ),
            (
                "values cut off",
                lambda model: os.truncate(model / WEIGHTS, 9000),
                "its values should take",
            ),
            (
                "values too many",
                lambda model: os.truncate(model / WEIGHTS, 10 * MIB),
                "its values should take",
            ),
            ("a pipe as weights", in_place(os.mkfifo), HEADER + "it is not a regular file"),
            ("a folder as weights", in_place(Path.mkdir), HEADER + "is a directory"),
            (
                "weights that link to themselves",
                in_place(lambda path: path.symlink_to(path.name)),
                HEADER + "too many levels",
            ),
            (
                "weights that link to nothing",
                in_place(lambda path: path.symlink_to("none")),
                HEADER + "no such file",
            ),
        )
    ],
    ("generate", "convert"),
)


def shard(model: Path) -> dict[str, Any]:
    """Take the denoiser's weights apart into two shards; their index."""
    tensors = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    halves = sorted(tensors)[::2], sorted(tensors)[1::2]
    names = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        save_file({key: tensors[key] for key in half}, model / "transformer" / name)
    places = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    return {"metadata": {"total_size": 1}, "weight_map": places}


def index_as(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A sharded denoiser whose index is changed; a text in place of it is written as it is."""

    def damage(model: Path) -> None:
        index = shard(model)
        text = change(index)
        written = text if isinstance(text, str) else json.dumps(index)
        (model / f"{WEIGHTS}.index.json").write_text(written)

    return damage


def point(shard_name: Any) -> Damage:
    return index_as(lambda index: index["weight_map"].update({"proj_out.bias": shard_name}))


INDEX_DAMAGED = f"MODEL/{WEIGHTS}.index.json is damaged: it "
SHARDS = grow_rows(
    [
        (name, damage, INDEX_DAMAGED + said)
        for name, damage, said in (
            (
                "a shard above",
                point("../../secret.safetensors"),
                "names the file '../../secret.safetensors', which",
            ),
            (
                "a shard by an absolute path",
                point("/etc/shadow"),
                "names the file '/etc/shadow', which is no shard",
            ),
            (
                "a shard of another name",
                point("evil.safetensors"),
                "names the file 'evil.safetensors', which",
            ),
            (
                "a pickle as shard",
                point("pytorch_model.bin"),
                "names the file 'pytorch_model.bin', which",
            ),
            (
                "a shard in a folder",
                point("a/model.safetensors"),
                "names the file 'a/model.safetensors'",
            ),
            ("a number as shard", point(5), "names the file '5', which is no shard"),
            (
                "a list as shard",
                point(["model.safetensors"]),
                "names the file \"['model.safetensors']\"",
            ),
            ("no shard", point(None), "names the file 'None', which is no shard"),
            (
                "a map that is a list",
                index_as(lambda index: index.update(weight_map=[])),
                "cannot be read as an index",
            ),
            (
                "no map",
                index_as(lambda index: index.pop("weight_map")),
                "cannot be read as an index of shards",
            ),
            (
                "an index that is a list",
                index_as(lambda _: "[]"),
                "cannot be read as an index of shards: it holds a list",
            ),
            (
                "a deep index",
                index_as(lambda _: "[" * 100_000),
                "cannot be read as an index of shards: it is nested",
            ),
            (
                "an index with NaN",
                index_as(lambda _: '{"a": NaN}'),
                "cannot be read as an index of shards: it holds",
            ),
        )
    ],
    ("generate", "convert"),
) + grow_rows(
    [
        (
            "a shard that is missing",
            lambda model: (
                index_as(lambda _: None)(model),
                (
                    model / "transformer" / "diffusion_pytorch_model-00002-of-00002.safetensors"
                ).unlink(),
            ),
            "MODEL/transformer lacks diffusion_pytorch_model-00002-of-00002.safetensors.",
        ),
        (
            "a tensor that no shard has",
            index_as(
                lambda index: index["weight_map"].update(
                    {"more": "diffusion_pytorch_model-00001-of-00002.safetensors"}
                )
            ),
            "MODEL/transformer lacks the tensor 'more' of diffusion",
        ),
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
    return f"The weights in MODEL/{component} do not match the model: "


MISFITS = grow_rows(
    [
        (name, damage, misfit(component) + said)
        for name, component, damage, said in (
            (
                "a denoiser of 0 layers",
                "transformer",
                fields(DENOISER, num_layers=0),
                "the model has no place for transformer_blocks.0.",
            ),
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
                "a vae of fewer layers",
                "vae",
                fields(VAE, layers_per_block=0),
                "the model has no place for",
            ),
            (
                "a denoiser's tensor too many",
                "transformer",
                add_tensor("more.weight"),
                "the model has no place for more.weight",
            ),
            (
                "an encoder's tensor too many",
                "text_encoder",
                add_tensor("encoder.more.weight", ENCODER_WEIGHTS),
                "the model has no place for encoder.more.weight",
            ),
            (
                "int16 in a denoiser",
                "transformer",
                store_as(torch.int16, "proj_out.weight"),
                "proj_out.weight is stored as int16.",
            ),
            (
                "int8 in a denoiser",
                "transformer",
                store_as(torch.int8, "proj_out.weight"),
                "proj_out.weight is stored as int8.",
            ),
            (
                "bool in a denoiser",
                "transformer",
                store_as(torch.bool, "proj_out.weight"),
                "proj_out.weight is stored as bool.",
            ),
            (
                "int16 in an encoder",
                "text_encoder",
                store_as(torch.int16, "shared.weight", ENCODER_WEIGHTS),
                "shared.weight is stored as int16.",
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
        (
            "a ratio as text",
            fields(VAE, temporal_compression_ratio="four"),
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
            "layers as a list",
            "transformer",
            "CogVideoXTransformer3DModel",
            fields(DENOISER, num_layers=[]),
        ),
        (
            "no layers",
            "transformer",
            "CogVideoXTransformer3DModel",
            fields(DENOISER, num_layers=None),
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
        (
            "blocks of no kind",
            "vae",
            "AutoencoderKLCogVideoX",
            fields(VAE, down_block_types=["os.system"] * 4),
        ),
        ("no blocks", "vae", "AutoencoderKLCogVideoX", fields(VAE, block_out_channels=[])),
        ("groups of 0", "vae", "AutoencoderKLCogVideoX", fields(VAE, norm_num_groups=0)),
        (
            "a ratio of 0",
            "vae",
            "AutoencoderKLCogVideoX",
            fields(VAE, temporal_compression_ratio=0),
        ),
    )
    for row in (
        *grow_rows([(name, damage, misfit(component))], ("generate", "plan")),
        make_row(
            name, "check", damage, f"{class_name} could not be built from MODEL/{component}: "
        ),
    )
]

PIPELINE = "CogVideoXPipeline could not be built from MODEL: "
SIDES = [
    row
    for name, damage, said in (
        (
            "a schedule of no kind",
            fields(SCHEDULER, beta_schedule="os.system"),
            "os.system is not implemented",
        ),
        ("a schedule as text", fields(SCHEDULER, num_train_timesteps="many"), "linspace()"),
        ("betas as text", fields(SCHEDULER, beta_start="low"), "unsupported operand"),
    )
    for row in (
        *grow_rows([(name, damage, PIPELINE + said)], ("generate", "plan")),
        make_row(
            name,
            "check",
            damage,
            f"CogVideoXDDIMScheduler could not be built from MODEL/scheduler: {said}",
        ),
    )
] + grow_rows(
    [
        ("ids as text", fields(TOKENS, extra_ids="many"), PIPELINE),
        ("a vocabulary cut off", fields("tokenizer/tokenizer.json", model={}), PIPELINE),
        (
            "a pre-tokenizer of no kind",
            fields("tokenizer/tokenizer.json", pre_tokenizer={"type": "os"}),
            PIPELINE,
        ),
    ],
    ("generate", "plan"),
)

FORECASTS = [
    dataclasses.replace(make_row(name, "forecast", damage, message), exit_code=1)
    for name, damage, message in (
        (
            "sample sizes as text",
            fields(DENOISER, sample_height="tall"),
            "CogVideoXPipeline cannot be run without values: not all arguments converted",
        ),
        (
            "a pipeline of other components",
            fields(INDEX, _class_name="StableDiffusionPipeline"),
            "StableDiffusionPipeline cannot be run without values: 'NoneType' object has no",
        ),
    )
]

NEEDS = "needs a library that is not here: "
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
            "The file MODEL is not a .safetensors or .gguf file.",
        ),
        (
            "the model links to itself",
            swap("", link_to_itself),
            "There is no file or folder MODEL.",
        ),
        (
            "the model links to nothing",
            swap("", lambda path: path.symlink_to("nothing")),
            "There is no file or folder MODEL.",
        ),
        (
            "the model is an empty folder",
            swap("", Path.mkdir),
            "The folder MODEL has no model_index.json.",
        ),
        (
            "the model is an empty file",
            swap("", Path.touch),
            "The file MODEL is not a .safetensors or .gguf file.",
        ),
        (
            "no index",
            swap("model_index.json", lambda _: None),
            "The folder MODEL has no model_index.json.",
        ),
        (
            "a component is a pipe",
            swap("vae", os.mkfifo),
            "The folder of the component vae is missing from MODEL.",
        ),
        (
            "a component is a file",
            swap("vae", Path.touch),
            "The folder of the component vae is missing from MODEL.",
        ),
        (
            "a component links to itself",
            swap("vae", link_to_itself),
            "The folder of the component vae is missing from MODEL.",
        ),
        (
            "a component is empty",
            swap("vae", Path.mkdir),
            "The model MODEL has 2 problems. (1) MODEL/vae has no config.json.",
        ),
        (
            "a component is missing",
            swap("vae", lambda _: None),
            "The folder of the component vae is missing from MODEL.",
        ),
        (
            "a vocabulary is a pipe",
            swap("tokenizer/spiece.model", os.mkfifo),
            "MODEL/tokenizer/spiece.model is no regular file.",
        ),
        (
            "a vocabulary links to itself",
            swap("tokenizer/spiece.model", link_to_itself),
            "MODEL/tokenizer/spiece.model is no regular file.",
        ),
        (
            "a vocabulary is huge",
            swap("tokenizer/merges.txt", lambda path: (path.touch(), enlarge(path))),
            "MODEL/tokenizer/merges.txt has 73400320 bytes.",
        ),
        (
            "a template is a pipe",
            swap("tokenizer/chat_template.jinja", os.mkfifo),
            "MODEL/tokenizer/chat_template.jinja is no regular file.",
        ),
        (
            "a generation config is a pipe",
            swap("text_encoder/generation_config.json", os.mkfifo),
            "MODEL/text_encoder/generation_config.json cannot be read",
        ),
        (
            "an index of shards is a pipe",
            swap(f"{WEIGHTS}.index.json", os.mkfifo),
            "MODEL/transformer/diffusion_pytorch_model.safetensors.index.json is damaged",
        ),
        (
            "a pickle for weights",
            lambda model: void(
                (model / WEIGHTS).rename(model / "transformer/diffusion_pytorch_model.bin")
            ),
            "The weights transformer/diffusion_pytorch_model.bin of MODEL are stored",
        ),
        (
            "code in the place of an index",
            lambda model: (
                edit(model / INDEX, transformer=["mine", "Model"]),
                (model / "transformer/mine.py").write_text("raise SystemExit(7)"),
            ),
            "MODEL/model_index.json asks for the component transformer from mine.py",
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
        ("a space", " ", "The model ' ' is unknown."),
        ("two dots", "..", "The folder .. has no model_index.json."),
        ("a slash", "/", "The folder / has no model_index.json."),
        ("a device", "/dev/zero", "The file /dev/zero is not a .safetensors or .gguf file."),
        (
            "a proc file",
            "/proc/self/mem",
            "The file /proc/self/mem is not a .safetensors or .gguf file.",
        ),
        ("a long name", "a" * 5000, "The model 'aaaa"),
        ("a long path", "/".join(["a" * 200] * 50), "There is no file or folder aaaa"),
        ("a newline", "a\nb", "The model 'a\\nb' is unknown."),
        ("control signs", "\x1b[2Jshapes", "The model '\\x1b[2Jshapes' is unknown."),
        ("a Hub id above", "../shapes", "There is no file or folder ../shapes."),
        ("a Hub id of dots", "owner/..", "The model owner/.. is not completely on this computer"),
        (
            "an address",
            "https://example.org/model",
            "There is no file or folder https://example.org/model.",
        ),
        ("a home of nobody", "~nobody-at-all/model", "There is no file or folder ~nobody-at-all"),
        ("control signs in a path", "./\x1b[2Jshapes", "There is no file or folder ./shapes."),
        ("a pickle", "model.ckpt", "There is no file or folder model.ckpt."),
    )
]

EVERY = [
    *(*CLASSES, *CODE, *ADAPTERS, *COUNTS),
    *(*HEADERS, *SHARDS, *MISFITS, *UNBUILDABLE, *SIDES, *FORECASTS, *QUANTISED, *PLACES, *WORDS),
]


@pytest.mark.parametrize("row", [*EVERY[5::10], FORECASTS[1]], ids=lambda row: row.name)
def test_a_model_that_asks_for_what_it_may_not(row: Attack, tmp_path: Path) -> None:
    """Classes, code, adapters and counts are refused by name before anything is built."""
    run_attack(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_a_model_that_asks_for_what_it_may_not_by_any_command(row: Attack, tmp_path: Path) -> None:
    """The whole product."""
    run_attack(row, tmp_path)

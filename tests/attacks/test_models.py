"""Broken and hostile models: what every command that reads a SOURCE says, and that it leaves nothing.

Rows are generated: each JSON file of a model, each kind of breakage, each command. The default run takes
every breakage and every command at least once; the whole product is slow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from attacks.runner import MIB, Attack, copy_tiny, run_attack
from stopdown.planning.plan_files import seal_plan, write_plan
from stopdown.records import Plan

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate", "MODEL", "a circle", "--steps", "1", "-o", "OUT.mp4"),
    "check": ("check", "MODEL"),
    "plan": ("plan", "MODEL", "--steps", "1", "-o", "OUT.json"),
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
    "folder": (replace(Path.mkdir), "it cannot be opened: Is a directory"),
    "loop": (
        replace(lambda path: path.symlink_to(path.name)),
        "it cannot be opened: Too many levels of symbolic links",
    ),
    "link to nothing": (
        replace(lambda path: path.symlink_to("nothing")),
        "it cannot be opened: No such file or directory",
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
# 7 files, 15 kinds, 5 commands: a step without a common factor visits every file, kind and command.
SAMPLE = PRODUCT[::11]


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
            "MODEL/model_index.json asks for a pipeline class of its own, which is code",
        ),
    ]
)

CODE = grow_rows(
    [
        (f"{file} {field}", fields(file, **{field: value}), f"MODEL/{file} asks for {said}")
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
            (DENOISER, "num_layers", -(10**9), "num_layers = -1e+09"),
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

EVERY = [*CLASSES, *CODE, *ADAPTERS, *COUNTS]


@pytest.mark.parametrize("row", EVERY[::3], ids=lambda row: row.name)
def test_a_model_that_asks_for_what_it_may_not(row: Attack, tmp_path: Path) -> None:
    """Classes, code, adapters and counts are refused by name before anything is built."""
    run_attack(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_a_model_that_asks_for_what_it_may_not_by_any_command(row: Attack, tmp_path: Path) -> None:
    """The whole product."""
    run_attack(row, tmp_path)

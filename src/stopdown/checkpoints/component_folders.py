"""Writing of converted components into folders: weights, configurations and descriptions.

Configurations, tokenizers, the index and licences are copied unchanged. Only the weights and some fields of
`config.json` differ from the original.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from stopdown.checkpoints.cards import word_card
from stopdown.checkpoints.file_exponents import EFFECT_LIMIT, FileExponents
from stopdown.checkpoints.output_places import RECORD_NAME, measure_files
from stopdown.component_calls.components import find_kept_fp32
from stopdown.errors import OptionError
from stopdown.fold_names import split_fold_name
from stopdown.module_calls.call import are_finite
from stopdown.module_calls.call_signatures import list_other_arguments
from stopdown.number_formats import list_some
from stopdown.records import Conversion, ConvertedComponent, to_json
from stopdown.scaling import load_scaled
from stopdown.sources.headers import copy_with_metadata, find_weights, read_header

_DESCRIBING = (".json", ".txt", ".model", ".jinja", ".md", ".vocab", ".spm", ".tiktoken")
"""Suffixes of files that describe a component, such as configurations and tokenizers."""

_LEGAL = ("license", "licence", "notice", "readme")


def fold_to_fp16(name: str, module: torch.nn.Module, found: FileExponents) -> torch.nn.Module:
    """Apply exponents to a component and cast it to fp16 in place, tensor by tensor from the stored format.

    Raises:
        OptionError: a scaled weight is not finite in fp16.
    """
    load_scaled(module, torch.float16, found.scaling)
    bad = [
        f"{name}:{tensor_name}"
        for tensor_name, tensor in module.state_dict().items()
        if not are_finite(tensor)
    ]
    if bad:
        raise OptionError(
            f"Weights are beyond 65504 in {', '.join(bad)}.",
            expected="No measured call used them, so the plan has no exponent for them.",
            remedy=f'Use leave="{name}", or make a plan whose runs use them.',
        )
    return module


def write_component(
    module: torch.nn.Module, folder: Path, entries: Mapping[str, str], fields: Mapping[str, Any]
) -> None:
    """Write a component's fp16 weights, and change its configuration.

    Args:
        entries: metadata entries for the weight files.
        fields: fields of `config.json` to change, with their new values.
    """
    write_weights(module, folder, entries)
    config = folder / "config.json"
    dtype_field = find_dtype_field(config)
    edit_config(config, {**fields, **({dtype_field: "float16"} if dtype_field else {})})


def describe_component(
    name: str,
    module: torch.nn.Module,
    found: FileExponents,
    reasons: Iterable[str],
    *,
    fields: Mapping[str, Any],
) -> ConvertedComponent:
    signatures = found.scaling.signatures if found.scaling.exponents else ()
    return ConvertedComponent(
        component=name,
        precision="fp16",
        folded=len({split_fold_name(key)[0] for key in found.scaling.exponents}),
        solved_anew=found.anew,
        fields=dict(fields),
        eps_left=dict(found.left),
        effect=found.effect,
        calls=found.calls if found.left else 0,
        kept_fp32=find_kept_fp32(type(module), "fp16"),
        reasons=tuple(reasons),
        signatures=signatures,
        not_for=list_other_arguments(type(module), signatures),
        values=found.scaling.values,
        unproven=found.scaling.values - found.scaling.bounded,
    )


def describe_effect(found: FileExponents) -> str:
    """Explain that exponents change the outputs too much, as no field sets the eps of some norms.

    The result is part of a sentence.
    """
    return (
        f"no configuration field sets {list_some(sorted(found.left))}, and without it the output is "
        f"{found.effect:.1e} off in {found.calls} calls; up to {EFFECT_LIMIT:.1e} is accepted."
    )


def describe_left(found: FileExponents) -> str:
    """Describe, in sentences, the effect on outputs of norms whose eps could not be scaled."""
    most = f"{100 * found.effect:.2g} %"
    change = f"changes the output by at most {most}" if found.effect else "changes no bit"
    return (
        f"{len(found.left)} norms keep their original eps, because no configuration field sets it "
        f"separately. Against the original, that {change} in {found.calls} calls (limit "
        f"{100 * EFFECT_LIMIT:.2g} %)."
    )


def write_conversion(folder: Path, record: Conversion, name: str = "") -> Conversion:
    """Write model card and record into a folder; return the record, with the sizes of all other files.

    Args:
        name: name of a component that was converted alone, without a plan; "" for a whole model.
    """
    write_card(folder, word_card(record, f"The record is `{RECORD_NAME}`.", name))
    record = dataclasses.replace(record, files=measure_files(folder))
    (folder / RECORD_NAME).write_text(to_json(record), encoding="utf-8")
    return record


def copy_descriptions(
    folder: Path, target: Path, components: Iterable[str], *, with_index: bool = True
) -> None:
    """Copy licences, the components' configurations and tokenizers, and the index, but no weights.

    Args:
        with_index: whether `model_index.json` is copied.
    """
    target.mkdir()
    for path in folder.iterdir():
        is_index = path.name == "model_index.json" and with_index
        if is_index or path.name.lower().startswith(_LEGAL):
            shutil.copyfile(path, target / path.name)
    for name in components:
        for path in sorted((folder / name).rglob("*")):
            if path.is_file() and path.suffix in _DESCRIBING and ".index." not in path.name:
                copied = target / path.relative_to(folder)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copied)


def write_weights(
    module: torch.nn.Module, folder: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a component's weights with its `save_pretrained`, but no other file.

    Args:
        folder: the component's folder, which has its `config.json` already.
        metadata: entries to add to each file's metadata.
    """
    part = folder / "part"
    with told_as_oserror():
        module.save_pretrained(part)  # type: ignore[operator]  # every component has it
    for path in part.iterdir():
        if path.suffix == ".safetensors" or ".safetensors.index." in path.name:
            shutil.copymode(folder / "config.json", path)  # safetensors writes for its owner alone
            path.rename(folder / path.name)
            if metadata and path.suffix == ".safetensors":
                written, part_file = folder / path.name, folder / f"{path.name}.part"
                copy_with_metadata(written, part_file, metadata)
                shutil.copymode(written, part_file)
                part_file.replace(written)
    shutil.rmtree(part)


def write_card(folder: Path, text: str) -> None:
    """Insert a model card into a folder's `README.md`, between its front matter and its present text."""
    path = folder / "README.md"
    old = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    front, rest = "", old
    if old.startswith("---\n") and (end := old.find("\n---\n")) >= 0:
        front, rest = old[: end + 5], old[end + 5 :].lstrip("\n")
    parts = [part for part in (front, text, rest) if part]
    path.write_text("\n".join(parts), encoding="utf-8")


def copy_weights(folder: Path, target: Path, wanted: str = "") -> None:
    """Copy a component's weight files unchanged, with the variant removed from their names.

    Args:
        wanted: variant to copy; "" for the default.
    """
    variant, files = find_weights(folder, wanted)
    homes: dict[str, str] = {}
    for path in files:
        name = path.name.replace(f".{variant}", "", 1) if variant else path.name
        shutil.copyfile(path, target / name)
        homes |= dict.fromkeys(read_header(path), name)
    if len(files) > 1:
        base = re.sub(r"-\d{5}-of-\d{5}", "", min(homes.values()))
        total = sum(entry.size_bytes for path in files for entry in read_header(path).values())
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        (target / f"{base}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def edit_config(path: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of a `config.json`; `text_config.eps` names a field of a nested table."""
    content: dict[str, Any] = json.loads(path.read_bytes())
    for name, value in changes.items():
        *outer, last = name.split(".")
        table = content
        for part in outer:
            table = table.setdefault(part, {})
        table[last] = value
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def find_dtype_field(path: Path) -> str | None:
    """Return the name of the dtype field of a `config.json`; None if it has none."""
    content = json.loads(path.read_bytes())
    return next((name for name in ("dtype", "torch_dtype") if name in content), None)


@contextmanager
def told_as_oserror() -> Iterator[None]:
    """Convert safetensors' errors from the operating system into the underlying `OSError`."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number)) from error

"""One component, folded, cast and written into its folder, and what records and cards say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from stopdown.checkpoints.cards import word_card
from stopdown.checkpoints.file_exponents import EFFECT_LIMIT, FileExponents
from stopdown.checkpoints.output_places import RECORD_NAME, measure_files
from stopdown.component_calls.components import find_kept_fp32
from stopdown.errors import OptionError
from stopdown.fold_names import split_name
from stopdown.graph.call_signatures import list_other_arguments
from stopdown.number_formats import list_some
from stopdown.records import Conversion, ConvertedComponent, to_json
from stopdown.scaling.folds import load_scaled
from stopdown.sources.folders import edit_config, find_dtype_field, write_card, write_weights


def fold_to_fp16(name: str, module: torch.nn.Module, found: FileExponents) -> torch.nn.Module:
    """A component with its exponents, in fp16, tensor by tensor from the format that it is in."""
    load_scaled(module, torch.float16, found.scaling)
    bad = [
        f"{name}:{tensor_name}"
        for tensor_name, tensor in module.state_dict().items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
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
    """Write the weights of a component in fp16, and what changes in its configuration.

    Args:
        fields: of `config.json`, with their new values.
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
    precision: str = "fp16",
) -> ConvertedComponent:
    signatures = found.scaling.signatures if found.scaling.exponents else ()
    return ConvertedComponent(
        component=name,
        precision=precision,
        folded=len({split_name(key)[0] for key in found.scaling.exponents}),
        solved_anew=found.anew,
        fields=dict(fields),
        eps_left=dict(found.left),
        effect=found.effect,
        calls=found.calls if found.left else 0,
        kept_fp32=find_kept_fp32(type(module), "fp16"),
        reasons=tuple(reasons),
        signatures=signatures,
        not_for=list_other_arguments(type(module), signatures),
    )


def describe_effect(found: FileExponents) -> str:
    """Why exponents whose eps no configuration sets are refused, as the part of a sentence."""
    return (
        f"no configuration field sets {list_some(sorted(found.left))}, and without it the output is "
        f"{found.effect:.1e} off in {found.calls} calls; up to {EFFECT_LIMIT:.1e} is accepted."
    )


def describe_left(found: FileExponents) -> str:
    """What the eps change that no configuration sets, as sentences."""
    change = f"changes by at most {found.effect:.1e}" if found.effect else "is the same bit for bit"
    return (
        f"For {len(found.left)} of its norms, no configuration field sets eps separately, so eps stays "
        f"unchanged although their inputs are scaled. As a result, the output {change} in "
        f"{found.calls} calls. A change of up to {EFFECT_LIMIT:.1e} is accepted."
    )


def write_record(folder: Path, record: Conversion, name: str = "") -> Conversion:
    """Put the card and the record into a folder; the record with all that is there beside it.

    Args:
        name: of a component that was converted alone, by no plan, from a folder that is the user's.
    """
    write_card(folder, word_card(record, f"The record is `{RECORD_NAME}`.", name))
    record = dataclasses.replace(record, files=measure_files(folder))
    (folder / RECORD_NAME).write_text(to_json(record), encoding="utf-8")
    return record

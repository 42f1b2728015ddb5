"""Conversion of a Transformers text encoder by itself, so that plain Transformers runs it in fp16.

The text encoders of diffusion models (T5, umT5, Gemma, Qwen2.5-VL, CLIP) are separate models that several
pipelines share. Without a pipeline the calls are made up: random tokens of the whole vocabulary, at a few
lengths. Exponents come from bounds over the weights (`certify`), which hold for every token, or from these
calls. They are folded into the weights, eps are written into the configuration, and all files that describe
the model are copied.

Programs read an encoder's output, and some read its hidden states. If possible, exponents leave both
unscaled. If the model only stays in range with scaled hidden states, the record says so. No program reads
the hidden states of T5 and umT5.

Not covered: pictures. The vision part of a vision-language model is cast, but not rescaled.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stopdown.checkpoints.cards import list_entries, refuse_rescaled
from stopdown.checkpoints.component_folders import (
    copy_descriptions,
    describe_component,
    describe_effect,
    describe_left,
    find_dtype_field,
    fold_to_fp16,
    told_as_oserror,
    write_component,
    write_conversion,
)
from stopdown.checkpoints.file_exponents import (
    EFFECT_LIMIT,
    FileExponents,
    describe_rest,
    express_component,
)
from stopdown.checkpoints.output_places import check_place
from stopdown.component_calls.components import find_kept_fp32
from stopdown.devices.environment import read_version
from stopdown.errors import CaptureError, OptionError, ScalingError, SourceError
from stopdown.files.outputs import written_beside
from stopdown.fold_names import name_parameters
from stopdown.module_calls.callee import Callee
from stopdown.pipelines.loader import load_component
from stopdown.plans.calibrated import describe_scaling
from stopdown.plans.exponents import describe_unscaled, scale_component
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Conversion
from stopdown.scaling import ComponentCall, TracedCalls
from stopdown.sources.descriptions import read_description
from stopdown.sources.headers import find_weights, read_header, read_rescaled, refusing_damage
from stopdown.sources.hub import download_component
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.source import Source
from stopdown.sources.sources import is_hub_id

_ENCODERS = {
    "T5ForConditionalGeneration": "T5EncoderModel",
    "UMT5ForConditionalGeneration": "UMT5EncoderModel",
    "MT5ForConditionalGeneration": "MT5EncoderModel",
}
"""Encoder-decoder classes, and the classes of their encoders, which diffusion models use."""

_UNREAD_STATES = ("t5", "umt5", "mt5")
"""Model types whose hidden states no program reads."""

LENGTHS = (8, 64)
"""Numbers of tokens in the made-up calls."""

ROWS = 4
"""Batch size of each made-up call."""


@dataclass(frozen=True)
class Encoder:
    """A text encoder on disk: its folder, component name, class and configuration."""

    folder: Path
    name: str
    class_name: str
    config: dict[str, Any]


def find_encoder(
    source: str | Path,
    component: str = "",
    *,
    revision: str | None = None,
) -> Encoder | None:
    """Find the text encoder in a Transformers folder, or in a component of a Diffusers folder or Hub id.

    Returns:
        The encoder; None if `source` is neither.
    """
    root = Path(source).expanduser()
    if not root.exists() and is_hub_id(str(source)):
        root = download_component(str(source), component, revision=revision)
    if not root.is_dir():
        return None
    index = root / "model_index.json"
    if index.is_file():
        return _find_component(root, component) if component else None
    if not (root / "config.json").is_file():
        return None
    config = read_description(root / "config.json")
    if "_class_name" in config and "architectures" not in config:
        return None  # a component of Diffusers
    return _open(root, config, component or Path(os.path.abspath(source)).name)


def _find_component(root: Path, component: str) -> Encoder:
    known = {
        key: value
        for key, value in read_description(root / "model_index.json").items()
        if isinstance(value, list) and value[:1] == ["transformers"]
    }
    folder = root / component
    if component not in known or not (folder / "config.json").is_file():
        encoders = [key for key in known if (root / key / "config.json").is_file()]
        raise OptionError(
            f"{root} has no {component} of Transformers.",
            expected="Only a text encoder can be converted without a plan; it has "
            f"{', '.join(encoders) or 'none'}.",
            remedy="Make a plan of the whole model, stopdown plan SOURCE -o plan.json, and convert it: "
            "stopdown convert SOURCE OUT --plan plan.json.",
        )
    return _open(folder, read_description(folder / "config.json"), component)


def _open(folder: Path, config: dict[str, Any], name: str) -> Encoder:
    named = (config.get("architectures") or [""])[0]
    if config.get("auto_map") or not named:
        raise SourceError(
            f"{folder / 'config.json'} "
            + ("requires code of its own." if config.get("auto_map") else "names no class."),
            expected=(
                "`architectures` names a class of Transformers. Code that comes with a model "
                "isn't run."
            ),
            remedy="Give a text encoder of Transformers, as save_pretrained writes it.",
        )
    _, files = find_weights(folder)
    if not files:
        raise SourceError(
            f"{folder} has no weights in model.safetensors or its shards.",
            expected="Weights are read from safetensors alone; a pickle could run code.",
            remedy="Save it again: model.save_pretrained(folder).",
        )
    for path in files:
        with refusing_damage(f"The weights {path} are", "Download them again."):
            read_header(path)
        refuse_rescaled(str(path), read_rescaled(path))
    return Encoder(folder, name, _ENCODERS.get(named, named), config)


def convert_encoder(
    encoder: Encoder,
    output: str | Path,
    *,
    certify: bool = False,
    allow: Collection[Literal["eps", "overwrite"]] = (),
) -> Conversion:
    """Convert a text encoder, so that plain Transformers runs it in fp16.

    Args:
        output: folder to write.
        certify: derive the exponents from bounds for every token, not from measured calls.
        allow: as for `convert`.

    Cost: the encoder in fp32 in memory, and captures of its calls.
    """
    started, target = time.perf_counter(), Path(output)
    place = Source(str(encoder.folder), encoder.folder, "component")
    replaces = check_place(place, target, None, "overwrite" in allow)
    with quiet_libraries():
        module = load_encoder(encoder)
        found, entry, reasons = _express(encoder, module, certify, "eps" in allow)
        if kept := find_kept_fp32(type(module), "fp16"):
            reasons.append(
                f"Its class holds {', '.join(kept)} in fp32 once loaded, which is no longer "
                "necessary: .half() gives correct results as well."
            )
        described = describe_component(encoder.name, module, found, reasons, fields=found.fields)
        with written_beside(target, option="as OUT", replaces=replaces) as part, told_as_oserror():
            entries = list_entries(entry.weights[:12], [described], found.scaling.exponents)
            copy_descriptions(encoder.folder, part, [""])
            fold_to_fp16(encoder.name, module, found)
            dtype_field = find_dtype_field(part / "config.json") or "dtype"
            changes = {dtype_field: "float16", "architectures": [encoder.class_name]}
            write_component(module, part, entries, {**found.fields, **changes})
            record = Conversion(
                source=str(encoder.folder),
                output=str(output),
                plan=entry.weights[:12],
                components=(described,),
                load=f'{encoder.class_name}.from_pretrained("{output}", dtype=torch.float16)',
                elapsed_s=round(time.perf_counter() - started, 3),
                version=read_version("stopdown") or "",
            )
            return write_conversion(part, record, encoder.name)


def load_encoder(encoder: Encoder) -> Any:
    folder = encoder.folder
    components = {folder.name: ("transformers", encoder.class_name)}
    source = Source(str(folder), folder.parent, "component", components=components)
    return load_component(source, folder.name, torch.float32).requires_grad_(False)


def make_encoder_calls(
    module: Any, *, states: bool, lengths: Collection[int] = LENGTHS
) -> list[ComponentCall]:
    """Make up calls of a text encoder: `[ROWS, length]` random tokens of the vocabulary, with a mask.

    Args:
        states: whether the calls also return hidden states.
        lengths: numbers of tokens, which are cut to the model's maximum.
    """
    config = module.config.get_text_config()
    size = getattr(config, "vocab_size", 0)
    if not size:
        raise SourceError(
            f"{type(module).__name__} takes no tokens.",
            expected="A text encoder has a vocabulary.",
            remedy="Convert the pipeline that it belongs to, with its plan.",
        )
    longest = getattr(config, "max_position_embeddings", None) or max(lengths)
    callee = Callee("text_encoder", module, "forward", "encode")
    return [
        ComponentCall(
            callee, (), {**_draw(module, min(n, longest), size), **_find_options(module, states)}
        )
        for n in dict.fromkeys(min(x, longest) for x in lengths)
    ]


def _draw(module: Any, length: int, size: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, size, (ROWS, length), generator=made)
    end = getattr(module.config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < size:
        tokens[:, -1] = end  # CLIP looks for it
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _find_options(module: Any, states: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"output_hidden_states": True} if states else {}
    if hasattr(module.config.get_text_config(), "use_cache"):
        options["use_cache"] = False  # keys and values that are returned cannot have exponents
    return options


def _express(
    encoder: Encoder, module: Any, certify: bool, allow_eps: bool
) -> tuple[FileExponents, ComponentPlan, list[str]]:
    """Find exponents in a form that files can store, for calls with hidden states if possible.

    Returns:
        The exponents, their plan, and sentences about them.

    Raises:
        OptionError: there are none, with the reasons.
    """
    bare = ComponentPlan(encoder.name, encoder.class_name, sample_weights(module), "fp16")
    problems: list[str] = []
    is_unread = encoder.config.get("model_type") in _UNREAD_STATES
    for states in (False,) if is_unread else (True, False):
        calls = make_encoder_calls(module, states=states)
        try:
            entry = _plan(module, bare, calls, certify)
            found = express_component(module, entry, lambda calls=calls: calls)  # type: ignore[misc]
        except (CaptureError, ScalingError) as error:
            problems.append(describe_unscaled(error))
            continue
        if found.effect > EFFECT_LIMIT and not allow_eps:
            why = describe_effect(found)
            problems.append(f"{why[0].upper()}{why[1:]}")
            continue
        return found, entry, list(_list_reasons(found, entry, is_unread, states))
    raise OptionError(
        f"{encoder.folder} can't be written in fp16 for plain Transformers. {' '.join(problems)}",
        expected="Files can only contain weights and configs, but no multiplications, fp32 modules "
        "or casts.",
        remedy="Run it under a plan of its pipeline, or in bf16.",
    )


def _plan(
    module: Any, bare: ComponentPlan, calls: list[ComponentCall], certify: bool
) -> ComponentPlan:
    if not certify:
        scaling, _ = scale_component(module, calls)
        return describe_scaling(bare, scaling, "fp16", len(calls))
    scaling = TracedCalls(module, calls).certify("native", name_parameters(module).__getitem__)
    entry = dataclasses.replace(bare, scaling=scaling)
    if not scaling.certified or scaling.fp32_modules or scaling.multiplies:
        rest = f"with {describe_rest(entry)}" if scaling.fp32_modules or scaling.multiplies else ""
        raise ScalingError(
            f"Bounds don't certify it {rest}".strip()
            + f": {scaling.bounded} of {scaling.values} values have one that fits."
        )
    return describe_scaling(bare, scaling, "fp16", 0)


def _list_reasons(
    found: FileExponents, entry: ComponentPlan, is_unread: bool, states: bool
) -> Iterator[str]:
    if found.scaling.certified:
        yield "Certified: no text overflows fp16."
    elif found.anew and entry.in_force.certified:
        yield (
            "Its exponents were recomputed from measured calls, because a file can't hold the certified "
            "ones."
        )
    else:
        yield f"Measured on {len(LENGTHS)} calls of {ROWS} rows of tokens."
    if found.left:
        yield describe_left(found)
    if not states and not is_unread and found.scaling.exponents:
        yield (
            "Its output is right. Hidden states between its layers are multiplied by powers of two, "
            "so a program that reads them (output_hidden_states) gets scaled "
            "values."
        )

"""Detection of quantised weights, stored as codes and scales, in safetensors files of various programs.

A weight is codes times scales. `quantised_layouts.toml` lists the names that programs give to both.
Metadata or marker tensors in the file (`comfy_quant`, `_quantization_metadata`, torchao's table of types)
name the quantisation method. `QuantisedWeight.scale` is the one tensor to multiply if a power of two is
folded in, since the whole weight is proportional to it.

Not covered: checks of values, which `file_values` makes. Weights that were quantised and stored as 16-bit
floats again count as ordinary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from stopdown.files.json_files import UnreadableError, parse_json
from stopdown.files.toml_files import read_rows
from stopdown.sources.file_weights import FileWeight, describe_plain, get_tensor, iterate_rows
from stopdown.sources.headers import StoredTensor, read_header


def list_weights(path: Path, metadata: Mapping[str, str]) -> Iterator[FileWeight]:
    """Yield the weights of a safetensors file in the order of their offsets.

    A quantised weight's codes and scales are yielded together, as one weight.
    """
    tensors = read_header(path)
    marks = [name for name in tensors if name.rpartition(".")[2] == "comfy_quant"]
    methods = read_methods(
        tensors, metadata, {name: bytes(get_tensor(path, name).numpy()) for name in marks}
    )
    quantised = find_quantised_weights(tensors, methods)
    parts = {part for x in quantised for part in (x.codes, x.scale, *x.others, x.input_scale)}
    by_codes = {weight.codes: weight for weight in quantised}
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
        if name in by_codes:
            yield _describe_quantised(path, tensors, by_codes[name])
        elif name not in parts and not _is_mark(name):
            yield describe_plain(path, name, entry)


def _is_mark(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in MARKS or last.startswith("bitsandbytes__")


def _describe_quantised(
    path: Path, tensors: Mapping[str, StoredTensor], weight: QuantisedWeight
) -> FileWeight:
    parts = [x for x in (weight.codes, weight.scale, *weight.others) if x]
    return FileWeight(
        weight.name,
        tensors[weight.codes].shape,
        weight.layout,
        sum(tensors[part].size_bytes for part in parts),
        partial(_read_quantised, path, weight),
        partial(get_tensor, path, weight.scale) if weight.scale else None,
        is_scaled=True,
        quantised=weight,
    )


def _read_quantised(path: Path, weight: QuantisedWeight) -> Iterator[torch.Tensor]:
    """Yield a quantised weight's values in fp32, some rows at a time; nothing if the layout is unknown."""
    codes, divisor = get_tensor(path, weight.codes), weight.divisor
    scale = get_tensor(path, weight.scale) if weight.scale else torch.ones(())
    is_packed = codes.dtype == torch.uint8 or any("weight_scale" in x for x in weight.others)
    factor = None if is_packed or scale.element_size() < 2 else spread_scale(codes, scale)
    if factor is None:
        return
    for rows in iterate_rows(codes):
        yield codes[rows].float() * (factor[rows] if factor.dim() else factor).float() / divisor


CODES = {"fp8-e4m3": "fp8", "fp8-e5m2": "fp8", "int8": "int8", "uint8": "uint8"}
"""dtypes of tensors that may be codes, with their names in a layout."""

MARKS = ("scaled_fp8", "comfy_quant", "weight_format")
"""Last name parts of marker tensors, which only state how other tensors are stored."""


class QuantisedLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names under which one program stores a quantised weight's codes and scales.

    It's a row of `quantised_layouts.toml`.
    """

    name: str
    codes: str
    scale: str
    others: tuple[str, ...] = ()
    input_scale: str = ""
    divisor: float = 1.0


@dataclass(frozen=True)
class QuantisedWeight:
    """Names of the tensors that store one quantised weight.

    Attributes:
        name: name of the weight: `blocks.0.ff.weight`.
        layout: description for users: `scaled fp8`, `int8 by rows`.
        codes: tensor with the codes.
        scale: tensor to which the weight is proportional; "" if there is none.
        others: further tensors of the weight, such as block scales.
        input_scale: tensor by which the layer's input is divided; "" for none.
        divisor: number by which codes times scale is divided.
    """

    name: str
    layout: str
    codes: str
    scale: str
    others: tuple[str, ...] = ()
    input_scale: str = ""
    divisor: float = 1.0


def find_quantised_weights(
    tensors: Mapping[str, StoredTensor], methods: Mapping[str, str] | None = None
) -> list[QuantisedWeight]:
    """List the quantised weights of a file, in its order.

    Args:
        methods: quantisation methods by layer, as returned by `read_methods`.
    """
    found = []
    for name, entry in tensors.items():
        if entry.dtype not in CODES or (len(entry.shape) < 2 and entry.dtype != "uint8"):
            continue
        if weight := _read_weight(name, tensors, methods or {}):
            found.append(weight)
    owned = {part for weight in found for part in (weight.scale, *weight.others)}
    return [weight for weight in found if weight.codes not in owned]


def _read_weight(
    name: str, tensors: Mapping[str, StoredTensor], methods: Mapping[str, str]
) -> QuantisedWeight | None:
    entry = tensors[name]
    for layout in read_rows("quantised_layouts", "layout", QuantisedLayout):
        layer = name.removesuffix(layout.codes).removesuffix(".")
        scale = _join(layer, layout.scale)
        if not name.endswith(layout.codes) or scale not in tensors:
            continue
        others = [_join(layer, part) for part in layout.others]
        given = _join(layer, layout.input_scale) if layout.input_scale else ""
        named = layout.name.format(codes=CODES[entry.dtype])
        by_rows = tensors[scale].shape[:1] == entry.shape[:1] and entry.dtype == "int8"
        return QuantisedWeight(
            _join(layer, "weight"),
            methods.get(layer) or f"{named}{' by rows' if by_rows else ''}",
            name,
            scale,
            tuple(other for other in others if other in tensors),
            given if given in tensors else "",
            layout.divisor,
        )
    if entry.dtype == "int8" and name.endswith("weight") and len(entry.shape) == 2:
        return QuantisedWeight(name, "int8", name, "")
    return None


def _join(layer: str, part: str) -> str:
    return f"{layer}.{part}" if layer else part


def read_methods(
    tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], marks: Mapping[str, bytes]
) -> dict[str, str]:
    """Return the quantisation method of each layer for which the file's metadata or markers name one.

    Args:
        marks: contents of the `comfy_quant` tensors, by name.
    """
    said: dict[str, str] = {}
    for name, content in marks.items():
        layer = name.removesuffix("comfy_quant").removesuffix(".")
        said[layer] = str(_parse(content.decode("utf-8", "replace")).get("format", ""))
    for layer, entry in (
        _parse(metadata.get("_quantization_metadata", "")).get("layers", {}).items()
    ):
        said[layer] = str(entry.get("format", "")) if isinstance(entry, dict) else ""
    for name, text in metadata.items():
        if name.endswith(".weight") and f"{name[:-7]}._weight_qdata" in tensors:
            said[name[:-7]] = f"torchao {_parse(text).get('_type', '')}"
    return {layer: method[:60] for layer, method in said.items() if method}


def _parse(text: str) -> dict:
    try:
        found = parse_json(text.encode()) if text else {}
    except UnreadableError:
        return {}
    return found if isinstance(found, dict) else {}


def spread_scale(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """Reshape or expand a scale so that it broadcasts with the codes; None if their shapes do not fit.

    Args:
        codes: `[R, ...]`.
        scale: `[]`, `[1]`, `[R]`, `[R, 1...]`, or `[R / r, C / c]`.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.numel() == len(codes):
        return scale.reshape(-1, *(1 for _ in codes.shape[1:]))
    fits = scale.dim() == codes.dim() and all(
        size % part == 0 for size, part in zip(codes.shape, scale.shape, strict=True)
    )
    if not fits:
        return None
    for dim, (size, part) in enumerate(zip(codes.shape, scale.shape, strict=True)):
        scale = scale.repeat_interleave(size // part, dim)
    return scale

"""Exponents in quantised files: a power of two goes into the scales, and every code stays what it was.

A file is written again with its own names, dtypes and order. Only scales and weights that are not
quantised get other values, so bytes are copied and those overwritten in place. What the scales hold is
known before a plan is made (`bound_weights`): the solver gets it as a bound on each fold. A row of the
file becomes rows of parameters (`single_files.trace_rows`); a weight with one scale for all rows makes
the parameters that it becomes have one exponent.

Not covered: activations that are quantised with a scale that is no part of the file, and parameters
that are computed from several weights: they keep exponent 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stopdown.checkpoints.cards import refuse_rescaled
from stopdown.component_calls.components import find_components
from stopdown.errors import ScalingError
from stopdown.interception.patches import Patches
from stopdown.pipelines.single_files import Rows, trace_rows
from stopdown.quantised_files import gguf_files
from stopdown.scaling.fold_bounds import FoldBound, bound_scales, find_normal, put_bounds
from stopdown.sources.headers import (
    RESCALED_ENTRY,
    copy_with_metadata,
    read_header,
    read_header_bytes,
)
from stopdown.sources.sources import Source
from stopdown.sources.weight_files import FileWeight, WeightFile, open_weight_file


def put_file_bounds(source: Source, program: Any) -> Rows | None:
    """Let the components of a program carry what the file that they come from holds of a fold.

    Returns:
        The rows of the file; None, and nothing is done, for what is no file or has no quantised weights.

    Cost: two loads without values, and a pass over the scales.
    """
    if source.kind != "file" or not (file := open_weight_file(source.path)).is_quantised:
        return None
    bounds, rows = bound_weights(file), trace_rows(source)
    for name, module in find_components(program).items():
        if name in rows.numbers:
            put_bounds(module, _name_bounds(rows, name, bounds), Patches())
    return rows


def _name_bounds(rows: Rows, component: str, bounds: dict[str, FoldBound]) -> dict[str, FoldBound]:
    found = {}
    for name in rows.numbers[component]:
        bound = FoldBound(0, 0, (), "what is computed from several weights")
        if name not in rows.strange[component]:
            bound = FoldBound()
            for weight in rows.find_tensors(component, name):
                bound = bound.join(bounds[weight])
        found[name] = bound
    return found


def bound_weights(file: WeightFile) -> dict[str, FoldBound]:
    """How far each weight of a file can be folded, and whether all of its rows go together.

    Cost: one pass over the scales, and over the weights in fp16.
    """
    return {weight.name: _bound(weight) for weight in file.weights}


def _bound(weight: FileWeight) -> FoldBound:
    scales = weight.read_scales() if weight.read_scales is not None else None
    if scales is None:
        if weight.is_scaled:
            return FoldBound(0, 0, (weight.name,), f"{weight.stored} codes")
        if weight.stored == "fp16":
            values = torch.cat([x.reshape(-1).half() for x in weight.read()])
            return FoldBound(*bound_scales(values), (), "fp16 values")
        return FoldBound()
    reason = f"the {weight.stored} scales"
    if weight.quantised is None:  # blocks lie inside of rows
        return FoldBound(*bound_scales(scales), (), reason)
    groups = () if has_row_scales(weight, scales) else (weight.name,)
    if is_power(scales):
        codes = scales.view(torch.uint8)
        return FoldBound(-int(codes.min()), 254 - int(codes.max()), groups, reason)
    if scales.element_size() < 2:
        return FoldBound(0, 0, groups, reason)
    low, high = bound_scales(scales)
    if "fp8" not in weight.stored and "float8" not in weight.stored:
        return FoldBound(low, high, groups, reason)
    # ComfyUI widens fp8 in the format that it computes in, the scale included
    wanted, most = find_normal(scales)
    return FoldBound(low, min(high, most), groups, reason, wanted)


def is_power(scales: torch.Tensor) -> bool:
    """Whether scales are exponents of two themselves, as in mxfp8."""
    return scales.dtype == getattr(torch, "float8_e8m0fnu", None)  # PyTorch 2.7 and later


def has_row_scales(weight: FileWeight, scales: torch.Tensor) -> bool:
    return scales.dim() > 0 and scales.numel() > 1 and len(scales) == weight.shape[0]


Folds = Mapping[str, torch.Tensor]
"""Weight of a file to the exponent of each of its rows, `[R]` int32."""


def fold_file(
    source: Path,
    target: Path,
    folds: Folds,
    inputs: Mapping[str, int],
    metadata: Mapping[str, str],
) -> None:
    """Write a file again with powers of two in its scales.

    Args:
        source: safetensors or GGUF; left as it is.
        folds: without a weight, it stays as it is.
        inputs: weight to the exponent of the values that it multiplies, for layers that divide them by a
            scale before they quantise them.
    """
    file = open_weight_file(source)
    refuse_rescaled(str(source), file.metadata.get(RESCALED_ENTRY, ""))
    weights = {weight.name: weight for weight in file.weights}
    used = {name: folds[name] for name in folds if bool((folds[name] != 0).any())}
    if unknown := sorted(used.keys() - weights.keys()):
        raise ScalingError(f"{source} has no weight {unknown[0]}.")
    if source.suffix.lower() == ".gguf":
        gguf_files.copy_with_texts(source, target, metadata)
        for tensor in gguf_files.open_gguf(target, "r+").tensors:
            if tensor.name in used:
                gguf_files.fold_tensor(tensor, used[tensor.name])
                tensor.data.flush()
        return
    copy_with_metadata(source, target, metadata)
    begin, places = len(read_header_bytes(target)), read_header(target)
    with target.open("r+b") as new, safe_open(str(source), framework="pt") as tensors:
        for name, folded in _fold_tensors(tensors, weights, used, inputs):
            new.seek(begin + places[name].start)
            new.write(folded.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _fold_tensors(
    tensors: Any, weights: Mapping[str, FileWeight], folds: Folds, inputs: Mapping[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that change, with the values that they get."""
    for name, rows in folds.items():
        weight = weights[name]
        stored = weight.quantised.scale if weight.quantised is not None else name
        if weight.is_scaled and not stored:
            raise ScalingError(
                f"{name} is stored as {weight.stored}, which has no scale to fold into."
            )
        yield stored, _fold_rows(weight, tensors.get_tensor(stored), rows)
    for name, exponent in inputs.items():
        found = weights[name].quantised
        if exponent and found is not None and found.input_scale:
            value = tensors.get_tensor(found.input_scale)
            yield found.input_scale, torch.ldexp(value, torch.tensor(exponent))


def _fold_rows(weight: FileWeight, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A tensor times a power of two for each row of its weight; for all, where it has no rows."""
    first = int(rows[0]) if len(rows) else 0
    is_uniform = bool((rows == first).all())
    if is_power(value):
        codes = value.view(torch.uint8).int() + first
        folded = codes.clamp(0, 254).to(torch.uint8).view(value.dtype)
    elif value.element_size() < 2:
        raise ScalingError(f"The scales of {weight.name} are codes themselves ({weight.stored}).")
    elif is_uniform:
        folded = torch.ldexp(value, torch.tensor(first)).to(value.dtype)
    elif weight.quantised is None or has_row_scales(weight, value):
        shape = (-1, *(1 for _ in value.shape[1:])) if value.dim() else ()
        folded = torch.ldexp(value.double(), rows.reshape(shape)).to(value.dtype)
        is_uniform = True
    if not is_uniform:
        raise ScalingError(
            f"{weight.name} has one scale ({weight.stored}) and needs one for each row."
        )
    if not bool(folded.float().isfinite().all()) and bool(value.float().isfinite().all()):
        raise ScalingError(f"The scales of {weight.name} leave their format times 2**{first}.")
    return folded

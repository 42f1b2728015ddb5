"""Exponents in quantised files: a power of two goes into the scales, and every code stays what it was.

A file is written again with its own names, dtypes and order. Only scales and weights that are not quantised
get other values, so bytes are copied and those overwritten in place. What the scales hold is known before
a plan is made (`bound_weights`): the solver gets it as a bound on each fold.

**Catches** scales that would be rounded, folds by rows where a weight has one scale, weights that cannot be
unpacked here, files that are rescaled already.
**Does not catch** activations that are quantised with a scale that is no part of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stopdown.checkpoints.cards import refuse_rescaled
from stopdown.errors import ScalingError
from stopdown.quantised import gguf_files
from stopdown.quantised.quantised_bounds import has_row_scales, is_power
from stopdown.sources.headers import (
    RESCALED_ENTRY,
    copy_with_metadata,
    read_header,
    read_header_bytes,
)
from stopdown.sources.weight_files import FileWeight, open_weight_file

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
        target: file to write.
        folds: without a weight, it stays as it is.
        inputs: weight to the exponent of the values that it multiplies, for layers that divide them by a
            scale before they quantise them.
        metadata: entries beside those that the source has.

    Raises:
        OptionError: the file is already rescaled.
        ScalingError: a weight cannot be folded so.
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

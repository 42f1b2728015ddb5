"""What the scales of a quantised file hold of a fold, brought to the parameters of its components.

A row of the file becomes rows of parameters (`single_files.trace_rows`). A weight with one scale for all
rows makes the parameters that it becomes have one exponent.

**Catches** every weight that is codes and scales, and those in fp16, which lose small values.
**Does not catch** parameters that are computed from several weights: they keep exponent 0.
"""

from __future__ import annotations

from typing import Any

import torch

from stopdown.component_calls.components import find_components
from stopdown.interception.patches import Patches
from stopdown.pipelines.single_files import Rows, trace_rows
from stopdown.scaling.fold_bounds import FoldBound, bound_scales, find_normal, put_bounds
from stopdown.sources.sources import Source
from stopdown.sources.weight_files import FileWeight, WeightFile, open_weight_file


def put_file_bounds(source: Source, program: Any) -> Rows | None:
    """Let the components of a program carry what the file that they come from holds of a fold.

    Args:
        source: completed; the program was loaded from it.

    Returns:
        The rows of the file; None, and nothing is done, for what is no file or has no quantised weights.

    Raises:
        ScalingError: the file has too many rows.

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
    return scales.dtype == torch.float8_e8m0fnu


def has_row_scales(weight: FileWeight, scales: torch.Tensor) -> bool:
    """Whether each row of a weight has scales of its own."""
    return scales.dim() > 0 and scales.numel() > 1 and len(scales) == weight.shape[0]

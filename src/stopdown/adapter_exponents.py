"""Exponents of a LoRA's or DoRA's matrices in one layer, from those of the weight that it is added to.

A weight `W` is stored as `2**k W`, so the product of the adapter's matrices is multiplied by `2**k` too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from stopdown.errors import ScalingError

Parts = Mapping[str, torch.Tensor]
"""Maps the role of a tensor in an adapter, as PEFT names it (`lora_B`, `magnitude`), to the tensor."""

_ROOM_BITS = -6.0
"""log2 of the largest magnitude from which fp16 represents values 256 times smaller without loss: its
normal numbers end at 2**-14."""

_ROLES_WITH_RULES = re.compile(r"lora_(A|B|B\.bias|mid|embedding_[AB])|magnitude|diff|diff_b")


def find_part_exponents(
    parts: Parts,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the scale exponents by which an adapter's tensors must be scaled in one layer, by role; zeros
    are left out.

    Args:
        parts: the adapter's tensors by role, such as `lora_A`.
        rows: exponents of the weight's rows, `[out]` integers.
        bias: exponents of the layer's bias; None if it has none.
        columns: exponents of the weight's columns, `[in]` integers, which add to those of its rows;
            None for zeros.

    Returns:
        Exponents that broadcast to the tensor of each role.

    Raises:
        ScalingError: if there is no rule for this kind of adapter.
    """
    if other := sorted(role for role in parts if not _ROLES_WITH_RULES.fullmatch(role)):
        raise ScalingError(f"it is neither a LoRA nor a DoRA, and there is no rule for {other[0]}")
    made: dict[str, torch.Tensor] = {}
    if "lora_A" in parts or "lora_B" in parts:
        made |= _scale_lora(parts, rows)
    if "lora_embedding_A" in parts:  # `W + s (B A)^T`: the rows of an embedding are A's columns
        made["lora_embedding_A"] = _spread(parts["lora_embedding_A"], rows, 1)
    if "diff" in parts:
        made["diff"] = _spread(parts["diff"], rows, 0)
    for role in parts.keys() & {"lora_B.bias", "diff_b"}:
        if bias is None:
            raise ScalingError(
                "it adds a bias to a layer without one, so the exponent of that is unknown"
            )
        made[role] = _spread(parts[role], bias, 0)
    if "magnitude" in parts and rows.any():
        shape = parts["magnitude"].shape  # a vector over rows or columns
        dim = next((dim for dim, size in enumerate(shape) if size == len(rows)), 0)
        made["magnitude"] = _spread(parts["magnitude"], rows, dim)
    if columns is not None and columns.any():
        _add_columns(made, parts, columns)
    return {role: exponents for role, exponents in made.items() if bool(exponents.any())}


def _add_columns(made: dict[str, torch.Tensor], parts: Parts, columns: torch.Tensor) -> None:
    """Add the scale exponents of the weight's columns to those of `lora_A` or `diff`, which has the
    same columns.

    Args:
        made: exponents by role, which are changed.
    """
    if strange := sorted(parts.keys() & {"magnitude", "lora_embedding_A"}):
        raise ScalingError(
            f"columns of its weight have several exponents, and there is no rule for {strange[0]} then"
        )
    for role in parts.keys() & {"lora_A", "diff"}:
        made[role] = made.get(role, 0) + _spread(parts[role], columns, 1)


def _scale_lora(parts: Parts, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the scale exponents of a LoRA's matrices: the rows' exponents for B, except a share for A.

    A takes a share if B would otherwise be too small for fp16.
    """
    if "lora_B" not in parts or "lora_A" not in parts:
        raise ScalingError(f"it has {', '.join(sorted(parts))} and not both matrices")
    is_by_column = "magnitude" in parts and _lies_along_columns(parts["magnitude"], rows)
    if is_by_column and not _is_uniform(rows):
        raise ScalingError("its magnitudes belong to columns, and the rows have several exponents")
    shared = _choose_share(parts["lora_A"], parts["lora_B"], rows)
    down = torch.full((1,) * parts["lora_A"].dim(), shared, dtype=torch.int32)
    return {"lora_A": down, "lora_B": _spread(parts["lora_B"], rows - shared, 0)}


def _lies_along_columns(magnitude: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return whether a DoRA's magnitudes belong to columns. LyCORIS writes `[1, in]` for a linear layer."""
    is_row = magnitude.dim() == 2 and magnitude.shape[0] == 1 < magnitude.shape[1]
    return is_row or magnitude.numel() != len(rows)


def _choose_share(down: torch.Tensor, up: torch.Tensor, rows: torch.Tensor) -> int:
    """Choose the part of the scale exponents that a LoRA's matrix A takes over from B, to keep both in
    fp16's range.

    It is 0 if B stays above `2**_ROOM_BITS` with the whole exponents. Otherwise A takes what B lacks, as
    long as A stays above that, or at least as large as B.

    Args:
        down: A.
        up: B.
        rows: exponents of the weight's rows.
    """
    if not rows.any():
        return 0
    first, second = _log2_amax(down), _log2_amax(up) + float(rows.min())
    if not math.isfinite(first) or not math.isfinite(second) or second >= _ROOM_BITS:
        return 0
    wanted = second - _ROOM_BITS  # negative: moved from A to B
    spare = max(first - _ROOM_BITS, (first - second) / 2, 0.0)
    return -math.floor(min(-wanted, spare))


def _log2_amax(tensor: torch.Tensor) -> float:
    has_values = tensor.numel() and not tensor.is_meta
    amax = float(tensor.detach().float().abs().max()) if has_values else 0.0  # of fp8, too
    return math.log2(amax) if 0.0 < amax < math.inf else -math.inf


def _is_uniform(rows: torch.Tensor) -> bool:
    return not len(rows) or bool((rows == rows[0]).all())


def _spread(tensor: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Reshape the scale exponents of rows to broadcast along one dimension of a tensor; equal ones
    become one number.

    Raises:
        ScalingError: if the dimension has another size, and the exponents differ.
    """
    if tensor.dim() and tensor.shape[dim] == len(rows):
        return rows.reshape([-1 if axis == dim else 1 for axis in range(tensor.dim())])
    if not _is_uniform(rows):
        size = "x".join(map(str, tensor.shape))
        raise ScalingError(f"a tensor of it is {size}, and {len(rows)} rows have several exponents")
    one = rows[:1] if len(rows) else torch.zeros(1, dtype=torch.int32)
    return one.reshape((1,) * tensor.dim())

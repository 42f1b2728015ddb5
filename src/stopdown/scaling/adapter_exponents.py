"""Exponents of an adapter's matrices: those of the weight that they add to.

A weight `W` is stored as `2**k W`, each block of its rows with a `k` of its own. What an adapter adds to it
has to be stored so too. Where blocks of its columns have exponents besides, so has what is added:

    LoRA    W + s B A                 B's rows take k; part of it may go into A as a whole; A takes columns
    DoRA    m (W + s B A) / |W + s B A|   a magnitude for each row takes that row's k as well
    LoHa    W + s (a1 b1) * (a2 b2)   a1's rows take k
    LoKr    W + s kron(w1, w2)        k of row `i c + j` is split into one of i and one of j

    GLoRA   W + s (W A + B)       the rows of B's left matrix take k; A stays
    GLoRA   W (1 + A) + B         of PEFT: B's rows take k, what is added to the bias its exponents
    OFT     W R                   of PEFT: R, and the scales of BOFT, stay
    OFT     R W                   of kohya and LyCORIS: R mixes rows, so those of a block must have one k

A strength, an alpha and a rank are factors besides and stay. IA3 multiplies and needs nothing.

**Catches** every kind of adapter, and every shape, for which there is no such rule: it is refused.
**Does not catch** code that adds something of its own: the eps that ComfyUI adds to the norm of a DoRA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from stopdown.errors import ScalingError

Parts = Mapping[str, torch.Tensor]
"""A role, as PEFT names it (`lora_B`, `hada_w1_a`), to the tensor."""

ROOM_BITS = -6.0
"""Amax of a matrix from which fp16 holds values 256 times smaller without loss: it ends at 2**-14."""

_FREE = re.compile(
    r"ia3_l|magnitude|lora_B\.bias|diff_b|lora_mid|rescale|a[12]|glora_[ACDE]\..*|(oft_(embedding_)?|boft_)[Rs].*"
)


def find_part_exponents(
    parts: Parts,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Role to the exponents of its tensor, of a shape that is spread over it; zeros are left out.

    Args:
        parts: of one adapter in one layer.
        rows: `[out]` integers, exponents of the rows of the weight.
        bias: those of the layer's bias, None where it has none.
        columns: `[in]` integers, what exponents of columns add to those of rows; None for nothing.

    Raises:
        ScalingError: there is no rule; `what` is a clause without the layer's name.
    """
    families = {_find_family(role) for role in parts} - {"free"}
    made: dict[str, torch.Tensor] = {}
    for family in families:
        made |= _FAMILIES[family](parts, rows)
    made |= _scale_biases(parts, rows, bias)
    if "magnitude" in parts and rows.any():
        made["magnitude"] = _spread(parts["magnitude"], rows, _find_row_dim(parts, rows))
    if columns is not None and columns.any():
        _add_columns(made, parts, columns)
    return {role: exponents for role, exponents in made.items() if bool(exponents.any())}


def _add_columns(made: dict[str, torch.Tensor], parts: Parts, columns: torch.Tensor) -> None:
    """The factor with the columns of the weight takes their exponents besides."""
    if strange := sorted(role for role in parts if role not in (*_BY_COLUMN, *_NOT_BY_COLUMN)):
        raise ScalingError(
            f"columns of its weight have several exponents, and there is no rule for {strange[0]} then"
        )
    for role in parts.keys() & _BY_COLUMN:
        made[role] = made.get(role, 0) + _spread(parts[role], columns, 1)


def _find_family(role: str) -> str:
    if _FREE.fullmatch(role):
        return "free"
    for family in _FAMILIES:
        if role.startswith(family) and (family != "b" or role in ("b1", "b2")):
            return family
    raise ScalingError(f"there is no rule for {role}")


def _scale_biases(
    parts: Parts, rows: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    named = [role for role in ("lora_B.bias", "diff_b") if role in parts]
    if named and bias is None:
        raise ScalingError(
            "it adds a bias to a layer without one, so the exponent of that is unknown"
        )
    made = {role: _spread(parts[role], bias, 0) for role in named if bias is not None}
    if "glora_E.X" in parts and bias is not None:
        made["glora_E.X"] = _spread(parts["glora_E.X"], bias, 0)
    coupled = next((role for role in ("glora_C.Xd", "glora_C.X") if role in parts), None)
    if coupled and bias is not None:  # the weight times C is added to the bias
        made[coupled] = _give_all(parts[coupled], bias - rows)  # no dimension of C is that of rows
    return made


def _scale_lora(parts: Parts, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """All of it on B's rows, but for what A takes so that fp16 holds both."""
    if "lora_B" not in parts or "lora_A" not in parts:
        raise ScalingError(f"it has {', '.join(sorted(parts))} and not both matrices")
    if "magnitude" in parts and parts["magnitude"].numel() != len(rows) and not _is_uniform(rows):
        raise ScalingError("its magnitudes belong to columns, and the rows have several exponents")
    shared = _choose_share(parts["lora_A"], parts["lora_B"], rows)
    down = torch.full((1,) * parts["lora_A"].dim(), shared, dtype=torch.int32)
    return {"lora_A": down, "lora_B": _spread(parts["lora_B"], rows - shared, 0)}


def _choose_share(down: torch.Tensor, up: torch.Tensor, rows: torch.Tensor) -> int:
    """The exponent that A takes: none where fp16 holds B with all of it, else up to a balance of both."""
    if not rows.any():
        return 0
    first, second = _log2_amax(down), _log2_amax(up) + float(rows.min())
    if not math.isfinite(first) or not math.isfinite(second) or second >= ROOM_BITS:
        return 0
    wanted = second - ROOM_BITS  # negative: what A gives up for B
    spare = max(first - ROOM_BITS, (first - second) / 2, 0.0)
    return -math.floor(min(-wanted, spare))


def _log2_amax(tensor: torch.Tensor) -> float:
    amax = float(tensor.detach().abs().max()) if tensor.numel() and not tensor.is_meta else 0.0
    return math.log2(amax) if 0.0 < amax < math.inf else -math.inf


def _scale_embedding(parts: Parts, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """`W + s (B A)^T`: the rows of an embedding are A's columns."""
    return {"lora_embedding_A": _spread(parts["lora_embedding_A"], rows, 1)}


def _scale_diff(parts: Parts, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"diff": _spread(parts["diff"], rows, 0)}


def _scale_loha(parts: Parts, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"hada_w1_a": _spread(parts["hada_w1_a"], rows, 1 if "hada_t1" in parts else 0)}


def _scale_lokr(parts: Parts, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    first = "lokr_w1" if "lokr_w1" in parts else "lokr_w1_a"
    second = "lokr_w2" if "lokr_w2" in parts else "lokr_w2_a"
    dim = 1 if "lokr_t2" in parts else 0
    if _is_uniform(rows):
        return {first: _spread(parts[first], rows, 0)}
    table = rows.reshape(parts[first].shape[0], -1)  # [i, j] of row `i c + j`
    outer, inner = table[:, 0], table[0] - table[0, 0]
    if table.shape[1] != parts[second].shape[dim] or not torch.equal(
        outer[:, None] + inner[None], table
    ):
        raise ScalingError(
            "the exponents of the rows are not a sum of one for each factor of its Kronecker product"
        )
    return {first: _spread(parts[first], outer, 0), second: _spread(parts[second], inner, dim)}


def _scale_glora(parts: Parts, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of PEFT: a product, a column or a number."""
    role = "glora_B.Xd" if "glora_B.Xd" in parts else "glora_B.X"
    return {role: _spread(parts[role], rows, 0)} if role in parts else {}


def _scale_glora_file(parts: Parts, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of LyCORIS: `b1 b2`, and `b2 b1` in older versions; the left one has the rows of the weight."""
    left = [role for role in ("b1", "b2") if len(parts[role]) == len(rows)]
    if len(left) != 1 and not _is_uniform(rows):
        raise ScalingError(
            "which of its matrices has the rows of the weight does not show in their shapes"
        )
    role = left[0] if left else "b1"
    return {role: _spread(parts[role], rows, 0)}


def _check_rotation(parts: Parts, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """A rotation of rows needs nothing where those that it mixes have one exponent.

    Of others it is none any more, and the skew matrix that a file has of it gives rotations alone.
    """
    (role,) = (role for role in parts if role in ("oft_blocks", "oft_diag"))
    shape = parts[role].shape
    blocks = [rows] if len(shape) == 4 else rows.split(shape[-1])  # a butterfly mixes all rows
    for number, block in enumerate(blocks):
        if not _is_uniform(block):
            first = number * shape[-1] if len(blocks) > 1 else 0
            named = ", ".join(f"2**{x}" for x in sorted(set(block.tolist())))
            raise ScalingError(
                f"it rotates rows {first} to {first + len(block) - 1} of the weight into each other, and "
                f"those have several exponents ({named}), which no rotation can have"
            )
    return {}


_FAMILIES = {
    "lora_embedding": _scale_embedding,
    "lora_": _scale_lora,
    "hada_": _scale_loha,
    "lokr_": _scale_lokr,
    "diff": _scale_diff,
    "glora_B": _scale_glora,
    "oft_": _check_rotation,
    "b": _scale_glora_file,
}


_BY_COLUMN = frozenset({"lora_A", "diff", "hada_w1_b"})
_NOT_BY_COLUMN = (
    "lora_B", "lora_B.bias", "diff_b", "hada_w1_a", "hada_w2_a", "hada_w2_b", "oft_blocks", "oft_diag",
    "rescale", "ia3_l",
)  # fmt: skip


def _is_uniform(rows: torch.Tensor) -> bool:
    return not len(rows) or bool((rows == rows[0]).all())


def _find_row_dim(parts: Parts, rows: torch.Tensor) -> int:
    """The dimension of a magnitude vector that runs over rows; 0 for one that runs over columns."""
    shape = parts["magnitude"].shape
    return next((dim for dim, size in enumerate(shape) if size == len(rows)), 0)


def _spread(tensor: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Exponents of rows in the shape of a tensor: along one of its dimensions, or one for all of it."""
    if tensor.dim() and tensor.shape[dim] == len(rows):
        return rows.reshape([-1 if axis == dim else 1 for axis in range(tensor.dim())])
    return _give_all(tensor, rows)


def _give_all(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The one exponent of rows, in the shape of a tensor."""
    if not _is_uniform(rows):
        size = "x".join(map(str, tensor.shape))
        raise ScalingError(f"a tensor of it is {size}, and {len(rows)} rows have several exponents")
    one = rows[:1] if len(rows) else torch.zeros(1, dtype=torch.int32)
    return one.reshape((1,) * tensor.dim())

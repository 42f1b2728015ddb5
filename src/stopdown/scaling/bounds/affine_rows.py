"""Track rows of activations behind a norm as `n * gain + table[t] + rest`, for tighter bounds of the
next linear.

A norm returns a row `n` of known length. A modulated transformer multiplies it by a scale and adds a
shift, both of which depend on the timestep alone; the norm's own weight and bias do the same with
constants. A linear that reads such a row is bounded by the norms of its weights times the gain, and by
its products with each shift. That is several times tighter than a bound from peaks and norms, which
uses only the largest gain and loses the sign of the shift.

Not covered: norms over other dimensions than the last, and tensors that are changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from stopdown.scaling.bounds.intervals import drop_repeated
from stopdown.scaling.bounds.known_values import BoundedOperation
from stopdown.scaling.bounds.row_sums import WEIGHT_ROUNDING, Products
from stopdown.scaling.bounds.rules import find_written_norm
from stopdown.scaling.bounds.values import AffineRow, AffineRows, Bound, largest_over
from stopdown.scaling.graph.nodes import is_kind, shape_of

MOST_PARTS = 4
"""Largest number of norms from which the rows of a concatenation may come; with more, nothing is known
of them."""

ROWS_AT_ONCE = 256
"""Number of rows of a weight that are multiplied by all timesteps at once."""

NORM_ROUNDING = 2.0**-10
"""Relative error of a norm's result, before the result is rounded."""

TABLE_ROUNDING = 2.0**-22
"""Relative allowance for fp32 arithmetic on a table, which rounds at most twice in one operation."""

_PASSING = ("identity", "cast", "reshape", "expansion", "slice")


def find_affine_rows(op: BoundedOperation) -> AffineRows:
    """Return a result's rows in the form `n * gain + table[t] + rest`, from those of its inputs; () if
    unknown.

    `n` is a norm's output and `t` the timestep. The rounding of the result itself isn't included.
    """
    node = op.node
    if not op.shape:
        return ()
    if is_kind(node, "row_norm"):
        return _begin(op)
    if is_kind(node, "multiply"):
        return _multiply(op) or _begin_written(op)
    if is_kind(node, "divide"):
        return _begin_written(op)
    if is_kind(node, "add") and op.given.get("alpha", 1) == 1:
        return _add(op)
    source = node.args[0] if node.args else None
    if is_kind(node, "join"):
        return _join(op)
    if not isinstance(source, Node):
        return ()
    before = shape_of(source)
    if is_kind(node, "part") and is_kind(source, "split"):
        before = shape_of(source.args[0])
    elif not is_kind(node, *_PASSING):
        return ()
    return op.known.affine_rows(source) if before[-1:] == op.shape[-1:] else ()


def add_rounding_error(affine_rows: AffineRows, error: torch.Tensor) -> AffineRows:
    """Widen `rest` of rows `n * gain + table[t] + rest` (n: a norm's output, t: the timestep) by a
    rounding error.

    Args:
        affine_rows: rows of an operation's exact result.
        error: largest error of each channel, `[d]` or `[1]` float64.
    """
    return tuple(replace(x, rest=x.rest + error) for x in affine_rows)


def find_largest_by_channel(bound: Bound) -> torch.Tensor:
    """Return the largest magnitude in each channel (last dimension) that a bound allows, `[d]` or `[1]`
    float64.
    """
    return largest_over(bound.peak, range(bound.peak.dim() - 1)).reshape(-1)


def _begin(op: BoundedOperation) -> AffineRows:
    if len(op.given["normalized_shape"]) != 1:
        return ()
    count = op.shape[-1]
    weight, bias = _load(op, "weight", count), _load(op, "bias", count)
    if weight is None or bias is None:
        return ()
    given = isinstance(op.given.get("weight"), Node)
    gain = weight.abs() if given else torch.ones(count).double()
    radius = math.sqrt(count) * (1 + NORM_ROUNDING)
    wide = gain + _error_of(op, "weight", weight)
    return (AffineRow(radius, wide, bias.reshape(1, -1), _error_of(op, "bias", bias)),)


def _load(op: BoundedOperation, name: str, count: int) -> torch.Tensor | None:
    """Load a norm's weight or bias, `[d]` float64: zeros if the norm has none, None if it isn't a
    parameter.

    Args:
        name: `"weight"` or `"bias"`.
        count: number d of channels.
    """
    if not isinstance(op.given.get(name), Node):
        return torch.zeros(count).double()
    found = op.load(name)
    return None if found is None or found.numel() != count else found.double().reshape(-1)


def _error_of(op: BoundedOperation, name: str, values: torch.Tensor) -> torch.Tensor:
    given, size = op.given.get(name), values.abs()
    floor = op.known.floor(given) if isinstance(given, Node) else 0.0
    return size * WEIGHT_ROUNDING + floor * size.max()


def _begin_written(op: BoundedOperation) -> AffineRows:
    """Recognise an RMS norm that code writes out in elementwise operations; return its rows as an
    `AffineRow`.

    The gain is 1 and the rest 0. Return () for other operations.
    """
    bound = find_written_norm(op)
    if bound is None or bound.rows != {len(op.shape) - 1}:
        return ()
    zeros = torch.zeros(op.shape[-1]).double()
    radius = float(bound.norm.max()) * (1 + NORM_ROUNDING)
    return (AffineRow(radius, zeros + 1, zeros.reshape(1, -1), zeros),)


def _multiply(op: BoundedOperation) -> AffineRows:
    for rows, factor in _pairs(op):
        bound = op.find(factor)
        if bound is None:
            return ()
        size = _spread(find_largest_by_channel(bound), op.shape[-1])
        table = _read_table(op, factor)
        made = []
        for row in rows:
            largest = row.largest
            if table is not None:
                moved = row.table.to(table[0].dtype) * table[0]
                error = largest * (table[1] + TABLE_ROUNDING * size)
            else:
                moved, error = torch.zeros_like(row.table[:1]), largest * size
            made.append(AffineRow(row.radius, row.gain * size, moved, row.rest * size + error))
        return tuple(made)
    return ()


def _add(op: BoundedOperation) -> AffineRows:
    for rows, other in _pairs(op):
        bound = op.find(other)
        if bound is None:
            return ()
        size = _spread(find_largest_by_channel(bound), op.shape[-1])
        table = _read_table(op, other)
        if table is None:
            return add_rounding_error(rows, size)
        return tuple(
            replace(
                x,
                table=x.table.to(table[0].dtype) + table[0],
                rest=x.rest + table[1] + TABLE_ROUNDING * (x.largest + size),
            )
            for x in rows
        )
    return ()


def _pairs(op: BoundedOperation) -> list[tuple[AffineRows, object]]:
    """Find the operands of a sum or product whose rows are known as `n * gain + table[t] + rest`, to
    combine them.

    `n` is a norm's output and `t` the timestep. Returns pairs of one such row and the other operand.
    """
    first, other = op.given["self"], op.given["other"]
    if first is other:
        return []
    found = [
        (op.known.affine_rows(a), b)
        for a, b in ((first, other), (other, first))
        if isinstance(a, Node) and shape_of(a)[-1:] == op.shape[-1:]
    ]
    return [x for x in found if x[0]]


def _spread(size: torch.Tensor, count: int) -> torch.Tensor:
    return size.expand(count) if size.numel() == 1 else size


def _read_table(op: BoundedOperation, value: object) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the values at every timestep, `[T, d]`, of an operand that depends on the timestep alone.

    The second result is the largest error of each channel, `[d]`. Return None for other operands, and
    if rows at one timestep differ.
    """
    held, count = op.known.exact(value) if isinstance(value, Node) else None, op.shape[-1]
    if held is None or not held.center.is_floating_point():
        return None
    center = drop_repeated(held.center) if held.batched else held.center.unsqueeze(0)
    last = center.shape[-1] if center.dim() > 1 else 1
    rows = center.reshape(len(center), -1, last)
    is_alike = rows.shape[1] == 1 or bool((rows == rows[:, :1]).all())
    if last not in (1, count) or not is_alike:
        return None
    radius = held.radius.reshape(-1, last).amax(0)
    return rows[:, 0].expand(-1, count), _spread(radius, count)


def _join(op: BoundedOperation) -> AffineRows:
    parts = [x for x in op.given["tensors"] if math.prod(shape_of(x))]
    if int(op.given.get("dim", 0)) % len(op.shape) == len(op.shape) - 1:
        return ()
    found = [op.known.affine_rows(x) for x in parts]
    joined = tuple(row for rows in found for row in rows)
    return joined if all(found) and len(joined) <= MOST_PARTS else ()


class Image:
    """Columns that a weight `[out, d]` is multiplied by to bound its products with rows `n * gain +
    table[t] + rest`.

    `n` is a norm's output and `t` the timestep. One pass over the weight serves all rows.

    Attributes:
        plain: signed columns `[d, k]` for `multiply_rows`: the bases of the rows' tables side by side.
        magnitudes: `[d, 2 m]` for m rows: the `rest` of each row with its errors, then the largest
            magnitudes of each table.
        squares: `[d, m]`: the squared gains.
    """

    def __init__(self, affine_rows: Sequence[AffineRow]) -> None:
        self._rows = affine_rows
        rests = [x.rest + x.basis[2] + WEIGHT_ROUNDING * x.largest for x in affine_rows]
        self.plain = torch.cat([x.basis[1] for x in affine_rows]).T
        self.magnitudes = torch.stack([*rests, *(x.largest for x in affine_rows)], 1)
        self.squares = torch.stack([x.gain.square() for x in affine_rows], 1)

    def bound(self, products: Products, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Bound each output of a linear on input rows `n * gain + table[t] + rest`, and its partial sums.

        Both are `[out]` float64, the largest of all rows. Shifts `table[t]` of opposite signs may cancel in
        the whole sum but not in a partial one, which is bounded by magnitudes.

        Args:
            products: products of the weight with this object's columns, after one further column of
                magnitudes and one of ones among the squares.
            device: where the coefficients of the tables are multiplied.
        """
        rounding = 1 + WEIGHT_ROUNDING
        error, sizes = (products.magnitudes[:, 1:] * rounding).chunk(2, dim=1)
        radius = torch.tensor([x.radius for x in self._rows]).double()
        core = products.squares[:, 1:].sqrt() * rounding
        core = core + products.slack * self.squares.sum(0).sqrt()
        core = radius * core + error + products.slack * _sum_rest(self._rows)
        moved = _move_most(products, self._rows, device)
        return (core + moved).amax(1), (core + sizes).amax(1)


def _move_most(
    products: Products, affine_rows: Sequence[AffineRow], device: torch.device
) -> torch.Tensor:
    """Return by how much a table that is added to a linear's input, one row per timestep, can move each
    output.

    That is the largest magnitude of `weight @ table[t]` over timesteps t: `[out, n]` for n tables.

    Args:
        products: products of the weight with the columns of an `Image`.
        affine_rows: rows with these tables.
        device: where the products with the timesteps' coefficients are computed.
    """
    parts = products.plain.split([len(x.basis[1]) for x in affine_rows], dim=1)
    norms, moved = products.squares[:, 0].sqrt().clamp(min=1e-300), []
    for row, part in zip(affine_rows, parts, strict=True):
        coefficients, basis, _ = row.basis
        lengths = basis.square().sum(1).sqrt().clamp(min=1e-300)
        coefficients = coefficients * lengths
        longest = coefficients.abs().sum(1).max()
        scaled = (part / norms[:, None] / lengths).float().to(device)
        steps = (coefficients / longest).float().T.to(device)
        pieces = scaled.split(ROWS_AT_ONCE)
        held = steps.new_empty(len(pieces[0]), steps.shape[1])  # allocating each time is slower
        largest = [torch.mm(x, steps, out=held[: len(x)]).abs_().amax(1) for x in pieces]
        most = torch.cat(largest).cpu().double() + 2 * products.plain_error
        moved.append(most * norms * longest)
    return torch.stack(moved, 1)


def _sum_rest(affine_rows: Sequence[AffineRow]) -> torch.Tensor:
    return torch.stack([(x.largest + x.rest + x.basis[2]).sum() for x in affine_rows])

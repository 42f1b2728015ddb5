"""Upper bounds of the outputs of linears, convolutions, matrix products and attention.

A sum of products has two bounds, the smaller of which is used: the largest magnitudes times the
absolute weights, and, by Cauchy and Schwarz, the norm of the weights times that of the inputs. Both
hold for every partial sum as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from stopdown.scaling.bounds.affine_rows import AffineRow, Image
from stopdown.scaling.bounds.known_values import BoundedOperation, UnboundedError
from stopdown.scaling.bounds.row_sums import (
    WEIGHT_ROUNDING,
    RowSums,
    choose_scale,
    find_largest_magnitude,
    multiply_rows,
    read_sums,
    split_rows,
    sum_rows,
)
from stopdown.scaling.bounds.singular_values import MOST_WORK, SMALL, count_work, measure_sigma
from stopdown.scaling.bounds.values import Bound, Shape, largest_over, norm_over, uniform
from stopdown.scaling.graph.nodes import (
    arguments,
    is_kind,
    list_casts,
    read_order,
    shape_of,
    strip_casts,
)

PRECISE = (torch.float16, torch.float32, torch.float64)
"""Dtypes in which the weights of a mean have a relative error of at most 2**-10."""

SUM_ROUNDING = 2.0**-23
"""Relative error of adding one product to a sum in fp32, including the rounding of the product."""


def _bias(op: BoundedOperation) -> torch.Tensor:
    if (found := op.load("bias")) is None:
        return torch.zeros(1).double()
    size = found.double().abs()
    return size * (1 + WEIGHT_ROUNDING) + op.known.floor(op.given["bias"]) * float(size.max())


def _load_weight(op: BoundedOperation) -> tuple[torch.Tensor, float]:
    """Load an operation's weight; return it, and the error to allow for its subnormals in fp16.

    Raises:
        UnboundedError: if the weight is no parameter.
    """
    if (values := op.load("weight")) is None:
        raise UnboundedError
    return values, op.known.floor(op.given["weight"])


def bound_linear(op: BoundedOperation) -> Bound:
    """Bound a linear's outputs: `|w.x| <= min(sum |w| peak, norm(w) norm(x))` for each row w, plus the
    bias.
    """
    bound, last = op.source, len(op.shape) - 1
    values, floor = _load_weight(op)
    if values.dim() != 2:
        raise UnboundedError
    peak = largest_over(bound.peak, range(last)).reshape(-1)
    found = op.known.affine_rows(op.given["input"])
    largest = op.known.find_largest(op.given["weight"])
    rows, image = _sum_linear(values, peak, floor, largest, found)
    norm = norm_over(bound, op.before, (last,))
    spread = (1,) * last + (-1,)
    absolute = rows.absolute.reshape(spread)
    by_norm = rows.euclidean.reshape(spread) * norm
    error = values.shape[1] * SUM_ROUNDING * absolute
    size = parts = torch.minimum(absolute, by_norm)  # also of each partial sum
    if (composed := _compose_heads(op, values)) is not None:
        size = torch.minimum(size, composed.reshape(spread))
    if image is not None:
        size = torch.minimum(size, image[0].reshape(spread))
        parts = torch.minimum(parts, image[1].reshape(spread))
    typical = bound.typical * float(rows.euclidean.square().mean().sqrt())
    more = error + _bias(op).reshape(spread)
    peak, op.parts = size + more, parts + more
    if not (op.is_length_read and _is_worth_its_length(values)):
        return op.make_bound(peak, typical)
    longest = _bound_length(op, values, rows, norm, largest_over(error, (last,)))
    return op.make_bound(peak, typical, norm=longest, rows=(last,))


def _sum_linear(
    weight: torch.Tensor,
    peak: torch.Tensor,
    floor: float,
    largest: float | None,
    affine_rows: Sequence[AffineRow],
) -> tuple[RowSums, tuple[torch.Tensor, torch.Tensor] | None]:
    """Compute, in one pass over a weight, sums over its rows and bounds of its products with known
    activation rows.

    Args:
        weight: `[out, in]`.
        peak: largest magnitude of each input, `[in]` or `[1]` float64.
        floor: allowance for the weight's subnormals in fp16, relative to its largest magnitude.
        largest: the weight's largest magnitude, if known.
        affine_rows: what is known of the linear's input rows, as `n * gain + table[t] + rest`.

    Returns:
        The sums, and the two bounds of `Image.bound`; None if there are no affine rows.
    """
    if not affine_rows:
        return sum_rows(weight, peak, floor, largest), None
    image, peaks = Image(affine_rows), peak.expand(weight.shape[1])[:, None]
    found = multiply_rows(
        weight,
        plain=image.plain,
        magnitudes=torch.cat([peaks, image.magnitudes], 1),
        squares=torch.cat([torch.ones_like(peaks), image.squares], 1),
        floor=floor,
        largest=largest,
    )
    return read_sums(found, peaks), image.bound(found, weight.device)


def _is_worth_its_length(weight: torch.Tensor) -> bool:
    """Return whether computing a weight's largest singular value is worth the time for a tighter bound
    of row norms.

    For a large weight it is only if rows get at least twice as long. Rows then have many elements, and
    their norm is far below that of a row of peaks.
    """
    work = count_work(weight)
    return work <= SMALL or (work <= MOST_WORK and weight.shape[0] >= 2 * weight.shape[1])


def _bound_length(
    op: BoundedOperation,
    weight: torch.Tensor,
    rows: RowSums,
    norm: torch.Tensor,
    error: torch.Tensor,
) -> torch.Tensor:
    """Bound the 2-norm of a linear's output row: `norm(W x + b) <= sigma(W) norm(x) + norm(b)`.

    `sigma` is the largest singular value.

    Args:
        rows: sums over the weight's rows.
        norm: bound of the input rows' 2-norm.
        error: largest rounding error of an output's sum.
    """
    sigma = measure_sigma(weight, op.known.find_largest(op.given["weight"]))
    rounded = WEIGHT_ROUNDING * float(rows.euclidean.norm()) + rows.slack * weight.numel() ** 0.5
    longest = (sigma + rounded) * norm
    found = op.known.affine_rows(op.given["input"])
    if found and count_work(weight) <= SMALL:
        wide = weight.double()
        longest = longest.clamp(
            max=max(_bound_affine_length(wide, x, sigma, rounded) for x in found)
        )
    bias = _bias(op)
    moved = bias.square().sum() * (weight.shape[0] if bias.numel() == 1 else 1)
    return longest + moved.sqrt() + math.sqrt(weight.shape[0]) * error


def _bound_affine_length(
    weight: torch.Tensor, row: AffineRow, sigma: float, rounded: float
) -> float:
    """Bound the 2-norm of a linear's output, without bias, for an input row `n * gain + table[t] + rest`.

    `n` is a norm's output. The bound holds for all timesteps t.

    Args:
        weight: `[out, in]`.
        sigma: the weight's largest singular value.
        rounded: upper bound of the norm of the weight's rounding error.
    """
    gained = measure_sigma(weight * row.gain)
    core = row.radius * (gained + rounded * float(row.gain.max()))
    shifted = float((row.table.double() @ weight.T).square().sum(-1).sqrt().max())
    shifted += rounded * float(row.table.double().square().sum(-1).sqrt().max())
    return core + shifted + (sigma + rounded) * float(row.rest.square().sum().sqrt())


def _compose_heads(op: BoundedOperation, outer: torch.Tensor) -> torch.Tensor | None:
    """Bound an attention block's output linear through the product of each head's value and output
    weights, `[out]`.

    Attention returns `sum_j p_j (V x_j + b)` with weights `p` that are not negative and sum to one. So
    the output is `sum_h sum_j p_hj (O_h V_h) x_j + O b`: no larger than the row norms of `O_h V_h`
    times the norm of one input row, plus `|O b|`. Rounding errors of the values are multiplied by
    `|O|`. Return None if the linear doesn't follow an attention of known form.

    Args:
        outer: the output weight `O`, `[out, heads * width]`.
    """
    found = _find_values(op.node)
    if found is None:
        return None
    attention, inner = found
    if not op.is_intact(op.node.args[0], attention) or not op.is_intact(attention.args[2], inner):
        return None
    given = arguments(inner)
    bound, values = op.find(given["input"]), op.known.load(given["weight"])
    value = op.find(attention.args[2])
    if bound is None or values is None or value is None or values.numel() > 1 << 26:
        return None
    heads, width = shape_of(attention)[1], shape_of(attention)[-1]
    if values.shape[0] != heads * width or outer.shape[1] != heads * width:
        return None
    before = shape_of(given["input"])
    norm = float(norm_over(bound, before, (len(before) - 1,)).max())
    peak = largest_over(value.peak, (0, 2)).expand(1, heads, 1, width).reshape(-1)
    bias = op.known.load(given["bias"]) if isinstance(given.get("bias"), Node) else None
    floor = max(op.known.floor(x) for x in (op.given["weight"], given["weight"]))
    return _sum_heads(outer, values, bias, norm, peak, heads, floor)


def _sum_heads(
    outer: torch.Tensor,
    inner: torch.Tensor,
    bias: torch.Tensor | None,
    norm: float,
    peak: torch.Tensor,
    heads: int,
    floor: float,
) -> torch.Tensor:
    # roundings of both weights, the values, their mean, and the values' sums
    roundings = 2.0**-8 + inner.shape[1] ** 1.5 * SUM_ROUNDING
    columns = torch.stack([peak * roundings, torch.ones_like(peak)], 1)
    shift = torch.zeros(len(peak), 0) if bias is None else bias[:, None]
    found = multiply_rows(
        outer, plain=shift.double(), magnitudes=columns, squares=columns[:, 1:], floor=floor
    )
    within = floor * find_largest_magnitude(inner) * norm * math.sqrt(inner.shape[1])
    error = found.magnitudes @ torch.tensor([1.0, within]).double()
    error += 2 * found.slack * float(peak.sum())
    moved = found.plain.abs() + found.plain_error * found.squares.sqrt() * shift.double().norm()
    return _sum_lengths(outer, inner, heads) * norm + error + moved.sum(1)


def _sum_lengths(outer: torch.Tensor, inner: torch.Tensor, heads: int) -> torch.Tensor:
    """Bound `sum_h norm((O_h V_h)_i)` over heads h, for each row i of an output weight O: `[out]` float64.

    `V_h` are the value weights of a head. Each norm is that of `o L` with `L L^T = V_h V_h^T`, a small
    matrix. Its Cholesky decomposition in float64 is accurate to a few ulps of its trace. In fp32 each
    sum is off by at most `n 2^-24` of the norms of both factors.

    Args:
        outer: O, `[out, heads * width]`.
        inner: all `V_h` below each other, `[heads * width, in]`.
    """
    width, scale = outer.shape[1] // heads, choose_scale(find_largest_magnitude(outer))
    device = outer.device
    loss = (width + 4) * 2.0**-24
    roots, sizes = _factor_heads(inner, heads)
    total = torch.empty(outer.shape[0]).double()
    if not math.isfinite(float(sizes.sum())):
        return total.fill_(math.inf)
    parts, roots = split_rows(outer), roots.to(device)
    held = torch.empty(parts[0].shape, dtype=torch.float32, device=device)
    turned = torch.empty(heads, len(parts[0]), width, dtype=torch.float32, device=device)
    start = 0
    for part in parts:
        rows = held[: len(part)].copy_(part).mul_(scale).view(len(part), heads, width)
        by_head = rows.transpose(0, 1)
        made = torch.bmm(by_head, roots, out=turned[:, : len(part)])
        norms = (torch.linalg.vector_norm(x, dim=2) for x in (made, by_head))
        found, own = (x.cpu().double() for x in norms)
        lengths = found * (1 + loss) + loss * (own + 2.0**-40)
        total[start : start + len(part)] = (sizes / scale) @ lengths
        start += len(part)
    return total


def _factor_heads(inner: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Cholesky factor L of `V V^T` for each attention head's value weight V, scaled to unit
    size.

    Args:
        inner: value weights of all heads below each other, `[heads * width, in]`.

    Returns:
        The factors divided by their sizes, `[heads, width, width]` fp32, and the sizes, `[heads]`
        float64: the root of the trace of `V V^T`, or inf if the decomposition fails.
    """
    roots, sizes = list[torch.Tensor](), list[float]()
    values = torch.empty(inner.shape[0] // heads, inner.shape[1], dtype=torch.float64)
    for rows in inner.cpu().chunk(heads):
        values.copy_(rows)
        gram = values @ values.T
        size = max(float(gram.trace()) ** 0.5, 1e-300)
        gram.div_(size).div_(size).diagonal().add_(sum(rows.shape) * 2.0**-49)
        root, info = torch.linalg.cholesky_ex(gram)
        roots.append(root.float())
        sizes.append(math.inf if int(info) else size)
    return torch.stack(roots), torch.tensor(sizes, dtype=torch.float64)


def _find_values(node: Node) -> tuple[Node, Node] | None:
    """Find the attention behind an output linear, and the linear that computed the attention's values.

    Return None unless heads are split and joined by reshapes and permutations as usual.
    """
    behind = strip_casts(node.args[0])
    if not is_kind(behind, "reshape"):
        return None
    swapped = strip_casts(behind.args[0])
    if not _swaps_heads(swapped):
        return None
    attention = strip_casts(swapped.args[0])
    if is_kind(attention, "reshape") and shape_of(attention) == shape_of(attention.args[0]):
        attention = attention.args[0]
    if not is_kind(attention, "attention"):
        return None
    value = strip_casts(attention.args[2])
    if not _swaps_heads(value):
        return None
    viewed = strip_casts(value.args[0])
    if not is_kind(viewed, "reshape"):
        return None
    inner = strip_casts(viewed.args[0])
    fits = is_kind(inner, "linear") and _same_heads(node, attention, viewed, inner)
    return (attention, inner) if fits else None


def _swaps_heads(node: Node) -> bool:
    return is_kind(node, "permutation") and read_order(node) == [0, 2, 1, 3]


def _same_heads(node: Node, attention: Node, viewed: Node, inner: Node) -> bool:
    heads, width = shape_of(viewed)[2], shape_of(viewed)[3]
    batch, tokens = shape_of(inner)[:2]
    out = shape_of(attention)
    return (
        len(shape_of(inner)) == 3
        and shape_of(viewed) == (batch, tokens, heads, width)
        and (out[0], out[1], out[3]) == (batch, heads, width)
        and shape_of(node.args[0]) == (batch, out[2], heads * width)
    )


def bound_convolve(op: BoundedOperation) -> Bound:
    """Bound a convolution's outputs as a linear over the channels and positions of its kernel."""
    bound, before, groups = op.source, op.before, int(op.given.get("groups", 1))
    values, floor = _load_weight(op)
    channel = len(before) - (values.dim() - 1)
    flat = values.reshape(values.shape[0], -1)
    places = math.prod(values.shape[2:])
    peak = largest_over(bound.peak, [d for d in range(len(before)) if d != channel]).reshape(-1)
    largest = (
        find_largest_magnitude(flat) if groups > 1 else None
    )  # for one group, `sum_rows` measures it
    rows = [
        sum_rows(part, _spread_channels(peak, group, values.shape[1], places), floor, largest)
        for group, part in enumerate(flat.chunk(groups))
    ]
    absolute = torch.cat([x.absolute for x in rows])
    euclidean = torch.cat([x.euclidean for x in rows])
    size = torch.minimum(absolute, euclidean * _bound_patch_norm(bound, before, channel, places))
    size = size + flat.shape[1] * SUM_ROUNDING * absolute + _bias(op)
    typical = bound.typical * float(euclidean.square().mean().sqrt())
    return op.make_bound(_spread_dim(size, channel, len(op.shape)), typical)


def _spread_dim(size: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return size.reshape([-1 if x == dim else 1 for x in range(rank)])


def _spread_channels(peak: torch.Tensor, group: int, width: int, places: int) -> torch.Tensor:
    """Repeat input channels' largest magnitudes so that each entry of a flattened kernel has its channel's.

    The result's shape is `[width * places]`, or `[1]` if one magnitude bounds all channels.

    Args:
        peak: largest magnitude of each input channel.
        group: number of the group of channels.
        width: input channels in a group.
        places: positions in the kernel.
    """
    if peak.numel() == 1:
        return peak
    return peak[group * width : (group + 1) * width].repeat_interleave(places)


def _bound_patch_norm(bound: Bound, shape: Shape, channel: int, places: int) -> float:
    """Bound the 2-norm of the patch that a convolution's kernel reads, over channels and positions.

    It is at most that of the whole map, and that of one position times the root of their number.

    Args:
        bound: bounds of the input.
        shape: shape of the input.
        channel: the input's channel dimension.
        places: number of positions in the kernel.
    """
    spatial = range(channel + 1, len(shape))
    whole = float(norm_over(bound, shape, (channel, *spatial)).max())
    single = float(norm_over(bound, shape, (channel,)).max()) * math.sqrt(places)
    return min(whole, single)


def bound_transposed(op: BoundedOperation) -> Bound:
    """Bound the magnitudes of a transposed convolution's outputs: sums over weights times the largest
    input.

    Each output sums over part of the kernel, so a sum over all of it is a bound.
    """
    bound, (values, floor) = op.source, _load_weight(op)
    if int(op.given.get("groups", 1)) != 1:
        raise UnboundedError
    channel = len(op.before) - (values.dim() - 1)
    flat = values.transpose(0, 1).reshape(values.shape[1], -1)
    rows = sum_rows(flat, torch.tensor([bound.largest]).double(), floor)
    size = rows.absolute * (1 + flat.shape[1] * SUM_ROUNDING) + _bias(op)
    typical = bound.typical * float(rows.euclidean.mean())
    return op.make_bound(_spread_dim(size, channel, len(op.shape)), typical)


def bound_matmul(op: BoundedOperation) -> Bound:
    """Bound a product of two activations by the largest norms: `|a_i . b_j| <= norm(a_i) norm(b_j)`.

    If `a` is a softmax, the product is a mean of the rows of `b`.
    """
    return _bound_matrices(op, op.given["self"], op.given.get("mat2", op.given.get("other")))


def bound_matmul_added(op: BoundedOperation) -> Bound:
    """Bound the result `beta * self + alpha * (a @ b)` of `addmm` and `baddbmm`."""
    first = op.given.get("mat1", op.given.get("batch1"))
    product = _bound_matrices(op, first, op.given.get("mat2", op.given.get("batch2")))
    alpha, beta = (abs(float(op.given.get(name, 1))) for name in ("alpha", "beta"))
    added = op.spread(op.given["self"]) if beta else uniform(0.0, op.shape)
    typical = math.hypot(alpha * product.typical, beta * added.typical)
    return op.make_bound(alpha * product.peak + beta * added.peak, typical)


def _bound_matrices(op: BoundedOperation, first: Any, other: Any) -> Bound:
    a, b = op.bound(first), op.bound(other)
    shapes = shape_of(first), shape_of(other)
    if min(map(len, shapes)) < 2:
        raise UnboundedError
    rows, columns, count = len(shapes[0]) - 1, len(shapes[1]) - 2, shapes[0][-1]
    if _is_mean(first) and op.is_intact(first, strip_casts(first)):
        loss = 2.0**-10 + count * (SUM_ROUNDING + 2.0**-25)  # fp16 rounds small weights by 2**-25
        return uniform(b.largest * (1 + loss), op.shape, b.typical / math.sqrt(max(count, 1)))
    by_norm = norm_over(a, shapes[0], (rows,)).amax() * norm_over(b, shapes[1], (columns,)).amax()
    by_peak = count * a.peak.amax() * b.peak.amax()
    size = float(torch.minimum(by_norm, by_peak)) * (1 + count * SUM_ROUNDING)
    size += count * SUM_ROUNDING * float(by_peak)
    return uniform(size, op.shape, a.typical * b.typical * math.sqrt(count))


def _is_mean(node: Node) -> bool:
    """Return whether the rows of a value are a softmax's weights, in no format narrower than fp16."""
    source, rank = strip_casts(node), len(shape_of(node))
    if not is_kind(source, "softmax") or int(arguments(source)["dim"]) % rank != rank - 1:
        return False
    return {source.meta["val"].dtype, *list_casts(node)} <= {*PRECISE}


def bound_einsum(op: BoundedOperation) -> Bound:
    """Bound an einsum by the product of the largest magnitudes, times the number of summed terms.

    Raises:
        UnboundedError: if an einsum stores results that the graph doesn't have: of three operands, or
            of one that is summed before it is multiplied.
    """
    operands = op.given["tensors"]
    bounds = [op.bound(x) for x in operands]
    letters, _, kept = str(op.given["equation"]).replace(" ", "").partition("->")
    if "." in letters or len(operands) > 2:
        raise UnboundedError
    sizes: dict[str, list[int]] = {}
    for names, operand in zip(letters.split(","), operands, strict=True):
        for name, count in dict(zip(names, shape_of(operand), strict=True)).items():
            sizes.setdefault(name, []).append(count)
    sums = [x for name, x in sizes.items() if name not in kept and max(x) > 1]
    if len(operands) == 2 and any(len(x) < 2 or min(x) == 1 for x in sums):
        raise UnboundedError
    summed = math.prod(max(x) for x in sums)
    size = math.prod(b.largest for b in bounds) * summed
    typical = math.prod(b.typical for b in bounds) * math.sqrt(summed)
    return uniform(size * (1 + summed * SUM_ROUNDING), op.shape, typical)


def bound_outer(op: BoundedOperation) -> Bound:
    first, other = op.source, op.bound(op.given["vec2"])
    return uniform(first.largest * other.largest, op.shape, first.typical * other.typical)


def bound_attention(op: BoundedOperation) -> Bound:
    """Bound attention's output by its values (v): each output token is a weighted mean of them.

    The weights of the mean are not negative and sum to one.
    """
    value = op.given["value"]
    bound, before = op.bound(value), shape_of(value)
    if op.given.get("dropout_p"):
        raise UnboundedError
    last, heads = len(before) - 1, len(before) - 3
    cut = [d for d in range(last) if before[d] != op.shape[d] or d == last - 1 or d != heads]
    norm = norm_over(bound, before, (last,))
    tokens = max(before[last - 1], 1)
    typical = bound.typical / math.sqrt(min(tokens, 16))
    peak = largest_over(bound.peak, cut)
    return op.make_bound(peak, typical, norm=largest_over(norm, cut), rows=(last,))


def limit_scores(op: BoundedOperation) -> float:
    """Bound attention scores, the scaled products of queries and keys; return inf if either has no bound.

    Kernels may compute scores in fp16, where these could overflow. The bound holds for every partial
    sum, with the scale applied before or after the sum.
    """
    query, key = op.given["query"], op.given["key"]
    a, b = op.find(query), op.find(key)
    if a is None or b is None:
        return math.inf
    shapes = shape_of(query), shape_of(key)
    norms = [
        float(norm_over(x, s, (len(s) - 1,)).max()) for x, s in zip((a, b), shapes, strict=True)
    ]
    scale = op.given.get("scale")
    factor = 1 / math.sqrt(max(shapes[0][-1], 1)) if scale is None else abs(float(scale))
    return norms[0] * norms[1] * max(factor, min(factor, 1.0))

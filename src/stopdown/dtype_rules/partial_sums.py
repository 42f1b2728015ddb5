"""Prediction of the matrix products that overflow if they are accumulated in fp16.

An element of a matrix product is a sum of many products. Most hardware accumulates fp16 products in fp32
and rounds once. Some kernels accumulate in fp16: tensor cores with fp16 accumulators (PyTorch's
`allow_fp16_accumulation`, TensorRT and other compilers), and split reductions. A partial sum beyond
fp16's range is then Inf, even if the final sum would fit. Attention shows this first: scores are summed
before they are divided by the root of the width, and Inf minus Inf in the softmax is NaN. Stable Video
Diffusion failed so under a compiler on A100 and A30, but not on V100, whose kernels accumulated in fp32.

`find_sums` predicts from one call in fp32 which sums would overflow.

Products are summed in groups of 16, as tensor cores do in principle. The order of real kernels differs,
so a sum slightly beyond 65504 may or may not overflow on a given card. Convolutions are summed as
implicit matrix products: one kernel position after the other, 16 channels at a time.

Not covered: transposed convolutions, `einsum`, and products inside compiled code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stopdown.interception.module_paths import ModulePaths
from stopdown.interception.patches import Patches
from stopdown.number_formats import FP16

GROUP = 16
"""Number of products that are summed between two roundings: the depth of a tensor core's step."""

ROUNDING = 2.0**-11
"""Relative error of one rounding to fp16."""

SUBNORMAL = 2.0**-25
"""Absolute error of one rounding in fp16's subnormal range."""

PIECE = 2**24
"""Number of sums that are computed at a time: 64 MiB in fp32."""


def bound_rounded_sum(largest: float, terms: int) -> float:
    """Bound every partial sum of a matrix product that is accumulated in fp16, rounding errors included.

    With `|s_k| <= B` for each exact partial sum, m roundings by `(1 + d)`, `|d| <= u`, and at most `e` for
    a subnormal sum, the error grows by `E_k <= (1 + u) (E_{k-1} + e) + u B`. So a rounded sum is at most
    `(B + m e) (1 + u)**m`.

    Args:
        largest: bound B on the magnitude of each exact partial sum.
        terms: number of products in a sum, with a rounding after each `GROUP` of them.
    """
    rounds = math.ceil(terms / GROUP)
    return (largest + rounds * SUBNORMAL) * (1 + ROUNDING) ** rounds


@dataclass(frozen=True)
class Sum:
    """The largest sums inside one operation of a module.

    Attributes:
        path: of the module; "" for the one that was called.
        operation: `attention scores`, `attention`, `convolution` or `product`.
        largest: largest magnitude of a partial sum.
        result: largest magnitude of a final sum.
        group: largest magnitude of the sum of `GROUP` consecutive products.
        terms: number of products in the longest sum.
    """

    path: str
    operation: str
    largest: float
    result: float
    group: float = math.inf
    terms: int = 0

    @property
    def fits(self) -> bool:
        """Whether no partial sum overflows an fp16 accumulator."""
        return self.largest <= FP16.largest

    @property
    def piece(self) -> int:
        """The number of products that can safely be accumulated in fp16 at a time; 0 for none.

        That is all of them if the sum fits with its roundings; else as many groups as fit even if all have
        the same sign.
        """
        if bound_rounded_sum(self.largest, self.terms) <= FP16.largest:
            return self.terms
        groups = int(min(FP16.largest / self.group, self.terms)) if self.group else self.terms
        while groups and bound_rounded_sum(groups * self.group, groups * GROUP) > FP16.largest:
            groups -= 1 + groups // 64
        return min(max(groups, 0) * GROUP, self.terms)


Figures = dict[tuple[str, str], tuple[float, float, float, int]]
"""(module path, operation) → largest partial, final and group sum, and the number of terms."""


def find_sums(
    module: torch.nn.Module, call: Callable[[], object], known: Figures | None = None
) -> list[Sum]:
    """Measure the largest partial sums of matrix products in a module call, to see which would overflow
    in fp16.

    Return one `Sum` for each operation, the largest first.

    Args:
        call: makes the call, in fp32 so that nothing overflows.
        known: figures of the module's earlier calls, which are updated.

    Cost: two host reads for each product, and a small product for each group of 16.
    """
    found: Figures = {} if known is None else known
    with Patches() as patches:
        multiply = functools.partial(_multiply_noting, found, ModulePaths(module, patches))
        with ProductReplacement(multiply, torch.Tensor.is_floating_point), torch.no_grad():
            call()
    sums = [Sum(path, what, *sizes) for (path, what), sizes in found.items()]
    return sorted(sums, key=lambda entry: -entry.largest)


Multiply = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
"""A function that multiplies `[..., m, k]` by `[..., k, n]`; its third argument is `Sum.operation`."""


After = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function from the sum of a group and the sum so far to the sum to continue with."""


class ProductReplacement(TorchFunctionMode):
    """Torch function mode that computes matrix products, convolutions and attention by a given
    `multiply` function.

    Args:
        wants: both operands have to satisfy it; other products are computed as usual.
    """

    def __init__(self, multiply: Multiply, wants: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._multiply, self._wants = multiply, wants

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        made = _KNOWN.get(func)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        is_plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in given)
        if made is None or not given or not is_plain or not all(map(self._wants, given[:2])):
            return func(*args, **kwargs)
        named = [kwargs.pop(name) for name in _OPERANDS if name in kwargs]
        into = kwargs.pop("out", None)
        with torch._C.DisableTorchFunction():
            result = made(self._multiply, *args, *named, **kwargs)
            return result if into is None else into.resize_(result.shape).copy_(result)


_OPERANDS = ("input", "mat1", "batch1", "weight", "other", "mat2", "batch2")
"""Keywords for operands in PyTorch's signatures, in the order of their positions in each."""


def _multiply_noting(
    found: Figures,
    paths: ModulePaths,
    left: torch.Tensor,
    right: torch.Tensor,
    what: str,
) -> torch.Tensor:
    """Multiply two matrices in fp32, and record in `found` the largest partial, final and group sums.

    Args:
        what: `Sum.operation`.
    """
    total, sums = _measure_sums(left, right)
    if math.isnan(sum(sums)):  # a row of NaN hides no other
        sums = _measure_sums(left.nan_to_num(), right.nan_to_num())[1]
    largest, result, group = (math.inf if math.isnan(x) else x for x in sums)
    before = found.get((paths.current, what), (0.0, 0.0, 0.0, 0))
    figures = largest, result, group, left.shape[-1]
    found[paths.current, what] = tuple(map(max, before, figures))  # type: ignore[assignment]
    return total.to(left.dtype)


def _measure_sums(
    left: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, tuple[float, float, float]]:
    """Return a matrix product in fp32, and its largest partial, final and group sum."""
    sizes: list[torch.Tensor] = []

    def note(part: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        if total.numel():
            ends = torch.stack([*total.aminmax(), *part.aminmax()]).abs()
            sizes.append(ends.view(2, 2).amax(1))
        return total

    total = _sum_in_pieces(left, right, note)
    reached, group = torch.stack(sizes).amax(0).tolist() if sizes else (0.0, 0.0)
    ended = float(torch.stack(total.aminmax()).abs().max()) if total.numel() else 0.0
    return total, (reached, ended, group)


def _sum_in_pieces(left: torch.Tensor, right: torch.Tensor, each: After) -> torch.Tensor:
    """Compute a matrix product by `sum_groups`, a few rows of `left` at a time, to save memory.

    Args:
        each: receives every partial sum.
    """
    rows = _count_rows(left, right.shape[-1])
    if left.dim() < 2 or rows >= left.shape[-2]:
        return sum_groups(left, right, each)
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*batch, left.shape[-2], right.shape[-1])
    total = torch.empty(shape, dtype=torch.float32, device=left.device)
    for start in range(0, left.shape[-2], rows):
        part = left[..., start : start + rows, :]
        total[..., start : start + rows, :] = sum_groups(part, right, each)
    return total


def _count_rows(left: torch.Tensor, columns: int) -> int:
    """Return how many rows of a product to compute at a time, for at most `PIECE` sums."""
    return max(1, PIECE // max(1, math.prod(left.shape[:-2]) * columns))


def sum_groups(left: torch.Tensor, right: torch.Tensor, each: After) -> torch.Tensor:
    """Compute a matrix product in fp32, `GROUP` products at a time, as a tensor core does.

    Args:
        each: receives the group's sum and the sum so far, and returns the sum to continue with.
    """
    left, right = left.float(), right.float()
    total: torch.Tensor | None = None
    for start in range(0, left.shape[-1], GROUP):
        rows = slice(start, start + GROUP)
        part = torch.matmul(left[..., rows], right[..., rows, :])
        total = each(part, part if total is None else total.add_(part))
    return torch.matmul(left, right) if total is None else total


def _matmul(multiply: Multiply, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    columns, rows = left.dim() == 1, right.dim() == 1
    left, right = left[None] if columns else left, right[:, None] if rows else right
    result = multiply(left, right, "product")
    result = result.squeeze(-1) if rows else result
    return result.squeeze(-1 if rows else -2) if columns else result


def _linear(
    multiply: Multiply, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    result = _matmul(multiply, given, weight.t())
    return result if bias is None else result + bias


def _convolve(
    multiply: Multiply,
    given: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Compute a convolution as matrix products over its input windows, a few windows at a time."""
    rank = weight.dim() - 2
    batched = given if given.dim() == rank + 2 else given[None]
    strides, dilations = (_repeat(x, rank) for x in (stride, dilation))
    reach = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True)]
    if isinstance(padding, str):
        ends = [(n - 1, 0) if padding == "same" else (0, 0) for n in reach]
        ends = [(sum(x) // 2, sum(x) - sum(x) // 2) for x in ends]
    else:
        ends = [(x, x) for x in _repeat(padding, rank)]
    padded = functional.pad(batched, [x for pair in reversed(ends) for x in pair])
    parts = []
    for part, kernel in zip(padded.chunk(groups, 1), weight.chunk(groups, 0), strict=True):
        for dim in range(rank):
            part = part.unfold(dim + 2, reach[dim], strides[dim])[..., :: dilations[dim]]
        windows = part.movedim(1, -1)  # [batch, *places, *kernel, channels]
        matrix = kernel.movedim((0, 1), (-1, -2)).reshape(-1, kernel.shape[0])
        whole = [windows] if windows.numel() <= PIECE else windows.unbind()
        lines = [x for item in whole for x in ([item] if item.numel() <= PIECE else item.unbind())]
        rows = [multiply(x.reshape(-1, len(matrix)), matrix, "convolution") for x in lines]
        shape = (*windows.shape[: rank + 1], -1)
        parts.append(torch.cat(rows).reshape(shape).movedim(-1, 1))
    result = torch.cat(parts, 1)
    result = result if bias is None else result + bias.reshape(-1, *[1] * rank)
    return result if given.dim() == rank + 2 else result[0]


def _repeat(value: int | Sequence[int], rank: int) -> list[int]:
    """Return a size for each of `rank` dimensions; a single size is repeated."""
    sizes = [value] if isinstance(value, int) else [*value]
    return sizes * rank if len(sizes) == 1 else sizes


def _add_product(
    multiply: Multiply,
    added: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    product = multiply(left, right, "product")
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (added if beta == 1 else added * beta)


def _attend(
    multiply: Multiply,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Compute attention with scores that are scaled after their summation, as in fused kernels.

    A few queries are processed at a time, so that memory doesn't grow with the square of their number.

    Args:
        options: `scale` and `enable_gqa`, as of `scaled_dot_product_attention`.
    """
    if options.get("enable_gqa"):
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if is_causal:
        shape = (query.shape[-2], key.shape[-2])
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    scale = options.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    rows, done = _count_rows(query, key.shape[-2]), []
    for start in range(0, query.shape[-2], rows):
        part = query[..., start : start + rows, :]
        scores = multiply(part, key.transpose(-2, -1), "attention scores").float() * scale
        masked = attn_mask
        if masked is not None and masked.dim() > 1 and masked.shape[-2] > 1:
            masked = masked[..., start : start + rows, :]
        if masked is not None and masked.dtype == torch.bool:
            scores = scores.masked_fill(~masked, -math.inf)
        elif masked is not None:
            scores = scores + masked
        is_blind = scores.isneginf().all(-1, keepdim=True)  # such queries get zeros, not NaN
        shares = scores.softmax(-1).masked_fill(is_blind, 0.0)
        shares = functional.dropout(shares, dropout_p)
        done.append(multiply(shares.to(value.dtype), value, "attention"))
    return torch.cat(done, dim=-2)


_KNOWN: dict[Any, Callable[..., torch.Tensor]] = {
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.mm: _matmul,
    torch.Tensor.bmm: _matmul,
    functional.linear: _linear,
    torch.addmm: _add_product,
    torch.baddbmm: _add_product,
    torch.Tensor.addmm: _add_product,
    torch.Tensor.baddbmm: _add_product,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _convolve),
    functional.scaled_dot_product_attention: _attend,
}

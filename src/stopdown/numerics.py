"""Pure functions on tensors: largest magnitudes, non-finite counts, headroom, errors.

They don't change their inputs, and don't synchronise with the host unless the docstring says so.
Computations disable a surrounding autocast, which would cast products and refuse to stack tensors of other
dtypes.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from stopdown.interception.autocast import without_autocast
from stopdown.number_formats import NEAR_FP16_END, find_format

HALVES = (torch.float16, torch.bfloat16)
"""The 16-bit floating dtypes."""

LEAST_SQUARES = 2.0**-100
"""Sums of squares below this are computed in fp64, as fp32 may lose most of them to underflow."""

DEVICE_VALUES = 1 << 24
"""Number of values that are cast to fp64 at a time on an accelerator (128 MiB)."""

CACHED_VALUES = 1 << 18
"""Number of values that are cast to fp32 at a time on a CPU (1 MiB); with fewer, threads mostly wait."""

ONEDNN_TERMS = 512
"""Number of terms from which matrix products use oneDNN; shorter ones use MKL."""

FEW_COLUMNS = 3
"""Number of columns up to which matrix products use MKL."""

HIDDEN_FROM = -1e9
"""Largest number that counts as hiding an attention score in a mask; fp32's lowest is the usual one."""

HIDDEN_IN_FP16 = -NEAR_FP16_END
"""Number that hides scores in fp16; with fp16's lowest, -65504, a score below -16 would sum to -Inf."""

LARGEST_ERROR = 0.05
"""Largest relative error (2-norm) against fp32 that is accepted if bf16 doesn't run."""

ROUNDED_ONCE = 2.0**-11
"""Relative error (2-norm) that is accepted whatever that of bf16: rounding to fp16 changes a value by
as much."""


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested tuples, lists, mappings and objects with attributes or slots."""
    yield from iterate_leaves(value, (torch.Tensor,))


def iterate_leaves(
    value: Any, kinds: tuple[type, ...], seen: frozenset[int] = frozenset()
) -> Iterator[Any]:
    """Yield every value of these kinds in nested tuples, lists, mappings and objects, except modules."""
    if isinstance(value, kinds):
        yield value
    elif id(value) not in seen:  # an object that holds itself
        for item in _iterate_items(value):
            yield from iterate_leaves(item, kinds, seen | {id(value)})


def _iterate_items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif not isinstance(value, (torch.nn.Module, torch.Tensor, type)):
        if hasattr(value, "__dict__"):
            yield from vars(value).values()
        for kind in type(value).__mro__:
            names = vars(kind).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield getattr(value, name)


@without_autocast()
def measure_amax(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude of a floating tensor of any shape; 0.0 when it is empty.

    Cost: one pass and one host read.
    """
    if tensor.numel() == 0:
        return 0.0
    magnitudes = tensor.detach().abs()
    finite = torch.where(torch.isfinite(magnitudes), magnitudes, torch.zeros_like(magnitudes))
    return float(finite.max())


@without_autocast()
def summarise_magnitudes(tensor: torch.Tensor) -> tuple[float, float, float, int]:
    """Return the largest magnitude, root mean square, smallest positive magnitude and non-finite count.

    The first three ignore non-finite values. All are 0 for an empty tensor.

    Cost: five passes, and a host read for each `DEVICE_VALUES`; on a CPU the passes run piece by piece in
    its cache.
    """
    if tensor.numel() == 0:
        return 0.0, 0.0, 0.0, 0
    flat = tensor.detach().reshape(-1)
    flat = flat if flat.device.type in ("cpu", "cuda") else flat.cpu()  # others may lack float64
    if flat.device.type == "cpu":
        pieces = _summarise_cached(flat)
    else:
        pieces = [_summarise_piece(x) for x in flat.split(DEVICE_VALUES)]
    largest, squares, least, bad = zip(*pieces, strict=True)
    smallest = min(least)
    mean = math.fsum(squares) / tensor.numel()
    return max(largest), mean**0.5, smallest if smallest < math.inf else 0.0, int(sum(bad))


def _summarise_piece(values: torch.Tensor) -> list[float]:
    """Return the largest magnitude, sum of squares, smallest positive magnitude and non-finite count."""
    magnitudes = values.abs().double()
    finite = torch.isfinite(magnitudes)
    magnitudes = torch.where(finite, magnitudes, 0.0)
    least = torch.where(magnitudes > 0, magnitudes, math.inf).amin()
    bad = (~finite).sum().double()
    found = torch.stack([magnitudes.amax(), magnitudes.dot(magnitudes), least, bad])
    figures: list[float] = found.tolist()
    return figures


def _summarise_cached(values: torch.Tensor) -> list[list[float]]:
    """Return the figures of `_summarise_piece` for pieces of a tensor that fit into the CPU's cache.

    They are computed in fp32 if its range suffices.
    """
    pieces, found = values.split(CACHED_VALUES), list[list[float]]()
    wide_dtype = values.dtype if values.element_size() >= 4 else torch.float32
    held = torch.empty(pieces[0].shape, dtype=wide_dtype)
    for piece in pieces:
        wide = held[: len(piece)].copy_(piece)
        squares = float(wide.dot(wide))
        low, high = map(float, torch.aminmax(wide.abs_()))
        if low == 0 and values.dtype in HALVES:  # without a sign their bits are in order
            bits = piece.view(torch.int16) & 0x7FFF
            least = bits.sub_(1).bitwise_and_(0x7FFF).amin() + 1  # zero less one is the largest
            low = float(least.view(values.dtype))
        is_plain = low > 0 and high < math.inf and LEAST_SQUARES < squares < math.inf
        found.append([high, squares, low, 0.0] if is_plain else _summarise_piece(piece))
    return found


@without_autocast()
def multiply_matrices(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return `rows @ columns.T`.

    In fp32 on a CPU, it is computed by oneDNN, which takes half of MKL's time on AMD's processors. For
    products with few columns, MKL takes half of oneDNN's time and is used.

    Args:
        rows: `[R, C]`.
        columns: `[N, C]`.
    """
    matrices = (rows, columns)
    if (
        all(x.dtype == torch.float32 and x.device.type == "cpu" for x in matrices)
        and rows.shape[1] >= ONEDNN_TERMS
        and len(columns) > FEW_COLUMNS
        and torch.backends.mkldnn.is_available()
    ):
        matrices = (rows.contiguous(), columns.contiguous())  # of others it may have no fast way
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(*matrices, None, "none", [], "")
        return made
    return rows @ columns.T


@without_autocast()
def cast_mask(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a floating tensor that may be an additive mask, so that values which hide a score stay finite.

    A plain cast to fp16 turns them into -Inf, and a row of only these becomes NaN in the softmax. Other
    values, including -Inf, are cast normally.
    """
    if dtype != torch.float16 or tensor.dtype in (dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.to(dtype)
    hides = (tensor <= HIDDEN_FROM) & ~tensor.isinf()
    return torch.where(hides, HIDDEN_IN_FP16, tensor).to(dtype)


def count_non_finite(tensor: torch.Tensor) -> tuple[int, int]:
    """Count the NaN values, and the +Inf and -Inf values.

    Args:
        tensor: of any shape and device, and of any dtype but those of 8 bits and less, for which PyTorch
            has no `isinf`.

    Returns:
        Number of NaN, and number of +Inf and -Inf together.

    Cost: two passes and one host read.

    Examples:
        >>> count_non_finite(torch.tensor([1.0, float("nan"), float("inf"), float("-inf")]))
        (1, 2)
    """
    nan, infinite = torch.isnan(tensor).sum(), torch.isinf(tensor).sum()
    counts = torch.stack([nan, infinite]).tolist()
    return counts[0], counts[1]


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values that can be read.

    Fake, `meta`, sparse, nested and empty tensors have none. Nor do offloaded weights, and lazy parameters
    before the first call.
    """
    is_fake = tensor.is_meta or isinstance(tensor, FakeTensor)  # a capture runs a copy
    is_other = tensor.layout is not torch.strided or tensor.is_nested
    if is_other or is_fake or is_lazy(tensor) or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() > 0


def is_away(tensor: torch.Tensor) -> bool:
    """Return whether a weight is offloaded: it is on `meta`, or its storage is empty."""
    if tensor.layout is not torch.strided or is_lazy(tensor) or not tensor.numel():
        return False
    return tensor.is_meta or not tensor.untyped_storage().nbytes()


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has readable floating values of 16 or more bits, which can be compared."""
    return tensor.is_floating_point() and has_values(tensor) and tensor.element_size() > 1


@without_autocast()
def bound_values(
    tensors: list[torch.Tensor], known: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
) -> torch.Tensor | None:
    """Return the least and largest value of each floating tensor.

    Both are NaN if a tensor contains NaN, and one is infinite if it contains Inf. One host read thus shows
    whether all values are finite, and how close they are to the format's maximum.

    Args:
        known: pairs (least, largest) of scalar tensors that were computed before.

    Returns:
        A flat tensor of pairs, those of the tensors followed by those in `known`, on the device of the
        first; None if there are none.

    Cost: one pass and one operation per tensor, and one operation per dtype; no host read.
    """
    pairs = [_bound(t) for t in tensors if t.is_floating_point() and t.numel()]
    flat = [bound for pair in (*pairs, *known) for bound in pair]
    if not flat:
        return None
    alike = [list(group) for _, group in itertools.groupby(flat, lambda x: (x.dtype, x.device))]
    if len(alike) == 1:
        return torch.stack(flat)
    device = flat[0].device
    return torch.cat([torch.stack(group).to(device, torch.float32) for group in alike])


def _bound(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if tensor.device.type in ("cpu", "cuda"):
        low, high = torch.aminmax(tensor.detach() if tensor.requires_grad else tensor)
        return low, high
    # Elsewhere a reduction may lose NaN: say it by hand.
    spoilt = torch.where(torch.isfinite(tensor).all(), 0.0, math.nan).to(tensor.dtype)
    return tensor.amin() + spoilt, tensor.amax() + spoilt


def headroom_bits(amax: float, dtype: torch.dtype) -> float:
    """Return the bits between a magnitude and the largest value of a dtype: negative on overflow."""
    found = find_format(dtype)
    if found is None:
        raise ValueError(f"{dtype} isn't a floating dtype")
    if amax == 0:
        return math.inf
    return math.log2(found.largest) - math.log2(amax)


ATTENTION = "scaled_dot_product_attention"
_LEFT = ("mat1", "batch1", "mat")
"""Names of the left matrix in operations whose first tensor is a summand."""


def count_flops(
    name: str,
    shapes: Mapping[str, Sequence[int]],
    output: Sequence[int],
    *,
    transposed: bool = False,
) -> float:
    """Count the floating-point operations of a product, convolution or attention, two per multiply-add.

    The counts are those of `torch.utils.flop_counter`. A transposed convolution applies its kernel once for
    each input value, any other for each output value.

    Args:
        name: ATen name of the operation: `linear`, `conv_transpose2d`, `addmm`.
        shapes: shapes of the tensor arguments by name, in order.
        output: shape of the output.
        transposed: whether an operation named `convolution` is transposed.
    """
    if name == ATTENTION and {"query", "key"} <= set(shapes):
        *rows, width = shapes["query"]
        values = shapes.get("value", shapes["query"])
        return 2.0 * math.prod(rows) * shapes["key"][-2] * (width + values[-1])
    if "weight" in shapes:
        is_transposed = transposed or name.startswith("conv_transpose")
        count = math.prod(shapes["input"] if is_transposed else output)
        return 2.0 * count * math.prod(shapes["weight"][1:] or shapes["weight"])
    left = next((shapes[key] for key in _LEFT if key in shapes), next(iter(shapes.values()), ()))
    return 2.0 * math.prod(output) * (left[-1] if left else 1)


def count_attention_on_cpu(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Count the FLOPs of attention on the CPU, for which PyTorch's FLOP counter has no formula."""
    return int(count_flops(ATTENTION, {"query": query, "key": key, "value": value}, ()))


@without_autocast()
def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the 2-norm of the difference over that of the reference, in fp64; NaN propagates.

    Args:
        value: of any dtype and shape, on a device with fp64.
        reference: of the same shape and device.

    Returns:
        A ratio, 0.0 for equal tensors. If all of `reference` is 0, it is Inf, or NaN for two such tensors.

    Cost: two copies in fp64, and a host read.

    Examples:
        >>> relative_l2(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        0.1
    """
    difference = value.double() - reference.double()
    return float((difference.norm() / reference.double().norm()).detach())


def measure_error(output: Any, reference: Any) -> float:
    """Return the relative 2-norm of the difference for the worst tensor; 0.0 if no tensor differs.

    Values that are not finite in the reference are left out.
    """
    errors = [0.0]
    for low, right in zip(iterate_tensors(output), iterate_tensors(reference), strict=True):
        if right.is_floating_point() and not bool((finite := right.isfinite()).all()):
            low, right = low.where(finite, 0.0), right.where(finite, 0.0)
        if right.is_floating_point() and not torch.equal(low.to(right.dtype), right):
            error = relative_l2(low.cpu(), right.cpu())  # some devices have no fp64
            errors.append(error if math.isfinite(error) else math.inf)
    return max(errors)


def describe_excess(error: float, bf16_error: float | None) -> str:
    """Describe an error that is too large to be accepted; return "" for others.

    Args:
        error: relative 2-norm of the difference from fp32.
        bf16_error: that of the same call in bf16; None if that doesn't run.
    """
    if error <= (LARGEST_ERROR if bf16_error is None else max(ROUNDED_ONCE, bf16_error)):
        return ""
    beside = "bf16 doesn't run" if bf16_error is None else f"bf16's by {bf16_error:.2g}"
    return f"it is {error:.2g} off ({beside})"

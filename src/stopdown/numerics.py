"""Pure functions on tensors: largest magnitudes, non-finite counts, headroom, errors.

Nothing here changes its input or synchronises with the host unless its docstring says so. What computes
does so with autocast off, which may be on around it: it casts products, and refuses to stack other dtypes.
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
"""What is computed in 16 bits."""

LEAST_SQUARES = 2.0**-100
"""A sum of squares below this is not computed in fp32, which may have lost most of it."""

DEVICE_VALUES = 1 << 24
"""How many values are widened to float64 at a time on an accelerator: 128 MiB."""

CACHED_VALUES = 1 << 18
"""How many values are widened to fp32 at a time on a CPU: 1 MiB; with fewer, several threads wait for each
other more than they work."""

ONEDNN_TERMS = 512
"""Products of shorter sums are done by MKL."""

FEW_COLUMNS = 3
"""So are products with no more columns."""

HIDDEN_FROM = -1e9
"""The mildest number that code adds to scores to hide them; the usual one is the lowest of fp32."""

HIDDEN_IN_FP16 = -NEAR_FP16_END
"""What hides scores in fp16. Its lowest number, -65504, is -Inf with a score below -16 added to it."""

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

    The non-finite values are counted by the last figure and left out of the others, which are
    0.0 for an empty tensor.
    Cost: five passes, and a host read for each `DEVICE_VALUES`; on a CPU piece by piece, in its cache.
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
    """Summarise each piece as `_summarise_piece` does, in fp32 unless its range is too small."""
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
    """Return `rows @ columns.T`; in fp32 on a CPU by oneDNN, in half of MKL's time on AMD's processors.

    A few columns take MKL half of oneDNN's time.
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
    """Cast a floating tensor that may be an additive mask: what hides a score stays finite.

    Plain casts make -Inf of it, and a row of nothing else is NaN after the softmax. Other values, and those
    that are -Inf already, are cast as always.
    """
    if dtype != torch.float16 or tensor.dtype in (dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.to(dtype)
    hides = (tensor <= HIDDEN_FROM) & ~tensor.isinf()
    return torch.where(hides, HIDDEN_IN_FP16, tensor).to(dtype)


def count_non_finite(tensor: torch.Tensor) -> tuple[int, int]:
    """Count the NaN values, and the +Inf and -Inf values.

    Cost: two passes and one host read.
    """
    nan, infinite = torch.isnan(tensor).sum(), torch.isinf(tensor).sum()
    counts = torch.stack([nan, infinite]).tolist()
    return counts[0], counts[1]


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values that can be read.

    One that is fake, on `meta`, sparse or nested has none, and neither has a weight that waits elsewhere
    or is made at the first call.
    """
    is_fake = tensor.is_meta or isinstance(tensor, FakeTensor)  # a capture runs a copy
    if tensor.layout is not torch.strided or is_fake or is_lazy(tensor) or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() > 0


def is_away(tensor: torch.Tensor) -> bool:
    """Return whether a weight's values are elsewhere: it is on `meta`, or its storage is empty."""
    if tensor.layout is not torch.strided or is_lazy(tensor) or not tensor.numel():
        return False
    return tensor.is_meta or not tensor.untyped_storage().nbytes()


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has floating values of 16 bits or more; 8-bit values cannot be compared."""
    return tensor.is_floating_point() and tensor.element_size() > 1 and has_values(tensor)


def count_writes(tensor: torch.Tensor) -> int | None:
    """Return PyTorch's count of writes into a tensor; None in inference mode, which keeps none."""
    return None if tensor.is_inference() else tensor._version


@without_autocast()
def bound_values(
    tensors: list[torch.Tensor], known: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
) -> torch.Tensor | None:
    """Return the least and largest value of each floating tensor, `[2 * n]` on the first one's device.

    Both are NaN where a tensor holds NaN, and one is infinite where it holds Inf, so that one read shows
    whether all values are finite, and how close they are to the maximum of the format. Returns None
    without a tensor.
    `known` holds pairs of scalars found before; they follow those of the tensors.
    Cost: one pass and one operation a tensor, one more for each dtype; no host read.
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
        raise ValueError(f"{dtype} is not a floating dtype")
    if amax == 0:
        return math.inf
    return math.log2(found.largest) - math.log2(amax)


ATTENTION = "scaled_dot_product_attention"
_LEFT = ("mat1", "batch1", "mat")
"""What the left matrix is called where the first tensor is a summand."""


def count_flops(
    name: str,
    shapes: Mapping[str, Sequence[int]],
    output: Sequence[int],
    *,
    transposed: bool = False,
) -> float:
    """Count the floating-point operations of a product, convolution or attention, two per multiply-add.

    As `torch.utils.flop_counter` counts them, but by names: a transposed convolution multiplies once
    for each value that it is given, any other for each that it returns.

    Args:
        name: of the operation, as ATen has it: `linear`, `conv_transpose2d`, `addmm`.
        shapes: of its tensors, by the names of their arguments, in order.
        output: shape of its output.
        transposed: for `convolution`, whether it is a transposed one.
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
    """Count the operations of the CPU's attention, for which torch's counter has no formula."""
    return int(count_flops(ATTENTION, {"query": query, "key": key, "value": value}, ()))


@without_autocast()
def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the 2-norm of the difference over that of the reference, in fp64; NaN propagates."""
    difference = value.double() - reference.double()
    return float(difference.norm() / reference.double().norm())


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
    beside = "bf16 does not run" if bf16_error is None else f"bf16's by {bf16_error:.2g}"
    return f"it is {error:.2g} off ({beside})"

"""Prove upper bounds of a weight's largest singular value: the factor by which a linear can lengthen a row.

The largest eigenvalue of the Gram matrix is estimated. A Cholesky decomposition then proves that none
is above a value slightly larger. The rounding errors of the Gram matrix and of the decomposition are
added before the root is taken. The Gram matrix of a small weight is computed in float64, that of a
large one in fp32 and in parts.
"""

from __future__ import annotations

import itertools
import math

import torch

from stopdown.scaling.bounds.row_sums import choose_scale, find_largest_magnitude

SMALL = 1 << 27
"""Largest `out * in * min(out, in)` for which a Gram matrix is computed in float64."""

MOST_WORK = 1 << 38
"""Beyond this many multiplications a Gram matrix takes longer than its bound is worth (12288 x 3072:
2**36.8, 0.5 s)."""

GRAM_ROWS = 512
"""Number of products that are summed in fp32 at a time."""

MOST_COLUMNS = 512
"""Matrices with more columns are split: six parts of 3072 columns take a sixth of the time, for a bit
of tightness.

Three parts take twice as long and lose 0.6 bits. One exponent in thirteen of CogVideoX-5B is another
bit then.
"""

GRAM_COLUMNS = 256
"""A Gram matrix is symmetric, so it is computed in blocks of this many rows, each from the diagonal on."""

MARGIN = 1 + 1e-9
"""Factor that covers the error of a decomposition in float64."""

STEPS = 40
"""Steps of Lanczos's method. Its estimate is then within some 2e-4 of the largest eigenvalue."""

ABOVE = (1.001, 1.01, 1.1, 1.5)
"""Factors above the estimate at which the largest eigenvalue is tested, before all eigenvalues are
computed."""


def count_work(weight: torch.Tensor) -> int:
    """Return the number of multiplications in the Gram matrix of a weight `[out, in]`."""
    return math.prod(weight.shape) * min(weight.shape)


def takes_work(weight: torch.Tensor) -> bool:
    """Return whether the Gram matrix of a weight `[out, in]` takes too long in float64, so that fp32 is
    used.
    """
    return count_work(weight) > SMALL


def measure_sigma(weight: torch.Tensor, largest: float | None = None) -> float:
    """Return a proved upper bound of the largest singular value of a weight `[out, in]`.

    A large weight is split into column parts. The square of its value is at most the sum of the squares
    of theirs.

    Args:
        largest: the weight's largest magnitude, if known.

    Cost: `count_work` in float64 for a small weight, at most half of it in fp32 for a large one;
    Cholesky decompositions of squares of `MOST_COLUMNS`.
    """
    tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
    largest = find_largest_magnitude(weight) if largest is None else largest
    scale = choose_scale(largest)  # squares stay in range
    if not takes_work(weight):
        return math.sqrt(_bound_small_gram(tall.cpu().double() * scale)) / scale * MARGIN
    count, room = math.ceil(tall.shape[1] / MOST_COLUMNS), _Buffers(weight.device)
    tops = [_bound_gram(part, scale, room) for part in tall.chunk(count, dim=1)]
    return math.sqrt(sum(tops)) / scale * MARGIN


def bound_parts(weight: torch.Tensor) -> list[float]:
    """Bound the squared largest singular value of each part of a weight `[out, in]`, split into groups
    of columns.

    Their sum bounds that of the whole weight.

    Cost: at most half of `count_work` in fp32; Cholesky decompositions of squares of `MOST_COLUMNS`.
    """
    count = math.ceil(weight.shape[1] / MOST_COLUMNS)
    cuts = torch.linspace(0, weight.shape[1], count + 1, dtype=torch.float64).long().tolist()
    scale, room = choose_scale(find_largest_magnitude(weight)), _Buffers(weight.device)
    parts = (weight[:, start:stop] for start, stop in itertools.pairwise(cuts))
    return [_bound_gram(part, scale, room) / scale**2 for part in parts]


def estimate_sigma(weight: torch.Tensor) -> float:
    """Estimate the largest singular value of a weight `[out, in]` from below, by power iteration on its
    device.

    Cost: sixteen products of the weight with a vector, and a host read.
    """
    weight = weight.float()
    made = torch.Generator().manual_seed(0)
    vector = torch.randn(weight.shape[1], generator=made).to(weight.device)
    for _ in range(8):
        vector = weight.T @ (weight @ (vector / vector.norm().clamp(min=1e-30)))
    return math.sqrt(float(vector.norm()))


class _Buffers:
    """Scratch memory that is reused for all parts of a weight, as fresh memory costs time to be cleared.

    Args:
        device: device of the weight.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device, self._held = device, dict[str, torch.Tensor]()

    def take(
        self, name: str, rows: int, columns: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return uninitialised memory `[rows, columns]`, which the next call with this name reuses."""
        held, count = self._held.get(name), rows * columns
        if held is None or held.numel() < count:
            held = torch.empty(count, dtype=dtype, device=self._device)
            self._held[name] = held
        return held[:count].view(rows, columns)


def _bound_small_gram(weight: torch.Tensor) -> float:
    """Bound the largest eigenvalue of `W^T W` for a float64 weight W; rounding errors of the sums are
    included.
    """
    gram = weight.T @ weight
    return bound_top(gram) + 1.01 * len(weight) * 2.0**-53 * float(gram.trace())


def _bound_gram(weight: torch.Tensor, scale: float, room: _Buffers) -> float:
    """Bound the largest eigenvalue of `scale**2 * W^T W`, computed in fp32; rounding errors are included.

    Half of the matrix is computed. A sum of n products in fp32 is off by at most `n u / (1 - n u)` of
    the sum of their magnitudes (u is 2**-24). So the 2-norm of the whole error is at most that factor
    times the sum of the squares of `W`. Products below the smallest normal number are lost, which is
    added too.
    """
    columns, pieces = weight.shape[1], weight.split(GRAM_ROWS)
    gram = room.take("gram", columns, columns).zero_()
    held = room.take("piece", *pieces[0].shape)
    spare = room.take("product", GRAM_COLUMNS, columns).view(-1)
    for piece in pieces:
        rows = held[: len(piece)].copy_(piece).mul_(scale)
        for start in range(0, columns, GRAM_COLUMNS):
            left, right = rows[:, start : start + GRAM_COLUMNS].T, rows[:, start:]
            made = spare[: len(left) * right.shape[1]].view(len(left), -1)
            gram[start : start + GRAM_COLUMNS, start:] += torch.mm(left, right, out=made)
    for start in range(0, columns, GRAM_COLUMNS):
        stop = start + GRAM_COLUMNS
        gram[stop:, start:stop] = gram[start:stop, stop:].T
    room, gram = (room, gram) if gram.device.type == "cpu" else (_Buffers(), gram.cpu())
    terms = GRAM_ROWS + len(pieces)
    error = 1.01 * terms * 2.0**-24 * float(gram.diagonal().double().sum())
    return bound_top(gram, room) + error + weight.numel() * 2.0**-125


def bound_top(gram: torch.Tensor, room: _Buffers | None = None) -> float:
    """Prove an upper bound of the largest eigenvalue of a positive semidefinite matrix `[n, n]` in fp32
    or float64.

    If the Cholesky decomposition of `A` succeeds in float64, `A` has no eigenvalue below `-2 (n + 1) u
    trace(A)` (u is 2**-53; Rump, Verification of positive definiteness, 2006).

    Args:
        room: scratch memory; None allocates it.
    """
    size, near = len(gram), _estimate_top(gram.float())
    room, info = room or _Buffers(), torch.empty((), dtype=torch.int32)
    left = room.take("left", size, size, torch.float64)
    root = room.take("root", size, size, torch.float64).T  # LAPACK's order
    for above in ABOVE:
        top = near * above
        left.copy_(gram).neg_().diagonal().add_(top)
        torch.linalg.cholesky_ex(left, out=(root, info))
        if top > 0 and int(info) == 0:
            return top * (1 + 2 * size * (size + 1) * 2.0**-53)
    return max(float(torch.linalg.eigvalsh(gram.double())[-1]), 0.0) * MARGIN


def _estimate_top(gram: torch.Tensor) -> float:
    """Estimate the largest eigenvalue of a symmetric matrix `[n, n]` by `STEPS` steps of Lanczos's
    method in fp32.
    """
    vector = torch.randn(len(gram), generator=torch.Generator().manual_seed(0))
    vector, before = vector / vector.norm(), torch.zeros_like(vector)
    inner, outer = list[torch.Tensor](), [torch.zeros(())]
    for _ in range(min(STEPS, len(gram))):
        moved = gram @ vector - outer[-1] * before
        inner.append(moved @ vector)
        moved -= inner[-1] * vector
        outer.append(moved.norm())
        vector, before = moved / outer[-1].clamp(min=1e-30), vector
    beside = torch.diag(torch.stack(outer[1:-1]), 1) if len(inner) > 1 else torch.zeros(1, 1)
    return float(torch.linalg.eigvalsh(torch.diag(torch.stack(inner)) + beside + beside.T)[-1])

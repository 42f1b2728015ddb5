"""Solve for the cheapest powers of two that keep all tensors in range: a small mixed-integer program
for HiGHS.

Hard limits keep every 16-bit value finite. Prices decide the rest. A fold has a small price for each
bit, a larger one beyond 3 bits, and a much larger one beyond 6, so that a large exponent is spread over
all parameters that can share it. A typical size below 2^-11, where fp16 begins to lose bits, costs more
than any fold, for weights and activations alike. Explicit multiplies are tried if folding alone fails, and
modules in fp32, priced by their share of the FLOPs, if multiplies fail too.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from stopdown.component_call_names import list_outermost
from stopdown.errors import ScalingError
from stopdown.number_formats import find_format
from stopdown.scaling.exponents.linear_system import ZERO
from stopdown.scaling.exponents.problem import Problem
from stopdown.scaling.graph.range_measurement import log2_of

FREE_BITS = 4.0
"""Headroom in bits below fp16's maximum that a value should keep, as other calls exceed measured
maxima; less has a price."""

ASKED_BITS = 1.0
"""Headroom in bits that every 16-bit value keeps, and that a matrix needs to stay in fp16 under hooks."""

HARDLY_BITS = 0.01
"""Headroom in bits that is accepted if `ASKED_BITS` keeps too many modules in fp32. It holds for the
measured calls and few others."""

CALIBRATED_BITS = 4.0
"""Headroom in bits over the measured maximum of a value that has a bound which isn't used."""


WIDEST = 48
"""Largest exponent of a parameter, value or multiply, in bits."""

WIDEST_MULTIPLY = 30.0
"""Largest exponent of an explicit multiply, in bits. It leads from one fp16 value to another, and
fp16's normal numbers span 2**-14 to 2**16. A tighter limit ends the search for multiplies sooner."""

MOST_NODES = {"folds": 100, "fp32_modules": 300}
"""Number of branches after which the best exponents found so far are used. Unlike seconds, a count ends
a search at the same point on every machine and under every load. SVD's UNet, the largest program that
was measured, takes 46 of them and 17 s."""

LONGEST_S = 600.0
"""Seconds after which a search ends that the count of branches doesn't end. No measured model comes
close."""

INFEASIBLE = 2
"""Status with which `milp` reports a program without a solution."""

LOW_BITS, LOWEST_BITS = -11.0, -14.0
"""log2 of typical sizes below which fp16 loses a few bits, and then one in each binade."""


SIZE_STEPS = 64
"""log2 sizes that set a price are rounded to multiples of 1/64. Otherwise digits that differ between
processors would choose among exponents of nearly the same price: 1e-7 of SVD's bounds moved three
multiplies."""


@dataclass(frozen=True)
class Prices:
    """Prices of scale exponents and fp32 modules in the solver's objective; only their ratios matter.

    Attributes:
        fold, fold_beyond_3, fold_beyond_6: each bit of a fold, beyond 0, 3 and 6 bits; they add up.
        top: each bit by which an activation's or weight's headroom is below `FREE_BITS`.
        low, lowest: each bit by which a typical size is below `LOW_BITS` or `LOWEST_BITS`.
        multiply: each explicit multiply.
        fp32_module: each module kept in fp32.
        fp32_flops: all matmul FLOPs of the calls in fp32; a module costs its share.
    """

    fold: float = 0.5
    fold_beyond_3: float = 0.5
    fold_beyond_6: float = 2.0
    top: float = 8.0
    low: float = 4.0
    lowest: float = 20.0
    multiply: float = 60.0
    fp32_module: float = 500.0
    fp32_flops: float = 5000.0


@dataclass(frozen=True)
class Solution:
    """Scale exponents that satisfy a problem's equations and limits.

    Attributes:
        exponents: maps each representative of an unknown to its exponent.
        fp32_modules: paths of the modules that stay in fp32.
        cost: sum of the prices.
    """

    exponents: Mapping[int, int]
    fp32_modules: tuple[str, ...]
    cost: float


def is_hopeless(problem: Problem, *, fp32_flops: float) -> bool:
    """Return whether the problem has no solution even with minimal headroom, so that a full search is
    in vain.

    Fractional exponents are allowed, and headroom is `HARDLY_BITS`.

    Args:
        fp32_flops: any number of modules may stay in fp32 that each do less than this share of the
            matmul FLOPs.

    Cost: a linear program without prices.
    """
    program, _, _ = _state_program(problem, HARDLY_BITS, fp32_flops)
    return program.is_infeasible()


def needs_whole(problem: Problem, *, hard_top_bits: float) -> bool:
    """Return whether the whole module must stay in fp32, or is cheaper there than any set of submodules.

    That is then the cheapest with all other prices too, as none of these depends on what is kept in fp32.

    Args:
        hard_top_bits: headroom in bits that every 16-bit value must keep.

    Cost: a program with the prices of these modules alone. Kandinsky 3's UNet takes 0.2 s, and 6 to 18
    s with all prices, although nothing needs an exponent there.
    """
    program, _, lifts = _state_program(problem, hard_top_bits, math.inf)
    result = program.solve("fp32_modules") if "" in lifts else None
    return result is not None and result[0][lifts[""]] > 0.5


def solve_problem(problem: Problem, *, hard_top_bits: float, fp32_modules: bool) -> Solution | None:
    """Find the cheapest scale exponents that keep all tensors in range; return None if none are found.

    Prices are those of folds, multiplies, modules in fp32, little headroom and small typical sizes.

    Args:
        hard_top_bits: headroom in bits that every 16-bit value must keep.
        fp32_modules: allow modules to stay in fp32.
    """
    fp32_flops = math.inf if fp32_modules else 0.0
    program, representatives, lifts = _state_program(problem, hard_top_bits, fp32_flops)
    _price_folds(program, problem)
    _price_sizes(program, problem)
    result = program.solve("fp32_modules" if fp32_modules else "folds")
    if result is None:
        return None
    values, cost = result
    exponents = {root: round(values[program.column(root)]) for root in representatives}
    chosen = tuple(path for path, column in lifts.items() if values[column] > 0.5)
    return Solution(exponents, tuple(sorted(list_outermost(chosen))), cost)


def _state_program(
    problem: Problem, hard_top_bits: float, fp32_flops: float
) -> tuple[_Program, list[int], dict[str, int]]:
    """Make a mixed-integer program with the constraints on scale exponents and the prices of fp32
    modules alone.

    Args:
        hard_top_bits: headroom in bits that every 16-bit value must keep.
        fp32_flops: modules may stay in fp32 that each do less than this share of the matmul FLOPs; 0 for
            none.

    Returns:
        The program, the representatives of its unknowns, and the column of each module that may stay in
        fp32.
    """
    program = _Program()
    representatives = _add_unknowns(program, problem)
    for row in problem.system.equations:
        program.demand({root: float(factor) for root, factor in row.items()}, low=0, high=0)
    lifts = _add_fp32_modules(program, problem, fp32_flops)
    _add_limits(program, problem, hard_top_bits, lifts)
    for unknown, floor, within in problem.floors:
        lifted = {lifts[path]: 4.0 * WIDEST for path in within if path in lifts}
        program.demand({problem.system.find(unknown): 1.0}, low=math.ceil(floor), extra=lifted)
    return program, representatives, lifts


def explain_failure(problem: Problem) -> ScalingError:
    """Return the error to raise for an unsolvable problem; it names large activations that nothing can
    scale.
    """
    fixed = [x for x in problem.limits if problem.system.find(x.unknown) == ZERO]
    too_large = [x for x in fixed if x.range.amax > _largest(x.dtype)]
    worst = sorted(too_large, key=lambda x: -x.range.amax)[:3]
    named = "; ".join(f"{x.place} reaches {x.range.amax:.3g}" for x in worst)
    return ScalingError(
        "No exponents keep every value in range" + (f": {named}." if named else "."),
        expected="Each 16-bit value must stay below the largest value of its dtype.",
        remedy="Run this component in bf16 or fp32.",
    )


@dataclass
class _Program:
    """Columns (variables) and rows (constraints) of a mixed-integer program under construction."""

    costs: list[float] = field(default_factory=lambda: [0.0])
    lows: list[float] = field(default_factory=lambda: [0.0])
    highs: list[float] = field(default_factory=lambda: [0.0])
    whole: list[int] = field(default_factory=lambda: [1])
    columns: dict[int, int] = field(default_factory=lambda: {ZERO: 0})
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def add(self, low: float, high: float, *, cost: float = 0.0, whole: bool = False) -> int:
        """Add a variable with limits and a price, an integer one if `whole`; return its index."""
        self.costs.append(cost)
        self.lows.append(low)
        self.highs.append(high)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def column(self, root: int) -> int:
        """Return the column (variable) of an unknown's representative; column 0 is the constant zero."""
        return self.columns[root]

    def demand(
        self,
        terms: Mapping[int, float],
        *,
        low: float = -math.inf,
        high: float = math.inf,
        extra: Mapping[int, float] | None = None,
    ) -> None:
        """Add the constraint `low <= sum(factor * variable) <= high`.

        Args:
            terms: maps each representative of an unknown to its factor.
            extra: maps further columns to their factors.
        """
        row = {self.columns[root]: factor for root, factor in terms.items()}
        for column, factor in (extra or {}).items():
            row[column] = row.get(column, 0.0) + factor
        self.rows.append((row, low, high))

    def solve(self, search: str) -> tuple[np.ndarray, float] | None:
        """Return the values of all columns and the cost; None if no solution was found within the limits.

        Args:
            search: key of `MOST_NODES`, which limits the branches that are searched.
        """
        options = {"time_limit": LONGEST_S, "node_limit": MOST_NODES[search]}
        result = milp(
            self.costs,
            integrality=self.whole,
            bounds=Bounds(self.lows, self.highs),
            constraints=self._list_limits(),
            options={**options, "mip_rel_gap": 0.02},
        )
        return (result.x, float(result.fun)) if result.x is not None else None

    def is_infeasible(self) -> bool:
        """Return whether no values satisfy all constraints, even without integrality."""
        nothing = np.zeros(len(self.costs))
        bounds = Bounds(self.lows, self.highs)
        result = milp(nothing, bounds=bounds, constraints=self._list_limits())
        return bool(result.status == INFEASIBLE)

    def _list_limits(self) -> LinearConstraint | None:
        counts = np.array([len(row) for row, _, _ in self.rows], int)
        rows = np.repeat(np.arange(len(self.rows)), counts)
        columns = np.array([column for row, _, _ in self.rows for column in row], int)
        factors = np.array([x for row, _, _ in self.rows for x in row.values()], float)
        matrix = csr_array((factors, (rows, columns)), shape=(len(self.rows), len(self.costs)))
        lows, highs = ([x[end] for x in self.rows] for end in (1, 2))
        return LinearConstraint(matrix, lows, highs) if self.rows else None


def _add_unknowns(program: _Program, problem: Problem) -> list[int]:
    problem.system.equations = problem.system.reduced()
    roots = {problem.system.find(x) for x in problem.system.keys.values()} - {ZERO}
    widest = {problem.system.find(x) for x in problem.eps.values()}
    for root in roots:
        bound = 4 * WIDEST if root in widest else 2 * WIDEST
        program.columns[root] = program.add(-bound, bound, whole=True)
    return [ZERO, *roots]


def _add_fp32_modules(program: _Program, problem: Problem, fp32_flops: float) -> dict[str, int]:
    """Add a 0/1 variable with a price for each module that could stay in fp32; map paths to their
    columns.

    Args:
        fp32_flops: share of the matmul FLOPs of which a module must do less.
    """
    prices = Prices()
    paths = {path for limit in problem.limits for path in limit.interiors}
    paths = {path for path in paths if problem.facts.flops.get(path, 0.0) < fp32_flops}
    return {
        path: program.add(
            0,
            1,
            cost=prices.fp32_module + prices.fp32_flops * problem.facts.flops.get(path, 0.0),
            whole=True,
        )
        for path in sorted(paths)
    }


def _add_limits(
    program: _Program, problem: Problem, hard_top_bits: float, lifts: Mapping[str, int]
) -> None:
    """Add the constraints that `log2(amax) + scale exponent` stays below each dtype's maximum and headroom.

    Tensors share a row if they share an exponent, a dtype and the modules whose move to fp32 lifts the
    constraint. The largest of them decides; of tensors that aren't in 16 bits the smallest must not vanish.

    Args:
        hard_top_bits: headroom in bits that every 16-bit value must keep.
        lifts: maps modules that may stay in fp32 to their columns.
    """
    largest: dict[tuple[int, torch.dtype, tuple[str, ...]], float] = {}
    least: dict[int, float] = {}
    for limit in problem.limits:
        if limit.range.amax == 0:
            continue
        root = problem.system.find(limit.unknown)
        key = root, limit.dtype, limit.interiors if lifts else ()
        largest[key] = max(largest.get(key, 0.0), limit.range.amax)
        if root != ZERO and not _is_half(limit.dtype):
            rms = limit.range.rms or limit.range.amax  # squares of tiny values are 0
            least[root] = min(least.get(root, math.inf), rms)
    for (root, dtype, interiors), amax in largest.items():
        spare = hard_top_bits if _is_half(dtype) else 0.0
        top = math.log2(_largest(dtype)) - spare - log2_of(amax)
        lifted = {lifts[path]: -4.0 * WIDEST for path in interiors if path in lifts}
        if root != ZERO or top < 0:
            high = math.floor(top) if math.isfinite(top) else top
            program.demand({root: 1.0}, high=high, extra=lifted)
    for root, rms in least.items():
        program.demand({root: 1.0}, low=math.ceil(-100 - min(log2_of(rms), 0.0)))


def _count_copies(problem: Problem, unknowns: Iterable[int]) -> Counter[int]:
    """Count the unknowns of similar modules that `merge_alike` merged into each representative.

    The price of a representative is multiplied by that number.
    """
    apart = problem.apart or problem.system
    pairs = {(problem.system.find(x), apart.find(x)) for x in unknowns}
    return Counter(root for root, _ in pairs)


def _price_folds(program: _Program, problem: Problem) -> None:
    """Add prices for folds, by bit and higher beyond 3 and 6 bits, and for each explicit multiply."""
    prices, weights = Prices(), dict[int, float]()
    for limit in problem.limits:
        root = problem.system.find(limit.unknown)
        if limit.weight and root != ZERO:
            weights[root] = weights.get(root, 0.0) + limit.weight
    for root, weight in weights.items():
        for free_bits, price in (
            (0.0, prices.fold),
            (3.0, prices.fold_beyond_3),
            (6.0, prices.fold_beyond_6),
        ):
            _price_beyond(program, root, -free_bits, free_bits, price * weight)
    free = {
        problem.system.find(problem.multiplies[path])
        for path in problem.widened & problem.multiplies.keys()
    }
    for unknown, count in _count_copies(problem, problem.multiplies.values()).items():
        if unknown == ZERO:
            continue
        _price_beyond(program, unknown, 0.0, 0.0, prices.fold * count)
        if unknown in free:
            continue
        used = program.add(0, 1, cost=prices.multiply * count, whole=True)
        program.demand({unknown: 1.0}, high=0, extra={used: -WIDEST_MULTIPLY})
        program.demand({unknown: 1.0}, low=0, extra={used: WIDEST_MULTIPLY})


def _price_beyond(program: _Program, root: int, low: float, high: float, price: float) -> None:
    """Add a price for each bit by which a scale exponent is below `low` or above `high`.

    Args:
        root: representative of the unknown.
    """
    if math.isfinite(high):
        beyond = program.add(0, math.inf, cost=price)
        program.demand({root: 1.0}, high=high, extra={beyond: -1.0})
    if math.isfinite(low):
        beyond = program.add(0, math.inf, cost=price)
        program.demand({root: 1.0}, low=low, extra={beyond: 1.0})


def _price_sizes(program: _Program, problem: Problem) -> None:
    """Add prices for 16-bit tensors with little headroom, and for those whose typical size is too small
    for fp16.
    """
    prices, tops, lows = Prices(), dict[int, float](), dict[int, float]()
    for limit in problem.limits:
        root = problem.system.find(limit.unknown)
        if root == ZERO or not _is_half(limit.dtype) or limit.range.rms == 0:
            continue
        tops[root] = max(tops.get(root, -math.inf), _round_size(limit.range.amax))
        if limit.weight in (0.0, 1.0):
            lows[root] = min(lows.get(root, math.inf), _round_size(limit.range.rms))
    counts = _count_copies(problem, (limit.unknown for limit in problem.limits))
    for root, size in tops.items():
        top = 16 - FREE_BITS - size
        _price_beyond(program, root, -math.inf, top, prices.top * counts[root])
    for root, size in lows.items():
        low, lowest = prices.low * counts[root], prices.lowest * counts[root]
        _price_beyond(program, root, LOW_BITS - size, math.inf, low)
        _price_beyond(program, root, LOWEST_BITS - size, math.inf, lowest)


def _round_size(size: float) -> float:
    """Return the log2 of a magnitude, rounded so that rounding errors of sums can't change the solver's
    choice.
    """
    return round(SIZE_STEPS * log2_of(size)) / SIZE_STEPS


def _is_half(dtype: torch.dtype) -> bool:
    return dtype == torch.float16


@functools.cache
def _largest(dtype: torch.dtype) -> float:
    found = find_format(dtype)
    return found.largest if found else math.inf

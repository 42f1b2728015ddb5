"""Bounds hold for every input that can be found, and a wrong rule does not go unseen."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import stopdown
from models.bound_ascent import Bounded, bound_example, bound_one, climb, draw_inputs, run_in_fp16
from models.rescaling_models import EXAMPLES
from stopdown.operations import find_operation, read_operations
from stopdown.scaling.bounds import evaluation, product_rules, rules, singular_values, values
from stopdown.scaling.bounds import propagation as bounds_module
from stopdown.scaling.bounds.affine_rows import AffineRow
from stopdown.scaling.bounds.evaluation import evaluate
from stopdown.scaling.bounds.intervals import Interval, make_interval
from stopdown.scaling.bounds.known_values import BoundedOperation
from stopdown.scaling.bounds.propagation import RULES
from stopdown.scaling.bounds.row_sums import WEIGHT_FLOOR, is_exact_in_fp16
from stopdown.scaling.bounds.values import (
    Bound,
    concatenate,
    inflate,
    join,
    make_bound,
    norm_over,
    reshape,
    take,
)
from stopdown.scaling.exponents.problem import split_values
from stopdown.scaling.graph.nodes import is_kind

SAMPLE = ("CogVideoX sinusoidal", "T5 gated", "SD VAE")
EVALUATIONS = 10_000
SHAPES = [((2, 6), (2, 2, 3)), ((2, 2, 3), (2, 6)), ((4, 3), (12,)), ((1, 5, 4), (5, 4)),
          ((2, 3, 4), (6, 4)), ((6,), (3, 2)), ((2, 3, 4), (2, 12))]  # fmt: skip


def search(name: str, evaluations: int, seed: int = 0) -> tuple[list[str], int]:
    """What exceeds a bound of a class, and how many evaluations looked for it."""
    rng, found, done = random.Random(seed), [], 0
    cases = bound_example(name)
    while done < evaluations:
        for case in cases:
            found += climb(case, rng, 5)
            done += 5
    return found, done


@pytest.mark.parametrize("name", SAMPLE)
def test_no_input_exceeds_a_bound(name: str) -> None:
    """Random inputs and gradient ascent stay below every bound, by element and by row."""
    found, done = search(name, 10)
    assert not found
    assert done >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_no_input_exceeds_a_bound_of_any_class(name: str) -> None:
    """Over all classes of the rescale table at least 10,000 evaluations stay below every bound."""
    found, done = search(name, math.ceil(EVALUATIONS / len(EXAMPLES)))
    assert not found
    assert done * len(EXAMPLES) >= EVALUATIONS


@pytest.mark.parametrize(
    "name", ["CogVideoX sinusoidal", "CogVideoX sinusoidal at another size", "T5"]
)
def test_roundings_stay_below_the_bounds(name: str) -> None:
    """What really comes out in fp16, every operation rounded, is below every bound."""
    rng = random.Random(1)
    for case in bound_example(name):
        assert not run_in_fp16(case, draw_inputs(case, rng))


SMALL_PART = 0.75 * 2.0**-13
"""Beside a weight of 1 that is stored at 2**-11, three quarters of the least of fp16: it becomes 2**-13."""


def test_a_small_group_has_the_room_of_its_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel of a depthwise convolution is rounded by what the largest of all channels is stored at.

    Without the room for rounding the result, which is relative to the largest channel too.
    """
    monkeypatch.setattr(bounds_module, "inflate", lambda bound, *_: bound)
    conv = nn.Conv2d(2, 2, 1, groups=2, bias=False)
    conv.weight.data = torch.tensor([1.0, SMALL_PART]).reshape(2, 1, 1, 1)
    x = torch.ones(1, 2, 4, 4)
    case = bound_one(conv, conv, (x,), {})
    (node,) = [x for x in case.list_nodes() if is_kind(x, "convolution")]
    (most,) = case.limits.largest.values()
    found = case.bounds.values[node.name].peak.reshape(-1)
    assert found[1] >= most * 2.0**-13


def test_a_small_head_has_the_room_of_its_whole_weight() -> None:
    """The same of the columns by which a linear reads one of several heads."""
    outer = torch.tensor([[1.0, 0.0], [0.0, SMALL_PART]])
    peak = torch.tensor([0.0, 1.0]).double()
    found = product_rules._sum_heads(outer, torch.eye(2), None, 1.0, peak, 2, WEIGHT_FLOOR)
    assert found[1] >= 2.0**-13


class Single(nn.Module):
    """One operation between an input and an output."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.operation = operation
        self.linear = nn.Linear(8, 8)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.layer = nn.LayerNorm(16)
        self.groups = nn.GroupNorm(2, 4)
        self.table = nn.Embedding(64, 8)

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        maps, heads = x.reshape(1, 4, 4, 4), x.reshape(1, 2, 4, 8)
        made = {
            "linear": lambda: self.linear(x.reshape(8, 8)),
            "conv2d": lambda: self.conv(maps),
            "layer_norm": lambda: self.layer(x.reshape(4, 16)),
            "group_norm": lambda: self.groups(maps),
            "scaled_dot_product_attention": lambda: nn.functional.scaled_dot_product_attention(
                heads * 0, heads, heads
            ),
            "gelu": lambda: nn.functional.gelu(x),
            "silu": lambda: nn.functional.silu(x),
            "softmax": lambda: (x * 100).softmax(-1),
            "add": lambda: x + x.flip(0),
            "mul": lambda: x * x.flip(0),
            "mean": lambda: x.mean(0),
            "sum": lambda: x.sum(0),
            "cat": lambda: torch.cat([x, x * 2]),
            "matmul": lambda: x.reshape(8, 8) @ x.reshape(8, 8).T,
            "embedding": lambda: self.table(input_ids),
            "tanh": lambda: x.tanh(),
            "slice": lambda: self.odd_even(self.layer(x.reshape(4, 16))),
            "avg_pool2d": lambda: nn.functional.avg_pool2d(maps, 2),
        }
        return made[self.operation]() * 1

    @staticmethod
    def odd_even(x: torch.Tensor) -> torch.Tensor:
        return x[:, ::2] * x[:, 1::2]


RULED = ["linear", "conv2d", "layer_norm", "group_norm", "scaled_dot_product_attention", "gelu",
         "silu", "softmax", "add", "mul", "mean", "sum", "cat", "matmul", "embedding", "tanh",
         "avg_pool2d", "slice"]  # fmt: skip


def search_single(operation: str) -> list[str]:
    """What exceeds a bound of a module with one operation."""
    module = Single(operation).eval().requires_grad_(False)
    call = {"x": torch.randn(8, 8), "input_ids": torch.arange(64)}
    case, rng, found = bound_one(module, module, (), call), random.Random(0), []
    for _ in range(12):
        found += climb(case, rng, 4, last=True)
    return found


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("operation", RULED)
def test_a_wrong_rule_is_caught(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No search exceeds a rule's bound, and a rule that promises four fifths is found out by it."""
    assert not search_single(operation)
    row = find_operation(operation)
    assert row is not None
    right = RULES[row.bound]

    def wrong(op: BoundedOperation) -> Bound:
        bound = right(op)
        return Bound(bound.peak * 0.8, bound.norm * 0.8, bound.rows, bound.typical)

    monkeypatch.setitem(RULES, row.bound, wrong)
    assert any(f"({operation}," in line for line in search_single(operation))


@pytest.mark.parametrize(("shape", "target"), SHAPES)
@given(seed=st.integers(0, 2**20))
@settings(max_examples=10, deadline=None)
def test_views_keep_what_is_true(
    shape: tuple[int, ...], target: tuple[int, ...], seed: int
) -> None:
    """A reshaped bound holds for the reshaped value, from any bound that held before."""
    value, bound = draw_bound(shape, seed)
    demand(reshape(bound, shape, target), value.reshape(target))


@given(seed=st.integers(0, 2**20), dim=st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_parts_and_wholes_keep_what_is_true(seed: int, dim: int) -> None:
    """Slices, concatenations and unions of bounded values have the bounds that are computed."""
    shape = (2, 3, 4)
    (first, one), (other, two) = draw_bound(shape, seed), draw_bound(shape, seed + 1)
    whole = list(shape)
    whole[dim] *= 2
    both = concatenate([one, two], [shape, shape], tuple(whole), dim)
    demand(both, torch.cat([first, other], dim))
    kept = list(shape)
    kept[dim] = 1
    demand(take(one, tuple(kept), dim, 1, 2), first.narrow(dim, 1, 1))
    mixed = torch.where(torch.rand(shape) > 0.5, first, other)
    together = join(one, two, shape, shape)
    assert bool((mixed.abs() <= together.peak + 1e-12).all())


def draw_bound(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, Bound]:
    """A value and a bound of it: exact along some dimensions, one number along the others."""
    rng = random.Random(seed)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
    peak, norm = value.abs(), value
    rows = [d for d in range(len(shape)) if rng.random() < 0.5] or [len(shape) - 1]
    for dim in range(len(shape)):
        peak = peak.amax(dim, keepdim=True) if rng.random() < 0.5 else peak
    norm = norm.square()
    for dim in rows:
        norm = norm.sum(dim, keepdim=True)
    for dim in range(len(shape)):
        norm = norm.amax(dim, keepdim=True) if rng.random() < 0.5 else norm
    return value, make_bound(peak, shape, typical=1.0, norm=norm.sqrt(), rows=rows)


def demand(bound: Bound, value: torch.Tensor) -> None:
    """Fail when a value exceeds a bound, by element or by row, or by any part of a row."""
    shape = tuple(value.shape)
    assert bool((value.abs() <= bound.peak * (1 + 1e-12)).all())
    for dims in ([d] for d in range(len(shape))):
        norm = value.square().sum(dims, keepdim=True).sqrt()
        assert bool((norm <= norm_over(bound, shape, dims) * (1 + 1e-12)).all())


def bound_module(module: nn.Module, *args: torch.Tensor) -> Bounded:
    """A module called with the given arguments, with its bounds."""
    return bound_one(module.eval().requires_grad_(False), module, args, {})


def test_a_mask_of_whole_numbers_is_bounded() -> None:
    """What is computed from a mask of zeros and ones has a bound, in whatever format it comes."""

    class Model(nn.Module):
        def forward(self, attention_mask: torch.Tensor) -> torch.Tensor:
            return (1 - attention_mask.half()) * -10000.0

    model = Model()
    for mask in (torch.ones(2, 4).long(), torch.ones(2, 4).bool()):
        case = bound_one(model, model, (), {"attention_mask": mask})
        (bound,) = [x for n, x in case.bounds.values.items() if n == "mul"]
        assert bound is not None
        assert 10000 <= bound.largest <= 20200


LOWEST = float(torch.finfo(torch.float16).min)


@pytest.mark.parametrize("number", [6e4, -65504.0, 2.0**18, -(2.0**18)])
@pytest.mark.parametrize("way", ["times", "plus"])
def test_a_large_number_is_no_sentinel(way: str, number: float) -> None:
    """A value that the code multiplies by a large number, or adds it to, gets as large."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * number if way == "times" else x + number

    case = bound_module(Model(), torch.randn(2, 4).half())
    (bound,) = [x for n, x in case.bounds.values.items() if n in ("mul", "add")]
    assert bound is not None
    assert bound.largest >= abs(number)


@pytest.mark.parametrize("way", ["times", "fill", "where"])
def test_a_sentinel_of_a_mask_bounds_nothing(way: str) -> None:
    """What a mask hides values with counts as 0, whether it fills or multiplies the mask."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            mask = attention_mask[:, None].to(x.dtype)
            if way == "times":
                return x + (1.0 - mask) * LOWEST
            chosen = mask.bool() if way == "fill" else ~mask.bool()
            return (
                x.masked_fill(chosen, LOWEST) if way == "fill" else torch.where(chosen, x, LOWEST)
            )

    call = {"x": torch.randn(2, 1, 4).half(), "attention_mask": torch.tensor([[1, 1, 1, 0]] * 2)}
    case = bound_one(Model(), Model(), (), call)
    assert all(x is not None and x.largest < 1000 for x in case.bounds.values.values())


class Joined(nn.Module):
    """Joins two values without elements, as an encoder of few frames does with what it kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        empty = torch.cat([2 * x[:, :0], 3 * x[:, :0]], dim=1)
        return torch.cat([empty.reshape(2, 0, 2).flatten(1), 2 * x], dim=1)


def test_values_without_elements_are_joined() -> None:
    """What has no elements has a bound of 0, and so none is missing."""
    case = bound_module(Joined(), torch.randn(2, 4))
    found = [x.largest for x in case.bounds.values.values() if x is not None]
    assert len(found) == len(case.bounds.values)
    assert found[-1] > min(found) == 0


@pytest.mark.parametrize("signed", [False, True])
def test_a_mean_over_a_mask_is_bounded(signed: bool) -> None:
    """A mean of masked values is no larger than the largest; with weights of any sign it may be."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            mask = attention_mask[:, :, None].float()
            mask = mask - 0.5 if signed else mask
            return ((x * mask).sum(1) / mask.sum(1)).half() * 1

    model = Model()
    call = {"x": torch.randn(1, 6, 4), "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}
    case = bound_one(model, model, (), call)
    bound = case.bounds.values[next(n for n in case.bounds.values if n.startswith("div"))]
    if signed:
        assert bound is None
    else:
        assert bound is not None
        assert 64 <= bound.largest <= 64.1
        assert not climb(case, random.Random(0), 5)


def test_a_quotient_by_what_is_clamped_is_bounded() -> None:
    """What is divided by something that is kept above a number is bounded by that number."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.sum(1, keepdim=True).clamp(min=0.25) * 1

    case = bound_module(Model(), torch.randn(2, 4))
    bound = case.bounds.values[next(n for n in case.bounds.values if n.startswith("div"))]
    assert bound is not None
    assert 256 <= bound.largest <= 257
    found, rng = [], random.Random(0)
    for _ in range(10):
        found += climb(case, rng, 5)
    assert not found


@pytest.mark.parametrize(("least", "most"), [(8.0, 16.0), (-16.0, -8.0), (-8.0, 16.0), (None, 8.0)])
def test_a_clamp_may_make_values_larger(least: float | None, most: float) -> None:
    """Values at most 1 are 8 behind a clamp that does not let smaller ones through."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh().clamp(least, most) * 1

    x = torch.zeros(2, 4)
    case = bound_module(Model(), x)
    bound = case.bounds.values[next(n for n in case.bounds.values if n.startswith("mul"))]
    assert bound is not None
    assert float(Model()(x).abs().max()) <= bound.largest


FUNCTIONS = [
    entry.name
    for entry in read_operations().values()
    if entry.kind == "pointwise" and entry.bound in ("same", "shrink", "saturate")
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_stay_below_their_bounds(name: str) -> None:
    """The rule and the Lipschitz constant that the table gives a function hold on a fine grid."""
    function = getattr(torch, name, None) or getattr(functional, name)
    for size in (0.125, 0.5, 2.0, 16.0):
        x = torch.linspace(-size, size, 4097, dtype=torch.float64)
        made, bound = function(x), values.uniform(size, (4097,))
        node = SimpleNamespace(args=(None,))
        op = SimpleNamespace(
            node=node, source=bound, find=lambda _, held=bound: held, shape=(4097,)
        )
        rule = find_operation(name).bound
        most = bound if rule == "same" else getattr(rules, f"bound_{rule}")(op)
        assert float(made.abs().max()) <= float(most.peak.max()) * (1 + 1e-12)
        if (slope := find_operation(name).slope) is not None:
            steepest = float(made.diff().abs().max()) / float(x[1] - x[0])
            assert steepest <= slope * (1 + 1e-9)


def test_a_norm_needs_no_limit_on_its_input() -> None:
    """What a layer norm gives is bounded by its weight, whatever goes in."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, guidance_map: torch.Tensor) -> torch.Tensor:
            return self.norm(guidance_map)

    model = Model().eval().requires_grad_(False)
    case = bound_one(model, model, (), {"guidance_map": torch.randn(2, 16)})
    (bound,) = [x for n, x in case.bounds.values.items() if n.startswith("layer_norm")]
    assert case.bounds.values["tensors_0"] is None
    assert bound is not None
    assert 4.0 <= bound.largest <= 4.02


def test_an_operation_without_a_rule_has_no_bound() -> None:
    """What has no rule has no bound, and the next norm is bounded again."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.lgamma(x)) * 2

    case = bound_module(Model(), torch.rand(2, 8) + 1)
    assert case.bounds.values["lgamma"] is None
    assert "lgamma" not in case.bounds.ranges
    assert case.bounds.ranges["mul"][0].certain


def test_every_timestep_is_computed() -> None:
    """A value that depends on the timestep alone has the bound of its largest over all of them."""

    class Model(nn.Module):
        def forward(self, timestep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sin(timestep.float() * 0.001).to(x.dtype)

    model = Model()
    case = bound_one(model, model, (), {"timestep": torch.tensor([3]), "x": torch.randn(2, 4)})
    (bound,) = [x for n, x in case.bounds.values.items() if n.startswith("mul_")][-1:]
    assert bound is not None
    assert math.sin(1.0) * 64 <= bound.largest <= math.sin(1.0) * 64 * 1.01


def test_the_same_function_of_the_time_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block applies SiLU to the same embedding: it is computed once, and once for another one."""

    class Model(nn.Module):
        def forward(self, timestep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            emb = timestep.float()[:, None] * torch.tensor([0.001, 0.01])
            for _ in range(3):
                x = x * nn.functional.silu(emb).to(x.dtype)
            return x * nn.functional.silu(emb + 1.0).to(x.dtype)

    computed: list[str] = []

    def count(node: torch.fx.Node, known: bounds_module.Propagation) -> Any:
        computed.append(node.name)
        return evaluate(node, known)

    monkeypatch.setattr(bounds_module, "evaluate", count)
    call = {"timestep": torch.tensor([3]), "x": torch.randn(1, 2)}
    case = bound_one(Model(), Model(), (), call)
    silus = [name for name in computed if name.startswith("silu")]
    assert len(silus) == 2
    scales = [
        x for name, x in case.bounds.values.items() if name.startswith("mul_") and x is not None
    ]
    assert scales[-1].largest > 64


def test_two_timesteps_are_not_taken_for_one() -> None:
    """A difference of two timesteps is bounded for every pair, not for equal ones alone."""

    class Model(nn.Module):
        def forward(
            self, timestep: torch.Tensor, timestep_r: torch.Tensor, x: torch.Tensor
        ) -> torch.Tensor:
            return x * ((timestep - timestep_r).float() * 0.001).to(x.dtype)

    model = Model()
    call = {"timestep": torch.tensor([3]), "timestep_r": torch.tensor([3]), "x": torch.randn(2, 4)}
    case = bound_one(model, model, (), call)
    (bound,) = [x for n, x in case.bounds.values.items() if n.startswith("mul_")][-1:]
    assert bound is None or bound.largest >= 64


def test_values_written_in_place_are_seen_through_every_name() -> None:
    """A bound of a tensor covers what is copied into a part of it later."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 0.01
            y[:, :2] = x[:, :2] * 3
            return y + 0

    case = bound_module(Model(), torch.randn(2, 4))
    assert not climb(case, random.Random(0), 5)
    assert case.bounds.ranges["mul"][0].amax >= 3 * 64


def test_heads_are_bounded_as_one_map() -> None:
    """An output after attention is bounded by values and output together, tighter than in turn."""
    case = bound_example("CogVideoX sinusoidal")[0]
    after = [n for n in case.list_nodes() if n.name.startswith("dropout")]
    by_name = {n.name: n for n in case.list_nodes()}
    linear = next(by_name[x.args[0].name] for x in after if "to_out" in str(x.meta))
    bound, stated = case.bounds.values[linear.name], case.bounds.ranges[linear.name][0]
    assert bound is not None
    assert bound.largest < 0.85 * stated.amax


class Modulated(nn.Module):
    """Rows behind a norm, scaled and shifted by what depends on the timestep, read by a linear."""

    def __init__(self, shifted: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.scale, self.shift = nn.Linear(4, 16), nn.Linear(4, 16)
        self.linear = nn.Linear(16, 4)
        self.scale.weight.data *= 4
        self.shift.weight.data *= shifted

    def modulate(self, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        waves = torch.sin(timestep[:, None].float() * torch.tensor([0.1, 0.3, 0.7, 1.1]))
        waves = waves.to(self.scale.weight.dtype)
        return 1 + self.scale(waves)[:, None], self.shift(waves)[:, None]

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        scale, shift = self.modulate(timestep)
        text, rest = (self.norm(x) * scale + shift).chunk(2, dim=1)
        return self.linear(torch.cat([rest, text], dim=1))


def search_modulated(shifted: float) -> tuple[float, float]:
    """Bound and largest output of a modulated linear, over all timesteps and the worst rows of each."""
    module = Modulated(shifted).eval().requires_grad_(False)
    call = {"x": torch.randn(1, 4, 16), "timestep": torch.tensor([7])}
    case = bound_one(module, module, (), call)
    steps = torch.arange(1001)
    scale, shift = module.modulate(steps)
    rows = module.linear.weight * scale  # what a norm should give for the largest result
    aimed = (module.linear(shift) - module.linear.bias).sign().mT * (rows - rows.mean(-1, True))
    found = module(aimed.clamp(-64, 64), steps).abs().amax()
    bound = case.bounds.values[case.list_nodes()[-1].name]
    assert bound is not None
    return bound.largest, float(found)


@pytest.mark.parametrize("shifted", [1.0, 64.0])
def test_a_modulated_row_is_bounded_by_its_gain(shifted: float) -> None:
    """A linear behind a modulated norm is bounded channel by channel, within twice the worst."""
    bound, found = search_modulated(shifted)
    assert found < bound < 2 * found


@pytest.mark.parametrize(("part", "shifted"), [("gain", 1.0), ("table", 64.0)])
def test_a_wrong_gain_or_shift_is_caught(
    part: str, shifted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A modulated row of which half the gain or half the shift is forgotten exceeds its bound."""
    right = product_rules.Image

    def wrong(rows: list[AffineRow]) -> Any:
        return right([replace(x, **{part: getattr(x, part) / 2}) for x in rows])

    monkeypatch.setattr(product_rules, "Image", wrong)
    bound, found = search_modulated(shifted)
    assert found > bound


class Cancelling(nn.Module):
    """Two linears of shifts that cancel in the whole sum and not in its first half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.known, self.behind = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        for layer in (self.known, self.behind):
            nn.init.ones_(layer.weight)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        shift = torch.tensor([500.0] * 4 + [-500.0] * 4) * timestep[:, None].sign()
        shift = shift.to(x.dtype)
        return self.behind(self.norm(x) + shift[:, None]) + self.known(shift)[:, None]


def test_parts_of_sums_are_in_the_range() -> None:
    """Where terms cancel, the range of a linear covers what half of them add up to."""
    module = Cancelling().eval().requires_grad_(False)
    call = {"x": torch.randn(1, 2, 8), "timestep": torch.tensor([7])}
    case = bound_one(module, module, (), call)
    linears = [x.name for x in case.list_nodes() if x.name.startswith("linear")]
    bounds = [case.bounds.values[name] for name in linears]
    assert all(bound is not None and bound.largest < 100 for bound in bounds)
    assert all(case.bounds.ranges[name][0].amax >= 2000 for name in linears)


def test_rows_are_not_followed_across_columns() -> None:
    """What unbind takes across the rows of a norm is no such row, and is bounded as before."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x).unbind(-1)[0]) * 1

    case = bound_module(Model(), torch.randn(2, 8, 8))
    found, rng = [], random.Random(0)
    for _ in range(20):
        found += climb(case, rng, 4, last=True)
    assert not found


def test_sizes_of_the_call_are_known_exactly() -> None:
    """A size that fp16 can hold has no error, so a wave of it is as good as a number."""

    class Model(nn.Module):
        def forward(self, original_size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sin(original_size.float() * 3)

    model = Model()
    call = {"original_size": torch.tensor([[1024.0]]), "x": torch.randn(2, 1)}
    case = bound_one(model, model, (), call)
    (bound,) = [x for n, x in case.bounds.values.items() if n == "mul_1"]
    assert bound is not None
    assert bound.largest <= abs(math.sin(3072.0)) * 64 * 1.01


class Lengthened(nn.Module):
    """A linear to more channels behind a norm, whose rows may point anywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.RMSNorm(12), nn.Linear(12, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def search_length() -> tuple[float, float]:
    """Bound and largest norm of a row behind a linear, whose input is its first singular vector."""
    module = Lengthened().eval().requires_grad_(False)
    case = bound_module(module, torch.randn(1, 12))
    bound = case.bounds.values[case.list_nodes()[-1].name]
    assert bound is not None
    aimed = torch.linalg.svd(module.linear.weight).Vh[:1]
    return float(bound.norm), float(module(aimed).norm())


def test_a_row_is_no_longer_than_a_matrix_makes_it() -> None:
    """The norm of a linear's result is bounded by the largest singular value, to 2 %."""
    bound, found = search_length()
    assert found < bound < 1.02 * found


@pytest.mark.parametrize("shape", [(96, 24), (24, 96), (64, 64)])
def test_a_small_weight_has_its_largest_singular_value(shape: tuple[int, int]) -> None:
    """The bound for small matrices is above the singular value, by 0.1 % at most, at any size of values."""
    for size in (1e-30, 1.0, 1e30):
        weight = size * torch.randn(shape, generator=torch.Generator().manual_seed(1))
        exact = float(torch.linalg.matrix_norm(weight.double(), 2))
        assert exact <= singular_values.measure_sigma(weight) <= 1.001 * exact


@pytest.mark.parametrize("shape", [(96, 24), (24, 96), (64, 64)])
def test_a_gram_matrix_gives_the_largest_singular_value(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound for large matrices is above the singular value, by less than 1 %, at any size of values."""
    monkeypatch.setattr(singular_values, "SMALL", 0)
    for size in (1e-30, 1.0, 1e30):
        weight = size * torch.randn(shape, generator=torch.Generator().manual_seed(1))
        exact = float(torch.linalg.matrix_norm(weight.double(), 2))
        assert exact <= singular_values.measure_sigma(weight) <= 1.01 * exact


def test_a_matrix_that_is_taken_apart_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of columns are bounded together: above the singular value, below the root of their number."""
    monkeypatch.setattr(singular_values, "SMALL", 0)
    monkeypatch.setattr(singular_values, "MOST_COLUMNS", 12)
    weight = torch.randn((96, 24), generator=torch.Generator().manual_seed(1))
    exact = float(torch.linalg.matrix_norm(weight.double(), 2))
    assert exact < singular_values.measure_sigma(weight) < 2**0.5 * exact
    aligned = torch.ones((96, 24))  # nothing is lost where both parts point the same way
    assert 48.0 <= singular_values.measure_sigma(aligned) < 48.3


def test_a_wrong_singular_value_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A singular value that is stated a tenth too small gives a bound that a row exceeds."""
    right = product_rules.measure_sigma
    monkeypatch.setattr(product_rules, "measure_sigma", lambda *x: 0.9 * right(*x))
    bound, found = search_length()
    assert found > bound


def apply_linear(
    weight: torch.Tensor, value: Interval, dtype: torch.dtype = torch.float32
) -> Interval:
    """A linear on a value that is known but for an error."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    node = graph.call_function(torch.ops.aten.linear.default, (x, w))
    node.meta["val"] = torch.empty(value.center.shape[1], weight.shape[0], dtype=dtype)
    known: Any = SimpleNamespace(
        held={x: value}, load={w: weight}.get, floor=lambda n: WEIGHT_FLOOR
    )
    made = evaluate(node, known)
    assert isinstance(made, Interval)
    return made


def test_a_value_beyond_fp32_is_not_computed() -> None:
    """What fp32 has no number for is bounded like any other value, not known as Inf."""
    value = make_interval(torch.full((3, 1, 8), 1e20), batched=True)
    assert bool(apply_linear(torch.ones(4, 8), value).center.isfinite().all())
    with pytest.raises(AssertionError):
        apply_linear(torch.full((4, 8), 1e30), value)


def round_weights(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is stated of a linear's errors in fp16, and the largest that rounding its weights can make."""
    value = make_interval(torch.ones(3, 1, weight.shape[1]).double(), batched=True)
    wrong = (weight.half().double() - weight.double()).abs().sum(1)
    return apply_linear(weight, value, torch.float16).radius[0], wrong


def test_weights_that_fp16_holds_have_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a bf16 checkpoint are exact in fp16; the rounding of others needs its room."""
    other = (1 + torch.rand(16, 512, generator=torch.Generator().manual_seed(0))) / 4
    held = other.bfloat16().float()
    stated, wrong = round_weights(other)
    assert bool((wrong <= stated).all())
    exact, none = round_weights(held)
    assert not bool(none.any())
    assert bool((exact < 0.7 * stated).all())
    assert is_exact_in_fp16(held)
    assert is_exact_in_fp16(other.half())
    assert not is_exact_in_fp16(other)
    assert not is_exact_in_fp16(torch.full((2, 2), 1 + 2.0**-11))
    monkeypatch.setattr(evaluation, "is_exact_in_fp16", lambda weight: True)
    monkeypatch.setattr(evaluation, "ROUNDING", {torch.float16: 0.0})
    monkeypatch.setattr(evaluation, "FLOOR", 0.0)
    stated, wrong = round_weights(other)
    assert bool((wrong > stated).any())


class Times(nn.Module):
    """An embedding of the time, as in diffusion transformers."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.constant_(self.first.weight, size)
        nn.init.constant_(self.second.weight, 0.5)

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        waves = torch.sin(timestep[:, None].float() * torch.arange(1, 9))
        return self.second(nn.functional.silu(self.first(waves.to(self.first.weight.dtype))))


@pytest.mark.parametrize(("size", "least"), [(0.5, 2.0**-5), (2.0**-5, 2.0**-11)])
def test_weights_before_a_function_have_less_room_below(size: float, least: float) -> None:
    """A linear of timesteps that a function follows takes large weights to be stored as large ones."""
    module = Times(size).eval().requires_grad_(False)
    case = bound_one(module, module, (), {"timestep": torch.tensor([500])})
    names = {name: node for node, name in case.capture.parameters.items()}
    found = {
        name: case.bounds.ranges[names[name]][0].least_stored
        for name in ("first.weight", "second.weight")
    }
    assert found == {"first.weight": least, "second.weight": 2.0**-11}


def aim_error(linears: list[torch.Tensor]) -> tuple[Interval, torch.Tensor]:
    """What is stated of an error of length 1 behind linears, and the longest that it can become."""
    width = linears[0].shape[1]
    value = Interval(torch.zeros(3, 1, width).double(), torch.ones(1, width).double(), True,
                  length=torch.ones(1, 1).double())  # fmt: skip
    product = linears[0]
    for number, weight in enumerate(linears):
        value = apply_linear(weight, value)
        product = weight @ product if number else product
    return value, product @ torch.linalg.svd(product).Vh[0]


def test_an_error_is_followed_by_its_length() -> None:
    """An error that is aimed stays within its stated length and radius, which do not grow with width."""
    turn = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)))[0]
    stated, found = aim_error([turn.double(), turn.T.double(), turn.double()])
    assert found.norm() <= float(stated.row_error) < 2 * found.norm()  # the rest is rounding
    assert bool((found.abs() <= stated.radius[0]).all())
    assert float(stated.radius.max()) < 2  # element by element: 130


def test_a_wrong_length_of_an_error_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A singular value that is stated a tenth too small gives a length that an error exceeds."""
    right = evaluation.measure_sigma
    monkeypatch.setattr(evaluation, "measure_sigma", lambda x: 0.9 * right(x))
    stated, found = aim_error([2 * torch.eye(8).double()])
    assert found.norm() > float(stated.row_error)


def test_rounding_is_given_room() -> None:
    """A bound is widened by more than half a unit of fp16 in the last place."""
    bound = make_bound(torch.tensor([1.0, 0.0]).double(), (2,), typical=1.0)
    wider = inflate(bound, 2.0**-9, 2.0**-18, (2,))
    assert float(wider.peak[0]) > 1 + 2.0**-10
    assert 0 < float(wider.peak[1]) < 1e-5
    assert float(wider.norm) > float(bound.norm)


class Known(nn.Module):
    """A table of timesteps that is joined to nothing, and a mask that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.time = nn.Linear(8, 8), nn.Linear(8, 8)
        self.linear.weight.data *= 1e6

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        waves = timestep[:, None].float() * torch.exp(-torch.arange(8, dtype=torch.float32))
        table = torch.cat([waves[:, :0], waves.sin()], -1).to(x.dtype)
        return self.linear(x) * torch.ones(8, dtype=torch.bool).reshape(1, 8) + self.time(table)


def test_known_values_may_be_empty_or_boolean() -> None:
    """They are bounded as any other."""
    call = (torch.randn(2, 8), torch.tensor([5, 9]))
    assert stopdown.rescale_(Known(), call, ranges="bound").scaling.bounded


class Pooled(nn.Module):
    """PyTorch's own attention, with a query of its own: one weight is split in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.attention.in_proj_weight.data[16:].mul_(16.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.attention(self.probe, x, x)[0])


def test_parts_of_a_split_weight_bound_their_products() -> None:
    """Every value has a bound, no input exceeds one, and a small part has the room of the whole weight."""
    torch.manual_seed(0)
    case = bound_module(Pooled(), torch.randn(1, 3, 16))
    assert all(x is not None for x in case.bounds.values.values())
    rng = random.Random(0)
    assert [x for _ in range(20) for x in climb(case, rng, 5)] == []
    nodes = {x.name: x for x in case.capture.graph.graph.nodes}
    linears = [x for x in nodes.values() if is_kind(x, "linear")]
    walk = bounds_module.Propagation(
        case.capture, case.tensors.__getitem__, case.limits, {}, frozenset()
    )
    parts = [x.args[1] for x in linears if x.args[1].name not in case.capture.parameters]
    sizes = [float(walk.load(x).abs().max()) for x in parts]
    assert len(parts) == 2
    assert sizes[1] > 8 * sizes[0]
    assert walk.floor(parts[0]) * sizes[0] == pytest.approx(walk.floor(parts[1]) * sizes[1])


class Cut(nn.Module):
    """Keeps as many rows as a picture has places: a product of sizes, which is no value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        height, width = sizes.tolist()
        return self.norm(self.inner(x)[:, : height * width])


def test_a_product_of_sizes_is_no_written_norm() -> None:
    """Bounds with more room for a low weight pass over it; it was a bare KeyError."""
    torch.manual_seed(0)
    case = bound_module(Cut(), torch.randn(1, 8, 4), torch.tensor([2, 3]))
    load, blocks = case.tensors.__getitem__, split_values(case.capture)
    again = bounds_module.bound_call(
        case.capture, load, case.limits, blocks, ["inner.weight"], case.bounds
    )
    assert set(again.ranges) == set(case.bounds.ranges)


def test_a_constant_without_values_has_no_bound() -> None:
    """What a dry run took from another call is fake: nothing is read of it, and nothing is certified."""
    torch.manual_seed(0)
    case = bound_module(Cut(), torch.randn(1, 8, 4), torch.tensor([2, 3]))
    name = next(iter(case.capture.parameters))
    mode = FakeTensorMode()
    constants = {**case.capture.constants, name: mode.from_tensor(torch.ones(8, 4))}
    others = {x: y for x, y in case.capture.parameters.items() if x != name}
    capture = replace(case.capture, parameters=others, constants=constants)
    load, blocks = case.tensors.__getitem__, split_values(capture)
    again = bounds_module.bound_call(capture, load, case.limits, blocks)
    assert name not in again.ranges
    assert len(again.ranges) < len(case.bounds.ranges)


class Grid(nn.Module):
    """Positions of rows and columns, as rotary embeddings make them from the size of a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.arange(x.shape[-1])
        rows, columns = torch.meshgrid(order, order, indexing="ij")
        return x * torch.cos(rows.to(x.dtype)) + x * torch.cos(columns.to(x.dtype))


def test_a_list_of_large_known_values_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids of positions above the limit of elements aren't made, and the output still has its bound."""
    made = []

    def make(center: torch.Tensor, *, batched: bool = False) -> Interval:
        made.append(center.numel())
        return make_interval(center, batched=batched)

    monkeypatch.setattr(evaluation, "make_interval", make)
    bound_module(Grid(), torch.rand(16, 16))
    assert max(made) == 16 * 16
    made.clear()
    monkeypatch.setattr(evaluation, "MOST_ELEMENTS", 100)
    bounds = bound_module(Grid(), torch.rand(16, 16)).bounds.values
    assert max(made) <= 100
    assert bounds["add"] is not None


def test_what_is_collapsed_at_once_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of two bounds, by channel and by row, is what it is entry by entry and then collapsed."""
    monkeypatch.setattr(values, "MOST_ENTRIES", 64)
    drawn, made = torch.Generator().manual_seed(0), set[bool]()
    for _ in range(300):
        shape = tuple(torch.randint(1, 9, (4,), generator=drawn).tolist())
        cuts = torch.randint(0, 2, (2, 4), generator=drawn).tolist()
        pair = [
            torch.rand(
                [n if cut else 1 for n, cut in zip(shape, one, strict=True)], generator=drawn
            )
            for one in cuts
        ]
        right = values.collapse(torch.minimum(*pair), shape)
        assert torch.equal(values._take_smaller(*pair, shape), right)
        made.add(torch.minimum(*pair).numel() > values.MOST_ENTRIES)
    assert made == {True, False}


def test_a_bound_by_row_and_channel_takes_no_room_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and channels that are 2^24 together are bounded without an entry for each pair."""
    largest = list[int]()
    collapse = values.collapse

    def watch(bound: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        largest.append(bound.numel())
        return collapse(bound, shape)

    monkeypatch.setattr(values, "collapse", watch)
    shape = (1 << 14, 1 << 10)
    peak, norm = torch.rand(1, 1 << 10), torch.rand(1 << 14, 1)
    values.make_bound(peak, shape, typical=1.0, norm=norm, rows=(1,))
    assert max(largest) <= values.MOST_ENTRIES

"""One rule for each operation: no input exceeds its bound, and a wrong rule is caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from models.bound_ascent import bound_module, bound_one, climb
from stopdown.operations import find_operation, read_operations
from stopdown.scaling.bounds import rules, values
from stopdown.scaling.bounds.known_values import BoundedOperation
from stopdown.scaling.bounds.propagation import RULES
from stopdown.scaling.bounds.values import Bound


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


class Called(nn.Module):
    """A function of an input, with a few layers that it may call."""

    def __init__(self, function: Callable[[Called, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.norm = function, nn.LayerNorm(8)
        self.norm.weight.data = torch.tensor([100.0, *[1.0] * 6, 0.01])
        self.register_buffer("memory", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x) * 1


def list_exceeding(function: Callable[[Called, torch.Tensor], torch.Tensor]) -> list[float]:
    """By how many times draws exceed the bound of a function's result, by element or by row; none if it
    has no bound.
    """
    drawn = torch.Generator().manual_seed(0)
    case = bound_module(Called(function), torch.randn(4, 8, generator=drawn))
    (last,) = case.capture.graph.graph.output_node().all_input_nodes
    bound, ratios = case.bounds.values[last.name], []
    for i in range(24 if bound is not None else 0):
        x = torch.randn(4, 8, generator=drawn)
        made = Called(function)(64 * (x.sign() if i % 2 else x.clamp(-1, 1))).detach().double()
        length = made.square().sum(tuple(bound.rows), keepdim=True).sqrt()
        ratios += [float((made.abs() / bound.peak).max()), float((length / bound.norm).max())]
    return [x for x in ratios if x > 1 + 1e-6]


def divide_by_root(module: Called, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    return x.div_(torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def average_by_one_mask(module: Called, x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(2, 2, 8)
    mask = (x[:, :1, :1] > -1e9).long()
    return (x * mask).sum(1) / mask.sum(1)


def normalise_smallest(module: Called, x: torch.Tensor) -> torch.Tensor:
    """Normalise rows of which two elements are the smallest number of fp16."""
    small = (x.half() * 2.0**-30) + 2.0**-24 * (torch.arange(8) < 2).half()
    return functional.normalize(small, dim=-1).float()


def divide_by_lost_eps(module: Called, x: torch.Tensor) -> torch.Tensor:
    """Divide by the root of squares that fp16 rounds to 0, and of an eps that it doesn't hold."""
    small = x.half() * 2.0**-19
    return (small * torch.rsqrt((small * small).mean(-1, keepdim=True) + 1e-8)).float()


MISREAD: dict[str, Callable[[Called, torch.Tensor], torch.Tensor]] = {
    "channels in another order": lambda m, x: m.norm(x).index_select(-1, torch.arange(8).flip(0)),
    "a dropout in training": lambda m, x: functional.dropout(x, 0.5, training=True),
    "a subtraction with alpha": lambda m, x: torch.rsub(x, 1.0, alpha=4),
    "a steep leaky ReLU": lambda m, x: functional.leaky_relu(x, 3.0),
    "sequences of several sizes": lambda m, x: nn.utils.rnn.pad_sequence([x[:2] * 0.1, x], True),
    "a padding of a number": lambda m, x: nn.utils.rnn.pad_sequence([x[:2], x], True, 5e3),
    "bits of another format": lambda m, x: x.half().view(torch.int16).view(torch.bfloat16).float(),
    "bits of bf16": lambda m, x: x.half().view(torch.bfloat16).float(),
    "one mask for several": average_by_one_mask,
    "rows of two softmaxes": lambda m, x: torch.where(
        torch.arange(8) % 2 == 0, (x * 9).softmax(-1), (x.roll(1, -1) * 9).softmax(-1)
    ),
    "a quotient in place": divide_by_root,
    "a clamp that lets its lower limit go": lambda m, x: x / (x * x).clamp(min=1e-3, max=1e-6),
    "a norm of subnormals": normalise_smallest,
    "an eps beneath fp16": divide_by_lost_eps,
    "an einsum of one row": lambda m, x: torch.einsum("ij,ij->", x, x[:1]),
}


@pytest.mark.parametrize("way", MISREAD)
def test_an_argument_that_makes_a_result_larger_is_read(way: str) -> None:
    """No draw exceeds the bound, if there is one."""
    assert list_exceeding(MISREAD[way]) == []


@pytest.mark.parametrize("equation", ["ij,jk,kl->il", "ij,kl->kl"])
def test_an_einsum_that_stores_more_has_no_bound(equation: str) -> None:
    """What an einsum stores before its result may overflow fp16 where the result doesn't."""
    count = equation.count(",")

    def multiply(module: Called, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, x[:, :4], *[x[:, :4]] * (count - 1), x[:, :4] * 1e-6)

    case = bound_module(Called(multiply), torch.randn(4, 8))
    assert case.bounds.values["einsum"] is None


def test_a_slice_of_a_cast_is_rounded() -> None:
    """A part of a concatenation that fp16 rounds up is no larger than its bound."""
    x = torch.full((4, 8), 64.0)

    def cut(module: Called, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([x.float().tanh() * 64.04, x.float() * 9.0], 1)
        return joined.half()[:, :8]

    case = bound_module(Called(cut), x.half())
    bound = case.bounds.values[next(n for n in case.bounds.values if n.startswith("slice"))]
    assert bound is not None
    assert float(cut(Called(cut), x).max()) <= bound.largest <= 64.4


def write_in_half(module: Called, x: torch.Tensor) -> torch.Tensor:
    joined = torch.cat([x, x], 1)
    joined[:, :8].mul_(100)
    return joined[:, :4]


def write_transposed(module: Called, x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(8, 8)
    made.t().copy_(torch.cat([module.norm(x), module.norm(x)]))
    return made


def write_overlapping(module: Called, x: torch.Tensor) -> torch.Tensor:
    made = torch.cat([x, x]) * 0.01
    first, second = made[0:4], made[2:6]
    first.mul_(torch.tensor([1.0, 1.0, 1000.0, 1000.0])[:, None])
    return second


def write_beside(module: Called, x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(4, 10)
    first, second = made[:, :8], made[:, 2:]
    second.copy_(module.norm(x))
    return first


def write_in_divisor(module: Called, x: torch.Tensor) -> torch.Tensor:
    below = x.clamp(min=1.0)
    below[:, :4].mul_(0.001)
    return x / below


def write_in_softmax(module: Called, x: torch.Tensor) -> torch.Tensor:
    weights = x.softmax(-1)
    weights[:, :4].mul_(100.0)
    return weights @ x.reshape(8, 4)


def write_in_norm(module: Called, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    x[:, :4].mul_(100)
    return x * factor


def write_in_masked_sum(module: Called, x: torch.Tensor) -> torch.Tensor:
    mask = (x[:, :1] > -1e9).long()
    total = (x * mask).sum(0, keepdim=True)
    total[:, :4].mul_(100)
    return total / mask.sum(0, keepdim=True)


def write_in_buffer(module: Called, x: torch.Tensor) -> torch.Tensor:
    module.memory[:, :4] = x[:, :4]
    return module.memory


WRITES = (
    write_in_half, write_transposed, write_overlapping, write_beside, write_in_divisor,
    write_in_softmax, write_in_norm, write_in_masked_sum, write_in_buffer,
)  # fmt: skip


@pytest.mark.parametrize("function", WRITES)
def test_what_was_written_in_place_is_read(
    function: Callable[[Called, torch.Tensor], torch.Tensor],
) -> None:
    """No rule takes a value for what an operation computed, after a view of it was written in place."""
    assert list_exceeding(function) == []

"""Each rule of the table, on arguments that torch's own tests use: exponents exact, bounds sound."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from models.operation_samples import Sample, draw_integer_samples, draw_samples, list_known
from stopdown import operations
from stopdown.operations import read_operations
from stopdown.scaling.bounds.known_values import InputLimits
from stopdown.scaling.bounds.propagation import bound_call
from stopdown.scaling.exponents.exponent_rules import PlacedOperation, state_equations
from stopdown.scaling.exponents.linear_system import ZERO, System
from stopdown.scaling.graph.nodes import is_float, is_kind, operation

DRAWS = 6
RANDOM = ("random", "bernoulli", "multinomial", "dropout", "feature_dropout", "normal")
NAMES = [name for name in list_known() if name not in RANDOM]
BOUNDED = [name for name in NAMES if read_operations()[name].bound]


@dataclass
class Around:
    """What the exponent rules ask, with every input of the call free to scale."""

    system: System = field(default_factory=System)
    eps: dict[Node, float] = field(default_factory=dict)

    def unknown(self, node: Node, block: int | None, user: Node) -> int:
        return self.system.unknown(node)

    def eps_unknown(self, node: Node, value: float | None) -> int | None:
        if not value:
            return None
        self.eps[node] = value
        return self.system.unknown(("eps", node))

    def clamp_unknown(self, node: Node, value: float) -> int | None:
        return self.eps_unknown(node, value)

    def keeps_clamp(self, node: Node) -> bool:
        return False

    def keep_from_zero(self, node: Node) -> None: ...


def solve(system: System, rng: random.Random) -> dict[int, int] | None:
    """Exponents that fulfil the equations, drawn for what is free; None where they are no integers."""
    rows, pivots = [{k: Fraction(v) for k, v in row.items()} for row in system.reduced()], {}
    while rows:
        row = {k: v for k, v in rows.pop().items() if v}
        if not row:
            continue
        first = next(iter(row))
        pivots[first] = {k: -v / row[first] for k, v in row.items() if k != first}
        for other in (*rows, *pivots.values()):
            factor = other.pop(first, Fraction(0))
            for k, v in pivots[first].items():
                other[k] = other.get(k, Fraction(0)) + factor * v
    roots = {system.find(x) for x in system.keys.values()} - {ZERO}
    values = {x: Fraction(rng.randrange(-2, 3) * 2) for x in roots if x not in pivots}
    for unknown, known in pivots.items():
        values[unknown] = sum((values[k] * v for k, v in known.items()), Fraction(0))
    whole = all(x.denominator == 1 for x in values.values())
    return {ZERO: 0, **{k: int(v) for k, v in values.items()}} if whole else None


class Run(Interpreter):
    """Runs a sample's graph, with inputs and eps scaled, and keeps every value."""

    def __init__(self, sample: Sample, eps: Mapping[Node, tuple[float, float]]) -> None:
        super().__init__(sample.graph, garbage_collect_values=False)
        self.eps, self.seen = eps, dict[Node, Any]()

    def run_node(self, n: Node) -> Any:
        if n in self.eps:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            held, scaled = self.eps[n]
            args, kwargs = pytree.tree_map(
                lambda x: scaled if type(x) is float and x == held else x, (args, kwargs)
            )
            named = [x.name for x in n.target._schema.arguments]  # type: ignore[union-attr]
            if "eps" in named[len(args) :]:  # it is left at its default
                kwargs = {**kwargs, "eps": scaled}
            result = n.target(*args, **kwargs)  # type: ignore[operator]
        else:
            result = super().run_node(n)
        self.seen[n] = pytree.tree_map_only(torch.Tensor, torch.clone, result)
        return result


def run(sample: Sample, tensors: list[torch.Tensor], eps: Any = ()) -> dict[Node, Any]:
    """What each node of a graph gives, with the same random numbers each time."""
    torch.manual_seed(0)
    made = Run(sample, dict(eps))
    with torch.no_grad():
        made.run(*(x.clone() for x in tensors))
    return made.seen


def run_scaled(
    sample: Sample, exponents: Mapping[Any, int], eps: Mapping[Node, float]
) -> dict[Node, Any]:
    """The graph on inputs, and with eps, that are multiplied by powers of two."""
    inputs = [node for node in sample.graph.graph.nodes if node.op == "placeholder"]
    given = [
        torch.ldexp(x, torch.tensor(exponents.get(node, 0))) if is_float(node) else x
        for node, x in zip(inputs, sample.tensors, strict=True)
    ]
    changed = {n: (x, x * 2.0 ** exponents["eps", n]) for n, x in eps.items()}
    return run(sample, given, changed)


def find_inexact(sample: Sample, seed: int) -> Iterator[str]:
    """The values that are not what the equations of their operations promise, to the last bit."""
    rng, around = random.Random(seed), Around()
    nodes = list(sample.graph.graph.nodes)
    for node in nodes:
        if is_float(node):
            around.system.unknown(node)  # also where no rule asks for it
        if node.op == "call_function":
            state_equations(PlacedOperation(node, None, around))  # type: ignore[arg-type]
    plain = run(sample, list(sample.tensors))
    for _ in range(DRAWS):
        found = solve(around.system, rng)
        if found is None:
            continue
        exponents = {k: found[around.system.find(x)] for k, x in around.system.keys.items()}
        scaled = run_scaled(sample, exponents, around.eps)
        for node in nodes:
            if node.op != "call_function" or not _is_value(node, plain[node]):
                continue
            wanted = plain[node]
            if is_float(node):
                wanted = torch.ldexp(wanted, torch.tensor(exponents.get(node, 0)))
            if not torch.equal(_normal(wanted), _normal(scaled[node])):
                yield f"{operation(node)}: {[exponents.get(x) for x in node.all_input_nodes]}"


def _normal(value: torch.Tensor) -> torch.Tensor:
    """Values without NaN, and without what is subnormal: such a value has fewer bits the smaller it is."""
    value = value.nan_to_num(7.0)
    if not value.is_floating_point():
        return value
    return value.where(value.abs() >= torch.finfo(value.dtype).tiny, 0.0)


def _is_value(node: Node, value: Any) -> bool:
    made = node.op == "call_function" and not is_kind(node, "blank")
    return made and isinstance(value, torch.Tensor)


def find_exceeded(sample: Sample) -> Iterator[str]:
    """The values that are larger than the bound that their operation's rule gives."""
    capture = sample.capture
    sizes = {
        name: float(x.abs().max()) if x.numel() else 0.0
        for name, x in zip(capture.inputs, sample.tensors, strict=True)
        if x.is_floating_point()
    }
    bounds = bound_call(capture, {}.__getitem__, InputLimits(sizes), {})
    seen = run(sample, list(sample.tensors))
    for node, value in seen.items():
        bound = bounds.values.get(node.name)
        if (
            bound is None
            or node.op != "call_function"
            or is_kind(node, "blank")
            or not value.numel()
        ):
            continue
        size = value.abs().double()
        if bool((size > bound.peak * (1 + 1e-6)).any()):
            yield f"{operation(node)}: {float(size.max())} above {bound.largest}"
        norm = size.square().sum(tuple(bound.rows), keepdim=True).sqrt() if bound.rows else size
        if bool((norm > bound.norm * (1 + 1e-6)).any()):
            yield f"{operation(node)}: a row of {float(norm.max())} above {float(bound.norm.max())}"


@functools.cache
def read_samples(name: str, most: int) -> tuple[Sample, ...]:
    return tuple(draw_samples(name, most))


@pytest.mark.parametrize("name", NAMES)
def test_exponents_are_exact(name: str) -> None:
    """Inputs times powers of two that the rule allows give the result times the power it promises."""
    assert [x for sample in read_samples(name, 1) for x in find_inexact(sample, 0)] == []


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_are_sound(name: str) -> None:
    """No value exceeds the bound of its operation, by element or by row."""
    assert [x for sample in read_samples(name, 1) for x in find_exceeded(sample)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_integers_keep_their_scale(name: str) -> None:
    """With integers or booleans in place of floats, which nothing scales, results are exact as well."""
    drawn = draw_integer_samples(name, 3)
    assert [x for sample in drawn for x in find_inexact(sample, 0)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_more_arguments(name: str) -> None:
    """The same with up to twenty kinds of arguments, and powers drawn six times for each."""
    for seed, sample in enumerate(read_samples(name, 20)):
        assert [*find_inexact(sample, seed), *find_exceeded(sample)] == []


@pytest.mark.parametrize(
    ("name", "cell"), [("gelu", "same"), ("mul", "same"), ("sqrt", "halves 4"), ("exp", "source")]
)
def test_a_wrong_exponent_is_found(name: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that promises another power is found out by the first samples."""
    wrong = {**read_operations(), name: replace(read_operations()[name], exponent=cell)}
    monkeypatch.setattr(operations, "read_operations", lambda: wrong)
    assert [x for sample in read_samples(name, 3) for x in find_inexact(sample, 0)]


@pytest.mark.parametrize(("name", "cell"), [("exp", "same"), ("mul", "add")])
def test_a_wrong_bound_is_found(name: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule of another operation promises less than it gives."""
    wrong = {**read_operations(), name: replace(read_operations()[name], bound=cell)}
    monkeypatch.setattr(operations, "read_operations", lambda: wrong)
    assert [x for sample in read_samples(name, 3) for x in find_exceeded(sample)]

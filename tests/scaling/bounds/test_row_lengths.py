"""Lengths of rows are computed where a bound rests on them, and no bound is another for that."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from models.bound_ascent import Bounded, bound_example, bound_one
from models.rescaling_models import EXAMPLES
from stopdown.scaling.bounds import product_rules, propagation
from stopdown.scaling.bounds.row_lengths import find_read_lengths
from stopdown.scaling.graph.capture import module_path
from stopdown.scaling.graph.nodes import is_kind

SAMPLE = ("CogVideoX sinusoidal", "T5 gated", "SD VAE")


class Block(nn.Module):
    """Attention with normed queries, and what its residual stream adds up is normed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.value, self.out, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        split = inner.shape[0], -1, 2, 4
        query = self.norm(self.query(inner).view(split)).transpose(1, 2)
        value = self.value(inner).view(split).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, query, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        made: torch.Tensor = self.head(self.last(x))
        return made


def bound_block() -> Bounded:
    module = Block()
    return bound_one(module, module, (torch.randn(2, 3, 8),), {})


def test_lengths_that_a_norm_forgets_are_not_read() -> None:
    """A value is multiplied again and a head is returned; a query and the stream are normed."""
    graph = bound_block().capture.graph.graph
    read = {module_path(x) for x in find_read_lengths(graph) if is_kind(x, "linear")}
    assert read == {"value", "head"}


def test_singular_values_are_those_of_lengths_that_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four weights two are decomposed."""
    right, measured = product_rules._bound_length, list[str]()

    def note(op: product_rules.BoundedOperation, *given: object) -> torch.Tensor:
        measured.append(module_path(op.node))
        return right(op, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(product_rules, "_bound_length", note)
    bound_block()
    assert measured == ["value", "head"]


@pytest.mark.parametrize("name", [x if x in SAMPLE[:1] else pytest.param(x, marks=pytest.mark.thorough) for x in EXAMPLES])  # fmt: skip  # noqa: E501
def test_no_bound_is_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every length computed all values have the same bounds, to a rounding of the largest peaks."""
    found = [x.bounds.ranges for x in bound_example(name)]
    monkeypatch.setattr(propagation, "find_read_lengths", lambda graph: frozenset(graph.nodes))
    for one, other in zip(found, (x.bounds.ranges for x in bound_example(name)), strict=True):
        assert one.keys() == other.keys()
        for value, parts in one.items():
            assert [x.amax for x in parts] == [x.amax for x in other[value]], value

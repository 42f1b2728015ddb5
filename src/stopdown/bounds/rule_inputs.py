"""What a rule of a bound is given: one operation, its arguments, and what is known of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from stopdown.bounds.values import Bound, Shape, broadcast, make_bound, uniform
from stopdown.graph.nodes import arguments, shape_of
from stopdown.number_formats import NEAR_FP16_END

if TYPE_CHECKING:
    from stopdown.bounds.propagation import Propagation


class UnboundedError(Exception):
    """An argument has no bound, or the rule has none for such arguments."""


@dataclass
class Operands:
    """One operation whose result is to be bounded.

    Attributes:
        known: what is known of the values before it.
        parts: what a rule knows of the parts of the result's sums, where the bound of the result is
            none of theirs; it broadcasts to the result.
    """

    node: Node
    known: Propagation
    parts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.given: dict[str, Any] = arguments(self.node)
        self.shape: Shape = shape_of(self.node)
        self.before: Shape = shape_of(self.node.args[0]) if self.node.args else ()

    @functools.cached_property
    def source(self) -> Bound:
        """The bound of the first argument, whose shape is `before`."""
        return self.bound(self.node.args[0])

    def find(self, value: Any) -> Bound | None:
        """The bound of an argument, if there is one: of a number its magnitude, else what is known."""
        if isinstance(value, (int, float)):
            size = 0.0 if abs(value) >= NEAR_FP16_END else abs(float(value))
            return uniform(size, ())
        return self.known.bound(value) if isinstance(value, Node) else None

    def bound(self, value: Any) -> Bound:
        """The bound of an argument.

        Raises:
            UnboundedError: there is none.
        """
        found = self.find(value)
        if found is None:
            raise UnboundedError
        return found

    def spread(self, value: Any) -> Bound:
        """As `bound`, broadcast to the result's shape."""
        return broadcast(self.bound(value), shape_of(value), self.shape)

    def load(self, name: str) -> torch.Tensor | None:
        """The stored values of the parameter that an argument is; None when it is none."""
        given = self.given.get(name)
        return self.known.load(given) if isinstance(given, Node) else None

    def made(self, peak: torch.Tensor, typical: float, **more: Any) -> Bound:
        """A bound of the result."""
        return make_bound(peak, self.shape, typical=typical, **more)


Rule = Callable[[Operands], Bound]
"""Raises `UnboundedError` where the result has no bound."""

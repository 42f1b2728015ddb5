"""One call that a program makes: the object, the method, and the name that it has in records."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DIFFUSERS_KEEPS = (
    "*timestep*",
    "*sigma*",
    "*guidance*",
    "*rotary*",
    "*freqs*",
    "*_ids*",
    "*size*",
    "*coords*",
)
"""Arguments that keep their dtype at a boundary: rounding them to 16 bits moves or merges them."""

GENERAL_KEEPS = (*DIFFUSERS_KEEPS, "t", "ts", "times")
"""The same if the family is unknown."""


@dataclass(frozen=True)
class Callee:
    """One call that a program makes.

    Attributes:
        name: of the call, in records: `transformer`, `vae.decode`.
        owner: the object whose method is called.
        method: `forward`, `encode`, `decode`…
        stage: `encode`, `denoise` or `decode`; `part` of a call of a part alone; `call` where nothing is
            known of it.
        keeps: patterns of names of arguments that keep their dtype at a boundary.
    """

    name: str
    owner: torch.nn.Module
    method: str
    stage: str
    keeps: tuple[str, ...] = DIFFUSERS_KEEPS

    @property
    def component_name(self) -> str:
        """The component's name without the method: `transformer`, `vae`."""
        return self.name.removesuffix(f".{self.method}")

    @property
    def argument_names(self) -> tuple[str, ...]:
        return _read_names(type(self.owner), self.method)  # type: ignore[arg-type]

    def bind(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return the function to call with this module as owner: itself, or its `encode` or `decode`."""
        return module if self.method == "forward" else getattr(module, self.method)


@functools.cache
def _read_names(owner: type, method: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(owner, method)).parameters)[1:]

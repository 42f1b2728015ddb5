"""`Callee`: the target of a component call: the module, the method, and its name in records."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DIFFUSERS_KEEPS = (
    "*timestep*",
    "!timestep_cond",  # the embedding of a guidance scale, which a layer of the model multiplies
    "*sigma*",
    "*guidance*",
    "*rotary*",
    "*freqs*",
    "*_ids*",
    "*size*",
    "*coords*",
)
"""Patterns of arguments that aren't cast between components, because 16 bits would shift or merge them."""

GENERAL_KEEPS = (*DIFFUSERS_KEEPS, "t", "ts", "times")
"""Patterns of such arguments for models outside of Diffusers."""


@dataclass(frozen=True)
class Callee:
    """The target of a component call.

    Attributes:
        name: of the call in records, such as `transformer` or `vae.decode`.
        owner: the module whose method is called.
        method: `forward`, `encode`, `decode`…
        stage: `encode`, `denoise` or `decode`; `part` for a call of a submodule by itself; `call` if
            unknown.
        keeps: patterns of names of arguments that aren't cast between components; `!` excepts names.

    Examples:
        >>> callee = Callee("vae.decode", torch.nn.Linear(4, 2), "forward", "decode")
        >>> callee.argument_names
        ('input',)
    """

    name: str
    owner: torch.nn.Module
    method: str
    stage: str
    keeps: tuple[str, ...] = DIFFUSERS_KEEPS

    @property
    def component_name(self) -> str:
        """The component's name without the method, such as `transformer` or `vae`."""
        return self.name.removesuffix(f".{self.method}")

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of the method's positional arguments, in order; those of `*args` have none."""
        owner = getattr(self.owner, "_orig_mod", self.owner)  # of torch.compile
        return _read_names(type(owner), self.method)  # type: ignore[arg-type]

    def bind(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return the callable for the same method of another module: the module itself for `forward`."""
        return module if self.method == "forward" else getattr(module, self.method)


@functools.cache
def _read_names(owner: type, method: str) -> tuple[str, ...]:
    parameters = list(inspect.signature(getattr(owner, method)).parameters.values())[1:]
    return tuple(
        x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
    )

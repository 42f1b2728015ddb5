"""What a call's signature says, and what it leaves out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.module_calls.call_signatures import sign_call

X = torch.zeros(2, 3)


class Skipping(enum.Enum):
    """What is left out, as LTX-Video's own code names it."""

    SCORES = "scores"
    VALUES = "values"


@dataclass
class Modality:
    """Arguments in one object, as LTX-2's own code passes them."""

    latent: torch.Tensor
    mask: torch.Tensor | None = None
    enabled: bool = True


class Model(nn.Module):
    """Takes everything that models take."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(output_hidden_states=False, use_cache=True)

    def forward(
        self,
        x: Any,
        timestep: Any = None,
        mask: Any = None,
        output_hidden_states: bool | None = None,
        hidden: bool = False,
        layer: int = 0,
        extra: Any = None,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        return x


def sign(*args: Any, **kwargs: Any) -> str:
    return sign_call(Model(), "forward", args, kwargs)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({}, "forward(x[2d])"),
        ({"timestep": torch.tensor(1.0)}, "forward(timestep[1d], x[2d])"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, "forward(mask[bool], x[2d])"),
        ({"hidden": True}, "forward(hidden=True, x[2d])"),
        ({"layer": 3}, "forward(layer=3, x[2d])"),
        ({"layers": [1, 2]}, "forward(layers=[1, 2], x[2d])"),
        ({"extra": {"a": X, "b": None}}, "forward(extra.a[2d], x[2d])"),
        ({"extra": (X, X, X)}, "forward(extra[][2d], x[2d])"),
        ({"extra": torch.Generator()}, "forward(extra:Generator, x[2d])"),
        ({"extra": {}}, "forward(extra={}, x[2d])"),
        ({"extra": []}, "forward(extra=[], x[2d])"),
        ({"extra": "blocks"}, "forward(extra=blocks, x[2d])"),
        ({"extra": Skipping.SCORES}, "forward(extra=Skipping.SCORES, x[2d])"),
        (
            {"extra": Modality(X)},
            "forward(extra.enabled=True, extra.latent[2d], extra:Modality, x[2d])",
        ),
        (
            {"extra": Modality(X, X, enabled=False)},
            "forward(extra.enabled=False, extra.latent[2d], extra.mask[2d], extra:Modality, x[2d])",
        ),
        ({"extra": 0.5}, "forward(extra, x[2d])"),
        ({"extra": 0.0}, "forward(extra=0, x[2d])"),
        ({"extra": [0.5, 0.5]}, "forward(extra[], x[2d])"),
        ({"extra": {"scale": [0.0, 0.5]}}, "forward(extra.scale=[0, …], x[2d])"),
        ({"extra": {"scale": [0.5, 0.0]}}, "forward(extra.scale=[…, 0], x[2d])"),
        ({"output_hidden_states": True}, "forward(output_hidden_states=True, x[2d])"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain",
)
def test_what_leads_elsewhere_is_named(kwargs: dict[str, Any], said: str) -> None:
    """Each optional argument, flag and kind of tensor stands in the signature."""
    assert sign(X, **kwargs) == said


@pytest.mark.parametrize(
    "kwargs",
    [
        {"mask": None},
        {"hidden": False},
        {"layer": 0},
        {"return_dict": False},
        {"output_hidden_states": False},
        {"extra": ()},
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain",
)
def test_defaults_are_left_out(kwargs: dict[str, Any]) -> None:
    """What is given as its default, by its configuration, or an empty tuple, is as if not given."""
    assert sign(X, **kwargs) == sign(X)


def test_by_position_or_by_name() -> None:
    """Arguments by position and by name are the same."""
    assert sign(X, torch.tensor(1)) == sign(timestep=torch.tensor(1), x=X)


def test_amounts_have_one_signature() -> None:
    """Sizes, values and dtypes of tensors, times, strengths and fractions lead nowhere else."""
    first = sign(X, timestep=torch.tensor(3), num_frames=9, scale=0.5, extra=[X])
    assert (
        sign(
            torch.ones(5, 7).half(),
            timestep=torch.tensor([0.5]),
            num_frames=5,
            scale=0.7,
            extra=[X, X],
        )
        == first
    )


def test_a_configuration_decides_a_flag() -> None:
    """A flag that is not given counts as the configuration has it when the call is made."""
    model = Model()
    before = sign_call(model, "forward", (X,), {})
    model.config.output_hidden_states = True
    assert sign_call(model, "forward", (X,), {}) != before
    assert "output_hidden_states" in sign_call(model, "forward", (X,), {})

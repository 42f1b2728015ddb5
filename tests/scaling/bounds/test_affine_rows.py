"""Rows behind a norm, scaled and shifted by the timestep."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models.bound_ascent import bound_module, bound_one, climb
from stopdown.scaling.bounds import product_rules
from stopdown.scaling.bounds.affine_rows import AffineRow


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

"""Exponents by folding alone: what weight files can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models.snapshots import assert_untouched
from stopdown.errors import ScalingError
from stopdown.scaling.folding.folds import fold_scaling
from stopdown.scaling.trials.folds_alone import FoldsAlone


def make_net() -> tuple[nn.Module, torch.Tensor]:
    """A linear whose outputs leave fp16, and the norm behind it, which has an eps of its own."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).requires_grad_(False)
    module[0].weight.mul_(2.0**20)
    return module, torch.randn(4, 8)


def measure(module: nn.Module, *given: torch.Tensor) -> FoldsAlone:
    found = FoldsAlone(module)
    for value in given:
        found.measure([(module, (value,), {})])
    return found


def test_a_norm_takes_what_is_folded_away_with_its_eps() -> None:
    """With its eps free, the exponents are exact: every bit in fp32 is what it was."""
    module, value = make_net()
    with assert_untouched(module):
        folds = measure(module, value)
        found = folds.find(free=None)
    assert found is not None
    assert found.exponents["0.weight"] < 0
    assert found.eps["1.eps"] == 2 * found.exponents["0.weight"]
    assert not found.multiplies
    assert not found.fp32_modules
    before = module(value)
    rescaling = fold_scaling(module, found)
    assert torch.equal(module(value), before)
    assert module[0](value).abs().max() < 65504
    rescaling.undo()


def test_without_a_free_eps_there_are_none() -> None:
    """An eps that stays as it is holds the scale of the norm's input."""
    module, value = make_net()
    folds = measure(module, value)
    assert folds.find() is None
    assert folds.find(free={"1.eps"}) is not None


def test_eps_of_one_field_change_together() -> None:
    """Two norms with inputs of unlike sizes, whose eps are one field's."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)
    ).requires_grad_(False)
    module[0].weight.mul_(2.0**20)
    found = measure(module, torch.randn(4, 8)).find(groups=[{"1.eps", "3.eps"}])
    assert found is not None
    assert found.eps["1.eps"] == found.eps["3.eps"] < 0


def test_signatures_are_those_of_all_kinds() -> None:
    """Each once, sorted; another number of rows is the same signature."""
    module, value = make_net()
    folds = measure(module, value, value[:2])
    assert len(folds.kinds) == 2
    assert len(folds.signatures) == 1


def test_bounds_are_taken_where_they_are_accepted() -> None:
    """What is not accepted is an error, and the question is asked of exponents."""
    module, value = make_net()
    folds = measure(module, value)
    asked = list[Any]()
    found = folds.find_bounded("bound", lambda x: asked.append(x) or True, free=None)
    assert found.bounded
    assert {x.exponents["0.weight"] < 0 for x in asked} == {True}
    with pytest.raises(ScalingError, match="eps would have to change"):
        folds.find_bounded("bound", lambda _: False, free=None)
    with pytest.raises(ScalingError, match="Folds alone don't keep it in range"):
        folds.find_bounded("bound", lambda _: True)

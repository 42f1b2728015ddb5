"""By what a plan knows the weights that it was made for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stopdown.errors import PlanError
from stopdown.plans.weight_fingerprints import sample_weights


def test_the_hash_follows_names_shapes_and_values() -> None:
    """The format in which the same values are held does not matter."""
    module = nn.Linear(4, 4)
    with torch.no_grad():
        module.weight.copy_(module.weight.bfloat16())
        module.bias.copy_(module.bias.bfloat16())
    found = sample_weights(module)
    assert sample_weights(module.bfloat16()) == found
    changed = nn.Linear(4, 4)
    changed.load_state_dict(module.state_dict())
    assert sample_weights(changed) == found
    with torch.no_grad():
        changed.weight[-1, -1] += 1
    assert sample_weights(changed) != found
    assert sample_weights(nn.Sequential(module)) != found


def test_the_hash_does_not_depend_on_the_default_device() -> None:
    """A script may have set another one, and MPS has no fp64."""
    module = nn.Linear(4, 4)
    found = sample_weights(module)
    with torch.device("meta"):
        assert sample_weights(module) == found


def test_weights_without_values_are_refused() -> None:
    """A plan of weights that are elsewhere would fit none."""
    with pytest.raises(PlanError, match=r"(weight|bias) of a Linear has no values"):
        sample_weights(nn.Linear(2, 2, device="meta"))

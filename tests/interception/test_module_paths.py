"""Which module of a component is running."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stopdown.interception.module_paths import ModulePaths, list_tensor_places
from stopdown.interception.patches import Patches


def test_paths_are_entered_and_left_in_order() -> None:
    """The innermost is current, outputs come with what is left, and no hook stays."""
    module, seen = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), []
    with Patches() as patches:
        paths = ModulePaths(
            module,
            patches,
            seen.append,
            lambda path, output: seen.append((path, output is not None)),
        )
        module(torch.ones(1, 2))
        assert paths.current == ""
    assert seen == ["0", ("0", True), "1", "1.0", ("1.0", True), ("1", True)]
    module(torch.ones(1, 2))
    assert len(seen) == 6


def test_a_module_that_raises_is_left() -> None:
    """Its output is None, and the component itself is current again."""
    seen = []
    module = nn.Sequential(nn.Linear(2, 2))
    with Patches() as patches:
        paths = ModulePaths(module, patches, on_leave=lambda *left: seen.append(left))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.ones(1, 3))
        assert (paths.current, seen) == ("", [("0", None)])


def test_a_tied_weight_has_two_places() -> None:
    """Each is a dict of a module and a key in it; buffers are there, and what is None isn't."""
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    )
    module[1].weight = module[0].weight
    module.register_buffer("table", torch.ones(1))
    found = list(list_tensor_places(module))
    assert [name for name, _, _ in found] == ["table", "0.weight", "1.weight"]
    assert found[1][1][found[1][2]] is found[2][1][found[2][2]] is module[0].weight

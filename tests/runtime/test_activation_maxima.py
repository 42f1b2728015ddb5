"""What is noted inside a component: clamps, blocks and arguments, without a host read."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

from models.snapshots import assert_untouched
from stopdown.interception.patches import Patches
from stopdown.runtime.activation_maxima import (
    Notes,
    find_clamping,
    find_compiled,
    is_compiled,
    put_sensors,
)


class Clamping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-65504, 65504)


class ByFinfo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clip(x, max=torch.finfo(x.dtype).max - 1000)


class Other(nn.Module):
    """Clamps, but not at fp16's maximum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Clamping()
        self.transformer_blocks = nn.ModuleList([nn.Identity(), ByFinfo()])
        self.last = Other()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.transformer_blocks:
            x = block(x)
        return self.last(x)


def read(bounds: Any) -> list[tuple[float, float]]:
    return [(float(low), float(high)) for low, high in bounds]


def test_clamps_are_found_in_source() -> None:
    """By the number and by `finfo`; another clamp is none."""
    assert find_clamping(Net()) == ("first", "transformer_blocks.1")
    assert find_clamping(Other()) == ()


@pytest.mark.parametrize("maxima", [False, True])
def test_outputs_of_clamps_and_blocks_are_noted(maxima: bool) -> None:
    """Blocks only where they are asked for; nothing stays when it is undone."""
    module, notes = Net(), Notes()
    value = torch.tensor([1.0, math.inf, -2.0], dtype=torch.float16)
    with assert_untouched(module), Patches() as patches:
        put_sensors(module, notes, patches, maxima=maxima)
        module(value)
    assert [path for path, _ in notes.clamping] == ["first", "transformer_blocks.1"]
    assert read(x for _, x in notes.clamping)[0] == (-2.0, 65504.0)
    blocks = [(path, dtype) for path, dtype, _ in notes.blocks]
    paths = ["transformer_blocks.0", "transformer_blocks.1"] if maxima else []
    assert blocks == [(path, torch.float16) for path in paths]
    assert len(notes.bounds) == 2 + len(paths)
    notes.clear()
    module(value)
    assert notes.bounds == []


def test_a_clamp_in_fp32_hides_nothing_of_fp16() -> None:
    """Only outputs in fp16 are noted."""
    module, notes = Net(), Notes()
    with Patches() as patches:
        put_sensors(module, notes, patches, maxima=False)
        module(torch.tensor([1e6]))
    assert notes.clamping == []


def test_arguments_have_their_limits() -> None:
    """Whole numbers only with one; NaN shows in the bounds."""
    notes = Notes()
    given = {
        "hidden_states": torch.tensor([1.0, math.nan]), "timestep": torch.tensor([999]),
        "input_ids": torch.tensor([3]),
    }  # fmt: skip
    notes.note_inputs({"timestep": 1000.0}, given.items())
    found = [(name, limit) for name, limit, _ in notes.inputs]
    assert found == [("hidden_states", None), ("timestep", 1000.0)]
    assert math.isnan(read(x for *_, x in notes.inputs)[0][1])


def test_an_operation_that_is_meant_to_hide_is_not_noted() -> None:
    """`tanh()` of a model that means it."""
    notes = Notes(meant={"tanh()"})
    notes.note_hidden("tanh", torch.tensor([math.inf]))
    assert notes.clamping == []
    notes.note_hidden("sigmoid", torch.tensor([math.inf]))
    assert [name for name, _ in notes.clamping] == ["sigmoid()"]


def test_each_thread_has_notes_of_its_own() -> None:
    """What another thread's call shows is none of this one's."""
    notes, other = Notes(), list[int]()
    notes.note_hidden("tanh", torch.ones(1))
    thread = threading.Thread(target=lambda: other.append(len(notes.clamping)))
    thread.start()
    thread.join()
    assert (len(notes.clamping), other) == (1, [0])


def test_compiled_modules_are_left_alone() -> None:
    """Hooks would not run there; they are named."""
    module, notes = Net(), Notes()
    module.first.compile(backend="eager")
    assert is_compiled(module.first)
    assert find_compiled(module) == ("first",)
    with Patches() as patches:
        put_sensors(module, notes, patches, maxima=False)
        module.transformer_blocks[1](torch.ones(1).half())
        assert [path for path, _ in notes.clamping] == ["transformer_blocks.1"]
        assert not module.first._forward_hooks

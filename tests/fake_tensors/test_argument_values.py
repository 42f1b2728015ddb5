"""Values that follow from a call's arguments, where there are no weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stopdown.errors import CaptureError
from stopdown.fake_tensors.argument_values import ArgumentValues, find_known, set_known
from stopdown.fake_tensors.fake_modules import build_fake
from stopdown.scaling.graph.capture import capture_call, note_answers


class Reading(nn.Module):
    """Reads the lengths of a mask, writes positions by them, and picks what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        lengths = mask.sum(dim=1).tolist()
        places = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, length in enumerate(lengths):
            places[row, :length] = torch.arange(length)
        return self.embed(x)[:, : int(places.max().item()) + 1]


class Weighing(Reading):
    """Reads a value that depends on weights."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return x * 2 if x.abs().max().item() > 1 else x


MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])


def test_a_model_without_weights_is_captured_with_what_it_reads() -> None:
    """Its answers are those of a real call, and its signature has them."""
    x, real = torch.randn(2, 5, 8), Reading().eval()
    module = build_fake(Reading, torch.float16)
    wanted = note_answers(real, (x, MASK), {})
    assert [answer for _, answer in wanted] == [3, 4, 3]
    assert note_answers(module, (x, MASK), {}) == wanted
    made = capture_call(module, (x, MASK), dtype=torch.float16)
    assert made.answers == wanted
    assert made.signature.endswith("reads 3 4 3)")


def test_values_of_weights_are_not_made_up() -> None:
    """Code that reads them has no graph where there are none."""
    module = build_fake(Weighing, torch.float16)
    with pytest.raises(DataDependentOutputException):
        note_answers(module, (torch.randn(2, 5, 8), MASK), {})
    with pytest.raises(CaptureError, match=r"Weighing can't be captured.*\.item\(\) > 1"):
        capture_call(module, (torch.randn(2, 5, 8), MASK), dtype=torch.float16)


@pytest.mark.parametrize(
    "cast", [torch.Tensor.type_as, torch.Tensor.to, lambda x, y: x.to(tensor=y)]
)
def test_a_cast_like_a_weight_keeps_what_is_known(cast: Any) -> None:
    """Of the weight it takes the dtype alone: positions that collapse in 16 bits weren't found then."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    weight = mode.from_tensor(torch.ones(3).half())
    with mode, ArgumentValues():
        made = cast(torch.arange(4096), weight)
    known = find_known(made)
    assert known is not None
    assert torch.equal(known, torch.arange(4096).half())


@pytest.mark.parametrize("way", ["__setitem__", "add_", "copy_"])
def test_what_unknown_values_are_written_into_is_unknown(way: str) -> None:
    """A tensor of zeros that a weight was written into is known no longer; another number, it is."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    weight, count = mode.from_tensor(torch.ones(3)), mode.from_tensor(torch.tensor([7, 8, 9]))
    set_known(count, torch.tensor([7, 8, 9]))
    with mode, ArgumentValues():
        for value, is_known in ((count, True), (weight, False)):
            made: Any = torch.zeros(3)
            if way == "__setitem__":
                made[:] = value
            else:
                getattr(made, way)(value)
            found = find_known(made)
            assert (found is not None) == is_known
            assert not is_known or found.tolist() == [7, 8, 9]  # type: ignore[union-attr]

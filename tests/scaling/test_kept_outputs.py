"""What code outside of a module sees of its activations, in forms that aren't tuples or dicts."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models.snapshots import compare_snapshot, take_snapshot
from stopdown.errors import CaptureError, InputError, ScalingError, StopdownWarning
from stopdown.numerics import iterate_tensors, relative_l2
from stopdown.runtime.guard import guard
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.rescale import rescale_

X = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))


@dataclasses.dataclass
class Output:
    sample: torch.Tensor
    state: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    sample: torch.Tensor
    state: Any


class Stream(nn.Module):
    """A stream beyond fp16 that only a norm reads, beside what it becomes."""

    def __init__(self, form: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.down, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.norm, self.form = nn.LayerNorm(16), form
        self.kept: Any = None
        self.eval().requires_grad_(False)
        for layer in (self.embed, self.down):
            layer.weight.mul_(2.0**17)

    def forward(self, x: torch.Tensor) -> Any:
        stream = self.embed(x)
        stream = stream + self.down(self.norm(stream))
        return self.form(self, self.last(self.norm(stream)), stream)


FORMS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "dataclass": lambda _, made, stream: Output(made, stream),
    "frozen dataclass": lambda _, made, stream: Frozen(made, {"states": [stream, None]}),
    "ordered": lambda _, made, stream: OrderedDict({1: made, "state": stream}),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("residual", ["native", "fp32"])
def test_a_state_beyond_fp16_is_returned_in_any_form(name: str, residual: str) -> None:
    """As it was in fp32, and wide after a cast: in a dataclass it kept its power of two."""
    module = Stream(FORMS[name])
    before = list(iterate_tensors(module(X)))
    rescaling = rescale_(module, (X,), residual=residual)
    assert rescaling.exponents
    found = module(X)
    assert type(found) is type(FORMS[name](None, X, X))
    assert all(map(torch.equal, iterate_tensors(found), before))
    cast_(module, torch.float16, rescaling)
    made, state = iterate_tensors(module(X.half()))
    assert (made.dtype, state.dtype) == (torch.float16, torch.float32)
    for tensor, right in zip((made, state), before, strict=True):
        assert float(relative_l2(tensor.float(), right)) < 2e-3


def test_an_object_that_cannot_be_copied_is_refused() -> None:
    """It was called a wrong rule of an operation."""
    module = Stream(lambda _, made, stream: SimpleNamespace(sample=made, state=stream))
    before = take_snapshot(module)
    with pytest.raises(ScalingError, match="beyond fp16 in an object that can't be copied"):
        rescale_(module, (X,))
    assert compare_snapshot(before, module) == []


def test_a_generator_has_no_values_that_are_seen() -> None:
    """What it gave was scaled; between casts it is right."""

    def give(_: Any, made: torch.Tensor, stream: torch.Tensor) -> Iterator[torch.Tensor]:
        return iter((made, stream))

    module = Stream(give)
    before = list(module(X))
    rescaling = rescale_(module, (X,))
    assert not rescaling.exponents
    assert "returns a generator, whose values can't be seen" in rescaling.scaling.note
    assert all(map(torch.equal, module(X), before))

    class Lazy(Stream):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield self.embed(x)

    with pytest.raises(CaptureError, match="returns a generator, whose values can't be seen"):
        rescale_(Lazy(give), (X,))


def keep(module: Any, made: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    module.kept = [stream]
    return made


def test_a_scaled_activation_that_is_left_in_an_attribute_is_told() -> None:
    """Code that reads it gets another value; one that has no exponent isn't told, nor a count of calls."""
    module = Stream(keep)
    right = module(X)
    with pytest.warns(StopdownWarning, match="leaves activations in kept, and they are multiplied"):
        rescale_(module, (X,))
    assert torch.equal(module(X), right)

    def count(module: Any, made: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        module.kept = {"made": made, "calls": len(module.kept or ()) + 1}
        return made

    module = Stream(count)
    right = module(X)
    assert rescale_(module, (X,)).exponents
    assert torch.equal(module(X), right)
    assert torch.equal(module.kept["made"], right)


def test_a_part_of_torchscript_is_named() -> None:
    """`rescale_` ended in a raw error of PyTorch's, and so did a guard, which casts such a module."""
    module = Stream(lambda _, made, stream: made)
    right = module(X)
    module.last = torch.jit.script(module.last)
    with pytest.raises(
        InputError, match=r"given a Stream whose part last is a TorchScript module\."
    ):
        rescale_(module, (X,))
    module.half()
    with guard(module, announce=lambda _: None) as handle, torch.no_grad():
        made = module(X.half())
    assert [x.action for x in handle.repairs] == ["bf16"]
    assert float(relative_l2(made.float(), right)) < 0.02

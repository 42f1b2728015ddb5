"""A rescaled module that is cast by other means than `cast_` is refused where that changes its values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models.snapshots import compare_snapshot, take_snapshot
from stopdown.errors import OptionError, ScalingError
from stopdown.numerics import relative_l2
from stopdown.records import ResidualStream, Scaling
from stopdown.scaling.folding.folds import Rescaling, cast_, check_casts, fold_scaling
from stopdown.scaling.rescale import rescale_

NEEDS = {
    "multiplies": (Scaling(multiplies={"out": 2}), "1 multiply"),
    "fp32_modules": (Scaling(fp32_modules=("embed",)), "1 fp32 layer"),
    "stream": (Scaling(stream=ResidualStream(("embed",), ("out",))), "an fp32 residual stream"),
    "buffers": (Scaling(kept_buffers=("table",)), "1 fp32 buffer"),
}


class Module(nn.Module):
    """Two linears and a norm, a table in no checkpoint, and a method that calls parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(4, 16), nn.LayerNorm(16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])
        self.out = nn.Linear(16, 4)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.norm(self.embed(x + self.table.to(x.dtype))))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks[0](x))  # type: ignore[no-any-return]


def make(scaling: Scaling) -> tuple[Module, Rescaling]:
    torch.manual_seed(0)
    module = Module().eval().requires_grad_(False)
    rescaling = fold_scaling(module, scaling)
    check_casts(rescaling)
    return module, rescaling


def run(module: Module, method: str) -> torch.Tensor:
    width = 16 if method == "decode" else 4
    given = torch.ones(2, width, dtype=module.out.weight.dtype)
    return module.decode(given) if method == "decode" else module(given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["forward", "decode"])
@pytest.mark.parametrize("name", NEEDS)
def test_half_is_refused(name: str, method: str) -> None:
    """At the next call, of the module or of a method, with what is lost and what to use instead."""
    scaling, said = NEEDS[name]
    module, _ = make(scaling)
    module.half()
    with pytest.raises(ScalingError) as caught:
        run(module, method)
    assert "was rescaled and then cast by other means than cast_" in caught.value.what
    assert caught.value.expected.startswith(f"Its rescaling has {said}")
    assert "stopdown.cast_(module, torch.float16, rescaling)" in caught.value.remedy


CASTS: dict[str, Callable[[Any, Rescaling], object]] = {
    "cast_ with its rescaling": lambda module, rescaling: cast_(module, torch.float16, rescaling),
    "cast_ with its scaling": lambda module, found: cast_(module, torch.float16, found.scaling),
    "fp32": lambda module, rescaling: module.to(torch.float32),
    "bf16": lambda module, rescaling: module.to(torch.bfloat16),
    "not at all": lambda module, rescaling: None,
    "undone": lambda module, rescaling: (rescaling.undo(), module.half()),
    "cast_ undone": lambda module, found: cast_(module, torch.float16, found).undo(),
}


@pytest.mark.parametrize("name", CASTS)
def test_what_keeps_its_values_is_let_through(name: str) -> None:
    """`cast_` with what was found, fp32, bf16 (a guard repairs so), and anything once it is undone."""
    module, rescaling = make(NEEDS["fp32_modules"][0])
    CASTS[name](module, rescaling)
    assert bool(run(module, "forward").isfinite().all())


@pytest.mark.parametrize("change", ["half after cast_", "cast_ alone"])
def test_a_cast_without_the_rescaling_is_refused(change: str) -> None:
    """Also where `cast_` was right before, and where it is not given the rescaling."""
    module, rescaling = make(NEEDS["fp32_modules"][0])
    if change == "cast_ alone":
        cast_(module, torch.float16)
    else:
        cast_(module, torch.float16, rescaling)
        module.half()
    with pytest.raises(ScalingError, match="cast by other means"):
        run(module, "forward")


def test_folds_alone_may_be_cast_by_anything() -> None:
    """What `.half()` makes of them is what `cast_` makes of them."""
    module, _ = make(Scaling(exponents={"embed.weight": -2}, kept_buffers=()))
    module.half()
    assert run(module, "forward").dtype == torch.float16
    assert not module._forward_pre_hooks


def test_a_copy_is_not_asked() -> None:
    """A copy of a rescaled module, as a capture makes one, has parts that nobody knows."""
    module, _ = make(NEEDS["fp32_modules"][0])
    copied = copy.deepcopy(module).half()
    assert copied.out.weight.dtype == torch.float16
    copied.blocks[0](torch.ones(1, 16).half())


def test_the_check_comes_off_with_the_rescaling() -> None:
    """No hook and no attribute stays."""
    torch.manual_seed(0)
    module = Module().eval().requires_grad_(False)
    before = take_snapshot(module)
    rescaling = fold_scaling(module, NEEDS["stream"][0])
    check_casts(rescaling)
    cast_(module, torch.float16, rescaling)
    rescaling.undo()
    assert compare_snapshot(before, module) == []


class Streaming(nn.Module):
    """A stream that a last norm reads, beyond fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.branch = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return self.out(self.norm(x + self.branch(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("residual", ["native", "fp32"])
def test_rescale_casts_when_asked(residual: str) -> None:
    """`cast=True` leaves it in fp16, finite and near; undoing restores fp32 to the last bit."""
    torch.manual_seed(0)
    module, x = Streaming().eval().requires_grad_(False), torch.randn(3, 4)
    module.embed.weight.mul_(2.0**20)
    before, reference = take_snapshot(module), module(x)
    rescaling = rescale_(module, (x,), residual=residual, cast=True)
    assert module.out.weight.dtype == torch.float16
    assert relative_l2(module(x.half()), reference) < 0.01
    rescaling.undo()
    assert compare_snapshot(before, module) == []


def test_the_stream_of_a_rescaling_is_not_lost_in_silence() -> None:
    """`rescale_` with an fp32 stream and then `.half()`: refused at the next call."""
    torch.manual_seed(0)
    module, x = Streaming().eval().requires_grad_(False), torch.randn(3, 4)
    module.embed.weight.mul_(2.0**20)
    assert rescale_(module, (x,), residual="fp32").residual == "fp32"
    module.half()
    with pytest.raises(ScalingError, match=r"Its rescaling has .*an fp32 residual stream"):
        module(x.half())


def test_no_call_is_an_error() -> None:
    """Nothing would be found and nothing folded: the message says what to give."""
    with pytest.raises(OptionError) as caught:
        rescale_(nn.Linear(2, 2))
    assert caught.value.what == "rescale_ was given a Linear but no example call of it."
    assert "calls=[(module, args, kwargs)]" in caught.value.remedy

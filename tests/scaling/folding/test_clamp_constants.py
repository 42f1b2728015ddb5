"""Numbers that code clamps norms from below scale with the norms, for every later input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from models.rescaling_models import measure_call
from stopdown import cast_, rescale_
from stopdown.fold_names import name_clamp, read_clamp
from stopdown.scaling.trials.folds_alone import FoldsAlone

WIDTH, GROWTH = 8, 2.0**14
Normalise = Callable[[torch.Tensor, float], torch.Tensor]

NORMALISED: dict[str, Normalise] = {
    "normalize": lambda h, eps: functional.normalize(h, dim=-1, eps=eps),
    "positional": lambda h, eps: functional.normalize(h, 2.0, -1, eps),
    "clamp": lambda h, eps: h / h.norm(dim=-1, keepdim=True).clamp(min=eps),
    "clamp_min": lambda h, eps: h / torch.clamp_min(h.norm(dim=-1, keepdim=True), eps),
    "clip_": lambda h, eps: h / h.norm(dim=-1, keepdim=True).clip_(eps),
    "amax": lambda h, eps: h / torch.clamp(h.abs().amax(-1, keepdim=True), min=eps, max=None),
    "maximum": lambda h, eps: h / h.norm(dim=-1, keepdim=True).maximum(torch.tensor(eps)),
    "where": lambda h, eps: h / _choose(h.norm(dim=-1, keepdim=True), eps),
    "sum": lambda h, eps: h / (h.norm(dim=-1, keepdim=True) + eps),
    "root": lambda h, eps: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps),
}  # fmt: skip


def _choose(norm: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.where(norm > eps, norm, eps)


class Inner(nn.Module):
    """Normalises by a number in its code, or by its attribute."""

    def __init__(self, normalise: Normalise, eps: float, *, held: bool) -> None:
        super().__init__()
        self.normalise, self.eps, self.number = normalise, eps if held else 0.0, [eps]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.normalise(h, self.eps or self.number[0])


class Normed(nn.Module):
    """A stream beyond fp16, brought to length 1."""

    def __init__(self, normalise: Normalise, eps: float, *, held: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, WIDTH, bias=False), nn.Linear(WIDTH, 4)
        self.norm = Inner(normalise, eps, held=held)
        with torch.no_grad():
            self.first.weight.mul_(GROWTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


SLOW = (pytest.mark.slow, pytest.mark.drawn)


def list_inputs(x: torch.Tensor, eps: float) -> list[torch.Tensor]:
    """Inputs whose norms lie on both sides of the number."""
    near = [x * (eps / GROWTH * 2.0**bits) for bits in range(-12, 13, 3)]
    return [x, torch.zeros_like(x), x * 1e-6, x * 1e3, *near]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("eps", [1e-3, *(pytest.param(x, marks=SLOW) for x in (1e-12, 0.05, 1.0))])
@pytest.mark.parametrize("name", NORMALISED)
def test_every_later_input_is_exact(name: str, eps: float, held: bool) -> None:
    """Inputs whose norm falls below the number give the same bits, whatever was measured."""
    module, x = Normed(NORMALISED[name], eps, held=held).eval(), torch.randn(3, 4) * 16
    given = list_inputs(x, eps)
    with torch.no_grad():
        before = [module(one) for one in given]
        rescaling = rescale_(module, (x,))
        assert rescaling.headroom_bits > 0
        assert all(map(torch.equal, map(module, given), before))
        if name not in ("sum", "root", "maximum", "where"):
            assert rescaling.exponents
            assert rescaling.fp32_modules == ()
        rescaling.undo()
        assert all(map(torch.equal, map(module, given), before))


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1.0])
def test_zeros_stay_zeros_in_fp16(eps: float) -> None:
    """A number that fp16 would round to 0 is not: a row of zeros stays one, as in fp32."""
    module, x = Normed(NORMALISED["normalize"], eps).eval(), torch.randn(3, 4) * 16
    with torch.no_grad():
        cast_(module, torch.float16, rescale_(module, (x,)))
        bias = module.last.bias.expand(3, 4)
        assert torch.equal(module(torch.zeros(3, 4).half()), bias)


class Outer(nn.Module):
    """The same number in a module's own code and in that of a module inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = Normed(NORMALISED["clamp"], 0.5), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.other(x)
        return self.inner(x) + h / h.norm(dim=-1, keepdim=True).clamp(min=0.5)


def test_a_number_that_modules_inside_have_as_well() -> None:
    """Both are scaled alike, so that neither is scaled for the other."""
    module, x = Outer().eval(), torch.randn(3, 4) * 16
    given = list_inputs(x, 0.5) + [x * 2.0**-bits for bits in range(12)]
    with torch.no_grad():
        module.other.weight.mul_(GROWTH)
        before = [module(one) for one in given]
        rescale_(module, (x,))
        assert all(map(torch.equal, map(module, given), before))


class Limited(nn.Module):
    """A stream that its code limits to fp16's range, in fp32 as well or in fp16 alone."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.always = always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.always or h.dtype == torch.float16:
            h = h.clamp(-65504, 65504)
        return self.last(self.norm(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("growth", [2.0**13, 2.0**18])
def test_a_limit_of_the_code_in_fp32_is_part_of_it(growth: float, always: bool) -> None:
    """What clamps at fp16's end in fp32 as well does so for later inputs; what does not is scaled."""
    module, x = Limited(always=always).eval().requires_grad_(False), torch.randn(3, 4)
    module.first.weight.mul_(growth)
    given = [x, x * 64, x * 1e-3]
    before = [module(one) for one in given]
    rescaling = rescale_(module, (x,))
    assert all(map(torch.equal, map(module, given), before))
    cast_(module, torch.float16, rescaling)
    low = module(x.half())
    assert float((low.float() - before[0]).norm() / before[0].norm()) < 2e-3


class Calling(Normed):
    """A number in the code of a method that is called by itself."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.normalize(self.first(x), dim=-1, eps=0.5))


def test_a_number_of_a_method_is_pinned() -> None:
    """No hook runs where a method is called by itself: what it normalises stays as it is."""
    module, x = Calling(NORMALISED["clamp"], 0.5).eval(), torch.randn(3, 4) / 2
    given = list_inputs(x, 0.5)
    with torch.no_grad():
        before = [module.encode(one) for one in given]
        rescaling = rescale_(module, calls=[(module.encode, (x,), {})])
        assert rescaling.scaling.eps == {}
        assert all(map(torch.equal, map(module.encode, given), before))


class Twice(nn.Module):
    """An attribute for one norm, and the same number in the code of another."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.first, self.last = 0.01, nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 0.01)
        return self.last(h / (h.abs().amax(-1, keepdim=True) + self.eps))


def test_a_number_in_code_is_not_taken_for_an_attribute() -> None:
    """Where the code has the number itself, scaling an attribute of that value would do nothing."""
    module, x = Twice().eval(), torch.randn(3, 4) * 16
    given = [x * 2.0**-bits for bits in range(0, 30, 3)]
    with torch.no_grad():
        module.first.weight.mul_(GROWTH)
        before = [module(one) for one in given]
        rescale_(module, (x,))
        assert all(map(torch.equal, map(module, given), before))


@pytest.mark.parametrize(("eps", "is_folded"), [(1e-12, True), (1e-3, False)])
def test_files_scale_what_is_compared_with_less_than_fp16_holds(
    eps: float, is_folded: bool
) -> None:
    """Files have no hooks: only what fp16 never stores a value below may stay as it is in them."""
    module = Normed(NORMALISED["normalize"], eps).eval()
    found = FoldsAlone(module, [measure_call(module, (torch.randn(3, 4) * 16,))]).find()
    assert (found is not None) == is_folded


@pytest.mark.parametrize("value", [1e-12, 1e-3, 0.05, 1.0, 100.0, 0.1 + 0.2])
def test_the_name_of_a_number_gives_it_back(value: float) -> None:
    """Plans keep it in the name, which has no dot."""
    assert "." not in name_clamp(value)
    assert read_clamp(name_clamp(value)) == value
    assert read_clamp("clamp_eps") is None


def test_numbers_in_other_code_stay_after_ctrl_c() -> None:
    """PyTorch calls no hook after it: all later code had the scaled number, also that of other modules."""
    stops = list[bool]()

    def normalise(h: torch.Tensor, eps: float) -> torch.Tensor:
        if stops:
            raise KeyboardInterrupt
        return functional.normalize(h, dim=-1, eps=eps)

    module, x = Normed(normalise, 1e-3).eval(), torch.randn(3, 4) * 16
    rescale_(module, x, cast=True)
    short = torch.full((1, WIDTH), 1e-6)
    before = functional.normalize(short, eps=1e-3)
    stops.append(True)
    with contextlib.suppress(KeyboardInterrupt):
        module(x.half())
    assert torch.equal(functional.normalize(short, eps=1e-3), before)
    assert torch._C._len_torch_function_stack() == 0

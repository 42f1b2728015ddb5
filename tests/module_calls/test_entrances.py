"""What is between two components: values that the next one's format cannot hold."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.diagnosis.texts import is_refusal
from stopdown.errors import ScalingError
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import stays_finite
from stopdown.module_calls.call_interception import put_cast
from stopdown.module_calls.callee import Callee
from stopdown.module_calls.entrances import BeyondError
from stopdown.numerics import relative_l2
from stopdown.plans.applier import apply_entry, put_boundaries
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.runtime.guard import guard

FP16 = torch.float16


class Denoiser(nn.Module):
    """A latent and states of an encoder, which come to one layer first, and to a norm or not."""

    def __init__(self, first: str, dtype: torch.dtype = FP16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = first
        self.norm = nn.LayerNorm(8)
        self.rows = nn.RMSNorm(8)
        self.embed = nn.Linear(8, 8)
        self.after = nn.LayerNorm(8)
        self.channels = nn.Conv1d(1, 1, 1)
        self.groups = nn.GroupNorm(1, 1)
        self.out = nn.Linear(8, 8)
        self.to(dtype)

    def forward(
        self, sample: torch.Tensor, states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.first == "cast":
            states = states.to(sample.dtype)
        if self.first in ("norm", "rows"):
            states = getattr(self, self.first)(states)
        if self.first == "convolution":
            states = self.groups(self.channels(states))
        states = self.after(self.embed(states))
        if mask is not None:
            states = states + mask.to(states.dtype)
        made: torch.Tensor = self.out(sample + states)
        return made


KINDS = ("norm", "rows", "linear", "convolution")


def draw(largest: float = 3e5) -> tuple[torch.Tensor, torch.Tensor]:
    """A latent, and states that reach a magnitude."""
    numbers = torch.Generator().manual_seed(1)
    states = torch.randn(2, 1, 8, generator=numbers)
    return torch.randn(2, 1, 8, generator=numbers), states * largest / states.abs().max()


def put_on(module: nn.Module, patches: Patches) -> None:
    callee = Callee("transformer", module, "forward", "denoise")
    put_cast(callee, FP16, patches, is_refusal=is_refusal)


@pytest.mark.parametrize("first", KINDS)
def test_states_beyond_fp16_are_taken_in_fp32_up_to_the_first_norm(first: str) -> None:
    """Plainly cast they are Inf; what comes out is as near to fp32 as in fp16 with small states."""
    sample, states = draw()
    with torch.no_grad(), Patches() as patches:
        wanted = Denoiser(first, torch.float32)(sample, states)
        module = Denoiser(first)
        assert not module(sample.half(), states.half()).isfinite().all()
        put_on(module, patches)
        for _ in range(2):
            made = module(sample.half(), states)
            assert made.dtype == FP16
            assert relative_l2(made, wanted) < 0.002
    assert all("forward" not in vars(part) for part in module.modules())


def test_states_that_a_layer_is_given_by_name_are_taken_as_well() -> None:
    """A layer may be called as `layer(input=states)`."""

    class Naming(Denoiser):
        def forward(self, sample: torch.Tensor, states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            made: torch.Tensor = self.out(sample + self.after(self.embed(input=states)))
            return made

    sample, states = draw()
    with torch.no_grad(), Patches() as patches:
        wanted = Naming("linear", torch.float32)(sample, states)
        module = Naming("linear")
        put_on(module, patches)
        assert relative_l2(module(sample.half(), states), wanted) < 0.002


class TwoStates(nn.Module):
    """States of two encoders, each of which comes to a layer of its own; waits before the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).half() for _ in range(2)
        )
        self.is_reached, self.goes_on = threading.Event(), threading.Event()

    def forward(self, one: torch.Tensor, two: torch.Tensor, *, waits: bool = False) -> torch.Tensor:
        made = self.one(one)
        if waits:
            self.is_reached.set()
            self.goes_on.wait(60)
        return made + self.two(two)


def test_states_beyond_fp16_are_taken_in_two_threads() -> None:
    """The call that ended first took the layer of the other one off, which was refused then."""
    module, (small, large) = TwoStates(), draw()
    with torch.no_grad(), Patches() as patches, ThreadPoolExecutor(1) as pool:
        put_on(module, patches)
        wanted = module(small, large)
        patches.undo()
        put_on(module, patches)
        made = pool.submit(torch.no_grad()(module), small, large, waits=True)
        module.is_reached.wait(60)
        module(large, small)
        module.goes_on.set()
        assert torch.equal(made.result(), wanted)


def test_what_fits_is_cast_as_ever() -> None:
    """Small states give the same bits as a plain cast, also after larger ones, and in a copy."""
    sample, states = draw(100)
    with torch.no_grad(), Patches() as patches:
        module = Denoiser("linear")
        wanted = module(sample.half(), states.half())
        put_on(module, patches)
        assert torch.equal(module(sample.half(), states), wanted)
        module(sample.half(), draw()[1])
        assert torch.equal(module(sample.half(), states), wanted)
        assert torch.equal(copy.deepcopy(module)(sample.half(), states.half()), wanted)


def test_states_in_bf16_are_taken_as_well() -> None:
    """An encoder that was left in bf16 hands on states of 3e5."""
    sample, states = draw()
    with torch.no_grad(), Patches() as patches:
        wanted = Denoiser("norm", torch.float32)(sample, states.bfloat16().float())
        module = Denoiser("norm")
        put_on(module, patches)
        assert relative_l2(module(sample.half(), states.bfloat16()), wanted) < 0.002


def test_code_that_casts_by_itself_is_refused_and_not_answered_with_nan() -> None:
    """The message names the argument, its magnitude, the reason and what to do."""
    sample, states = draw()
    module = Denoiser("cast")
    with torch.no_grad(), Patches() as patches:
        put_on(module, patches)
        with pytest.raises(BeyondError) as caught:
            module(sample.half(), states)
    told = str(caught.value)
    assert "transformer was given states up to 3e+05, which fp16 can't hold" in told
    assert "what it gives then isn't finite" in told
    assert "guard" in told


def test_a_mask_of_large_values_is_cast() -> None:
    """-3e38 in a mask is -Inf in fp16, which means the same."""
    sample, states = draw(1)
    mask = torch.zeros(2, 1, 8)
    mask[0, 0, 0] = torch.finfo(torch.float32).min
    with torch.no_grad(), Patches() as patches:
        module = Denoiser("linear")
        wanted = module(sample.half(), states.half(), mask.half())
        put_on(module, patches)
        assert torch.equal(module(sample.half(), states, mask=mask).isnan(), wanted.isnan())


def test_a_planned_component_refuses_such_a_call() -> None:
    """Without a guard a call that fp16 cannot make ends in an error that names the guard."""
    sample, states = draw()
    module = Denoiser("cast", torch.float32)
    entry = ComponentPlan(
        "transformer",
        "Denoiser",
        "",
        "fp16",
        Scaling(exponents={"out.weight": 0}, eps={"after.eps": 0}),
    )
    pipe = SimpleNamespace(components={"transformer": module})
    with torch.no_grad(), Patches() as patches:
        patches.defer(apply_entry(module, entry).undo)
        put_boundaries(pipe, Plan("", components=(entry,)), patches)
        with pytest.raises(ScalingError, match=r"given states up to 3e\+05") as raised:
            module(sample, states)
        assert "Run it under the guard" in str(raised.value)


def test_a_guard_repairs_such_a_call() -> None:
    """What fp16 cannot make, a guard has made in another format."""
    sample, states = draw()
    module: Any = Denoiser("cast", torch.float32)
    pipe = SimpleNamespace(components={"transformer": module})
    with torch.no_grad():
        wanted = module(sample, states)
        entry = ComponentPlan("transformer", "Denoiser", "", "fp16")
        module.half()
        with Patches() as patches:
            put_boundaries(pipe, Plan("", components=(entry,)), patches)
            with guard(pipe, announce=lambda text: None) as guarded:
                made = module(sample, states)
        assert relative_l2(made, wanted) < 0.01
        assert len(guarded.repairs) == 1


def test_a_tensor_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are the same at each step; a write makes them others."""
    from stopdown.module_calls import call

    looks, bound = list[int](), call.bound_values

    def count(tensors: list[torch.Tensor]) -> Any:
        looks.append(1)
        return bound(tensors)

    monkeypatch.setattr(call, "bound_values", count)
    states = torch.full((4,), 7e4)
    assert not stays_finite(states, FP16)
    assert not stays_finite(states, FP16)
    assert stays_finite(states, torch.bfloat16)
    assert len(looks) == 1
    states.mul_(0.1)
    assert stays_finite(states, FP16)
    assert len(looks) == 2

"""Programs of ComfyUI's kind: weights are cast at each call, NaN is hidden, samplers name noise levels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models.pipeline_calls import quiet
from models.snapshots import assert_untouched
from processes.left_guards import leaving_no_guard
from stopdown import guard, make_plan
from stopdown.records import Plan, from_json, to_json

SPREAD = 2.0**20
LEVELS = torch.tensor([1.0, 0.6, 0.3, 0.0])


class Linear(nn.Linear):
    """Casts its weights to what it is called with, whatever they are stored in."""

    comfy_cast_weights = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`, in the dtype of `x`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


def hide(x: torch.Tensor) -> torch.Tensor:
    """What ComfyUI does to values that fp16 does not hold."""
    if x.dtype == torch.float16:
        return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504)
    return x


class Network(nn.Module):
    """Two linears between which values are beyond fp16."""

    def __init__(self, *, hides: bool) -> None:
        super().__init__()
        self.wide, self.act, self.down = Linear(8, 16), nn.ReLU(), Linear(16, 8)
        self.hides = hides

    def forward(
        self, x: torch.Tensor, timesteps: torch.Tensor, transformer_options: Any = None
    ) -> torch.Tensor:
        """`[1, N, 8]`, the same again."""
        y = self.down(self.act(self.wide(x)))
        return x + (hide(y) if self.hides else y)


def make_patcher(stored: torch.dtype = torch.float32, *, hides: bool = False) -> Any:
    """What ComfyUI calls a MODEL, as far as it is asked here."""
    torch.manual_seed(0)
    network = Network(hides=hides).eval().requires_grad_(False)
    network.wide.weight.mul_(SPREAD)
    network.wide.bias.mul_(SPREAD)
    network.down.weight.div_(SPREAD)
    network.to(stored)
    return SimpleNamespace(patches_uuid="", model=SimpleNamespace(diffusion_model=network))


def sample(patcher: Any, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Three steps."""
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
    network = patcher.model.diffusion_model
    for level in LEVELS[:-1]:
        options = {"sample_sigmas": LEVELS, "sigmas": level[None]}
        x = x - 0.1 * network(x.to(dtype), level[None], transformer_options=options).float()
    return x


@pytest.mark.parametrize(("stored", "hides"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_repair_leaves_the_stored_weights_in_their_dtype(
    stored: torch.dtype, hides: bool
) -> None:
    """The arguments say that it computes in fp16; the fault is named by step, and hidden NaN is found."""
    patcher = make_patcher(stored, hides=hides)
    right = sample(patcher, torch.float32)
    network = patcher.model.diffusion_model
    with assert_untouched(network), guard(patcher, announce=quiet) as handle:
        found = sample(patcher)
        assert network.wide.weight.dtype == stored
    (repair,) = handle.repairs
    assert repair.module_path == "diffusion_model:wide"
    assert (repair.kind, repair.action) == ("clamped" if hides else "range", "rescaled")
    assert repair.step == 0
    assert " in fp16 at step 1 of 3. " in repair.evidence
    assert handle.record.calls[0].precisions == ("fp16",)
    torch.testing.assert_close(found, right, rtol=0.01, atol=0.01)


def test_a_guard_that_a_test_leaves_on_is_seen() -> None:
    """What looks after each test that it leaves none would fail here."""
    patcher = make_patcher()
    with pytest.raises(AssertionError, match="a guard is left on"), leaving_no_guard():
        handle = guard(patcher)
    handle.remove()


def test_what_hides_nan_without_an_end_of_fp16_is_no_fault() -> None:
    """Attention that turns NaN of empty rows into zeros means it."""

    class Attention(nn.Module):
        def forward(self, mask: torch.Tensor) -> torch.Tensor:
            return torch.nan_to_num(mask.softmax(-1), nan=0.0)

    module = Attention()
    with guard({"attention": module}) as handle, torch.no_grad():
        module(torch.full((2, 4), -torch.inf, dtype=torch.float16))
    assert [repair for repair in handle.repairs if repair.kind != "input"] == []
    assert handle.record.calls[0].non_finite == 0


def test_a_plan_is_made_and_put_on() -> None:
    """Planned in fp32 and run in fp16: no call is faulty, and no weight is cast."""
    patcher = make_patcher()
    right = sample(patcher, torch.float32)
    network = patcher.model.diffusion_model
    with torch.no_grad(), assert_untouched(network):
        plan = make_plan(patcher, run=lambda: sample(patcher))
        assert [entry.precision for entry in plan.components] == ["fp16"]
        with guard(patcher, from_json(to_json(plan), Plan)) as handle:
            found = sample(patcher)
            assert network.wide.weight.dtype == torch.float32
    assert handle.repairs == ()
    assert handle.record.calls[0].precisions == ("fp16",)
    torch.testing.assert_close(found, right, rtol=0.01, atol=0.01)


def test_a_model_that_cannot_be_planned_computes_in_the_dtype_of_its_arguments() -> None:
    """The dtype of weights that are cast at each call isn't the one that the model computes in."""
    computed: list[torch.dtype] = []

    class Unplanned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(8, 8)

        def forward(
            self, x: torch.Tensor, timesteps: torch.Tensor, transformer_options: Any = None
        ) -> torch.Tensor:
            computed.append(x.dtype)
            return self.layer(x[:, x[0, :, 0] < torch.inf])  # sizes depend on values

    network = Unplanned().eval().requires_grad_(False)
    patcher = SimpleNamespace(patches_uuid="", model=SimpleNamespace(diffusion_model=network))
    with torch.no_grad():
        plan = make_plan(patcher, run=lambda: sample(patcher))
        assert [entry.precision for entry in plan.components] == ["as loaded"]
        computed.clear()
        with guard(patcher, plan) as handle:
            sample(patcher)
    assert set(computed) == {torch.float16}
    assert handle.record.calls[0].precisions == ("fp16",)

"""Plans from measured calls: what their entries say, and components that get no exponents."""

from __future__ import annotations

import torch
from torch import nn

from models.measured_plans import plan_component
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.plans import calibrated, exponents
from stopdown.records import ComponentPlan, Scaling


def test_reasons_name_fp32_modules_and_pinned_operations() -> None:
    """What stays in fp32 and what was kept for want of a rule stand in the plan as sentences."""
    scaling = Scaling(
        exponents={"a": -2}, fp32_modules=("norm",), fp32_flops=0.125, headroom_bits=2.0,
        tightest="X: (add)", pinned={"bessel": ("X:",)},
    )  # fmt: skip
    bare = ComponentPlan("vae", "X", "", "fp32")
    entry = calibrated.describe_scaling(bare, scaling, "fp16", 3)
    assert entry.reasons == (
        "In 3 measured calls: no fp16 activation comes within a factor of 4 of fp16's maximum (2.0 bits of "
        "headroom). Closest: X (add).",
        "To achieve this, 1 tensor is scaled by 2^-2.",
        "norm can't be scaled and stay in fp32: 12.5 % of the matmul work.",
        "Left unchanged because there is no rule for them: bessel.",
    )
    assert entry.scaling == scaling


def test_a_program_in_memory_is_described_by_its_class() -> None:
    """No fingerprint of files; its weights are as they were after the measurement."""
    module = nn.Linear(4, 4).bfloat16()
    plan = calibrated.measure_plan(module, lambda: module(torch.ones(1, 4)))
    assert (plan.source, plan.fingerprint) == ("Linear", "")
    assert module.weight.dtype == torch.bfloat16


def _plan_linear(module: nn.Module) -> ComponentPlan:
    """The entry of a component that one call was recorded of."""
    callee = Callee("transformer", module, "forward", "denoise")
    call = ComponentCall(callee, (torch.ones(1, 2),), {})
    return plan_component("transformer", module, [call])


def test_a_quantised_component_is_left_alone_and_named() -> None:
    """The plan says which weights are packed and how, and loads them as they are."""
    module = nn.Linear(2, 2).requires_grad_(False)
    module.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    entry = _plan_linear(module)
    assert (entry.precision, entry.in_force.exponents) == ("as loaded", {})
    assert entry.reasons == ("Its weights are quantised (int8: weight); they are left alone.",)


def test_a_component_with_nan_on_disk_is_named_tensor_by_tensor() -> None:
    """It gets no exponents; the plan names each tensor with its count, and says what to do."""
    module = nn.Linear(2, 2).requires_grad_(False)
    module.weight[0, 1], module.bias[:] = float("nan"), float("inf")
    entry = _plan_linear(module)
    assert (entry.precision, entry.in_force.exponents) == ("fp32", {})
    assert entry.reasons[0] == ("2 of its tensors hold NaN or Inf: weight (1 of 4), bias (2 of 2).")


def test_a_component_that_cannot_be_captured_says_which_line() -> None:
    """Values leave PyTorch and no hook helps: fp32, and the plan quotes the line."""

    class Leaving(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.numpy() * 2)

    entry = _plan_linear(Leaving(2, 2).requires_grad_(False))
    assert entry.precision == "fp32"
    assert "x.numpy() * 2" in entry.reasons[0]
    assert "test_calibrated.py" in entry.reasons[0]


class Picky(nn.Module):
    """An autoencoder that decodes anything and encodes nothing that was made up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.linear(z)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("Encoding without tiling has not been implemented yet.")


def test_a_made_up_encode_that_fails_is_left_out() -> None:
    """Whatever it raises: the decoder is in fp16 all the same, and the plan says what was not measured."""
    module = Picky().eval().requires_grad_(False)
    calls = [
        ComponentCall(
            Callee(f"vae.{x}", module, x, x), (torch.ones(1, 2),), {}, made_up=x == "encode"
        )
        for x in ("encode", "decode")
    ]
    assert exponents.leave_out_failing(module, calls) == calls[1:]
    entry = plan_component("vae", module, calls)
    assert entry.precision == "fp16"
    assert any("Encoding wasn't measured: " in x and "without tiling" in x for x in entry.reasons)

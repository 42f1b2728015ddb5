"""Bounds whose products an accelerator computes are those of the processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from device.simulated_device import KIND, Simulated
from models.rescaling_models import make_example
from models.wide_models import certify, check_bounds, make_encoder, make_transformer
from stopdown.devices.device_choice import choose_device
from stopdown.fold_names import name_parameters
from stopdown.plans import certified, near_weights
from stopdown.plans.calibrated import measure_plan
from stopdown.plans.certified import certify_program
from stopdown.plans.near_weights import bring_near, is_summed_in_fp32
from stopdown.scaling.bounds import propagation, singular_values


@pytest.fixture(autouse=True)
def _near(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device is one that weights are brought to."""
    monkeypatch.setattr(near_weights, "KINDS", (KIND,))


PROBE_BYTES = 2 * 256 * near_weights.TERMS * 4
"""Of what a device is asked to multiply first."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make", [make_transformer, pytest.param(make_encoder, marks=pytest.mark.slow)]
)
def test_bounds_are_those_of_the_processor(make: Any, simulated: Simulated) -> None:
    """Each large matrix is brought once for each pass; bounds differ in the last digits of fp32."""
    module, call = make()
    assert near_weights.LARGE == singular_values.SMALL  # smaller ones would come back to the host
    before = simulated.counts.bytes_in
    assert simulated.used() == 0
    check_bounds(module, call, choose_device(KIND))
    large = sum(
        x.nbytes for x in module.parameters() if x.dim() == 2 and x.numel() * min(x.shape) > 2**27
    )
    assert simulated.counts.bytes_in - before >= large > 0
    assert simulated.used() == 0


def plan_there() -> Any:
    """The plan of an encoder for the simulated device, as `certify_plan` makes it."""
    torch.manual_seed(0)
    module, call = make_encoder()
    load = module.state_dict().__getitem__
    context = certified._Context({}, {}, "fp32", choose_device(KIND), "", None, False)
    traced = certified.TracedCalls(module, [call])
    made = certified._plan_component(context, "encoder", load, traced)
    return made.in_force


@pytest.mark.thorough
@pytest.mark.parametrize(("room", "brought"), [(2**20, 0), (2**21 + 2**19, 2**21)])
def test_a_device_without_memory(room: int, brought: int, simulated: Simulated) -> None:
    """Where a weight does not fit, or no product of it, the processor does the work."""
    expected = plan_there()
    simulated.limit(simulated.used() + room)
    before = simulated.counts.bytes_in
    made = plan_there()
    more = simulated.counts.bytes_in - before - PROBE_BYTES
    assert more >= brought if brought else more == 0
    assert made.bounded == made.values == expected.bounded
    assert made.layers == expected.layers


def test_memory_that_ends_in_a_table_is_not_taken_for_no_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be computed has a looser bound; what did not fit is computed elsewhere."""

    def end(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(propagation, "evaluate", end)
    module, call = make_encoder()
    with pytest.raises(torch.OutOfMemoryError):
        certify(module, call, name_parameters(module).__getitem__)


def test_a_device_that_rounds_factors_gets_no_weights(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TF32 has ten digits behind the point; a product of such factors is told from one of fp32."""
    made = torch.Generator().manual_seed(1)
    left, right = (torch.randn(64, 16, generator=made) for _ in range(2))
    narrow = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (left, right)]
    assert is_summed_in_fp32(left @ right.T, left, right)
    assert not is_summed_in_fp32(narrow[0] @ narrow[1].T, left, right)
    monkeypatch.setattr(near_weights, "is_summed_in_fp32", lambda *given: False)
    before = simulated.counts.bytes_in
    load = {"weight": torch.ones(512, 1024)}.__getitem__
    assert bring_near(load, choose_device(KIND)) is None
    assert simulated.counts.bytes_in - before == PROBE_BYTES


class Tabled(torch.nn.Module):
    """A linear layer behind a table that no dictionary of weights has, made on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(0, 1, 8, device=KIND)
        self.linear = torch.nn.Linear(8, 8, device=KIND)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden_states * self.table)  # type: ignore[no-any-return]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["CogVideoX rotary", "Qwen-Image", "table"])
def test_a_module_on_a_device_is_certified(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its weights lie on the device, and tables in plain attributes may do so as well."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    module: torch.nn.Module
    if name == "table":
        module, args, kwargs = Tabled(), (torch.ones(1, 4, 8),), {}
    else:
        module, [(_, args, kwargs)] = make_example(name)
    module.to(KIND)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(KIND), (args, dict(kwargs)))
    [entry] = certify_program(module, lambda: module(*args, **kwargs)).components
    assert entry.precision == "fp16", entry.reasons
    assert entry.in_force.bounded > 0.9 * entry.in_force.values


@pytest.mark.thorough
def test_bounds_beside_what_was_measured_on_a_device(simulated: Simulated) -> None:
    """Weights in fp32 on the device; each value that was measured has its bound beside it."""
    simulated.act_as("cuda")
    module, call = make_encoder()
    module.to(KIND)
    given = call.args[0].to(KIND)
    [entry] = measure_plan(module, run=lambda: module(given), ranges="auto").components
    assert entry.precision == "fp16", entry.reasons
    assert entry.in_force.bounded == entry.in_force.values > 0

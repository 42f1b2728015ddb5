"""Session or model: changed weights, differing results and wrong kernels are named; none is invented."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.injected_faults import inject
from models.pipeline_calls import call_pipeline, quiet
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.component_calls.call import ComponentCall
from stopdown.component_calls.call_interception import Rank, intercept
from stopdown.component_calls.components import find_callees
from stopdown.errors import NonFiniteError
from stopdown.interception.patches import Patches
from stopdown.runtime import fault_handler, session_check
from stopdown.runtime.culprit import find_culprit
from stopdown.runtime.guard import guard
from stopdown.runtime.weight_history import WeightHistory

Act = Callable[[int, nn.Module, Any], Any]
"""Given the number of a call from 0, the module, and what it gave."""


class Net(nn.Module):
    """A linear, noise if it is wanted, and a linear that overflows in fp16 for large values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        for part in (self.first, self.second):
            nn.init.eye_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, x: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
        """`[N, 8]` to `[N, 8]`."""
        return self.second(self.first(x) * 4 + noise * torch.randn_like(x)) / 4


@contextmanager
def acting(callee: Any, before: Act | None = None, after: Act | None = None) -> Iterator[None]:
    """Do something before and after each call, beneath a guard."""
    count = 0

    def layer(call: ComponentCall) -> Any:
        nonlocal count
        number, count = count, count + 1
        if before is not None:
            before(number, callee.owner, None)
        output = call.proceed()
        return output if after is None else after(number, callee.owner, output)

    with Patches() as patches:
        intercept(callee, layer, patches, Rank.FAULT)
        yield


def find_callee(program: Any, name: str) -> Any:
    return next(x for x in find_callees(program) if x.name == name)


def overwrite(module: nn.Module, value: float) -> None:
    """As another copy would: without PyTorch's count of writes."""
    next(module.parameters()).data.fill_(value)


def run(pipe: Any, **options: Any) -> Any:
    """The handle of one guarded run."""
    with guard(pipe, announce=quiet, **options) as handle:
        call_pipeline(pipe, "cogvideox")
    return handle


@pytest.fixture
def pipe() -> Any:
    """A tiny pipeline of its own, which may be spoilt."""
    return testing.make_pipeline("cogvideox", dtype=torch.bfloat16)


def spoil_second(value: float) -> Act:
    return lambda number, module, _: overwrite(module, value) if number == 1 else None


def test_weights_that_were_overwritten_between_two_calls_are_named(pipe: Any) -> None:
    """NaN over a weight before the second step: the weight is named, and the remedy is a new process."""
    before = spoil_second(torch.nan)
    with (
        acting(find_callee(pipe, "transformer"), before),
        guard(pipe, announce=quiet) as handle,
        pytest.raises(NonFiniteError) as caught,
    ):
        call_pipeline(pipe, "cogvideox")
    (repair,) = handle.repairs
    assert (repair.kind, repair.session, repair.step) == ("weight", "weights-changed", 1)
    assert "something in this session overwrote them. Load the model again" in str(caught.value)


def test_weights_that_the_program_wrote_to_are_said_to(pipe: Any) -> None:
    """A write that PyTorch counts is the program's own."""

    def write(number: int, module: nn.Module, _: Any) -> None:
        if number == 1:
            with torch.no_grad():
                next(module.parameters()).fill_(torch.nan)

    with acting(find_callee(pipe, "transformer"), write), pytest.raises(NonFiniteError) as caught:
        run(pipe)
    assert "The program itself wrote to them." in str(caught.value)


def darken(number: int, module: nn.Module, output: Any) -> Any:
    """Have an autoencoder give black."""
    output[0].fill_(-1.0)
    return output


def blacken(pipe: Any, after: Act) -> Any:
    with acting(find_callee(pipe, "vae.decode"), None, after):
        return run(pipe)


@pytest.mark.thorough
def test_weights_behind_a_black_picture_are_named(pipe: Any) -> None:
    """Zeros over a weight of the text encoder between two runs whose pictures are black."""

    with (
        acting(find_callee(pipe, "vae.decode"), None, darken),
        guard(pipe, announce=quiet) as handle,
    ):
        call_pipeline(pipe, "cogvideox")
        assert [x.kind for x in handle.record.findings] == ["black-frames"]
        overwrite(pipe.text_encoder, 0.0)
        call_pipeline(pipe, "cogvideox")
    found = {x.kind: x.module_path for x in handle.record.findings[1:]}
    assert found == {"black-frames": "result 1", "weights-changed": "text_encoder"}


@pytest.mark.thorough
def test_a_weight_that_arrives_late_is_named(pipe: Any) -> None:
    """A weight that is not there while the call runs, and is there when it is run again."""
    owner = pipe.transformer
    kept = next(owner.parameters()).detach().clone()

    def come_late(number: int, module: nn.Module, _: Any) -> None:
        overwrite(module, torch.nan) if number == 1 else next(module.parameters()).data.copy_(kept)

    plain = call_pipeline(pipe, "cogvideox")
    with acting(find_callee(pipe, "transformer"), come_late), guard(pipe, announce=quiet) as handle:
        np.testing.assert_array_equal(call_pipeline(pipe, "cogvideox"), plain)
    (repair,) = handle.repairs
    assert (repair.kind, repair.action) == ("intermittent", "replayed")
    assert repair.session == "weights-late"
    assert "they were copied too late, or were overwritten for that time" in repair.evidence


def test_a_kernel_that_is_wrong_every_tenth_time_is_named() -> None:
    """Of 40 calls those that were NaN are run again, and named as results that differ."""
    net, count = Net(), itertools.count()

    def fail(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if next(count) % 10 == 9 else output

    net.second.register_forward_hook(fail)
    program = {"net": net}
    with torch.no_grad(), guard(program, announce=quiet) as handle:
        outputs = [net(torch.full((2, 8), float(i))) for i in range(40)]
    assert [float(x.mean()) for x in outputs] == list(range(40))
    assert [x.session for x in handle.repairs] == ["results-differ"] * len(handle.repairs)
    assert len(handle.repairs) == 4
    assert "repeated with the same arguments and weights" in handle.repairs[0].evidence


@pytest.mark.thorough
def test_a_black_picture_of_a_call_that_does_not_come_again_is_named(pipe: Any) -> None:
    """An autoencoder that gives -1 once, and a picture when it is run again."""

    def darken_once(number: int, module: nn.Module, output: Any) -> Any:
        return darken(number, module, output) if number == 0 else output

    found = blacken(pipe, darken_once).record.findings
    assert [(x.kind, x.module_path) for x in found] == [
        ("black-frames", "result 1"),
        ("results-differ", "vae.decode"),
    ]


@torch.library.custom_op("stopdown_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Twice a tensor, by a kernel that is wrong in fp16."""
    return x * torch.nan if x.dtype == torch.float16 else x * 2


def test_a_kernel_that_is_wrong_in_one_format_is_named() -> None:
    """A value that fp16 holds, from finite operands, and NaN nevertheless: the kernel."""

    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.stopdown_tests.double(x)

    module, x = Doubling(), torch.ones(2, 2, dtype=torch.float16)
    culprit, _ = find_culprit(module, lambda: module(x), {"x": x})
    assert (culprit.kind, culprit.reached) == ("kernel", 2.0)
    assert culprit.describe("net").endswith(
        "and it ought to reach no more than 2, which fp16 holds: this device's kernel is wrong, or adds "
        "up in 16 bits."
    )


@pytest.mark.thorough
def test_a_kernel_that_is_wrong_on_one_device_is_named(simulated: Any) -> None:
    """fp32 on the device gives NaN where the CPU gives numbers."""

    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.stopdown_tests.double_here(x)

    @torch.library.custom_op("stopdown_tests::double_here", mutates_args=())
    def double_here(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.device.type == "cpu" else x * torch.nan

    module, x = Doubling(), torch.ones(2, 2, device="simulated")
    culprit, _ = find_culprit(module, lambda: module(x), {"x": x})
    assert (culprit.kind, culprit.reached) == ("kernel", 2.0)


@pytest.mark.thorough
def test_in_500_healthy_runs_nothing_is_named() -> None:
    """Noise is drawn and values that overflow in fp16 are repaired: no word of the session."""
    net = Net().half()
    program = {"net": net}
    with torch.no_grad(), guard(program, announce=quiet) as handle:
        for i in range(500):
            torch.manual_seed(i)
            net(
                torch.full((2, 8), 2e4 * (i % 50 == 49) + i, dtype=torch.float16),
                noise=float(i % 2),
            )
    assert {x.session for x in handle.repairs} == {""}
    assert handle.repairs
    assert handle.record.calls[0].calls == 500


def test_pictures_that_are_black_by_themselves_are_no_fault_of_the_session() -> None:
    """An autoencoder that always gives black: one finding, and the same random numbers after it."""

    pipe = testing.make_pipeline("cogvideox")
    state = torch.get_rng_state()
    with acting(find_callee(pipe, "vae.decode"), None, darken):
        call_pipeline(pipe, "cogvideox")
        plain, _ = torch.get_rng_state(), torch.set_rng_state(state)
        with assert_untouched(pipe):
            handle = run(pipe)
    assert [x.kind for x in handle.record.findings] == ["black-frames"]
    assert torch.equal(torch.get_rng_state(), plain)


def test_switched_off_nothing_is_named(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the examination the same fault is a race or memory."""
    monkeypatch.setattr(fault_handler, "examine_fault", lambda *_: None)
    with inject(pipe, "transformer", step=1):
        (repair,) = run(pipe).repairs
    assert repair.session == ""
    assert repair.evidence.endswith("a race, or memory.")


def test_after_a_fault_all_values_are_compared() -> None:
    """A value between those that are kept is seen to change from the first comparison of the whole on."""
    net = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    history = WeightHistory()
    history.note(net, ())
    assert history.find_changed(net, whole=True) == []
    net.weight.data[0, 1] += 1
    assert history.find_changed(net, whole=False) == []
    assert history.find_changed(net, whole=True) == ["weight"]


@pytest.mark.parametrize("size", [1001, 1000])
def test_the_last_value_of_a_weight_is_compared(size: int) -> None:
    """Whether or not several values make a number of 64 bits."""
    net = nn.Linear(size, 1, bias=False).half()
    history = WeightHistory()
    history.note(net, ())
    assert history.find_changed(net, whole=True) == []
    net.weight.data[0, -1] += 1
    assert history.find_changed(net, whole=True) == ["weight"]


def test_casts_and_moves_are_no_changes() -> None:
    """Another dtype, another memory layout and a new tensor with the same values."""
    net = nn.Conv2d(3, 4, 3)
    history = WeightHistory()
    history.note(net, ())
    net.to(memory_format=torch.channels_last)
    assert history.find_changed(net, whole=True) == []
    net.weight = nn.Parameter(net.weight.detach().clone())
    assert history.find_changed(net, whole=True) == []
    net.half()
    assert history.find_changed(net, whole=True) == []


@pytest.mark.parametrize(
    ("factor", "differs"), [(1.0, False), (1.01, False), (2.0, True), (torch.nan, True)]
)
def test_results_differ_by_more_than_rounding(factor: float, differs: bool) -> None:
    """Sums in another order are no fault; other values and NaN are."""
    x = torch.arange(1.0, 9.0)
    assert session_check._differ(x, x * factor) is differs

"""Powers of two at the ends of a call: arguments that are scaled on the way in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models.signature_cases import measure_error
from models.watched_encoders import make_encoder, plan_module, planned, run
from stopdown.errors import ScalingError
from stopdown.runtime.guard import guard
from stopdown.scaling.watch.call_exponents import CallEnds


def test_a_refused_argument_beyond_fp16_is_measured_as_it_is() -> None:
    """Exponents are found for what the call was given, and not for the Inf that a cast makes of it."""
    module, first = make_encoder()
    other = {**first, "late": torch.full((1, 1, 32), 2e5), "gate": torch.zeros(1)}
    wanted = run(module, other)
    with guard({"part": module}, plan_module(module, first), announce=lambda text: None) as handle:
        run(module, first)
        assert measure_error(run(module, other), wanted) < 2e-3
        assert [(x.kind, x.action) for x in handle.repairs] == [("signature", "rescaled")]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_guard_scales_arguments_beneath_it(compiled: bool) -> None:
    """An argument that meets scaled values is multiplied inside of a guard: nothing else is repaired."""
    module, first = make_encoder()
    module.up[2].weight.mul_(2.0**4)  # so that what it gives overflows as well
    second = {**first, "inner": torch.full((2, 5, 64), 300.0)}
    wanted = [run(module, x) for x in (first, second)]
    program: Any = {"part": torch.compile(module, backend="eager") if compiled else module}
    module.half()
    with guard(program, announce=lambda text: None) as handle:
        run(program["part"], first, torch.float16)
        calls = (second, first, second, first)
        found = [run(program["part"], x, torch.float16) for x in calls]
        assert [x.kind for x in handle.repairs] == ["range"]
        assert module.embed.weight.dtype == torch.float16
    errors = [measure_error(x, wanted[1 - i % 2]) for i, x in enumerate(found)]
    assert max(errors) < 2e-3


def test_a_fault_of_a_call_whose_arguments_are_scaled() -> None:
    """A repair under such a call rests on the arguments that the program gave, and so does its replay."""
    module, first = make_encoder()
    module.up[2].weight.mul_(2.0**4)
    second = {**first, "inner": torch.full((2, 5, 64), 6e4)}
    wanted = [run(module, x) for x in (second, second, first)]
    with guard({"part": module}, plan_module(module, first), announce=lambda text: None) as handle:
        found = [run(module, x, torch.float16) for x in (second, second, first)]
        assert [(x.kind, x.action) for x in handle.repairs] == [("range", "rescaled")]
    errors = [measure_error(*pair) for pair in zip(found, wanted, strict=True)]
    assert max(errors) < 2e-3


def test_values_beyond_the_range_of_an_unmeasured_call() -> None:
    """A call that overflows by arguments that nobody measured is refused, and NaN is not returned."""
    module, first = make_encoder()
    second = {**first, "late": torch.full((32,), 6e4), "hidden": True}
    module.down[2].weight.mul_(2.0**4)  # so that the stream is stored higher
    with planned(module, first):
        watch = find_watch(module)
        key = "forward(hidden=True, late[1d], x[3d])", ((32,), (2, 5, 32))
        watch.known.verdicts[key] = CallEnds({1: 12}, {}, 2, 3)
        with pytest.raises(ScalingError, match="returned values that aren't finite"):
            run(module, second)


def find_watch(module: nn.Module) -> Any:
    (entry,) = vars(module)["_call_impl"].stopdown_stack.layers
    return entry.layer.__self__

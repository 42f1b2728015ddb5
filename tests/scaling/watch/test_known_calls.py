"""Calls of other sizes and signatures than exponents were found for: known, repaired or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.measured_plans import measure_pipeline
from models.signature_cases import measure_error
from models.watched_encoders import Modulated, make_sized, planned, repaired, run
from stopdown.errors import ScalingError
from stopdown.memory.offloader import predict_run
from stopdown.plans.applier import apply_plan
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.watch import known_calls
from stopdown.scaling.watch.known_calls import KnownCalls
from stopdown.testing import make_pipeline


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs without values and captures of calls, as they are made."""
    found: list[str] = []
    read, trace = known_calls.read_call, KnownCalls.trace

    def count_read(*args: Any) -> Any:
        found.append("read")
        return read(*args)

    def count_trace(*args: Any, **options: Any) -> Any:
        found.append("trace")
        return trace(*args, **options)

    monkeypatch.setattr(known_calls, "read_call", count_read)
    monkeypatch.setattr(KnownCalls, "trace", count_trace)
    return found


def test_sizes_that_lead_elsewhere_are_found(looked: list[str]) -> None:
    """A table that has exponents and is not read: refused; sizes that were met cost nothing."""
    module, calls = make_sized()
    wanted = [run(module, x) for x in calls]
    with planned(module, calls[0]) as applied:
        assert applied.plan.components[0].in_force.exponents.get("table")
        looked.clear()
        found = [run(module, calls[i], torch.float16) for i in (0, 1)]
        assert looked == ["read", "read"]
        for _ in range(2):
            with pytest.raises(ScalingError, match=r"was called with sizes 2x7x32 \(forward\)"):
                run(module, calls[2], torch.float16)
            for kwargs in calls[:2]:
                run(module, kwargs, torch.float16)
        assert looked[2:] == ["read", "trace"]
    errors = [measure_error(x, right) for x, right in zip(found, wanted, strict=False)]
    assert max(errors) < 2e-3


def test_sizes_that_lead_elsewhere_are_repaired(looked: list[str]) -> None:
    """Under a guard exponents are found that hold for both ways through the code, once."""
    module, calls = make_sized()
    wanted = [run(module, x) for x in calls]
    with repaired(module, calls[0]) as handle:
        found = [run(module, x, torch.float16) for x in calls]
        assert [x.kind for x in handle.repairs] == ["range", "signature"]
        assert "was called with other sizes (forward)" in handle.repairs[1].evidence
        assert looked.count("trace") == 1
    errors = [measure_error(x, right) for x, right in zip(found, wanted, strict=True)]
    assert max(errors) < 2e-3


def test_sizes_that_lead_elsewhere_are_refused() -> None:
    """`rescale_` keeps its exponents: what they do not hold for is refused, in fp32 as well."""
    module, calls = make_sized()
    wanted = [run(module, x) for x in calls]
    rescaling = rescale_(module, (), calls[0])
    assert all(torch.equal(run(module, calls[i]), wanted[i]) for i in (0, 1))
    with pytest.raises(ScalingError, match="Sized was called with sizes 2x7x32"):
        run(module, calls[2])
    rescaling.undo()
    assert torch.equal(run(module, calls[2]), wanted[2])


@pytest.mark.thorough
def test_a_forecast_leaves_the_weights_of_other_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast of calls that exponents do not hold for runs, and takes none of them off the weights."""
    monkeypatch.setattr(known_calls, "find_call_ends", lambda *args: None)
    pipe = make_pipeline("sd", overflow="unet")
    given: dict[str, Any] = {"prompt": "a cat", "num_inference_steps": 1}
    plan = measure_pipeline(pipe, prompts=[given])
    with apply_plan(pipe, plan):
        before = {name: x.clone() for name, x in pipe.unet.named_parameters()}
        scaled = {**given, "cross_attention_kwargs": {"scale": 0.5}}
        assert predict_run(pipe, scaled, steps=1, fused=True).predictions
        assert all(torch.equal(x, before[name]) for name, x in pipe.unet.named_parameters())


def test_a_difference_has_lists_whole() -> None:
    """Numbers of a list are not arguments of their own."""
    torch.manual_seed(2)
    module = Modulated().eval().requires_grad_(False)
    given = {"x": torch.randn(1, 12, 16), "time": torch.randn(1, 8)}
    known = KnownCalls(module, rescale_(module, (), {**given, "grid": (3, 4)}).scaling)
    key = "forward(grid=[2, 6], time[2d], x[3d])", ()
    said = known.describe_difference(key, "forward")
    assert said == "with grid=[2, 6], without grid=[3, 4] (forward)"
    # FSDP sets attributes on each part: the error had 30 KB
    many = ", ".join(f"part{i}._is_sharded=True" for i in range(500))
    said = known.describe_difference((f"forward({many}, time[2d], x[3d])", ()), "forward")
    assert said.endswith("and 493 more (forward)")

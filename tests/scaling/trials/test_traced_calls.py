"""Calls of one component that are captured once: certified, signed and exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stopdown.errors import ScalingError
from stopdown.fold_names import name_parameters
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.scaling.trials import measurement, traced_calls
from stopdown.scaling.trials.traced_calls import TracedCalls


class Wide(nn.Module):
    """A linear whose bound leaves fp16, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.requires_grad_(False)
        self.inner.weight.mul_(2.0**10)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(hidden_states))


def trace(rows: int = 4) -> TracedCalls:
    module = Wide()
    callee = Callee("transformer", module, "forward", "denoise")
    given = {"hidden_states": torch.zeros(1, rows, 8)}
    return TracedCalls(module, [ComponentCall(callee, (), given)])


@pytest.fixture
def captured(monkeypatch: Any) -> list[str]:
    """An entry for each capture."""
    made, capture = list[str](), measurement.capture_call
    monkeypatch.setattr(
        measurement, "capture_call", lambda *x, **y: made.append("") or capture(*x, **y)
    )
    return made


def test_exponents_rest_on_bounds_alone() -> None:
    """No value of the call is read: its tensors are zeros."""
    traced = trace()
    found = traced.certify("native", name_parameters(traced.module).__getitem__)
    assert found.certified
    assert found.exponents["inner.weight"] < 0
    assert found.limits == {"forward.hidden_states": 64.0}


def test_a_stream_that_cannot_be_is_noted(monkeypatch: Any) -> None:
    """The exponents are those of the stream as it is, with the reason."""

    def refuse(*_: Any) -> Any:
        raise ScalingError("its code casts it")

    monkeypatch.setattr(traced_calls, "plan_stream", refuse)
    traced = trace()
    load = name_parameters(traced.module).__getitem__
    found = traced.certify("fp32", load)
    assert found.stream is None
    assert found.note == "The residual stream isn't kept in fp32: its code casts it"
    assert found.exponents == traced.certify("native", load).exponents


def test_a_call_is_captured_once(captured: list[str]) -> None:
    """To be signed, certified and exported."""
    traced = trace()
    sign = traced.sign()
    scaling = traced.certify("native", name_parameters(traced.module).__getitem__)
    made = traced.export(scaling, {}, {}, name_parameters(traced.module).__getitem__)
    assert len(captured) == 1
    assert [graph["method"] for graph in made["graphs"]] == [""]
    assert sign == traced.sign()


def test_signatures_differ_by_size() -> None:
    """Equal calls of equal modules have equal ones."""
    assert trace().sign() == trace().sign() != trace(6).sign()

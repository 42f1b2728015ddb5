"""How a fault is told: the error that ends a run, and the entry in the guard's log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models.pipeline_calls import quiet
from stopdown.records import ComponentPlan, Repair, Scaling
from stopdown.runtime import fault_records
from stopdown.runtime.call_check import CallCheck
from stopdown.runtime.culprit import Culprit
from stopdown.runtime.fault_records import FaultCase, FaultRecords, describe_remedy
from stopdown.runtime.fault_texts import Fault
from stopdown.runtime.guard import guard
from stopdown.runtime.repair_order import Remedy
from stopdown.runtime.run_check import FaultOrigin
from stopdown.runtime.session import Session
from stopdown.scaling import ComponentCall

RANGE = Culprit("range", "0", "linear", "fp16", ("fp16 [2, 2], largest 300",), 9e4)
ORIGIN = FaultOrigin("scheduler", "It came from the scheduler.", "Use another one.")


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The session of a guard that raises at faults, and has seen one call of its module."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half().requires_grad_(False)
    on_fault = getattr(request, "param", "raise")
    with guard(module, on_fault=on_fault, announce=quiet) as handle:
        module(torch.ones(1, 2).half())
        yield handle.session


def make_case(session: Session, culprit: Culprit = RANGE, x: float = 1.0) -> FaultCase:
    """A call that gave Inf."""
    (call,) = session.calls.values()
    given = ComponentCall(call.callee, (torch.full((1, 2), x).half(),), {})
    output = torch.tensor([[torch.inf, 1.0]]).half()
    fault = Fault(call, given, output, CallCheck(is_finite=False), "fp16", 1, " at step 2 of 4")
    return FaultCase(fault, culprit, time.perf_counter())


def records(session: Session) -> FaultRecords:
    return FaultRecords(session, lambda: ORIGIN)


def test_an_error_has_the_culprit_what_was_tried_and_a_remedy(session: Session) -> None:
    """The overflow comes first, then the output, the operation and each failed attempt."""
    case = make_case(session)
    case.tried.append("bf16: it is slow.")
    error = records(session).make_error(case)
    assert error.what.startswith("Overflow in ")
    assert "an activation reached 90,000, above fp16's maximum of 65,504" in error.what
    assert "returned 1 Inf out of 2 values in fp16 at step 2 of 4." in error.expected
    assert RANGE.describe(case.fault.component, is_sized=False) in error.expected
    assert "90,000" not in error.expected
    assert "Tried without success: bf16: it is slow." in error.expected
    assert error.remedy.endswith('Or let the run repair it: `on_fault="repair"`.')


@pytest.mark.parametrize(
    ("session", "precision"), [("repair", "fp16"), ("raise", "fp32")], indirect=["session"]
)
def test_a_repair_is_suggested_only_where_one_may_help(session: Session, precision: str) -> None:
    """Not by a run that tried it, and not of a component that is in fp32 already."""
    case = make_case(session)
    case.fault = replace(case.fault, precision=precision)
    assert "on_fault" not in records(session).make_error(case).remedy


def test_one_of_several_processes_says_so(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is a plan."""
    monkeypatch.setattr(fault_records, "count_processes", lambda: 3)
    error = records(session).make_error(make_case(session))
    assert "This is one of 3 processes." in error.expected
    assert "stopdown plan SOURCE" in error.remedy


def test_bad_arguments_are_told_with_their_origin(session: Session) -> None:
    """The error and the log name who made them, and the component that received them."""
    case = make_case(session, Culprit("input", "x"))
    error = records(session).make_error(case)
    assert (error.what, error.remedy) == (ORIGIN.what, ORIGIN.remedy)
    assert "was called with it as x: " in error.expected
    records(session).keep(case, "none", "Why.")
    (repair,) = session.log.repairs
    assert repair.module_path == "scheduler"
    assert repair.evidence == f"{ORIGIN.what} {error.expected}"
    good = replace(case.fault, check=CallCheck(inputs=("x",)))
    case.fault = good
    assert (
        records(session)
        .make_error(case)
        .expected.endswith("was called with it as x, and returned finite values.")
    )


def test_values_that_a_pipeline_narrowed_are_told(session: Session) -> None:
    """A component that returns wide values since its repair in this run gave them too early."""
    (state,) = session.components.values()
    case = make_case(session, Culprit("input", "x"), torch.inf)
    state.name = "wide"
    state.applied = (ComponentPlan("", precision="fp16", scaling=Scaling(outputs={0: 3})),)
    assert records(session).make_error(case).what == ORIGIN.what  # no repair of this run
    session.log.keep(Repair("wide", "wide", "range", None, "It overflowed.", "rescaled", "Why."))
    error = records(session).make_error(case)
    assert error.what.startswith("`wide` returns values beyond fp16's maximum")
    assert "From now on they stay in fp32." in error.expected
    records(session).keep(case, "none", "Why.")
    assert session.log.repairs[-1].evidence.startswith(error.what)
    finite = make_case(session, Culprit("input", "x"))
    assert records(session).make_error(finite).what == ORIGIN.what
    state.applied = ()


def test_a_record_has_what_the_error_has(session: Session) -> None:
    """Place, kind, step, attempts and replays; an intermittent fault has no place."""
    case = make_case(session)
    case.tried.append("bf16: it is slow.")
    case.replays = 2
    records(session).keep(case, "fp32", "Nothing else helped.")
    (repair,) = session.log.repairs
    assert repair.module_path == f"{case.fault.component}:0"
    assert (repair.kind, repair.step, repair.action) == ("range", 1, "fp32")
    assert (repair.tried, repair.replays) == (("bf16: it is slow.",), 2)
    assert repair.reason == "Nothing else helped."
    assert repair.verdict == records(session).make_error(case).what
    assert RANGE.describe(case.fault.component) in repair.evidence
    assert repair.elapsed_s >= 0
    records(session).keep(make_case(session, Culprit("intermittent", "0")), "none", "")
    assert session.log.repairs[-1].module_path == case.fault.component


@pytest.mark.parametrize(
    ("planned", "basis"),
    [
        (Scaling(uncertain=("part:0 (linear)",)), "they rested on a guess."),
        (Scaling(uncertain=("part:0 (linear)",), measured_bits=3.0), "they rested on measured calls"),
        (Scaling(uncertain=("part:1 (linear)",)), ""),
        (None, ""),
    ],
)  # fmt: skip
def test_the_basis_of_the_plan_is_told(
    session: Session, planned: Scaling | None, basis: str
) -> None:
    """Where bounds of the plan end at the culprit's module: a guess, or what was measured."""
    case = make_case(session)
    if planned is not None:
        session.planned[case.fault.callee.component_name] = planned
    said = records(session).make_error(case).expected
    assert ("No bound of the plan keeps all values there in range" in said) == bool(basis)
    assert basis in said


def test_a_culprit_that_was_not_looked_for_is_not_told(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several processes or without tracing, only the output is known."""
    monkeypatch.setattr(Session, "names_culprit", False)
    case = make_case(session)
    assert RANGE.describe(case.fault.component) not in records(session).make_error(case).expected


HOOKED = Scaling(note="1 of 2 matrices run in fp16.")


@pytest.mark.parametrize(
    ("remedy", "scaling", "said"),
    [
        (Remedy("rescaled", "fp16", "Why."), HOOKED, HOOKED.note),
        (Remedy("rescaled", "fp16", "Why."), replace(HOOKED, exponents={"a": -1}), "Why."),
        (Remedy("rescaled", "fp16", "Why."), None, "Why."),
        (Remedy("cast", "bf16", "Why."), HOOKED, "Why."),
    ],
)
def test_a_component_without_a_graph_has_its_note_as_reason(
    remedy: Any, scaling: Scaling | None, said: str
) -> None:
    """Its note says which matrices run in fp16; exponents have the reason of their remedy."""
    assert describe_remedy(remedy, (ComponentPlan("", precision="fp16", scaling=scaling),)) == said

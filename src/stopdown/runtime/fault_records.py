"""Records of a fault for errors and the guard's log: the culprit, what its plan rests on, and the repair.

A search for a repair is one `FaultCase`. `FaultRecords` writes it as the error that ends a run, or as a
`Repair` in the guard's log; both have the same sentences.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stopdown.component_call_names import name_module_path
from stopdown.devices.environment import count_processes
from stopdown.errors import NonFiniteError
from stopdown.numerics import describe_excess, iterate_tensors, measure_error
from stopdown.records import ComponentPlan, Repair
from stopdown.runtime.culprit import Culprit
from stopdown.runtime.fault_texts import (
    Fault,
    describe_counts,
    make_fault_error,
    name_fault,
    word_overflow,
)
from stopdown.runtime.repair_order import Remedy
from stopdown.runtime.run_check import FaultOrigin
from stopdown.runtime.session import Session
from stopdown.scaling_records import describe_least


@dataclass(frozen=True)
class RepairReference:
    """The fp32 result of a call that failed, to compare repairs with.

    Attributes:
        output: with all weights in fp32; None if unknown.
        bf16_error: error of the same call in bf16 against it; None if that doesn't run.
    """

    output: Any = None
    bf16_error: float | None = None

    def describe_excess(self, output: Any) -> str:
        """Describe an output's error if it is too large beside bf16's to be accepted; return "" if not,
        or if unknown.
        """
        if self.output is None:
            return ""
        return describe_excess(measure_error(output, self.output), self.bf16_error)


@dataclass
class FaultCase:
    """Non-finite output of a component, and how far the search for a repair of it has got.

    Attributes:
        begun: start of the search, by `time.perf_counter`.
        before: repairs that were applied to the component when the fault occurred.
        tried: attempts that failed, with reasons.
        replays: number of times that the failed call was run again.
        is_rescaled: whether exponents were found at least once.
        is_compared: whether `meant` was determined.
        meant: the call's fp32 output, if it isn't finite either and the model intends that; else None.
    """

    fault: Fault
    culprit: Culprit
    begun: float
    before: tuple[ComponentPlan, ...] = ()
    tried: list[str] = field(default_factory=list)
    replays: int = 0
    reference: RepairReference = RepairReference()
    is_rescaled: bool = False
    is_compared: bool = False
    meant: Any = None


_NARROWED = (
    "`{name}` returns values beyond fp16's maximum, and the pipeline's own code cast them to fp16 before "
    "`{name}` was repaired."
)


class FaultRecords:
    """Writes the errors and records of a session's faults."""

    def __init__(self, session: Session, find_origin: Callable[[], FaultOrigin]) -> None:
        """Prepare to write the errors and records of a guarded program's faults.

        Args:
            find_origin: finds the origin of NaN and Inf that no component made.
        """
        self._session, self._find_origin = session, find_origin

    def make_error(self, case: FaultCase) -> NonFiniteError:
        """Make the error that ends a run because a component's NaN or Inf was not repaired."""
        if name := self._find_narrowed(case.fault):
            return NonFiniteError(
                _NARROWED.format(name=name),
                expected=f"{name_fault(case.fault)} From now on they stay in fp32.",
                remedy='Run the pipeline again. Or use stopdown.load(MODEL, precision="fp16"), which '
                "finds that out before the first run.",
            )
        if case.culprit.kind == "input":
            origin = self._find_origin()
            said = self._describe_caller(case)
            return NonFiniteError(origin.what, expected=said, remedy=origin.remedy)
        if (count := count_processes()) > 1:
            return NonFiniteError(
                name_fault(case.fault),
                expected=f"This is one of {count} processes. The guard repairs nothing there, because the "
                "others wouldn't run the call again.",
                remedy="Make a plan first: stopdown plan SOURCE -o plan.json, and load the model with "
                'precision="plan.json".',
            )
        verdict = word_overflow(case.fault.component, case.culprit.overflow)
        found = self._describe_culprit(case, is_sized=not verdict)
        if case.tried:
            found += f" Tried without success: {' '.join(case.tried)}"
        has_bf16 = self._session.has_bf16(case.fault.guarded)
        error = make_fault_error(case.fault, found, has_bf16=has_bf16, verdict=verdict)
        if self._session.options.on_fault == "raise" and case.fault.precision != "fp32":
            error.remedy += ' Or let the run repair it: `on_fault="repair"`.'
        return error

    def keep(self, case: FaultCase, action: str, reason: str) -> None:
        """Add an entry on a fault to the session's log of repairs.

        Args:
            action: what was done about it.
            reason: why.
        """
        fault, culprit = case.fault, case.culprit
        if culprit.kind == "input" and not self._find_narrowed(fault):
            origin = self._find_origin()
            module_path, said = origin.source, f"{origin.what} {self._describe_caller(case)}"
        elif name := self._find_narrowed(fault):
            module_path = fault.component
            said = f"{_NARROWED.format(name=name)} {name_fault(fault)}"
        else:
            path = "" if culprit.kind == "intermittent" else culprit.path
            module_path = name_module_path(fault.component, path)
            said = f"{name_fault(fault)} {self._describe_culprit(case)}"
        self._session.log.keep(
            Repair(
                component=fault.component,
                module_path=module_path,
                kind=culprit.kind,
                step=fault.step,
                evidence=said.strip(),
                verdict=word_overflow(fault.component, culprit.overflow),
                action=action,
                reason=reason,
                tried=tuple(case.tried),
                replays=case.replays,
                elapsed_s=time.perf_counter() - case.begun,
            )
        )

    def _describe_culprit(self, case: FaultCase, *, is_sized: bool = True) -> str:
        if not self._session.names_culprit:
            return ""
        said = case.culprit.describe(case.fault.component, is_sized=is_sized)
        return f"{said} {self._describe_basis(case)}".rstrip()

    def _describe_basis(self, case: FaultCase) -> str:
        """Describe what the plan's exponents rest on where a fault began: measured calls, or a guess.

        Return "" if proven bounds hold there. Places are compared by module path and not by operation,
        because the replay that finds the fault sees one linear as several operations.
        """
        planned = self._session.planned.get(case.fault.guarded.callee.component_name)
        place = f":{case.culprit.path} ("
        if planned is None or not any(place in x for x in planned.uncertain):
            return ""
        basis = "on a guess"
        if planned.measured_bits is not None:
            least = describe_least(planned.measured_bits)
            basis = f"on measured calls, where such values had {least}"
        return f"No bound of the plan keeps all values there in range: they rested {basis}."

    def _describe_caller(self, case: FaultCase) -> str:
        """Describe that a component was called with NaN or Inf in an argument, and what it returned."""
        called = f"`{case.fault.component}` was called with it as {case.culprit.path}"
        if case.fault.check.is_good:
            return f"{called}, and returned finite values."
        return f"{called}: {name_fault(case.fault)}"

    def _find_narrowed(self, fault: Fault) -> str:
        """Return a component that was repaired in this run and whose output the pipeline cast to fp16.

        The output then is Inf in the arguments of the present call. Return "" without such a component.
        """
        repaired = {x.component for x in self._session.log.of_this_run if x.action == "rescaled"}
        states = self._session.components.values()
        wide = [x.name for x in states if x.returns_wide and x.name in repaired]
        given = iterate_tensors((fault.call.args, fault.call.kwargs))
        return wide[0] if wide and describe_counts(given) else ""


def describe_remedy(remedy: Remedy, applied: tuple[ComponentPlan, ...]) -> str:
    """Return the reason for a repair, for the log.

    If the repair scales no weight, but runs some modules in fp16 and all others in fp32, return the
    explanation that was recorded when these modules were chosen.

    Args:
        applied: the component's plans as applied by the repair.
    """
    found = [x.scaling for x in applied if x.precision == "fp16" and x.scaling is not None]
    if remedy.action == "rescaled" and found and not found[0].exponents and found[0].note:
        return found[0].note
    return remedy.reason

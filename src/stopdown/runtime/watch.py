"""The listeners of a guard: one records a component's arguments, the other checks its output."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from typing import Any

from stopdown.component_calls.components import find_adapter
from stopdown.devices.environment import count_processes
from stopdown.diagnosis.texts import is_refusal
from stopdown.errors import take_first_line
from stopdown.interception.component_locks import find_lock, is_changing
from stopdown.module_calls.entrances import ReplacedError
from stopdown.module_calls.outermost_calls import is_plain, wants_gradients
from stopdown.operations import keeps_clamps
from stopdown.records import Scaling
from stopdown.runtime.call_check import CallCheck, is_opaque
from stopdown.runtime.fault_handler import FaultHandler
from stopdown.runtime.fault_texts import Fault
from stopdown.runtime.guarded_call import Call, GivenTensors
from stopdown.runtime.hidden_values import noting_hidden
from stopdown.runtime.session import Session
from stopdown.scaling import CallWatch, ComponentCall


class Watch:
    """The guard's two listeners around each component call: one records its arguments, the other checks
    its output.
    """

    def __init__(self, session: Session, handler: FaultHandler) -> None:
        self.own_s = 0.0
        self._session, self._handler = session, handler

    def record_arguments(self, guarded: Call, call: ComponentCall) -> Any:
        """Record the arguments that reach the component, to repeat the call later, and continue it; the
        inner layer.
        """
        states = list(self._session.components.values())  # another thread may add one
        is_mixed = any(x.dtype is not None or x.returns_wide for x in states)
        if not is_plain():
            return guarded.state.call(call, is_mixed=is_mixed)
        with find_lock(guarded.module).calling():
            exponents = None if is_changing() else CallWatch.find(guarded.module)
            if exponents is not None and not exponents.has_call_here:
                raise ReplacedError
            begun = time.perf_counter()
            guarded.record_arguments(call, self._session.pipe)
            self.own_s += time.perf_counter() - begun
            with self._noting(guarded):
                return guarded.state.call(call, is_mixed=is_mixed)

    def _noting(self, guarded: Call) -> AbstractContextManager[None]:
        """Return a context manager that notices overflows which the component's code hides, such as by
        `tanh`.

        With compiled components nothing is watched, because they would be recompiled.
        """
        is_known = keeps_clamps(type(guarded.module).__name__)  # what it hides is part of the model
        compiled = any(x.is_compiled for x in list(self._session.calls.values()))
        if is_known or compiled or count_processes() > 1:
            return contextlib.nullcontext()
        is_wide = "fp16" in guarded.summary.precisions
        return noting_hidden(guarded.state.notes.note_hidden, is_wide=is_wide)

    def check(self, guarded: Call, call: ComponentCall) -> Any:
        """Make a call, check its output, and respond to a fault; the layer outside of plans and memory."""
        entered_at = time.perf_counter()
        planned = self._session.planned.get(guarded.callee.component_name, Scaling())
        guarded.begin(call, planned)
        given = GivenTensors(call)
        called = time.perf_counter()
        try:
            output = call.proceed()
        except Exception as error:
            if not is_refusal(error):
                raise
            guarded.record_writes()
            output = self._handler.answer_refusal(self._make_fault(guarded, call), error)
        returned = time.perf_counter()
        guarded.record_writes()
        try:
            check = self._session.check(guarded, output)
        except Exception as error:
            if not self._session.options.hands_back:
                raise
            self._leave_unchecked(guarded, error)
            return output
        guarded.latest.given = given
        guarded.state.note_outputs(call, output)
        with self._session.turn:
            guarded.record(returned - called, check)
        if not check.is_seen and is_opaque(output):
            self._session.log.leave(
                guarded.name,
                f"`{guarded.name}` returned a {type(output).__name__}, whose values can't be looked at: "
                "NaN and Inf in it aren't found.",
            )
        if check.inputs or not check.is_good:
            output = self._handler.answer(self._make_fault(guarded, call, output, check))
        if (observer := self._session.options.observer) is not None:
            steps = self._session.steps
            observer(guarded.name, guarded.callee.stage, steps.done, steps.total)
        self.own_s += (called - entered_at) + (time.perf_counter() - returned)
        return output

    def _leave_unchecked(self, guarded: Call, error: Exception) -> None:
        """Report that a call's output could not be checked."""
        guarded.state.notes.clear()
        self._session.log.leave(
            guarded.name,
            f"What `{guarded.name}` returned couldn't be checked: {take_first_line(error)}",
        )

    def _make_fault(
        self,
        guarded: Call,
        call: ComponentCall,
        output: Any = None,
        check: CallCheck | None = None,
    ) -> Fault:
        """Make the description of a faulty call; the output is None if it raised an error."""
        said = (
            _word_choice(x.component, x.precision, x.reason)
            for x in self._session.options.decisions
            if x.component == guarded.name
        )
        return Fault(
            guarded,
            call,
            output,
            check or CallCheck(),
            guarded.precision,
            *self._locate(guarded, is_counted=check is not None),
            next(said, ""),
            wants_gradients(guarded.module),
        )

    def _locate(self, guarded: Call, *, is_counted: bool) -> tuple[int | None, str]:
        """Return the step of the latest call (from 0, or None), and its place such as ` at step 2 of 28`.

        If nothing counts steps, the place is ` at call 3`.

        Args:
            is_counted: whether the call is among the component's calls; one that raised isn't yet.
        """
        steps = self._session.steps
        if steps.pipe is not None or steps.is_told:
            return steps.find_step(guarded.callee), steps.name_step(guarded.callee)
        kwargs = guarded.latest.call.kwargs if guarded.latest.call is not None else {}
        if (found := find_adapter(self._session.pipe).read_step(kwargs)) is not None:
            return found[0], f" at step {found[0] + 1} of {found[1]}"
        number = guarded.summary.calls + self._session.options.calls_before + (not is_counted)
        return None, f" at call {number}"


def _word_choice(component: str, precision: str, reason: str) -> str:
    """Explain in a sentence why a component ran in a precision.

    Such as: the UNet ran in fp16 because you asked for fp16-plain.
    """
    if reason.startswith("You asked for"):
        return f"`{component}` ran in {precision} because you{reason.removeprefix('You')}"
    return f'{precision} was chosen for `{component}`: "{reason}"'

"""Response to a fault: find the culprit, repair the component, run the same call again.

The call is run again with every operation inspected (`culprit`). Rules decide which remedies to try
(`repair_order`); each is applied to the component (`repairs`), and the same call, with the same arguments
and random numbers, is repeated. A result in fp16 is compared with the same call in fp32 and in bf16: it
is accepted if its error is no larger than bf16's, else the next remedy is tried.

**Catches** all faults that the check of a call finds; repairs whose results are finite but wrong.
**Does not catch** wrong finite results of a repair that can't be compared: of calls that draw random
numbers, and of components whose weights are offloaded or don't fit in fp32. A call that wrote to its
arguments can't be repeated: its fault ends the run.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from stopdown.devices.environment import count_processes
from stopdown.errors import ScalingError, StopdownError, take_first_line
from stopdown.interception.component_locks import find_lock
from stopdown.interception.randomness import find_random
from stopdown.memory.weight_stores import WAITING
from stopdown.module_calls.entrances import ReplacedError
from stopdown.module_calls.kept_state import describe_kept
from stopdown.module_calls.step_caches import clear_caches
from stopdown.numerics import iterate_tensors, measure_error
from stopdown.records import ComponentPlan
from stopdown.runtime.call_check import CallCheck, list_readable
from stopdown.runtime.culprit import Culprit, find_culprit, find_origins
from stopdown.runtime.dtype_repairs import add_note, describe_refusal, repair_refusal
from stopdown.runtime.fault_records import FaultCase, FaultRecords, RepairReference, describe_remedy
from stopdown.runtime.fault_texts import Fault, describe_counts, name_fault
from stopdown.runtime.meant_values import MEANT, MEANT_STAGES, compare_with_fp32, find_meaning
from stopdown.runtime.repair_order import OnFault, Remedy, list_remedies
from stopdown.runtime.repairs import WholeInFp32Error, cast_component
from stopdown.runtime.run_check import FaultOrigin
from stopdown.runtime.session import Session
from stopdown.scaling import CallWatch

LARGE = 10**8
"""Least number of parameters for which a search for a repair is announced, because it takes long."""


class FaultHandler:
    """Responds to calls with NaN, Inf or a dtype error: repairs and repeats them, or raises."""

    def __init__(self, session: Session, find_origin: Callable[[], FaultOrigin]) -> None:
        """Prepare to respond to the faults of a guarded program's calls.

        Args:
            find_origin: finds the origin of NaN and Inf that no component made.
        """
        self._session, self._records = session, FaultRecords(session, find_origin)
        self._log, self._options = session.log, session.options
        self._hands_back = session.options.hands_back

    @property
    def _on_fault(self) -> OnFault:
        """The action on a fault: the requested one, but no repair if several processes run the program.

        The other processes would continue while one of them repeats its call.
        """
        asked = self._options.on_fault
        alone: OnFault = "warn" if self._hands_back else "raise"
        return alone if asked == "repair" and count_processes() > 1 else asked

    def answer(self, fault: Fault) -> Any:
        """Respond to a fault, and return the output with which the program continues."""
        try:
            return self._answer(fault)
        except ReplacedError:
            raise
        except Exception as error:
            if not self._hands_back:
                raise
            fault.guarded.state.put_on(fault.guarded.latest.applied)
            self._log.give_up(fault.component, _name_kind(fault))
            case = FaultCase(fault, Culprit("unknown"), time.perf_counter())
            self._records.keep(case, "none", f"{take_first_line(error)} {_AS_GIVEN}")
            return fault.output

    def _answer(self, fault: Fault) -> Any:
        with find_lock(fault.guarded.module).changing():
            if self._session.is_over:
                self._begin_again(fault)
            if fault.guarded.latest.applied != fault.guarded.state.applied:
                fault = self._look_again(fault)
                if fault.check.is_good:
                    return fault.output
            is_bad = not fault.check.is_good
            if is_bad and self._log.has_given_up(fault.component, _name_kind(fault)):
                return self._hand_back(fault)
            return self._decide(fault)

    def answer_refusal(self, fault: Fault, error: Exception) -> Any:
        """Repair a call that failed on operands of different dtypes; return its output or raise `error`."""
        repaired = None
        if self._on_fault == "repair" and not fault.is_tracked:
            with find_lock(fault.guarded.module).changing():
                if (
                    self._session.is_over
                    or fault.guarded.latest.applied != fault.guarded.state.applied
                ):
                    self._begin_again(fault)
                device = fault.guarded.find_device(self._session.pipe)
                repaired = repair_refusal(fault, error, device)
        if repaired is None:
            add_note(error, describe_refusal(error, fault.component, fault.guarded.module))
            raise error
        output, repair = repaired
        self._record_cast(fault)
        if repair is not None:
            self._log.keep(repair)
        return output

    def _record_cast(self, fault: Fault) -> None:
        for call in self._session.list_calls(fault.guarded.state):
            call.record_cast()

    def _decide(self, fault: Fault) -> Any:
        begun = time.perf_counter()
        if fault.check.is_good:
            return self._pass_on(fault, begun)
        if fault.is_tracked and self._on_fault != "raise":
            self._log.leave(
                fault.component,
                f"{name_fault(fault)} It is being trained: an optimizer holds its parameters, "
                "or they have gradients. So nothing was changed. To allow the repair, call it "
                "under torch.no_grad().",
            )
            return fault.output
        if self._is_meant(fault, fault.output, fault.check) or self._is_as_before(fault):
            return fault.output
        is_known = not self._session.names_culprit or self._log.was_reported(
            fault.component, "none"
        )
        if self._on_fault == "warn" and is_known:
            kind = "clamped" if fault.check.clamped else "unknown"
            self._records.keep(
                FaultCase(fault, Culprit(kind), begun), "none", "Not looked at again."
            )
            return fault.output
        if self._on_fault == "repair":
            self._report_search(fault)
        culprit = self._find_culprit(fault)
        is_half = culprit.dtype in ("fp16", "bf16")
        if is_half and fault.precision == "fp32":  # its code casts by itself
            fault = replace(fault, precision=culprit.dtype)
            fault.guarded.record_own_precision(culprit.dtype)
        case = FaultCase(fault, culprit, begun)
        if _may_be_meant(culprit) and self._is_as_in_fp32(case, fault.output):
            self._record_as_right(fault)
            return fault.output
        if self._on_fault == "warn":
            self._records.keep(case, "none", "on_fault is warn, so the run continues unchanged.")
            return fault.output
        if self._on_fault == "raise":
            raise self._records.make_error(case)
        return self._repair(case)

    def _report_search(self, fault: Fault) -> None:
        """Report that repairing a large component takes long, so that the run doesn't seem to hang."""
        count = sum(x.numel() for x in fault.guarded.module.parameters())
        if count >= LARGE:
            text = (
                f"{name_fault(fault)} Looking for the cause and a repair: with "
                f"{count / 1e9:.1f} billion parameters that takes as long as several of its "
                "calls, some of them in fp32."
            )
            self._log.report_once(fault.component, "begun", text)

    def _record_as_right(self, fault: Fault) -> None:
        with self._session.turn:
            fault.guarded.record_as_right()

    def _look_again(self, fault: Fault) -> Fault:
        """Repeat the call with a repair that another thread has made meanwhile, and check it again."""
        guarded = fault.guarded
        guarded.latest.restore()
        watch = CallWatch.find(guarded.module)
        if watch is not None and not watch.holds_for(fault.call):
            self._begin_again(fault)
        output = fault.call.proceed()
        return replace(fault, output=output, check=self._session.check(fault.guarded, output))

    def _begin_again(self, fault: Fault) -> NoReturn:
        """Restore the state before the call, and raise `ReplacedError` so that it's made again."""
        fault.guarded.latest.restore()
        raise ReplacedError

    def _is_meant(self, fault: Fault, output: Any, check: CallCheck) -> bool:
        """Return whether a hidden overflow is no fault: the result is as close to fp32's as bf16's.

        For example, `tanh` of an overflow is 1, which is right if the true value gives 1. Such operations
        aren't watched in the component from then on, which is recorded. If the result can't be compared
        (offloaded weights aren't cast as a whole), that is reported.
        """
        if not check.is_hidden:
            return False
        is_known, waits = True, vars(fault.guarded.module).get(WAITING, False)
        notes, names = fault.guarded.state.notes, ", ".join(dict.fromkeys(check.clamped))
        try:
            if waits or self._has_written(fault):
                raise ScalingError("It can't be made again.")
            wide = self._repeat_in(fault, "fp32")
            allowed = measure_error(self._repeat_in(fault, "bf16"), wide)
        except Exception:  # weights that cannot be cast: nothing is known, and the result is finite
            is_known, found = False, "couldn't be compared with fp32"
        else:
            if not measure_error(output, wide) <= allowed:
                return False
            found = "are as close to those in fp32 as bf16's"
            if output is fault.output:  # and not a repaired one: the call was right
                self._record_as_right(fault)
        notes.meant.update(check.clamped)
        self._log.leave(
            f"{fault.component}, {names}",
            f"`{fault.component}`: {names} turned Inf into finite values; its results {found}. "
            "From now on, what these operations hide there isn't watched.",
            is_fault=not is_known,
        )
        return True

    def _is_as_before(self, fault: Fault) -> bool:
        """Return whether NaN and Inf in an output are like those of earlier calls that matched fp32."""
        check, known = fault.check, find_meaning(fault.guarded.module)
        if fault.callee.stage not in MEANT_STAGES:  # it may be called by itself as well
            return False
        if check.is_finite or check.inputs or check.beside or check.clamped or not known.kinds:
            return False
        if not known.covers(fault.output, fault.precision):
            return False
        self._record_as_right(fault)
        return True

    def _is_as_in_fp32(self, case: FaultCase, output: Any) -> bool:
        """Return whether the model intends NaN and Inf in an output, because its fp32 output has them too.

        The rest of the output must be as close to fp32's as bf16's is. This is reported once.
        """
        fault = case.fault
        if fault.callee.stage not in MEANT_STAGES or fault.check.inputs:
            return False
        if not case.is_compared:
            case.is_compared, case.meant = True, self._find_meant(fault)
        if case.meant is None:
            return False
        try:
            found, near = compare_with_fp32(output, case.meant), None
            if fault.precision != "fp32":
                with contextlib.suppress(Exception):  # whatever a model's code does in bf16
                    near = compare_with_fp32(self._repeat_in(fault, "bf16"), case.meant)
            if not found.is_within(near):
                return False
        except ValueError:  # other outputs than in fp32
            return False
        find_meaning(fault.guarded.module).add(output)
        fault.guarded.state.notes.meant.update(fault.check.beside)
        counts = describe_counts(list_readable(output))
        self._log.leave(
            f"{fault.component}, what it means",
            f"`{fault.component}` returned {counts}{fault.place}. It does so in fp32 as well, from "
            "finite arguments and weights: its code means them, so the run continues.",
        )
        return True

    def _find_meant(self, fault: Fault) -> Any:
        """Return the call's output in fp32 if the model's code intends NaN or Inf in it, else None."""
        guarded, state = fault.guarded, fault.guarded.state
        before, named = state.applied, fault.call.named
        is_plain = not before and fault.precision == "fp32"
        waits = vars(guarded.module).get(WAITING, False)
        if not self._session.names_culprit or self._has_written(fault) or (waits and not is_plain):
            return None
        try:
            if not is_plain:
                state.put_on((cast_component("fp32"),))
            guarded.latest.restore()
            with torch.set_grad_enabled(torch.is_grad_enabled() and not fault.is_tracked):
                kinds, output = find_origins(guarded.module, fault.call.proceed, named)
        except Exception:  # weights that cannot be cast, code that cannot be looked at
            return None
        finally:
            state.put_on(before)
            state.notes.clear()
        return output if kinds and kinds <= MEANT else None

    def _repeat_in(self, fault: Fault, precision: str, *, uncached: bool = False) -> Any:
        """Repeat the call with all weights in another precision, and return its output.

        Args:
            uncached: clear the step caches first, as for a repaired call.
        """
        state = fault.guarded.state
        before = state.applied
        try:
            state.put_on((cast_component(precision),))
            fault.guarded.latest.restore()
            if uncached:
                clear_caches(fault.guarded.module)
            return fault.call.proceed()
        finally:
            state.put_on(before)
            fault.guarded.state.notes.clear()

    def _pass_on(self, fault: Fault, begun: float) -> Any:
        """Accept a finite output for arguments with NaN or Inf; report it once for each component."""
        if self._log.was_reported(fault.component, "inputs"):
            return fault.output
        self._log.mark_reported(fault.component, "inputs")
        case = FaultCase(fault, Culprit("input", ", ".join(fault.check.inputs)), begun)
        if self._on_fault == "raise":
            raise self._records.make_error(case)
        self._records.keep(
            case, "none", "Its output was finite nevertheless, so the run continues."
        )
        return fault.output

    def _repair(self, case: FaultCase) -> Any:
        fault, culprit, state = case.fault, case.culprit, case.fault.guarded.state
        if self._has_written(fault):
            case.tried.append("it wrote to its arguments, so it can't be made again.")
            return self._give_up(case, "The call can't be made again.")
        case.before = state.applied
        has_bf16 = fault.precision == "fp16" and self._session.has_bf16(fault.guarded)
        for remedy in list_remedies(culprit.kind, fault.precision, culprit.around, has_bf16):
            if remedy.residual == "fp32" and not case.is_rescaled:
                continue  # without exponents an fp32 stream finds none either
            is_good, output = self._attempt(case, remedy)
            if is_good:
                self._record_cast(fault)
                self._records.keep(case, remedy.recorded, describe_remedy(remedy, state.applied))
                return output
        state.put_on(case.before)
        fault.guarded.latest.restore()  # the next call begins as this one did
        return self._give_up(case, "No repair produced a finite result.")

    def _give_up(self, case: FaultCase, why: str) -> Any:
        """Raise the fault's error, or return the unrepaired model's output with all effects of its call."""
        fault = case.fault
        if not self._hands_back:
            error = self._records.make_error(case)
            self._records.keep(case, "none", why)
            raise error
        self._records.keep(case, "none", f"{why} {_AS_GIVEN}")
        self._log.give_up(fault.component, _name_kind(fault))
        if self._has_written(fault):
            return fault.output
        return fault.call.proceed()

    def _hand_back(self, fault: Fault) -> Any:
        """Return the unrepaired output of a call whose repair was given up; record it once per run."""
        if not any(x.component == fault.component for x in self._log.of_this_run):
            self._records.keep(
                FaultCase(fault, Culprit("unknown"), time.perf_counter()), "none", _AS_GIVEN
            )
        return fault.output

    def _has_written(self, fault: Fault) -> bool:
        """Return whether the call wrote to its arguments, so that it can't be repeated."""
        latest = fault.guarded.latest
        return latest.given is not None and latest.given.were_written

    def _attempt(self, case: FaultCase, remedy: Remedy) -> tuple[bool, Any]:
        """Apply a remedy and repeat the call; return whether the result is accepted, and the result."""
        name, output, told = remedy.recorded, None, ""
        is_narrow = remedy.action in ("rescaled", "fp32-module")
        repairs = case.before
        try:
            repairs = self._find_repairs(case, remedy)
        except Exception as error:  # no such repair, or the model's code refuses it
            told = take_first_line(error)
            case.is_rescaled = case.is_rescaled or isinstance(error, WholeInFp32Error)
        if not told:
            case.is_rescaled = case.is_rescaled or remedy.action == "rescaled"
            if is_narrow and case.reference.output is None:  # before the replay: calls leave caches
                case.reference = self._find_reference(case.fault)
            try:
                output = self._replay(case, repairs)
            except Exception as error:  # whatever a model's code does: the next remedy is tried
                told = take_first_line(error)
        if told:
            case.tried.append(f"{name}: {told}")
            return False, None
        check = self._session.check(case.fault.guarded, output)
        is_meant = not check.is_finite and self._is_as_in_fp32(case, output)
        if not (check.is_good or is_meant or self._is_meant(case.fault, output, check)):
            case.tried.append(f"{name}: the same call wasn't finite again.")
            return False, output
        given, wanted = _list_shapes(output), _list_shapes(case.fault.output)
        if given != wanted:
            case.tried.append(
                f"{name}: it returned {given} where the failed call returned {wanted}."
            )
            return False, output
        told = case.reference.describe_excess(output) if is_narrow else ""
        if told:
            case.tried.append(f"{name}: the result isn't that of fp32: {told}.")
        return not told, output

    def _find_reference(self, fault: Fault) -> RepairReference:
        """Run the call in fp32 and in bf16, to compare repairs with.

        The result is empty if the call draws random numbers, or its weights can't be cast.
        """
        guarded = fault.guarded
        call = guarded.latest.call or fault.call
        device = guarded.find_device(self._session.pipe)
        sources = find_random(device, (*call.args, *call.kwargs.values()))
        guarded.latest.restore()
        states = [source.read() for source in sources]
        try:
            if vars(guarded.module).get(WAITING, False):
                return RepairReference()
            wide = self._repeat_in(fault, "fp32", uncached=True)
        except Exception:  # weights that cannot be cast, or do not fit: nothing is known
            return RepairReference()
        pairs = zip(sources, states, strict=True)
        if not all(torch.equal(source.read(), state) for source, state in pairs):
            return RepairReference()
        try:
            bf16_error = measure_error(self._repeat_in(fault, "bf16", uncached=True), wide)
        except Exception:  # whatever a model's code does in bf16
            return RepairReference(wide)
        return RepairReference(wide, bf16_error if math.isfinite(bf16_error) else None)

    def _find_repairs(self, case: FaultCase, remedy: Remedy) -> tuple[ComponentPlan, ...]:
        """Return the repairs to apply to the component for a remedy.

        Raises:
            ScalingError: there are none.
        """
        fault, latest = case.fault, case.fault.guarded.latest
        state = fault.guarded.state
        state.put_on(case.before)
        if remedy.action == "rescaled":
            if latest.fills:
                raise ScalingError(
                    "It puts tensors into its arguments, where nothing scales them back."
                )
            self._refuse_kept_state(fault)
        latest.restore()  # the call that exponents are found for is the one that failed
        return state.find_repair(remedy, latest.call or fault.call)

    def _refuse_kept_state(self, fault: Fault) -> None:
        """Refuse exponents for a component whose results depend on its state between calls.

        Cost: for a component whose call changes its state, two calls in fp32.
        """
        guarded = fault.guarded
        if not guarded.latest.changed or vars(guarded.module).get(WAITING, False):
            return
        before = guarded.state.applied
        try:
            guarded.state.put_on((cast_component("fp32"),))
            guarded.latest.restore()
            first = fault.call.proceed()
            guarded.latest.restore_around()
            second = fault.call.proceed()
        finally:
            guarded.state.put_on(before)
            guarded.state.notes.clear()
        if measure_error(second, first):
            raise ScalingError(describe_kept(guarded.module, guarded.latest.changed))

    def _replay(self, case: FaultCase, repairs: tuple[ComponentPlan, ...]) -> Any:
        """Repeat the call with these repairs applied, and return its output."""
        guarded = case.fault.guarded
        guarded.state.put_on(repairs)
        guarded.latest.restore()
        if repairs != case.before:
            clear_caches(guarded.module)  # what they kept may have another scale or dtype
        case.replays += 1
        return case.fault.call.proceed()

    def _find_culprit(self, fault: Fault) -> Culprit:
        if not self._session.names_culprit or self._has_written(fault):
            return Culprit("unknown")
        guarded = fault.guarded
        given = fault.call.named
        guarded.latest.restore()
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not fault.is_tracked):
                culprit, output = find_culprit(guarded.module, fault.call.proceed, given)
        except StopdownError:
            raise
        except Exception:  # code that cannot be looked at: nothing is known
            return Culprit("unknown")
        self._session.check(guarded, output)  # forget what the replay clamped
        return culprit


_AS_GIVEN = "The script receives it unchanged."


def _may_be_meant(culprit: Culprit) -> bool:
    """Return whether fp32 may return NaN or Inf as well, so that the model may intend them."""
    is_guess = culprit.kind == "range" and math.isnan(culprit.reached)  # in place
    return is_guess or culprit.kind in ("unknown", "written", "undefined")


def _name_kind(fault: Fault) -> str:
    """Return a signature of calls that the same repair may help: kind, and whether inputs are finite."""
    return f"{'not ' if fault.check.inputs else ''}finite|{fault.call.key}"


def _list_shapes(output: Any) -> str:
    """List the shapes of an output's tensors in words, such as `1x3x9x32x32`."""
    return ", ".join("x".join(map(str, x.shape)) or "scalar" for x in iterate_tensors(output))

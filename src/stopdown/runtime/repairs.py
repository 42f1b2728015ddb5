"""Repairs of one component, applied during a run and removed with the guard.

A repair is a plan's entry (`ComponentPlan`) for a component, or for a module in it.
Exponents come from the ranges of all calls that failed, measured in fp32 on the original component; the
plan's entry is removed for that. Modules that these calls don't use (an encoder, if decoding failed) keep
the plan's exponents.
To measure ranges, each failed call is run once more as its captured graph in fp32. Only three numbers are
kept for each activation, so the component and one call must fit in memory. Calls of one kind (the same
method, sizes and options) share a capture and merge their ranges. Kinds of different sequence lengths
have separate activations, but the solver finds common exponents for their parameters.

Not covered: larger activations of other prompts (these exponents keep headroom, and are recorded as
measured); precision that the weights lost in a cast to fp16 while loading.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.component_call_names import name_module_path, split_module_path
from stopdown.component_calls.components import find_stage, read_precisions
from stopdown.component_calls.stated_dtypes import state_dtypes
from stopdown.devices.device_choice import choose_device
from stopdown.devices.environment import count_processes
from stopdown.devices.format_support import probe_formats
from stopdown.errors import CaptureError, InputError, ScalingError, warn_user
from stopdown.interception.autocast import list_autocast, read_autocast, without_autocast
from stopdown.interception.component_locks import find_lock
from stopdown.interception.patches import Patches
from stopdown.memory.weight_stores import weights_at_hand
from stopdown.module_calls.call_interception import bared
from stopdown.module_calls.entrances import Entrance
from stopdown.module_calls.mixed_dtypes import COMPUTED, NO_OPERANDS, cast_to_weights
from stopdown.module_calls.step_caches import in_full
from stopdown.number_formats import FORMATS, name_dtype
from stopdown.numerics import iterate_tensors
from stopdown.plans.applier import AppliedEntry, apply_precision
from stopdown.records import ComponentPlan, Operands, Repair, Scaling
from stopdown.runtime.activation_maxima import Notes, put_sensors
from stopdown.runtime.kept_code import KeptCode
from stopdown.runtime.merged_scalings import merge_scalings
from stopdown.runtime.repair_log import RepairLog
from stopdown.runtime.repair_order import Remedy, list_remedies
from stopdown.scaling import CallWatch, ComponentCall, ObservedCalls, Refusal, WatchOptions, cast_


def cast_component(precision: str) -> ComponentPlan:
    """Return the repair that runs a whole component in another format."""
    return ComponentPlan("", precision=precision)


def cast_inputs(operands: Operands) -> ComponentPlan:
    """Return the repair that casts the inputs of a component's layers."""
    return ComponentPlan("", precision="as loaded", scaling=Scaling(operands=operands))


def is_cast_of_inputs(repair: ComponentPlan) -> bool:
    """Return whether a repair only casts the inputs of layers."""
    return repair.precision == "as loaded"


def name_action(repair: ComponentPlan) -> str:
    """Return the name of a repair's action in records: `rescaled`, `fp32-module`, `cast`, `cast-inputs`."""
    if is_cast_of_inputs(repair):
        return "cast-inputs"
    if split_module_path(repair.component)[1]:
        return "fp32-module"
    is_scaled = repair.precision == "fp16" and repair.scaling is not None
    return "rescaled" if is_scaled else "cast"


class WholeInFp32Error(ScalingError):
    """Raised if exponents suffice only with the whole component in fp32.

    With an fp32 residual stream, others may suffice.
    """


@dataclass
class Calibration(ObservedCalls):
    """Measured ranges of one module's failed calls so far, and the repairs that were tried for them.

    Attributes:
        may_repair: repair calls that the exponents don't hold for; False refuses them.
        hands_back: make a call on the original module if no repair is found for it; False refuses it.
        tried: what was tried for such calls, each once: by the kind of call and the remedy.
    """

    may_repair: bool = True
    hands_back: bool = False
    tried: set[Hashable] = field(default_factory=set)


@dataclass(frozen=True)
class Admission:
    """Whether a component's calls are guarded, and the hooks that record activation ranges in them."""

    is_given: bool
    sensors: Patches = field(default_factory=Patches)


@dataclass
class Component:
    """A component under a guard, with its applied repairs and the ranges of its failed calls.

    Attributes:
        module: the component's module.
        name: in records.
        log: receives repairs of calls that the exponents didn't hold for.
        applied: the plan's entry and the repairs that are applied.
        computes_in: dtype to which its weights are cast at each call; None if they are used as they are.
        code: cache of its compiled code, which ignores later hooks; None if it isn't compiled.
        calibration: measured ranges of its failed calls; it doesn't keep the component alive.
        notes: activation ranges recorded during the current call.
        admission: whether its calls are guarded, with the hooks that record `notes`; None if undecided.
    """

    module: torch.nn.Module
    name: str = ""
    log: RepairLog = field(default_factory=lambda: RepairLog(warn_user))
    applied: tuple[ComponentPlan, ...] = ()
    computes_in: torch.dtype | None = None
    code: KeptCode | None = None
    calibration: Calibration = field(default_factory=Calibration)
    notes: Notes = field(default_factory=Notes)
    admission: Admission | None = None
    _under: AppliedEntry | None = None
    _patches: Patches = field(default_factory=Patches)

    def __post_init__(self) -> None:
        self._entrance = Entrance(self.module, Patches())

    @property
    def is_guarded(self) -> bool:
        """Whether its calls are guarded; False if undecided."""
        return self.admission is not None and self.admission.is_given

    @property
    def planned(self) -> tuple[ComponentPlan, ...]:
        """The entry of the plan that was applied before the guard, as a tuple; empty without one."""
        return () if self._under is None else (self._under.entry,)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that a repair cast the component to; None if none did."""
        return self._entrance.dtype

    def stand_under(self, applied: AppliedEntry, *, stays: bool = False) -> None:
        """Adopt a plan's entry that is applied already: repairs replace it, and `leave` applies it again.

        Args:
            stays: repair calls that the exponents don't hold for even after the guard is removed.
        """
        self._under, self._patches, self.applied = applied, applied.patches, (applied.entry,)
        self.name = self.name or applied.entry.component
        if stays:
            applied.help = self._list_help()
        self._help_watch(self._list_help())

    def admit(self, *, is_compiled: bool, maxima: bool) -> None:
        """Admit the component to the guard, and hook its modules to record activation ranges until it
        leaves.

        Args:
            is_compiled: register no hooks, because they wouldn't run.
            maxima: record those of each block as well.
        """
        self.admission = Admission(True)
        if not is_compiled:
            put_sensors(self.module, self.notes, self.admission.sensors, maxima=maxima)

    def leave(self) -> None:
        """Restore the component to the state before the guard. A second call does nothing."""
        if self.admission is not None:
            self.admission.sensors.undo()
        if self._under is None or self._under.is_over:
            self.take_off()
            return
        self.put_on(self.planned)
        self._entrance.patches.undo()
        self._help_watch(self._under.help)

    def _help_watch(self, options: WatchOptions) -> None:
        if (watch := CallWatch.find(self.module)) is not None:
            watch.options = options

    def _list_help(self) -> WatchOptions:
        """Return the options by which calls that the exponents don't hold for are repaired or refused."""
        remedy = "Run it in bf16 or fp32, or make the plan for such calls."
        known = self.calibration
        may_answer = known.hands_back or (known.may_repair and count_processes() == 1)
        repair = self._answer_refusal if may_answer else None
        return WatchOptions(self.name, repair, self._report_once, remedy)

    def call(self, call: ComponentCall, *, is_mixed: bool = False) -> Any:
        """Continue a call of the component, with arguments cast to the dtype of its repair.

        Args:
            is_mixed: a repair has cast some component. As pipelines cast one component's arguments to
                another's dtype (Flux does), all components' arguments are cast.
        """
        is_recast = any(name_action(one) in ("rescaled", "cast") for one in self.applied)
        is_ambient = bool(list_autocast()) and is_recast  # which would change its dtypes again
        if self.dtype is None and not is_mixed and not is_ambient:
            return call.proceed()
        computed = (x for x in self.read_precisions() if x in COMPUTED)  # and not only stored
        dtype = self.dtype or self._find_planned() or next(computed, None)
        with without_autocast() if is_ambient else contextlib.nullcontext():
            if dtype is None:
                return call.proceed()
            return self._entrance.proceed(call, dtype, None)

    def _find_planned(self) -> torch.dtype | None:
        """Return fp16 if exponents are applied, else None.

        It can't be read from the weights, as most of a small component's may stay in fp32.
        """
        is_scaled = any(name_action(one) == "rescaled" for one in self.applied)
        return torch.float16 if is_scaled else None

    def note_outputs(self, call: ComponentCall, output: Any) -> None:
        """Record which output tensors have wider dtypes than the arguments, unless it is repaired."""
        came_as = call.came_as
        if came_as is not None and not self.is_repaired:
            self._entrance.wide = frozenset(
                number
                for number, x in enumerate(iterate_tensors(output))
                if x.is_floating_point() and x.itemsize > came_as.itemsize
            )

    def find_repair(self, remedy: Remedy, call: ComponentCall) -> tuple[ComponentPlan, ...]:
        """Return the repairs to apply for a remedy, which replace all that are applied.

        Args:
            call: the failed call.

        Raises:
            ScalingError: no exponents can be found.

        Cost: for exponents, a capture and a forward in fp32.
        """
        if remedy.action == "rescaled" and any(x.is_meta for x in self.module.parameters()):
            raise ScalingError(
                "Its weights are stored elsewhere between calls, so no exponents can be folded into them."
            )
        if remedy.action == "rescaled" and (path := _find_training_code(self.module)) is not None:
            raise ScalingError(
                f"{path or type(self.module).__name__} computes something else in training mode, and "
                "exponents are found for eval mode.",
                remedy="Call module.eval() before inference.",
            )
        casts = tuple(filter(is_cast_of_inputs, self.applied))
        if remedy.action == "rescaled":
            before = self.calibration
            if remedy.residual != before.residual == "native":
                self.calibration = Calibration(
                    residual=remedy.residual,
                    may_repair=before.may_repair,
                    hands_back=before.hands_back,
                )
            try:
                with weights_at_hand(self.module):
                    scaling = self._find_scaling(call)
            except BaseException:
                self.calibration = before
                raise
            return (ComponentPlan("", precision="fp16", scaling=scaling), *casts)
        if remedy.action == "fp32-module":
            return (*self.applied, ComponentPlan(name_module_path(self.name, remedy.path)))
        if remedy.action == "cast":
            return (cast_component(remedy.precision), *casts)
        return self.applied

    def put_on(self, repairs: tuple[ComponentPlan, ...]) -> None:
        """Apply these repairs in place of all others, after other threads' calls have finished."""
        if repairs == self.applied:
            return
        with find_lock(self.module).changing(), weights_at_hand(self.module):
            self.take_off()
            self._forget_code(repairs)
            self.applied = repairs
            self._keep_waiting()
            try:
                with self._keeping_code(repairs):
                    for repair in repairs:
                        self._put(repair)
                if repairs != self.planned:
                    self._refuse_gradients()
                if self.returns_wide:  # pipelines cast outputs to a dtype that they ask for
                    state_dtypes((), [self.module], self._patches)
            except BaseException:
                self.take_off()
                raise

    def _refuse_gradients(self) -> None:
        """Make backward passes that reach a parameter fail: its gradient would have another scale."""
        kind = type(self.module).__name__

        def refuse(gradient: torch.Tensor) -> None:
            raise InputError(
                f"A gradient of a parameter of {kind} was requested, but the guard has repaired {kind}.",
                expected="A repair scales weights for inference, so their gradients have another scale.",
                remedy="For training, create the optimizer before the first call, or call it without the "
                "guard. To differentiate only by an input, use module.requires_grad_(False).",
            )

        for tensor in self.module.parameters():
            if tensor.requires_grad:
                self._patches.defer(tensor.register_hook(refuse).remove)

    def take_off(self) -> None:
        """Remove the plan's entry and all repairs, restoring every bit. A second call does nothing."""
        if not (self.applied or self._patches or self._entrance.patches):
            return
        with find_lock(self.module).changing():
            if self.applied:
                self._forget_code(self.applied)
            with weights_at_hand(self.module):
                self._entrance.patches.undo()
                self._patches.undo()
            self._entrance.dtype, self.applied = None, ()

    def _keep_waiting(self) -> None:
        """Record the parameters on `meta` (offloaded weights), so that undoing the repairs restores them.

        Each call replaces such a parameter by one with values, so they are restored by name.
        """
        for part in self.module.modules():
            for name, tensor in part._parameters.items():
                if tensor is not None and tensor.is_meta:
                    self._patches.set_item(part._parameters, name, tensor)

    def _keeping_code(self, repairs: tuple[ComponentPlan, ...]) -> AbstractContextManager[None]:
        if self.code is None:
            return contextlib.nullcontext()
        return self.code.numbered(self.module, repairs)

    def _forget_code(self, repairs: tuple[ComponentPlan, ...]) -> None:
        if self.code is not None:
            self.code.forget(self.module, repairs)

    def _put(self, repair: ComponentPlan) -> None:
        if self._under is not None and repair is self._under.entry:
            self._under.put_on()
            self._help_watch(self._list_help())
            return
        if is_cast_of_inputs(repair):
            operands = repair.scaling.operands if repair.scaling is not None else NO_OPERANDS
            cast_to_weights(self.module, operands, self._patches)
            return
        if path := split_module_path(repair.component)[1]:
            module = self.module.get_submodule(path)
            around = read_autocast(self.module) or self.read_precisions()[0]
            self._patches.defer(cast_(module, around, Scaling(fp32_modules=("",))).undo)
            return
        before, wanted = self.read_precisions()[:1], FORMATS[repair.precision].torch_dtype
        scaling = repair.scaling if repair.precision == "fp16" else None
        apply_precision(
            self.module, repair.precision, scaling, self._patches, watch=self._list_help()
        )
        if scaling is None or before != (wanted,):
            self._entrance.dtype = wanted

    @property
    def returns_wide(self) -> bool:
        """Whether a repair lets the component return values beyond fp16's range."""
        is_encoder = find_stage(self.name) == "encode"
        return any(
            bool(x.in_force.outputs) or (is_encoder and name_action(x) == "cast")
            for x in self.applied
        )

    def _report_once(self, text: str) -> None:
        """Report a text to the user once for this component."""
        self.log.report_once(self.name, text, text)

    def _answer_refusal(self, refusal: Refusal) -> None:
        """Apply a repair for a call that the exponents don't hold for, if there is one.

        The remedies are exponents for this kind of call and the earlier ones, if need be with an fp32
        residual stream, a cast, or the original model if `hands_back`.
        """
        known = self.calibration
        may_repair = not refusal.path and known.may_repair and count_processes() == 1
        if may_repair and self._repair_signature(refusal):
            return
        if known.hands_back:
            self.put_on(())
            self.log.keep(_describe_handing_back(self.name, refusal))

    def _repair_signature(self, refusal: Refusal) -> bool:
        before, is_streamed = self.applied, False
        given = iterate_tensors((refusal.call.args, refusal.call.kwargs))
        device = next((x.device for x in given), torch.device("cpu"))  # weights may wait elsewhere
        for remedy in list_remedies("range", "fp16", has_bf16=computes_bf16(device)):
            is_rescaled = remedy.action == "rescaled"
            if is_rescaled and not refusal.is_traceable:
                continue
            if remedy.residual == "fp32" and not is_streamed:
                continue  # without exponents an fp32 stream finds none either
            tried = refusal.call.key, remedy.recorded, remedy.residual
            if tried in self.calibration.tried:
                continue
            self.calibration.tried.add(tried)
            try:
                self.put_on(self.find_repair(remedy, refusal.call))
            except Exception as error:  # no such repair, or the model's code refuses it
                is_streamed = isinstance(error, WholeInFp32Error)
                self.put_on(before)
                continue
            self.log.keep(_describe_signature(self.name, refusal, remedy))
            return True
        return False

    def _find_scaling(self, call: ComponentCall) -> Scaling:
        """Find exponents for all calls that failed so far, relative to the original component."""
        before = self.applied
        self.take_off()
        try:
            with bared(self.module), in_full(self.module):
                try:
                    self.calibration.observe(self.module, call)
                except CaptureError as error:
                    return self.calibration.find_by_hooks(self.module, call, error)
                found = self.calibration.find_exponents(self.module)
            if "" in found.fp32_modules:
                raise WholeInFp32Error("Exponents alone don't keep it in range.")
            known = next((x.scaling for x in self.planned if x.precision == "fp16"), None)
            if known is None:
                return found
            return merge_scalings(known, found, self.calibration.used, self.calibration.methods)
        finally:
            self.put_on(before)

    @property
    def is_repaired(self) -> bool:
        """Whether repairs other than the plan's own entry are applied."""
        return self.applied != self.planned

    @property
    def is_planned_anew(self) -> bool:
        """Whether the plan must be updated with the applied repairs.

        Casts of inputs need no update, and neither does a plan that was removed for some calls.
        """
        found = tuple(x for x in self.applied if not is_cast_of_inputs(x))
        return bool(found) and found != self.planned

    def overlaps(self, modules: Collection[int]) -> bool:
        """Return whether the component is guarded and has any of these modules, given by their ids."""
        own = (id(part) for part in self.module.modules())
        is_guarded = self.is_guarded or self._under is not None
        return bool(is_guarded) and any(part in modules for part in own)

    def name_precisions(self) -> tuple[str, ...]:
        """Return the names of the formats that the component computes in, the most frequent first."""
        return tuple(map(name_dtype, self.read_precisions()))

    def read_precisions(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes that the component computes in: its weights', or that of their casts."""
        if self.computes_in is not None:
            return (self.dtype or self.computes_in,)
        return read_precisions(self.module)


def _describe_signature(component: str, refusal: Refusal, remedy: Remedy) -> Repair:
    is_rescaled = remedy.action == "rescaled"
    reason = (
        "Its exponents were recomputed for these calls and those before."
        if is_rescaled
        else "No exponents were found that hold for these calls and those before."
    )
    return _record_refusal(component, refusal, remedy.recorded, reason)


def _describe_handing_back(component: str, refusal: Refusal) -> Repair:
    reason = "Its exponents were taken off, and the script receives the output unchanged."
    return _record_refusal(component, refusal, "none", reason)


def _record_refusal(component: str, refusal: Refusal, action: str, reason: str) -> Repair:
    method = refusal.call.callee.method
    name = component if method == "forward" else f"{component}.{method}"
    place = name_module_path(component, refusal.path)
    return Repair(
        component=name,
        module_path=place,
        kind="signature",
        step=None,
        evidence=f"`{place if refusal.path else name}` was called {refusal.what}, for which its exponents "
        "didn't hold.",
        action=action,
        reason=reason,
    )


def computes_bf16(device: torch.device) -> bool:
    """Return whether a device computes bf16 natively; False if it can't be probed."""
    try:
        support = probe_formats(choose_device(str(device)))["bf16"]
    except Exception:  # whatever a backend does: what was found of a fault matters more
        return False
    return support.native and support.works


def _find_training_code(module: torch.nn.Module) -> str | None:
    """Return the path of the first module in training mode whose `forward` depends on that, or None."""
    for path, part in module.named_modules():
        is_idle = getattr(part, "p", None) == 0  # a dropout that drops nothing
        if part.training and not is_idle and _asks_for_training(type(part)):  # type: ignore[arg-type]
            return path
    return None


@functools.cache
def _asks_for_training(kind: Any) -> bool:
    try:
        return "training" in inspect.getsource(kind.forward)
    except (OSError, TypeError):  # code without a file
        return False

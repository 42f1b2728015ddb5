"""Subjects of a comparison: a checkpoint, pipeline or program, opened in several precisions in turn.

As many pipelines stay loaded as the device holds besides a run. The least recently used one is closed
first.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stopdown.component_calls.component_interception import intercept_components
from stopdown.component_calls.components import (
    cast_component_,
    check_run,
    find_callees,
    find_components,
    find_device,
    put_precision,
    refuse_run,
)
from stopdown.devices.device_choice import Device, choose_device
from stopdown.devices.device_memory import free_memory
from stopdown.devices.format_support import probe_formats
from stopdown.errors import InputError, OptionError, PlanError, StopdownError
from stopdown.fake_tensors.fake_modules import detach_derived
from stopdown.interception.patches import Patches
from stopdown.mapped_weights import find_stored
from stopdown.memory.forecast import Fit, choose_tiling, find_smallest
from stopdown.number_formats import FORMATS, format_bytes
from stopdown.pipelines.class_selection import select_pipeline
from stopdown.pipelines.drawn_inputs import complete_request
from stopdown.pipelines.requests import Request, build_arguments, name_pipeline_arguments
from stopdown.plans.applier import PLANNED, AppliedPlan, apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.plans.certified import certify_program
from stopdown.plans.plan_choice import choose_plan
from stopdown.plans.plan_files import read_plan, write_plan
from stopdown.plans.planned_loader import gather_facts, load_plan
from stopdown.plans.precision import PLAIN_FP16
from stopdown.plans.precision_and_memory import build_way, list_ways, read_formats
from stopdown.records import ComponentPlan, MemoryPlan, Plan
from stopdown.runtime.journal import describe_program
from stopdown.runtime.journal_values import digest_call
from stopdown.runtime.memory_limits import count_limit, fit_run, predict_pipe
from stopdown.scaling import put_cast
from stopdown.sources.hub import Progress
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.source import Source
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import fingerprint, resolve_source

Run = Callable[[], Any]
"""Function that runs a program once, and returns pictures, arrays or tensors."""

MEANINGS = {
    "fp32": "Weights and arithmetic in fp32.",
    "bf16": "Weights and arithmetic in bf16.",
    "fp16": "fp16, with exponents that keep its activations within range.",
    "fp16-plain": "Weights and arithmetic in fp16 as Diffusers loads it; nothing is repaired.",
    "autocast": "Weights in fp32, run under torch.autocast in fp16.",
    "clamp": "Plain fp16, with the output of every layer limited to 65504 and NaN replaced by 0.",
    "auto": "What Stopdown chooses on this device.",
}


_LOADED_AS = {"autocast": "fp32", "clamp": PLAIN_FP16}
"""Precision in which the weights are loaded for precisions that only change how the model is run."""


def explain_meaning(name: str) -> str:
    """Return a sentence that explains a precision of a comparison to users."""
    if name.endswith(".json"):
        return f"fp16, rescaled by {Path(name).name}."
    return MEANINGS.get(name, f"By component: {name.replace('+', ', ')}.")


@dataclass
class OpenSubject:
    """A loaded pipeline in one precision.

    Attributes:
        loaded: the pipeline on its device, with the patches to undo when it is closed.
    """

    loaded: AppliedPlan
    load_s: float
    weights_bytes: int

    @property
    def plan(self) -> Plan | None:
        """The plan that rescaled the pipeline; None if its plan has no exponents."""
        return None if self.loaded.plan.is_bare else self.loaded.plan


@dataclass
class Subject:
    """Model or program to compare, with functions that load it in a precision.

    Attributes:
        identity: what a run's outputs depend on besides `fingerprint`, as plain data, so that finished runs
            are recognised.
        keeps_one: whether only one precision can be loaded at a time, because the program is cast in
            place or a memory limit applies.
    """

    name: str
    fingerprint: str
    pipeline: str
    device: Device
    classes: tuple[str, ...]
    _load: Callable[[str, Plan | None], AppliedPlan]
    """Loads the program in a precision, or by a plan with the given name."""
    _make_plan: Callable[[], Plan]
    _fit: Callable[[AppliedPlan], AppliedPlan] = lambda loaded: loaded
    _opened: dict[str, OpenSubject] = field(default_factory=dict)
    identity: Any = None
    keeps_one: bool = False

    def open(self, name: str, folder: Path) -> OpenSubject:
        """Load the pipeline in one precision, or return it if it is already open.

        Args:
            folder: folder in which a new plan is saved, so that a second start finds it.
        """
        found = self._opened.pop(name, None)
        if found is None:
            self._make_room()
            begun = time.perf_counter()
            plan = self._find_plan(name, folder)
            loaded = self._load(_LOADED_AS.get(name, name), plan)
            load_s, size = time.perf_counter() - begun, _count_bytes(loaded.pipe)
            found = OpenSubject(self._fit(loaded), load_s, size)
        self._opened[name] = found
        return found

    def close(self) -> None:
        while self._opened:
            self._opened.popitem()[1].loaded.patches.undo()
        free_memory()

    def _find_plan(self, name: str, folder: Path) -> Plan | None:
        if name != "fp16":
            return read_plan(name) if name.endswith(".json") else None
        path = folder / "plan.json"
        if not path.exists():
            write_plan(self._make_plan(), path)
        return read_plan(path)

    def _make_room(self) -> None:
        """Close the least recently used pipelines until another one and its run fit on the device."""
        while self._opened:
            sizes = [opened.weights_bytes for opened in self._opened.values()]
            has_room = sum(sizes) + 2 * max(sizes) < 0.6 * self.device.memory_bytes
            if has_room and not self.keeps_one:
                return
            self._opened.pop(next(iter(self._opened))).loaded.patches.undo()
            free_memory()


def describe_subject(
    given: Any,
    request: Request,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    runs: Sequence[Run] = (),
    memory: MemoryPlan | None = None,
    names: Sequence[str] = (),
) -> Subject:
    """Describe the model or program to compare, before anything is loaded.

    Args:
        given: a pipeline, another program, or a source as for `compare`.
        runs: functions that run a program other than a pipeline, one for each row.
        memory: memory limit of each run of a checkpoint.
        names: the precisions to compare. If one must decode in tiles to stay within the limit, all do,
            because tiles change the picture.
    """
    if not isinstance(given, (str, Path, Source)):
        has_runs = check_run(given, runs or None, None, "compare")
        _refuse_planned(given)
        if has_runs:
            _refuse_options(request)
            return _describe_program(given, runs)
        name_pipeline_arguments(type(given), request)
        make = partial(_certify, given, request, progress)
        return _describe(given, str(given.device), partial(_copy_pipe, given), make)
    refuse_run(runs or None, f"the source {getattr(given, 'name', given)}")
    target = choose_device(device)
    source = given if isinstance(given, Source) else resolve_source(given)
    verify_source(source)
    source = select_pipeline(source, request)
    limit_bytes = count_limit(memory, target) if memory is not None else 0
    tiling = _choose_tiling(source, target, request, limit_bytes, names) if memory else None

    def load(precision: str, plan: Plan | None) -> AppliedPlan:
        if plan is None:
            plan = choose_plan(source, precision, target, request=request)
        elif precision.endswith(".json"):
            plan = dataclasses.replace(plan, chosen=Path(precision).name)
        return load_plan(source, dataclasses.replace(plan, memory=memory), target)

    return Subject(
        source.name,
        fingerprint(source),
        source.pipeline_class,
        target,
        tuple(class_name for _, class_name in source.components.values()),
        load,
        partial(_choose_plan, source, target, request, progress),
        partial(_fit, source, target, request, tiling),
        identity=[source.scheduler, str(limit_bytes) if memory is not None else ""],
        keeps_one=memory is not None,
    )


def _refuse_planned(program: Any) -> None:
    """Refuse a program under a plan or a repair, whose weights are no longer those to be compared."""
    for name, module in find_components(program).items():
        if PLANNED in vars(module):
            raise InputError(
                f"The program to compare is under a plan: its {name} is scaled, or cast inside.",
                expected="Each precision is made from a program as it was loaded.",
                remedy="Take it off first: guard.remove(). Or compare what it was loaded from.",
            )


def _choose_plan(
    source: Source, device: Device, request: Request, progress: Progress | None
) -> Plan:
    """Return the plan with which fp16 runs on a device, or raise `OptionError` if it has no exponents."""
    chosen = choose_plan(source, "fp16", device, request=request, progress=progress)
    if chosen.is_bare:
        raise OptionError(
            "fp16 was to be compared, and the model has no component with weights.",
            remedy="Leave fp16 out.",
        )
    return chosen


_MORE = "Allow more memory, or compare a smaller `height` and `width`, or fewer `frames`."


def _fit(
    source: Source,
    device: Device,
    request: Request,
    tiling: bool | None,
    loaded: AppliedPlan,
) -> AppliedPlan:
    """Apply the memory strategy that keeps a loaded pipeline within its plan's limit.

    Args:
        tiling: whether the decoder uses tiles.
    """
    try:
        loaded = fit_run(loaded, request, device, lambda _: None, tiling=tiling)
    except StopdownError as error:
        raise StopdownError(error.what, expected=error.expected, remedy=_MORE) from error
    if loaded.offloader is not None:
        loaded.patches.defer(loaded.offloader.__enter__().__exit__)
    return loaded


def _choose_tiling(
    source: Source, device: Device, request: Request, limit_bytes: int, names: Sequence[str]
) -> bool:
    """Decide by dry runs whether all precisions must decode in tiles to stay within the limit."""
    facts, supports = gather_facts(source), probe_formats(device)
    fits: list[Fit] = []
    for asked in dict.fromkeys(_LOADED_AS.get(name, name) for name in names):
        plan = read_plan(asked) if asked.endswith(".json") else None
        with quiet_libraries(), contextlib.suppress(OptionError):  # said when it is loaded
            way = list_ways(facts, supports, asked, plan)[0]
            pipe, formats = build_way(source, way), set(read_formats(way).values())
            fits.append(predict_pipe(pipe, formats, request, device))
    tiling = choose_tiling(fits, limit_bytes)
    if tiling is None and fits:
        least = min(find_smallest(fit).needed_bytes for fit in fits)
        raise StopdownError(
            f"No precision of {', '.join(names)} stays within {format_bytes(limit_bytes)}: at least "
            f"{format_bytes(least)} are predicted.",
            remedy=_MORE,
        )
    return bool(tiling)


def _certify(pipe: Any, request: Request, progress: Progress | None) -> Plan:
    """Return the plan that `fp16` puts on this pipeline for calls of this size."""
    given = build_arguments(pipe, complete_request(pipe, request))
    return certify_program(pipe, arguments=given, progress=progress)


def _describe_program(program: Any, runs: Sequence[Run]) -> Subject:
    """Describe a program that is not a pipeline; it is cast in place and restored afterwards."""
    make = partial(measure_plan, program, run=lambda: [run() for run in runs])
    put = partial(_put_program, program)
    described = _describe(program, find_device(program), put, make)
    identity = [described.identity, *map(_describe_run, runs)]
    return dataclasses.replace(described, identity=identity, keeps_one=True)


def _describe_run(run: Run) -> str:
    """Return a hash of a function's code, and of the numbers, texts and tensors that it takes from outside.

    What it reads from other objects is not included.
    """
    if isinstance(run, partial):
        return digest_call(_describe_run(run.func), run.args, run.keywords)
    code = getattr(run, "__code__", None)
    if code is None:
        return type(run).__qualname__
    outside = [*(getattr(run, "__defaults__", None) or ()), *code.co_consts]
    with contextlib.suppress(ValueError):  # a variable without a value
        found = inspect.getclosurevars(run)
        outside += [*found.nonlocals.values(), *found.globals.values()]
    arrays = [
        torch.as_tensor(x) for x in outside if isinstance(x, np.ndarray) and x.dtype.kind in "biuf"
    ]
    plain = [x for x in outside if isinstance(x, (torch.Tensor, bool, int, float, str, bytes))]
    return digest_call(f"{run.__qualname__} {code.co_code.hex()}", (*plain, *arrays), {})


def _describe(
    program: Any,
    device: str,
    load: Callable[[str, Plan | None], AppliedPlan],
    make: Callable[[], Plan],
) -> Subject:
    kind = type(program).__name__
    classes = tuple(type(module).__name__ for module in find_components(program).values())
    identity: Any
    try:
        identity = describe_program(program)
    except PlanError:  # another library offloads its weights: no finished run is recognised
        identity = secrets.token_hex(8)
    return Subject(kind, "", kind, choose_device(device), classes, load, make, identity=identity)


def _copy_pipe(pipe: Any, precision: str, plan: Plan | None) -> AppliedPlan:
    dtype = _find_dtype(precision, plan, "Save it with save_pretrained and compare the folder.")
    derived = [detach_derived(module) for module in find_components(pipe).values()]
    copied = copy.deepcopy(pipe, {k: v for memo in derived for k, v in memo.items()})
    for module in find_components(copied).values():
        cast_component_(module, dtype)
    if plan is not None:
        apply_plan(copied, plan)
    calls = [callee.name for callee in find_callees(copied)]
    decided = _decide(calls, precision, plan, "copied from a pipeline in memory")
    return AppliedPlan(copied, plan or Plan(type(pipe).__name__), decided, Patches())


def _put_program(program: Any, precision: str, plan: Plan | None) -> AppliedPlan:
    """Cast a program's modules and call arguments in place to one precision, or apply a plan to it.

    If that fails, the caller's program is restored.
    """
    dtype = _find_dtype(precision, plan, "Compare it in one precision for all of its modules.")
    parts, patches = find_components(program), Patches()
    try:
        for module in parts.values():
            put_precision(module, dtype, patches)
        if plan is not None:
            patches.defer(apply_plan(program, plan).undo)
        else:
            intercept_components(program, lambda callee, on: put_cast(callee, dtype, on), patches)
    except BaseException:
        patches.undo()
        raise
    decisions = _decide(parts, precision, plan, "cast where it is in memory")
    return AppliedPlan(program, plan or Plan(type(program).__name__), decisions, patches)


def _find_dtype(precision: str, plan: Plan | None, remedy: str) -> torch.dtype:
    if plan is not None:
        return torch.float32
    name = "fp16" if precision == PLAIN_FP16 else precision
    if name not in FORMATS:
        raise OptionError(
            f"What is in memory can't be compared in {precision}.",
            expected="It accepts fp32, bf16, fp16, fp16-plain, autocast, clamp, and the path of a plan.",
            remedy=remedy,
        )
    return FORMATS[name].torch_dtype


def _decide(
    names: Iterable[str], precision: str, plan: Plan | None, reason: str
) -> tuple[ComponentPlan, ...]:
    if plan is None:
        name = "fp16" if precision == PLAIN_FP16 else precision
        return tuple(ComponentPlan(call, precision=name, reasons=(reason,)) for call in names)
    reason = f"rescaled by {Path(precision).name}" if precision.endswith(".json") else "rescaled"
    return tuple(
        ComponentPlan(x.component, precision=x.precision, reasons=(reason,))
        for x in plan.components
    )


def _refuse_options(request: Request) -> None:
    """Refuse request fields other than prompt and seed, which a program without a pipeline cannot use."""
    options = dataclasses.replace(request, prompt=None, seed=Request.seed)
    if options != Request():
        raise OptionError(
            "A request with more than a seed was given for a program that is no pipeline.",
            expected="A function of yours runs such a program, and sets sizes and steps.",
            remedy="Set them in that function.",
        )


def _count_bytes(pipe: Any) -> int:
    tensors = {
        _find_place(tensor): tensor.nbytes
        for module in find_components(pipe).values()
        for tensor in (*module.parameters(), *module.buffers())
    }
    return sum(tensors.values())


def _find_place(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's values, or while it is offloaded, of its stored values."""
    stored = find_stored(tensor)
    return (tensor if stored is None else stored.values).data_ptr()

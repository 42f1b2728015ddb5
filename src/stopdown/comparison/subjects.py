"""What is compared: a checkpoint or a pipeline in memory, opened in one precision after the other.

As many pipelines are kept open as the device holds with room for a run; the one that was used
longest ago is closed first.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stopdown.device_memory import free_memory
from stopdown.environment import Device, choose_device, probe_formats
from stopdown.errors import OptionError, StopdownError
from stopdown.memory.forecast import Fit, choose_tiling, find_smallest
from stopdown.memory.offloader import Offloader
from stopdown.number_formats import FORMATS, format_bytes
from stopdown.patches import Patches
from stopdown.pipelines.allowed_sizes import read_configs
from stopdown.pipelines.call_interception import intercept_components, put_cast
from stopdown.pipelines.class_selection import select_pipeline
from stopdown.pipelines.components import (
    cast_component_,
    check_run,
    find_callees,
    find_components,
    find_device,
    put_precision,
    refuse_run,
)
from stopdown.pipelines.hub import Progress
from stopdown.pipelines.library_messages import quiet_libraries
from stopdown.pipelines.requests import Request, name_arguments
from stopdown.pipelines.sources import Source, fingerprint, resolve_source, verify_source
from stopdown.plans.applier import apply_plan, load_planned
from stopdown.plans.calibrated import make_plan
from stopdown.plans.plan_choice import choose_loader
from stopdown.plans.plan_files import read_plan, write_plan
from stopdown.plans.planned_loader import Loaded, gather_facts
from stopdown.plans.precision_and_memory import build_way, list_ways
from stopdown.records import Decision, Plan
from stopdown.runtime.memory_limits import Limit, fit_run, predict_pipe

Run = Callable[[], Any]
"""Runs a program once: pictures, arrays or tensors."""

MEANINGS = {
    "fp32": "Weights and arithmetic in fp32.",
    "bf16": "Weights and arithmetic in bf16.",
    "fp16": "Weights and arithmetic in fp16 as Diffusers loads it; nothing is repaired.",
    "autocast": "Weights in fp32, run under torch.autocast in fp16.",
    "clamp": "fp16, with the output of every layer limited to 65504 and NaN replaced by 0.",
    "plan": "fp16, with a plan that was made for this comparison.",
    "auto": "What Stopdown chooses on this device.",
}


_LOADED_AS = {"autocast": "fp32", "clamp": "fp16"}
"""What is loaded for a precision that is a way to run another one."""


def explain_meaning(name: str) -> str:
    """What a precision of a comparison is, in one sentence."""
    if name.endswith(".json"):
        return f"fp16, rescaled by {Path(name).name}."
    return MEANINGS.get(name, f"By component: {name.replace('+', ', ')}.")


@dataclass
class Opened:
    """A pipeline in one precision.

    Attributes:
        pipe: on its device.
        decisions: precision of each component.
        plan: what it was rescaled by.
        load_s: seconds that it took.
        weights_bytes: of its parameters and buffers.
        uses_autocast, clamps: how it is to be run.
        offloader: keeps it within a limit of memory; None without one.
        fit_s: seconds that it took to find what does.
        patches: what was put on a program that is itself in this precision, or on a pipeline to keep
            it within a limit.
    """

    pipe: Any
    decisions: tuple[Decision, ...]
    plan: Plan | None = None
    patches: Patches = field(default_factory=Patches)
    load_s: float = 0.0
    weights_bytes: int = 0
    uses_autocast: bool = False
    clamps: bool = False
    offloader: Offloader | None = None
    fit_s: float = 0.0

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """What a run of it stands in: `torch.autocast`, or nothing."""
        if not self.uses_autocast:
            yield
            return
        device = next(next(iter(find_components(self.pipe).values())).parameters()).device
        with torch.autocast(device.type, dtype=torch.float16):
            yield


@dataclass
class Subject:
    """What is compared, and how it is opened.

    Attributes:
        name: of the model.
        fingerprint: of its files, empty in memory.
        pipeline: class of the pipeline.
        device: where it runs.
        classes: class names of its components.
        scheduler: class in the place of the model's own; "" for that.
        keeps_one: it is in one precision at a time: in memory and not copied, or within a limit.
        memory: the limit that its runs stay within, in bytes; "" for none.
    """

    name: str
    fingerprint: str
    pipeline: str
    device: Device
    classes: tuple[str, ...]
    _open: Callable[[str], Opened]
    _plan: Callable[[], Plan]
    _open_planned: Callable[[Plan, str], Opened]
    _opened: dict[str, Opened] = field(default_factory=dict)
    scheduler: str = ""
    keeps_one: bool = False
    memory: str = ""

    def open(self, name: str, folder: Path) -> Opened:
        """The pipeline in one precision; an open one is given again.

        Args:
            folder: where a plan that has to be made is kept for the next start.

        Raises:
            StopdownError: it cannot be loaded so, or has no plan.
        """
        found = self._opened.pop(name, None)
        if found is None:
            self._make_room()
            begun = time.perf_counter()
            found = self._load(name, folder)
            found.load_s = time.perf_counter() - begun - found.fit_s
            found.weights_bytes = found.weights_bytes or _count_bytes(found.pipe)
        self._opened[name] = found
        return found

    def close(self) -> None:
        """Let every pipeline go."""
        while self._opened:
            self._opened.popitem()[1].patches.undo()
        free_memory()

    def _load(self, name: str, folder: Path) -> Opened:
        if name == "plan" or name.endswith(".json"):
            return self._open_planned(self._find_plan(name, folder), name)
        opened = self._open(_LOADED_AS.get(name, name))
        opened.uses_autocast, opened.clamps = name == "autocast", name == "clamp"
        return opened

    def _find_plan(self, name: str, folder: Path) -> Plan:
        if name != "plan":
            return read_plan(name)
        path = folder / "plan.json"
        if not path.exists():
            write_plan(self._plan(), path)
        return read_plan(path)

    def _make_room(self) -> None:
        """Close what was used longest ago until another one and its run have room."""
        while self._opened:
            sizes = [opened.weights_bytes for opened in self._opened.values()]
            has_room = sum(sizes) + 2 * max(sizes) < 0.6 * self.device.memory_bytes
            if has_room and not self.keeps_one:
                return
            self._opened.pop(next(iter(self._opened))).patches.undo()
            free_memory()


def describe_subject(
    given: Any,
    request: Request,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    runs: Sequence[Run] = (),
    limit: Limit | None = None,
    names: Sequence[str] = (),
) -> Subject:
    """What is to be compared, before anything is loaded.

    Args:
        given: a Diffusers pipeline, which is copied and left as it is; or a Hub id, Diffusers
            folder, single safetensors file, bundled model, or `Source`.
        request: of the runs.
        runs: what runs a program that is no pipeline, one function a row.
        limit: what each run of a checkpoint is to stay within.
        names: the precisions that are compared: if one has to decode in tiles within the limit, all do,
            because tiles change the picture.

    Raises:
        InputError: it is no pipeline and nothing runs it, or the other way round.
        SourceError: the model is missing, damaged or refused.
        OptionError: the pipeline does not take the request.
        StopdownError: none of the precisions stays within the limit.
    """
    if not isinstance(given, (str, Path, Source)):
        if check_run(given, runs or None, None, "compare"):
            _refuse_options(request)
            return _describe_program(given, runs)
        return _describe_pipe(given, request, progress)
    refuse_run(runs or None, f"the source {getattr(given, 'name', given)}")
    target = choose_device(device)
    source = given if isinstance(given, Source) else resolve_source(given)
    verify_source(source)
    chosen = select_pipeline(source, request)
    source = chosen.source
    opener = _Opener(source, target, request, limit)
    if limit is not None:
        opener.tiling = _choose_tiling(opener, limit.count_bytes(target), names)
    return Subject(
        source.name,
        fingerprint(source),
        source.pipeline_class,
        target,
        tuple(class_name for _, class_name in source.components.values()),
        opener.open,
        partial(
            make_plan,
            source,
            device=target.torch_name,
            request=request,
            progress=progress,
        ),
        opener.open_planned,
        scheduler=source.scheduler,
        keeps_one=limit is not None,
        memory=str(limit.count_bytes(target)) if limit is not None else "",
    )


@dataclass
class _Opener:
    """Opens a checkpoint, within a limit of memory where there is one."""

    source: Source
    device: Device
    request: Request
    limit: Limit | None
    tiling: bool | None = None

    def open(self, precision: str) -> Opened:
        load = choose_loader(self.source, precision, self.device, request=self.request)
        return self._fit(load(move=self.limit is None))

    def open_planned(self, plan: Plan, name: str) -> Opened:
        named, move = Path(name).name, self.limit is None
        loaded = load_planned(self.source, plan, named, self.device, move=move)
        return dataclasses.replace(self._fit(loaded), plan=plan)

    def _fit(self, loaded: Loaded) -> Opened:
        begun, size = time.perf_counter(), _count_bytes(loaded.pipe)
        opened = Opened(loaded.pipe, loaded.decisions, weights_bytes=size)
        try:
            fitted = fit_run(
                loaded,
                self.request,
                self.device,
                self.limit,
                read_configs(self.source.described),
                announce=lambda text: None,
                tiling=self.tiling,
            )
        except StopdownError as error:
            raise StopdownError(error.what, expected=error.expected, remedy=_MORE) from error
        if fitted.offloader is not None:
            opened.offloader = fitted.offloader.__enter__()
            opened.patches.defer(opened.offloader.__exit__)
        opened.fit_s = time.perf_counter() - begun
        return opened


_MORE = "Allow more memory, or compare a smaller `height` and `width`, or fewer `frames`."


def _choose_tiling(opener: _Opener, limit_bytes: int, names: Sequence[str]) -> bool:
    """Whether all precisions decode in tiles, from runs without weights.

    Raises:
        StopdownError: none of them stays within the limit.
    """
    facts, supports = gather_facts(opener.source), probe_formats(opener.device)
    fits: list[Fit] = []
    kinds = {**_LOADED_AS, "plan": "fp16"}
    for asked in dict.fromkeys(kinds.get(name, name) for name in names):
        plan = read_plan(asked) if asked.endswith(".json") else None
        with quiet_libraries(), contextlib.suppress(OptionError):  # said when it is loaded
            way = list_ways(facts, supports, asked, plan)[0]
            pipe, formats = build_way(opener.source, way), set(way.precisions.values())
            fits.append(predict_pipe(pipe, formats, opener.request, opener.device))
    tiling = choose_tiling(fits, limit_bytes)
    if tiling is None and fits:
        least = min(find_smallest(fit).peak_bytes for fit in fits)
        raise StopdownError(
            f"No precision of {', '.join(names)} stays within {format_bytes(limit_bytes)}: at least "
            f"{format_bytes(least)} are predicted.",
            remedy=_MORE,
        )
    return bool(tiling)


def _describe_pipe(pipe: Any, request: Request, progress: Progress | None) -> Subject:
    name_arguments(type(pipe), request)
    classes = tuple(type(module).__name__ for module in find_components(pipe).values())
    return Subject(
        type(pipe).__name__,
        "",
        type(pipe).__name__,
        choose_device(str(pipe.device)),
        classes,
        partial(_copy_pipe, pipe),
        partial(make_plan, pipe, request=request, progress=progress),
        partial(_copy_planned, pipe),
    )


def _copy_pipe(pipe: Any, precision: str) -> Opened:
    """A copy of a pipeline with every component in one precision.

    Raises:
        OptionError: the precision is not the same for all components.
    """
    dtype = _find_dtype(precision, "Save it with save_pretrained and compare the folder.")
    copied = copy.deepcopy(pipe)
    for module in find_components(copied).values():
        cast_component_(module, dtype)
    reason = "copied from a pipeline in memory"
    calls = tuple(Decision(callee.name, precision, reason) for callee in find_callees(copied))
    return Opened(copied, calls)


def _find_dtype(precision: str, remedy: str) -> torch.dtype:
    if precision not in FORMATS:
        raise OptionError(
            f"What is in memory cannot be compared in {precision}.",
            expected="Known for it are fp32, bf16, fp16, autocast, clamp, plan, and a plan's file.",
            remedy=remedy,
        )
    return FORMATS[precision].torch_dtype


def _copy_planned(pipe: Any, plan: Plan, name: str) -> Opened:
    copied = copy.deepcopy(pipe)
    for module in find_components(copied).values():
        cast_component_(module, torch.float32)
    apply_plan(copied, plan)
    return Opened(copied, _decide_by(plan, name), plan)


def _decide_by(plan: Plan, name: str) -> tuple[Decision, ...]:
    reason = f"rescaled by {Path(name).name}"
    return tuple(Decision(entry.component, entry.precision, reason) for entry in plan.components)


def _refuse_options(request: Request) -> None:
    """Refuse options of a pipeline's call, which nobody would get."""
    options = dataclasses.replace(request, prompt=None, seed=Request.seed)
    if options != Request():
        raise OptionError(
            "A request with more than a seed was given for a program that is no pipeline.",
            expected="Such a program is run by a function, which knows sizes and steps.",
            remedy="Set them in that function.",
        )


def _describe_program(program: Any, runs: Sequence[Run]) -> Subject:
    """A program that is no pipeline: what runs it holds it, so it is cast where it is, and back."""
    kind = type(program).__name__
    classes = tuple(type(module).__name__ for module in find_components(program).values())
    return Subject(
        kind,
        "",
        kind,
        choose_device(find_device(program)),
        classes,
        partial(_put_program, program),
        partial(make_plan, program, run=lambda: [run() for run in runs]),
        partial(_put_planned, program),
        keeps_one=True,
    )


def _put_program(program: Any, precision: str) -> Opened:
    """A program with its modules in one precision, and the arguments of their calls with them."""
    dtype = _find_dtype(precision, "Compare it in one precision for all of its modules.")
    opened = Opened(program, _decide(program, precision))
    with _undone_on_failure(opened.patches):
        _cast_program(program, dtype, opened.patches)
        intercept_components(
            program, lambda callee, layers: put_cast(callee, dtype, layers), opened.patches
        )
    return opened


def _put_planned(program: Any, plan: Plan, name: str) -> Opened:
    opened = Opened(program, _decide_by(plan, name), plan)
    with _undone_on_failure(opened.patches):
        _cast_program(program, torch.float32, opened.patches)
        opened.patches.defer(apply_plan(program, plan).undo)
    return opened


@contextlib.contextmanager
def _undone_on_failure(patches: Patches) -> Iterator[None]:
    """The program is the caller's: a cast that fails half-way leaves nothing of it."""
    try:
        yield
    except BaseException:
        patches.undo()
        raise


def _cast_program(program: Any, dtype: torch.dtype, patches: Patches) -> None:
    for module in find_components(program).values():
        put_precision(module, dtype, patches)


def _decide(program: Any, precision: str) -> tuple[Decision, ...]:
    reason = "cast where it is in memory"
    return tuple(Decision(name, precision, reason) for name in find_components(program))


def _count_bytes(pipe: Any) -> int:
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for module in find_components(pipe).values()
        for tensor in (*module.parameters(), *module.buffers())
    }
    return sum(tensors.values())

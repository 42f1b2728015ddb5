"""Inspection of a pipeline: a dry run whose operations are all compared with the dtype rules of a backend.

The pipeline's own code around the components is observed as well, on its real tensors.

**Catches** the operations of one request at its size.
**Does not catch** operations that a dry run does not reach; if it ends early, the rest is listed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.component_call_names import name_module_path
from stopdown.component_calls.components import read_precisions
from stopdown.devices.backend_rules import Place
from stopdown.dtype_rules.observations import Case, Judge, Observation
from stopdown.dtype_rules.parameters import find_kept_parameters, list_computing
from stopdown.dtype_rules.tracer import (
    DtypeOrigin,
    Walk,
    find_dtype_origin,
    set_origin,
)
from stopdown.errors import take_one_line
from stopdown.fold_names import RESCALED
from stopdown.interception.autocast import list_autocast
from stopdown.interception.module_paths import ModulePaths
from stopdown.module_calls.callee import Callee
from stopdown.number_formats import name_dtype
from stopdown.numerics import iterate_tensors
from stopdown.pipelines.accepted_arguments import refuse_unknown
from stopdown.pipelines.dry_run import (
    ComponentFailed,
    DryCall,
    Listener,
    dry_run,
    dry_run_program,
    make_arguments,
)


@dataclass
class CallStats:
    """Facts about one kind of component call in a run.

    Attributes:
        component_name: name of the component.
        name: name of the call: `transformer`, `vae.decode`.
        kind: class of the component.
        main: dtype of most of its weights during the call; None without weights.
        times: timestep of each call.
        force_upcast: whether the component's config requires fp32.
        is_rescaled: whether a plan has rescaled it for fp16.
    """

    component_name: str
    name: str
    kind: str
    main: torch.dtype | None
    times: list[torch.Tensor] = field(default_factory=list)
    force_upcast: bool = False
    is_rescaled: bool = False


@dataclass
class Examination:
    """Observations of one dry run.

    Attributes:
        observations: dtype problems, in the order of the run.
        callees: component calls of the run, by name.
        operations: module path of the first use of each (operation, format).
        unseen: components whose code could not be run on fake tensors, with the reasons.
        scheduler: a pipeline's scheduler after the run.
        widening: module paths of modules with fp32 parameters that cast their own input to fp32.
    """

    observations: list[Observation] = field(default_factory=list)
    callees: dict[str, CallStats] = field(default_factory=dict)
    operations: dict[tuple[str, str], str] = field(default_factory=dict)
    unseen: list[tuple[str, str]] = field(default_factory=list)
    scheduler: Any = None
    widening: set[str] = field(default_factory=set)


def observe_skeleton(
    skeleton: Any, place: Place, arguments: Mapping[str, Any] | None = None
) -> Examination:
    """Run a skeleton once and return the observations of its operations.

    Args:
        skeleton: pipeline from `build_skeleton` or `copy_skeleton`, which cannot be used again.
        place: backend and versions whose rules apply.
        arguments: arguments of the call that override the made-up ones.
    """
    refuse_unknown(type(skeleton), arguments or {})
    given = {**make_arguments(skeleton), **(arguments or {})}
    listener = DtypeListener(place, place.backend)
    seen = _listen(listener, functools.partial(dry_run, skeleton, given))
    seen.scheduler = getattr(skeleton, "scheduler", None)
    return seen


def examine_program(
    program: Any,
    place: Place,
    run: Callable[[], Any],
    torch_dtypes: Mapping[str, torch.dtype] | None = None,
) -> Examination:
    """Dry-run a live program that is not a pipeline, return the observations, and restore the program.

    Args:
        torch_dtypes: dtypes in which components are treated as loaded, by name.
    """
    return _listen(
        DtypeListener(place, "cpu"),  # a live program runs where it is
        lambda listeners: dry_run_program(program, run, listeners, torch_dtypes),
    )


def _listen(listener: DtypeListener, start: Callable[[list[Listener]], None]) -> Examination:
    try:
        start([listener])
    except Exception as error:  # whatever code raises without values is a result here
        listener.note_failure(error)
    return listener.conclude()


class DtypeListener(Listener):
    """Listener that checks the operations of a dry run, including those of the pipeline's own code.

    Args:
        place: backend and versions whose rules apply.
        device: device that the code outside the components sees.
    """

    def __init__(self, place: Place, device: str) -> None:
        self._place, self._result = place, Examination()
        self._outside = Judge(Case("pipeline", "pipeline", None, place, ambient=list_autocast()))
        self._around = Walk(self._outside, None, device)

    def note_failure(self, error: Exception) -> None:
        """Record the error that ended the run early."""
        if isinstance(error, ComponentFailed):
            self._result.unseen.append((error.callee.name, _shorten(error.error)))
        else:
            self._result.unseen.append(("pipeline", _shorten(error)))

    def conclude(self) -> Examination:
        self._result.observations += self._outside.found
        return self._result

    def around(self, arguments: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Return the function mode that checks the pipeline's own code, outside its components."""
        return self._around

    def begin(self, run: DryCall) -> None:
        """Record facts about a component call, and pause the check of the code outside components."""
        self._around.is_paused = True
        module, callee = run.call.callee.owner, run.call.callee
        precisions = list_computing(module) or read_precisions(module)
        main = precisions[0] if precisions else None
        seen = self._result.callees.setdefault(
            callee.name, CallStats(callee.component_name, callee.name, type(module).__name__, main)
        )
        config = getattr(module, "config", None)
        seen.main = main
        seen.force_upcast = bool(getattr(config, "force_upcast", False))
        seen.is_rescaled = bool(getattr(module, RESCALED, False))
        named = run.call.named
        time = named.get("timestep", named.get("timesteps"))
        if isinstance(time, torch.Tensor):
            seen.times.append(time.detach().reshape(-1)[-1:].clone())

    @contextmanager
    def inside(self, run: DryCall, paths: ModulePaths) -> Iterator[None]:
        """Check the operations of a component's code on fake tensors, and add the observations."""
        callee, seen = run.call.callee, self._result.callees[run.call.callee.name]
        judge = Judge(_make_case(callee, seen.main, self._place, list_autocast()))
        walk = Walk(judge, seen.main, paths=paths)
        for name, tensor in [*callee.owner.named_parameters(), *callee.owner.named_buffers()]:
            set_origin(tensor, DtypeOrigin("parameter", name, "", name))
        for name, value in run.call.named.items():
            _mark_argument(name, value, run.fakes)
        try:
            with walk:
                yield
        finally:
            self._keep(callee, judge)

    def _keep(self, callee: Callee, judge: Judge) -> None:
        name = callee.component_name
        self._result.observations += judge.found
        self._result.widening |= {name_module_path(name, path) for path in judge.widening}
        for key, path in judge.operations.items():
            self._result.operations.setdefault(key, name_module_path(name, path))

    def end(self, run: DryCall) -> None:
        """Resume the check of the pipeline's own code, and mark the output's dtype with its origin."""
        for tensor in iterate_tensors(run.output):
            set_origin(tensor, DtypeOrigin("output", f"the output of {run.call.callee.name}", ""))
        self._around.is_paused = False


def _make_case(
    callee: Callee, main: torch.dtype | None, place: Place, ambient: tuple[str, ...]
) -> Case:
    module = callee.owner
    kept = find_kept_parameters(module, name_dtype(main)) if main is not None else frozenset()
    return Case(
        call=callee.name,
        component=callee.component_name,
        main=main,
        place=place,
        kept_fp32=kept,
        is_rescaled=bool(getattr(module, RESCALED, False)),
        mps_aware=frozenset(
            path
            for path, part in (module.named_modules() if place.backend == "mps" else ())
            if _asks_for_mps(type(part))  # type: ignore[arg-type]
        ),
        ambient=ambient,
    )


@functools.cache
def _asks_for_mps(kind: type) -> bool:
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError, KeyError):
        return False
    return "mps" in source or "maybe_adjust_dtype_for_device" in source


def _mark_argument(name: str, value: Any, fakes: Mapping[int, torch.Tensor]) -> None:
    """Record on an argument's fake tensors that their dtype comes from this argument.

    Args:
        fakes: fake tensor by `id` of the real one.
    """
    if isinstance(value, torch.Tensor):
        fake = fakes[id(value)]
        set_origin(fake, DtypeOrigin("argument", name, "", before=str(find_dtype_origin(value))))
    elif isinstance(value, dict):
        for key, item in value.items():
            _mark_argument(f"{name}.{key}", item, fakes)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _mark_argument(name, item, fakes)


def _shorten(error: BaseException) -> str:
    return f"{type(error).__name__}: {take_one_line(error, 300)}"

"""A pipeline without weights run once, every call of a component walked: what was seen.

The pipeline's own code decides what each component gets. Code around the components is walked as
well, on its real tensors. A call whose arguments have the dtypes and shapes of an earlier one is
answered as that one was.

**Catches** what one request meets, of the size that it has.
**Does not catch** branches that another request would take. A component whose code cannot run without
values ends it: what was not seen is listed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.backend_rules import Place
from stopdown.call_names import name_module_path
from stopdown.dtype_rules.observations import Case, Judge, Observation
from stopdown.dtype_rules.tracer import (
    LARGEST_KNOWN,
    Origin,
    Walk,
    Work,
    find_origin,
    following,
    list_autocast,
    set_known,
    set_origin,
)
from stopdown.errors import take_one_line
from stopdown.graph.capture import find_mode
from stopdown.number_formats import name_dtype
from stopdown.pipelines.call_interception import (
    Call,
    find_argument_names,
    map_tensors,
    sign_arguments,
)
from stopdown.pipelines.components import Callee, find_kept_fp32, read_precisions
from stopdown.pipelines.dry_run import dry_run
from stopdown.scaling.folds import RESCALED

LARGEST_ZEROS = 1 << 25
"""Outputs up to this size become real zeros that can be written to; larger ones one repeated zero."""


@dataclass
class Seen:
    """One component call, as the pipeline used it.

    Attributes:
        component_name: `transformer`, `vae`.
        name: of the call: `transformer`, `vae.decode`.
        kind: class of the module.
        main: dtype of most of its weights in that call; None without any.
        calls: how often it was called.
        work: what one call costs.
        weight_bytes: size of its parameters and buffers as they stand.
        times: what each call got as its timestep.
        force_upcast: what its config says.
        is_rescaled: a plan made it fit fp16.
    """

    component_name: str
    name: str
    kind: str
    main: torch.dtype | None
    calls: int = 0
    work: Work = field(default_factory=Work)
    weight_bytes: int = 0
    times: list[torch.Tensor] = field(default_factory=list)
    force_upcast: bool = False
    is_rescaled: bool = False


@dataclass
class Examination:
    """What was seen.

    Attributes:
        observations: what the judges found, in the order of the run.
        callees: each component call that was used, by its component.
        operations: (operation, format) → the module path of its first use.
        unseen: what could not be walked, with the reason.
        scheduler: after the run.
        widening: module paths of modules that cast their input to fp32 themselves, beside fp32 parameters.
    """

    observations: list[Observation] = field(default_factory=list)
    callees: dict[str, Seen] = field(default_factory=dict)
    operations: dict[tuple[str, str], str] = field(default_factory=dict)
    unseen: list[tuple[str, str]] = field(default_factory=list)
    scheduler: Any = None
    widening: set[str] = field(default_factory=set)


class _CannotGoOn(Exception):
    """A component's code needs values that are not there."""


def examine(skeleton: Any, place: Place, arguments: Mapping[str, Any] | None = None) -> Examination:
    """Everything that one run of a skeleton shows.

    Args:
        skeleton: from `build_skeleton` or `copy_skeleton`; it is used up.
        place: whose rules hold.
        arguments: of the pipeline's call, instead of its defaults.
    """
    run = _Run(skeleton, place)
    try:
        with run.around:
            dry_run(skeleton, run.answer, arguments)
    except _CannotGoOn:
        pass  # noted where it was raised
    except Exception as error:  # whatever a pipeline's own code raises is a result here
        run.result.unseen.append(("pipeline", _shorten(error)))
    run.result.observations += run.outside.found
    run.result.scheduler = getattr(skeleton, "scheduler", None)
    return run.result


class _Run:
    """One examination while it goes on."""

    def __init__(self, skeleton: Any, place: Place) -> None:
        self.place, self.ambient = place, list_autocast()
        self.result = Examination()
        self.outside = Judge(Case("pipeline", None, place, ambient=self.ambient))
        self.around = Walk(self.outside, None, place.backend)
        self._answers: dict[Any, Any] = {}

    def answer(
        self, callee: Callee, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a component call gives, as zeros; walked when it is the first of its kind."""
        self.around.is_paused = True
        try:
            named = {**dict(zip(find_argument_names(callee), args, strict=False)), **kwargs}
            seen = self._note(callee, named)
            key = (callee.name, seen.main, sign_arguments(args, kwargs))
            if key not in self._answers:
                self._answers[key] = self._walk(callee, call, named, args, kwargs, seen)
            output = map_tensors(self._answers[key], _make_zeros)
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor):
                    set_origin(tensor, Origin("output", f"the output of {callee.name}", ""))
            return output
        finally:
            self.around.is_paused = False

    def _note(self, callee: Callee, named: Mapping[str, Any]) -> Seen:
        module = callee.owner
        precisions = read_precisions(module)
        main = precisions[0] if precisions else None
        seen = self.result.callees.setdefault(
            callee.name, Seen(callee.component_name, callee.name, type(module).__name__, main)
        )
        config = getattr(module, "config", None)
        seen.main, seen.calls = main, seen.calls + 1
        seen.force_upcast = bool(getattr(config, "force_upcast", False))
        seen.is_rescaled = bool(getattr(module, RESCALED, False))
        seen.weight_bytes = _count_bytes(module)
        time = named.get("timestep", named.get("timesteps"))
        if isinstance(time, torch.Tensor):
            seen.times.append(time.detach().reshape(-1)[-1:].clone())
        return seen

    def _walk(
        self,
        callee: Callee,
        call: Call,
        named: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: Seen,
    ) -> Any:
        mode = find_mode(callee.owner)
        judge = Judge(_make_case(callee, seen.main, self.place, self.ambient))
        walk = Walk(judge, seen.main)
        fakes: dict[int, torch.Tensor] = {}
        for name, value in named.items():
            _fake_argument(name, value, mode, fakes)
        given = pytree.tree_map_only(torch.Tensor, lambda x: fakes[id(x)], (args, kwargs))
        try:
            with following(walk, callee.owner), mode, walk:
                output = call(*given[0], **given[1])
        except Exception as error:
            self.result.unseen.append((callee.name, _shorten(error)))
            raise _CannotGoOn from error
        finally:
            self.result.observations += judge.found
            name = callee.component_name
            self.result.widening |= {name_module_path(name, path) for path in judge.widening}
            for key, path in judge.operations.items():
                module_path = name_module_path(name, path)
                self.result.operations.setdefault(key, module_path)
        seen.work = walk.work
        return output


def _make_case(
    callee: Callee, main: torch.dtype | None, place: Place, ambient: tuple[str, ...]
) -> Case:
    module = callee.owner
    named = dict(module.named_parameters())
    kept = find_kept_fp32(type(module), name_dtype(main)) if main is not None else ()
    return Case(
        component=callee.name,
        main=main,
        place=place,
        parameters={name: tensor.dtype for name, tensor in named.items()},
        kept_fp32=frozenset(n for n in named if any(part in kept for part in n.split("."))),
        is_rescaled=bool(getattr(module, RESCALED, False)),
        mps_aware=_find_mps_aware(module) if place.backend == "mps" else frozenset(),
        ambient=ambient,
    )


def _find_mps_aware(module: torch.nn.Module) -> frozenset[str]:
    """Paths of the modules whose source file asks whether it runs on MPS: it takes fp32 there."""
    return frozenset(p for p, part in module.named_modules() if _asks_for_mps(type(part)))  # type: ignore[arg-type]


@functools.cache
def _asks_for_mps(kind: type) -> bool:
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError, KeyError):
        return False
    return "mps" in source or "maybe_adjust_dtype_for_device" in source


def _fake_argument(name: str, value: Any, mode: Any, fakes: dict[int, torch.Tensor]) -> None:
    """Fake tensors for an argument, which know its name, and its values when they are few."""
    if isinstance(value, torch.Tensor):
        fake = mode.from_tensor(value.detach())
        before = find_origin(value)
        set_origin(fake, Origin("argument", name, "", before=str(before)))
        set_known(fake, value.detach() if value.numel() <= LARGEST_KNOWN else None)
        fakes[id(value)] = fake
    elif isinstance(value, dict):
        for key, item in value.items():
            _fake_argument(f"{name}.{key}", item, mode, fakes)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _fake_argument(name, item, mode, fakes)


def _make_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Real zeros like a fake tensor; large ones are one zero, looked at many times."""
    zero = torch.zeros((), dtype=tensor.dtype).expand(tuple(tensor.shape))
    return zero.clone() if tensor.numel() <= LARGEST_ZEROS else zero


def _count_bytes(module: torch.nn.Module) -> int:
    return sum(x.nbytes for x in (*module.parameters(), *module.buffers()))


def _shorten(error: BaseException) -> str:
    return f"{type(error).__name__}: {take_one_line(error, 300)}"

"""Measure the memory of a pipeline's run by a dry run: the peak of each component call, and the weights.

Every storage is counted while the code runs without weights, so sizes, lifetimes, tiling, slicing and
chunking are those of the real code, not of a formula. Of identical blocks (the same submodules, sizes,
settings and hooks), one is run for all arguments of the same shapes. An autoencoder is run once for all
tiles or frames of the same shape. Code that returns a view of its arguments runs each time.

Not covered: what `StorageTracker` doesn't cover; a component whose code reads values of its inputs, which
raises `CaptureError` with the line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stopdown.component_call_names import is_inside, name_component
from stopdown.component_calls.components import find_components, is_autoencoder, list_block_paths
from stopdown.errors import CaptureError, take_first_line
from stopdown.fake_tensors.capture_failures import describe_failure
from stopdown.fold_names import name_parameters
from stopdown.interception.module_paths import ModulePaths
from stopdown.interception.patches import Patches
from stopdown.memory.alike_calls import BlockResult, GivenArguments, sign_block
from stopdown.memory.allocation_tracker import Event, StorageTracker
from stopdown.module_calls.call import sign_arguments
from stopdown.numerics import iterate_tensors
from stopdown.pipelines.dry_run import Answers, ComponentFailed, DryCall, Listener, dry_run
from stopdown.scaling import ComponentCall

LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
"""Modules whose entries are blocks that can be loaded one by one."""

REPEATS = 2
"""How often the events of a repeated block or tile are recorded; then its free blocks are reused."""

OUTSIDE = "<outside>"
"""In place of a module's path: the pipeline's own code, outside of a component's calls."""

MOST_STEPS = 3
"""Denoising steps of the dry run: by then a multistep scheduler holds all tensors it caches."""


@dataclass
class CallMemory:
    """The memory of one call of a component.

    Attributes:
        component: name of the call, such as `text_encoder` or `vae.decode`.
        stage: `encode`, `denoise` or `decode`.
        peaks: module path ("" for the component itself) → most live bytes, without weights, while it is the
            innermost module that runs. Activations from before the call count.
        entries: module path → how often it was called.
        shapes: of the output's tensors.
        strays: module path → modules that read its weights while it didn't run.
        events: storages allocated and freed, modules entered and left, in order. Repeated code of the
            same sizes is included `REPEATS` times.
    """

    component: str
    stage: str
    peaks: dict[str, int] = field(default_factory=dict, repr=False)
    flops: int = 0
    entries: dict[str, int] = field(default_factory=dict, repr=False)
    shapes: tuple[tuple[int, ...], ...] = ()
    strays: dict[str, frozenset[str]] = field(default_factory=dict, repr=False)
    events: list[Event] = field(default_factory=list, repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """Most live bytes during the call, without weights."""
        return max(self.peaks.values())


@dataclass(frozen=True)
class RunMemory:
    """The memory of a run: that of its calls without weights, and the sizes of the weights.

    Attributes:
        calls: in order.
        weights: component → module path → bytes of the parameters directly in it; a tied parameter counts
            in each module that has it.
        totals: component → bytes of its parameters, tied ones once, and of its buffers.
        strays: component → module path → modules that read its weights while it didn't run, or `OUTSIDE`.
        blocks: component → paths of the blocks in its outermost module lists.
        between_bytes: most live bytes outside of calls.
        steps: denoising steps that were run.
        tensors: component → module path → bytes of each parameter directly in it, tied ones once.
        trace: the calls, and lists of the events between them, in order.
    """

    calls: tuple[CallMemory, ...]
    weights: dict[str, dict[str, int]]
    totals: dict[str, tuple[int, int]]
    strays: dict[str, dict[str, frozenset[str]]]
    blocks: dict[str, tuple[str, ...]]
    between_bytes: int
    steps: int
    tensors: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict, repr=False)
    trace: tuple[CallMemory | list[Event], ...] = field(default=(), repr=False, compare=False)

    def weigh(self, component: str) -> int:
        """Return the bytes of all parameters of a component, also by the name of a call (`vae.decode`)."""
        return self.totals[name_component(component)][0]


def listen_to_run(
    pipe: Any,
    arguments: Mapping[str, Any],
    listener: MemoryListener | None = None,
    answers: Answers | None = None,
) -> RunMemory:
    """Measure the memory of one run by a dry run of its first steps.

    Args:
        pipe: a skeleton, with any settings that make calls smaller already applied.
        listener: configured for the device and the pipeline's settings; None for a CPU without settings.
        answers: cached results of dry runs of pipelines with the same configuration.

    Raises:
        CaptureError: a component's code can't run on tensors without values.
    """
    listener = listener or MemoryListener()
    try:
        with Patches() as patches:
            for part in find_components(pipe).values():  # casts need no values of weights
                patches.set_attribute(part, "to", functools.partial(listener.run_unseen, part.to))
            dry_run(pipe, arguments, [listener], answers)
    except ComponentFailed as failed:
        raise describe_failure(failed.error, failed.callee.owner) from failed.error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise CaptureError(
            f"{type(pipe).__name__} can't be run without values: {take_first_line(error)}.",
            expected="Its components and their configurations fit each other.",
            remedy="Download or save the model again.",
        ) from error
    return listener.conclude(pipe)


class MemoryListener(Listener):
    """Measures the memory of a pipeline's run while `dry_run` runs it."""

    ends_at_decoder = False
    most_steps = MOST_STEPS

    def __init__(
        self,
        *,
        fused: bool = True,
        on_cpu: bool = True,
        sign: Callable[[ComponentCall], str] = lambda call: "",
    ) -> None:
        """Prepare to measure; pass the listener to `dry_run`, and then call `conclude`.

        Args:
            fused: whether attention runs in a kernel that keeps no score matrix.
            on_cpu: whether to count the workspaces of the CPU's convolutions.
            sign: returns a signature of the component's settings that change a call's memory.
        """
        self._fused, self._sign = fused, lambda call: f"{on_cpu}|{sign(call)}"
        self._tracker = StorageTracker(on_cpu=on_cpu)
        self._outside: set[int] = set()
        self._tracker.on_operation = self._note_outside
        self._calls: list[CallMemory] = []
        self._between = self._start = self._steps = 0
        self._trace: list[CallMemory | list[Event]] = []

    def conclude(self, pipe: Any) -> RunMemory:
        """Return the memory of the finished run.

        Args:
            pipe: skeleton or loaded pipeline, for the sizes of weights.
        """
        parts = find_components(pipe)
        return RunMemory(
            calls=tuple(self._calls),
            weights={name: weigh(part) for name, part in parts.items()},
            totals={name: _sum_up(part) for name, part in parts.items()},
            strays={
                name: _merge_strays(self._calls, name, _find_homes(part), self._outside)
                for name, part in parts.items()
            },
            blocks={name: list_block_paths(part, LISTS) for name, part in parts.items()},
            between_bytes=self._tracker.peak_bytes,
            steps=self._steps,
            tensors={name: _list_sizes(part) for name, part in parts.items()},
            trace=(*self._trace, self._tracker.events),
        )

    def around(self, arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that counts the storages allocated by the pipeline's own code."""
        self._steps = arguments.get("num_inference_steps", 0)
        return self._tracker

    def sign(self, call: ComponentCall) -> str:
        """Return a string of the settings that change a call's memory, so that cached results are told
        apart.
        """
        return f"{self._fused}|{self._sign(call)}"

    def run_unseen(self, code: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run code of the pipeline that may read weights without needing their values."""
        with Patches() as patches:
            patches.set_attribute(self._tracker, "on_operation", None)
            return code(*args, **kwargs)

    def _note_outside(self, args: Any) -> None:
        """Record which arguments of an operation of the pipeline's own code are parameters."""
        found = _list_operands(args)
        self._outside.update(id(x) for x in found if isinstance(x, torch.nn.Parameter))

    def begin(self, run: DryCall) -> None:
        """Stop counting the pipeline's own code, because a component's call begins."""
        self._tracker.__exit__(None, None, None)
        self._between, self._start = self._tracker.restart(), self._tracker.live_bytes
        self._trace.append(self._tracker.events)
        self._tracker.events = []

    @contextlib.contextmanager
    def inside(self, run: DryCall, paths: ModulePaths) -> Iterator[None]:
        """Count the storages that a component's code allocates, starting at 0.

        The tracker is entered above the fake mode; below, it would see the meta tensors of fake ones.
        """
        callee, tracker = run.call.callee, self._tracker
        tracker.ignore(name_parameters(callee.owner).values())
        tracker.ignore(run.fakes.values())  # real tensors stand for their memory
        self._call, self._paths = CallMemory(callee.name, callee.stage), paths
        self._call.events = tracker.events
        self._begun, flops = tracker.live_bytes, tracker.flops
        blocks = frozenset(list_block_paths(callee.owner, LISTS))
        homes = _find_homes(callee.owner)
        note = functools.partial(_note_strays, self._call.strays, homes, blocks, paths)
        # without a fused kernel, attention is three operations, and its scores are a tensor
        attention = contextlib.nullcontext() if self._fused else sdpa_kernel(SDPBackend.MATH)
        with attention, Patches() as patches:
            patches.set_attribute(tracker, "on_operation", note)
            patches.set_attribute(tracker, "kind", FakeTensor)
            self._put_tiles(callee.owner, patches)
            self._put_blocks(callee.owner, patches)
            with tracker:
                yield
        self._note("")
        self._call.flops = tracker.flops - flops
        run.kept["memory"] = self._call

    def _put_tiles(self, owner: torch.nn.Module, patches: Patches) -> None:
        """Patch an autoencoder so that a dry run computes one of its tiles or frames of the same shapes.

        The others take the memory that was measured for it.
        """
        if not is_autoencoder(owner):
            return
        for name in ("encoder", "decoder"):
            if isinstance(part := getattr(owner, name, None), torch.nn.Module):
                once = functools.partial(self._run_tile, {}, part, part.forward)
                patches.set_attribute(part, "forward", once)
        for name in ("blend_t", "blend_v", "blend_h"):
            if callable(code := getattr(owner, name, None)):
                patches.set_attribute(owner, name, functools.partial(self._run_blend, {}, code))

    def _put_blocks(self, owner: torch.nn.Module, patches: Patches) -> None:
        """Patch a component so that a dry run computes only one of several identical blocks.

        The others take the memory that was measured for it, if their arguments have the same shapes.
        Autoencoders are skipped, because they cache values between blocks, and their blocks differ in size.
        """
        if is_autoencoder(owner):
            return
        alike: dict[str, list[torch.nn.Module]] = {}
        for part in owner.modules():
            for block in part if isinstance(part, torch.nn.ModuleList) else ():
                alike.setdefault(sign_block(block), []).append(block)
        for blocks in alike.values():
            known: dict[str, Footprint] = {}
            for block in blocks if len(blocks) > 1 else ():
                once = functools.partial(self._run_tile, known, block, block.forward)
                patches.set_attribute(block, "forward", once)

    def _run_blend(self, known: dict[str, int], code: Callable[..., Any], *given: Any) -> Any:
        """Blend one row of the seam between two tiles, and none if a seam of the same shapes was
        blended before.

        A model blends row by row, and each row takes the same memory.

        Args:
            known: signature of the arguments → peak bytes of the blend.
            given: the previous tile, the tile that is written into and returned, and the seam's width.
        """
        path = self._paths.current
        self._note(path)
        alive, key = self._tracker.live_bytes, sign_arguments(given, {})
        output = given[1]
        if key not in known:
            before, after, width = given
            output = code(before, after, min(width, 1))
            if output is not given[1] or self._tracker.live_bytes != alive:
                return output
            known[key] = self._tracker.peak_bytes - alive
        self._tracker.peak_bytes = max(self._tracker.peak_bytes, alive + known[key])
        return output

    def _run_tile(
        self,
        known: dict[str, Footprint],
        block: torch.nn.Module,
        code: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the output of a tile or block; reuse that of an earlier one with the same signature.

        A reused result adds the earlier one's memory to the present live bytes.

        Args:
            known: signature of block and arguments → footprint.
            code: the original `forward`.
        """
        here = self._paths.current
        self._note(here)
        alive, call = self._tracker.live_bytes - self._begun, self._call
        arguments = GivenArguments(block, args, kwargs)
        taken = known.get(arguments.signature)
        if taken is not None and taken.result is not None:
            output = taken.result.give_again(args, kwargs)
            self._tracker.flops += taken.flops
            if taken.again:
                events = taken.again.pop()
                self._tracker.events += _repeat(events, taken.path, here, self._tracker.numbers)
            # what was noted of the block that this one is like holds for it too
            for home, users in [*call.strays.items()] if taken.path != here else ():
                if any(is_inside(x, taken.path) for x in (home, *users)):
                    moved = frozenset(_move(x, taken.path, here) for x in users)
                    _join(call.strays, {_move(home, taken.path, here): moved})
        else:
            output, taken = self._watch_tile(
                alive, arguments, functools.partial(code, *args, **kwargs)
            )
            known[arguments.signature] = taken
        for path, peak in taken.peaks.items():
            place = _move(path, taken.path, here)
            call.peaks[place] = max(alive + peak, call.peaks.get(place, alive + peak))
        for path, count in taken.entries.items():
            place = _move(path, taken.path, here)
            call.entries[place] = call.entries.get(place, 0) + count
        return output

    def _watch_tile(
        self, alive: int, arguments: GivenArguments, code: Callable[[], Any]
    ) -> tuple[Any, Footprint]:
        """Run a tile or block; return its output and its footprint.

        Args:
            alive: live bytes at its start, counted from the start of the call.
        """
        here = self._paths.current
        call, flops = self._call, self._tracker.flops
        begun = len(self._tracker.events)
        self._call = own = CallMemory(call.component, call.stage, strays=call.strays)
        try:
            output = code()
            self._note(self._paths.current)
        finally:
            self._call = call
        peaks = {path: peak - alive for path, peak in own.peaks.items()}
        flops = self._tracker.flops - flops
        again = [self._tracker.events[begun:]] * REPEATS
        result = arguments.describe(output)
        return output, Footprint(here, peaks, own.entries, flops, result, again)

    def enter(self, path: str) -> None:
        """Record that a module is entered, and the peak of its parent until now."""
        self._note(self._paths.stack[-2])
        self._call.entries[path] = self._call.entries.get(path, 0) + 1
        self._tracker.events.append((path, 1))

    def leave(self, path: str) -> None:
        """Record that a module is left, and its peak since it became the innermost one."""
        self._note(path)
        self._tracker.events.append((path, 0))

    def _note(self, path: str) -> None:
        peak = self._tracker.restart() - self._begun
        self._call.peaks[path] = max(peak, self._call.peaks.get(path, peak))

    def end(self, run: DryCall) -> None:
        """Record the finished call, and count the pipeline's own code again."""
        if run.output is not None:
            shapes = tuple(tuple(tensor.shape) for tensor in iterate_tensors(run.output))
            seen: CallMemory = run.kept["memory"]
            peaks = {path: peak + self._start for path, peak in seen.peaks.items()}
            self._calls.append(dataclasses.replace(seen, peaks=peaks, shapes=shapes))
            self._trace.append(self._calls[-1])
        self._tracker.events = []
        # the call's own peak is in what was noted of it
        self._tracker.peak_bytes = max(self._between, self._tracker.live_bytes)
        self._tracker.__enter__()
        self._tracker.count(iterate_tensors(run.output))


def _find_homes(module: torch.nn.Module) -> dict[int, list[str]]:
    """Map each parameter, by `id`, to the paths of the modules that hold it."""
    homes: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        homes.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return homes


def _list_operands(args: Any) -> Iterator[Any]:
    """Yield the arguments of an operation, and the entries of those that are lists."""
    for value in args:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _note_strays(
    found: dict[str, frozenset[str]],
    homes: Mapping[int, list[str]],
    blocks: Collection[str],
    paths: ModulePaths,
    args: Any,
) -> None:
    """Record which arguments of an operation are weights of a module that isn't running, or whose block
    isn't, as offloading must load them.

    Args:
        found: module path → modules that read its weights; entries are added.
        homes: `id` of a parameter → paths of the modules that hold it.
        blocks: paths of the component's blocks.
    """
    for holders in (homes.get(id(value), ()) for value in _list_operands(args)):
        units = [find_unit(home, blocks) for home in holders]
        if units and not any(unit in paths.stack for unit in units):
            user = next(x for x in reversed(paths.stack) if not any(is_inside(x, y) for y in units))
            _join(found, dict.fromkeys(holders, frozenset({user})))


def find_unit(path: str, blocks: Collection[str]) -> str:
    """Return the innermost block around a module, or the module itself, whose call loads its weights."""
    return next((x for x in list_around(path) if x in blocks), path)


def list_around(path: str) -> Iterator[str]:
    """Yield a module's path and those of all modules around it, innermost first, "" last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _join(found: dict[str, frozenset[str]], more: Mapping[str, frozenset[str]]) -> None:
    for home, users in more.items():
        found[home] = found.get(home, frozenset()) | users


def _merge_strays(
    calls: Sequence[CallMemory],
    component: str,
    homes: Mapping[int, list[str]],
    outside: Collection[int],
) -> dict[str, frozenset[str]]:
    """Map each module of a component to those that read its weights while it didn't run, in any call.

    Args:
        homes: `id` of a parameter → paths of the modules that hold it.
        outside: `id` of each parameter that the pipeline's own code read.
    """
    merged: dict[str, frozenset[str]] = {}
    for holders in (paths for key, paths in homes.items() if key in outside):
        _join(merged, dict.fromkeys(holders, frozenset({OUTSIDE})))
    for call in calls:
        if name_component(call.component) == component:
            _join(merged, call.strays)
    return merged


def weigh(module: torch.nn.Module) -> dict[str, int]:
    """Map each module's path to the bytes of the parameters directly in it."""
    weights: dict[str, int] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        weights[path] = weights.get(path, 0) + tensor.nbytes
    return weights


def _list_sizes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Map each module's path to the bytes of each parameter directly in it."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, tensor in module.named_parameters():
        path = name.rpartition(".")[0]
        sizes[path] = (*sizes.get(path, ()), tensor.nbytes)
    return sizes


def _sum_up(module: torch.nn.Module) -> tuple[int, int]:
    return sum(x.nbytes for x in module.parameters()), sum(x.nbytes for x in module.buffers())


@dataclass(frozen=True)
class Footprint:
    """The memory and the result of one run of a tile or block.

    Attributes:
        path: of the module that ran.
        peaks: module path → most live bytes, counted from its start.
        result: its output, if it can be reproduced.
        again: copies of its events, one for each later run that is still to be recorded in full.
    """

    path: str
    peaks: dict[str, int]
    entries: dict[str, int]
    flops: int
    result: BlockResult | None
    again: list[list[Event]]


def _repeat(events: list[Event], before: str, after: str, numbers: Iterator[int]) -> list[Event]:
    """Copy the events of one block (`before`) for another (`after`), with new storage numbers.

    Storages that the block leaves alive are freed at the end.
    """
    own: dict[int, int] = {}
    found: list[Event] = []
    for what, size in events:
        if isinstance(what, str):
            found.append((_move(what, before, after), size))
        elif size:
            own[what] = next(numbers)
            found.append((own[what], size))
        elif what in own:
            found.append((own.pop(what), 0))
    return found + [(number, 0) for number in own.values()]


def _move(path: str, before: str, after: str) -> str:
    """Return the path that a module inside one block has in another block."""
    return after + path[len(before) :] if is_inside(path, before) else path

"""What a run of a pipeline takes, heard in its dry run: each component's calls, and the weights.

Every storage is counted while the code runs without weights, so sizes, lifetimes, tiling, slicing and
chunking are those of the real code, not of a formula.

**Catches** what the pipeline does between the calls, in Python, too.
**Does not catch** what `StorageTracker` does not; a component whose code reads values of its inputs: it
raises `CaptureError` and names the line.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stopdown.component_call_names import name_component
from stopdown.errors import CaptureError, take_first_line
from stopdown.graph.capture import describe_failure, name_parameters
from stopdown.memory.allocation_tracker import StorageTracker
from stopdown.memory.eight_bits import Packing, weigh_packing
from stopdown.module_paths import ModulePaths
from stopdown.numerics import iterate_tensors
from stopdown.patches import Patches
from stopdown.pipelines.components import find_blocks, find_components
from stopdown.pipelines.dry_run import Answers, ComponentCall, ComponentFailed, Listener, dry_run

LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
"""Modules whose entries are blocks that can be loaded one by one."""

MOST_STEPS = 3
"""Steps that are run dry: a multistep scheduler has then kept what it keeps."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a call during which the same module runs.

    Attributes:
        path: the innermost module, "" is the component itself.
        peak_bytes: most bytes alive beside weights, counted from the start of the run.
    """

    path: str
    peak_bytes: int


@dataclass(frozen=True)
class CallMemory:
    """One call of a component.

    Attributes:
        component: `text_encoder`, `vae.decode`.
        stage: `encode`, `denoise` or `decode`.
        segments: in order.
        flops: of its matrix products, convolutions and attention.
        entries: module path → how often it was entered.
        shapes: of the tensors that came back.
        strays: path of a module → modules that used its weights while it did not run.
    """

    component: str
    stage: str
    segments: tuple[Segment, ...]
    flops: int
    entries: dict[str, int] = field(default_factory=dict, repr=False)
    shapes: tuple[tuple[int, ...], ...] = ()
    strays: dict[str, frozenset[str]] = field(default_factory=dict, repr=False)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive during the call, weights aside."""
        return max(segment.peak_bytes for segment in self.segments)


@dataclass(frozen=True)
class RunMemory:
    """What a run takes, weights aside, and the weights.

    Attributes:
        calls: in order.
        weights: component → module path → bytes of the parameters directly in it; a tied one counts
            wherever it stands.
        totals: component → bytes of its parameters, tied ones once, and of its buffers.
        strays: component → path of a module → modules that used its weights while it did not run.
        blocks: component → paths of the entries of its outermost lists of modules.
        between_bytes: most bytes alive outside of calls.
        steps: that were run dry.
        packings: format of 8 bits → component → what its weights take when those that can wait so.
    """

    calls: tuple[CallMemory, ...]
    weights: dict[str, dict[str, int]]
    totals: dict[str, tuple[int, int]]
    strays: dict[str, dict[str, frozenset[str]]]
    blocks: dict[str, tuple[str, ...]]
    between_bytes: int
    steps: int
    packings: dict[str, dict[str, Packing]] = field(default_factory=dict)

    def weigh(self, component: str, storage: str = "native") -> int:
        """Bytes of all parameters of a component; directions of an autoencoder share theirs."""
        if storage != "native":
            return self.find_packing(component, storage).total_bytes
        return self.totals[name_component(component)][0]

    def find_packing(self, component: str, storage: str) -> Packing:
        """What the weights of a component take in a format of 8 bits."""
        return self.packings[storage][name_component(component)]


def listen_to_run(
    pipe: Any,
    arguments: Mapping[str, Any],
    listener: MemoryListener | None = None,
    answers: Answers | None = None,
) -> RunMemory:
    """What one run takes, by a dry run of its first steps.

    Args:
        pipe: from `skeletons`, with what makes calls smaller already on it.
        arguments: of the pipeline's call.
        listener: what is known of the device and of what is on the pipeline; None for a CPU and nothing.
        answers: of runs that were heard before, for pipelines of the same configuration.

    Raises:
        CaptureError: a component reads values of its inputs, or the pipeline's own code fails.
    """
    listener = listener or MemoryListener()
    try:
        dry_run(pipe, arguments, [listener], answers)
    except ComponentFailed as failed:
        raise describe_failure(failed.error, failed.callee.owner) from failed.error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise CaptureError(
            f"{type(pipe).__name__} cannot be run without values: {take_first_line(error)}.",
            expected="Its components and their configurations fit each other.",
            remedy="Download or save the model again.",
        ) from error
    return listener.conclude(pipe)


class MemoryListener(Listener):
    """Counts what a dry run takes."""

    ends_at_decoder = False
    most_steps = MOST_STEPS

    def __init__(
        self,
        *,
        fused: bool = True,
        on_cpu: bool = True,
        sign: Callable[[ComponentCall], str] = lambda call: "",
    ) -> None:
        """
        Args:
            fused: whether attention runs in a kernel that keeps no score matrix.
            on_cpu: whether the run is to be on the CPU.
            sign: what was put on a component that changes this call.
        """
        self._fused, self._on_cpu, self._sign = fused, on_cpu, sign
        self._tracker = StorageTracker(on_cpu=on_cpu)
        self._calls: list[CallMemory] = []
        self._between = self._start = self._steps = 0
        self._clock: _Clock | None = None

    def conclude(self, pipe: Any) -> RunMemory:
        """What the run that is over took, on a skeleton or the pipeline itself."""
        parts = find_components(pipe)
        strays = {name: _merge_strays(self._calls, name) for name in parts}
        return RunMemory(
            calls=tuple(self._calls),
            weights={name: weigh(part) for name, part in parts.items()},
            totals={name: _sum_up(part) for name, part in parts.items()},
            strays=strays,
            blocks={name: find_blocks(part, LISTS) for name, part in parts.items()},
            between_bytes=self._tracker.peak_bytes,
            steps=self._steps,
            packings={
                storage: {n: weigh_packing(part, strays[n], storage) for n, part in parts.items()}
                for storage in ("fp8", "int8")
            },
        )

    def around(self, arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[object]:
        """Everything that the pipeline's own code makes is counted."""
        self._steps = arguments["num_inference_steps"]
        return self._tracker

    def sign(self, call: ComponentCall) -> str:
        """What the device and what is on the pipeline change of a call."""
        return f"{self._fused}|{self._on_cpu}|{self._sign(call)}"

    def begin(self, call: ComponentCall) -> None:
        """Stop counting what the pipeline's own code makes."""
        self._tracker.__exit__(None, None, None)
        self._between, self._start = self._tracker.restart(), self._tracker.live_bytes

    @contextlib.contextmanager
    def inside(self, call: ComponentCall, paths: ModulePaths) -> Iterator[None]:
        """Count what a component's code makes, from its own start.

        The tracker stands above the fake tensors: beneath, it would see what makes them up.
        """
        callee, tracker = call.callee, self._tracker
        tracker.ignore(name_parameters(callee.owner).values())
        tracker.ignore(call.fakes.values())  # real tensors stand for their memory
        start, flops = tracker.live_bytes, tracker.flops
        self._clock = clock = _Clock(tracker, callee.owner, start, paths)
        with _attention(self._fused), Patches() as patches:
            patches.set_attribute(tracker, "on_operation", clock.look)
            patches.set_attribute(tracker, "kind", FakeTensor)
            with tracker:
                yield
        clock.close()
        call.kept["memory"] = CallMemory(
            callee.name,
            callee.stage,
            tuple(clock.segments),
            tracker.flops - flops,
            clock.entries,
            strays=clock.strays,
        )

    def enter(self, path: str) -> None:
        """A segment ends."""
        assert self._clock is not None
        self._clock.enter(path)

    def leave(self, path: str) -> None:
        """A segment ends."""
        assert self._clock is not None
        self._clock.leave(path)

    def end(self, call: ComponentCall) -> None:
        """Go on with the pipeline's own code, which gets zeros."""
        if call.output is not None:
            shapes = tuple(tuple(tensor.shape) for tensor in iterate_tensors(call.output))
            self._calls.append(_shift(call.kept["memory"], self._start, shapes))
        # the call's own peak stands in what was noted of it
        self._tracker.peak_bytes = max(self._between, self._tracker.live_bytes)
        self._tracker.__enter__()
        self._tracker.count(iterate_tensors(call.output))


class _Clock:
    """Closes a segment whenever a module is entered or left; sees weights that others use."""

    def __init__(
        self, tracker: StorageTracker, module: torch.nn.Module, start: int, paths: ModulePaths
    ) -> None:
        self.segments: list[Segment] = []
        self.entries: dict[str, int] = {}
        self.strays: dict[str, frozenset[str]] = {}
        self._tracker, self._start, self._paths = tracker, start, paths
        self._homes: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._homes.setdefault(id(parameter), []).append(name.rpartition(".")[0])

    def close(self, path: str = "") -> None:
        """End the segment in which this module was the innermost."""
        segment = Segment(path, self._tracker.restart() - self._start)
        if self.segments and self.segments[-1].path == segment.path:
            before = self.segments.pop()
            segment = max(segment, before, key=lambda one: one.peak_bytes)
        self.segments.append(segment)

    def look(self, args: Any) -> None:
        """Note weights whose module does not run: somebody else reads them."""
        for value in args:
            homes = self._homes.get(id(value))
            if homes is not None and not any(home in self._paths.stack for home in homes):
                for home in homes:
                    users = self.strays.get(home, frozenset())
                    self.strays[home] = users | {self._paths.current}

    def enter(self, path: str) -> None:
        self.close(self._paths.stack[-2])
        self.entries[path] = self.entries.get(path, 0) + 1

    def leave(self, path: str) -> None:
        self.close(path)


def _merge_strays(calls: Sequence[CallMemory], component: str) -> dict[str, frozenset[str]]:
    """Path of a module → modules that used its weights while it did not run, over all calls."""
    merged: dict[str, frozenset[str]] = {}
    for call in calls:
        if name_component(call.component) == component:
            for home, users in call.strays.items():
                merged[home] = merged.get(home, frozenset()) | users
    return merged


def weigh(module: torch.nn.Module) -> dict[str, int]:
    """Module path → bytes of the parameters directly in it."""
    weights: dict[str, int] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        weights[path] = weights.get(path, 0) + tensor.nbytes
    return weights


def _sum_up(module: torch.nn.Module) -> tuple[int, int]:
    return sum(x.nbytes for x in module.parameters()), sum(x.nbytes for x in module.buffers())


def is_within(path: str, unit: str) -> bool:
    """Whether a module is another one or inside of it."""
    return not unit or path == unit or path.startswith(unit + ".")


def _shift(call: CallMemory, start: int, shapes: tuple[tuple[int, ...], ...]) -> CallMemory:
    moved = tuple(Segment(one.path, one.peak_bytes + start) for one in call.segments)
    return dataclasses.replace(call, segments=moved, shapes=shapes)


@contextlib.contextmanager
def _attention(fused: bool) -> Iterator[None]:
    """Without a fused kernel, attention is three operations, and its scores are a tensor."""
    if fused:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield

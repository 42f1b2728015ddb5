"""A whole run of a pipeline without its weights: what each call of each component takes.

A skeleton of the pipeline runs for real, with its tokenizer, its scheduler and its own
loop; at each component call the arguments become fake tensors, the component's code runs on
them, and zeros of the right shape come back. Meanwhile every storage is counted. A call that was
seen before (same shapes, dtypes and plain arguments) is not run again. So sizes, lifetimes, tiling,
slicing and chunking are those of the real code, not of a formula.

**Catches** what the pipeline does between the calls, in Python, too.
**Does not catch** what `tracking` does not; a component whose code reads values of its inputs: it
raises `CaptureError` and names the line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from stopdown.call_names import name_component
from stopdown.errors import CaptureError, take_first_line
from stopdown.graph.capture import describe_failure, find_mode, name_parameters
from stopdown.memory.allocation_tracker import StorageTracker
from stopdown.memory.eight_bits import Packing, weigh_packing
from stopdown.numerics import iterate_tensors
from stopdown.patches import Patches
from stopdown.pipelines.call_interception import (
    Call,
    Rank,
    intercept,
    map_tensors,
    sign_arguments,
)
from stopdown.pipelines.components import Callee, find_blocks, find_callees, find_components

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
class DryCall:
    """One call of a component.

    Attributes:
        component: `text_encoder`, `vae.decode`.
        stage: `encode`, `denoise` or `decode`.
        segments: in order.
        flops: of its matrix products, convolutions and attention.
        entries: module path → how often it was entered.
        shapes: of the tensors that came back.
    """

    component: str
    stage: str
    segments: tuple[Segment, ...]
    flops: int
    entries: dict[str, int] = field(default_factory=dict, repr=False)
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive during the call, weights aside."""
        return max(segment.peak_bytes for segment in self.segments)


@dataclass(frozen=True)
class DryRun:
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

    calls: tuple[DryCall, ...]
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


@dataclass
class Seen:
    """Calls that were run dry, for pipelines of the same configuration: those of a component that
    has the same formats in another one answer at once.

    Attributes:
        calls: by variant, component, formats of its parameters, and arguments.
        strays: as in `DryRun`.
    """

    calls: dict[str, tuple[DryCall, Any]] = field(default_factory=dict)
    strays: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)


@dataclass
class DryRunner:
    """Dry runs of one pipeline without weights; calls that it has seen answer at once.

    Attributes:
        pipe: from `skeletons`.
        fused: whether attention runs in a kernel that keeps no score matrix.
        on_cpu: whether the run is to be on the CPU.
        seen: calls that were run dry.
    """

    pipe: Any
    fused: bool = True
    on_cpu: bool = True
    seen: Seen = field(default_factory=Seen)

    def dry_run(self, arguments: dict[str, Any], variant: str = "") -> DryRun:
        """Run the pipeline once.

        Args:
            arguments: of the pipeline's call; steps are cut to `MOST_STEPS`, a generator is left alone.
            variant: tells apart what was put on the components (tiling…), for what was seen.

        Raises:
            CaptureError: a component reads values of its inputs, or the pipeline's own code fails.
        """
        tracker = StorageTracker(on_cpu=self.on_cpu)
        calls: list[DryCall] = []
        arguments = _prepare(arguments)
        with Patches() as patches, torch.no_grad(), tracker:
            for callee in find_callees(self.pipe):
                layer = functools.partial(self._stand, callee, tracker, calls, variant)
                intercept(callee, layer, patches, Rank.RECORD)
            _call(self.pipe, arguments)
        parts = find_components(self.pipe)
        strays = {name: dict(self.seen.strays.get(name, {})) for name in parts}
        return DryRun(
            calls=tuple(calls),
            weights={name: weigh(part) for name, part in parts.items()},
            totals={name: _sum_up(part) for name, part in parts.items()},
            strays=strays,
            blocks={name: find_blocks(part, LISTS) for name, part in parts.items()},
            between_bytes=tracker.peak_bytes,
            steps=arguments["num_inference_steps"],
            packings={
                storage: {n: weigh_packing(part, strays[n], storage) for n, part in parts.items()}
                for storage in ("fp8", "int8")
            },
        )

    def _stand(
        self,
        callee: Callee,
        tracker: StorageTracker,
        calls: list[DryCall],
        variant: str,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Answer a call of a component with zeros, and note what it would have taken."""
        between, start = tracker.restart(), tracker.live_bytes
        own = f"{self.fused}|{self.on_cpu}|{variant}|{callee.name}|{_sign_formats(callee.owner)}"
        signature = f"{own}|{sign_arguments(args, kwargs)}"
        if signature not in self.seen.calls:
            self.seen.calls[signature] = self._run(callee, tracker, call, args, kwargs)
        seen, output = self.seen.calls[signature]
        calls.append(_shift(seen, start))
        tracker.peak_bytes = max(
            between, tracker.live_bytes
        )  # the call's own peak stands in `seen`
        return map_tensors(output, _make_zeros)

    def _run(
        self,
        callee: Callee,
        tracker: StorageTracker,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[DryCall, Any]:
        """One call on fake tensors; its segments are counted from its own start."""
        mode = find_mode(callee.owner)
        tracker.ignore(name_parameters(callee.owner).values())
        args, kwargs = map_tensors((args, kwargs), functools.partial(_make_fake, mode, tracker))
        start, flops = tracker.live_bytes, tracker.flops
        strays = self.seen.strays.setdefault(callee.component_name, {})
        clock = _Clock(tracker, start, strays)
        with Patches() as patches, _attention(self.fused):
            clock.put_on(callee.owner, patches)
            try:
                with _on_top(tracker, mode):
                    output = call(*args, **kwargs)
            except Exception as error:
                raise describe_failure(error, callee.owner) from error
        clock.close()
        shapes = map_tensors(output, lambda x: torch.empty_like(x, device="meta"))
        del output
        segments = tuple(clock.segments)
        spent = tracker.flops - flops
        returned = tuple(tuple(tensor.shape) for tensor in iterate_tensors(shapes))
        call_seen = DryCall(callee.name, callee.stage, segments, spent, clock.entries, returned)
        return call_seen, shapes


class _Clock:
    """Closes a segment whenever a module is entered or left; sees weights that others use."""

    def __init__(
        self, tracker: StorageTracker, start: int, strays: dict[str, frozenset[str]]
    ) -> None:
        self.segments: list[Segment] = []
        self.entries: dict[str, int] = {}
        self._tracker, self._start, self._stack = tracker, start, [""]
        self._strays, self._homes = strays, dict[int, list[str]]()

    def put_on(self, module: torch.nn.Module, patches: Patches) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._homes.setdefault(id(parameter), []).append(name.rpartition(".")[0])
        patches.set_attribute(self._tracker, "on_operation", self._look)
        for path, part in module.named_modules():
            if path:
                before, after = functools.partial(self._enter, path), self._leave
                patches.defer(part.register_forward_pre_hook(before).remove)
                patches.defer(part.register_forward_hook(after).remove)

    def close(self) -> None:
        segment = Segment(self._stack[-1], self._tracker.restart() - self._start)
        if self.segments and self.segments[-1].path == segment.path:
            before = self.segments.pop()
            segment = max(segment, before, key=lambda one: one.peak_bytes)
        self.segments.append(segment)

    def _look(self, args: Any) -> None:
        """Note weights whose module does not run: somebody else reads them."""
        for value in args:
            homes = self._homes.get(id(value))
            if homes is not None and not any(home in self._stack for home in homes):
                for home in homes:
                    users = self._strays.get(home, frozenset())
                    self._strays[home] = users | {self._stack[-1]}

    def _enter(self, path: str, module: Any, args: Any) -> None:
        self.close()
        self._stack.append(path)
        self.entries[path] = self.entries.get(path, 0) + 1

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        self.close()
        self._stack.pop()


def _sign_formats(module: torch.nn.Module) -> int:
    return hash(tuple(str(x.dtype) for x in module.parameters()))


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


def _shift(call: DryCall, start: int) -> DryCall:
    moved = tuple(Segment(one.path, one.peak_bytes + start) for one in call.segments)
    return dataclasses.replace(call, segments=moved)


def _call(pipe: Any, arguments: dict[str, Any]) -> None:
    """Run a pipeline whose code may fail on what its configurations say."""
    try:
        pipe(**arguments)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise CaptureError(
            f"{type(pipe).__name__} cannot be run without values: {take_first_line(error)}.",
            expected="Its components and their configurations fit each other.",
            remedy="Download or save the model again.",
        ) from error


def _prepare(arguments: dict[str, Any]) -> dict[str, Any]:
    """Fewer steps, and a generator of its own, so that the run's own stays where it is."""
    name = "num_inference_steps"
    prepared = {**arguments, name: min(MOST_STEPS, arguments.get(name) or MOST_STEPS)}
    if isinstance(prepared.get("generator"), torch.Generator):
        prepared["generator"] = torch.Generator().manual_seed(0)
    return prepared


@contextlib.contextmanager
def _on_top(tracker: StorageTracker, mode: FakeTensorMode) -> Iterator[None]:
    """Fake tensors with the tracker above them: beneath, it would see what makes them up."""
    tracker.__exit__(None, None, None)
    try:
        with mode, tracker:
            yield
    finally:
        tracker.__enter__()


@contextlib.contextmanager
def _attention(fused: bool) -> Iterator[None]:
    """Without a fused kernel, attention is three operations, and its scores are a tensor."""
    if fused:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _make_fake(mode: FakeTensorMode, tracker: StorageTracker, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor like a real one, whose memory the real one stands for."""
    fake = mode.from_tensor(tensor.detach())
    tracker.ignore([fake])
    return fake


def _make_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)

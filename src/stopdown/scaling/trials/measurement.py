"""Capture a module's example calls as graphs in fp16, and measure the magnitudes of their activations
in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from stopdown.errors import CaptureError
from stopdown.module_calls.call import PlainCall
from stopdown.scaling.exponents.problem import MeasuredCall, find_kept_clamps, split_values
from stopdown.scaling.graph.capture import (
    Answers,
    Capture,
    capture_call,
    find_call_operands,
    note_answers,
    owner_of,
)
from stopdown.scaling.graph.nodes import is_range_clamp
from stopdown.scaling.graph.range_measurement import merge_ranges, run_capture
from stopdown.scaling.trials.residual import with_stream
from stopdown.scaling_records import Operands, ResidualStream

FEW_FRAMES = 5
"""Frames after which a video decoder that works frame by frame has run all of its modules."""


class Captures:
    """Cache of calls' graphs in fp16: for each call the plain one, and the last with an fp32 residual
    stream.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, bool], tuple[PlainCall, ResidualStream | None, Capture]] = {}
        self._short: dict[int, PlainCall] = {}
        self._clamping: dict[int, tuple[PlainCall, bool]] = {}

    def take(self, call: PlainCall, stream: ResidualStream | None = None) -> Capture:
        """Return the graph of a call in fp16, from the cache if possible, with or without an fp32
        residual stream.

        Args:
            stream: casts that keep the residual stream in fp32; None for none.

        Cost: a capture (seconds), the first time.
        """
        made = self._take(call, stream)
        if self.keeps_clamps(call, made) and not made.keeps_clamps:
            made = replace(made, keeps_clamps=True)
            self._made[id(call), stream is None] = call, stream, made
        return made

    def _take(self, call: PlainCall, stream: ResidualStream | None) -> Capture:
        key = id(call), stream is None
        if key not in self._made or self._made[key][1] != stream:
            made = self._capture(call, stream)
            self._made[key] = call, stream, made  # while the call is held nothing else has its id
        return self._made[key][2]

    def take_short(self, call: PlainCall) -> Capture:
        """Return the graph of a call, cut to a few frames and tiles if it decodes a video, as tracing
        takes long.

        It contains every module of the whole call, with the same dtypes; sizes and the number of
        operations differ.

        Cost: a capture (seconds), the first time.
        """
        return self._take(self._short.setdefault(id(call), cut_sizes(call)), None)

    def _capture(self, call: PlainCall, stream: ResidualStream | None) -> Capture:
        if stream is None:
            return capture_call(*call, dtype=torch.float16)
        plain = self._made.get((id(self._short.get(id(call), call)), True))
        return _capture_streamed(call, stream, plain and plain[2].operands)

    def keeps_clamps(self, call: PlainCall, made: Capture) -> bool:
        """Return whether a call clamps at fp16's maximum in fp32 too, so that the clamps are part of
        the model.

        Args:
            made: the call's graph in fp16.

        Cost: a capture, the first time, if the call has such a clamp.
        """
        if not any(map(is_range_clamp, made.graph.graph.nodes)):
            return False
        if id(call) not in self._clamping:
            self._clamping[id(call)] = call, _clamps_anyway(call)
        return self._clamping[id(call)][1]


def cut_sizes(call: PlainCall) -> PlainCall:
    """Return a call of a video decoder's `decode` with fewer frames and tiles, to save time; others
    unchanged.

    Its code takes the same path: through all modules, and over the seams between tiles.
    """
    function, args, kwargs = call
    is_decode = getattr(function, "__name__", "") == "decode" and len(args) == 1
    if not is_decode or set(kwargs or {}) - {"return_dict"}:  # `num_frames` wouldn't match
        return call
    (given,) = args
    if not isinstance(given, torch.Tensor) or given.dim() not in (4, 5):
        return call
    cut, module = given, getattr(function, "__self__", None)
    if given.dim() == 5 and given.shape[2] > FEW_FRAMES:
        cut = cut[:, :, :FEW_FRAMES]
    if getattr(module, "use_tiling", False):
        for axis, name in ((-2, "height"), (-1, "width")):
            tile = _find_tile(module, name)
            if tile is not None and cut.shape[axis] > tile + 1:
                cut = cut.narrow(axis, 0, tile + 1)
    return call if cut is given else (function, (cut,), kwargs)


def _find_tile(module: Any, name: str) -> int | None:
    """Return the height or width of latents beyond which a decoder works in tiles; None if unknown.

    Args:
        name: `"height"` or `"width"`.
    """
    for attribute in (f"tile_latent_min_{name}", "tile_latent_min_size"):
        if isinstance(found := getattr(module, attribute, None), int):
            return found
    sample = getattr(module, f"tile_sample_min_{name}", None)
    ratio = getattr(module, "spatial_compression_ratio", None)
    return sample // ratio if isinstance(sample, int) and isinstance(ratio, int) else None


def measure_kinds(
    module: torch.nn.Module,
    kinds: Sequence[Sequence[PlainCall]],
    captures: Captures,
    stream: ResidualStream | None,
) -> list[MeasuredCall]:
    """Capture and measure example calls, for which scale exponents are to be found.

    A kind of calls has one graph with the merged ranges of its calls; several if its path depends on
    values.

    Args:
        kinds: calls in groups; those in one group run the same graph.
        stream: casts that keep the residual stream in fp32; None for none.

    Cost: a capture for each kind (seconds), and a forward in fp32 for each call.
    """
    measured: list[MeasuredCall] = []
    for kind in kinds:
        found: list[MeasuredCall] = []
        for call in kind:
            add_call(found, module, call, captures, stream)
        _, args, kwargs = kind[0]
        measured += [replace(x, args=args, kwargs=kwargs or {}) for x in found]
    return measured


def add_call(
    found: list[MeasuredCall],
    module: torch.nn.Module,
    one: PlainCall,
    captures: Captures,
    stream: ResidualStream | None = None,
) -> None:
    """Measure one more call, and merge it into the list `found` of calls of the same kind.

    Its ranges are merged with those of a call that took the same path, or it becomes an entry of its
    own.

    Cost: a forward in fp32, and a capture (seconds) for a new path.
    """
    call, args, kwargs = one
    answers = note_answers(call, args, kwargs) if found and found[0].capture.answers else ()
    same = (i for i, known in enumerate(found) if known.capture.answers == answers)
    if (known := next(same, None)) is not None:
        found[known] = measure_again(found[known], module, args, kwargs)
    else:
        capture = captures.take(one, stream)
        blocks, clamps = split_values(capture), find_kept_clamps(capture)
        ranges, _ = run_capture(capture, owner_of(call), args, kwargs, blocks, clamps)
        found.append(MeasuredCall(capture, blocks, ranges))


def _capture_streamed(
    call: PlainCall, stream: ResidualStream, operands: Operands | None
) -> Capture:
    """Capture a call while casts keep the module's residual stream in fp32.

    Args:
        operands: casts that the call needs without the stream, as its code mixes dtypes; None finds
            them.
    """
    function, args, kwargs = call
    if operands is None:  # plain operands: a stream's own mixes are refused
        operands = find_call_operands(function, args, kwargs, torch.float16)
    answers: Answers = ()
    try:
        return capture_answered(call, stream, answers, operands)
    except CaptureError:  # the stream's hooks prevent reading values
        with contextlib.suppress(Exception):  # if the call fails, refuse the stream
            answers = note_answers(function, args, kwargs or {})
        if not answers:
            raise
    return capture_answered(call, stream, answers, operands)


def capture_answered(
    call: PlainCall,
    stream: ResidualStream | None,
    answers: Answers,
    operands: Operands | None = None,
) -> Capture:
    """Capture a call whose code reads tensor values as Python numbers (`.item()`), given the values
    that it reads.

    Args:
        operands: casts that the call needs, as its code mixes dtypes; None finds them.
    """
    with with_stream(owner_of(call[0]), stream, torch.float16) as wide:
        return capture_call(
            *call, dtype=torch.float16, wide=wide, answers=answers, operands=operands
        )


def _clamps_anyway(one: PlainCall) -> bool:
    """Return whether a call clamps at fp16's maximum in fp32 too, so that the clamp is part of the
    model.
    """
    try:
        wide = capture_call(*one, dtype=torch.float32)
    except CaptureError:
        return False
    return any(map(is_range_clamp, wide.graph.graph.nodes))


def list_read(capture: Capture) -> list[str]:
    """List the names of the parameters and buffers that a captured call reads."""
    named = capture.parameters
    return [named[x.name] for x in capture.graph.graph.nodes if x.name in named and x.users]


def measure_again(
    known: MeasuredCall, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> MeasuredCall:
    """Measure another call that runs a known graph, and return the known call with the ranges merged.

    Cost: one forward in fp32.
    """
    clamps = find_kept_clamps(known.capture)
    ranges, _ = run_capture(known.capture, module, args, kwargs, known.blocks, clamps, known.ranges)
    return replace(known, ranges=merge_ranges(known.ranges, ranges))

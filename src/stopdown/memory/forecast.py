"""Predict the memory and time of a pipeline under every memory strategy, and choose the fastest below a
limit.

If the device's speed is known, each strategy's time is estimated: its FLOPs at the rate of a large matrix
product, plus its weight transfers at the bandwidth between host and device. Otherwise strategies are
ordered by what they usually cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stopdown.component_calls.components import find_components, is_autoencoder
from stopdown.interception.patches import Patches
from stopdown.memory.reserved import count_reserved
from stopdown.memory.run_memory import MemoryListener, RunMemory, listen_to_run
from stopdown.memory.smaller_calls import decodes_in_chunks, put_variant
from stopdown.memory.speed import Speed
from stopdown.memory.strategies import (
    Prediction,
    Strategy,
    Variant,
    list_strategies,
    predict,
)
from stopdown.pipelines.dry_run import Answers
from stopdown.records import MemoryRow, Plan

USABLE_SHARE = 0.95
"""Share of a limit that a prediction may fill: allocators round up, and kernels need workspaces."""

SEAMS_WEIGHT = 1.05
"""A run without seams is preferred if it takes at most so many times as long, the error of an estimate."""


@dataclass(frozen=True)
class Fit:
    """The predictions of all memory strategies for one run.

    Attributes:
        predictions: one for each strategy, the fastest first.
        strays: component → module path → modules that read its weights while it doesn't run.
        sides: height and width of the decoded output in pixels; None if the run decodes nothing.
        plan: the precision plan of the run, if several plans are compared.
        speed: of the device in that plan's precisions; None if unknown.
    """

    predictions: tuple[Prediction, ...]
    strays: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    sides: tuple[int, int] | None = None
    plan: Plan = field(default_factory=lambda: Plan(""))
    speed: Speed | None = None


class Room(NamedTuple):
    """The memory of a device.

    Attributes:
        limit_bytes: if an unmodified run stays within it, no other strategy is predicted.
        workspace_bytes: of cuBLAS, from `find_workspace`; None if the device's allocator reserves nothing.
    """

    limit_bytes: int = 0
    workspace_bytes: int | None = None


NO_LIMIT = Room()


def predict_all(
    pipe: Any,
    arguments: dict[str, Any],
    *,
    steps: int,
    fused: bool = True,
    on_cpu: bool = True,
    answers: Answers | None = None,
    progress: Callable[[int, int], None] | None = None,
    room: Room = NO_LIMIT,
) -> Fit:
    """Predict the memory of a run under every strategy, with one dry run for each variant of the calls.

    Variants are tiles, pieces of attention, and chunks of frames. A variant is left out if its outputs have
    other shapes, because its tiles don't fit the run's size.

    Args:
        fused: whether attention runs in a kernel that keeps no score matrix.
        on_cpu: whether to predict a run on the CPU, whose convolutions need workspaces.
        answers: cached results of dry runs of pipelines with this configuration; new ones are added.
        progress: called with the number of finished variants and of all.
    """
    coders = [module for module in find_components(pipe).values() if is_autoencoder(module)]
    strategies = list_strategies(
        has_tiling=any(hasattr(module, "use_tiling") for module in coders),
        has_chunks=decodes_in_chunks(pipe),
        fused=fused,
    )
    answers = {} if answers is None else answers
    found: dict[Variant, RunMemory] = {}
    variants = {strategy.variant: strategy for strategy in strategies}

    reserved: dict[tuple[str, tuple[int, ...]], int] = {}

    def foresee(one: Strategy) -> Prediction:
        run = found[one.variant]
        made = predict(run, one, steps=steps)
        if room.workspace_bytes is None:
            return made
        key = one.placement, tuple(id(call.events) for call in run.calls)
        if key not in reserved:  # tiles leave the calls of the others as they are
            reserved[key] = count_reserved(run, one, workspace_bytes=room.workspace_bytes)
        return dataclasses.replace(made, reserved_bytes=reserved[key])

    for number, (variant, strategy) in enumerate(variants.items()):
        if progress is not None:
            progress(number, len(variants))
        with Patches() as patches:
            put_variant(pipe, strategy, patches)
            listener = MemoryListener(fused=fused, on_cpu=on_cpu, sign=strategy.sign)
            found[variant] = listen_to_run(pipe, arguments, listener, answers)
        plain = found[Strategy().variant]  # the first
        if number == 0 and _fits(foresee(Strategy()), room.limit_bytes):
            break
    fitting = [
        s
        for s in strategies
        if s.variant in found and _list_shapes(found[s.variant]) == _list_shapes(plain)
    ]
    predictions = tuple(map(foresee, fitting))
    return Fit(predictions, plain.strays, _find_sides(plain))


def predict_resident(
    pipe: Any, arguments: Mapping[str, Any], *, on_cpu: bool, answers: Answers | None = None
) -> Fit:
    """Predict the memory of a run with all weights on the device, from a dry run of one denoising step."""
    given = {**arguments, "num_inference_steps": 1}
    run = listen_to_run(pipe, given, MemoryListener(on_cpu=on_cpu), answers)
    return Fit((predict(run, Strategy(), steps=1),), sides=_find_sides(run))


def _find_sides(run: RunMemory) -> tuple[int, int] | None:
    """Return the last two dimensions (height and width) of the last decoder output; None without one."""
    shapes = [x for call in run.calls if call.stage == "decode" for x in call.shapes]
    pictures = [shape for shape in shapes if len(shape) >= 4]
    return (pictures[-1][-2], pictures[-1][-1]) if pictures else None


def sort_by_time(fit: Fit, speed: Speed | None) -> Fit:
    """Sort predictions by their estimated time, the shortest first; unchanged if `speed` is None.

    Tiles and chunks leave seams in the picture, so they come first only if they save more than
    `SEAMS_WEIGHT`. An unmodified run always comes first.
    """
    if speed is None:
        return fit
    timed = [dataclasses.replace(one, seconds=estimate_time(one, speed)) for one in fit.predictions]

    def rate(one: Prediction) -> tuple[bool, float]:
        weight = SEAMS_WEIGHT if one.strategy.has_seams else 1.0
        return one.strategy != Strategy(), round(weight * (one.seconds or 0.0), 9)

    return dataclasses.replace(fit, predictions=tuple(sorted(timed, key=rate)), speed=speed)


def count_disk(fit: Fit, host_limit: int) -> Fit:
    """Estimate times again with weights read from disk, if host memory can't hold the offloaded weights."""
    stored = max(one.stored_bytes for one in fit.predictions)
    if fit.speed is None or stored <= host_limit:
        return fit
    return sort_by_time(fit, fit.speed.read_from_disk())


def choose_prediction(fit: Fit, limit_bytes: int) -> Prediction | None:
    """Return the fastest prediction that fits within the limit, or None if none does."""
    return next((one for one in fit.predictions if _fits(one, limit_bytes)), None)


def _fits(prediction: Prediction, limit_bytes: int) -> bool:
    return prediction.needed_bytes <= limit_bytes * USABLE_SHARE


def keep_tiling(fit: Fit, tiling: bool) -> Fit:
    """Return only the predictions with tiled decoding, or only those without, as a user asked.

    Tiling is the only native setting that changes the picture.
    """
    kept = tuple(one for one in fit.predictions if one.strategy.tiling == tiling)
    return dataclasses.replace(fit, predictions=kept)


def choose_tiling(fits: Iterable[Fit], limit_bytes: int) -> bool | None:
    """Return whether compared runs must all decode in tiles, because one of them fits only with tiles.

    Return None if no run fits.
    """
    fitting = [fit for fit in fits if choose_prediction(fit, limit_bytes) is not None]
    if not fitting:
        return None
    return any(choose_prediction(keep_tiling(fit, False), limit_bytes) is None for fit in fitting)


def find_smallest(fit: Fit) -> Prediction:
    return min(fit.predictions, key=lambda one: one.needed_bytes)


def make_rows(fit: Fit, unit_s: float) -> tuple[MemoryRow, ...]:
    """Make the rows of a table of all strategies, with times as ratios to `unit_s` seconds."""
    return tuple(
        MemoryRow(
            one.strategy.name,
            one.peak_bytes,
            one.component,
            one.moved_bytes,
            one.stored_bytes,
            round(estimate_time(one, fit.speed) / unit_s, 3) if fit.speed is not None else None,
            reserved_bytes=one.reserved_bytes,
        )
        for one in fit.predictions
    )


def estimate_time(prediction: Prediction, speed: Speed | None) -> float:
    """Estimate the run time in seconds; return 1.0 if the device's speed is unknown."""
    if speed is None:
        return 1.0
    return prediction.flops / speed.flops_per_s + prediction.moved_bytes / speed.link_bytes_per_s


def _list_shapes(run: RunMemory) -> list[tuple[tuple[int, ...], ...]]:
    """List the output shapes of each call; consecutive decoded chunks of a video count as one call."""
    found: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
    for call in run.calls:
        shapes = call.shapes
        is_next = found and call.stage == "decode" and found[-1][0] == call.component
        if is_next and len(found[-1][1]) == len(shapes):
            before = found.pop()[1]
            shapes = tuple(
                (one[0] + other[0], *other[1:]) if one[1:] == other[1:] else other
                for one, other in zip(before, shapes, strict=True)
            )
        found.append((call.component, shapes))
    return [shapes for _, shapes in found]

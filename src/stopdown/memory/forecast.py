"""Every strategy of a pipeline predicted, and the cheapest that stays below a limit.

Where the speed of the device is known, the time of each is estimated: operations at the rate of a
large matrix product, and weights over the link between host and device. Otherwise they stand in the
order of what they usually cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stopdown.memory.run_memory import MemoryListener, RunMemory, listen_to_run
from stopdown.memory.smaller_calls import put_variant
from stopdown.memory.speed import Speed
from stopdown.memory.strategies import (
    PACKED_PLACEMENTS,
    Prediction,
    Storage,
    Strategy,
    Variant,
    list_strategies,
    predict,
)
from stopdown.patches import Patches
from stopdown.pipelines.components import find_components, is_autoencoder
from stopdown.pipelines.dry_run import Answers
from stopdown.pipelines.layerwise_casting import find_storable
from stopdown.records import MemoryRow

USABLE_SHARE = 0.95
"""Share of a limit that predictions may fill: allocators round, and kernels take a little."""

WORTH = 1.25
"""What changes the picture is taken when everything else that fits takes this much longer."""


@dataclass(frozen=True)
class Fit:
    """All predictions for one run.

    Attributes:
        predictions: those that cost the least time first.
        strays: as in `RunMemory`.
        sides: height and width of what was decoded; None where nothing was.
    """

    predictions: tuple[Prediction, ...]
    strays: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    sides: tuple[int, int] | None = None


def predict_all(
    pipe: Any,
    arguments: dict[str, Any],
    *,
    steps: int,
    fused: bool = True,
    on_cpu: bool = True,
    storages: Sequence[Storage] = ("fp8", "int8"),
    answers: Answers | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Fit:
    """A dry run of every variant, and predict every strategy.

    A variant whose result has other sizes is left out: tiles that do not fit this size.

    Args:
        pipe: from `skeletons`.
        arguments: of the pipeline's call.
        steps: denoising steps of the real run.
        fused: whether attention runs in a kernel that keeps no score matrix.
        on_cpu: whether the run is to be on the CPU, whose convolutions take memory for themselves.
        storages: formats of 8 bits that the device knows.
        answers: of dry runs of other pipelines of this configuration; what is new is added.

    Raises:
        CaptureError: a component reads values of its inputs.
    """
    modules = list(find_components(pipe).values())
    coders = [module for module in modules if is_autoencoder(module)]
    strategies = list_strategies(
        has_tiling=any(hasattr(module, "use_tiling") for module in coders),
        has_slicing=any(hasattr(module, "use_slicing") for module in coders),
        fused=fused,
        storages=storages if any(map(find_storable, modules)) else (),
    )
    answers = {} if answers is None else answers
    found: dict[Variant, RunMemory] = {}
    variants = {strategy.variant: strategy for strategy in strategies}
    for number, (variant, strategy) in enumerate(variants.items()):
        if progress is not None:
            progress(number, len(variants))
        with Patches() as patches:
            put_variant(pipe, strategy, patches)
            listener = MemoryListener(fused=fused, on_cpu=on_cpu, sign=strategy.sign)
            found[variant] = listen_to_run(pipe, arguments, listener, answers)
    plain = next(iter(found.values()))
    fitting = [s for s in strategies if _list_shapes(found[s.variant]) == _list_shapes(plain)]
    predictions = tuple(predict(found[s.variant], s, steps=steps) for s in fitting)
    return Fit(predictions, plain.strays, _find_sides(plain))


def predict_resident(
    pipe: Any, arguments: Mapping[str, Any], *, on_cpu: bool, answers: Answers | None = None
) -> Fit:
    """What one step takes with all weights on the device, and nothing else tried.

    Args:
        answers: as for `predict_all`.
    """
    given = {**arguments, "num_inference_steps": 1}
    run = listen_to_run(pipe, given, MemoryListener(on_cpu=on_cpu), answers)
    return Fit((predict(run, Strategy(), steps=1),), sides=_find_sides(run))


def _find_sides(run: RunMemory) -> tuple[int, int] | None:
    """Height and width of what the last decoder gave: the last two dimensions."""
    shapes = [x for call in run.calls if call.stage == "decode" for x in call.shapes]
    pictures = [shape for shape in shapes if len(shape) >= 4]
    return (pictures[-1][-2], pictures[-1][-1]) if pictures else None


def sort_by_time(fit: Fit, speed: Speed | None) -> Fit:
    """The same predictions, those first that are estimated to take the least time.

    Where it is not known how fast weights are widened from 8 bits, that is left out.
    """
    if speed is None:
        return fit
    timed = [dataclasses.replace(one, seconds=estimate_time(one, speed)) for one in fit.predictions]
    timed.sort(key=lambda one: round(one.seconds or 0.0, 9))
    return dataclasses.replace(fit, predictions=tuple(timed))


def list_storages(device: str) -> tuple[Storage, ...]:
    """Formats of 8 bits that weights can wait in on a device; Apple's GPUs have no fp8."""
    return ("int8",) if device.startswith("mps") else ("fp8", "int8")


def list_allowed(fit: Fit, allowed: Collection[str] = ()) -> tuple[Prediction, ...]:
    """The predictions that may be used, in their order.

    Args:
        allowed: formats of 8 bits that weights may wait in though the picture changes.
    """
    return tuple(
        one
        for one in fit.predictions
        if one.strategy.storage == "native" or one.strategy.storage in allowed
    )


def choose(
    fit: Fit, limit_bytes: int, allowed: Collection[str] = (), failed: Collection[str] = ()
) -> Prediction | None:
    """The prediction that costs the least time among those that fit; None when none does.

    One that changes the picture has to save time by `WORTH`.

    Args:
        allowed: as in `list_allowed`.
        failed: names of strategies that ran out of memory before: only smaller ones are taken.
    """
    usable = limit_bytes * USABLE_SHARE
    known = [one.peak_bytes - 1 for one in fit.predictions if one.strategy.name in failed]
    most = min([usable, *known])
    fitting = [one for one in list_allowed(fit, allowed) if one.peak_bytes <= most]
    return pick([(one, one.seconds or 0.0) for one in fitting])


def pick(timed: Sequence[tuple[Prediction, float]]) -> Prediction | None:
    """The first of what fits; of those that change the picture only one that saves time by `WORTH`.

    Where a component fits as it is, 8 bits save its first loading at most: then they are not taken.

    Args:
        timed: predictions with their seconds, those that take the least time first.
    """
    if not timed:
        return None
    first, least_s = timed[0]
    exact = [(one, taken_s) for one, taken_s in timed if one.strategy.storage == "native"]
    whole = [pair for pair in exact if pair[0].strategy.placement in PACKED_PLACEMENTS]
    if whole and first.strategy.storage != "native":
        return whole[0][0]
    found, found_s = exact[0] if exact else (first, least_s)
    return found if found_s <= WORTH * least_s else first


def keep_tiling(fit: Fit, tiling: bool) -> Fit:
    """The predictions that decode in tiles, or those that do not: of what is native, tiles alone show."""
    kept = tuple(one for one in fit.predictions if one.strategy.tiling == tiling)
    return dataclasses.replace(fit, predictions=kept)


def choose_tiling(fits: Iterable[Fit], limit_bytes: int) -> bool | None:
    """Whether runs that are compared decode in tiles, which all do if one has to; None where none fits."""
    fitting = [fit for fit in fits if choose(fit, limit_bytes) is not None]
    if not fitting:
        return None
    return any(choose(keep_tiling(fit, False), limit_bytes) is None for fit in fitting)


def find_smallest(fit: Fit, allowed: Collection[str] = ()) -> Prediction:
    """The prediction with the smallest peak."""
    return min(list_allowed(fit, allowed), key=lambda one: one.peak_bytes)


def make_rows(fit: Fit, speed: Speed | None, unit_s: float) -> tuple[MemoryRow, ...]:
    """The table of all strategies, with times as ratios to `unit_s`."""
    return tuple(
        MemoryRow(
            one.strategy.name,
            one.peak_bytes,
            one.component,
            one.moved_bytes,
            one.stored_bytes,
            round(estimate_time(one, speed) / unit_s, 3) if _is_timed(one, speed) else None,
            CHANGES.get(one.strategy.storage, ""),
        )
        for one in fit.predictions
    )


CHANGES = {"fp8": "weights rounded to fp8", "int8": "weights rounded to int8"}
"""What a storage of weights changes in the picture."""


def _is_timed(prediction: Prediction, speed: Speed | None) -> bool:
    """Whether all that a prediction does has a known speed."""
    return speed is not None and (
        not prediction.widened_bytes or speed.widened_bytes_per_s is not None
    )


def estimate_time(prediction: Prediction, speed: Speed | None) -> float:
    """Seconds that a run takes; 1.0 where nothing is known of the device."""
    if speed is None:
        return 1.0
    widening = prediction.widened_bytes / (speed.widened_bytes_per_s or float("inf"))
    moving = prediction.moved_bytes / speed.link_bytes_per_s
    return prediction.flops / speed.flops_per_s + moving + widening


def _list_shapes(run: RunMemory) -> list[tuple[tuple[int, ...], ...]]:
    return [call.shapes for call in run.calls]

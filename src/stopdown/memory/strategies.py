"""Ways to stay below a limit, and the peak of each, from one rehearsal; nothing is put on anything.

A strategy says where the weights are while they are not used (`placement`), and what makes the calls
themselves smaller: the autoencoder's own slicing and tiling, and pieces of the feed-forward layers.
The peak of a placement follows from the rehearsal: at each moment the values that are alive, and the
weights of the modules that are running then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from stopdown.memory.rehearsing import Rehearsal, RehearsedCall, is_within

Placement = Literal["resident", "component", "block", "leaf"]
"""What is loaded at a time: everything, a component, a block of a component, a single layer."""

PLACEMENTS: tuple[Placement, ...] = ("resident", "component", "block", "leaf")


@dataclass(frozen=True)
class Strategy:
    """One way to run a pipeline.

    Attributes:
        placement: which weights are there at a time.
        slicing: the autoencoder works picture by picture.
        tiling: the autoencoder works tile by tile; the result differs a little at the seams.
        pieces: feed-forward layers of the denoiser work on this many pieces of the sequence.
        split: attention works on a few queries at a time, where no kernel does without all scores.
    """

    placement: Placement = "resident"
    slicing: bool = False
    tiling: bool = False
    pieces: int = 1
    split: bool = False

    @property
    def name(self) -> str:
        """`resident`, `component+tiling`; with tiling goes slicing, where there is both."""
        parts: list[str] = [self.placement]
        parts += ["tiling"] if self.tiling else ["slicing"] if self.slicing else []
        parts += [f"{self.pieces} pieces"] if self.pieces > 1 else []
        parts += ["split"] if self.split else []
        return "+".join(parts)

    @property
    def variant(self) -> str:
        """What of it changes the calls themselves."""
        return (
            f"slicing={self.slicing} tiling={self.tiling} pieces={self.pieces} split={self.split}"
        )


@dataclass(frozen=True)
class Prediction:
    """What a strategy takes.

    Attributes:
        strategy: which.
        peak_bytes: most bytes on the device at a time.
        component: whose call that is; "" between calls.
        moved_bytes: weights that are brought to the device in one run of `steps`.
        stored_bytes: weights that wait in host memory or on disk.
    """

    strategy: Strategy
    peak_bytes: int
    component: str
    moved_bytes: int
    stored_bytes: int


def list_strategies(
    *, has_tiling: bool, has_slicing: bool, fused: bool = True
) -> tuple[Strategy, ...]:
    """All that are tried, those that cost the least time first.

    Args:
        has_tiling, has_slicing: what the autoencoder offers.
        fused: whether attention runs in a kernel that keeps no score matrix.
    """
    smaller: list[tuple[bool, bool, int]] = [(False, False, 1)]
    smaller += [(True, False, 1)] if has_slicing else []
    smaller += [(has_slicing, True, 1)] if has_tiling else []
    smaller += [(has_slicing, has_tiling, 4)]
    return tuple(
        Strategy(placement, slicing, tiling, pieces, split)
        for placement in PLACEMENTS
        for split in ((False,) if fused else (False, True))
        for slicing, tiling, pieces in smaller
    )


def predict(rehearsal: Rehearsal, strategy: Strategy, *, steps: int) -> Prediction:
    """The peak of a strategy, and what it moves.

    Args:
        rehearsal: of a run with the strategy's `variant` put on.
        steps: denoising steps of the real run.
    """
    fixed = sum(buffers for _, buffers in rehearsal.totals.values())
    everything = sum(rehearsal.weigh(name) for name in rehearsal.weights)
    if strategy.placement == "resident":
        fixed += everything
    largest = max(map(rehearsal.weigh, rehearsal.weights), default=0)
    waiting = largest if strategy.placement == "component" else 0
    peaks = [(rehearsal.between_bytes + waiting, "")]
    peaks += [(_find_peak(rehearsal, call, strategy), call.component) for call in rehearsal.calls]
    peak, component = max(peaks)
    is_resident = strategy.placement == "resident"
    return Prediction(
        strategy,
        peak + fixed,
        component,
        everything if is_resident else _count_moved(rehearsal, strategy, steps),
        0 if is_resident else everything,
    )


def group_weights(
    weights: Iterable[str],
    blocks: Iterable[str],
    strays: Mapping[str, frozenset[str]],
    placement: Placement,
) -> dict[str, tuple[str, ...]]:
    """What is loaded as one: path of the module that it is loaded for → modules whose weights it is.

    Args:
        weights: paths of the modules with parameters directly in them.
        blocks: paths of the blocks.
        strays: as in `Rehearsal`; such weights are loaded for the whole call, under "".
    """
    if placement == "resident":
        return {}
    groups: dict[str, tuple[str, ...]] = {}
    for path in weights:
        unit = _choose_unit(path, blocks, placement)
        if not all(is_within(user, unit) for user in strays.get(path, ())):
            unit = ""
        groups[unit] = (*groups.get(unit, ()), path)
    return groups


def _choose_unit(path: str, blocks: Iterable[str], placement: Placement) -> str:
    if placement == "component":
        return ""
    if placement == "block":
        return next((block for block in blocks if is_within(path, block)), path)
    return path


def _find_peak(rehearsal: Rehearsal, call: RehearsedCall, strategy: Strategy) -> int:
    """Most bytes of values and loaded weights together during one call."""
    if strategy.placement == "resident":
        return call.peak_bytes
    sizes = _weigh_units(rehearsal, call.component, strategy.placement)
    loaded = {
        path: sum(size for unit, size in sizes.items() if is_within(path, unit))
        for path in {segment.path for segment in call.segments}
    }
    return max(segment.peak_bytes + loaded[segment.path] for segment in call.segments)


def _weigh_units(rehearsal: Rehearsal, component: str, placement: Placement) -> dict[str, int]:
    """Path of what is loaded as one → its bytes."""
    name = component.partition(".")[0]
    weights, blocks = rehearsal.weights[name], rehearsal.blocks[name]
    if placement == "component":
        return {"": rehearsal.weigh(name)}
    groups = group_weights(weights, blocks, rehearsal.strays[name], placement)
    return {unit: sum(weights[path] for path in paths) for unit, paths in groups.items()}


def _count_moved(rehearsal: Rehearsal, strategy: Strategy, steps: int) -> int:
    """Bytes brought to the device in a run: a component once while it is called in a row."""
    moved, current = 0, ""
    rehearsed = max(1, rehearsal.steps)
    for call in rehearsal.calls:
        name = call.component.partition(".")[0]
        if strategy.placement == "component":
            moved += rehearsal.weigh(name) if name != current else 0
            current = name
            continue
        repeats = steps / rehearsed if call.stage == "denoise" else 1
        for unit, size in _weigh_units(rehearsal, name, strategy.placement).items():
            entries = 1 if unit == "" else call.entries.get(unit, 0)
            moved += int(entries * size * repeats)
    return moved

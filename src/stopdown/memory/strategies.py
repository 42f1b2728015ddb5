"""Memory strategies, and the prediction of each one's peak from a dry run; applies nothing.

A strategy states where unused weights are (`placement`), and how the calls themselves are made smaller:
by the autoencoder's tiles, few frames at a time, or layers and attention in pieces. The peak of a
placement follows from the dry run: at each moment, the live activations and the weights of the running
modules are on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from stopdown.component_call_names import is_inside, name_component
from stopdown.component_calls.components import is_autoencoder
from stopdown.memory.run_memory import OUTSIDE, CallMemory, RunMemory, find_unit, list_around
from stopdown.scaling import ComponentCall

Placement = Literal["resident", "component", "block"]
"""Weights on the device at a time: all, one component's, or one block's."""

PLACEMENTS: tuple[Placement, ...] = ("resident", "component", "block")

Variant = tuple[bool, int, bool, int]
"""The settings that change the calls themselves: tiling, pieces, split, frames."""

FRAMES = (4, 1)
"""Frames of a video that are decoded at a time, if a pipeline decodes in chunks."""

PIECES = 4
"""Pieces of the sequence in feed-forward layers. SVD-XT at its default size fits into 8 GiB only with
them: 6.7 GiB are reserved, and 10.6 GiB without."""


@dataclass(frozen=True)
class Strategy:
    """A way to run a pipeline in less memory.

    Attributes:
        placement: which weights are on the device at a time.
        tiling: run the autoencoder tile by tile, and one picture at a time. Seams change the result a
            little.
        pieces: number of pieces of the sequence in which the denoiser's feed-forward layers run.
        split: compute attention for a few queries at a time, if no kernel avoids the score matrix.
        frames: most frames that the autoencoder decodes at a time. Chunks are independent, so the result
            differs; 0 leaves the number to the pipeline.
    """

    placement: Placement = "resident"
    tiling: bool = False
    pieces: int = 1
    split: bool = False
    frames: int = 0

    @property
    def name(self) -> str:
        """The strategy's name, such as `resident` or `component+tiling`."""
        parts: list[str] = [self.placement]
        parts += ["tiling"] if self.tiling else []
        parts += [f"{self.pieces} pieces"] if self.pieces > 1 else []
        parts += ["split"] if self.split else []
        parts += [f"{self.frames} frame{'s' * (self.frames > 1)}"] if self.frames else []
        return "+".join(parts)

    @property
    def has_seams(self) -> bool:
        """Whether the picture changes at the seams of tiles or chunks."""
        return self.tiling or self.frames > 0

    @property
    def variant(self) -> Variant:
        """The settings that change the calls themselves."""
        return self.tiling, self.pieces, self.split, self.frames

    def sign(self, call: ComponentCall) -> str:
        """Return a signature of the settings that change this call's memory."""
        split = f"split={self.split}"
        if call.callee.stage == "denoise":
            return f"pieces={self.pieces} {split}"
        if not is_autoencoder(call.callee.owner):
            return split
        return f"tiling={self.tiling} {split}"


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and time of a run with one strategy.

    Attributes:
        peak_bytes: most bytes of tensors on the device at a time.
        component: call with that peak, such as `vae.decode`; "" if it's between calls.
        moved_bytes: bytes of weights copied to the device during the run.
        stored_bytes: bytes of weights offloaded to host memory or disk.
        flops: of the run.
        seconds: estimated run time; None if the device's speed is unknown.
        reserved_bytes: smallest limit that the device's caching allocator stays within; 0 if it reserves
            nothing, as on the CPU.
    """

    strategy: Strategy
    peak_bytes: int
    component: str
    moved_bytes: int
    stored_bytes: int
    flops: float = 0.0
    seconds: float | None = None
    reserved_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """The bytes that the device must have: the peak, or the reserved memory if larger."""
        return max(self.peak_bytes, self.reserved_bytes)


def list_strategies(
    *, has_tiling: bool, has_chunks: bool = False, fused: bool = True
) -> tuple[Strategy, ...]:
    """List all strategies to try, those that usually cost the least time first.

    Args:
        has_tiling: whether the autoencoder can work in tiles.
        has_chunks: whether the pipeline can decode a few frames of a video at a time.
        fused: whether attention runs in a kernel that keeps no score matrix. If not, every strategy but the
            first splits attention, which changes no value.
    """
    smaller = [Strategy()]
    smaller += [Strategy(tiling=True)] if has_tiling else []
    chunks = [dataclasses.replace(smaller[-1], frames=n) for n in FRAMES] if has_chunks else []
    smaller += [*chunks, *(dataclasses.replace(one, pieces=PIECES) for one in chunks[:1])]
    placed = [dataclasses.replace(x, placement=where) for where in PLACEMENTS for x in smaller]
    if fused:
        return tuple(placed)
    return (placed[0], *(dataclasses.replace(one, split=True) for one in placed))


def predict(run: RunMemory, strategy: Strategy, *, steps: int) -> Prediction:
    """Predict a strategy's peak memory and the bytes of weights that it transfers.

    Args:
        run: measured with the strategy's `variant` applied.
        steps: denoising steps of the real run.
    """
    fixed = sum(buffers for _, buffers in run.totals.values())
    held = sum(_weigh_held(run, name) for name in run.weights)
    weights = {name: run.weigh(name) for name in run.weights}
    everything = sum(weights.values())
    fixed += everything if strategy.placement == "resident" else held
    largest = max((run.weigh(name) - _weigh_held(run, name) for name in weights), default=0)
    waiting = largest if strategy.placement == "component" else 0
    peaks = [(run.between_bytes + waiting, "")]
    peaks += [(_find_peak(run, call, strategy), call.component) for call in run.calls]
    peak, component = max(peaks)
    is_resident = strategy.placement == "resident"
    return Prediction(
        strategy,
        peak + fixed,
        component,
        everything if is_resident else held + _count_moved(run, strategy, steps),
        0 if is_resident else everything,
        sum(call.flops * _count_repeats(run, call, steps) for call in run.calls),
    )


def group_weights(
    weights: Iterable[str],
    blocks: Iterable[str],
    strays: Mapping[str, frozenset[str]],
    placement: Placement,
) -> dict[str, tuple[str, ...]]:
    """Group a component's modules with weights into units that are loaded together.

    Args:
        weights: paths of the modules with parameters directly in them.
        blocks: paths of the component's blocks.
        strays: module path → modules that read its weights while it doesn't run. Unless they are in the
            same unit, such weights are loaded for the whole call, under "".

    Returns:
        path of the module whose call loads a unit → paths of the modules with the unit's weights. Those of
        `list_held` are in none.
    """
    if placement == "resident":
        return {}
    groups: dict[str, list[str]] = {}
    known, held = frozenset(blocks), list_held(strays)
    for path in weights:
        if path in held:
            continue
        unit = "" if placement == "component" else find_unit(path, known)
        if not all(is_inside(user, unit) for user in strays.get(path, ())):
            unit = ""
        groups.setdefault(unit, []).append(path)
    return {unit: tuple(paths) for unit, paths in groups.items()}


def list_held(strays: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the modules whose weights always stay on the device, as the pipeline's own code reads them."""
    return frozenset(path for path, users in strays.items() if OUTSIDE in users)


def _find_peak(run: RunMemory, call: CallMemory, strategy: Strategy) -> int:
    """Return the most bytes of activations and loaded weights together during one call."""
    if strategy.placement == "resident":
        return call.peak_bytes
    sizes = _weigh_units(run, call.component, strategy.placement)
    return max(
        peak + sum(sizes.get(unit, 0) for unit in list_around(path))
        for path, peak in call.peaks.items()
    )


def _count_repeats(run: RunMemory, call: CallMemory, steps: int) -> float:
    """Return how many calls of the real run one dry call represents."""
    return steps / max(1, run.steps) if call.stage == "denoise" else 1.0


def _weigh_held(run: RunMemory, name: str) -> int:
    """Return the bytes of a component's weights that always stay on the device."""
    held, tensors = list_held(run.strays[name]), run.tensors.get(name, {})
    return sum(sum(sizes) for path, sizes in tensors.items() if path in held)


def _weigh_units(run: RunMemory, component: str, placement: Placement) -> dict[str, int]:
    """Map the path of each loading unit to its bytes."""
    name = name_component(component)
    weights, blocks = run.weights[name], run.blocks[name]
    if placement == "component":
        return {"": run.weigh(name) - _weigh_held(run, name)}
    groups = group_weights(weights, blocks, run.strays[name], placement)
    return {unit: sum(weights[path] for path in paths) for unit, paths in groups.items()}


def _count_moved(run: RunMemory, strategy: Strategy, steps: int) -> int:
    """Count the bytes of weights copied to the device in a run.

    With the placement `component`, consecutive calls of a component copy its weights once.
    """
    moved, current = 0, ""
    for call in run.calls:
        name = name_component(call.component)
        if strategy.placement == "component":
            moved += _weigh_units(run, name, strategy.placement)[""] if name != current else 0
            current = name
            continue
        repeats = _count_repeats(run, call, steps)
        for unit, size in _weigh_units(run, name, strategy.placement).items():
            entries = 1 if unit == "" else call.entries.get(unit, 0)
            moved += int(entries * size * repeats)
    return moved

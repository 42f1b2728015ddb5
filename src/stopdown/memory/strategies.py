"""Ways to stay below a limit, and the peak of each, from one dry run; nothing is put on anything.

A strategy says where the weights are while they are not used (`placement`), and what makes the calls
themselves smaller: the autoencoder's own tiles, few frames at a time, and pieces of what has no kernel that
does without its large values.
The peak of a placement follows from the dry run: at each moment the values that are alive, and the
weights of the modules that are running then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from stopdown.component_call_names import is_inside, name_component
from stopdown.component_calls.components import is_autoencoder
from stopdown.memory.run_memory import CallMemory, RunMemory
from stopdown.scaling import ComponentCall

Placement = Literal["resident", "component", "block"]
"""What is loaded at a time: everything, a component, or a block of a component."""

PLACEMENTS: tuple[Placement, ...] = ("resident", "component", "block")

Variant = tuple[bool, int, bool, int]
"""What changes the calls themselves: tiling, pieces, split, frames."""

FRAMES = (4, 1)
"""Frames of a video that are decoded at a time, if a pipeline decodes in chunks."""

PIECES = 4
"""Of the sequence in feed-forward layers. SVD-XT at its own size fits into 8 GiB with them alone: 6.7 GiB
are reserved, and 10.6 GiB without."""


@dataclass(frozen=True)
class Strategy:
    """One way to run a pipeline.

    Attributes:
        tiling: the autoencoder works tile by tile, and on one picture after the other; the result differs a
            little at the seams.
        pieces: feed-forward layers of the denoiser work on this many pieces of the sequence.
        split: attention works on a few queries at a time, where no kernel does without all scores.
        frames: the autoencoder decodes at most so many frames at a time, each chunk without regard to the
            next, so that the result differs; 0 leaves that to the pipeline.
    """

    placement: Placement = "resident"
    tiling: bool = False
    pieces: int = 1
    split: bool = False
    frames: int = 0

    @property
    def name(self) -> str:
        """The name: `resident`, `component+tiling`."""
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
        """Return a signature of the settings that change this call."""
        split = f"split={self.split}"
        if call.callee.stage == "denoise":
            return f"pieces={self.pieces} {split}"
        if not is_autoencoder(call.callee.owner):
            return split
        return f"tiling={self.tiling} {split}"


@dataclass(frozen=True)
class Prediction:
    """What a strategy takes.

    Attributes:
        peak_bytes: most bytes of tensors on the device at a time.
        component: whose call that is; "" between calls.
        reserved_bytes: the least limit for what the device's allocator takes for them; 0 where it keeps
            nothing, as on the CPU.
        moved_bytes: weights that are brought to the device in one run of `steps`.
        stored_bytes: weights that wait in host memory or on disk.
        seconds: estimated for the run; None where no speed is known.
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
        """The bytes that a device must have: for tensors, or for its allocator's segments."""
        return max(self.peak_bytes, self.reserved_bytes)


def list_strategies(
    *, has_tiling: bool, has_chunks: bool = False, fused: bool = True
) -> tuple[Strategy, ...]:
    """List all strategies to try, those that cost the least time first.

    Args:
        fused: whether attention runs in a kernel that keeps no score matrix. If not, every strategy but the
            first splits it, which changes no value.
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
    """Predict the peak of a strategy, and the bytes that it moves.

    Args:
        run: with the strategy's `variant` put on.
    """
    fixed = sum(buffers for _, buffers in run.totals.values())
    weights = {name: run.weigh(name) for name in run.weights}
    everything = sum(weights.values())
    if strategy.placement == "resident":
        fixed += everything
    largest = max(weights.values(), default=0)
    waiting = largest if strategy.placement == "component" else 0
    peaks = [(run.between_bytes + waiting, "")]
    peaks += [(_find_peak(run, call, strategy), call.component) for call in run.calls]
    peak, component = max(peaks)
    is_resident = strategy.placement == "resident"
    return Prediction(
        strategy,
        peak + fixed,
        component,
        everything if is_resident else _count_moved(run, strategy, steps),
        0 if is_resident else everything,
        sum(call.flops * _count_repeats(run, call, steps) for call in run.calls),
    )


def group_weights(
    weights: Iterable[str],
    blocks: Iterable[str],
    strays: Mapping[str, frozenset[str]],
    placement: Placement,
) -> dict[str, tuple[str, ...]]:
    """Group modules with weights into units that are loaded together.

    Args:
        weights: paths of the modules with parameters directly in them.
        strays: as in `RunMemory`; such weights are loaded for the whole call, under "".

    Returns:
        path of the module that each unit is loaded for → paths of the modules with its weights.
    """
    if placement == "resident":
        return {}
    groups: dict[str, list[str]] = {}
    known = frozenset(blocks)
    for path in weights:
        unit = _choose_unit(path, known, placement)
        if not all(is_inside(user, unit) for user in strays.get(path, ())):
            unit = ""
        groups.setdefault(unit, []).append(path)
    return {unit: tuple(paths) for unit, paths in groups.items()}


def _choose_unit(path: str, blocks: Collection[str], placement: Placement) -> str:
    if placement == "component":
        return ""
    return next((x for x in _list_around(path) if x in blocks), path)


def _list_around(path: str) -> Iterator[str]:
    """Yield the paths of a module and of all modules around it, the component's, "", last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _find_peak(run: RunMemory, call: CallMemory, strategy: Strategy) -> int:
    """Find the most bytes of values and loaded weights together during one call."""
    if strategy.placement == "resident":
        return call.peak_bytes
    sizes = _weigh_units(run, call.component, strategy.placement)
    return max(
        peak + sum(sizes.get(unit, 0) for unit in _list_around(path))
        for path, peak in call.peaks.items()
    )


def _count_repeats(run: RunMemory, call: CallMemory, steps: int) -> float:
    """Return how many calls of the real run one dry call represents."""
    return steps / max(1, run.steps) if call.stage == "denoise" else 1.0


def _weigh_units(run: RunMemory, component: str, placement: Placement) -> dict[str, int]:
    """Map the path of each loading unit to its bytes."""
    name = name_component(component)
    weights, blocks = run.weights[name], run.blocks[name]
    if placement == "component":
        return {"": run.weigh(name)}
    groups = group_weights(weights, blocks, run.strays[name], placement)
    return {unit: sum(weights[path] for path in paths) for unit, paths in groups.items()}


def _count_moved(run: RunMemory, strategy: Strategy, steps: int) -> int:
    """Count the bytes moved to the device in a run: a component once while it is called in a row."""
    moved, current = 0, ""
    for call in run.calls:
        name = name_component(call.component)
        if strategy.placement == "component":
            moved += run.weigh(name) if name != current else 0
            current = name
            continue
        repeats = _count_repeats(run, call, steps)
        for unit, size in _weigh_units(run, name, strategy.placement).items():
            entries = 1 if unit == "" else call.entries.get(unit, 0)
            moved += int(entries * size * repeats)
    return moved

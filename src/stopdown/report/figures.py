"""Coordinates of the figures on a page: lines of errors over steps, and heat maps of headroom.

The page's templates draw them as SVG, so that the reader's browser needs no plotting library.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stopdown.comparison.records import (
    SPOILT,
    Comparison,
    find_median,
    format_bits,
    list_bits,
    pick_cells,
)
from stopdown.records import BlockMaximum


def format_seconds(seconds: float) -> str:
    """Format a time in seconds: `0.42 s`, `3 min 20 s`, `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, over = divmod(minutes, 60)
    return f"{hours} h {over} min" if hours else f"{minutes} min {rest} s"


@dataclass(frozen=True)
class Line:
    """Line of one precision's error over the steps, in SVG units.

    Attributes:
        colour: index of the precision's colour.
        values: median of the error over prompts after each step; None if it was not finite.
        path: path data of the SVG; "" without a point.
        end: position of the line's end.
        lost: position of the first value that was not finite; None if all were.
        label_y: vertical position of the label, moved so that labels do not overlap.
    """

    name: str
    colour: int
    values: tuple[float | None, ...]
    path: str
    end: tuple[float, float]
    lost: tuple[float, float] | None
    label_y: float = 0.0


@dataclass(frozen=True)
class Chart:
    """Chart of errors over steps, with a logarithmic axis.

    Attributes:
        low, high: decimal exponents at the ends of the error axis.
        count: number of steps.
    """

    low: int
    high: int
    count: int
    lines: tuple[Line, ...] = ()
    width: ClassVar[int] = 720
    height: ClassVar[int] = 310
    left: ClassVar[int] = 62
    right: ClassVar[int] = 610
    top: ClassVar[int] = 18
    bottom: ClassVar[int] = 270

    @property
    def is_drawn(self) -> bool:
        """Whether the chart is drawn; with two steps or fewer, the page shows numbers instead."""
        return self.count > 2

    def place_x(self, step: int) -> float:
        share = step / max(self.count - 1, 1)
        return round(self.left + share * (self.right - self.left), 1)

    def place_y(self, error: float) -> float:
        """Return the vertical position of an error; errors below the axis are placed at its lower end."""
        share = (math.log10(error) - self.low) / (self.high - self.low) if error else 0.0
        return round(self.bottom - max(share, 0.0) * (self.bottom - self.top), 1)


def draw_growth(comparison: Comparison) -> Chart | None:
    """Lay out a chart of each precision's latent error over the steps; None without errors to show."""
    names = [variant.name for variant in comparison.variants]
    series = {name: _collect_growth(comparison, name) for name in names}
    series = {k: values for k, values in series.items() if values and k != comparison.reference}
    known = [x for values in series.values() for x in values if x]
    if not known:
        return None
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    chart = Chart(low, max(high, low + 1), max(map(len, series.values())))
    lines = [_draw_line(chart, name, names.index(name), series[name]) for name in series]
    return dataclasses.replace(chart, lines=_spread_labels(lines))


def _collect_growth(comparison: Comparison, name: str) -> tuple[float | None, ...]:
    runs = [cell.latents_rel_err for cell in pick_cells(comparison.rows, name)]
    steps = range(max(map(len, runs), default=0))
    # one prompt that is lost does not hide the others; all lost is a gap
    return tuple(find_median(run[at] for run in runs if at < len(run)) for at in steps)


def _draw_line(chart: Chart, name: str, colour: int, values: tuple[float | None, ...]) -> Line:
    path, end, lost = "", None, None
    for step, value in enumerate(values):
        x = chart.place_x(step)
        if value is None:
            lost = lost or (x, float(chart.top))
            continue
        is_down = step > 0 and values[step - 1] is not None
        end = (x, chart.place_y(value))
        path += f" {'L' if is_down else 'M'}{x} {end[1]}"
    place = end or lost or (float(chart.left), float(chart.top))
    return Line(name, colour, values, path.strip(), place, lost)


def _spread_labels(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Move labels down until they are at least 14 units apart, in the order of their lines' ends."""
    moved, last = [], -math.inf
    for line in sorted(lines, key=lambda line: line.end[1]):
        last = max(line.end[1], last + 14)
        moved.append(dataclasses.replace(line, label_y=last))
    return tuple(moved)


BINS: tuple[tuple[str, str, float], ...] = (
    ("nf", "NaN or Inf", SPOILT),
    ("over", "beyond 65504", 0.0),
    ("edge", "under 1 bit left", 1.0),
    ("near", "1 to 4 bits", 4.0),
    ("fine", "4 to 8 bits", 8.0),
    ("far", "more than 8 bits", math.inf),
)
"""Colour classes of headroom: name, label, and upper limit in bits."""


def choose_bin(bits: float) -> str:
    """Return the name of the colour class for a number of bits of headroom."""
    if bits <= SPOILT:
        return "nf"
    return next(name for name, _, limit in BINS[1:] if bits < limit or limit == math.inf)


MOST_SHOWN = 10
"""Number of blocks with the least headroom that a page shows; all others are collapsed."""

Bits = Mapping[str, Sequence[float | None]]
"""Maps a module path to its headroom in each step, in bits; None if it was not called."""


@dataclass(frozen=True)
class HeatMap:
    """Headroom of one component by block and step, for each precision.

    Attributes:
        heats: headroom of the blocks, by precision.
        rows: module paths in the order of the rows; empty for the order of the blocks.
    """

    component: str
    heats: Mapping[str, Bits]
    rows: tuple[str, ...] = ()

    @property
    def module_paths(self) -> list[str]:
        found = dict.fromkeys(path for heat in self.heats.values() for path in heat)
        return list(self.rows or found)

    @property
    def tightest(self) -> HeatMap:
        """The map of the `MOST_SHOWN` blocks with the least headroom in any precision, smallest first."""
        least = {
            path: min(
                (x for heat in self.heats.values() for x in heat.get(path, ()) if x is not None),
                default=math.inf,
            )
            for path in self.module_paths
        }
        paths = sorted(least, key=lambda path: least[path])[:MOST_SHOWN]
        heats = {
            name: {path: heat[path] for path in paths if path in heat}
            for name, heat in self.heats.items()
        }
        return HeatMap(self.component, heats, tuple(paths))

    @property
    def steps(self) -> int:
        return max((len(row) for heat in self.heats.values() for row in heat.values()), default=1)

    @property
    def size(self) -> int:
        """Width of one step's square, in SVG units."""
        return 26 if self.steps == 1 else max(4, min(14, 240 // self.steps))


def describe_least_headroom(heat: Bits) -> str:
    """Describe the least headroom of a map and its block, `4.1 bits at blocks.3`; "" if there is none."""
    known = [(x, path) for path, row in heat.items() for x in row if x is not None]
    least = min(known, key=lambda found: found[0], default=None)
    return "" if least is None else f"{format_bits(least[0])} at {least[1]}"


def draw_maps(comparison: Comparison) -> list[HeatMap]:
    """Return heat maps of headroom by block and step, for each component and precision."""
    found: dict[str, dict[str, Bits]] = {}
    for variant in comparison.variants:
        for heat in variant.heats:
            rows = dict(zip(heat.module_paths, heat.bits, strict=True))
            found.setdefault(heat.component, {})[variant.name] = rows
    return [HeatMap(component, heats) for component, heats in found.items()]


def draw_run_maps(maxima: Sequence[BlockMaximum]) -> list[HeatMap]:
    """Return heat maps of one run's headroom by block and step, each labelled with its blocks' formats."""
    maps = []
    for component in dict.fromkeys(entry.component for entry in maxima):
        own = [entry for entry in maxima if entry.component == component]
        formats = " + ".join(dict.fromkeys(entry.precision for entry in own))
        rows = list_bits({(entry.path, entry.step): entry.amax for entry in own})
        maps.append(HeatMap(component, {formats: rows}))
    return maps

"""Numbers as people read them, and the figures of a page: lines over steps, maps of headroom.

Figures are SVG text with the page's own colours; nothing is drawn by a library at the reader's.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stopdown.comparison.records import SPOILT, Cell, Comparison, Heat, count_bits
from stopdown.records import BlockMaximum
from stopdown.report.formats import format_bits


def find_median(values: Sequence[float | None]) -> float | None:
    """The median of what is known."""
    known = [x for x in values if x is not None]
    return statistics.median(known) if known else None


# ---------------------------------------------------------------------------------------------
# Error over steps


@dataclass(frozen=True)
class Line:
    """One precision's error over the steps.

    Attributes:
        name: of the precision.
        colour: its number.
        path: of an SVG, "" without a point.
        end: where the label stands, in the picture's units.
        label_y: where the label stands, moved so that labels do not lie on each other.
        lost: where the line ends because a value was not finite; None when it does not.
        values: median over prompts after each step.
    """

    name: str
    colour: int
    path: str
    end: tuple[float, float]
    label_y: float
    lost: tuple[float, float] | None
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """A picture with a logarithmic axis of errors over steps.

    Attributes:
        lines: one for each precision.
        ticks: heights with their labels.
        steps: places with their labels.
        width, height: in the picture's units.
        left, right, top, bottom: of the axes.
    """

    lines: tuple[Line, ...] = ()
    ticks: tuple[tuple[float, str], ...] = ()
    steps: tuple[tuple[float, str], ...] = ()
    width: int = 720
    height: int = 310
    left: int = 62
    right: int = 610
    top: int = 18
    bottom: int = 270


def draw_growth(comparison: Comparison) -> Chart | None:
    """Error of the latents over the steps, the median over prompts; None without any."""
    series = {}
    for variant in comparison.variants:
        if (values := _collect_growth(comparison, variant.name)) and variant.name != (
            comparison.reference
        ):
            series[variant.name] = values
    known = [x for values in series.values() for x in values if x]
    if not known:
        return None
    low = math.floor(math.log10(min(known)))
    high = max(math.ceil(math.log10(max(known))), low + 1)
    count = max(len(values) for values in series.values())
    chart = Chart()
    names = [variant.name for variant in comparison.variants]
    lines = [
        _draw_line(chart, name, names.index(name), values, (low, high), count)
        for name, values in series.items()
    ]
    ticks = tuple(
        (_place_y(chart, 10.0**power, (low, high)), _name_power(power))
        for power in range(low, high + 1)
    )
    every = max(1, count // 10)
    steps = tuple(
        (_place_x(chart, index, count), str(index + 1)) for index in range(0, count, every)
    )
    return Chart(_spread_labels(lines), ticks, steps)


def _collect_growth(comparison: Comparison, name: str) -> tuple[float | None, ...]:
    runs = [
        cell.latents_rel_err
        for row in comparison.rows
        for cell in row.cells
        if cell.precision == name and cell.latents_rel_err
    ]
    if not runs:
        return ()
    count = max(len(run) for run in runs)
    columns = [[run[i] if i < len(run) else None for run in runs] for i in range(count)]
    # one prompt that is lost does not hide the others; all lost is a gap
    return tuple(find_median(column) for column in columns)


def _place_x(chart: Chart, index: int, count: int) -> float:
    span = chart.right - chart.left
    return round(chart.left + (span / 2 if count == 1 else span * index / (count - 1)), 1)


def _place_y(chart: Chart, value: float, decades: tuple[int, int]) -> float:
    share = (math.log10(value) - decades[0]) / (decades[1] - decades[0])
    return round(chart.bottom - share * (chart.bottom - chart.top), 1)


def _draw_line(
    chart: Chart,
    name: str,
    colour: int,
    values: Sequence[float | None],
    decades: tuple[int, int],
    count: int,
) -> Line:
    parts: list[str] = []
    is_down = False
    end, lost = (float(chart.left), float(chart.top)), None
    for index, value in enumerate(values):
        x = _place_x(chart, index, count)
        if value is None:
            lost = lost or (x, float(chart.top))
            is_down = False
            continue
        y = _place_y(chart, max(value, 10.0 ** decades[0]), decades)
        parts.append(f"{'L' if is_down else 'M'}{x} {y}")
        is_down, end = True, (x, y)
    if count == 1 and parts:
        parts.append(f"h0.1 M{end[0]} {end[1]}")
    place = lost if lost and not parts else end
    return Line(name, colour, " ".join(parts), place, place[1], lost, tuple(values))


def _spread_labels(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Labels at least 14 units apart, in the order of their lines."""
    moved, last = [], -1e9
    for line in sorted(lines, key=lambda line: line.end[1]):
        y = max(line.end[1], last + 14)
        moved.append(dataclasses.replace(line, label_y=y))
        last = y
    return tuple(moved)


def _name_power(power: int) -> str:
    return f"{10.0**power:g}" if -4 <= power <= 3 else f"1e{power}"


# ---------------------------------------------------------------------------------------------
# Maps of headroom

BINS: tuple[tuple[str, str, float], ...] = (
    ("nf", "NaN or Inf", SPOILT),
    ("over", "beyond 65504", 0.0),
    ("edge", "under 1 bit left", 1.0),
    ("near", "1 to 4 bits", 4.0),
    ("fine", "4 to 8 bits", 8.0),
    ("far", "more than 8 bits", math.inf),
)
"""Class, label, and the bits up to which it goes."""


def choose_bin(bits: float | None) -> str:
    """The class of a number of bits; "" for none."""
    if bits is None:
        return ""
    if bits <= SPOILT:
        return "nf"
    return next(name for name, _, limit in BINS[1:] if bits < limit or limit == math.inf)


@dataclass(frozen=True)
class Panel:
    """The map of one component in one precision.

    Attributes:
        precision: its name.
        squares: x, y, class and text of each square.
        width, height: in the picture's units.
        tightest: the least headroom in words.
    """

    precision: str
    squares: tuple[tuple[int, int, str, str], ...]
    width: int
    height: int
    tightest: str


@dataclass(frozen=True)
class HeatMap:
    """One component under every precision, side by side.

    Attributes:
        component: its name.
        module_paths: labels of the rows.
        steps: columns.
        panels: one for each precision.
        size: of a square.
    """

    component: str
    module_paths: tuple[str, ...]
    steps: int
    panels: tuple[Panel, ...]
    size: int


def draw_maps(comparison: Comparison) -> tuple[HeatMap, ...]:
    """Headroom by block and step for each component and precision."""
    components = dict.fromkeys(h.component for v in comparison.variants for h in v.heats)
    return tuple(_draw_map(name, _collect_heats(comparison, name)) for name in components)


def draw_run_maps(maxima: Sequence[BlockMaximum]) -> tuple[HeatMap, ...]:
    """Headroom of one run by block and step, in the formats that the blocks returned."""
    found: dict[str, dict[str, dict[int, float | None]]] = {}
    formats: dict[str, dict[str, None]] = {}
    for entry in maxima:
        module_paths = found.setdefault(entry.component, {})
        module_paths.setdefault(entry.path, {})[entry.step or 0] = _round_bits(entry.amax)
        formats.setdefault(entry.component, {})[entry.precision] = None
    maps = []
    for component, module_paths in found.items():
        steps = sorted({step for bits in module_paths.values() for step in bits})
        rows = tuple(tuple(bits.get(step) for step in steps) for bits in module_paths.values())
        heat = Heat(component, tuple(module_paths), rows)
        maps.append(_draw_map(component, {" + ".join(formats[component]): heat}))
    return tuple(maps)


def _round_bits(amax: float | None) -> float | None:
    bits = count_bits(amax)
    return None if bits is None else round(bits, 2)


def _collect_heats(comparison: Comparison, component: str) -> dict[str, Heat]:
    return {
        variant.name: heat
        for variant in comparison.variants
        for heat in variant.heats
        if heat.component == component
    }


def _draw_map(component: str, heats: Mapping[str, Heat]) -> HeatMap:
    module_paths = tuple(
        dict.fromkeys(module_path for heat in heats.values() for module_path in heat.module_paths)
    )
    steps = max((len(row) for heat in heats.values() for row in heat.bits), default=1)
    size = 26 if steps == 1 else max(4, min(14, 240 // steps))
    panels = tuple(
        _draw_panel(name, heat, module_paths, size, steps) for name, heat in heats.items()
    )
    return HeatMap(component, module_paths, steps, panels, size)


def _draw_panel(
    name: str, heat: Heat, module_paths: Sequence[str], width: int, steps: int
) -> Panel:
    rows = dict(zip(heat.module_paths, heat.bits, strict=True))
    squares = []
    least: tuple[float, str] | None = None
    for y, module_path in enumerate(module_paths):
        for x, bits in enumerate(rows.get(module_path, ())):
            if bits is None:
                continue
            if least is None or bits < least[0]:
                least = (bits, module_path)
            squares.append((x * width, y * 14, choose_bin(bits), format_bits(bits)))
    said = "" if least is None else f"{format_bits(least[0])} at {least[1]}"
    return Panel(name, tuple(squares), steps * width, len(module_paths) * 14, said)


# ---------------------------------------------------------------------------------------------
# Summaries


def summarise_measure(cells: Sequence[Cell], name: str) -> tuple[float | None, float | None]:
    """Median and worst of a measure over prompts; the worst is the least for PSNR and SSIM."""
    values = [getattr(cell.measures, name) for cell in cells if cell.measures is not None]
    known = [x for x in values if x is not None]
    if not known:
        return None, None
    worst = min(known) if name in ("psnr_db", "ssim") else max(known)
    return statistics.median(known), worst

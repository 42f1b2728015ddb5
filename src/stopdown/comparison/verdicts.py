"""Verdicts on precisions, with reasons, and a recommendation, from measures and thresholds.

Rules over records, without tensors. A cell is `broken` if its picture is faulty, `other` if its picture is
sound but differs from the reference, and `same` if it is within the thresholds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from stopdown.comparison.records import (
    Cell,
    Measures,
    Row,
    Thresholds,
    Variant,
    format_number,
    pick_cells,
)

WORST_FIRST = ("failed", "broken", "other", "same", "reference")

_ORDER = ("fp32", "auto", "autocast", "fp16", "bf16", "fp16-plain", "clamp")
"""Precisions from the most to the least precise; plans and precisions by component rank as `fp16`."""


def rank_precisions(names: Iterable[str], *, needs_clamp: bool) -> list[str]:
    """Sort precisions from the most to the least precise that is valid for a model.

    Args:
        needs_clamp: whether a clamp at fp16's maximum is part of the model. Such a model was trained in
            fp16, and computes something else without the clamp.
    """
    clamped = ("fp16-plain", "clamp", "fp16", "autocast", "bf16", "auto", "fp32")
    order = clamped if needs_clamp else _ORDER

    def rank(name: str) -> int:
        kind = "fp16" if name.endswith(".json") or "=" in name else name
        return order.index(kind)

    return sorted(names, key=rank)


def is_sound(cell: Cell) -> bool:
    """Return whether a run had no error, no findings, no faults and no NaN or Inf."""
    return not cell.error and not cell.non_finite and not cell.findings and not cell.faults


def choose_reference(cells: Sequence[Cell], ranked: Sequence[str]) -> str:
    """Return the name of the most precise sound run, or of the most precise one if none is sound."""
    by_name = {cell.precision: cell for cell in cells}
    sound = [name for name in ranked if name in by_name and is_sound(by_name[name])]
    return sound[0] if sound else ranked[0]


def judge_cell(cell: Cell, reference: Cell, thresholds: Thresholds) -> Cell:
    """Judge the run of a prompt in one precision against the reference's; add verdict and reasons."""
    verdict, reasons = _judge(cell, reference, thresholds)
    return dataclasses.replace(cell, verdict=verdict, reasons=tuple(reasons))


def _judge(cell: Cell, reference: Cell, thresholds: Thresholds) -> tuple[str, list[str]]:
    if cell.error:
        return "failed", [cell.error]
    if broken := list(_list_breaks(cell, reference)):
        return "broken", broken
    if cell.precision == reference.precision:
        return "reference", ["Reference."]
    if cell.measures is None:
        return "other", ["There is no output of the same size to compare it with."]
    misses = list(_list_misses(cell.measures, thresholds))
    if misses:
        return "other", misses
    return "same", [_describe_measures(cell.measures)]


def _list_breaks(cell: Cell, reference: Cell) -> Iterable[str]:
    if cell.non_finite:
        yield f"{cell.non_finite:,} values are NaN or Inf{_name_start(cell)}."
    known = {finding.kind for finding in reference.findings}
    own = cell.precision == reference.precision
    for finding in cell.findings:
        if own or finding.kind not in known:
            yield f"{finding.kind}: {finding.evidence}"
    for fault in cell.faults:
        if fault.kind == "clamped" and cell.precision != "clamp":  # which clamps on purpose
            yield fault.evidence


def _name_start(cell: Cell) -> str:
    """Name the module and step of the first fault that the guard detected, or return ""."""
    for fault in cell.faults:
        step = "" if fault.step is None else f" at step {fault.step + 1}"
        return f", starting in {fault.module_path}{step}"
    return ""


def _list_misses(measures: Measures, thresholds: Thresholds) -> Iterable[str]:
    limits = (
        ("PSNR", measures.psnr_db, thresholds.psnr_db, 1, "dB"),
        ("SSIM", measures.ssim, thresholds.ssim, 1, ""),
        ("FLIP", measures.flip, thresholds.flip, -1, ""),
        ("Flicker", measures.flicker, thresholds.flicker, -1, ""),
    )
    for name, value, limit, sign, unit in limits:
        if value is not None and limit is not None and sign * value < sign * limit:
            side, unit = "below" if sign > 0 else "above", f" {unit}" * bool(unit)
            yield f"{name} is {value:.4g}{unit}, {side} the limit of {limit:g}{unit}."


def _describe_measures(measures: Measures) -> str:
    if measures.identical:
        return "Equal to the reference, bit for bit."
    parts = [f"PSNR {measures.psnr_db:.1f} dB"]
    parts += [f"SSIM {measures.ssim:.4f}"] if measures.ssim is not None else []
    parts += [f"FLIP {measures.flip:.4f}"] if measures.flip is not None else []
    return f"{', '.join(parts)}."


def judge_variant(variant: Variant, rows: Sequence[Row]) -> Variant:
    """Judge a precision over all prompts; return it with its verdict, time ratios and peak memory."""
    cells = pick_cells(rows, variant.name)
    if variant.error or not cells:
        return dataclasses.replace(
            variant, verdict="failed", reasons=(variant.error or "Nothing was run.",)
        )
    verdict = min((cell.verdict for cell in cells), key=WORST_FIRST.index)
    strategy = f"To stay within the memory limit it ran as {variant.strategy}."
    return dataclasses.replace(
        variant,
        verdict=verdict,
        reasons=(*_summarise(cells, verdict), *([strategy] if variant.strategy else ())),
        time_ratios=_find_ratios(rows, variant.name),
        peak_bytes=max(cell.peak_bytes for cell in cells),
    )


def _summarise(cells: Sequence[Cell], verdict: str) -> Iterable[str]:
    count = len(cells)
    if verdict == "reference":
        return
    counts = {word: sum(cell.verdict == word for cell in cells) for word in WORST_FIRST}
    words = {
        "failed": "didn't run",
        "broken": "broken",
        "other": "different picture",
        "same": "the same picture",
        "reference": "the reference itself",
    }
    said = [f"{counts[w]} {words[w]}" for w in reversed(WORST_FIRST) if counts[w]]
    if count > 1:
        yield f"Of {count} prompts: {', '.join(said)}."
    measured = [cell.measures for cell in cells if cell.measures and cell.verdict != "reference"]
    known = [psnr_db for m in measured if (psnr_db := m.find_psnr()) is not None]
    if len(known) > 1 and min(known) < math.inf:
        typical, least = (format_number(x, 1) for x in (statistics.median(known), min(known)))
        yield f"Median PSNR {typical} dB, worst {least} dB."
    worst = next(cell for cell in cells if cell.verdict == verdict)
    if verdict in ("failed", "broken", "other"):
        yield worst.reasons[0] if count == 1 else f"First such prompt: {worst.reasons[0]}"


def _find_ratios(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Map each stage to the median over prompts of its time, relative to the reference.

    A broken run has no time: part of it is the search for the operation where NaN began.
    """
    ratios: dict[str, list[float]] = {}
    for row in rows:
        by_name = {cell.precision: cell for cell in row.cells}
        cell, reference = by_name.get(name), by_name.get(row.reference)
        if cell is None or reference is None or reference.error:
            continue
        if cell.verdict in ("failed", "broken"):
            continue
        for stage, seconds in cell.stages_s.items():
            if reference.stages_s.get(stage, 0.0) > 0.0:
                ratios.setdefault(stage, []).append(seconds / reference.stages_s[stage])
        if (whole := sum(reference.stages_s.values())) > 0:
            ratios.setdefault("all", []).append(sum(cell.stages_s.values()) / whole)
    return {stage: statistics.median(found) for stage, found in ratios.items()}


FEWEST_TIMED = 3
"""Fewest prompts for which times are reported; the first run has set-up costs, and times vary."""


def recommend(
    variants: Sequence[Variant], device: str, prompts: int = FEWEST_TIMED
) -> tuple[str | None, str]:
    """Recommend the fastest precision that gives the same pictures, with a headline.

    Args:
        prompts: number of prompts; with fewer than `FEWEST_TIMED` the precision with the smallest weights
            is recommended, since a single time is no comparison.

    Returns:
        The precision, or None; and sentences: which precisions give the same pictures as the
        reference, which one to use, and why.
    """
    usable = [v for v in variants if v.verdict in ("same", "reference")]
    if not usable:
        return (
            None,
            "None of these precisions gives the same pictures as the reference on every prompt.",
        )
    if prompts < FEWEST_TIMED:
        best = min(usable, key=lambda v: v.weights_bytes)
        why = (
            f"{_weigh(best, variants)}. To find out which is fastest, compare at least "
            f"{FEWEST_TIMED} prompts"
        )
    else:
        best = min(usable, key=lambda v: v.time_ratios.get("all", float("inf")))
        ratio = best.time_ratios.get("all")
        reference = _name_reference(variants)
        why = "" if ratio is None else f": it takes {ratio:.2g} times as long as {reference}"
        if best.verdict == "reference":
            why = ": nothing that gives the same pictures is faster"
    why = why if len(usable) > 1 else ""
    return best.name, f"{_word_verdicts(variants)} Use {best.name} on {device}{why}.".lstrip()


def _word_verdicts(variants: Sequence[Variant]) -> str:
    """Return all verdicts as a sentence: `bf16 gives the same pictures as fp32; fp16-plain is broken.`"""
    names: dict[str, list[str]] = {}
    for variant in variants:
        names.setdefault(variant.verdict, []).append(variant.name)
    reference = _name_reference(variants)
    said = []
    for verdict, one, several in (
        (
            "same",
            f"gives the same pictures as {reference}",
            f"give the same pictures as {reference}",
        ),
        ("other", "gives different pictures", "give different pictures"),
        ("broken", "is broken", "are broken"),
        ("failed", "didn't run", "didn't run"),
    ):
        if found := names.get(verdict):
            said.append(f"{_join(found)} {one if len(found) == 1 else several}")
    return f"{'; '.join(said)}." if said else ""


def _name_reference(variants: Sequence[Variant]) -> str:
    references = [x.name for x in variants if x.verdict == "reference"]
    return references[0] if len(references) == 1 else "the reference"


def _weigh(best: Variant, variants: Sequence[Variant]) -> str:
    """Word how much smaller a precision's weights are than the reference's; "" if they aren't."""
    sizes = [x.weights_bytes for x in variants if x.verdict == "reference"]
    if len(sizes) != 1 or best.weights_bytes >= sizes[0]:
        return ""
    percent = f"{100 * best.weights_bytes / sizes[0]:.0f} %"
    share = "half" if percent == "50 %" else f"{percent} of"
    return f": its weights take {share} the memory of {_name_reference(variants)}'s"


def _join(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def compare_pairs(rows: Sequence[Row], names: Sequence[str]) -> Iterable[str]:
    """Yield a sentence for each pair of precisions: which one is closer to the reference on more prompts.

    The best precisions come first.
    """
    ordered = sorted(names, key=lambda name: _find_typical(rows, name))
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            pairs = [(_find_rmse(row, one), _find_rmse(row, other)) for row in rows]
            known = [(a, b) for a, b in pairs if a is not None and b is not None]
            nearer = sum(a < b for a, b in known)
            further = sum(a > b for a, b in known)
            best, worse, count = (
                (one, other, nearer) if nearer >= further else (other, one, further)
            )
            if count and any(math.isfinite(a) and math.isfinite(b) for a, b in known):
                where = f" on {count} of {len(known)} prompts" if len(known) > 1 else ""
                yield f"{best} is closer to the reference than {worse}{where}."


def _find_typical(rows: Sequence[Row], name: str) -> float:
    found = [rmse for row in rows if (rmse := _find_rmse(row, name)) is not None]
    return statistics.median(found) if found else 0.0


def _find_rmse(row: Row, name: str) -> float | None:
    for cell in row.cells:
        if cell.precision == name and name != row.reference:
            is_measured = is_sound(cell) and cell.measures is not None
            return cell.measures.rmse if is_measured and cell.measures else math.inf
    return None

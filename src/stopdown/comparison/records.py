"""Records of a comparison of precisions, without tensors.

Frames and difference maps are stored as small pictures, so that a report needs nothing but the record. All
measures are those of the frames in full size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stopdown.number_formats import FP16
from stopdown.record_display import Displayed, Summary
from stopdown.records import SCHEMA, ComponentPlan, Finding, Plan, Repair

PARTING = 0.05
"""Relative error at which two runs count as diverged: ten times the rounding error of bf16 (2^-8)."""


@dataclass(frozen=True, repr=False)
class Thresholds(Displayed):
    """Limits within which a picture counts as the same as the reference; None sets no limit.

    Attributes:
        psnr_db: least peak signal-to-noise ratio, in dB.
        ssim: least structural similarity.
        flip: largest mean FLIP error.
        flicker: largest root mean square of the error's change from frame to frame.
        source: where the defaults come from.
    """

    psnr_db: float | None = 33.0
    ssim: float | None = 0.95
    flip: float | None = None
    flicker: float | None = None
    source: str = (
        "33 dB and 0.95 are where viewers begin to call a picture good (mean opinion score 4 of 5) "
        "in Zinner, Hohlfeld, Abboud and Hossfeld, Impact of frame rate and resolution on objective "
        "QoE metrics, QoMEX 2010. There are no such limits for FLIP and flicker, so they aren't limited."
    )


@dataclass(frozen=True, repr=False)
class Sheet(Displayed):
    """Frames of a clip drawn row by row into one picture.

    Attributes:
        width, height: size of one frame in the sheet, in pixels.
        frames: number of frames.
        columns: frames in a row of the sheet.
        every: the sheet has every n-th frame of the clip.
        mime: `image/webp` or `image/png`.
        data: the picture file, in base64.
    """

    width: int
    height: int
    frames: int
    columns: int
    every: int
    mime: str
    data: str


@dataclass(frozen=True, repr=False)
class Measures(Displayed):
    """Distance of a run's frames from those of the reference; values from 0 (black) to 1 (white).

    Attributes:
        identical: whether they are equal bit for bit; `psnr_db` is None then, as it would be infinite.
        rmse: root mean square of the difference over all values.
        psnr_db: peak signal-to-noise ratio over all values, in dB.
        ssim: structural similarity, mean over frames; None for frames below 11 pixels.
        flip: mean FLIP error over frames, at 67 pixels per degree; None if FLIP is not installed.
        flicker: root mean square of the error's change from frame to frame; None for a picture.
    """

    identical: bool
    rmse: float
    psnr_db: float | None
    ssim: float | None
    flip: float | None
    flicker: float | None

    def find_psnr(self) -> float | None:
        """Return the PSNR in dB, which is infinite for an identical picture."""
        return math.inf if self.identical else self.psnr_db


@dataclass(frozen=True, repr=False)
class CallError(Displayed):
    """Error of one component call's output against the reference.

    Attributes:
        component: the component or its method: `transformer`, `vae.encode`.
        step: denoising step, from 0; None outside of denoising.
        rel_err: 2-norm of the difference over that of the reference; None if it is not finite.
    """

    component: str
    step: int | None
    rel_err: float | None


@dataclass(frozen=True, repr=False)
class Divergence(Displayed):
    """First block at which a run differs from the reference by more than a limit.

    Attributes:
        component, step: the call.
        module_path: the first such block in that call: `transformer:transformer_blocks.1`.
        rel_err: relative error over a sample of the block's output; None if it is not finite.
        limit: the limit that was exceeded.
    """

    component: str
    step: int | None
    module_path: str
    rel_err: float | None
    limit: float


@dataclass(frozen=True, repr=False)
class Cell(Displayed):
    """Result of one prompt in one precision.

    Attributes:
        precision: name of the precision, as the user wrote it.
        error: why there are no frames; "" if there are.
        stages_s: seconds by stage, without the time that probes took.
        elapsed_s: seconds in total.
        peak_bytes: peak memory.
        non_finite: number of NaN and Inf values in the components' outputs and in the frames.
        saturated: number of fp16 values at fp16's maximum in the outputs of blocks.
        clamped: number of values that a clamp replaced.
        headroom_bits: bits between the largest magnitude of a block's output and 65504, fp16's
            maximum, in any precision; negative if fp16 would overflow. None if it is not finite, or
            without any block.
        tightest: the block and step with the least headroom; "" without any.
        faults: NaN and Inf that the guard detected, each with its origin; nothing was repaired.
        findings: frames that are black, grey, frozen or noise.
        measures: distance from the reference; None without frames.
        latents_rel_err: relative error of the latents after each step; None if it is not finite.
        calls: error of each component call's output.
        parting: where the run first diverges from the reference; None if it does not.
        sheet, difference: frames, and FLIP error maps from 0 (black) to 1 (white).
        verdict: `reference`, `same`, `other`, `broken` or `failed`.
        reasons: whole sentences.
    """

    precision: str
    error: str = ""
    stages_s: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    peak_bytes: int = 0
    non_finite: int = 0
    saturated: int = 0
    clamped: int = 0
    headroom_bits: float | None = None
    tightest: str = ""
    faults: tuple[Repair, ...] = ()
    findings: tuple[Finding, ...] = ()
    measures: Measures | None = None
    latents_rel_err: tuple[float | None, ...] = ()
    calls: tuple[CallError, ...] = ()
    parting: Divergence | None = None
    sheet: Sheet | None = None
    difference: Sheet | None = None
    verdict: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Row(Displayed):
    """Results of one prompt in every precision.

    Attributes:
        line: line number in the prompt file, from 1.
        reference: the precision against which the others are measured for this prompt.
    """

    line: int
    prompt: str
    seed: int
    reference: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, repr=False)
class BadLine(Displayed):
    """Line of the prompt file that was not run.

    Attributes:
        text: the first characters of the line.
        reason: what is wrong with the line, as a sentence.
    """

    line: int
    text: str
    reason: str


SPOILT = -1000.0
"""Placeholder for the headroom of a value that was NaN or Inf."""


def count_bits(amax: float | None) -> float | None:
    """Return the bits of headroom from a magnitude to 65504; None for zero, `SPOILT` for NaN or Inf."""
    if amax is None or not math.isfinite(amax):
        return SPOILT
    return math.log2(FP16.largest) - math.log2(amax) if amax > 0 else None


def list_bits(
    amax: Mapping[tuple[str, int | None], float | None],
) -> dict[str, tuple[float | None, ...]]:
    """Map each module path to its headroom in each step, in bits; None if it was not called, or all zero.

    Args:
        amax: maps a module path and step to the largest magnitude there.
    """
    bits = {(path, step or 0): count_bits(value) for (path, step), value in amax.items()}
    steps = sorted({step for _, step in bits})
    rounded = {place: None if x is None else round(x, 2) for place, x in bits.items()}
    return {path: tuple(rounded.get((path, step)) for step in steps) for path, _ in bits}


@dataclass(frozen=True, repr=False)
class Heat(Displayed):
    """Headroom of a component's blocks in each step, the least of all prompts.

    Attributes:
        component: the component or its method: `transformer`, `vae.decode`.
        module_paths: paths of the blocks, in the module's order.
        bits: for each block, the headroom in bits below fp16's maximum by step; None if it was not
            called, -1000 if a value was not finite.
    """

    component: str
    module_paths: tuple[str, ...]
    bits: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, repr=False)
class Variant(Displayed):
    """Results of one precision over all prompts.

    Attributes:
        name: name of the precision, as the user wrote it.
        meaning: description of the precision in one sentence.
        error: why it could not be loaded; "" if it could.
        load_s: seconds of loading, including those to make a plan.
        weights_bytes: bytes of parameters and buffers.
        decisions: precision of each component.
        plan: plan that rescaled the model; None without one.
        strategy: memory strategy that kept it within the limit; "" without a limit.
        heats: headroom by component.
        time_ratios: median over prompts of each stage's time relative to the reference's, without broken
            and failed runs; `all` for the whole run.
        peak_bytes: largest peak memory of its cells.
        verdict: the worst of its cells' verdicts: `reference`, `same`, `other`, `broken` or `failed`.
        reasons: whole sentences.
    """

    name: str
    meaning: str
    error: str = ""
    load_s: float = 0.0
    weights_bytes: int = 0
    decisions: tuple[ComponentPlan, ...] = ()
    plan: Plan | None = None
    strategy: str = ""
    heats: tuple[Heat, ...] = ()
    time_ratios: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    verdict: str = ""
    reasons: tuple[str, ...] = ()


WORDS = {
    "reference": "reference",
    "same": "same picture",
    "other": "different picture",
    "broken": "broken",
    "failed": "didn't run",
}
"""Verdicts in the words that users see."""

SIGNS = {"reference": "◎", "same": "✓", "other": "≠", "broken": "✕", "failed": "—"}
"""Sign before each verdict, so that it can be told without colour."""


@dataclass(frozen=True, repr=False)
class Comparison(Displayed):
    """Comparison of the same prompts, seeds and noise in several precisions.

    Attributes:
        source: the model as the user named it; the class of a pipeline in memory.
        fingerprint: sha256 over the model's files; empty for a pipeline in memory.
        pipeline: class of the pipeline.
        request: options of the runs.
        command: command line that repeats the comparison.
        device: device of the runs.
        device_reason: why that device was chosen.
        machine: versions and hardware.
        thresholds: limits within which a picture counts as the same.
        reference: the precision against which the others are measured; a row may have another one.
        reference_reason: why that precision is the reference.
        recommended: the precision to use; None if there is none.
        headline: which precisions give the same pictures as the reference, and which one to use.
        reasons: for pairs of precisions, which one is closer to the reference, in whole sentences.
        variants: results by precision.
        rows: results by prompt.
        bad_lines: lines of the prompt file that were not run.
        peak_source: how peak memory was measured.
        elapsed_s: seconds of all runs, including those of an interrupted start.
    """

    source: str
    fingerprint: str
    pipeline: str
    request: dict[str, Any]
    command: str
    device: str
    device_reason: str
    machine: dict[str, Any]
    thresholds: Thresholds
    reference: str
    reference_reason: str
    recommended: str | None
    headline: str
    reasons: tuple[str, ...]
    variants: tuple[Variant, ...]
    rows: tuple[Row, ...]
    bad_lines: tuple[BadLine, ...]
    peak_source: str
    elapsed_s: float
    kind: str = "comparison"
    schema: int = field(default=SCHEMA)

    def summarise(self) -> Summary:
        """Return a table with a row for each precision, and notes: verdict, reasons and skipped runs."""
        headings = ("precision", "verdict", "PSNR, dB", "SSIM", "FLIP", "time", "headroom, bits")
        notes = [("", self.headline)]
        notes += [("", self.reference_reason)] if self.reference != "fp32" else []
        notes += [(x.name, " ".join(x.reasons)) for x in self.variants if x.reasons]
        notes += [("", reason) for reason in self.reasons]
        notes += [
            ("", f"Line {x.line} of the prompts wasn't run: {x.reason}") for x in self.bad_lines
        ]
        notes += [
            ("", f"{cell.precision} didn't run on line {row.line}: {cell.error}")
            for row in self.rows
            for cell in row.cells
            if cell.error
        ]
        return Summary(
            headings, tuple(map(self._describe, self.variants)), tuple(dict.fromkeys(notes))
        )

    def _describe(self, variant: Variant) -> tuple[str, ...]:
        cells = pick_cells(self.rows, variant.name)
        psnr, ssim, flip = (summarise_measure(cells, x)[1] for x in ("psnr_db", "ssim", "flip"))
        return (
            variant.name,
            f"{SIGNS[variant.verdict]} {WORDS[variant.verdict]}",
            format_number(psnr, 1),
            format_number(ssim, 4),
            format_number(flip, 3),
            format_ratio(variant.time_ratios.get("all")),
            format_bits(find_tightest(cells)[0]),
        )


def pick_cells(rows: Sequence[Row], name: str) -> list[Cell]:
    return [cell for row in rows for cell in row.cells if cell.precision == name]


def format_ratio(ratio: float | None) -> str:
    """Format a ratio: `0.64×`, `310×`, or a dash if it is unknown."""
    if ratio is None or not math.isfinite(ratio):
        return "–"
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.2f}×"


def format_number(value: float | None, digits: int = 2) -> str:
    """Format a number with `digits` decimals, `∞`, or as a dash if it is unknown."""
    if value == math.inf:
        return "∞"
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_bits(bits: float | None) -> str:
    """Format headroom in bits: `4.1`, `−1.9`, `not finite`, or a dash if it is unknown."""
    if bits is None:
        return "–"
    return "not finite" if bits <= SPOILT else f"{bits:.1f}".replace("-", "−")


def find_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None without any."""
    known = [x for x in values if x is not None]
    return statistics.median(known) if known else None


def summarise_measure(cells: Sequence[Cell], name: str) -> tuple[float | None, float | None]:
    """Return the median and the worst value of a measure, such as `ssim`, over the runs of a precision.

    For PSNR and SSIM, low is bad. The PSNR of an identical picture is infinite.
    """
    measured = [cell.measures for cell in cells if cell.measures is not None]
    values = [x.find_psnr() if name == "psnr_db" else getattr(x, name) for x in measured]
    known = [x for x in values if x is not None]
    worst = min if name in ("psnr_db", "ssim") else max
    return find_median(known), worst(known, default=None)


def find_tightest(cells: Sequence[Cell]) -> tuple[float | None, str]:
    """Return the least headroom of a precision's runs, in bits, with its block.

    It is `SPOILT` if a value was NaN or Inf, and None if no block was measured.
    """
    known = [
        (SPOILT if cell.headroom_bits is None else cell.headroom_bits, cell.tightest)
        for cell in cells
        if not cell.error and cell.tightest
    ]
    return min(known, key=lambda found: found[0], default=(None, ""))

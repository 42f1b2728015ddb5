"""What a comparison of precisions found, as plain data: no tensor is seen here.

Frames and difference maps are kept as small sheets of pictures, so that a record makes a report by
itself; every number was measured on the frames in full size, before they were made small.
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
"""Relative error at which two runs part: ten times what rounding to bf16 alone leaves (2^-8)."""


@dataclass(frozen=True, repr=False)
class Thresholds(Displayed):
    """What a picture must reach against the reference to count as the same; None is not asked.

    Attributes:
        psnr_db: least peak signal-to-noise ratio.
        ssim: least structural similarity.
        flip: largest mean FLIP error.
        flicker: largest root mean square of what the error changes from frame to frame.
        source: where the defaults come from.
    """

    psnr_db: float | None = 33.0
    ssim: float | None = 0.95
    flip: float | None = None
    flicker: float | None = None
    source: str = (
        "33 dB and 0.95 are where viewers begin to call a picture good (mean opinion score 4 of 5) "
        "in Zinner, Hohlfeld, Abboud and Hossfeld, Impact of frame rate and resolution on objective "
        "QoE metrics, QoMEX 2010. There are no such limits for FLIP and flicker, so they are not limited."
    )


@dataclass(frozen=True, repr=False)
class Sheet(Displayed):
    """The frames of a clip in one picture, row by row.

    Attributes:
        width, height: of one frame as it is kept, in pixels.
        frames: how many there are.
        columns: frames in a row of the sheet.
        every: one in so many frames of the clip was kept.
        mime: `image/webp` or `image/png`.
        data: the file, in base64.
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
    """How far the frames of a run are from those of the reference, `[0, 1]` for black to white.

    Attributes:
        identical: bit for bit the same; `psnr_db` is None then, because it would be infinite.
        rmse: root mean square of the difference over all values.
        psnr_db: peak signal-to-noise ratio over all values.
        ssim: structural similarity, mean over frames; None for frames below 11 pixels.
        flip: mean FLIP error over frames, at 67 pixels a degree; None where it is not installed.
        flicker: root mean square of what the error changes from frame to frame; None for a picture.
    """

    identical: bool
    rmse: float
    psnr_db: float | None
    ssim: float | None
    flip: float | None
    flicker: float | None


@dataclass(frozen=True, repr=False)
class CallError(Displayed):
    """How far one call's output is from that of the reference.

    Attributes:
        component: `transformer`, `vae.encode`.
        step: of the run, from 0; None outside of denoising.
        rel_err: 2-norm of the difference over that of the reference; None when it is not finite.
    """

    component: str
    step: int | None
    rel_err: float | None


@dataclass(frozen=True, repr=False)
class Divergence(Displayed):
    """Where two runs first part by more than a limit.

    Attributes:
        component, step: the call.
        module_path: the first block of it that parts: `transformer:transformer_blocks.1`.
        rel_err: relative error there, over a sample of its values; None when it is not finite.
        limit: what it passed.
    """

    component: str
    step: int | None
    module_path: str
    rel_err: float | None
    limit: float


@dataclass(frozen=True, repr=False)
class Cell(Displayed):
    """One prompt under one precision.

    Attributes:
        precision: as it was named.
        error: why it has no frames, "" when it has.
        stages_s: seconds by stage, without those of the probes.
        elapsed_s: seconds in all.
        peak_bytes: highest memory.
        non_finite: NaN and Inf in what the components returned and in the frames.
        saturated: values at the outputs of blocks that stand at fp16's maximum, in fp16.
        clamped: values that a clamp brought back.
        headroom_bits: bits between the largest magnitude at a block's output and 65504, fp16's
            maximum, whatever the precision; negative where fp16 would overflow. None when not finite.
        tightest: where that is.
        faults: what the guard saw, each with where it began; nothing was repaired.
        findings: frames that are black, grey, frozen or noise.
        measures: against the reference; None without frames.
        latents_rel_err: of the latents after each step; None where not finite.
        calls: of what each component returned.
        parting: where the run first parts from the reference.
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
    """One prompt under every precision.

    Attributes:
        line: of the prompt file, from 1.
        reference: the precision that the others are measured against here.
    """

    line: int
    prompt: str
    seed: int
    reference: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, repr=False)
class BadLine(Displayed):
    """A line of the prompt file that was not run.

    Attributes:
        text: its beginning.
        reason: what is wrong with it, a whole sentence.
    """

    line: int
    text: str
    reason: str


SPOILT = -1000.0
"""Stands for the headroom of a value that was not finite."""


def count_bits(amax: float | None) -> float | None:
    """Return the bits of headroom from a magnitude to 65504; None for zero, `SPOILT` for NaN or Inf."""
    if amax is None or not math.isfinite(amax):
        return SPOILT
    return math.log2(FP16.largest) - math.log2(amax) if amax > 0 else None


def list_bits(
    amax: Mapping[tuple[str, int | None], float | None],
) -> dict[str, tuple[float | None, ...]]:
    """Map each module path to its headroom in each step, in bits; None without a call, and for zeros."""
    bits = {(path, step or 0): count_bits(value) for (path, step), value in amax.items()}
    steps = sorted({step for _, step in bits})
    rounded = {place: None if x is None else round(x, 2) for place, x in bits.items()}
    return {path: tuple(rounded.get((path, step)) for step in steps) for path, _ in bits}


@dataclass(frozen=True, repr=False)
class Heat(Displayed):
    """Headroom of a component's blocks over the calls of a run, the tightest of all prompts.

    Attributes:
        component: `transformer`, `vae.decode`.
        module_paths: paths of the blocks, in the order of the module.
        bits: for each module path one value for each step: bits to fp16's maximum; None when it was not
            called, -1000 when a value was not finite.
    """

    component: str
    module_paths: tuple[str, ...]
    bits: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, repr=False)
class Variant(Displayed):
    """One precision over all prompts.

    Attributes:
        name: as it was named.
        meaning: what it is, in one sentence.
        error: why it could not be loaded, "" when it could.
        load_s: seconds of loading, the making of a plan included.
        weights_bytes: of its parameters and buffers.
        decisions: precision of each component.
        plan: what it was rescaled by.
        strategy: how it stayed within a limit of memory; "" without one.
        heats: headroom by component.
        time_ratios: stage to its time over the reference's, the median over prompts; `all` for the
            whole run.
        peak_bytes: largest of its cells.
        verdict: the worst of its cells': `reference`, `same`, `other`, `broken` or `failed`.
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
    "failed": "did not run",
}
"""Verdicts as they are shown."""

SIGNS = {"reference": "◎", "same": "✓", "other": "≠", "broken": "✕", "failed": "—"}
"""What is before a verdict, so that colour is not needed."""


@dataclass(frozen=True, repr=False)
class Comparison(Displayed):
    """The same prompts, seeds and noise under several precisions.

    Attributes:
        source: the model as it was named; the class of a pipeline in memory.
        fingerprint: sha256 over its files, empty for a pipeline in memory.
        pipeline: class of the pipeline.
        request: options of the runs.
        command: what repeats this.
        device: where it ran.
        device_reason: why there.
        machine: versions and hardware.
        thresholds: what counts as the same picture.
        reference: the precision that the others are measured against; a row may have another one.
        reference_reason: why.
        recommended: the precision to take; None when there is none.
        headline: which pictures are those of the reference, and which precision to use.
        reasons: which precision is nearer to the reference than which, in whole sentences.
        variants: the precisions.
        rows: the prompts.
        bad_lines: lines of the prompt file that were not run.
        peak_source: how memory was read.
        elapsed_s: seconds of all runs, also those of an earlier start.
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
        """Summarise each precision in a row, with the verdict, its reasons and the skipped runs below."""
        headings = ("precision", "verdict", "PSNR, dB", "SSIM", "FLIP", "time", "headroom, bits")
        notes = [("", self.headline)]
        notes += [("", self.reference_reason)] if self.reference != "fp32" else []
        notes += [(x.name, " ".join(x.reasons)) for x in self.variants if x.verdict != "reference"]
        notes += [("", reason) for reason in self.reasons]
        notes += [
            ("", f"Line {x.line} of the prompts was not run: {x.reason}") for x in self.bad_lines
        ]
        notes += [
            ("", f"{cell.precision} did not run on line {row.line}: {cell.error}")
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
    """Format a ratio: `0.64×`, `310×`, or a dash where it is unknown."""
    if ratio is None or not math.isfinite(ratio):
        return "–"
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.2f}×"


def format_number(value: float | None, digits: int = 2) -> str:
    """Format a number with so many decimals, or as a dash where it is unknown."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_bits(bits: float | None) -> str:
    """Format headroom: `4.1 bits`, `−1.9 bits`, `not finite`, or a dash where it is unknown."""
    if bits is None:
        return "–"
    return "not finite" if bits <= SPOILT else f"{bits:.1f}".replace("-", "−")


def find_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None without any."""
    known = [x for x in values if x is not None]
    return statistics.median(known) if known else None


def summarise_measure(cells: Sequence[Cell], name: str) -> tuple[float | None, float | None]:
    """Return the median and the worst value of a measure; for PSNR and SSIM the least is the worst."""
    values = [getattr(cell.measures, name) for cell in cells if cell.measures is not None]
    known = [x for x in values if x is not None]
    worst = min if name in ("psnr_db", "ssim") else max
    return find_median(known), worst(known, default=None)


def find_tightest(cells: Sequence[Cell]) -> tuple[float | None, str]:
    """Return the least headroom over prompts, in bits, and its place; `SPOILT` for NaN or Inf."""
    ran = [cell for cell in cells if not cell.error]
    known = [(cell.headroom_bits, cell.tightest) for cell in ran if cell.headroom_bits is not None]
    if len(known) < len(ran):
        return SPOILT, ""
    return min(known, key=lambda found: found[0], default=(None, ""))

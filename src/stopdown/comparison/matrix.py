"""`compare`: run a matrix of prompts by precisions cell by cell, so that it can be resumed.

Each prompt (a row) runs in every precision. The order of precisions alternates from row to row, so that a
machine that gets warm or busy slows all of them equally. Noise is drawn on the CPU from the seed, so that
each precision gets the same numbers, rounded. Each finished cell is saved. When a row is complete, its
cells are measured against the reference, and only the measures and small pictures are kept. A second start
with the same request resumes after the last finished cell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.argument_types import check_type
from stopdown.batch.jobs import describe_request
from stopdown.comparison.cells import (
    Outcome,
    fail_cell,
    make_sheet,
    read_outcome,
    run_cell,
    share_bytes,
    write_outcome,
)
from stopdown.comparison.measures import (
    draw_heats,
    find_parting,
    join_heats,
    measure_calls,
    measure_frames,
    measure_latents,
    measure_values,
)
from stopdown.comparison.precision_lists import parse_precisions
from stopdown.comparison.records import Cell, Comparison, Heat, Row, Thresholds, Variant
from stopdown.comparison.subjects import Run, Subject, describe_subject, explain_meaning
from stopdown.comparison.verdicts import (
    choose_reference,
    compare_pairs,
    judge_cell,
    judge_variant,
    rank_precisions,
    recommend,
)
from stopdown.component_calls.components import explain_run
from stopdown.devices.device_choice import name_device
from stopdown.devices.environment import describe_machine, require_package
from stopdown.errors import InputError, OptionError, describe_error
from stopdown.files.json_files import UnreadableError, read_json_table
from stopdown.files.outputs import explain_refusal, written_beside
from stopdown.frames.media import to_uint8
from stopdown.operations import keeps_clamps
from stopdown.pipelines.requests import MEDIA, Request, check_request
from stopdown.plans.plan_files import read_class_versions, write_plan
from stopdown.plans.precision import write_request
from stopdown.records import Plan, convert_record, from_json, to_json
from stopdown.runtime.session import tell_calls
from stopdown.sources.hub import Progress
from stopdown.sources.library_messages import quiet_libraries

if TYPE_CHECKING:
    import torch

Prompt = tuple[int, str]
"""Line number and text of a prompt."""


@dataclass(frozen=True)
class _KeptRow:
    """Results of one prompt in all precisions, as saved to resume an interrupted comparison.

    Attributes:
        row: the results.
        heats: headroom maps by precision.
        peak_source: how peak memory was measured.
    """

    row: Row
    heats: dict[str, tuple[Heat, ...]]
    peak_source: str
    elapsed_s: float


@dataclass
class _Matrix:
    """State of a running comparison of prompts (rows) in several precisions.

    Attributes:
        names: the precisions.
        folder: where the finished runs, and the rows measured from them, are saved.
        ranked: the precisions, most precise first.
        runs: functions that run a program other than a pipeline, one for each row.
    """

    subject: Subject
    request: Request
    prompts: Sequence[Prompt]
    names: Sequence[str]
    thresholds: Thresholds
    folder: Path
    progress: Progress
    ranked: Sequence[str] = ()
    runs: Sequence[Run] = ()
    variants: dict[str, Variant] = field(default_factory=dict)
    looked: set[str] = field(default_factory=set)

    def run(self) -> list[_KeptRow]:
        rows = []
        for index, (line, text) in enumerate(self.prompts):
            path = self.folder / f"row-{_hash(text, self.request.seed + index)}.json"
            if path.exists():
                found = from_json(path.read_bytes(), _KeptRow)
                row = dataclasses.replace(found.row, line=line)  # lines may have been put before it
                rows.append(dataclasses.replace(found, row=row))
                continue
            kept = self._run_row(index, line, text)
            with written_beside(path) as part:
                part.write_text(to_json(kept), encoding="utf-8")
            shutil.rmtree(self._row_folder(index), ignore_errors=True)
            rows.append(kept)
        return rows

    def _row_folder(self, index: int) -> Path:
        text = self.prompts[index][1]
        return self.folder / f"cells-{_hash(text, self.request.seed + index)}"

    def _run_row(self, index: int, line: int, text: str) -> _KeptRow:
        folder = self._row_folder(index)
        folder.mkdir(exist_ok=True)
        order = list(self.names) if index % 2 == 0 else list(reversed(self.names))
        request = dataclasses.replace(
            self.request, prompt=text or None, seed=self.request.seed + index
        )
        for place, name in enumerate(order):
            path = folder / f"{_hash(name, 0)}.msgpack"
            done, total = index * len(order) + place, len(self.prompts) * len(self.names)
            what = f"{name}, prompt {index + 1} of {len(self.prompts)}, run {done + 1} of {total}"
            self.progress("compare", what, done, total)
            if not path.exists():
                write_outcome(self._run_cell(name, request, index), path)
        outcomes = {name: read_outcome(folder / f"{_hash(name, 0)}.msgpack") for name in order}
        return self._measure_row(outcomes, line, text, request.seed)

    def _run_cell(self, name: str, request: Request, index: int) -> Outcome:
        variant = self.variants.get(name, Variant(name, explain_meaning(name)))
        if variant.error:
            return fail_cell(name, variant.error)
        try:
            with quiet_libraries():
                opened = self.subject.open(name, self.folder)
        except Exception as error:  # reported in every cell of it; the others go on
            said = describe_error(error)
            self._keep_variant(dataclasses.replace(variant, error=said))
            return fail_cell(name, said)
        self._keep_variant(
            dataclasses.replace(
                variant,
                load_s=variant.load_s or opened.load_s,
                weights_bytes=opened.weights_bytes,
                decisions=opened.loaded.decisions,
                plan=opened.plan,
            )
        )

        is_new = name not in self.looked  # where NaN begins is looked for once
        self.looked.add(name)
        device = self.subject.device
        run = self.runs[index] if self.runs else None
        made = run_cell(
            opened, name, request, device, tell_calls(self.progress), names_culprit=is_new, run=run
        )
        offloader = opened.loaded.offloader
        if offloader is not None:  # as it ended: a call that ran out of memory steps down
            strategy = offloader.taken.strategy.name
            self._keep_variant(dataclasses.replace(self.variants[name], strategy=strategy))
        return made

    def _keep_variant(self, variant: Variant) -> None:
        if self.variants.get(variant.name) != variant:
            self.variants[variant.name] = variant
            with written_beside(self.folder / "variants.json") as part:
                part.write_text(to_json(self.variants), encoding="utf-8")

    def read_variants(self) -> None:
        """Load the precisions' records from an interrupted start; ones that failed are tried again."""
        path = self.folder / "variants.json"
        with contextlib.suppress(UnreadableError, InputError):  # they are found anew
            for name, plain in read_json_table(path).items():
                variant = convert_record(plain, Variant)
                self.variants[name] = dataclasses.replace(variant, error="")

    def _measure_row(
        self, outcomes: dict[str, Outcome], line: int, text: str, seed: int
    ) -> _KeptRow:
        cells = [outcomes[name].cell for name in self.names]
        reference = outcomes[choose_reference(cells, self.ranked)]
        most_bytes = share_bytes(len(self.prompts) * len(self.names))
        measured = [self._measure(outcomes[name], reference, most_bytes) for name in self.names]
        row = Row(line, text, seed, reference.cell.precision, tuple(measured))
        heats = {name: draw_heats(outcomes[name].trace) for name in self.names}
        sources = [outcome.peak_source for outcome in outcomes.values() if outcome.peak_source]
        elapsed_s = sum(cell.elapsed_s for cell in cells)
        return _KeptRow(row, heats, sources[0] if sources else "", elapsed_s)

    def _measure(self, outcome: Outcome, reference: Outcome, most_bytes: int) -> Cell:
        cell, frames = outcome.cell, outcome.frames
        if frames is None:
            return judge_cell(cell, reference.cell, self.thresholds)
        is_picture = frames.ndim > 1
        if is_picture:
            cell = dataclasses.replace(cell, sheet=make_sheet(to_uint8(frames), most_bytes))
        other = reference.frames
        if outcome is reference or other is None or other.shape != frames.shape:
            return judge_cell(cell, reference.cell, self.thresholds)
        measures, maps = measure_values(frames, other), None
        if is_picture:
            measures, maps = measure_frames(frames, other)
        shown = None
        if maps is not None:
            shown = make_sheet((maps * 255).round().astype("uint8"), most_bytes // 3)
        known = self.variants.get(cell.precision)
        scaled = known is not None and known.plan is not None
        cell = dataclasses.replace(
            cell,
            measures=measures,
            latents_rel_err=measure_latents(outcome.trace.latents, reference.trace.latents),
            calls=measure_calls(outcome.trace, reference.trace),
            parting=find_parting(outcome.trace, reference.trace, scaled=scaled),
            difference=shown,
        )
        return judge_cell(cell, reference.cell, self.thresholds)


def compare(
    pipe_or_source: Any,
    prompts: str | Run | Sequence[str | Prompt | Run],
    precisions: str | Sequence[str | torch.dtype | Plan] = "fp32,bf16,fp16-plain,fp16",
    *,
    request: Request | None = None,
    thresholds: Thresholds | None = None,
    device: str | torch.device = "auto",
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Run the same prompts, seeds and noise in several precisions, and measure each against the best.

    Args:
        pipe_or_source: a Diffusers pipeline, which is copied and left unchanged; or a Hub id,
            Diffusers folder, single safetensors file, bundled model, or `Source`; or another program
            that `guard` accepts, which is cast in place for each run and restored at the end; or
            the result of `describe_subject` for one of these.
        prompts: one text, several, or pairs of a line number and a text; an empty text for a pipeline
            without a prompt. For a program other than a pipeline: a function without arguments that
            runs it once and returns pictures, arrays or tensors, or several such functions. PyTorch's
            seed is set before each run.
        precisions: `fp32`, `bf16`, `fp16` (rescaled), `fp16-plain` (nothing repaired), `autocast` (fp32
            weights under `torch.autocast` in fp16), `clamp` (plain fp16 with every layer's output
            clamped to ±65504), a `Plan` or the path of its file, `auto`, or by component:
            `transformer=bf16,vae=fp32`, in a text with others `transformer=bf16+vae=fp32`.
        request: sizes, steps, guidance and a picture or video to start from. Its seed is that of the
            first prompt; each further prompt has the next seed.
        thresholds: limits within which two pictures count as the same.
        device: `auto`, `cuda`, `cuda:1`, `mps` or `cpu`; ignored for a subject, which has its own.
        folder: folder for finished cells, from which a second start resumes; None for a temporary one.
        progress: called with the stage, the item, and the done and total counts.

    Raises:
        InputError: texts were given for a program that is not a pipeline, or functions for a pipeline.
        OptionError: a precision is unknown, or the pipeline does not accept the request.
        SourceError: the model is missing, damaged or refused.

    Cost: a run for each prompt and precision; on disk, the latents of every step of one row.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 6e4 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> program = {"denoiser": module}
        >>> compared = stopdown.compare(program, lambda: module(x), "fp32,fp16-plain,fp16")
        >>> [(variant.name, variant.verdict) for variant in compared.variants]
        [('fp32', 'reference'), ('fp16-plain', 'broken'), ('fp16', 'same')]
    """
    asked = check_request("compare", request) or Request()
    limits = thresholds or Thresholds()
    check_type(
        "compare(thresholds=...)",
        limits,
        Thresholds,
        "They are stopdown.comparison.records.Thresholds.",
        "Leave them out, or use thresholds=Thresholds(...).",
    )
    device = name_device("compare", device) or "auto"
    numbered, runs = number_prompts(prompts)
    if not runs:  # pictures are compared by it
        require_package("torchmetrics", "compare", "Comparing pictures")
    told = progress or (lambda stage, what, done, total: None)
    first = dataclasses.replace(asked, prompt=(numbered[0][1] or None) if numbered else None)
    with ExitStack() as stack:
        if folder is None:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="stopdown-compare-"))
            folder = made
        folder = Path(folder)
        names = _name_precisions(precisions, folder)
        subject = (
            pipe_or_source
            if isinstance(pipe_or_source, Subject)
            else describe_subject(pipe_or_source, first, device=device, progress=told, runs=runs)
        )
        stack.callback(subject.close)
        needs_clamp = any(map(keeps_clamps, subject.classes))
        place = folder / _sign_request(subject, asked, limits, names, len(numbered))
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_refusal(folder, error, "with folder=...") from error
        ranked = rank_precisions(names, needs_clamp=needs_clamp)
        matrix = _Matrix(subject, asked, numbered, names, limits, place, told, ranked, runs)
        matrix.read_variants()
        kept = matrix.run()
        return _conclude(matrix, kept, needs_clamp)


def number_prompts(
    given: str | Run | Sequence[str | Prompt | Run],
) -> tuple[list[Prompt], list[Run]]:
    """Number the prompts, and list the functions that run a program other than a pipeline.

    The prompt of a function is an empty text. A single text or function counts as a list of one.
    """
    listed: Any = [given] if isinstance(given, str) or callable(given) else given
    expected = "A prompt is a text; a program that is no pipeline is run by a function."
    remedy = 'Use compare(pipe, ["a red circle"]).'
    check_type("compare(prompts)", listed, (Sequence, Set), expected, remedy)
    if not listed:
        raise OptionError("No prompts were given.", expected=expected, remedy=remedy)
    for one in listed:
        is_pair = isinstance(one, tuple) and len(one) == 2
        if not (callable(one) or (is_pair and isinstance(one[0], int) and isinstance(one[1], str))):
            check_type("compare(prompts)", one, str, expected, remedy)
    runs = [one for one in listed if callable(one)]
    if 0 < len(runs) < len(listed):
        raise explain_run("Texts and functions were given together.", "compare")
    texts = ["" if callable(one) else one for one in listed]
    return [(i, x) if isinstance(x, str) else x for i, x in enumerate(texts, 1)], runs


def _name_precisions(given: Any, folder: Path) -> tuple[str, ...]:
    """Return the names of the precisions to compare.

    The name of a dtype is that of its format. A `Plan` is written into the folder, and its path is its
    name.
    """
    names = []
    for one in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(one, Plan):
            folder.mkdir(parents=True, exist_ok=True)
            one = write_plan(one, folder / f"plan-{one.seal[:12]}.json")
        names.append(write_request(one))
    return parse_precisions(names)


def _conclude(matrix: _Matrix, kept: Sequence[_KeptRow], needs_clamp: bool) -> Comparison:
    rows, subject = [entry.row for entry in kept], matrix.subject
    variants = []
    for name in matrix.names:
        heats = join_heats(entry.heats.get(name, ()) for entry in kept)
        known = matrix.variants.get(name, Variant(name, explain_meaning(name)))
        variants.append(judge_variant(dataclasses.replace(known, heats=heats), rows))
    best, headline = recommend(variants, str(subject.device), len(rows))
    references = [row.reference for row in rows]
    reference = max(references, key=references.count) if references else matrix.ranked[0]
    return Comparison(
        source=subject.name,
        fingerprint=subject.fingerprint,
        pipeline=subject.pipeline,
        request=list_request_fields(matrix.request),
        command="",
        device=str(subject.device),
        device_reason=subject.device.reason,
        machine=describe_machine(),
        thresholds=matrix.thresholds,
        reference=reference,
        reference_reason=_explain_reference(reference, matrix.ranked, needs_clamp),
        recommended=best,
        headline=headline,
        reasons=tuple(compare_pairs(rows, matrix.names)),
        variants=tuple(variants),
        rows=tuple(rows),
        bad_lines=(),
        peak_source=next((entry.peak_source for entry in kept if entry.peak_source), ""),
        elapsed_s=sum(entry.elapsed_s for entry in kept),
    )


def _explain_reference(reference: str, ranked: Sequence[str], needs_clamp: bool) -> str:
    if needs_clamp:
        return (
            f"A clamp at fp16's maximum is part of this model, so {reference}, where the clamp "
            "acts, is its reference, and unclamped fp32 isn't."
        )
    if reference == ranked[0]:
        return f"{reference} is the most precise of those compared."
    return f"{reference} is the most precise of those compared whose pictures are sound."


def list_request_fields(request: Request) -> dict[str, Any]:
    plain = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    media = {name: "given" for name in MEDIA if plain[name] is not None}
    own = {"arguments": sorted(request.arguments) or None}
    return {k: v for k, v in {**plain, **media, **own}.items() if v is not None and k != "prompt"}


def _sign_request(
    subject: Subject, request: Request, thresholds: Thresholds, names: Sequence[str], count: int
) -> str:
    """Return a hash of everything that must be unchanged for a comparison to resume."""
    plans = [Path(n).read_text(encoding="utf-8") for n in names if Path(n).is_file()]
    given = [getattr(request, name) for name in MEDIA]
    media = ["" if x is None else hashlib.sha256(x.tobytes()).hexdigest() for x in given]
    plain = [
        subject.name,
        subject.fingerprint,
        subject.pipeline,
        subject.identity,
        str(subject.device),
        describe_request(request),
        dataclasses.asdict(thresholds),
        list(names),
        count,
        plans,
        media,
        read_class_versions(),
    ]
    return f"compare-{_hash(json.dumps(plain, sort_keys=True, default=str), 0)}"


def _hash(text: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{text}".encode(errors="surrogatepass")).hexdigest()[:16]

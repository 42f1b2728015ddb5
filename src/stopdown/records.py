"""Plain data that outlives a process: what was decided, what happened, what was found.

All records are frozen dataclasses, go to JSON and come back unchanged, and carry a schema number.
Nothing here sees a tensor, so a report can be made without torch.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stopdown.errors import InputError
from stopdown.files.json_files import UnreadableError, parse_json, read_small_file
from stopdown.number_formats import format_bytes
from stopdown.record_display import Displayed, Summary
from stopdown.scaling_records import Operands as Operands
from stopdown.scaling_records import ResidualStream as ResidualStream
from stopdown.scaling_records import Scaling as Scaling
from stopdown.scaling_records import Trial as Trial

SCHEMA = 1

Record = TypeVar("Record")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, repr=False)
class Finding(Displayed):
    """Something that a user should look at.

    Attributes:
        kind: short name of the class of finding: `black-frames`.
        module_path: `component:dotted.path`, a component, or a file.
        evidence: what was measured, with numbers.
        remedy: what to type or do.
        why: what that leads to, and why.
        severity: `error` (it raises), `wrong` (NaN, black or other values), `slow`, or `note`.
    """

    kind: str
    module_path: str
    evidence: str
    remedy: str
    why: str = ""
    severity: str = "wrong"


@dataclass(frozen=True, repr=False)
class CheckRecord(Displayed):
    """What a check found.

    Attributes:
        source: the model as it was named.
        device: what it was judged for.
        precisions: component → format that it was judged in.
        findings: worst first.
        mended: what `--fix` did, in whole sentences.
        elapsed_s: seconds in all.
        judged: why in those precisions, where none was asked for, a sentence.
    """

    source: str
    device: str
    precisions: dict[str, str]
    findings: tuple[Finding, ...]
    mended: tuple[str, ...]
    elapsed_s: float
    judged: str = ""
    kind: str = "check"
    schema: int = field(default=SCHEMA)


@dataclass(frozen=True, repr=False)
class FilePart(Displayed):
    """One component of a weight file.

    Attributes:
        component: as the names in the file begin: `model.diffusion_model`; "" for all of a file.
        weights: how many; the scales of one belong to it.
        stored: how they are stored, with the bytes of each, most first: `scaled fp8`, `Q8_0`, `bf16`.
        amax: largest finite magnitude, scales included; None where none can be unpacked.
        largest: the weight that has it.
        scales: smallest and largest magnitude of scales; empty without any.
        unread: weights whose values cannot be unpacked here.
    """

    component: str
    weights: int
    stored: dict[str, int]
    amax: float | None
    largest: str
    scales: tuple[float, ...] = ()
    unread: int = 0


@dataclass(frozen=True, repr=False)
class FileCheck(Displayed):
    """What a weight file holds, found without knowing the model.

    Attributes:
        source: the file as it was named.
        format: `safetensors`, `GGUF flux`.
        contents: what it is by its names, a sentence.
        size_bytes: of the file.
        device: what it was judged for; "" for all that are known.
        parts: its components.
        rescaled: what it says of weights that are rescaled already; "" for nothing.
        findings: worst first.
        elapsed_s: seconds in all.
    """

    source: str
    format: str
    contents: str
    size_bytes: int
    device: str
    parts: tuple[FilePart, ...]
    rescaled: str
    findings: tuple[Finding, ...]
    elapsed_s: float
    kind: str = "file-check"
    schema: int = field(default=SCHEMA)


@dataclass(frozen=True, repr=False)
class CallSummary(Displayed):
    """All calls of one component in one run.

    Attributes:
        component: `transformer`, `vae.decode`.
        stage: `encode`, `denoise` or `decode`; `call` where nothing is known of it.
        calls: how often it was called.
        elapsed_s: seconds in those calls.
        precisions: formats that its floating parameters really had, most of them first.
        non_finite: calls whose output held NaN or Inf.
        headroom_bits: least between what it returned in fp16 and fp16's maximum; None without fp16.
    """

    component: str
    stage: str
    calls: int
    elapsed_s: float
    precisions: tuple[str, ...]
    non_finite: int
    headroom_bits: float | None = None

    def add(self, other: CallSummary) -> CallSummary:
        """Add the statistics of later calls, whose precisions come first."""
        known = [x for x in (self.headroom_bits, other.headroom_bits) if x is not None]
        return dataclasses.replace(
            self,
            calls=self.calls + other.calls,
            elapsed_s=self.elapsed_s + other.elapsed_s,
            precisions=tuple(dict.fromkeys((*other.precisions, *self.precisions))),
            non_finite=self.non_finite + other.non_finite,
            headroom_bits=min(known, default=None),
        )


@dataclass(frozen=True, repr=False)
class StepDown(Displayed):
    """A call that ran out of memory, and what it was run again with.

    Attributes:
        component: whose call: `vae.decode`.
        before: the strategy that was not enough: `resident`.
        after: the one that it was run again with: `resident+tiling`.
        evidence: what the allocator said.
    """

    component: str
    before: str
    after: str
    evidence: str


@dataclass(frozen=True, repr=False)
class Reduction(Displayed):
    """A video or picture that was made smaller than asked for, so that it fits.

    Attributes:
        asked: `49 frames of 480x720`.
        made: `25 frames of 480x720`.
        reason: a whole sentence.
    """

    asked: str
    made: str
    reason: str


@dataclass(frozen=True, repr=False)
class MemoryPlan(Displayed):
    """How a run stays within a limit of memory, and what it is predicted to take.

    Attributes:
        asked: an amount, `8GiB`; or `auto`, what the device has: on the CPU what is free.
        share: runs that the device has at the same time, which `auto` divides by.
        limit_bytes: what `asked` comes to; 0 until a run is placed.
        strategy: `resident`, `component+tiling`; "" until a run is placed.
        peak_bytes: most bytes of tensors on the device at a time, weights included.
        reserved_bytes: what the device's allocator takes for them; 0 where it keeps nothing.
        stored_bytes: weights that wait in host memory or in their files.
        seconds: of the run; None where the speed of the device is not known.
        reason: why so, a whole sentence.
    """

    asked: str = "auto"
    share: int = 1
    limit_bytes: int = 0
    strategy: str = ""
    peak_bytes: int = 0
    stored_bytes: int = 0
    seconds: float | None = None
    reason: str = ""
    reserved_bytes: int = 0


@dataclass(frozen=True, repr=False)
class MemoryRow(Displayed):
    """One strategy and what it is predicted to take.

    Attributes:
        strategy: its name: `block+tiling`.
        peak_bytes: most bytes of tensors on the device at a time.
        component: whose call that is; "" between calls.
        moved_bytes: weights that are brought to the device in the run.
        stored_bytes: weights that wait in host memory or on disk.
        time_ratio: time over that of everything resident, estimated; None when the device's speed is
            not known.
        precision: what it computes in: `rescaled fp16`, `fp16 with fp32 modules`, `fp32`.
        reserved_bytes: what the device's allocator takes for them; 0 where it keeps nothing.
    """

    strategy: str
    peak_bytes: int
    component: str
    moved_bytes: int
    stored_bytes: int
    time_ratio: float | None = None
    precision: str = ""
    reserved_bytes: int = 0


@dataclass(frozen=True, repr=False)
class MemoryForecast(Displayed):
    """How a run fits into a limit, predicted without weights.

    Attributes:
        source: the model as it was named.
        device: what it was predicted for.
        precisions: component to format, of the chosen way to compute; of the first when none fits.
        request: sizes and steps of the run.
        limit_bytes: what was allowed.
        rows: every strategy of every way, in each those that cost the least time first.
        chosen: name of the strategy that takes the least time among those that fit; "" when none
            does.
        reasons: whole sentences.
        elapsed_s: seconds that the prediction took.
        precision: name of the way that was chosen; "" when nothing fits.
        flag: what `--precision` has to say for it.
        bits: name of a way to the significant bits of its coarsest format.
        remarks: name of a way to what else is to be said of it, a sentence.
        reduced: the largest smaller size that fits, when nothing does at the size asked for.
        answer: one line.
        fits: whether something stays within the limit.
        peak_bytes: of what was chosen; 0 when nothing fits.
        reserved_bytes: of what was chosen, as in its row.
        host_bytes: weights that wait in host memory; 0 if they wait in files.
        host_limit_bytes: what they may take; 0 on a CPU.
        seconds: estimated for the run; None when the device's speed is not known.
        command: what makes that run, or one of the smaller size; "" when nothing fits.
        download_bytes: files of a model on the Hub that are not on this computer yet.
        decisions: the precision of each component or call, of the chosen way to compute, with its reasons;
            without exponents.
    """

    source: str
    device: str
    precisions: dict[str, str]
    request: dict[str, Any]
    limit_bytes: int
    rows: tuple[MemoryRow, ...]
    chosen: str
    reasons: tuple[str, ...]
    elapsed_s: float
    precision: str = ""
    flag: str = ""
    bits: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    reduced: Reduction | None = None
    answer: str = ""
    fits: bool = True
    peak_bytes: int = 0
    host_bytes: int = 0
    host_limit_bytes: int = 0
    seconds: float | None = None
    command: str = ""
    download_bytes: int = 0
    decisions: tuple[ComponentPlan, ...] = ()
    reserved_bytes: int = 0
    kind: str = "memory"
    schema: int = field(default=SCHEMA)


@dataclass(frozen=True, repr=False)
class Repair(Displayed):
    """What was done about one fault.

    Attributes:
        component: whose call gave it: `transformer`, `vae.decode`; or `pipeline`, whose result it was.
        module_path: where it began: `transformer:blocks.1.ff`; the component when that is unknown.
        kind: `range`, `clamped`, `undefined`, `kernel`, `written`, `weight`, `input`, `intermittent`,
            `dtypes`, `signature`, `unknown`.
        step: of the run, from 0; None outside of denoising.
        evidence: what was seen, in whole sentences.
        action: `rescaled`, `fp32-module`, `bf16`, `fp32`, `cast-inputs`, `replayed`, `none`.
        reason: why this one.
        tried: what was tried before and did not do, each with why.
        replays: how often the call was run again, the instrumented replay aside.
        elapsed_s: seconds that all of it took.
        verdict: what happened, in one sentence for people; "" where only the output is known.
    """

    component: str
    module_path: str
    kind: str
    step: int | None
    evidence: str
    action: str
    reason: str
    tried: tuple[str, ...] = ()
    replays: int = 0
    elapsed_s: float = 0.0
    verdict: str = ""


@dataclass(frozen=True, repr=False)
class JournalUse(Displayed):
    """What the journal of a run was good for.

    Attributes:
        folder: where it is.
        answered: calls that were answered from it.
        written: calls that were made and written to it.
        bytes: its size.
        notes: why it ended early or was made anew, in whole sentences.
        components: those whose calls were answered from it, and how many.
    """

    folder: str
    answered: int
    written: int
    bytes: int
    notes: tuple[str, ...] = ()
    components: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Describe the answered and written calls by component, and the remarks."""
        known, made = (f"{n} call{'s' * (n != 1)}" for n in (self.answered, self.written))
        whose = ", ".join(f"{count} of {name}" for name, count in self.components.items())
        known += f" ({whose})" * bool(whose)
        notes = "".join(f" {note}" for note in self.notes)
        size = format_bytes(self.bytes)
        return f"{known} answered from {self.folder}, {made} written ({size}).{notes}"


@dataclass(frozen=True, repr=False)
class BlockMaximum(Displayed):
    """The largest magnitude that one block of a component returned in one step.

    Attributes:
        component: `transformer`, `vae.decode`.
        path: of the block in it: `transformer_blocks.7`.
        step: of the run, from 0; None outside of denoising.
        precision: format of what it returned: `fp16`.
        amax: over all calls of that step; None when it was not finite.
    """

    component: str
    path: str
    step: int | None
    precision: str
    amax: float | None


@dataclass(frozen=True, repr=False)
class GuardRecord(Displayed):
    """What a guard saw and did so far.

    Attributes:
        pipeline: class of the pipeline, or of another program; "" for calls without one.
        calls: what each component did.
        repairs: one for each fault, in order.
        host_reads: how often a value was read from the device by the watch.
        unwatched: what could not be watched, each with the reason.
        own_s: seconds spent in Stopdown's own code around the calls, repairs included.
        maxima: largest magnitudes by block and step; empty unless they were asked for.
        journal: what the journal was good for; None without one.
        reused: repairs of an earlier guard that were in force from the start.
        uncertified: inputs beyond the limits of the plan's certificate: which calls it does not cover.
        findings: frames that the pipeline returned black, grey, frozen or as noise; empty where
            someone else looks at them.
    """

    pipeline: str
    calls: tuple[CallSummary, ...]
    repairs: tuple[Repair, ...] = ()
    host_reads: int = 0
    unwatched: tuple[str, ...] = ()
    own_s: float = 0.0
    maxima: tuple[BlockMaximum, ...] = ()
    journal: JournalUse | None = None
    reused: tuple[str, ...] = ()
    uncertified: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    kind: str = "guard"
    schema: int = field(default=SCHEMA)


@dataclass(frozen=True, repr=False)
class ScriptRecord(Displayed):
    """What a script did with its pipelines and modules under the guard.

    Attributes:
        script: its path, or the name of its module.
        arguments: what it was given.
        exit_code: of the script itself.
        runs: one for each call of a pipeline, in order.
        findings: what should be looked at in what the pipelines returned.
        remarks: what was done otherwise than the script says, and what could not be guarded.
        unrepaired: True when a fault stayed, or ended a call.
        elapsed_s: seconds in all.
        modules: the calls of modules that it made without a pipeline; None for none.
        processes: that it started with `multiprocessing`; what they call is not counted here.
    """

    script: str
    arguments: tuple[str, ...]
    exit_code: int
    runs: tuple[GuardRecord, ...]
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...]
    unrepaired: bool
    elapsed_s: float
    modules: GuardRecord | None = None
    processes: int = 0
    kind: str = "script"
    schema: int = field(default=SCHEMA)


@dataclass(frozen=True, repr=False, kw_only=True)
class RunRecord(GuardRecord):
    """What one run really did: what its guard saw and did, and what it was asked for and left behind.

    Attributes:
        source: the model as it was named.
        fingerprint: sha256 over its safetensors headers, empty for a pipeline in memory.
        request: the options of the run, as given.
        device: where it ran: `cuda:0 (Tesla V100-SXM2-16GB)`.
        device_reason: why there.
        machine: versions and hardware.
        decisions: how each component call ran, with the reason; without exponents.
        stages_s: seconds by stage: load, encode, denoise, decode, repair, other, write.
        peak_bytes: highest memory during the run; how it was read is in `peak_source`.
        output: path of the result, None when there is none.
        elapsed_s: seconds in all.
        updated_plan: file of the plan that the repairs were written into; None when it was left.
        strategy: how it stayed within `--memory`, at its end; "" when no limit was asked for.
        steps_down: calls that ran out of memory, and what they were run again with.
        item: hash of what determines an item of a batch; "" outside of one.
        plan: seal of the plan that an item of a batch was made by; "" without one.
        preview: a few small frames of an item of a batch, WebP in base64; "" outside of one.
        memory: how it was to stay within the device's memory, and what was predicted; None without a limit.
        forecast: what was shown before its weights were downloaded; None where they were here.
        sound: length, channels and samples per second of the sound that was made; "" without any.
    """

    source: str
    fingerprint: str
    request: dict[str, Any]
    device: str
    device_reason: str
    machine: dict[str, Any]
    decisions: tuple[ComponentPlan, ...]
    stages_s: dict[str, float]
    peak_bytes: int
    peak_source: str
    output: str
    elapsed_s: float
    updated_plan: str | None = None
    strategy: str = ""
    steps_down: tuple[StepDown, ...] = ()
    item: str = ""
    plan: str = ""
    preview: str = ""
    memory: MemoryPlan | None = None
    forecast: MemoryForecast | None = None
    sound: str = ""
    kind: str = "run"

    def summarise(self) -> Summary:
        """Summarise a run as the card that `generate` prints."""
        headings = ("component", "stored", "ran in", "calls", "seconds", "NaN/Inf")
        stored = {decision.component: decision.stored or "?" for decision in self.decisions}
        rows = tuple(
            (
                call.component,
                stored.get(call.component, "?"),
                " + ".join(call.precisions),
                str(call.calls),
                f"{call.elapsed_s:.1f}",
                str(call.non_finite),
            )
            for call in self.calls
        )
        notes = [*self.list_reasons(), *self.list_costs()]
        notes += [("", line) for line in self.list_limits()]
        notes += [("repaired", line) for line in self.list_repairs()]
        notes += [("journal", self.journal.describe())] if self.journal else []
        notes += [(found.kind, f"{found.evidence} {found.remedy}") for found in self.findings]
        return Summary(headings, rows, tuple(notes))

    @property
    def verdict(self) -> str:
        """The verdict on the output, in one sentence."""
        if self.findings:
            return self.findings[0].evidence
        if not self.repairs:
            return "no NaN or Inf, nothing repaired."
        names = dict.fromkeys(x.component for x in self.repairs if x.action != "none")
        if not names:
            return "a component returned NaN or Inf, and was not repaired."
        return f"repaired {', '.join(names)}; the result is not affected."

    def list_reasons(self) -> list[tuple[str, str]]:
        """List each reason once, after the components it applies to."""
        called = {call.component for call in self.calls}
        return group_components(
            (x.component, x.reason) for x in self.decisions if x.component in called
        )

    def list_costs(self) -> list[tuple[str, str]]:
        """List the seconds by stage, the peak memory, and the sound."""
        shown = [name for name in _STAGES if name in self.stages_s]
        times = ", ".join(f"{name} {self.stages_s[name]:.1f} s" for name in shown)
        said = f"{self.elapsed_s:.1f} s ({times}). Stopdown's overhead: {self.own_s:.3f} s"
        memory = f"{format_bytes(self.peak_bytes)} ({self.peak_source})"
        costs = [("time", said), ("memory", memory)]
        return [*costs, ("sound", self.sound)] if self.sound else costs

    def list_limits(self) -> list[str]:
        """Describe the memory strategy and the calls repeated for lack of memory; empty without a limit."""
        if not self.strategy:
            return []
        limit = self.request.get("memory") or "auto"
        limit = "the device's memory" if limit == "auto" else limit
        lines = [f"predicted to fit in {limit}: {self.strategy}"]
        return lines + [
            f"{one.component} ran out of memory with {one.before}; run again with {one.after}"
            for one in self.steps_down
        ]

    def list_repairs(self) -> list[str]:
        """List the place, action, cost and reason of each repair."""
        return [
            f"{x.module_path}: {x.action}, {x.replays} call run again, {x.elapsed_s:.1f} s. {x.reason}"
            for x in self.repairs
        ]


_STAGES = ("prepare", "load", "place", "encode", "denoise", "decode", "repair", "other", "write")


@dataclass(frozen=True, repr=False)
class Accumulation(Displayed):
    """How torch sums inside products while a component is called.

    Attributes:
        fp16_accumulation: products of fp16 matrices may be summed in fp16; None leaves torch's switch.
    """

    fp16_accumulation: bool | None = None


@dataclass(frozen=True, repr=False)
class ComponentPlan(Displayed):
    """How one component runs, or one call of it, and why.

    Attributes:
        component: name in the pipeline: `transformer`, `vae`; a call of it, `vae.decode`; or, as a repair,
            a module in it, `transformer:blocks.1.ff`.
        class_name: class of its module; "" if nothing rests on that.
        weights: sha256 over names, shapes and samples of its values, equal in fp32 and as stored.
        precision: `fp16`, `bf16`, `fp32`, or `as loaded` for what is left alone.
        scaling: its exponents, what stays in fp32, and what they rest on; in force in fp16. None casts the
            component as if it had been loaded so.
        calls: how many calls were measured.
        prompts: how many prompts they came from.
        accumulation: switches of torch during its calls; None leaves them as they are.
        reasons: whole sentences.
        stored: format of most of its weights on disk; None when unknown.
        kept_fp32: parts that stay in fp32.
        code: functions on it that were not its classes' own.
    """

    component: str
    class_name: str = ""
    weights: str = ""
    precision: str = "fp32"
    scaling: Scaling | None = None
    calls: int = 0
    prompts: int = 0
    accumulation: Accumulation | None = None
    reasons: tuple[str, ...] = ()
    stored: str | None = None
    kept_fp32: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    @property
    def in_force(self) -> Scaling:
        """The exponents in force; empty for a format other than fp16."""
        return (self.scaling if self.precision == "fp16" else None) or Scaling()

    @property
    def reason(self) -> str:
        """All reasons as one text."""
        return " ".join(self.reasons)


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """How a checkpoint runs: the precision of each component, with exponents or without; also a file.

    Attributes:
        source: the model as it was named; the class of the pipeline when it was made in memory.
        fingerprint: sha256 over the checkpoint's files; empty for a pipeline in memory, and where nothing
            rests on the weights.
        pipeline: class of the pipeline that was measured.
        precision: what was asked for.
        versions: of the packages that the classes come from.
        components: one entry for each component with weights, or for each call of it.
        prompts: what was measured.
        steps: denoising steps of the measured runs.
        device: where it was measured.
        elapsed_s: seconds that it took.
        seal: sha256 over everything else but `chosen` and `memory`; it shows that a file was edited.
        chosen: what reasons call it: `plan.json`; `an automatic plan, because fp16 was requested`.
        memory: where the weights of a run are and at which size it runs; None places all of them on the
            device. It belongs to one run on one device, so files have none.
    """

    source: str
    fingerprint: str = ""
    pipeline: str = ""
    precision: str = "fp16"
    versions: dict[str, str] = field(default_factory=dict)
    components: tuple[ComponentPlan, ...] = ()
    prompts: tuple[str, ...] = ()
    steps: int = 0
    device: str = ""
    elapsed_s: float = 0.0
    seal: str = ""
    chosen: str = ""
    memory: MemoryPlan | None = None
    kind: str = "plan"
    schema: int = field(default=SCHEMA)

    @property
    def is_bare(self) -> bool:
        """Whether it holds precisions alone, and so applies to any weights."""
        rests_on = self.seal or self.fingerprint or any(x.class_name for x in self.components)
        return not rests_on

    def summarise(self) -> Summary:
        """Summarise each component in a row, with the reasons below."""
        headings = ("component", "runs in", "tensors", "exponents", "fp32 modules", "headroom")
        rows = tuple(map(_describe_entry, self.components))
        notes = ((entry.component, " ".join(entry.reasons)) for entry in self.components)
        return Summary(headings, rows, tuple(notes))


def _describe_entry(entry: ComponentPlan) -> tuple[str, ...]:
    scaling = entry.in_force
    exponents = scaling.exponents.values()
    return (
        entry.component,
        entry.precision,
        str(len({name.partition("[")[0] for name in scaling.exponents})),
        f"{min(exponents)}..{max(exponents)}" if exponents else "",
        str(len(scaling.fp32_modules)),
        "" if scaling.headroom_bits is None else f"{scaling.headroom_bits:.1f} bits",
    )


@dataclass(frozen=True, repr=False)
class ConvertedComponent(Displayed):
    """What a conversion wrote for one component.

    Attributes:
        component: name in the pipeline: `transformer`, `vae`.
        precision: `fp16`, or `as stored` for what was left as it was; `as stored, with its plan` where the
            configuration carries that.
        folded: tensors that were multiplied by powers of two.
        solved_anew: True when the exponents are not the plan's, because a file cannot hold those.
        fields: what was written into its configuration.
        eps_left: eps that no configuration reaches: place to the exponent it should have.
        effect: relative L2 error that this makes in the component's output, in fp32; 0.0 for bit for
            bit the same.
        calls: calls that the effect was measured on; 0 when nothing is left.
        kept_fp32: parts that plain libraries hold in fp32 once loaded, by their class.
        reasons: whole sentences.
        signatures: kinds of calls that the powers of two were found for.
        not_for: arguments that none of these calls has.
        values: activations in fp16.
        unproven: how many of them no bound keeps in range; nothing watches these without Stopdown.
    """

    component: str
    precision: str
    folded: int = 0
    solved_anew: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    eps_left: dict[str, int] = field(default_factory=dict)
    effect: float = 0.0
    calls: int = 0
    kept_fp32: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    signatures: tuple[str, ...] = ()
    not_for: tuple[str, ...] = ()
    values: int = 0
    unproven: int = 0


@dataclass(frozen=True, repr=False)
class Conversion(Displayed):
    """What a conversion wrote, for programs that know nothing of plans.

    Attributes:
        source: the model as it was named.
        output: the folder or file.
        plan: seal of the plan.
        components: one entry for each component with weights.
        load: how plain Diffusers loads it, as Python.
        unread: tensors of a single file that Diffusers does not read; they were copied.
        elapsed_s: seconds that it took.
        files: what was written into the folder besides this record, by path: bytes. Only a folder
            that holds these and nothing else is replaced by a later conversion.
        version: of Stopdown.
    """

    source: str
    output: str
    plan: str
    components: tuple[ConvertedComponent, ...]
    load: str
    unread: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    files: dict[str, int] = field(default_factory=dict)
    version: str = ""
    kind: str = "conversion"
    schema: int = field(default=SCHEMA)


@dataclass(frozen=True, repr=False)
class Clue(Displayed):
    """A line that a diagnosis rests on.

    Attributes:
        line: its number in the text, from 1; 0 for what was measured in a picture.
        text: the line, or the measurement.
        meaning: what it says.
    """

    line: int
    text: str
    meaning: str


@dataclass(frozen=True, repr=False)
class Alternative(Displayed):
    """Another fault that the same text can come from.

    Attributes:
        fault: its name: `vae-range`.
        meaning: what it is.
        run_next: the command that tells whether it is this one.
    """

    fault: str
    meaning: str
    run_next: str


@dataclass(frozen=True, repr=False, kw_only=True)
class Diagnosis(Displayed):
    """Why something failed, as far as a text or a picture shows it.

    Attributes:
        fault: the class of the failure: `dtype-mismatch`; `unknown`, or `none` for a healthy picture.
        meaning: what that class is.
        cause: the entry of the knowledge that it was recognised by.
        title: one sentence, with the values of the message.
        why: the explanation.
        evidence: the lines that count, the message first.
        frame: the deepest frame of a traceback in a model's code, "" when there is none.
        run: what the text names of the run: `PyTorch 2.9.1+cu130`, `RTX 2080 Ti`.
        remedy: what to type or do.
        run_next: commands that tell more.
        reports: `owner/repo#number` of the same failure.
        alternatives: other faults with the same message, likeliest first.
    """

    fault: str
    meaning: str
    cause: str = ""
    title: str
    why: str
    evidence: tuple[Clue, ...] = ()
    frame: str = ""
    run: tuple[str, ...] = ()
    remedy: tuple[str, ...]
    run_next: tuple[str, ...]
    reports: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    kind: str = "diagnosis"
    schema: int = field(default=SCHEMA)


@dataclass(frozen=True, repr=False)
class FormatHealth(Displayed):
    """How a device computes in one format.

    Attributes:
        name: `bf16`.
        state: `native`, `emulated`, `slow`, `broken` or `missing`.
        time_ratio: time of a product over that of fp32; measured here, or 1 over the peak rate of a
            profile; None when unknown.
        reason: what is known and what was measured, in whole sentences with the source.
    """

    name: str
    state: str
    time_ratio: float | None
    reason: str


@dataclass(frozen=True, repr=False)
class Outlook(Displayed):
    """What `auto` would choose for one component of a well-known model.

    Attributes:
        model: its name.
        component: `transformer`.
        precision: name of the format.
        planned: True when it would run by a plan of its own.
        reason: why, in whole sentences.
    """

    model: str
    component: str
    precision: str
    planned: bool
    reason: str


@dataclass(frozen=True, repr=False)
class KnownFit(Displayed):
    """Whether a run of a well-known model fits into a device's memory, by a stored forecast.

    Attributes:
        model: its name.
        size: of what it makes: `49 frames of 480x720`.
        precision: of its denoiser, in words: `fp16 with a plan`.
        strategy: the fastest that fits: `component+tiling`; "" where none does.
        peak_bytes: of that strategy, as the allocator reserves it; of the smallest where none fits.
        seconds: the least and the most that 50 steps take, by published rates and their error; empty where
            none are known.
    """

    model: str
    size: str
    precision: str
    strategy: str
    peak_bytes: int
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True, repr=False)
class DeviceHealth(Displayed):
    """What is known of one device.

    Attributes:
        device: its name.
        kind: `cuda`, `mps` or `cpu`.
        tried: True for a device of this machine, False for a profile.
        capability: CUDA compute capability: `7.0`; None elsewhere.
        memory_bytes: memory of the device, 0 when unknown.
        formats: how it computes in each.
        attention: formats that each kernel of attention takes, by its name.
        faults: what is known to go wrong on it, each with a remedy and a source.
        outlooks: what `auto` would choose.
        measured: what `stopdown bench` found on devices of the same name, a sentence for each model.
        missing: why this build of PyTorch cannot compute on it, and which can; "" when it can.
        answer: in which precision models run on it by default, in one sentence.
        fits: which well-known models its memory holds; none for a processor.
    """

    device: str
    kind: str
    tried: bool
    capability: str | None
    memory_bytes: int
    formats: tuple[FormatHealth, ...]
    attention: dict[str, tuple[str, ...]]
    faults: tuple[str, ...]
    outlooks: tuple[Outlook, ...]
    measured: tuple[str, ...] = ()
    missing: str = ""
    answer: str = ""
    fits: tuple[KnownFit, ...] = ()


@dataclass(frozen=True, repr=False)
class Switch(Displayed):
    """A switch of torch that changes what sums are taken in: its name, its value, what `True` means."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, repr=False)
class MachineHealth(Displayed):
    """What `stopdown doctor` found.

    Attributes:
        machine: versions and hardware.
        devices: each device that was looked at.
        switches: how accumulation is set.
        settings: environment variables that are set and change numbers.
        faults: known faults of the installed versions.
    """

    machine: dict[str, Any]
    devices: tuple[DeviceHealth, ...]
    switches: tuple[Switch, ...]
    settings: dict[str, str]
    faults: tuple[str, ...]
    kind: str = "machine"
    schema: int = field(default=SCHEMA)


def to_json(record: Any) -> str:
    """Encode a record as indented JSON text that is safe to print on a terminal.

    Bytes of file names that are not UTF-8 become U+FFFD.
    """
    try:
        content = msgspec.json.encode(record)
    except UnicodeEncodeError:
        content = msgspec.json.encode(_replace_bytes(msgspec.to_builtins(record)))
    text = msgspec.json.format(content, indent=2).decode()
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


_UNPRINTABLE = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys and JSON need not escape; outside of texts there is none of it."""


def _replace_bytes(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_replace_bytes(key): _replace_bytes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_bytes(item) for item in value]
    return value


def from_json(text: str | bytes, kind: type[Record]) -> Record:
    """Read a record from JSON text.

    Raises:
        InputError: the text is not such a record, or has another schema number.
    """
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        return convert_record(parse_json(content), kind)
    except UnreadableError as error:
        raise _refuse(kind, error) from error


def convert_record(raw: Any, kind: type[Record]) -> Record:
    """Convert decoded JSON to a record.

    Raises:
        InputError: it is not such a record, or has another schema number.
    """
    _check_header(raw, kind)
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refuse(kind, error) from error


def _refuse(kind: type, error: Exception) -> InputError:
    return InputError(
        f"The text is not a {kind.__name__}: {error}.",
        expected="A record is JSON as Stopdown writes it.",
        remedy="It may be cut off or edited; make it again.",
    )


def _check_header(raw: Any, kind: type) -> None:
    """Refuse another schema, another kind of record, and fields that would be ignored."""
    if not isinstance(raw, dict):
        return  # refused by its type
    fields = {entry.name: entry.default for entry in dataclasses.fields(kind)}
    fixed = {name: fields[name] for name in ("kind", "schema") if "schema" in fields}
    for name, value in fixed.items():
        if raw.get(name, value) != value:
            raise InputError(
                f"The {kind.__name__} has {name} {raw[name]!r:.60}.",
                expected=f"This version of Stopdown reads {name} {value!r} here.",
                remedy="Make it again with this version.",
            )
    unknown = sorted(name[:60] for name in set(raw) - set(fields))
    if unknown:
        raise InputError(
            f"The {kind.__name__} has fields that are unknown: {', '.join(unknown[:8])}.",
            expected="A record has the fields that this version of Stopdown writes.",
            remedy="Make it again with this version.",
        )


def describe_other(kind: str, path: Path) -> str:
    """Describe a file that is not a record of a kind; return "" when it is one, or is empty.

    Args:
        kind: `run`, `plan`, `comparison`…
        path: an existing file.
    """
    found = read_kind(path)
    if found is None:
        return "a file that Stopdown did not write as a record"
    return "" if found in ("", kind) else f"a record of the kind {found}"


def read_kind(path: Path) -> str | None:
    """Read the kind of record from a file; "" for an empty file, None for a file without one."""
    try:
        content = read_small_file(path, most_bytes=_MOST_BYTES)
        head = msgspec.json.decode(content, type=_Head) if content else _Head("", 0)
        return head.kind if head.schema is not None or head.kind == _WITHOUT_SCHEMA else None
    except (UnreadableError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


describe_no_run = functools.partial(describe_other, "run")
"""What a file holds that no run's record may replace; empty for one."""

_MOST_BYTES = 2**30
"""A comparison's record holds its pictures."""


class _Head(msgspec.Struct):
    """What every record says of itself. A certificate has no schema: its checker knows its fields."""

    kind: str
    schema: int | None = None


_WITHOUT_SCHEMA = "certificate"


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a record from a JSON file.

    Raises:
        InputError: the file cannot be read, or is not such a record.
    """
    try:
        content = read_small_file(path)
    except UnreadableError as error:
        raise InputError(
            f"The record {path} cannot be read: {error}.", remedy="Name a file that exists."
        ) from error
    return from_json(content, kind)


def group_components(named: Iterable[tuple[str, _Key]]) -> list[tuple[str, _Key]]:
    """Return each value once, after the names of the components that have it, joined by commas."""
    grouped: dict[_Key, list[str]] = {}
    for component, value in named:
        grouped.setdefault(value, []).append(component)
    return [(", ".join(names), value) for value, names in grouped.items()]

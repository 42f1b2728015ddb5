"""What happened in a run: calls, repairs, maxima, stages and faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stopdown.number_formats import format_bytes
from stopdown.record_display import Displayed, Summary
from stopdown.records.checks import Finding
from stopdown.records.json_text import SCHEMA
from stopdown.records.plans import (
    ComponentPlan,
    MemoryForecast,
    MemoryPlan,
    StepDown,
    group_components,
)


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
        shown = [name for name in STAGES if name in self.stages_s]
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


STAGES = ("prepare", "load", "place", "encode", "denoise", "decode", "repair", "other", "write")

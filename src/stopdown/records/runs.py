"""Records of runs: calls, repairs, activation maxima, times and faults."""

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
    """Statistics of all calls of one component in one run.

    Attributes:
        component: name of the call, such as `transformer` or `vae.decode`.
        stage: `encode`, `denoise` or `decode`; `call` if unknown.
        calls: number of calls.
        elapsed_s: seconds in those calls.
        precisions: formats that its floating parameters really had, the most frequent first.
        non_finite: number of calls whose output contained NaN or Inf.
        headroom_bits: smallest log2(65504 / output) of its fp16 outputs; None without any.
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
    """The response to one fault.

    Attributes:
        component: call with the fault, such as `transformer` or `vae.decode`; `pipeline` for its result.
        module_path: where the fault began, such as `transformer:blocks.1.ff`; the component if unknown.
        kind: `range`, `clamped`, `undefined`, `kernel`, `written`, `weight`, `input`, `intermittent`,
            `dtypes`, `signature`, `unknown`.
        step: of the run, from 0; None outside of denoising.
        evidence: the observation, in sentences.
        action: `rescaled`, `fp32-module`, `bf16`, `fp32`, `cast-inputs`, `replayed`, `none`.
        reason: for the action.
        tried: earlier attempts that failed, each with the reason.
        replays: number of repeated calls, without the instrumented replay.
        elapsed_s: seconds in all.
        verdict: the fault in one sentence for people; "" if only the output is known.
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

    @property
    def done(self) -> str:
        """The action in words: `inputs cast`."""
        words = {"cast-inputs": "inputs cast", "fp32-module": "one module in fp32"}
        return words.get(self.action, self.action)

    @property
    def retried(self) -> str:
        """The number of repeated calls in words: `1 call retried`."""
        return f"{self.replays} call{'' if self.replays == 1 else 's'} retried"


@dataclass(frozen=True, repr=False)
class JournalUse(Displayed):
    """Statistics on the journal of a run, which stores outputs of calls.

    Attributes:
        folder: of the journal.
        answered: number of calls whose outputs were read from it.
        written: number of calls whose outputs were written to it.
        bytes: its size.
        notes: why it ended early or was restarted, in sentences.
        components: component → number of calls whose outputs were read from it.
    """

    folder: str
    answered: int
    written: int
    bytes: int
    notes: tuple[str, ...] = ()
    components: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Describe the calls that were read from the journal and written to it, and the notes."""
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
        component: name of the call, such as `transformer` or `vae.decode`.
        path: of the block, such as `transformer_blocks.7`.
        step: of the run, from 0; None outside of denoising.
        precision: format of its output, such as `fp16`.
        amax: largest magnitude over all calls of that step; None if it wasn't finite.
    """

    component: str
    path: str
    step: int | None
    precision: str
    amax: float | None


@dataclass(frozen=True, repr=False)
class GuardRecord(Displayed):
    """The observations and repairs of a guard so far.

    Attributes:
        pipeline: class of the pipeline, or of another program; "" for calls without one.
        calls: statistics of each component's calls.
        repairs: one for each fault, in order.
        host_reads: number of reads of device values by the guard's checks.
        unwatched: what could not be watched, each with the reason.
        own_s: seconds spent in Stopdown's own code around the calls, repairs included.
        maxima: largest magnitudes by block and step; empty unless requested.
        journal: statistics on the journal; None without one.
        reused: repairs of an earlier guard that were applied from the start.
        uncertified: for each input beyond the limits of the plan's certificate, the calls it doesn't cover.
        findings: black, grey, frozen or noisy frames that the pipeline returned; empty if the caller checks
            frames itself.
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
    """The calls and repairs of a script that ran under the guard.

    Attributes:
        script: its path, or the name of its module.
        arguments: of the script.
        exit_code: of the script itself.
        runs: one for each call of a pipeline, in order.
        findings: problems in the pipelines' outputs.
        remarks: deviations from the script's requests, and what could not be guarded.
        unrepaired: whether a fault stayed, or ended a call.
        elapsed_s: seconds in all.
        modules: calls of modules outside of pipelines; None without any.
        processes: number of processes that it started with `multiprocessing`; their calls aren't counted.
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
    """The record of one run: that of its guard, with request, machine, decisions, times and output.

    Attributes:
        source: the model as the user named it.
        fingerprint: SHA-256 over its safetensors headers; empty for a pipeline in memory.
        request: the options of the run, as given.
        device: such as `cuda:0 (Tesla V100-SXM2-16GB)`.
        device_reason: why it was chosen.
        machine: versions and hardware.
        decisions: how each component call ran, with reasons and without exponents.
        stages_s: stage (load, encode, denoise, decode, repair, other, write) → seconds.
        peak_bytes: highest memory during the run.
        peak_source: how that was measured.
        output: path of the result; None without one.
        elapsed_s: seconds in all.
        updated_plan: plan file that the repairs were written into; None if it wasn't changed.
        strategy: memory strategy at the end of the run; "" without a limit.
        steps_down: calls that ran out of memory, and the strategies with which they were run again.
        item: hash of the inputs of a batch's item; "" outside of a batch.
        plan: seal of the plan of a batch's item; "" without one.
        preview: a few small frames of a batch's item, WebP in base64; "" outside of a batch.
        memory: the memory plan with its prediction; None without a limit.
        forecast: shown before the weights were downloaded; None if they were here already.
        sound: length, channels and sample rate of generated sound; "" without any.
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
        """Return the summary that `generate` prints as a card."""
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
            return "a component returned NaN or Inf, and wasn't repaired."
        return f"repaired {', '.join(names)}; the result isn't affected."

    def list_reasons(self) -> list[tuple[str, str]]:
        """List each reason once, with the components that it applies to."""
        called = {call.component for call in self.calls}
        return group_components(
            (x.component, x.reason) for x in self.decisions if x.component in called
        )

    def list_costs(self) -> list[tuple[str, str]]:
        """List the seconds by stage, the peak memory, and the sound."""
        shown = [name for name in STAGES if name in self.stages_s]
        times = ", ".join(f"{name} {self.stages_s[name]:.1f} s" for name in shown)
        own = f"{self.own_s:.{1 if self.own_s >= 1 else 3}f} s"
        said = f"{self.elapsed_s:.1f} s ({times}). Stopdown's overhead: {own}"
        memory = f"{format_bytes(self.peak_bytes)} ({self.peak_source})"
        costs = [("time", said), ("memory", memory)]
        return [*costs, ("sound", self.sound)] if self.sound else costs

    def list_limits(self) -> list[str]:
        """Describe the memory strategy and the calls that ran out of memory; empty without a limit."""
        if not self.strategy:
            return []
        limit = self.request.get("memory") or "auto"
        limit = "the device's memory" if limit == "auto" else limit
        lines = [f"predicted to fit in {limit}: {self.strategy}"]
        return lines + [
            f"{one.component} ran out of memory with {one.before}; retried with {one.after}"
            for one in self.steps_down
        ]

    def list_repairs(self) -> list[str]:
        """List the place, action, cost and reason of each repair."""
        return [
            f"{x.module_path}: {x.done}, {x.retried}, {x.elapsed_s:.1f} s. {x.reason}"
            for x in self.repairs
        ]


STAGES = ("prepare", "load", "place", "encode", "denoise", "decode", "repair", "other", "write")

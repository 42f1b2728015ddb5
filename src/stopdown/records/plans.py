"""Records of how a model runs: precisions, exponents, memory plans and forecasts, conversions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stopdown.record_display import Displayed, Summary
from stopdown.records.json_text import SCHEMA
from stopdown.scaling_records import Scaling

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, repr=False)
class StepDown(Displayed):
    """A call that ran out of memory, and the strategy with which it was run again.

    Attributes:
        component: name of the call, such as `vae.decode`.
        before: the strategy that ran out of memory, such as `resident`.
        after: the strategy of the repeated call, such as `resident+tiling`.
        evidence: the allocator's message.
    """

    component: str
    before: str
    after: str
    evidence: str


@dataclass(frozen=True, repr=False)
class Reduction(Displayed):
    """A reduction of a video or picture below its requested size, so that the run fits into memory.

    Attributes:
        asked: the requested size, such as `49 frames of 480x720`.
        made: the reduced size, such as `25 frames of 480x720`.
        reason: a sentence.
    """

    asked: str
    made: str
    reason: str


@dataclass(frozen=True, repr=False)
class MemoryPlan(Displayed):
    """How a run stays within a memory limit, and its predicted memory and time.

    Attributes:
        asked: the requested limit, such as `8GiB`; `auto` for the device's memory, on the CPU the free one.
        share: number of simultaneous runs on the device, by which `auto` divides its memory.
        limit_bytes: `asked` in bytes; 0 until a strategy is chosen.
        strategy: such as `resident` or `component+tiling`; "" until one is chosen.
        peak_bytes: most bytes of tensors on the device at a time, weights included.
        stored_bytes: bytes of weights offloaded to host memory or read from their files.
        seconds: predicted run time; None if the device's speed is unknown.
        reason: for the strategy, in a sentence.
        reserved_bytes: memory that the device's caching allocator reserves; 0 if it reserves none.
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
    """The predicted memory and time of one memory strategy.

    Attributes:
        strategy: its name, such as `block+tiling`.
        peak_bytes: most bytes of tensors on the device at a time.
        component: call with that peak; "" if it's between calls.
        moved_bytes: bytes of weights copied to the device during the run.
        stored_bytes: bytes of weights offloaded to host memory or disk.
        time_ratio: estimated time relative to a run with all weights resident; None if the device's speed
            is unknown.
        precision: such as `fp16 with a plan`, `fp16 with fp32 modules` or `fp32`.
        reserved_bytes: memory that the device's caching allocator reserves; 0 if it reserves none.
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
    """The prediction, made without weights, of how a run fits into a memory limit.

    Several precision plans are compared, each with every memory strategy.

    Attributes:
        source: the model as the user named it.
        device: for which the prediction was made.
        precisions: component → format in the chosen precision plan; in the first if none fits.
        request: sizes and steps of the run.
        limit_bytes: the memory limit.
        rows: all strategies of all precision plans, the fastest of each plan first.
        chosen: name of the fastest strategy that fits; "" if none does.
        reasons: sentences.
        elapsed_s: seconds that the prediction took.
        precision: name of the chosen precision plan; "" if nothing fits.
        flag: the `--precision` that selects it.
        bits: precision plan → significant bits of its coarsest format.
        remarks: precision plan → further remark, in a sentence.
        reduced: the largest smaller size that fits, if nothing does at the requested size.
        answer: the result in one line.
        fits: whether any strategy stays within the limit.
        peak_bytes: of the choice; 0 if nothing fits.
        host_bytes: weights offloaded to host memory; 0 if they're read from files.
        host_limit_bytes: limit for these weights; 0 on a CPU.
        seconds: estimated run time; None if the device's speed is unknown.
        command: for that run, or for one of the smaller size; "" if nothing fits.
        download_bytes: files of a model on the Hub that aren't on this computer yet.
        decisions: the precision of each component or call in the chosen plan, with reasons and without
            exponents.
        reserved_bytes: of the choice, as in its row.
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
class ComponentPlan(Displayed):
    """How one component runs, or one call of it, and why.

    Attributes:
        component: name in the pipeline (`transformer`, `vae`); one of its calls (`vae.decode`); or, for a
            repair, a module in it (`transformer:blocks.1.ff`).
        class_name: class of its module; "" if the entry holds for any class.
        weights: SHA-256 over names, shapes and samples of its weights, the same in fp32 and as stored.
        precision: `fp16`, `bf16`, `fp32`, or `as loaded` for a component that is left alone.
        scaling: its exponents, modules in fp32, and the evidence for them; used in fp16 only. None casts
            the component as if it had been loaded in the precision.
        calls: number of measured calls.
        reasons: sentences.
        stored: format of most of its weights on disk; None if unknown.
        kept_fp32: modules that stay in fp32.
        code: functions on it that weren't its classes' own.
    """

    component: str
    class_name: str = ""
    weights: str = ""
    precision: str = "fp32"
    scaling: Scaling | None = None
    calls: int = 0
    reasons: tuple[str, ...] = ()
    stored: str | None = None
    kept_fp32: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    @property
    def in_force(self) -> Scaling:
        """The scaling in use; empty for a format other than fp16."""
        return (self.scaling if self.precision == "fp16" else None) or Scaling()

    @property
    def reason(self) -> str:
        """All reasons as one text."""
        return " ".join(self.reasons)


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """How a checkpoint runs: the precision of each component, with or without exponents; also a file.

    Attributes:
        source: the model as the user named it; the pipeline's class for a model in memory.
        fingerprint: SHA-256 over the checkpoint's files; empty for a pipeline in memory, and for a plan
            that holds for any weights.
        pipeline: class of the pipeline.
        precision: the requested one.
        versions: of the packages that define the classes.
        components: one entry for each component with weights, or for each of its calls.
        device: on which they were measured.
        elapsed_s: seconds that making the plan took.
        seal: SHA-256 over all other fields except `chosen` and `memory`; it shows if a file was edited.
        chosen: name for messages, such as `plan.json` or `an automatic plan, because fp16 was requested`.
        memory: memory limit and strategy of a run; None places all weights on the device. It belongs to one
            run on one device, so files don't contain it.
    """

    source: str
    fingerprint: str = ""
    pipeline: str = ""
    precision: str = "fp16"
    versions: dict[str, str] = field(default_factory=dict)
    components: tuple[ComponentPlan, ...] = ()
    device: str = ""
    elapsed_s: float = 0.0
    seal: str = ""
    chosen: str = ""
    memory: MemoryPlan | None = None
    kind: str = "plan"
    schema: int = field(default=SCHEMA)

    @property
    def is_bare(self) -> bool:
        """Whether the plan has precisions but no exponents, so that it holds for any weights."""
        rests_on = self.seal or self.fingerprint or any(x.class_name for x in self.components)
        return not rests_on

    def summarise(self) -> Summary:
        """Return a table with a row for each component, and the reasons for its precision below."""
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


PLAN_IN_CONFIG = "as stored, plan in config.json"
"""Precision of a converted component whose config contains its plan."""


@dataclass(frozen=True, repr=False)
class ConvertedComponent(Displayed):
    """The result of a conversion for one component.

    Attributes:
        component: name in the pipeline, such as `transformer` or `vae`.
        precision: `fp16`; `as stored` for unchanged weights; `PLAN_IN_CONFIG` if the config contains
            the plan.
        folded: number of tensors that were multiplied by powers of two.
        solved_anew: whether exponents other than the plan's were found, which a file can represent.
        fields: fields that were written into its config.
        eps_left: eps that no config field sets: path → exponent that it should have.
        effect: relative L2 error in the component's fp32 output due to these eps; 0.0 if bit-identical.
        calls: number of calls that the effect was measured on; 0 if no eps is left.
        kept_fp32: modules that plain libraries keep in fp32 once loaded, by their class.
        reasons: sentences.
        signatures: kinds of calls that the exponents were found for.
        not_for: arguments that none of these calls has.
        values: number of activations in fp16.
        unproven: how many of these no bound keeps in range; nothing watches them without Stopdown.
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
    """The result of a conversion, which writes weights for programs that don't know plans.

    Attributes:
        source: the model as the user named it.
        output: the folder or file.
        plan: seal of the plan.
        components: one entry for each component with weights.
        load: Python code with which plain Diffusers loads it.
        unread: tensors of a single file that Diffusers doesn't read; they were copied.
        elapsed_s: seconds that it took.
        files: path → bytes of each file in the folder except this record. A later conversion replaces only
            a folder with exactly these files.
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


def group_components(named: Iterable[tuple[str, _Key]]) -> list[tuple[str, _Key]]:
    """Group equal values: return each once, with the names of its components joined by commas."""
    grouped: dict[_Key, list[str]] = {}
    for component, value in named:
        grouped.setdefault(value, []).append(component)
    return [(", ".join(names), value) for value, names in grouped.items()]

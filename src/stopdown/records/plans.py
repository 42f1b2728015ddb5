"""How a model runs: precision, exponents and reasons for each component, where its weights are, and
what that takes and was written into files.
"""

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


def group_components(named: Iterable[tuple[str, _Key]]) -> list[tuple[str, _Key]]:
    """Return each value once, after the names of the components that have it, joined by commas."""
    grouped: dict[_Key, list[str]] = {}
    for component, value in named:
        grouped.setdefault(value, []).append(component)
    return [(", ".join(names), value) for value, names in grouped.items()]

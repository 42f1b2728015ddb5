"""What was found: in a model, in its files, in a message or a log, and about a machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stopdown.record_display import Displayed
from stopdown.records.json_text import SCHEMA


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

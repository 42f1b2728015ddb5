"""Records of findings about models, files, error messages, logs and machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stopdown.record_display import Displayed
from stopdown.records.json_text import SCHEMA


@dataclass(frozen=True, repr=False)
class Finding(Displayed):
    """A problem that a user should look at.

    Attributes:
        kind: short name of the class of finding, such as `black-frames`.
        module_path: `component:dotted.path`, a component, or a file.
        evidence: the measurement, with numbers.
        remedy: what to type or do.
        why: the consequence, and its cause.
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
    """The result of `stopdown check` for a model.

    Attributes:
        source: the model as the user named it.
        device: for which the model was checked.
        precisions: component → format in which it was checked.
        findings: worst first.
        mended: the changes that `--fix` made, in sentences.
        elapsed_s: seconds in all.
        judged: why these precisions were checked unless they were requested; whether sums were computed.
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
        component: prefix of the tensors' names, such as `model.diffusion_model`; "" for a whole file.
        weights: number of weights; scales count as a part of their weight.
        stored: format (`scaled fp8`, `Q8_0`, `bf16`) → bytes, the largest first.
        amax: largest finite magnitude, scales included; None if no weight can be unpacked.
        largest: name of the weight with that magnitude.
        scales: smallest and largest magnitude of the scales; empty without scales.
        unread: number of weights whose values can't be unpacked.
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
    """The result of `stopdown check` for a weight file, without its model's code.

    Attributes:
        source: the file as the user named it.
        format: such as `safetensors` or `GGUF flux`.
        contents: the kind of model by its tensors' names, in a sentence.
        size_bytes: of the file.
        device: for which it was checked; "" for all known devices.
        parts: its components.
        rescaled: the file's own statement that its weights are rescaled already; "" without one.
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
    """A line of text that a diagnosis is based on.

    Attributes:
        line: its number, from 1; 0 for a measurement in a picture.
        text: the line, or the measurement.
        meaning: its interpretation.
    """

    line: int
    text: str
    meaning: str


@dataclass(frozen=True, repr=False)
class Alternative(Displayed):
    """Another fault that can cause the same text.

    Attributes:
        fault: its name, such as `vae-range`.
        meaning: its description.
        run_next: the command that shows whether it is this one.
    """

    fault: str
    meaning: str
    run_next: str


@dataclass(frozen=True, repr=False, kw_only=True)
class Diagnosis(Displayed):
    """The cause of a failure, as far as a text or a picture shows it.

    Attributes:
        fault: class of the failure, such as `dtype-mismatch`; `unknown`; `none` for a healthy picture.
        meaning: description of that class.
        cause: name of the knowledge entry that recognised it.
        title: one sentence, with the values of the message.
        why: the explanation.
        evidence: the relevant lines, the message first.
        frame: the innermost frame of a traceback in a model's code; "" without one.
        run: versions and devices that the text names, such as `PyTorch 2.9.1+cu130` or `RTX 2080 Ti`.
        remedy: what to type or do.
        run_next: commands that show more.
        reports: issues with the same failure, as `owner/repo#number`.
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
    """A device's support of one format.

    Attributes:
        name: of the format, such as `bf16`.
        state: `native`, `emulated`, `slow`, `broken` or `missing`.
        time_ratio: time of a matrix product relative to fp32, measured here or from the peak rates of a
            profile; None if unknown.
        reason: the facts and measurements, in sentences with the source.
    """

    name: str
    state: str
    time_ratio: float | None
    reason: str


@dataclass(frozen=True, repr=False)
class Outlook(Displayed):
    """The precision that `auto` would choose for one component of a well-known model.

    Attributes:
        model: its name.
        component: such as `transformer`.
        precision: name of the format.
        planned: whether it would run with a plan's exponents.
        reason: why, in sentences.
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
        size: of its output, such as `49 frames of 480x720`.
        precision: of its denoiser in words, such as `fp16 with a plan`.
        strategy: the fastest that fits, such as `component+tiling`; "" if none does.
        peak_bytes: memory that the allocator reserves with that strategy; with the smallest if none fits.
        seconds: least and most time of 50 steps, from published rates and their error; empty if
            unknown.
        host_bytes: weights offloaded to host memory during the run; 0 if all are on the device.
    """

    model: str
    size: str
    precision: str
    strategy: str
    peak_bytes: int
    seconds: tuple[float, ...] = ()
    host_bytes: int = 0


@dataclass(frozen=True, repr=False)
class DeviceHealth(Displayed):
    """The facts about one device.

    Attributes:
        device: its name.
        kind: `cuda`, `mps` or `cpu`.
        tried: True for a device of this machine, False for a profile.
        capability: CUDA compute capability, such as `7.0`; None for other devices.
        memory_bytes: memory of the device; 0 if unknown.
        formats: its support of each format.
        attention: attention kernel → formats that it accepts.
        faults: known faults of the device, each with a remedy and a source.
        outlooks: the choices of `auto` for well-known models.
        measured: results of `stopdown bench` on devices of the same name, one sentence for each model.
        missing: why this build of PyTorch can't compute on it, and which can; "" if it can.
        answer: in which precision models run on it by default, in one sentence.
        fits: well-known models that fit into its memory; empty for a CPU.
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
    """A PyTorch switch that changes the precision of accumulation, with the meaning of `True`."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, repr=False)
class MachineHealth(Displayed):
    """The result of `stopdown doctor`.

    Attributes:
        machine: versions and hardware.
        devices: each device that was examined.
        switches: PyTorch's accumulation settings.
        settings: environment variables that are set and change results.
        faults: known faults of the installed versions.
    """

    machine: dict[str, Any]
    devices: tuple[DeviceHealth, ...]
    switches: tuple[Switch, ...]
    settings: dict[str, str]
    faults: tuple[str, ...]
    kind: str = "machine"
    schema: int = field(default=SCHEMA)

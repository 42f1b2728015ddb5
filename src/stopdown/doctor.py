"""`stopdown doctor`: health of devices: formats, attention kernels, settings, faults, and fitting models.

Devices of this machine are tested: formats by a timed probe, attention kernels by a call of each. A device
profile gives the values from its sources instead. The choices of `auto` for some well-known models are made
by the same functions as in a run.

**Catches** formats that are emulated, slow or missing; attention kernels that refuse a format; settings
that allow sums in 16 bits; versions and devices with known faults.
**Does not catch** faults that were never reported, and memory that other programs use on the device.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from stopdown.devices.backend_rules import list_attention, list_version_faults
from stopdown.devices.device_choice import Device, find_missing_mps, list_devices
from stopdown.devices.device_profiles import (
    Profile,
    describe_device,
    find_device_target,
    is_profile,
)
from stopdown.devices.environment import describe_machine, read_numeric_variables, read_version
from stopdown.devices.format_support import Support, forget_timings, probe_formats
from stopdown.errors import ignoring_warnings
from stopdown.files.toml_files import read_rows, read_rules
from stopdown.number_formats import FORMATS, PRECISIONS, format_figure
from stopdown.plans.precision import ComponentFacts, choose_precision, explain_plan
from stopdown.records import (
    DeviceHealth,
    FormatHealth,
    KnownFit,
    MachineHealth,
    Outlook,
    Switch,
)

if TYPE_CHECKING:
    import torch

_KERNELS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}


class KnownModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A well-known checkpoint.

    Attributes:
        repository: its Hub id.
        stored: stored format of the weights, by component.
        force_upcast: components whose config requires fp32 in place of fp16.
        size: default size of its output.
        flops: FLOPs of a run at that size with 50 steps.
        peaks: bytes that PyTorch's allocator reserves on a card, by memory strategy, in 16 bits and with an
            attention kernel that does not store scores; the fastest strategy first.
        moved: bytes of weights that are transferred to the device during the run, by memory strategy.
    """

    name: str
    repository: str
    source: str
    stored: dict[str, str]
    force_upcast: tuple[str, ...] = ()
    size: str = ""
    flops: float = 0.0
    peaks: dict[str, int] = {}
    moved: dict[str, int] = {}


def examine(name: str | None = None) -> MachineHealth:
    """Examine the devices of this machine, or the one that is named.

    Args:
        name: a device, a profile or a profile's file, as for `--device`; None for each device here.

    Cost: a probe of each device, under a second on a CPU.
    """
    if name is not None and is_profile(name):
        device, profile = find_device_target(name)
        found = [_describe(device, profile, tried=False)]
    else:
        devices = (
            list_devices() if name is None else [find_device_target(name, needs_kernels=False)[0]]
        )
        found = [_describe(x, describe_device(x), tried=x.missing is None) for x in devices]
    kinds = tuple(dict.fromkeys(health.kind for health in found))
    places = dict.fromkeys((health.kind, health.capability) for health in found)
    missing = find_missing_mps()
    said = [str(missing)] if missing else []
    return MachineHealth(
        machine=describe_machine(),
        devices=tuple(found),
        switches=tuple(read_switches(kinds)),
        settings=read_numeric_variables(),
        faults=(*said, *_list_faults(places)),
    )


def _describe(device: Device, profile: Profile, *, tried: bool) -> DeviceHealth:
    """Describe a device.

    Args:
        tried: probe the device, which is on this machine; otherwise its profile answers.
    """
    if tried:
        forget_timings(device)  # this is what a user runs after a change of the machine
    supports = probe_formats(device) if tried else profile.supports
    emulated = {name for name, support in supports.items() if not support.native}
    outlooks, has_kernel = foresee(supports, device.type), has_fused_attention(profile, ("fp16",))
    known = list_attention(device.type, device.capability)
    return DeviceHealth(
        device=str(device) if tried or device.missing else profile.title,
        kind=device.type,
        tried=tried,
        capability=".".join(map(str, device.capability)) if device.capability else None,
        memory_bytes=device.memory_bytes,
        formats=tuple(_list_formats(profile, supports, tried=tried)),
        attention=try_attention(device) if tried else {n: tuple(f) for n, f in known.items()},
        faults=tuple(f"{fault.what} {fault.remedy} ({fault.source})" for fault in profile.faults),
        outlooks=tuple(outlooks),
        measured=tuple(quote_measured(device.name, device.type, emulated)),
        missing=str(device.missing or ""),
        answer="" if device.missing else word_answer(supports, device.type),
        fits=tuple(list_fits(outlooks, device.memory_bytes, profile))
        if has_kernel and device.type != "cpu"
        else (),
    )


def _list_formats(
    profile: Profile, supports: Mapping[str, Support], *, tried: bool
) -> Iterable[FormatHealth]:
    for name in PRECISIONS if tried else profile.formats:
        state, support = profile.formats[name].state, supports.get(name)
        if tried and support is not None and (support.native or not support.works):
            state = "native" if support.works else "missing"
        reason = profile.describe_format(name)
        if support and tried:
            reason = f"{support.reason} {support.measured}".rstrip()
        yield FormatHealth(name, state, support.time_ratio if support else None, reason)


class MeasuredRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published time and error of a model in one precision, relative to fp32."""

    subject: str
    way: str
    time_ratio: float
    rel_err: float | None = None


class MeasuredDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published results of `stopdown bench` on one device; a row of `knowledge/rules/measured.toml`."""

    name: str
    backend: str
    torch: str
    source: str
    rows: tuple[MeasuredRow, ...]


def quote_measured(name: str, backend: str, emulated: Container[str] = ()) -> Iterable[str]:
    """Yield a sentence for each model with published measurements on devices of this name.

    Args:
        emulated: formats that this device emulates. CPUs of one name may differ in their instructions, so
            measurements in which such a format was faster than fp32 are skipped.
    """
    for device in read_rows("measured", "device", MeasuredDevice):
        if (device.name, device.backend) != (name, backend):
            continue
        if any(row.way in emulated and row.time_ratio < 1 for row in device.rows):
            continue
        for subject in dict.fromkeys(row.subject for row in device.rows):
            rows = [row for row in device.rows if row.subject == subject and row.way != "fp32"]
            each = (
                f"{x.way} {format_figure(x.time_ratio)}× the time of fp32{_say_error(x)}"
                for x in rows
            )
            yield f"{subject}: {'; '.join(each)} (torch {device.torch}; {device.source})."


def _say_error(row: MeasuredRow) -> str:
    return ", NaN" if row.rel_err is None else f", error {format_figure(100 * row.rel_err)} %"


def foresee(supports: Mapping[str, Support], kind: str) -> list[Outlook]:
    """Predict the choice of `auto`, with its reason, for each component of a few well-known models."""
    return [outlook for model in read_models() for outlook in _foresee_model(model, supports, kind)]


def _foresee_model(
    model: KnownModel, supports: Mapping[str, Support], kind: str
) -> Iterable[Outlook]:
    facts = [
        ComponentFacts(name, (name,), {stored: 1}, {}, name in model.force_upcast)
        for name, stored in model.stored.items()
    ]
    planned = explain_plan(facts, supports) if kind != "cpu" else ""
    for fact in facts:
        precision, reason = choose_precision(fact, supports)
        if planned:
            precision, reason = "fp16", f"With a plan, because {planned}."
        yield Outlook(model.name, fact.name, precision, bool(planned), reason)


def word_answer(supports: Mapping[str, Support], kind: str) -> str:
    """Return a sentence that says in which precision checkpoints run by default on a device."""
    found = {}
    for stored in ("bf16", "fp16"):
        (outlook,) = _foresee_model(KnownModel("", "", "", {"model": stored}), supports, kind)
        found[stored] = _name_precision(outlook)
    if found["bf16"] == found["fp16"]:
        return f"Models stored in fp16 or bf16 run in {found['bf16']}."
    return f"Models stored in bf16 run in {found['bf16']}. Models stored in fp16 run in {found['fp16']}."


def list_fits(
    outlooks: Iterable[Outlook], memory_bytes: int, profile: Profile | None = None
) -> Iterable[KnownFit]:
    """Yield the fastest memory strategy that fits on a device, for each well-known model in 16 bits.

    Args:
        profile: the device's profile, whose published rates give the time of a run.
    """
    from stopdown.memory.speed import find_speed

    found = list(outlooks)
    for model in read_models():
        chosen = [x for x in found if x.model == model.name]
        if not (memory_bytes and model.peaks) or any(x.precision == "fp32" for x in chosen):
            continue
        fitting = [name for name, peak in model.peaks.items() if peak <= memory_bytes]
        least = min(model.peaks.values())
        name = fitting[0] if fitting else ""
        peak = model.peaks.get(name, least)
        speed = find_speed(profile, {x.precision for x in chosen}) if profile is not None else None
        times: tuple[float, ...] = ()
        if speed is not None and name:
            seconds = model.flops / speed.flops_per_s + model.moved[name] / speed.link_bytes_per_s
            times = tuple(seconds * x for x in speed.error)
        waiting = model.moved["resident"] if name and not name.startswith("resident") else 0
        yield KnownFit(
            model.name, model.size, _name_precision(chosen[0]), name, peak, times, waiting
        )


def _name_precision(outlook: Outlook) -> str:
    return outlook.precision + " with a plan" * outlook.planned


def read_models() -> tuple[KnownModel, ...]:
    return read_rows("models", "model", KnownModel)


def try_attention(device: Device) -> dict[str, tuple[str, ...]]:
    """Return the formats in which each attention kernel runs on a device of this machine, by calling it.

    Cost: twelve calls on tensors of 1 x 1 x 16 x 64; on an accelerator they synchronise.
    """
    found = {
        kernel: tuple(name for name in PRECISIONS if _runs_attention(device, kernel, name))
        for kernel in _KERNELS
    }
    return {kernel: formats for kernel, formats in found.items() if formats}


def _runs_attention(device: Device, kernel: str, name: str) -> bool:
    import torch

    try:
        with torch.inference_mode():
            x = torch.ones(1, 1, 16, 64, dtype=FORMATS[name].torch_dtype, device=device.torch_name)
            return bool(torch.isfinite(attend_with(kernel, x)).all())
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def list_kernels() -> tuple[str, ...]:
    return tuple(_KERNELS)


def attend_with(kernel: str, x: torch.Tensor) -> torch.Tensor:
    """Compute self-attention of `x` `[B, H, L, E]` with one kernel; raises if the kernel refuses it."""
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    hushed = ignoring_warnings(UserWarning)  # torch says why a kernel refuses; the error is enough
    with hushed, sdpa_kernel([getattr(SDPBackend, _KERNELS[kernel])]):
        return functional.scaled_dot_product_attention(x, x, x)


def read_switches(kinds: Iterable[str]) -> list[Switch]:
    """List torch settings whose current values lower the precision of sums or products."""
    found = []
    for kind in kinds:
        for row in (row for row in read_rules("switches")["switch"] if row["backend"] == kind):
            values = ((path, _read_setting(path)) for path in row["paths"])
            path, value = next((x for x in values if x[1] is not None), ("", None))
            if value is not None and str(value) not in row["safe"]:
                found.append(Switch(f"torch.{path}", str(value), row["meaning"]))
    return found


def _read_setting(path: str) -> Any:
    """Return the value of a torch setting by its dotted path; None if it's absent, as in older torch."""
    import torch

    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _list_faults(places: Iterable[tuple[str, str | None]]) -> tuple[str, ...]:
    """List known faults of the installed versions on these pairs of backend and compute capability."""
    import platform

    names = ("torch", "diffusers", "transformers", "accelerate")
    versions = {name: read_version(name) for name in names}
    versions["macos"] = platform.mac_ver()[0] or None
    faults = [
        fault
        for kind, capability in places
        for fault in list_version_faults(versions, kind, _read_capability(capability))
    ]
    said = (
        f"{fault.package} {versions[fault.package]} ({fault.versions}): {fault.what} {fault.remedy} "
        f"({fault.source})"
        for fault in faults
    )
    return tuple(dict.fromkeys(said))


def _read_capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, minor = text.split(".")
    return int(major), int(minor)


def has_fused_attention(profile: Profile, formats: Iterable[str]) -> bool:
    """Return whether a device has, in each format, an attention kernel that does not store the scores."""
    kernels = list_attention(profile.kind, profile.number)
    fused = {entry for name, taken in kernels.items() if name != "math" for entry in taken}
    return set(formats) <= fused

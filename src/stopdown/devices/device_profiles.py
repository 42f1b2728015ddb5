"""Device profiles: facts about devices as data, so that decisions can be made for a machine elsewhere.

A profile is a TOML file in `knowledge/devices/`, or a user's own. For each number format it states how the
device computes in it and at what rate, and also the compute capability, memory and known faults, each with
its source. `Profile.supports` has the same form as the result of `probe_formats` on a real device. Facts
that depend on the compute capability alone (attention kernels, missing operations) are in `backend_rules`.

Not covered: wrong facts. Rates are those of large matrix products; a run gains less.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from stopdown.devices.device_choice import (
    Device,
    is_device_name,
    list_devices,
    require_kernels,
    select_device,
)
from stopdown.devices.format_support import SLOW, Support, judge_device
from stopdown.devices.maker_formats import (
    Verdict,
    find_onednn_formats,
    read_cpu_flags,
    read_onednn_formats,
)
from stopdown.errors import OptionError
from stopdown.files.json_files import UnreadableError, read_small_file
from stopdown.files.toml_files import read_folder
from stopdown.number_formats import FORMATS, PRECISIONS

State = Literal["native", "emulated", "slow", "broken", "missing"]
"""State of a format on a device. `native`: in hardware. `emulated`: computed in fp32. `slow`: in hardware,
at a small fraction of the rate of fp32. `broken`: in hardware, with wrong results. `missing`: refused."""


class FormatFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a device computes in one format.

    Attributes:
        rate: rate of large matrix products relative to fp32 with PyTorch's defaults (2.0 is twice as
            fast): measured with PyTorch if a source has that, else the vendor's peak; None without a
            source.
        accumulates: dtype in which products are summed: `fp32`, `fp16`; "" without a source.
        tflops: rate of large matrix products in 10^12 operations per second; None without a source.
    """

    state: State
    source: str
    rate: float | None = None
    accumulates: str = ""
    note: str = ""
    tflops: float | None = None


class Capability(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CUDA compute capability, as major and minor number."""

    number: tuple[int, int]
    source: str


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of the device; the smallest if it is sold with several sizes."""

    gib: float
    source: str


class DeviceFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Known fault of a device.

    Attributes:
        what: description of the fault.
        formats: affected formats; empty for all.
        operations: affected operations, by their names in `backend_rules`; empty for all.
        accumulates: dtype of the operation's sums, if they are the fault: `fp16`.
    """

    what: str
    source: str
    formats: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    remedy: str = ""
    accumulates: str = ""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts about a device, from documents or from this machine.

    Attributes:
        name: name for `--device`, such as `v100`.
        title: full name of the device.
        kind: `cuda` (also for AMD, as in PyTorch), `mps` or `cpu`.
        formats: facts by number format.
        matches: regular expression for the system's name of such a device; "" matches none.
        aliases: other names for `--device`.
        architecture: `sm70`, `gfx1100`, `M1`, `avx512`.
        capability: CUDA compute capability of NVIDIA's devices; None for others.
        macos: version of macOS to which the facts apply, on mps.
        memory: memory of the device; None if it differs between machines.
        instructions: instruction sets of a CPU, as far as `knowledge/rules/instructions.toml` lists them;
            None if they are not known.
        onednn: formats for whose convolutions PyTorch uses oneDNN on a CPU; None unless PyTorch was asked.
    """

    name: str
    title: str
    kind: Literal["cuda", "mps", "cpu"]
    formats: dict[str, FormatFact]
    matches: str = ""
    aliases: tuple[str, ...] = ()
    architecture: str = ""
    capability: Capability | None = None
    macos: tuple[int, ...] = ()
    memory: Memory | None = None
    faults: tuple[DeviceFault, ...] = ()
    instructions: tuple[str, ...] | None = None
    onednn: tuple[str, ...] | None = None

    @property
    def onednn_formats(self) -> tuple[str, ...] | None:
        """Formats for whose convolutions PyTorch uses oneDNN; None if that is not known."""
        if self.onednn is None and self.instructions is not None:
            return find_onednn_formats(self.instructions)
        return self.onednn

    @property
    def number(self) -> tuple[int, int] | None:
        """The compute capability of an NVIDIA GPU, such as (7, 5); None for other devices."""
        return self.capability.number if self.capability else None

    @property
    def memory_bytes(self) -> int:
        """Memory of the device in bytes; 0 if it is not known."""
        return int(self.memory.gib * 2**30) if self.memory else 0

    @property
    def supports(self) -> dict[str, Support]:
        """Support of fp32, bf16 and fp16, in the form of a probe's result, as far as sources tell."""
        return {name: self._support(name) for name in PRECISIONS}

    def _support(self, name: str) -> Support:
        fact = self.formats.get(name)
        if fact is None:
            return Support(False, False, None, f"Nothing is known of {name} on {self.title}.")
        works = fact.state not in ("missing", "broken")
        ratio = round(1 / fact.rate, 3) if fact.rate and works else None
        said, is_slow = self.describe_format(name), ratio is not None and ratio > SLOW
        return Support(fact.state == "native", works, ratio, said, is_slow=is_slow)

    def describe_format(self, name: str) -> str:
        """Describe the support of a format on this device in whole sentences, with the source."""
        fact = self.formats[name]
        is_told = fact.rate and name != "fp32"
        rate = f" Matrix products run at {fact.rate:g} times the rate of fp32." if is_told else ""
        note = f" {fact.note}" if fact.note else ""
        return f"{self.title}: {name} is {fact.state}.{note}{rate} ({fact.source})"

    def as_device(self) -> Device:
        """Return a `Device` with the facts of the profile, for decisions about a machine elsewhere."""
        reason = f"The profile {self.name} was requested; this machine may have another device."
        return Device(self.kind, 0, self.title, self.number, self.memory_bytes, reason)


def list_profiles() -> list[str]:
    """Return the names of the built-in profiles, sorted."""
    return sorted(read_profiles())


@functools.cache
def read_profiles() -> dict[str, Profile]:
    profiles = [_convert_profile(tables, name) for name, tables in read_folder("devices").items()]
    return {profile.name: profile for profile in profiles}


def is_profile(name: str) -> bool:
    """Return whether a value of `--device` names a profile rather than a device of this machine."""
    return name.strip().endswith(".toml") or _find_by_name(name) is not None


def find_profile(name: str) -> Profile:
    """Return the profile with this name or alias, or parse it from this TOML file.

    Raises:
        OptionError: the profile is unknown, or its file cannot be read.
    """
    if name.strip().endswith(".toml"):
        path = Path(name.strip())
        try:
            text = read_small_file(path, most_bytes=_MOST_BYTES).decode("utf-8")
        except (UnreadableError, UnicodeDecodeError) as error:
            raise OptionError(
                f"The profile {path} can't be read: {error}.",
                remedy="Name a TOML file that exists; stopdown doctor --device v100 --toml prints one "
                "to start from.",
            ) from None
        return parse_profile(text, str(path))
    found = _find_by_name(name)
    if found is None:
        raise _unknown_profile(name)
    return found


def find_device_target(name: str = "auto", *, needs_kernels: bool = True) -> tuple[Device, Profile]:
    """Return the `Device` and the `Profile` for a value of `--device`.

    Args:
        name: `auto`, `cuda`, `cuda:1`, `mps`, `cpu`; a profile: `v100`; or a path to one: `mine.toml`.
        needs_kernels: raise `OptionError` if this build of PyTorch cannot compute on the device.
    """
    if is_profile(name):
        profile = find_profile(name)
        return profile.as_device(), profile
    if not is_device_name(name):
        raise _unknown_profile(name)
    device = select_device(name, list_devices())
    return require_kernels(device) if needs_kernels else device, describe_device(device)


def describe_device(device: Device) -> Profile:
    """Return a profile of a device of this machine.

    The states of its formats come from `environment.judge_device`, which inspects this machine. The rates
    and faults come from the built-in profile whose pattern matches the device's name, if there is one.
    """
    known = match_profile(device)
    facts = {
        name: _join(verdict, known.formats.get(name) if known else None)
        for name, verdict in judge_device(device).items()
    }
    capability = Capability(device.capability, "read here") if device.capability else None
    return Profile(
        name=device.torch_name,
        title=device.name,
        kind=device.type,  # type: ignore[arg-type]
        formats=facts,
        architecture=known.architecture if known else "",
        capability=capability,
        macos=known.macos if known else (),
        memory=Memory(device.memory_bytes / 2**30, "read here"),
        faults=known.faults if known else (),
        instructions=tuple(sorted(read_cpu_flags())) if device.type == "cpu" else None,
        onednn=read_onednn_formats() if device.type == "cpu" else None,
    )


def match_profile(device: Device) -> Profile | None:
    """Return the profile whose `matches` pattern fits the name of a device; None if there is none."""
    for profile in read_profiles().values():
        is_like = profile.kind == device.type and profile.matches
        if is_like and re.search(profile.matches, device.name):
            return profile
    return None


def _join(verdict: Verdict, fact: FormatFact | None) -> FormatFact:
    state: State = "native" if verdict.native else "emulated"
    if fact is None:
        return FormatFact(state, "this machine", note=verdict.reason)
    agrees = verdict.native == (fact.state == "native")
    return FormatFact(
        fact.state if agrees else state,
        fact.source,
        fact.rate if agrees else None,
        fact.accumulates,
        verdict.reason,
    )


def _find_by_name(name: str) -> Profile | None:
    asked = name.strip().lower()
    for profile in read_profiles().values():
        if asked in (profile.name, *profile.aliases) and asked != profile.kind:
            return profile
    return None


def _unknown_profile(name: str) -> OptionError:
    known = list_profiles()
    asked = name.strip().lower()
    is_mac = any(word in asked for word in ("mac", "apple", "metal"))
    one_off = [x for x in known if len(x) == len(asked) and sum(map(str.__ne__, x, asked)) == 1]
    near = ["mps-m1"] if is_mac else difflib.get_close_matches(asked, known, n=1) or one_off
    return OptionError(
        f"The device {name!r} is unknown.",
        expected="This machine's devices are called auto, cuda, cuda:1, mps and cpu. Known cards are "
        f"{', '.join(known)}; your own profile (.toml) works as well.",
        remedy=f'Use device="{near[0] if near else "auto"}".',
    )


_MOST_BYTES = 2**16
"""Size limit of a profile; the longest in the package has 1,400 bytes."""


def parse_profile(text: str, name: str) -> Profile:
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # too many digits or brackets are no TOML error
        raise _bad_profile(name, f"isn't TOML: {error}") from None
    return _convert_profile(tables, name)


def _convert_profile(tables: dict[str, Any], name: str) -> Profile:
    try:
        profile = msgspec.convert(tables, Profile)
    except msgspec.ValidationError as error:
        raise _bad_profile(name, f"isn't complete: {error}") from None
    problem = _find_problem(profile)
    if problem:
        raise _bad_profile(name, problem)
    return profile


def _find_problem(profile: Profile) -> str:
    unknown = [name for name in profile.formats if name not in FORMATS]
    if unknown:
        return f"names the format {unknown[0]}; known are {', '.join(FORMATS)}"
    absent = [name for name in PRECISIONS if name not in profile.formats]
    if absent:
        return f"doesn't say how {absent[0]} is computed (table [formats.{absent[0]}])"
    if profile.kind == "cuda" and not profile.capability and not profile.architecture:
        return "is of the kind cuda and has neither capability nor architecture"
    if profile.memory and not 0 <= profile.memory.gib <= _LARGEST_GIB:
        return f"gives it {profile.memory.gib} GiB of memory, which no device has"
    return _find_bad_fact(profile.formats)


def _find_bad_fact(formats: Mapping[str, FormatFact]) -> str:
    for name, fact in formats.items():
        if not fact.source.strip():
            return f"gives no source for formats.{name}"
        if fact.rate is not None and not fact.rate > 0:
            return f"gives formats.{name} the rate {fact.rate}, which isn't above 0"
        for what, number in (("rate", fact.rate), ("tflops", fact.tflops)):
            if number is not None and not _LEAST_RATE <= number <= _LARGEST_RATE:
                return f"gives formats.{name} {number} for {what}, which no device has"
    return ""


_LEAST_RATE, _LARGEST_RATE = 1e-6, 1e6
_LARGEST_GIB = 1e6


def format_profile(profile: Profile) -> str:
    """Format a profile as TOML; `parse_profile` reads it back."""
    lines = [*_format_plain(profile)]
    for name in ("capability", "memory"):
        if getattr(profile, name):
            lines += ["", f"[{name}]", *_format_plain(getattr(profile, name))]
    for name, fact in profile.formats.items():
        lines += ["", f"[formats.{name}]", *_format_plain(fact)]
    for fault in profile.faults:
        lines += ["", "[[faults]]", *_format_plain(fault)]
    return "\n".join(lines) + "\n"


def _format_plain(entry: msgspec.Struct) -> Iterator[str]:
    """Yield a TOML line for each field of a record that is a text, number or list, unless empty."""
    for name in entry.__struct_fields__:
        value = getattr(entry, name)
        if isinstance(value, tuple):
            value = list(value) if all(isinstance(item, str | int) for item in value) else None
        if value not in (None, "", []) and not isinstance(value, dict | msgspec.Struct):
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"


def _bad_profile(name: str, problem: str) -> OptionError:
    return OptionError(
        f"The profile {name} {problem}.",
        expected="A profile has name, title, kind (cuda, mps or cpu) and a table [formats.NAME] with "
        "state (native, emulated, slow, broken or missing) and source for fp32, bf16 and fp16.",
        remedy="See stopdown doctor --device v100 --toml for one that is complete.",
    )

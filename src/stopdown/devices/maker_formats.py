"""Formats that a device supports according to its vendor, by compute capability, CPU flags or chip."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from stopdown.devices.environment import read_numeric_variables, read_sysctl, read_system_file
from stopdown.files.toml_files import read_rows, read_rules
from stopdown.number_formats import PRECISIONS


@functools.cache
def has_avx512() -> bool:
    """Return whether the CPU has AVX-512, as reported by Linux; False on other systems."""
    return bool(
        re.search(r"^flags\s*:.*\bavx512f\b", read_system_file("/proc/cpuinfo"), re.MULTILINE)
    )


@dataclass(frozen=True)
class Verdict:
    """Documented support of a format on a device.

    Attributes:
        native: whether the device computes in it in hardware, without known faults.
        reason: explanation as a sentence.
        is_known: False if nothing is documented, so that only a timed probe can tell.
    """

    native: bool
    reason: str
    is_known: bool = True


class _Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Row of `knowledge/rules/arithmetic.toml`: support of a format on a range of devices.

    Attributes:
        first, below, only: range or list of compute capabilities, or versions of macOS.
        name: regular expression for the device's name.
    """

    backend: Literal["cuda", "rocm", "mps"]
    format: str
    native: bool
    reason: str
    source: str
    first: tuple[int, ...] = msgspec.field(default=(), name="from")
    below: tuple[int, ...] = ()
    only: tuple[tuple[int, ...], ...] = ()
    name: str = ""

    def fits(self, number: tuple[int, ...], name: str) -> bool:
        return (
            number >= self.first
            and (not self.below or number < self.below)
            and (not self.only or number in self.only)
            and re.search(self.name, name) is not None
        )


FP32 = Verdict(True, "fp32 is native on every device.")


def judge_accelerator(
    backend: str, number: tuple[int, ...] = (), name: str = ""
) -> dict[str, Verdict]:
    """Return a verdict for each format of an accelerator: whether it is native, and the reason.

    Args:
        backend: `cuda`, `rocm` or `mps`.
        number: compute capability, such as (7, 5); on mps the version of macOS, such as (14, 5).
        name: name of the device; for AMD its architecture, such as `gfx90a`; on mps the chip, as returned
            by `read_cpu_model`.
    """
    verdicts = {"fp32": FP32}
    written = ".".join(map(str, number))
    for unit in read_rows("arithmetic", "unit", _Unit):
        if unit.backend == backend and unit.format not in verdicts and unit.fits(number, name):
            reason = unit.reason.format(number=written, name=name)
            verdicts[unit.format] = Verdict(unit.native, reason)
    return verdicts


def judge_cpu(flags: Iterable[str]) -> dict[str, Verdict]:
    """Return a verdict for each format of a CPU: whether it is native, and the reason.

    Source: the instruction sets for which oneDNN and Arm's library have 16-bit kernels.

    Args:
        flags: instruction sets, spelled as by `read_cpu_flags`.
    """
    have = set(flags)
    verdicts = {"fp32": FP32}
    arithmetic = read_rules("instructions")["arithmetic"]
    for name in ("bf16", "fp16"):
        wanted = arithmetic[name]
        found = [flag for flag in wanted if flag in have]
        reason = (
            f"The CPU has {name} instructions ({', '.join(found)})."
            if found
            else f"The CPU has no {name} instructions (none of {', '.join(wanted)}); values are "
            "converted to fp32 and back."
        )
        verdicts[name] = Verdict(bool(found), reason)
    return verdicts


_SPELLINGS = {
    "avx512bw": "avx512_bw",
    "avx512dq": "avx512_dq",
    "avx512vl": "avx512_vl",
    "bf16": "arm_bf16",
    "svebf16": "sve_bf16",
    "asimdhp": "arm_fp16",
    "fp16_arith": "arm_fp16",
    "hw.optional.arm.FEAT_BF16": "arm_bf16",
    "hw.optional.arm.FEAT_FP16": "arm_fp16",
}


def list_known_flags() -> frozenset[str]:
    """Return the instruction sets that the rules for 16-bit formats and oneDNN refer to."""
    data = read_rules("instructions")
    sets = [data["arithmetic"][name] for name in ("bf16", "fp16")]
    sets += [one for name in PRECISIONS for one in data["onednn"][name]]
    return frozenset(flag for flags in sets for flag in flags)


def normalise_cpu_flags(flags: Iterable[str]) -> frozenset[str]:
    """Return the flags that matter for 16-bit formats, with one spelling for Linux, macOS and torch."""
    return frozenset(_SPELLINGS.get(flag, flag) for flag in flags) & list_known_flags()


def limit_cpu_flags(flags: Iterable[str], limit: str) -> frozenset[str]:
    """Return the instruction sets that oneDNN uses under the limit in ONEDNN_MAX_CPU_ISA.

    Args:
        flags: instruction sets, spelled as by `read_cpu_flags`; those of Arm are not limited.
        limit: value of the variable; "" and unknown names limit nothing.
    """
    found = frozenset(flags)
    for entry in read_rules("instructions")["limits"]:
        if limit.strip().upper() in entry["names"]:
            return frozenset(
                x for x in found if x in entry["flags"] or x.startswith(("arm", "sve"))
            )
    return found


@functools.cache
def read_cpu_flags() -> frozenset[str]:
    """Return the 16-bit instruction sets of this CPU, as the system and torch report them.

    Sets that ONEDNN_MAX_CPU_ISA hides from oneDNN are excluded.
    """
    found = {name for name in _SPELLINGS if name.startswith("hw.") and read_sysctl(name) == "1"}
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", read_system_file("/proc/cpuinfo"), re.M)
    found.update(lines[0].split() if lines else ())
    known = normalise_cpu_flags(found | _ask_torch_for_flags())
    return limit_cpu_flags(known, read_numeric_variables().get("ONEDNN_MAX_CPU_ISA", ""))


def find_onednn_formats(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the formats for whose convolutions PyTorch uses oneDNN on a CPU with these flags."""
    have, sets = set(flags), read_rules("instructions")["onednn"]
    return tuple(name for name in PRECISIONS if any(have >= set(one) for one in sets[name]))


def read_onednn_formats() -> tuple[str, ...]:
    """Return the formats for whose convolutions PyTorch uses oneDNN here, as PyTorch reports it."""
    import torch

    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return ()
    known = find_onednn_formats(read_cpu_flags())
    found = ["fp32"]
    for name in ("bf16", "fp16"):
        ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)  # not in every build
        if name in known if ask is None else ask():
            found.append(name)
    return tuple(found)


def _ask_torch_for_flags() -> set[str]:
    import torch

    ask = getattr(torch.cpu, "get_capabilities", None)  # absent in older torch
    if ask is not None:
        return {name for name, value in ask().items() if value is True}
    helpers = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_fp16": "_is_amx_fp16_supported"}
    return {flag for flag, name in helpers.items() if getattr(torch.cpu, name, bool)()}

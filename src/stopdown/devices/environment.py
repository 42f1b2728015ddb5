"""The machine as facts with reasons: devices, formats, versions, settings and memory.

The only module that reads environment variables, devices and versions. Which formats a device
computes in comes from two sources that check each other: what its maker says (compute capability,
CPU flags, chip and system), which is data in `knowledge/rules/`, and a timed probe of a small
matmul and convolution. `torch.cuda.is_bf16_supported()` is not asked: it says True on a V100,
because emulation counts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stopdown.argument_types import check_type
from stopdown.devices.torch_builds import (
    Build,
    find_missing_kernels,
    find_missing_system,
)
from stopdown.errors import OptionError, OutputError, take_first_line
from stopdown.files.json_files import UnreadableError, read_json_table
from stopdown.files.outputs import written_beside
from stopdown.files.toml_files import read_rows, read_rules
from stopdown.number_formats import FORMATS, PRECISIONS

if TYPE_CHECKING:
    import torch


_NUMERIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def read_numeric_variables() -> dict[str, str]:
    """Return the environment variables of PyTorch and its libraries that affect numbers, speed or devices.

    Only variables that are set are included. Stopdown does not act on them; it records them.
    """
    return {name: os.environ[name] for name in _NUMERIC_VARIABLES if name in os.environ}


def copy_variables() -> dict[str, str]:
    """Return a copy of the environment of this process, for a child process."""
    return dict(os.environ)


def put_variables(variables: Mapping[str, str]) -> None:
    """Update the environment of this process with the variables of another."""
    os.environ.update(variables)


def count_launched() -> int:
    """Count the processes that `torchrun` started, this one included; 1 without `torchrun`."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() and "RANK" in os.environ else 1


def count_processes() -> int:
    """Count the processes of PyTorch's process group; 1 without a group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())


def cache_folder() -> Path:
    """Return the folder for files that Stopdown keeps between runs; it need not exist.

    It is `STOPDOWN_CACHE` if that is set, else `stopdown` in the system's folder for caches.

    Raises:
        OptionError: STOPDOWN_CACHE is a file.
    """
    given = os.environ.get("STOPDOWN_CACHE")
    if not given:
        return _system_cache() / "stopdown"
    folder = Path(given).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise OptionError(
            f"The environment variable STOPDOWN_CACHE is {given}, which is a file.",
            expected="It names the folder in which Stopdown keeps its files.",
            remedy="Set it to a folder, or remove it: unset STOPDOWN_CACHE",
        )
    return folder


def _system_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    given = os.environ.get(variable)
    return Path(given) if given else Path.home() / ".cache"


_PACKAGES = ("stopdown", "torch", "diffusers", "transformers", "accelerate")


def describe_machine() -> dict[str, Any]:
    """Return facts about this machine, ready for JSON, without importing any package that they describe.

    Returns:
        `versions` (package to version, None when it is not installed), `python`, `platform`,
        `cpu` (model), `cores` (physical), `threads` (logical, as far as this process may use
        them), `torch_threads` (None before torch is loaded), `memory_bytes`.
    """
    import psutil

    torch = sys.modules.get("torch")
    return {
        "versions": {name: read_version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": read_cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads() if torch else None,
        "memory_bytes": _read_memory_bytes(),
    }


def has_moving_cursor() -> bool:
    """Return whether lines in the terminal can be overwritten.

    The cell of a notebook claims to be a terminal and keeps every line.
    """
    return "JPY_PARENT_PID" not in os.environ


@contextmanager
def token_in_use(token: str | None) -> Iterator[None]:
    """Give the Hub's client a token within the block; None leaves the environment unchanged."""
    before = os.environ.get("HF_TOKEN")
    if token is not None:
        os.environ["HF_TOKEN"] = token
    try:
        yield
    finally:
        if token is not None:
            del os.environ["HF_TOKEN"]
            os.environ |= {"HF_TOKEN": before} if before is not None else {}


def read_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_package(package: str, extra: str, what: str, *, otherwise: str = "") -> None:
    """Raise an error if a package is not installed.

    Args:
        extra: the extra of Stopdown that installs it.
        what: the feature that needs it, such as `A LoRA`.
        otherwise: end of the remedy, such as ` or leave it out`.
    """
    if importlib.util.find_spec(package) is None:
        raise OptionError(
            f"{what} needs the package {package}, which is not installed.",
            remedy=f"Install it: pip install 'stopdown[{extra}]'{otherwise}",
        )


@functools.cache
def read_cpu_model() -> str:
    """Return the CPU's name as its maker or the system reports it."""
    if sys.platform == "darwin":
        return _read_sysctl("machdep.cpu.brand_string") or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", _read_text("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


@functools.cache
def has_avx512() -> bool:
    """Return whether the CPU has AVX-512, according to Linux; False on other systems."""
    return bool(re.search(r"^flags\s*:.*\bavx512f\b", _read_text("/proc/cpuinfo"), re.MULTILINE))


def _read_memory_bytes() -> int:
    """Return the memory of the machine in bytes, or its container's limit if that is lower."""
    import psutil

    limit = _read_text("/sys/fs/cgroup/memory.max").strip()
    total = int(psutil.virtual_memory().total)
    return min(total, int(limit)) if limit.isdigit() else total


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_sysctl(name: str) -> str:
    command = ["/usr/sbin/sysctl", "-n", name]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


KINDS = ("cpu", "cuda", "mps", "xpu")
"""What PyTorch calls the kinds of devices that a run takes."""


def is_device_name(name: str) -> bool:
    """Return whether a name has the form of a device: `auto`, `cuda`, `cuda:1`, `mps` or `cpu`."""
    kind, _, index = name.strip().lower().partition(":")
    return (
        kind in (*KINDS, *(() if index else ("auto",)))
        and re.fullmatch("[0-9]*", index) is not None
    )


@dataclass(frozen=True)
class Device:
    """A device of this machine.

    Attributes:
        type: `cuda`, `mps`, `cpu`, or what PyTorch calls another accelerator: `xpu`.
        index: which of several, from 0.
        capability: CUDA compute capability, such as (7, 0); None elsewhere.
        memory_bytes: memory of the device, or what this process may use of the machine's.
        missing: why this build of PyTorch cannot compute on it; None when it can.
    """

    type: str
    index: int
    name: str
    capability: tuple[int, int] | None
    memory_bytes: int
    reason: str = ""
    missing: OptionError | None = field(default=None, compare=False)

    @property
    def torch_name(self) -> str:
        """The name for `torch.device`: `cuda:0`, `mps` or `cpu`."""
        return self.type if self.type in ("mps", "cpu") else f"{self.type}:{self.index}"

    def __str__(self) -> str:
        return f"{self.torch_name} ({self.name})"


def list_devices() -> list[Device]:
    """Return the devices of this machine, accelerators first and the CPU last."""
    import torch

    found: list[Device] = []
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        found = [_describe_accelerator(kind, at) for at in range(torch.accelerator.device_count())]
    return [*found, Device("cpu", 0, read_cpu_model(), None, _read_memory_bytes())]


def _describe_accelerator(kind: str, index: int) -> Device:
    import torch

    if kind == "mps":
        memory = int(torch.mps.recommended_max_memory())
        return Device("mps", 0, read_cpu_model(), None, memory)
    facts = torch.get_device_module(kind).get_device_properties(index)
    capability = (int(facts.major), int(facts.minor)) if kind == "cuda" else None
    missing = None
    if capability is not None:
        architecture = str(facts.gcnArchName).partition(":")[0] if torch.version.hip else ""
        shown = f"{kind}:{index} ({facts.name})"
        missing = find_missing_kernels(read_build(), shown, capability, architecture)
    return Device(
        kind, index, str(facts.name), capability, int(facts.total_memory), missing=missing
    )


def read_build() -> Build:
    """Return the installed build of PyTorch, for CUDA or ROCm."""
    import torch

    hip, cuda = torch.version.hip, torch.version.cuda
    toolkit = f"ROCm {hip}" if hip else f"CUDA {cuda}"
    return Build(torch.__version__, toolkit, tuple(torch.cuda.get_arch_list()))


def find_missing_mps() -> OptionError | None:
    """Return an error that explains why MPS is missing on a Mac; None if its macOS is not the cause."""
    import torch

    if not torch.backends.mps.is_built() or torch.backends.mps.is_available():
        return None
    return find_missing_system(torch.__version__, read_macos())


def read_macos() -> tuple[int, ...]:
    """Return the version of macOS, such as (14, 5); empty on other systems."""
    parts = platform.mac_ver()[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def name_device(function: str, given: Any) -> str | None:
    """Return the name of a device that is given by its name or as a `torch.device`; None for none."""
    import torch

    check_type(
        f"{function}(device=...)",
        given,
        (str, torch.device, type(None)),
        'It is a name, "cuda", "cuda:1", "mps" or "cpu", or a torch.device.',
        'Use device="cuda:0", or leave it out.',
    )
    return None if given is None else str(given)


def choose_device(name: str = "auto") -> Device:
    """Return the device with this name, with the reason for the choice.

    Raises:
        OptionError: there is no such device, or this build of PyTorch has no kernels for it.
    """
    return require_kernels(select_device(name, list_devices()))


def require_kernels(device: Device) -> Device:
    """Return the device unchanged if this build of PyTorch has kernels for it.

    Raises:
        OptionError: it has none.
    """
    if device.missing is not None:
        raise device.missing
    return device


def select_device(name: str, devices: list[Device]) -> Device:
    """Return the device with this name from a list in order of preference; kernels are not required."""
    asked = name.strip().lower()
    matches = [x for x in devices if asked in ("auto", x.type, f"{x.type}:{x.index}")]
    missing = find_missing_mps() if asked == "mps" and not matches else None
    if missing is not None:
        raise missing
    if not matches:
        here = ", ".join(str(device) for device in devices)
        raise OptionError(
            f"There is no device {name} here{_explain_no_cuda(asked, devices)}."
            if is_device_name(asked)
            else f"The device {name!r} is unknown.",
            expected=f"This machine, with this build of PyTorch, has: {here}.",
            remedy=f'Use device="{devices[0].torch_name}", or device="auto".',
        )
    usable = [x for x in matches if x.missing is None and x.type != "cpu"]
    chosen = (usable or matches)[0]  # of several cards one with kernels; never the CPU in silence
    reason = (
        f"{chosen.torch_name} was requested." if asked != "auto" else _explain_auto(devices, chosen)
    )
    return dataclasses.replace(chosen, reason=reason)


def _explain_no_cuda(asked: str, devices: list[Device]) -> str:
    """Say that this PyTorch has no CUDA; "" where that isn't why."""
    import torch

    if not asked.startswith("cuda") or any(x.type == "cuda" for x in devices):
        return ""
    is_built = torch.version.cuda or torch.version.hip
    return "" if is_built else f": this PyTorch ({torch.__version__}) is built without CUDA"


def _explain_auto(devices: list[Device], chosen: Device) -> str:
    others = ", ".join(device.torch_name for device in devices if device is not chosen)
    if not others:
        return f"{chosen} is the only device that this build of PyTorch finds here."
    why = (
        "comes first" if chosen is devices[0] else "is the first that this PyTorch has kernels for"
    )
    return f"{chosen} {why}; also here: {others}."


@dataclass(frozen=True)
class Verdict:
    """What is known of a format on a device without trying it.

    Attributes:
        native: the device's arithmetic units compute in it, and no fault of theirs is known.
        is_known: False where nothing is documented, so that only a timed probe can tell.
    """

    native: bool
    reason: str
    is_known: bool = True


class _Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `knowledge/rules/arithmetic.toml`: what devices of one backend compute in."""

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


_FP32 = Verdict(True, "fp32 is native on every device.")


def judge_accelerator(
    backend: str, number: tuple[int, ...] = (), name: str = ""
) -> dict[str, Verdict]:
    """Return a verdict for each format of an accelerator: whether it is native, and the reason.

    Args:
        backend: `cuda`, `rocm` or `mps`.
        number: compute capability, such as (7, 5); on mps the version of macOS, such as (14, 5).
        name: of the device; of AMD's the architecture, such as `gfx90a`; on mps the chip, as
            `read_cpu_model` gives it.
    """
    verdicts = {"fp32": _FP32}
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
        flags: in the spelling of `read_cpu_flags`.
    """
    have = set(flags)
    verdicts = {"fp32": _FP32}
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
    """Return the flags that matter for 16-bit formats, in one spelling for Linux, macOS and torch."""
    return frozenset(_SPELLINGS.get(flag, flag) for flag in flags) & list_known_flags()


def limit_cpu_flags(flags: Iterable[str], limit: str) -> frozenset[str]:
    """Return the flags that oneDNN uses under a limit.

    Args:
        flags: in the spelling of `read_cpu_flags`; those of Arm are not limited.
        limit: value of the variable ONEDNN_MAX_CPU_ISA; "" and unknown names limit nothing.
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
    found = {name for name in _SPELLINGS if name.startswith("hw.") and _read_sysctl(name) == "1"}
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", _read_text("/proc/cpuinfo"), re.M)
    found.update(lines[0].split() if lines else ())
    known = normalise_cpu_flags(found | _ask_torch_for_flags())
    return limit_cpu_flags(known, os.environ.get("ONEDNN_MAX_CPU_ISA", ""))


def find_onednn_formats(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the formats whose convolutions PyTorch gives to oneDNN on a CPU with these flags."""
    have, sets = set(flags), read_rules("instructions")["onednn"]
    return tuple(name for name in PRECISIONS if any(have >= set(one) for one in sets[name]))


def read_onednn_formats() -> tuple[str, ...]:
    """Return the formats whose convolutions PyTorch gives to oneDNN on this machine, as PyTorch reports."""
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


@dataclass(frozen=True)
class Support:
    """How a device supports a format.

    Attributes:
        native: the device's arithmetic units compute in it, and no fault of theirs is known.
        works: a matmul and a convolution ran in it and gave finite values.
        time_ratio: their time over that of fp32 (geometric mean; 2.0 is twice as slow), None when
            they did not run, or when the machine was too busy to tell.
        reason: why a precision is chosen by it, in whole sentences. It has no figures that were measured:
            it stays the same from run to run on one machine.
        measured: the figures that were measured here, a whole sentence; "" for none.
        is_slow: it takes more than `SLOW` times as long as fp32. Times that are measured decide this only
            where nothing is documented, because other work on the machine changes them.
    """

    native: bool
    works: bool
    time_ratio: float | None
    reason: str
    measured: str = ""
    is_slow: bool = False


SLOW = 1.5
"""A format that takes more than this many times as long as fp32 is not chosen for its speed."""


def probe_formats(device: Device) -> dict[str, Support]:
    """Return the support of fp32, bf16 and fp16 on a device, from its maker's data and a short test.

    The answer is cached for the life of the process. The times are stored on this machine for later
    processes, so that their choices stay the same. The probe draws no random numbers. Formats are timed in
    turns, and the least time counts. On a busy machine with noisy times, speed is left unknown and nothing
    is stored.

    Cost: the first call takes less than 0.5 s on a CPU; on an accelerator it synchronises, and loads the
    libraries that a run would load anyway.
    """
    return dict(_probe_once(device.type, device.index))


@functools.cache
def _probe_once(kind: str, index: int) -> tuple[tuple[str, Support], ...]:
    device = next(d for d in list_devices() if (d.type, d.index) == (kind, index))
    verdicts, times = judge_device(device), _time_formats(device)
    return tuple(
        (name, weigh_support(name, verdicts[name], times[name], times["fp32"]))
        for name in PRECISIONS
    )


def judge_device(device: Device) -> dict[str, Verdict]:
    """Return whether a device computes fp32, bf16 and fp16 natively, according to its maker."""
    if device.type == "mps":
        return judge_accelerator("mps", read_macos(), device.name)
    if device.type == "cpu":
        return judge_cpu(read_cpu_flags())
    if device.capability is None:
        unknown = (
            f"Nothing is known of the arithmetic of {device.type} devices but what a probe tells."
        )
        untold = Verdict(True, unknown, is_known=False)
        return {"fp32": _FP32, "bf16": untold, "fp16": untold}
    import torch

    if torch.version.hip:
        name = str(torch.cuda.get_device_properties(device.index).gcnArchName)
        return judge_accelerator("rocm", name=name.partition(":")[0])
    return judge_accelerator("cuda", device.capability, device.name)


@dataclass(frozen=True)
class Timing:
    """Seconds of the two operations of the probe, or the reason why they did not run.

    Attributes:
        matmul_s, convolution_s: the least of all samples: what else runs here only adds to it.
        noise: how far the least quarter of the samples reaches above the least, as a factor.
    """

    matmul_s: float = math.nan
    convolution_s: float = math.nan
    failure: str = ""
    noise: float = 1.0

    @property
    def is_positive(self) -> bool:
        """Whether both times are positive, so that ratios of them exist."""
        return self.matmul_s > 0 and self.convolution_s > 0


MOST_NOISE = 1.5
"""Two times are not compared when their samples disagree by this factor together, but for
`CLEARLY_SLOW`: what takes that many times as long as fp32 when all noise is taken off is slow."""

CLEARLY_SLOW = 2.0

LEAST_RATIO = 1 / 64
"""No device computes 16 bits faster than this beside fp32: matrix units reach a thirtieth."""


def weigh_support(name: str, verdict: Verdict, timing: Timing, reference: Timing) -> Support:
    """Combine the maker's verdict and the measured times of a format into one answer."""
    if timing.failure:
        return Support(
            False, False, None, f"{verdict.reason} It was tried and failed: {timing.failure}"
        )
    if name == "fp32" or reference.failure:
        return Support(verdict.native, True, 1.0, verdict.reason)
    matmul = timing.matmul_s / reference.matmul_s
    convolution = timing.convolution_s / reference.convolution_s
    ratio, noise = math.sqrt(matmul * convolution), timing.noise * reference.noise
    is_noisy = noise > MOST_NOISE and ratio / noise < CLEARLY_SLOW
    if is_noisy or min(matmul, convolution) < LEAST_RATIO:
        busy = "The times measured here are too noisy to show how fast it is."
        return Support(verdict.native, True, None, verdict.reason, busy)
    is_slow = not verdict.is_known and ratio > SLOW
    slow = f" Here it takes more than {SLOW} times as long as fp32." if is_slow else ""
    meaning = f": {_describe_speed(ratio)}" if verdict.native else ""
    measured = (
        f"Measured here, a matmul takes {matmul:.2g} and a convolution {convolution:.2g} times "
        f"the time of fp32{meaning}."
    )
    return Support(verdict.native, True, round(ratio, 3), verdict.reason + slow, measured, is_slow)


def _describe_speed(ratio: float) -> str:
    if ratio < 0.9:
        return "it is faster"
    if ratio <= 1.1:
        return "it saves memory but no time"
    return "it saves memory but is slower"


_SHARE_S = 0.05  # seconds for one operation in one format: three formats and two operations of it
_ROUNDS = 20
_Operation = Callable[[], Any]


def _time_formats(device: Device) -> dict[str, Timing]:
    """Return the time of each format on a device: stored times if there are any, else new measurements.

    Stored times keep the choice of a precision from changing between runs when a ratio is near a limit.
    """
    try:
        found = msgspec.convert(read_json_table(_kept_timings(device)), dict[str, Timing])
    except (UnreadableError, msgspec.ValidationError):
        return _measure_formats(device)
    is_whole = set(found) == set(PRECISIONS) and all(x.is_positive for x in found.values())
    return found if is_whole else _measure_formats(device)


def forget_timings(device: Device) -> None:
    """Have a device timed again by the next probe."""
    with suppress(OSError):
        _kept_timings(device).unlink(missing_ok=True)


def _measure_formats(device: Device) -> dict[str, Timing]:
    """Time all formats in alternation, so that other load affects all of them equally.

    Times whose samples agree are kept for later processes, in `timings` of the cache's folder.
    """
    import torch

    failures: dict[str, str] = {}
    operations: dict[tuple[str, int], _Operation] = {}
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        for name in PRECISIONS:
            try:
                made = _make_operations(device, FORMATS[name].torch_dtype)
                if not all(bool(torch.isfinite(operation()).all()) for operation in made):
                    raise ArithmeticError("a sum of products of 0.125 was not finite")
                operations |= {(name, at): operation for at, operation in enumerate(made)}
            except (RuntimeError, TypeError, NotImplementedError, ArithmeticError) as error:
                failures[name] = f"{take_first_line(error).rstrip('.')}."
        samples = _sample(device, operations)
    found = {
        name: Timing(failure=failures[name])
        if name in failures
        else _sum_up(samples[name, 0], samples[name, 1])
        for name in PRECISIONS
    }
    reference = found["fp32"].noise
    if not failures and all(x.noise * reference <= MOST_NOISE for x in found.values()):
        path = _kept_timings(device)
        with suppress(OSError, OutputError):  # it is measured again
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_beside(path) as part:
                part.write_bytes(msgspec.json.encode(found))
    return found


def _kept_timings(device: Device) -> Path:
    """Return the path of a device's stored times; its name hashes all facts that they depend on."""
    import torch

    facts = (
        device.type,
        device.name,
        device.capability,
        torch.__version__,
        torch.version.cuda or torch.version.hip,
        read_macos() if device.type == "mps" else None,
        (sorted(read_cpu_flags()), torch.get_num_threads()) if device.type == "cpu" else None,
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return cache_folder() / "timings" / f"{digest[:32]}.json"


def _sample(
    device: Device, operations: Mapping[tuple[str, int], _Operation]
) -> dict[tuple[str, int], list[float]]:
    """Time each operation in seconds, in turns over several rounds; slow operations run only twice."""
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in operations}
    for number in range(_ROUNDS):
        for key, operation in list(operations.items())[:: 1 if number % 2 else -1]:
            if number < 2 or number * min(samples[key]) < _SHARE_S:
                synchronise(device)
                start = time.perf_counter()
                operation()
                synchronise(device)
                samples[key].append(time.perf_counter() - start)
    return samples


def _sum_up(matmul: list[float], convolution: list[float]) -> Timing:
    noise = max(_measure_noise(matmul), _measure_noise(convolution))
    return Timing(min(matmul), min(convolution), noise=noise)


def _measure_noise(seconds: list[float]) -> float:
    """Return the ratio of the lower quartile of the samples to their minimum."""
    ordered = sorted(seconds)
    return ordered[max(1, len(ordered) // 4)] / max(ordered[0], 1e-9)


def _make_operations(device: Device, dtype: torch.dtype) -> tuple[_Operation, _Operation]:
    """Return a matmul and a convolution whose exact results fit every format.

    On an accelerator they are large enough to outweigh the launch. On a CPU they are small enough that a
    format computed one value at a time stays within its share.
    """
    import torch

    size, channels, side = (128, 32, 16) if device.type == "cpu" else (2048, 128, 64)

    def fill(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.125, dtype=dtype, device=device.torch_name)

    left, right = fill(size, size), fill(size, size)
    image, kernel = fill(1, channels, side, side), fill(channels, channels, 3, 3)
    return (
        lambda: left @ right,
        lambda: torch.nn.functional.conv2d(image, kernel, padding=1),
    )


def synchronise(device: Device) -> None:
    """Wait until a device has finished its queued work."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device.torch_name)

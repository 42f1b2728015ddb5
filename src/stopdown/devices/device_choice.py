"""Listing of this machine's devices, and choice of one by name."""

from __future__ import annotations

import dataclasses
import platform
import re
from dataclasses import dataclass, field
from typing import Any

from stopdown.argument_types import check_type
from stopdown.devices.environment import read_cpu_model, read_memory_bytes
from stopdown.devices.torch_builds import (
    Build,
    find_missing_kernels,
    find_missing_system,
)
from stopdown.errors import OptionError
from stopdown.out_of_memory import is_out_of_memory

KINDS = ("cpu", "cuda", "mps", "xpu")
"""PyTorch's names of the device types that Stopdown supports."""


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
        type: PyTorch's device type: `cuda`, `mps`, `cpu` or `xpu`.
        index: number of the device among those of its type, from 0.
        name: name of its model.
        capability: CUDA compute capability, such as (7, 0); None elsewhere.
        memory_bytes: memory of the device; for the CPU, the host memory that this process may use.
        reason: why the device was chosen, as a sentence.
        missing: why this build of PyTorch cannot compute on it; None if it can.
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
    return [*found, Device("cpu", 0, read_cpu_model(), None, read_memory_bytes())]


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
    """Return an error if this macOS is too old for PyTorch's MPS; None if that is not the problem."""
    import torch

    if not torch.backends.mps.is_built() or torch.backends.mps.is_available():
        return None
    return find_missing_system(torch.__version__, read_macos())


def read_macos() -> tuple[int, ...]:
    """Return the version of macOS, such as (14, 5); empty on other systems."""
    parts = platform.mac_ver()[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def name_device(function: str, given: Any) -> str | None:
    """Return the name of a device given by name or as a `torch.device`; None for None.

    Args:
        function: name of the public function, for the error about a wrong type.
    """
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
        OptionError: the build has no kernels for the device.
    """
    if device.missing is not None:
        raise device.missing
    return device


def select_device(name: str, devices: list[Device]) -> Device:
    """Return the first device with this name from a list, preferring ones with kernels.

    The chosen device may have no kernels in this build of PyTorch; see `require_kernels`.

    Raises:
        OptionError: no device in the list has this name.
    """
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
    """Return a clause for an error: this PyTorch is built without CUDA; "" if that is not the reason."""
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


def has_lost_device(device: Device) -> bool:
    """Return whether an accelerator refuses to compute anything; one whose memory is full isn't lost."""
    import torch

    if device.type == "cpu":
        return False
    try:
        torch.ones(2, device=device.torch_name).sum().item()
    except Exception as error:  # each backend has errors of its own
        return not is_out_of_memory(error)
    return False


def synchronise(device: Device) -> None:
    """Wait until a device has finished its queued work."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device.torch_name)

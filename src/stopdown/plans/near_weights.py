"""Large weights on an accelerator, which multiplies them many times as fast as a processor does.

Bounds have room for what sums in fp32 round, in any order. A device may be told to round the factors, too
(TF32), so it shows first that it does not. What is small, in float64, or decomposes a matrix stays with
the processor.
"""

from __future__ import annotations

import torch

from stopdown.devices.device_choice import Device, list_devices
from stopdown.scaling.bounds.known_values import Load
from stopdown.scaling.bounds.singular_values import SMALL, count_work

KINDS = ("cuda",)
"""Devices that have memory of their own: NVIDIA's and AMD's."""

TERMS = 16
"""Of the sums that a device is judged by."""


def bring_near(load: Load, device: Device | None = None) -> Load | None:
    """Load weights that take much work to a device that sums in fp32, and others to the host.

    Args:
        device: None for the best one here.

    Returns:
        None for a device that is none of `KINDS`, or does not sum in fp32. The load raises what PyTorch
        does when the device has no memory left.
    """
    device = device or list_devices()[0]
    if device.type not in KINDS or device.missing or not _sums_in_fp32(device.torch_name):
        return None

    def load_near(name: str) -> torch.Tensor:
        tensor = load(name)
        return tensor.to(device.torch_name if _takes_work(tensor) else "cpu")

    return load_near


def _takes_work(tensor: torch.Tensor) -> bool:
    is_matrix = tensor.dim() == 2 and tensor.is_floating_point()
    return is_matrix and tensor.dtype != torch.float64 and count_work(tensor) > SMALL


def _sums_in_fp32(device: str) -> bool:
    made = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, TERMS, generator=made) for _ in range(2))
    try:
        found = left.to(device) @ right.to(device).T
    except RuntimeError:  # no memory, or no kernel
        return False
    return is_summed_in_fp32(found.cpu(), left, right)


def is_summed_in_fp32(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether `found` is as near to `left @ right.T` in float64 as sums in fp32 are in any order.

    Args:
        left, right: `[n, k]` each in fp32; the fewer `k`, the more do factors that were rounded stand out.
    """
    wide = left.double(), right.double()
    sizes = wide[0].abs() @ wide[1].abs().T
    error = (found.double() - wide[0] @ wide[1].T).abs()
    return bool((error <= 1.01 * left.shape[1] * 2.0**-24 * sizes).all())

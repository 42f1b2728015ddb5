"""Load large weights to an accelerator for proofs of bounds, as it multiplies them much faster than the
CPU.

Bounds allow for the rounding of fp32 sums in any order. A device can be configured to round the factors
too (TF32), so a test product must show that it doesn't. Small weights, float64 and matrix decompositions
stay on the CPU.
"""

from __future__ import annotations

import torch

from stopdown.devices.device_choice import Device, list_devices
from stopdown.mapped_weights import Load

KINDS = ("cuda",)
"""Types of the devices that are used: NVIDIA's and AMD's cards, with memory of their own."""

LARGE = 1 << 27
"""`out * in * min(out, in)` of a matrix above which it's brought to a device: the limit from which bounds
compute a Gram matrix in fp32. Smaller ones are computed in float64 on the host in any case."""

TERMS = 16
"""Terms of each sum in the test product that shows whether a device sums in fp32."""


def bring_near(load: Load, device: Device | None = None) -> Load | None:
    """Wrap a tensor loader so that large matrices are loaded to an accelerator, and others to the host.

    Args:
        load: returns a tensor by its name.
        device: None for the best one of this machine.

    Returns:
        The new loader, which raises PyTorch's error if the device has no memory left; None if the device's
        type isn't in `KINDS`, or if it doesn't sum in fp32.
    """
    device = device or list_devices()[0]
    if device.type not in KINDS or device.missing or not _sums_in_fp32(device.torch_name):
        return None

    def load_near(name: str) -> torch.Tensor:
        tensor = load(name)
        return tensor.to(device.torch_name if _is_large(tensor) else "cpu")

    return load_near


def _is_large(tensor: torch.Tensor) -> bool:
    is_matrix = tensor.dim() == 2 and tensor.is_floating_point()
    is_wide = tensor.dtype == torch.float64
    return is_matrix and not is_wide and tensor.numel() * min(tensor.shape) > LARGE


def _sums_in_fp32(device: str) -> bool:
    made = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, TERMS, generator=made) for _ in range(2))
    try:
        found = left.to(device) @ right.to(device).T
    except RuntimeError:  # no memory, or no kernel
        return False
    return is_summed_in_fp32(found.cpu(), left, right)


def is_summed_in_fp32(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether `found` is as close to the exact `left @ right.T` as fp32 sums in any order are.

    Args:
        found: `[n, n]`, the product to test.
        left, right: `[n, k]` in fp32. The smaller k, the more clearly rounded factors stand out.
    """
    wide = left.double(), right.double()
    sizes = wide[0].abs() @ wide[1].abs().T
    error = (found.double() - wide[0] @ wide[1].T).abs()
    return bool((error <= 1.01 * left.shape[1] * 2.0**-24 * sizes).all())

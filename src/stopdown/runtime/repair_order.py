"""Decide which remedies to try after NaN or Inf, and in which order: plain rules, which read no tensor.

Remedies that preserve more speed and precision come first: the same call again if it was intermittent,
exponents, exponents with an fp32 residual stream, an fp32 module, the whole component in a wider format.
Nothing is clamped, and only the faulty component is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OnFault = Literal["repair", "raise", "warn"]
ON_FAULT: tuple[OnFault, ...] = ("repair", "raise", "warn")

_BY_RANGE = ("range", "clamped", "kernel", "unknown")
_HOPELESS = ("weight", "input")
_MOST_FP32_MODULES = 2  # each one that does not do costs a call


@dataclass(frozen=True)
class Remedy:
    """A remedy to try for a fault.

    Attributes:
        action: `rescaled`, `fp32-module`, `cast`, or `replayed` without a change.
        precision: of the component, or of the fp32 module.
        reason: for the record, in a sentence.
        path: of the fp32 module.
        residual: precision of a rescaled component's residual stream, `native` or `fp32`.
    """

    action: Literal["replayed", "rescaled", "fp32-module", "cast"]
    precision: str
    reason: str
    path: str = ""
    residual: str = "native"

    @property
    def recorded(self) -> str:
        return self.precision if self.action == "cast" else self.action


def list_remedies(
    kind: str, precision: str, around: tuple[str, ...] = (), has_bf16: bool = False
) -> tuple[Remedy, ...]:
    """List the remedies to try after a fault, best first; empty if none can help.

    Args:
        kind: of the fault, as of `Culprit`.
        precision: of the component.
        around: paths of the modules around the fault that may run in fp32, innermost first.
        has_bf16: whether the device computes bf16 natively.
    """
    if kind in _HOPELESS:
        return ()
    found = []
    if kind == "intermittent":
        why = "The same call was finite when it was run again."
        found.append(Remedy("replayed", precision, why))
    if precision == "fp16" and kind in _BY_RANGE:
        why = "Its activations now fit in fp16, and it still computes the same function."
        found.append(Remedy("rescaled", "fp16", why))
        streamed = (
            "Its activations now fit in fp16. Its residual stream stays in fp32, because without that "
            "the result wasn't close enough to fp32's."
        )
        found.append(Remedy("rescaled", "fp16", streamed, residual="fp32"))
    if precision not in ("fp16", "bf16"):
        return tuple(found)
    for path in around[:_MOST_FP32_MODULES]:
        why = f"The fault is inside {path}; only this module runs in fp32."
        found.append(Remedy("fp32-module", "fp32", why, path))
    why = "fp32 holds values that 16 bits can't."
    if precision == "fp16" and has_bf16:
        bf16 = "bf16 has the range of fp32, and the device computes it natively."
        found.append(Remedy("cast", "bf16", bf16))
    elif precision == "fp16":
        why = "The device doesn't compute bf16 natively; fp32 holds values that fp16 can't."
    return (*found, Remedy("cast", "fp32", why))

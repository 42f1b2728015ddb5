"""What to try after a fault, in which order, and why: plain rules over plain facts, without a tensor.

The order goes from what keeps most of the speed and precision to what keeps least: the same call again
where nothing was wrong with it, exponents, exponents with an fp32 residual stream, an fp32 module, the
component in a wider format. Nothing is clamped, and nothing but the component at fault is touched.
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
    """One thing to try.

    Attributes:
        action: what `repairs.name_action` calls it, or `replayed`.
        path: of the fp32 module.
        residual: what a rescaled component keeps its residual stream in: `native` or `fp32`.
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
    """List the remedies to try after a fault, best first; empty if nothing here can help.

    Args:
        around: modules around the fault that can be an fp32 module, innermost first.
    """
    if kind in _HOPELESS:
        return ()
    found = []
    if kind == "intermittent":
        why = "The same call was finite when it was run again."
        found.append(Remedy("replayed", precision, why))
    if precision == "fp16" and kind in _BY_RANGE:
        why = "Its activations now fit into fp16, and what it computes is unchanged."
        found.append(Remedy("rescaled", "fp16", why))
        streamed = (
            "Its activations now fit into fp16. Its residual stream stays in fp32, because without that "
            "the result was not close enough to fp32's."
        )
        found.append(Remedy("rescaled", "fp16", streamed, residual="fp32"))
    if precision not in ("fp16", "bf16"):
        return tuple(found)
    for path in around[:_MOST_FP32_MODULES]:
        why = f"The fault is inside {path}; only this module runs in fp32."
        found.append(Remedy("fp32-module", "fp32", why, path))
    why = "fp32 holds values that 16 bits cannot."
    if precision == "fp16" and has_bf16:
        bf16 = "bf16 has the range of fp32, and the device computes it natively."
        found.append(Remedy("cast", "bf16", bf16))
    elif precision == "fp16":
        why = "The device does not compute bf16 natively; fp32 holds values that fp16 cannot."
    return (*found, Remedy("cast", "fp32", why))

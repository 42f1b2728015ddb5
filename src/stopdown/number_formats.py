"""Floating-point formats as data, with their ranges and precision, and formatting of figures as text.

Formats have one name in text, JSON and flags: `fp16`, `bf16`, `fp32`… Figures are those of IEEE 754-2019
for fp16, fp32 and fp64, and of the OCP 8-bit specification for fp8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stopdown.errors import OptionError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Format:
    """One floating-point format.

    Attributes:
        name: name in flags and records.
        torch_name: name in the `torch` module.
        safetensors_name: dtype in a safetensors header.
        largest: largest finite value.
        smallest_normal: smallest positive value with full precision.
        smallest: smallest positive (subnormal) value.
        significant_bits: bits of precision, including the implicit one.
        size_bytes: bytes per value.
    """

    name: str
    torch_name: str
    safetensors_name: str
    largest: float
    smallest_normal: float
    smallest: float
    significant_bits: int
    size_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.torch_name)


FORMATS = {
    entry.name: entry
    for entry in (
        Format("fp64", "float64", "F64", (2 - 2**-52) * 2.0**1023, 2.0**-1022, 5e-324, 53, 8),
        Format("fp32", "float32", "F32", (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149, 24, 4),
        Format("bf16", "bfloat16", "BF16", (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133, 8, 2),
        Format("fp16", "float16", "F16", 65504.0, 2.0**-14, 2.0**-24, 11, 2),
        Format("fp8-e4m3", "float8_e4m3fn", "F8_E4M3", 448.0, 2.0**-6, 2.0**-9, 4, 1),
        Format("fp8-e5m2", "float8_e5m2", "F8_E5M2", 57344.0, 2.0**-14, 2.0**-16, 3, 1),
    )
}

FP16 = FORMATS["fp16"]

NEAR_FP16_END = FP16.largest // 1e4 * 1e4
"""Magnitude from which a constant in code means fp16's maximum: 6e4, 65000 or 65504."""

PRECISIONS = ("fp32", "bf16", "fp16")
"""Formats in which a component can run."""

_ALIASES = {
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "full": "fp32",
    "f32": "fp32",
}


def parse_precision(text: str, also: Iterable[str] = ()) -> str:
    """Return the name of a precision from its name or a common alias.

    Args:
        also: other valid words, which the error lists.

    Raises:
        OptionError: the precision is unknown.
    """
    name = _ALIASES.get(text.strip().lower(), text.strip().lower())
    if name not in PRECISIONS and "." in name:
        raise OptionError(
            f"{text} is neither a precision nor a plan. Plan files end in .json.",
            expected=f"Known values are {', '.join((*PRECISIONS, *also))}, auto, and the path of a plan.",
            remedy='For example: precision="plan.json".',
        )
    if name not in PRECISIONS:
        raise OptionError(
            f"The precision {text!r} is unknown.",
            expected=f"Known values are {', '.join((*PRECISIONS, *also))}, auto, and the path of a "
            "plan, such as plan.json.",
            remedy='For example: precision="fp16", or precision="transformer=bf16,vae=fp32".',
        )
    return name


def find_format(dtype: torch.dtype | str) -> Format | None:
    """Return the format of a torch dtype or of a name of it; None if it is not a floating dtype."""
    text = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    for entry in FORMATS.values():
        if text in (entry.name, entry.torch_name, entry.safetensors_name):
            return entry
    return None


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype: `fp16` for `torch.float16`, `int64` for `torch.int64`."""
    found = find_format(dtype)
    return found.name if found else str(dtype).removeprefix("torch.")


def format_bytes(count: float) -> str:
    """Format a number of bytes: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit != "MiB" else f"{count:.1f} MiB"
        count /= 1024
    return f"{count:.1f} GiB"


def format_figure(value: float) -> str:
    """Format a number with two significant digits and no exponent: `0.13`, `2.4`, `24`, `120`, `4,600`."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if 100 <= abs(rounded) < 1e9 else f"{value:.2g}"


def format_about(seconds: float) -> str:
    """Format an estimated time, given in seconds: `40 s`, `12 min`, `2.5 h`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def format_range(least: float, most: float) -> str:
    """Format a range of estimated seconds: `15 to 31 min`, `20 s to 2 min`; one time if both look equal."""
    first, last = format_about(least), format_about(most)
    if least >= 60 and last.endswith(" min"):
        first = f"{least / 60:.0f} min"
    if first == last:
        return first
    number, unit = first.split()
    return f"{number if last.endswith(f' {unit}') else first} to {last}"


def list_some(names: Sequence[str], most: int = 3) -> str:
    """Join the first `most` names, and count the rest: `a, b, c and 4 more`."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def list_all(names: Sequence[str]) -> str:
    """Join names: `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_bytes(text: str, name: str = "memory") -> int:
    """Parse an amount of memory: `8GiB`, `500 MiB`, or `8GB`, which means GiB, as on graphics cards.

    Args:
        name: name of the argument, for the error.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])i?b?|b)\s*", text.lower())
    amount = float(found.group(1)) * 2.0 ** _UNITS[found.group(2) or ""] if found else 0.0
    if amount < 1:
        number = re.fullmatch(r"\s*0*[1-9][0-9]*(?:\.[0-9]+)?\s*", text)
        raise OptionError(
            f'{name}="{text}" ' + ("has no unit." if number else "isn't an amount of memory."),
            expected="An amount is a number and a unit: 8GiB, 500MiB.",
            remedy=f'Use {name}="{text.strip() if number else 8}GiB".',
        )
    return int(amount)

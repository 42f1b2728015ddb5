"""Sentences about a call with NaN or Inf, for errors and records: what was found and where, its cause,
the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stopdown.errors import NonFiniteError
from stopdown.module_calls.callee import Callee
from stopdown.number_formats import find_format
from stopdown.numerics import count_non_finite, iterate_tensors, measure_amax
from stopdown.runtime.call_check import CallCheck, is_operation, list_readable
from stopdown.runtime.guarded_call import Call
from stopdown.scaling import ComponentCall


@dataclass(frozen=True)
class Fault:
    """A component call with NaN or Inf in its output or its arguments, or with a clamp that hid them.

    Attributes:
        guarded: what the guard knows of the component call.
        call: as the guard received it, so that it can be repeated.
        output: of the call.
        check: the result of checking the call.
        precision: of most of the component's weights.
        step: of the run, from 0; None outside of denoising.
        place: in words, such as ` at step 1 of 2`.
        reason: why the precision was chosen; "" if unknown.
        is_tracked: whether the component is being trained.
    """

    guarded: Call
    call: ComponentCall
    output: Any
    check: CallCheck
    precision: str
    step: int | None
    place: str
    reason: str = ""
    is_tracked: bool = False

    @property
    def callee(self) -> Callee:
        return self.guarded.callee

    @property
    def component(self) -> str:
        """The name in records: `vae.decode`."""
        return self.guarded.name


def name_fault(fault: Fault) -> str:
    """Describe in one sentence which NaN, Inf or clamp was found, in which component and where."""
    where = f" in {fault.precision}{fault.place}"
    if clamped := fault.check.clamped:
        begun = (
            f"`{fault.component}` returned finite values although values inside it weren't finite: "
        )
        if fault.check.is_hidden:
            names = ", ".join(dict.fromkeys(clamped))
            return f"{begun}{names} turned Inf into finite values{where}."
        hits = [x for x in clamped if not is_operation(x)]
        count = "1 clamp" if len(hits) == 1 else f"{len(hits)} clamps"
        return f"{begun}{count} at fp16's maximum took effect{where}, the first in {hits[0]}."
    counts = describe_counts(list_readable(fault.output))
    return f"`{fault.component}` returned {counts}{_describe_part(fault)}{where}."


_NAMES = {
    "text_encoder": "the text encoder",
    "transformer": "the transformer",
    "unet": "the UNet",
    "vae.decode": "the VAE decoder",
    "vae.encode": "the VAE encoder",
}


def word_overflow(component: str, overflow: str) -> str:
    """Write `Overflow in the UNet: an activation reached 113,000, above fp16's maximum of 65,504.`, or "".

    Args:
        overflow: from `Culprit.overflow`; "" if there's none.
    """
    return f"Overflow in {_NAMES.get(component, f'`{component}`')}: {overflow}." if overflow else ""


def make_fault_error(
    fault: Fault, found: str = "", *, has_bf16: bool, verdict: str = ""
) -> NonFiniteError:
    """Make the error that ends a run at a fault.

    Args:
        found: further facts about the origin of the fault, in sentences.
        has_bf16: whether the device computes bf16 natively.
        verdict: the fault in one sentence for people; "" if only the output is known.
    """
    precision = fault.precision
    inputs = [
        t for t in iterate_tensors((fault.call.args, fault.call.kwargs)) if t.is_floating_point()
    ]
    parts = [found, _describe_inputs(inputs, precision), fault.reason]
    what = name_fault(fault)
    if verdict:
        what, parts = verdict, [what, *parts]
    return NonFiniteError(
        what,
        expected=" ".join(filter(None, parts)),
        remedy=suggest_remedy(fault.callee, precision, has_bf16=has_bf16),
    )


def describe_counts(tensors: Iterable[torch.Tensor]) -> str:
    """Count NaN and Inf in floating tensors, in words, as `word_counts` does; "" if all are finite."""
    floats = [x for x in tensors if x.is_floating_point()]
    nan, infinite = map(sum, zip((0, 0), *map(count_non_finite, floats), strict=True))
    total = sum(x.numel() for x in floats)
    return word_counts(nan, infinite, total) if nan + infinite else ""


def word_counts(nan: int, infinite: int, total: int) -> str:
    """Write counts as `3 NaN and 1 Inf out of 24 values`, or `only NaN (2,048 values)`."""
    named = {name: count for name, count in (("NaN", nan), ("Inf", infinite)) if count}
    values = f"{total:,} value{'s' * (total != 1)}"
    if total in named.values():
        return f"only {', '.join(named)} ({values})"
    return f"{' and '.join(f'{count:,} {name}' for name, count in named.items())} out of {values}"


def suggest_remedy(callee: Callee, precision: str, *, has_bf16: bool) -> str:
    """Suggest, in a sentence, the precision to use for a component that returned NaN or Inf in the
    given one.
    """
    if precision == "fp32":
        return (
            "It already runs in fp32: its weights may be damaged, or an input may be out of "
            "range. Load the model again from its source."
        )
    wider = (
        f'Use `precision="{callee.name}={"bf16" if precision == "fp16" and has_bf16 else "fp32"}"`'
    )
    if precision != "fp16":
        return f"{wider}."
    return f'{wider}, or load the model with `precision="fp16"`, which scales its activations into range.'


def _describe_part(fault: Fault) -> str:
    """Describe where in a call's output NaN or Inf is, as ` (row 2 of 2, frame 3 of 5)`; "" if
    everywhere.
    """
    given = fault.call.named
    for tensor in iterate_tensors(fault.output):
        if tensor.is_floating_point() and bool((bad := ~torch.isfinite(tensor)).any()):
            place = describe_place(bad, name_axes(fault.callee, tuple(tensor.shape), given))
            return f" ({place})" if place else ""
    return ""


def _describe_inputs(inputs: list[torch.Tensor], precision: str) -> str:
    """Describe a failed call's inputs by their number of NaN and Inf, or else by their largest
    magnitude.
    """
    spoilt = sum(sum(count_non_finite(tensor)) for tensor in inputs)
    if spoilt:
        return f"Its inputs already held {spoilt} values that aren't finite."
    floats = [tensor for tensor in inputs if tensor.is_floating_point()]
    if not floats:
        return ""
    largest = max(measure_amax(tensor) for tensor in floats)
    found = find_format(precision)
    ends = f"; {precision}'s maximum is {found.largest:.5g}" if found else ""
    return f"Its inputs were finite (largest {largest:.5g}{ends})."


_MOST_RANGES = 4


def name_axes(callee: Callee, shape: tuple[int, ...], arguments: dict[str, Any]) -> tuple[str, ...]:
    """Name each dimension of a call's output: `row`, `frame` or `token`; "" for channels and sizes.

    Args:
        shape: of the output. Five dimensions are a video, `[B, C, T, H, W]`; for a denoiser also
            `[B, T, C, H, W]`, as the number of latent channels shows.
        arguments: of the call. With `num_frames`, an autoencoder's batch dimension contains frames.
    """
    if len(shape) == 3:
        return ("row", "token", "")
    if len(shape) == 4 and "num_frames" in arguments:
        return ("frame", "", "", "")
    if len(shape) == 5:
        return ("row", "frame", "", "", "") if _has_frames_first(callee, shape) else _VIDEO
    return ("row", *("",) * (len(shape) - 1))


_VIDEO = ("row", "", "frame", "", "")


def _has_frames_first(callee: Callee, shape: tuple[int, ...]) -> bool:
    config = getattr(callee.owner, "config", None)
    channels = getattr(config, "out_channels", None) or getattr(config, "in_channels", None)
    return callee.stage == "denoise" and shape[2] == channels and shape[1] != channels


def describe_place(bad: torch.Tensor, axes: tuple[str, ...]) -> str:
    """Describe where values are bad, such as `row 2 of 2, frames 3 to 5 of 9`; "" if everywhere.

    Args:
        bad: boolean, of the output's shape.
        axes: names of the dimensions, from `name_axes`.

     Cost: one pass and one host read for each named dimension.
    """
    return ", ".join(_describe_axes(bad, axes))


def _describe_axes(bad: torch.Tensor, axes: tuple[str, ...]) -> Iterator[str]:
    for axis, name in enumerate(axes):
        others = tuple(d for d in range(bad.dim()) if d != axis)
        hit = (bad.any(dim=others) if others else bad).nonzero().flatten().tolist()
        if name and len(hit) < bad.shape[axis]:
            plural = "s" if len(hit) > 1 else ""
            yield f"{name}{plural} {_name_ranges(hit)} of {bad.shape[axis]}"


def _name_ranges(indices: list[int]) -> str:
    """Describe indices from 0 as `1, 3 to 5 and 8`; for many ranges, the ends and the count."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    if len(ranges) > _MOST_RANGES:
        return f"{indices[0] + 1} to {indices[-1] + 1}, {len(indices)} of them,"
    told = [f"{a + 1}" if a == b else f"{a + 1} to {b + 1}" for a, b in ranges]
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"

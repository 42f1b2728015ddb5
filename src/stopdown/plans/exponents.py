"""Find exponents for one component from the calls that a program made of it, or the reason why it has none.

Calls of one kind (same method, shapes and plain arguments) share one capture; their ranges are merged. The
exponents are tested before they are accepted (`trial`): folded in, the component must return the same bits
in fp32, and finite, close results in fp16.

Not covered: calls with larger activations than those measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from stopdown.errors import CaptureError, ScalingError, StopdownError, take_first_line
from stopdown.records import Scaling
from stopdown.scaling import ComponentCall, scale_calls
from stopdown.weight_checks import check_weights

_MADE_UP = "Encoding was measured on what the decoder gave, because the pipeline doesn't encode."


def scale_component(
    module: torch.nn.Module,
    calls: Sequence[ComponentCall],
    residual: str = "native",
    ranges: str = "measured",
) -> tuple[Scaling, tuple[str, ...]]:
    """Find and test exponents for a component in fp32; return them with notes as sentences.

    The module is left unchanged. Made-up calls that can't be measured are left out.

    Args:
        residual: `fp32` keeps its residual stream in fp32 if its architecture allows it.
        ranges: where the activations' ranges come from, as for `scale_calls`.

    Raises:
        ScalingError: no exponents exist, short of running the whole component in fp32.

    Cost: a capture (seconds) for each kind of call, three with an fp32 residual, a forward in fp32
    for each call, and for each kind two more, one in bf16 and one in fp16.
    """
    check_weights(module)
    real = group_calls([call for call in calls if not call.made_up])
    made_up = group_calls([call for call in calls if call.made_up])
    find = partial(_find_exact, module, residual=residual, ranges=ranges)
    if not made_up:
        return find(real), ()
    try:
        return find([*real, *made_up]), (_MADE_UP,)
    except (
        Exception
    ) as error:  # a model's code may do anything with a call that its authors never made
        note = f"Encoding wasn't measured: {describe_unscaled(error)}"
        return find(real), (note,)


def _find_exact(
    module: torch.nn.Module,
    kinds: Sequence[Sequence[ComponentCall]],
    residual: str,
    ranges: str,
) -> Scaling:
    placed = [[call.place(module) for call in group] for group in kinds]
    scaling = scale_calls(module, placed, residual, ranges)
    if "" in scaling.fp32_modules:
        raise ScalingError("Only the whole component in fp32 would keep its values in range.")
    return scaling


def group_calls(calls: Sequence[ComponentCall]) -> list[list[ComponentCall]]:
    """Group calls by kind, so that all calls of a group have the same graph."""
    groups: dict[str, list[ComponentCall]] = {}
    for call in calls:
        groups.setdefault(call.key, []).append(call)
    return list(groups.values())


def leave_out_failing(
    module: torch.nn.Module, calls: Sequence[ComponentCall]
) -> list[ComponentCall]:
    """Return the calls without those that were derived from others and that the module fails on.

    Cost: a forward for each made-up call.
    """
    return [call for call in calls if not call.made_up or _runs(module, call)]


def _runs(module: torch.nn.Module, call: ComponentCall) -> bool:
    function, args, kwargs = call.place(module)
    try:
        with torch.no_grad():
            function(*args, **kwargs)
    except Exception:  # Allegro's autoencoder takes no clip of so few frames
        return False
    return True


def describe_unscaled(error: Exception) -> str:
    """Explain, in a sentence for a plan, why a component was not scaled.

    Args:
        error: what the search for exponents raised.
    """
    if isinstance(error, (CaptureError, ScalingError)):
        return error.what
    if isinstance(error, StopdownError):
        return str(error)
    reason = take_first_line(error)[:300]
    return f"Finding its exponents failed with {type(error).__name__}: {reason}"

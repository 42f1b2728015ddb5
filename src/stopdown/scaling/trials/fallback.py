"""Run single matrices in fp16 between casts and all else in fp32, for modules that powers of two can't fix.

If code can't be traced, no exponents can be found, and some code doesn't run with them. But hooks can
measure the inputs and outputs of linears and convolutions during a run in fp32. Those whose weights,
inputs and outputs fit in fp16 run in fp16 between casts. The others, and everything between (sums,
norms, products of two activations), stay in fp32. A trial run then checks the result.

Not covered: matrices that a module multiplies without calling the submodule that owns them: they stay
in fp32.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from stopdown.errors import CaptureError, ScalingError, TrialError
from stopdown.fold_names import name_parameters
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import PlainCall
from stopdown.module_calls.kept_state import run_call
from stopdown.number_formats import list_some
from stopdown.numerics import (
    bound_values,
    count_attention_on_cpu,
    headroom_bits,
    iterate_tensors,
)
from stopdown.scaling.exponents.solver import ASKED_BITS
from stopdown.scaling.graph.capture import find_kept_buffers
from stopdown.scaling.trials.trial import Run, count_layer_flops, try_scaling
from stopdown.scaling_records import ResidualStream, Scaling

Failure = CaptureError | ScalingError

MOST_NAMED = 5

_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count_attention_on_cpu,
}
"""Formulas of operations that PyTorch's FLOP counter lacks."""


@dataclass
class _Seen:
    """Measurements of a module's calls.

    Attributes:
        amax: maps the path of each linear or convolution that was called to the largest magnitude of its
            inputs, outputs, weight and bias.
        layer_flops: maps the path to the FLOPs of all its calls.
        returns_fp16: whether all outputs of the module fit in fp16.
        flops: matmul FLOPs of all calls, including products of two values.
    """

    amax: dict[str, float] = field(default_factory=dict)
    layer_flops: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    returns_fp16: bool = True
    flops: float = 0.0


def scale_by_hooks(
    module: torch.nn.Module,
    calls: Sequence[PlainCall],
    failure: Failure,
    reference: Callable[[], Sequence[Run]] | None = None,
) -> Scaling:
    """Choose the linears and convolutions of a module that run in fp16, by measuring them in its calls.

    All else stays fp32; no weight is scaled.

    Args:
        module: module in fp32 whose calls can't be captured, or don't run with exponents.
        calls: example calls.
        failure: the reason, which becomes part of the result's note.
        reference: returns the reference for a trial; None for no trial.

    Raises:
        CaptureError, ScalingError: of `failure`'s kind, if no matrix fits into fp16 or the trial fails.

    Cost: two forwards in fp32 for each call, and one in fp16 (not of large calls on a CPU).
    """
    seen = _measure_calls(module, calls)
    narrow = [path for path, amax in seen.amax.items() if _fits(amax)]
    if not narrow:
        raise _explain_failure(failure, "no linear or convolution that is called fits into fp16")
    scaling = _describe(module, seen, narrow, failure)
    if reference is None:
        return scaling
    try:
        return replace(scaling, trial=try_scaling(module, scaling, reference()))
    except TrialError as error:
        raise _explain_failure(failure, f"i{error.what[1:].rstrip('.')}") from error


def _measure_calls(module: torch.nn.Module, calls: Sequence[PlainCall]) -> _Seen:
    seen = _Seen()
    with Patches() as patches:
        for path, part in module.named_modules():
            if path and isinstance(part, (torch.nn.Linear, _ConvNd)):
                hook = partial(_record_layer_call, seen, path)
                patches.defer(part.register_forward_hook(hook, with_kwargs=True).remove)
        for call, args, kwargs in calls:
            output, _ = run_call(module, call, args, kwargs)
            floats = [x for x in iterate_tensors(output) if x.is_floating_point()]
            seen.returns_fp16 &= all(_fits(_measure_amax(x)) for x in floats)
    seen.flops = _count_flops(module, calls) or sum(seen.layer_flops.values())
    return seen


def _count_flops(module: torch.nn.Module, calls: Sequence[PlainCall]) -> float:
    """Count the FLOPs of calls, including products of two values; 0.0 if the code doesn't run so.

    Code that compiles itself, such as `torch.cond`, is left out of the compiler. What the compiler makes
    of it under a counter returns other containers, in every later call as well.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with contextlib.suppress(Exception), torch.compiler.set_stance("force_eager"), counter:
        for call, args, kwargs in calls:
            run_call(module, call, args, kwargs)
        return float(counter.get_total_flops())
    return 0.0


def _record_layer_call(
    seen: _Seen, path: str, part: Any, args: Any, kwargs: Any, output: torch.Tensor
) -> None:
    floats = [x for x in iterate_tensors((args, kwargs, output)) if x.is_floating_point()]
    given = floats[0]
    if path not in seen.amax:
        floats += [x for x in (part.weight, part.bias) if x is not None]
    seen.amax[path] = max(seen.amax.get(path, 0.0), *map(_measure_amax, floats))
    seen.layer_flops[path] += count_layer_flops(part, given, output)


def _measure_amax(value: torch.Tensor) -> float:
    """Return a tensor's largest magnitude; inf if any element is not finite."""
    bounds = bound_values([value])
    amax = 0.0 if bounds is None else float(bounds.abs().max())
    return amax if math.isfinite(amax) else math.inf


def _fits(amax: float) -> bool:
    return amax == 0 or headroom_bits(amax, torch.float16) >= ASKED_BITS


def _describe(
    module: torch.nn.Module,
    seen: _Seen,
    narrow: list[str],
    failure: Failure,
) -> Scaling:
    kept = find_kept_buffers(module)
    inside = tuple(f"{path}." for path in narrow)
    wide = [name for name, x in name_parameters(module).items() if x.is_floating_point()]
    wide = [name for name in wide if name not in kept and not name.startswith(inside)]
    done = sum(seen.layer_flops[path] for path in narrow)
    share = max(0.0, 1 - done / (seen.flops or 1.0))
    tightest = max(narrow, key=seen.amax.__getitem__)
    return Scaling(
        headroom_bits=headroom_bits(seen.amax[tightest], torch.float16),
        tightest=tightest,
        fp32_flops=share,
        kept_buffers=tuple(sorted(kept)),
        stream=ResidualStream(
            cast_output_up=tuple(sorted(narrow)),
            cast_input_down=tuple(sorted(narrow)),
            cast_input_up=("", *_find_wide(module, narrow)),
            kept=tuple(sorted(wide)),
            returns=seen.returns_fp16,
        ),
        note=_explain(seen, narrow, share, failure),
    )


def _find_wide(module: torch.nn.Module, narrow: list[str]) -> list[str]:
    """List the modules with parameters of their own that stay in fp32, as their inputs must be cast to
    fp32.

    A cast of the whole module's inputs alone doesn't suffice: its code may cast its arguments back.

    Args:
        narrow: paths of the linears and convolutions in fp16.
    """
    return [
        path
        for path, part in module.named_modules()
        if path and path not in narrow
        if any(x.is_floating_point() for x in part.parameters(recurse=False))
    ]


def _explain(seen: _Seen, narrow: list[str], share: float, failure: Failure) -> str:
    beyond = [path for path in seen.amax if path not in narrow]
    why = "Without a graph" if isinstance(failure, CaptureError) else "So"
    text = (
        f"{failure.what} {why} there are no exponents: {len(narrow)} of "
        f"{len(seen.amax)} matrices run in fp16 between casts, and all else in fp32, "
        f"{100 * share:.1f} % of the matmul work."
    )
    if beyond:
        text += f" Beyond fp16: {list_some(beyond, MOST_NAMED)}."
    return text


def _explain_failure(failure: Failure, why: str) -> Failure:
    what = failure.what.rstrip(".")
    return type(failure)(
        f"{what}. Fp32 modules found by hooks don't do either: {why}.", remedy=failure.remedy
    )

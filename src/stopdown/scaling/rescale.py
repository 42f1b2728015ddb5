"""`rescale_`: search scale exponents for a module and example calls, try them, and fold them into the
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stopdown.argument_types import check_ranges, check_residual, check_type
from stopdown.errors import OptionError, ScalingError
from stopdown.interception.arguments import hook_arguments
from stopdown.interception.autocast import read_autocast, watched_autocast, without_autocast
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import PlainCall, explain_call
from stopdown.module_calls.kept_state import HeldContainers, KeptState
from stopdown.scaling.folding.folds import (
    Rescaling,
    cast_,
    check_casts,
    fold_scaling,
    keeps_fp32,
    require_module,
)
from stopdown.scaling.trials.call_search import scale_calls
from stopdown.scaling.watch.call_watch import CallWatch, WatchOptions
from stopdown.scaling_records import Scaling
from stopdown.weight_checks import check_weights, refuse_quantised


def rescale_(
    module: torch.nn.Module,
    args: torch.Tensor | Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    calls: Sequence[PlainCall] = (),
    residual: str | None = None,
    ranges: str | None = None,
    cast: bool = False,
) -> Rescaling:
    """Scale a module's weights by powers of two so that these calls run in fp16 without overflow.

    In fp32, these calls return the same values as before, bit for bit; no dtype changes. A call with
    other optional arguments or outputs is traced, and refused if the exponents don't hold for it. The
    three steps are `rescale_`, `cast_`, and a call in fp16:

        rescaling = rescale_(transformer, (), call)
        cast_(transformer, torch.float16, rescaling)
        output = transformer(**call_in_fp16)

    Under `torch.autocast` to fp16, also in the module's own code, the module is left in fp32. If parts
    of it have to stay in fp32, which autocast would undo, it is cast as well, and its calls disable
    autocast. `.half()` is not enough if the result has fp32 layers, an fp32 stream, multiplies or fp32
    buffers: the next call of a module that was cast so raises an error.

    Args:
        module: module in fp32 or as its weights are stored, on any device; changed in place.
        args: positional arguments of a call of the module itself; a tensor counts as the only one. Floating
            tensors have the module's dtype.
        kwargs: its keyword arguments.
        calls: further calls, or calls of its methods: (module.decode, (latents,), {}).
        residual: `fp32` keeps sums and norms in fp32 after the cast, and matrix products in fp16. If
            the architecture doesn't allow that, `.residual` of the result is `native`, and its
            scaling's `note` has the reason. None means `native`.
        ranges: `measured` uses these calls' ranges; `bound` uses ranges that hold for every input where
            there are any, and `.certified` is True if there are for every fp16 value; `auto` uses
            bounds where they cost almost nothing. None means `measured`.
        cast: also cast it, as `cast_` does; undoing the result undoes both.

    Returns:
        The powers of two on the module; `.undo()` restores every bit. They were tried: the calls were
        run in fp32, where every bit is compared if the module is in fp32, and in fp16. `.trial` has the
        error beside bf16's, or the reason why there is none. Code that doesn't run with its exponents
        is tried with as much of it in fp16 as hooks find possible; the scaling's `note` reports that.

    Source: scaling by powers of two against overflow is standard in numerical linear algebra
    (equilibration); `docs/rescaling.md` has the method and its limits.

    Raises:
        CaptureError: if the code can't be traced.
        TrialError: if after a cast to fp16 a call raises, or returns NaN, Inf, other shapes or other
            values.
        ScalingError: if no exponents keep it in range; if weights are quantised, or NaN or Inf, each of
            which is named; if a value is NaN or Inf in fp32; if the module would return other values in
            fp32; if a call puts tensors into its arguments. The module is unchanged.
        OptionError: if there is no call, or it fails in the module itself; if `residual` or `ranges` is
            none of the above.

    Cost: for each call a capture (seconds; three with an fp32 residual), three forwards in fp32, one in
    bf16 and one in fp16; both casts hold a second copy of the weights.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 1e5 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> expected = module(x)
        >>> rescaling = rescale_(module, x)
        >>> rescaling.exponents
        {'0.weight': -7}
        >>> torch.equal(module(x), expected)
        True
        >>> patches = cast_(module, "fp16", rescaling)
        >>> bool(module(x.half()).isfinite().all())  # module.half() alone returns NaN
        True
    """
    require_module(module, "rescale_")
    refuse_quantised(module)
    check_weights(module)
    given = _list_calls(module, args, kwargs, calls)
    if not given:
        raise OptionError(
            f"rescale_ was given a {type(module).__name__} but no example call of it.",
            expected="Exponents are computed from calls, and no call was given.",
            remedy="Give its arguments, rescale_(module, args, kwargs), or calls=[(module, args, kwargs)].",
        )
    stream, basis = check_residual(residual), check_ranges(ranges)
    kinds = [[x] for x in given]
    kept, held = KeptState(module), HeldContainers(given)
    with without_autocast(), watched_autocast() as entered:
        try:
            scaling = scale_calls(module, kinds, stream, basis)
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            for call, own, named in given:
                explain_call("rescale_", partial(call, *own, **named), error)
            raise
        finally:  # restore what the calls changed, in the module and in their arguments
            kept.restore(kept.list_changes())
            is_filled = held.is_filled
            held.restore()
    if is_filled and (scaling.exponents or scaling.multiplies or scaling.eps):
        raise ScalingError(
            f"The call puts tensors into its arguments, such as a cache; {type(module).__name__} would "
            "put them there scaled, where other code reads them.",
            expected="Activations with scale exponents stay inside the module.",
            remedy="Run it under stopdown.guard, which runs such calls in another format, or in bf16.",
        )
    folds = Patches()
    CallWatch.watch(module, scaling, partial(_fold, module, scaling), folds, _WATCH, casts=False)
    rescaling = Rescaling(module, scaling, folds)
    check_casts(rescaling)
    is_ambient = torch.float16 in (read_autocast(module), *entered) and keeps_fp32(scaling)
    if cast or is_ambient:
        cast_(module, torch.float16, rescaling)
    if is_ambient:
        patches = Patches()
        hook_arguments(module, _narrow, patches)
        rescaling.defer(patches)
    return rescaling


_WATCH = WatchOptions(
    remedy="Give rescale_ such calls as well: "
    "rescale_(module, args, kwargs, calls=[(module, args, kwargs)]).",
)


def _fold(module: torch.nn.Module, scaling: Scaling, patches: Patches) -> None:
    patches.defer(fold_scaling(module, scaling).undo)


def _list_calls(module: torch.nn.Module, args: Any, kwargs: Any, calls: Any) -> list[PlainCall]:
    """Return all example calls given to `rescale_` as (function, args, kwargs), after checking their types.

    A call of the module itself comes first.
    """
    remedy = "Use rescale_(module, args, kwargs), or calls=[(module.decode, (x,), {})]."
    args = (args,) if isinstance(args, torch.Tensor) else args
    expected = "Positional arguments are a tensor, or a tuple of all; keyword arguments a table."
    check_type("rescale_(args)", args, (tuple, list), expected, remedy)
    check_type("rescale_(kwargs)", kwargs, (Mapping, type(None)), expected, remedy)
    form = "Each call is what is called, a tuple of its arguments and a table of its keyword ones."
    check_type("rescale_(calls=...)", calls, (tuple, list), form, remedy)
    for one in calls:
        is_call = isinstance(one, (tuple, list)) and len(one) == 3 and callable(one[0])
        kinds = (tuple, list) if is_call else ()
        check_type("rescale_(calls=[...])", one, kinds, form, remedy)
    own: list[PlainCall] = [(module, tuple(args), kwargs or {})] if args or kwargs else []
    return [*own, *calls]


def _narrow(value: torch.Tensor) -> torch.Tensor:
    """Cast an fp32 argument to fp16, as autocast would for a matrix product; vectors, such as times,
    stay fp32.
    """
    return value.half() if value.dtype == torch.float32 and value.dim() > 1 else value

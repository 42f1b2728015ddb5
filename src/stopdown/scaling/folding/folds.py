"""Put a scaling onto a module, and take it off: powers of two in weights and eps, multiplies, casts.

All changes go through `Patches`, so that `undo` restores every bit, attribute and hook.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from stopdown.argument_types import check_type
from stopdown.component_call_names import is_inside
from stopdown.errors import InputError, OptionError, ScalingError
from stopdown.fold_names import (
    Folds,
    Place,
    list_folds,
    name_parameters,
    read_clamp,
    split_fold_name,
)
from stopdown.interception.autocast import run_within, without_autocast
from stopdown.interception.code_homes import is_own
from stopdown.interception.module_paths import casts_weights
from stopdown.interception.own_dtypes import list_own_dtypes, set_own_dtypes
from stopdown.interception.own_hooks import Hook, hook_own_output, hook_part_arguments
from stopdown.interception.patches import Patches
from stopdown.interception.tracing import is_traced
from stopdown.mapped_weights import StoredWeight, cast_additions_, cast_tensor_, put_, widen_
from stopdown.module_calls.adapter_layers import unwrap_name
from stopdown.module_calls.call import map_tensors
from stopdown.module_calls.mixed_dtypes import cast_operands
from stopdown.module_calls.outermost_calls import is_plain
from stopdown.number_formats import FORMATS, parse_precision
from stopdown.numerics import (
    cast_mask,
    is_away,
    iterate_tensors,
)
from stopdown.scaling.folding.adapters import AdapterFolds, keep_merges
from stopdown.scaling.folding.cast_check import CastCheck, find_check
from stopdown.scaling.folding.clamp_constants import scale_clamps
from stopdown.scaling.graph.capture import find_kept_buffers, name_aliases
from stopdown.scaling_records import ResidualStream, Scaling, Trial, describe_trial


class Rescaling:
    """Powers of two that are folded into a module's weights; `undo` removes them and restores every bit.

    `rescale_` and `fold_scaling` return it. `cast_(module, torch.float16, rescaling)` casts the module to
    fp16. `.trial` has the error against fp32 after that.

    Args:
        module: module whose weights are scaled, `.module`.
        scaling: the powers of two, as plain data for a file, `.scaling`.
        patches: the changes that `undo` reverts.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 1e5 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> rescaling = rescale_(module, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        >>> rescaling.exponents, rescaling.fp32_modules
        ({'0.weight': -7}, ())
        >>> rescaling.undo()
        >>> float(linear.weight.max())
        100000.0
    """

    def __init__(self, module: torch.nn.Module, scaling: Scaling, patches: Patches) -> None:
        self.module, self.scaling, self._patches = module, scaling, patches

    @property
    def exponents(self) -> Mapping[str, int]:
        """Maps parameter and buffer names to scale exponents; `name[0:64]` means rows, `name[:,0:64]`
        columns.
        """
        return self.scaling.exponents

    @property
    def multiplies(self) -> Mapping[str, int]:
        """Maps the path of each module whose output is multiplied by a power of two to the exponent."""
        return self.scaling.multiplies

    @property
    def fp32_modules(self) -> tuple[str, ...]:
        """Paths of the modules that `cast_` keeps in fp32."""
        return self.scaling.fp32_modules

    @property
    def headroom_bits(self) -> float:
        """Bits between the largest 16-bit value seen and the format's maximum."""
        return read_headroom(self.scaling)

    @property
    def certified(self) -> bool:
        """True if no input can overflow; False if the ranges were measured."""
        return self.scaling.certified

    @property
    def pinned(self) -> Mapping[str, tuple[str, ...]]:
        """Maps each operation without a rule, whose exponents are fixed at 0, to the places of calls."""
        return self.scaling.pinned

    @property
    def residual(self) -> str:
        """`fp32` if `cast_` keeps the whole residual stream in fp32, else `native`."""
        stream = self.scaling.stream
        return "native" if stream is None or stream.cast_output_down else "fp32"

    @property
    def trial(self) -> Trial | None:
        """Result of a trial run of the module after `cast_`; None if there was none."""
        return self.scaling.trial

    def defer(self, patches: Patches) -> None:
        """Make `undo` revert further changes of the module, `patches`, before it removes the powers of
        two.
        """
        self._patches.defer(patches.undo)

    def undo(self) -> None:
        """Restore the module bit for bit. A second call does nothing."""
        self._patches.undo()

    def __repr__(self) -> str:
        return (
            f"Rescaling({len(self.exponents)} folds, {len(self.multiplies)} multiplies, "
            f"{len(self.fp32_modules)} fp32 modules, {self.headroom_bits:.1f} bits of headroom, "
            f"{describe_trial(self.trial)})"
        )


def read_headroom(scaling: Scaling) -> float:
    """Return how many bits a scaling leaves between the largest 16-bit value and the format's maximum.

    Args:
        scaling: result of a search, `rescaling.scaling`.

    Returns:
        log2(maximum / largest value): 1.0 if values could be twice as large. Inf if nothing was measured.

    Examples:
        >>> read_headroom(Scaling(headroom_bits=2.5)), read_headroom(Scaling())
        (2.5, inf)
    """
    return math.inf if scaling.headroom_bits is None else scaling.headroom_bits


def load_scaled(
    module: torch.nn.Module,
    dtype: torch.dtype,
    scaling: Scaling,
    put: Callable[[torch.Tensor, StoredWeight], None] = put_,
) -> Patches:
    """Scale and cast a freshly loaded module one tensor at a time, to save memory.

    The result is that of `fold_scaling` and `cast_` on an fp32 module. No tensor is copied to
    fp32 on the way, and the stored values are not kept.

    Args:
        module: module with the checkpoint's weights, in any floating dtype; it is changed in place.
        dtype: dtype of the weights, except those that the scaling keeps in fp32.
        scaling: powers of two and casts, found for this checkpoint.
        put: sets each parameter and buffer to its `StoredWeight`; `wait_` leaves parameters in their
            files, for a `WeightStore` to read.

    Returns:
        The changes. Undoing them leaves fp32 weights that equal the stored ones up to rounding to
        `dtype`.

    Raises:
        ScalingError: if the module lacks a name in the scaling. Nothing was changed.

    Cost: one more weight in memory.

    Examples:
        >>> module = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> module.weight[:] = 1e5 * torch.eye(4)
        >>> patches = load_scaled(module, torch.float16, Scaling(exponents={"weight": -3}))
        >>> module.weight[0, 0]
        tensor(12496., dtype=torch.float16)
    """
    _refuse_missing(module, scaling)
    folds = {id(x): found for x, found in _locate_folds(module, scaling.exponents)}
    patches = Patches()
    patches.defer(partial(_unfold, module, scaling.exponents))
    patches.defer(_fold(module, scaling, with_weights=False).undo)

    def load(tensor: torch.Tensor, wanted: torch.dtype) -> None:
        put(tensor, StoredWeight(tensor.data, wanted, folds.get(id(tensor), ())))

    _cast_parts(module, dtype, scaling, patches, load)
    return patches


def _unfold(module: torch.nn.Module, exponents: Mapping[str, int]) -> None:
    """Cast weights to fp32, where nothing overflows, and remove the powers of two that were folded into
    them.
    """
    widen_(module)
    _fold_parameters(module, {name: -x for name, x in exponents.items()}, Patches())


def fold_scaling(module: torch.nn.Module, scaling: Scaling) -> Rescaling:
    """Multiply a module's weights and eps by a scaling's powers of two, in place; dtypes stay.

    In fp32 the module returns the same values as before, bit for bit, if the scaling was found for it.

    Args:
        module: module with unscaled weights, in any floating dtype; in fp16, values that become
            subnormal are rounded.
        scaling: powers of two, of `rescale_`, `scale_calls` or a file.

    Returns:
        The scaling on its module, for `cast_`; `.undo()` restores every bit.

    Raises:
        ScalingError: if the module lacks a name in the scaling. Nothing was changed.

    Cost: a pass over each weight that is scaled. A copy is kept of those that multiplying back wouldn't
    restore.

    Examples:
        >>> module = torch.nn.Linear(4, 4)
        >>> before = module.weight.clone()
        >>> rescaling = fold_scaling(module, Scaling(exponents={"weight": -3, "bias": -3}))
        >>> torch.equal(module.weight * 8, before)
        True
        >>> rescaling.undo()
        >>> torch.equal(module.weight, before)
        True
    """
    return Rescaling(module, scaling, _fold(module, scaling))


def _fold(module: torch.nn.Module, scaling: Scaling, *, with_weights: bool = True) -> Patches:
    patches = Patches()
    patches.defer(torch.clear_autocast_cache)  # of the old weights, during a call
    try:
        if with_weights:
            _fold_parameters(module, scaling.exponents, patches)
        folds = list_folds(scaling.exponents)
        first = name_aliases(module)
        named = {
            key: folds.get(name) or folds.get(unwrap_name(name), []) for key, name in first.items()
        }
        AdapterFolds(module, scaling, named).put_on(patches)
        _scale_all_eps(module, scaling.eps, patches)
        for path, exponent in scaling.multiplies.items():
            _hook_output(module, path, partial(_multiply_output, 2.0**exponent), patches)
        if scaling.outputs:
            hook_own_output(module, partial(widen_outputs, dict(scaling.outputs)), patches)
        torch.clear_autocast_cache()
    except BaseException:
        patches.undo()
        raise
    return patches


def list_misfits(module: torch.nn.Module, scaling: Scaling) -> Iterator[str]:
    """Yield a clause for each entry of a scaling, such as a stored plan's, that doesn't fit a module.

    The module must be unscaled. An entry doesn't fit if the module lacks its name, if its tensor wouldn't
    be finite after the cast, or if the cast would turn a whole matrix into zeros.

    Args:
        module: unscaled module, in any floating dtype; on `meta` only its names are compared.
        scaling: powers of two and casts from a file or another checkpoint.

    Returns:
        Clauses such as "it has no module proj"; none if everything fits.

    Cost: a pass over each tensor that is folded, and a host read.

    Examples:
        >>> module = torch.nn.Linear(4, 4)
        >>> list(list_misfits(module, Scaling(exponents={"weight": -3})))
        []
        >>> list(list_misfits(module, Scaling(exponents={"kernel": -3})))
        ['it has no floating kernel']
    """
    named, stays, folds = (
        name_parameters(module),
        _find_wide(scaling),
        list_folds(scaling.exponents),
    )
    for name, exponent in scaling.exponents.items():
        bare, place = split_fold_name(name)
        precision = "fp32" if stays(bare) else "fp16"
        if bare not in named or not _has_place(named[bare], place):
            yield f"it has no floating {name}"
        elif not _crosses(folds[bare]):
            yield from _list_misfit(name, named[bare], place, exponent, precision)
    for bare, found in folds.items():
        if _crosses(found) and bare in named and all(_has_place(named[bare], x) for x, _ in found):
            yield from _list_crossed(
                bare, named[bare], found, precision="fp32" if stays(bare) else "fp16"
            )
    parts = {name for name, _ in module.named_modules()}
    for path in (*scaling.multiplies, *scaling.fp32_modules, *scaling.operands.cast_inputs):
        if path not in parts:
            yield f"it has no module {path}"
    for number in scaling.eps:
        path, _, name = number.rpartition(".")
        known = path in parts and _read_eps(module.get_submodule(path), name)
        if path not in parts or (read_clamp(name) is None and known is None):
            yield f"it has no number {number}"


def _list_wide(scaling: Scaling) -> set[str]:
    """Return the names of single parameters and buffers that stay in fp32, outside of fp32 modules."""
    stream = () if scaling.stream is None else scaling.stream.kept
    return {*(scaling.kept_buffers or ()), *scaling.operands.fp32_parameters, *stream}


def _list_misfit(
    name: str, tensor: torch.Tensor, place: Place, exponent: int, precision: str
) -> Iterator[str]:
    values = tensor.detach()[place] if tensor.dim() else tensor.detach()
    if tensor.is_meta or not values.numel():
        return
    low, high = (float(x) for x in torch.aminmax(values))
    amax, found = max(abs(low), abs(high)), FORMATS[precision]
    try:
        stored = math.ldexp(amax, exponent)
    except OverflowError:
        stored = math.inf
    if stored > found.largest or (tensor.dim() > 1 and stored < found.smallest <= amax):
        yield f"its {name} is up to {amax:.3g}, and times 2**{exponent} {precision} doesn't hold it"


def _crosses(folds: Folds) -> bool:
    """Return whether elements of a tensor have several exponents, of rows and columns, which add up."""
    return len({len(place) for place, _ in folds}) > 1


def _list_crossed(
    name: str, tensor: torch.Tensor, folds: Folds, *, precision: str
) -> Iterator[str]:
    """Yield a clause if a precision doesn't hold a tensor with exponents of rows and of columns."""
    if tensor.is_meta or not tensor.numel():
        return
    scaled = tensor.detach().float().abs()
    amax, found = float(scaled.max()), FORMATS[precision]
    for place, exponent in folds:
        scaled[place] *= 2.0 ** max(-126, min(exponent, 126))
    stored = float(scaled.max())
    if stored > found.largest or stored < found.smallest <= amax:
        yield (
            f"its {name} is up to {amax:.3g}, and with its exponents up to {stored:.3g}, which {precision} "
            "doesn't hold"
        )


def _has_place(tensor: torch.Tensor, place: Place) -> bool:
    """Return whether a tensor can be scaled at a place of a stored plan: it is floating and has these
    rows or columns.

    Old plans give blocks of any dimension as rows.
    """
    if not place:
        return tensor.is_floating_point()
    size = tensor.shape[len(place) - 1] if len(place) <= tensor.dim() else len(place) == 1
    is_other = len(place) == 1 and (place[0].start == 0 or place[0].start >= size)
    is_there = 0 <= place[-1].start < place[-1].stop and (place[-1].stop <= size or is_other)
    return tensor.is_floating_point() and is_there


def _read_eps(owner: torch.nn.Module, name: str) -> float | None:
    eps = getattr(owner, name, None)
    return eps if isinstance(eps, (int, float)) else None


def check_casts(rescaling: Rescaling) -> None:
    """Have a rescaled module refuse calls after a cast that loses parts of its rescaling, such as
    `.half()`.
    """
    needs = ", ".join(_list_needs(rescaling.module, rescaling.scaling))
    if needs:
        patches = Patches()
        CastCheck(rescaling.module, needs).put_on(patches)
        rescaling.defer(patches)


def _list_needs(module: torch.nn.Module, scaling: Scaling) -> Iterator[str]:
    """Yield, in words, the parts of a scaling that a plain `.half()` would lose, for an error: `2 fp32
    layers`.
    """
    if count := len(scaling.fp32_modules):
        yield f"{count} fp32 layer{'s' * (count != 1)}"
    if scaling.stream is not None:
        yield "an fp32 residual stream"
    if count := len(scaling.multiplies):
        yield f"{count} multipl{'y' if count == 1 else 'ies'}"
    if count := len(scaling.operands.cast_inputs):
        yield f"{count} layer{'s' * (count != 1)} that cast{'s' * (count == 1)} its input"
    kept = find_kept_buffers(module) if scaling.kept_buffers is None else scaling.kept_buffers
    if kept:
        yield f"{len(kept)} fp32 buffer{'s' * (len(kept) != 1)}"


def require_module(given: object, function: str) -> None:
    """Raise an error unless a public function was given a `torch.nn.Module`; it says what to do with a
    pipeline.

    Args:
        given: the argument.
        function: name of the public function.
    """
    if not isinstance(given, torch.nn.Module):
        raise InputError(
            f"{function} was given a {type(given).__name__}, which is no module.",
            expected=f"{function} takes one torch.nn.Module: pipe.transformer, pipe.unet, pipe.vae.",
            remedy="Give one component, or run a whole pipeline with a plan: "
            "stopdown.apply_plan(pipe, stopdown.make_plan(pipe)).",
        )
    scripted = [x for x, part in given.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        inside = f"{type(given).__name__} whose part {scripted[0]} is a " if scripted[0] else ""
        raise InputError(
            f"{function} was given a {inside}TorchScript module.",
            expected="Its code can be neither traced nor hooked.",
            remedy="Give the module that it was made of, and script or trace that afterwards.",
        )


def read_dtype(function: str, given: object) -> torch.dtype:
    """Return a floating-point dtype that a caller gave as a `torch.dtype` or by name; raise an error
    for others.

    Args:
        function: name of the public function, for the error.
    """
    if isinstance(given, str):
        return FORMATS[parse_precision(given)].torch_dtype
    if isinstance(given, torch.dtype) and given.is_floating_point:
        return given
    raise OptionError(
        f"{function} was given {given!r:.60}, which is no floating-point dtype.",
        expected='It is a dtype or its name: torch.float16, "fp16", "bf16", "fp32".',
        remedy=f"Use {function}(module, torch.float16).",
    )


def cast_(
    module: torch.nn.Module,
    dtype: torch.dtype | str,
    rescaling_or_plan: Rescaling | Scaling | None = None,
) -> Patches:
    """Cast a module to a dtype in place; modules that its rescaling keeps in fp32 stay so, with casts
    around them.

    If the rescaling has an fp32 residual stream, its casts are applied too. fp32 buffers outside the
    checkpoint (rotary frequencies, position tables) stay fp32. So do weights that the code casts at
    each call (`casts_weights`); then only hooks are registered. So cast a rescaled module to fp16 with
    `cast_(module, torch.float16, rescaling)`, not with `.half()`:

        rescaling = rescale_(module, args)
        cast_(module, torch.float16, rescaling)
        output = module(*args_in_fp16)

    Args:
        module: module to cast in place, in any floating dtype and on any device.
        dtype: a floating-point dtype or its name: `torch.float16`, `"fp16"`.
        rescaling_or_plan: the result of `rescale_` for this module, or its `.scaling` once
            `fold_scaling` has been called; None for a plain cast.

    Returns:
        The changes; `.undo()` restores every dtype, value and hook, and so does undoing the rescaling.
        They hold the old values: drop both to free them.

    Raises:
        InputError: if `module` isn't a module, or is a TorchScript module.
        OptionError: if `dtype` isn't a floating-point dtype, or the rescaling is another module's.
        ScalingError: if the module lacks a name in the scaling. Nothing was changed.

    Cost: a second copy of the weights until the changes are dropped.

    Examples:
        >>> module = torch.nn.Linear(4, 4)
        >>> patches = cast_(module, "fp16")
        >>> module.weight.dtype
        torch.float16
        >>> patches.undo()
        >>> module.weight.dtype
        torch.float32
    """
    require_module(module, "cast_")
    dtype, plan = read_dtype("cast_", dtype), rescaling_or_plan
    check_type(
        "cast_(rescaling)",
        plan,
        (Rescaling, Scaling, type(None)),
        "It is what rescale_ gave for this module.",
        "Put a plan on a pipeline with stopdown.apply_plan(pipe, plan).",
    )
    if isinstance(plan, Rescaling) and plan.module is not module:
        raise OptionError(
            f"cast_ was given a {type(module).__name__} and the rescaling of another module.",
            expected="Exponents and fp32 modules belong to the module that rescale_ was given.",
            remedy="Use cast_(rescaling.module, torch.float16, rescaling).",
        )
    given = plan.scaling if isinstance(plan, Rescaling) else plan
    check = find_check(module) if given is not None else None
    patches = Patches()
    if check is not None:
        patches.defer(check.accept)
    take_out = keep_merges(module, patches)
    cast_additions_(module, dtype, patches)

    def replace_data(tensor: torch.Tensor, wanted: torch.dtype) -> None:
        cast_tensor_(tensor, wanted, patches)

    try:
        _cast_parts(module, dtype, given or Scaling(), patches, replace_data)
    except BaseException:  # for example out of memory
        patches.undo()
        raise
    patches.defer(take_out)
    if check is not None:
        check.accept()
    if isinstance(plan, Rescaling):
        plan.defer(patches)
    return patches


def has_more_than_folds(scaling: Scaling) -> bool:
    """Return whether a scaling needs hooks or casts at run time, which a weight file can't hold.

    An eps doesn't count.

    Args:
        scaling: result of a search, `rescaling.scaling`.

    Returns:
        False if the scaled weights can be saved, and loaded by programs without Stopdown.

    Examples:
        >>> has_more_than_folds(Scaling(exponents={"proj.weight": -3}))
        False
        >>> has_more_than_folds(Scaling(multiplies={"proj": -3}))  # a hook, not a weight
        True
    """
    return bool(scaling.multiplies or scaling.operands) or keeps_fp32(scaling)


def keeps_fp32(scaling: Scaling) -> bool:
    """Return whether a scaling keeps modules, outputs or the residual stream in fp32 to avoid overflow."""
    return bool(scaling.fp32_modules or scaling.outputs or scaling.stream is not None)


def _cast_parts(
    module: torch.nn.Module,
    dtype: torch.dtype,
    given: Scaling,
    patches: Patches,
    cast_weight: Callable[[torch.Tensor, torch.dtype], None],
) -> None:
    _refuse_missing(module, given)
    fp32_modules, named, stream = given.fp32_modules, given.kept_buffers, given.stream
    kept = find_kept_buffers(module) if named is None else frozenset(named)
    before = list_own_dtypes(module)
    named_tensors = {} if casts_weights(module) else name_parameters(module)
    stays, left = _find_wide(given), {*map(unwrap_name, kept)}
    for name, tensor in named_tensors.items():
        if tensor.is_floating_point() and unwrap_name(name) not in left:
            cast_weight(tensor, torch.float32 if stays(name) else dtype)
    if named_tensors:
        set_own_dtypes(module, before, dtype, patches)
    if keeps_fp32(given) or given.operands:
        run_within(module, without_autocast, patches)
    inputs = _list_outside(given.operands.cast_inputs, fp32_modules)
    cast_operands(module, replace(given.operands, cast_inputs=inputs), dtype, patches)
    wide_outputs = frozenset(given.outputs)
    if stream is not None:
        down = _list_outside(stream.cast_input_down, fp32_modules)
        put_stream(module, replace(stream, cast_input_down=down), dtype, patches, wide_outputs)
    for path in fp32_modules:
        run_within(_find_module(module, path), without_autocast, patches)
        _hook_inputs(module, path, dtype, torch.float32, patches)
        if stream is None or not any(is_inside(x, path) for x in stream.cast_output_up):
            hook = _narrow_outputs if path else _narrow_what_fits
            staying = frozenset[int]() if path else wide_outputs
            _hook_output(module, path, partial(hook, staying, dtype), patches)


def _find_wide(scaling: Scaling) -> Callable[[str], bool]:
    """Return a function of a name: whether that tensor stays in fp32, also inside of an adapter's layer."""
    single, modules = map(unwrap_name, _list_wide(scaling)), map(unwrap_name, scaling.fp32_modules)
    names, paths = frozenset(single), tuple(modules)
    return lambda name: unwrap_name(name) in names or is_inside(unwrap_name(name), *paths)


def _refuse_missing(module: torch.nn.Module, scaling: Scaling) -> None:
    """Raise a `ScalingError` if a module lacks one of the modules that a scaling's casts are for."""
    stream, paths = scaling.stream, (*scaling.fp32_modules, *scaling.operands.cast_inputs)
    if stream is not None:
        paths += stream.cast_output_up + stream.cast_input_down
        paths += stream.cast_input_up + stream.cast_output_down
    for path in paths:
        _find_module(module, path)


def restrict_scaling(scaling: Scaling, path: str) -> Scaling:
    """Return the part of a scaling that concerns the submodule at a path, with names relative to the
    submodule.
    """

    def keep(names: Iterable[str]) -> dict[str, str]:
        return {x: x[len(path) + 1 :] for x in names if is_inside(x, path)}

    def pick(entries: Mapping[str, int]) -> dict[str, int]:
        return {name: entries[x] for x, name in keep(entries).items()}

    stream = scaling.stream
    if stream is not None:
        paths = {x.name: getattr(stream, x.name) for x in fields(stream) if x.name != "returns"}
        paths = {name: tuple(keep(x).values()) for name, x in paths.items()}
        stream = ResidualStream(**paths, returns=False) if any(paths.values()) else None
    return Scaling(
        exponents=pick(scaling.exponents),
        eps=pick(scaling.eps),
        multiplies=pick(scaling.multiplies),
        stream=stream,
    )


def put_stream(
    module: torch.nn.Module,
    stream: ResidualStream,
    dtype: torch.dtype,
    patches: Patches,
    wide_outputs: frozenset[int] = frozenset(),
) -> None:
    """Register the casts of an fp32 residual stream on a module whose matrices are in `dtype`.

    Outputs are cast to fp32 before other hooks read them. So multiplies of these are done in fp32.

    Args:
        patches: undoing it removes the casts.
        wide_outputs: indices of the outputs that stay fp32, as `dtype` can't represent their values.
    """
    for path in stream.cast_output_up:
        _hook_output(module, path, partial(_cast_output, dtype, torch.float32), patches, first=True)
    for path in stream.cast_input_down:
        _hook_inputs(module, path, torch.float32, dtype, patches)
    for path in stream.cast_input_up:
        _hook_inputs(module, path, dtype, torch.float32, patches)
    for path in stream.cast_output_down:
        if path:
            _hook_output(module, path, partial(_cast_output, torch.float32, dtype), patches)
    if stream.returns or "" in stream.cast_output_down:
        _hook_output(module, "", partial(_narrow_outputs, wide_outputs, dtype), patches)


class _UnmeasuredCalls(threading.local):
    """State of one thread's call in which a module's cast of its outputs to fp16 is postponed
    (`call_unmeasured`).

    Attributes:
        module: module that is called; None outside such a call.
        dtype: dtype to which the module would cast its outputs; None if it doesn't.
        wide: indices of the outputs that it would leave in fp32.
    """

    module: torch.nn.Module | None = None
    dtype: torch.dtype | None = None
    wide: frozenset[int] = frozenset()


_UNMEASURED = _UnmeasuredCalls()


def call_unmeasured(module: torch.nn.Module, call: Callable[[], Any]) -> Any:
    """Make a module call that no scale exponents were measured for; return outputs in fp32 if fp16 would
    overflow.

    Args:
        call: makes the call.

    Cost: a host read if the module narrows its output.
    """
    before = dict(vars(_UNMEASURED))
    vars(_UNMEASURED).update(module=module, dtype=None, wide=frozenset())
    try:
        output, dtype = call(), _UNMEASURED.dtype
        if dtype is None:
            return output
        return _narrow_tensors(_UNMEASURED.wide, partial(narrow_if_exact, dtype), output)
    finally:
        vars(_UNMEASURED).clear()
        vars(_UNMEASURED).update(before)


def narrow_if_exact(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Cast an fp32 tensor to a dtype, or return it unchanged if finite values would become Inf.

    Cost: a host read.
    """
    if tensor.dtype != torch.float32 or dtype == torch.float32 or not tensor.numel():
        return tensor
    if not is_plain():
        return tensor
    narrowed = tensor.to(dtype)
    return narrowed if bool((narrowed.isfinite() | ~tensor.isfinite()).all()) else tensor


def _narrow_outputs(
    wide: frozenset[int], dtype: torch.dtype, module: torch.nn.Module, args: Any, output: Any
) -> Any:
    """Cast a module's fp32 outputs to `dtype`, except those whose indices are in `wide` (a forward hook).

    In a call by `call_unmeasured` (of a kind that no exponents were found for), the output stays in fp32
    and the cast is remembered: the caller applies it once the output's powers of two are divided out.
    """
    if not is_traced() and _UNMEASURED.module is module:
        _UNMEASURED.dtype, _UNMEASURED.wide = dtype, wide
        return output
    return _narrow_tensors(wide, partial(_cast, torch.float32, dtype), output)


def _narrow_tensors(
    wide: frozenset[int], change: Callable[[torch.Tensor], torch.Tensor], output: Any
) -> Any:
    tensors = {id(x): x for x in iterate_tensors(output)}
    made = {
        key: x if number in wide else change(x) for number, (key, x) in enumerate(tensors.items())
    }  # a tensor that is returned twice counts once
    return map_tensors(output, lambda x: made[id(x)])


def _narrow_what_fits(
    wide: frozenset[int], dtype: torch.dtype, module: torch.nn.Module, args: Any, output: Any
) -> Any:
    """Cast a module's outputs to `dtype`, unless they would become Inf; then they stay fp32 (a forward
    hook).

    Compiled code casts all outputs except those with indices in `wide`, as it can't inspect values.
    """
    if is_traced():
        return _narrow_outputs(wide, dtype, module, args, output)
    return _narrow_tensors(wide, partial(narrow_if_exact, dtype), output)


def _list_outside(paths: tuple[str, ...], fp32_modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(path for path in paths if not is_inside(path, *fp32_modules))


def _fold_parameters(
    module: torch.nn.Module, exponents: Mapping[str, int], patches: Patches
) -> None:
    located = _locate_folds(module, exponents)
    _refuse_shared_memory(module, {id(tensor) for tensor, _ in located})
    for tensor, folds in located:
        for place, exponent in folds:
            patches.scale_tensor(tensor, exponent, place)


def _refuse_shared_memory(module: torch.nn.Module, scaled: set[int]) -> None:
    """Raise an error if a parameter that gets exponents overlaps in memory with another one.

    Not covered: parameters with gaps, such as columns of a matrix.

    Args:
        scaled: ids of the tensors that get exponents.
    """
    ends: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, weight in module.named_parameters():
        if weight.numel() and not is_away(weight):
            sizes = zip(weight.shape, weight.stride(), strict=True)
            first = int(weight.storage_offset())
            last = first + int(sum((size - 1) * step for size, step in sizes))
            if last - first + 1 == weight.numel():
                place = ends.setdefault(weight.untyped_storage().data_ptr(), [])
                bounds = first * weight.itemsize, (last + 1) * weight.itemsize
                place.append((*bounds, name, id(weight) in scaled))
    for found in ends.values():
        before: list[tuple[int, int, str, bool]] = []
        for start, end, name, is_scaled in sorted(found, key=lambda x: x[:2]):
            before = [x for x in before if start < x[1]]
            if other := next((x[2] for x in before if is_scaled or x[3]), ""):
                raise ScalingError(
                    f"{other} and {name} of {type(module).__name__} lie in the same memory in part.",
                    expected="An exponent is written into each parameter by itself; nothing was changed.",
                    remedy=f"Give one memory of its own: module.get_parameter({other!r}).data = "
                    f"module.get_parameter({other!r}).clone().",
                )
            before.append((start, end, name, is_scaled))


def _locate_folds(
    module: torch.nn.Module, exponents: Mapping[str, int]
) -> list[tuple[torch.Tensor, list[tuple[Place, int]]]]:
    """Return each tensor of a module that gets scale exponents, with its blocks and their exponents.

    Args:
        exponents: maps names such as `proj.weight` or `proj.weight[0:64]` to exponents.

    Raises:
        ScalingError: if the module lacks a name.
    """
    found = name_parameters(module)
    named = {unwrap_name(name): tensor for name, tensor in found.items()} | found
    located = []
    for name, folds in list_folds(exponents).items():
        if name not in named or not all(_has_place(named[name], place) for place, _ in folds):
            missing = next(x for x in exponents if split_fold_name(x)[0] == name)
            weight = dict(module.named_parameters()).get(name)
            if weight is not None and weight.is_complex():
                raise ScalingError(
                    f"The weight {name} of {type(module).__name__} is complex ({weight.dtype}), and its "
                    "values don't fit in fp16 without an exponent.",
                    expected="Exponents are written into real weights.",
                    remedy="Run it in bf16 or fp32.",
                )
            raise _explain_misfit(module, f"floating parameter or buffer {missing}")
        located.append((named[name], folds))
    return located


def _scale_all_eps(module: torch.nn.Module, exponents: Mapping[str, int], patches: Patches) -> None:
    clamps: dict[str, dict[float, float]] = {}
    for place, exponent in exponents.items():
        path, _, name = place.rpartition(".")
        owner = _find_module(module, path)
        if (number := read_clamp(name)) is not None:
            clamps.setdefault(path, {})[number] = 2.0**exponent
        elif (eps := _read_eps(owner, name)) is not None:
            patches.set_attribute(owner, name, eps * 2.0**exponent)
        else:
            raise _explain_misfit(module, f"number {place}")
    for path, factors in clamps.items():
        scale_clamps(_find_module(module, path), factors, patches)


def _multiply_output(
    factor: float, module: torch.nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    return output * factor


def widen_outputs(
    exponents: Mapping[int, int], module: torch.nn.Module, args: Any, output: Any
) -> Any:
    """Cast the module outputs with these indices to fp32 and divide their powers of two out (a forward
    hook).

    Args:
        exponents: maps the index of an output to its exponent.

    Raises:
        ScalingError: one of them is in an object that can't be copied with another tensor in its place.
    """
    tensors = {id(x): x for x in iterate_tensors(output)}.values()
    wide = {
        id(x): x.float() * 2.0 ** -exponents[number]
        for number, x in enumerate(tensors)
        if number in exponents
    }
    placed = set[int]()

    def place(tensor: torch.Tensor) -> torch.Tensor:
        placed.add(id(tensor))
        return wide.get(id(tensor), tensor)

    widened = map_tensors(output, place)
    if not placed >= wide.keys():
        raise ScalingError(
            f"{type(module).__name__} returns a tensor beyond fp16 in an object that can't be copied.",
            expected="Outputs beyond fp16 are tensors, or in tuples, lists, dicts and dataclasses.",
            remedy="Return it in one of these, or run it in bf16 or fp32.",
        )
    return widened


def _hook_output(
    module: torch.nn.Module, path: str, hook: Hook, patches: Patches, *, first: bool = False
) -> None:
    """Register a hook that changes the output of the submodule at a path, or of the module itself for "".

    Hooks that aren't Stopdown's, such as those that record hidden states, run after it.

    Args:
        first: run the hook before others of Stopdown.
    """
    if path:
        part = _find_module(module, path)
        patches.defer(part.register_forward_hook(hook, prepend=first).remove)
        hooks: dict[int, Any] = part._forward_hooks
        for number in [x for x, other in hooks.items() if not is_own(other)]:
            hooks[number] = hooks.pop(number)
    else:
        hook_own_output(module, hook, patches, prepend=first)


def _hook_inputs(
    module: torch.nn.Module, path: str, source: torch.dtype, target: torch.dtype, patches: Patches
) -> None:
    _find_module(module, path)
    rest = partial(_cast_mask, source, target)  # the first tensor is the activation
    hook_part_arguments(module, path, partial(_cast, source, target), patches, rest=rest)


def _cast_output(
    source: torch.dtype, target: torch.dtype, module: torch.nn.Module, args: Any, output: Any
) -> Any:
    return map_tensors(output, partial(_cast, source, target))


def _cast(source: torch.dtype, target: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(target) if value.dtype == source else value


def _cast_mask(source: torch.dtype, target: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    """Cast an argument that may be an additive attention mask so that its fill values don't become -inf.

    During a capture the plain cast is made, for which exponents have a rule.
    """
    is_captured = is_traced() and not torch.compiler.is_dynamo_compiling()
    if value.dtype != source or is_captured:
        return _cast(source, target, value)
    return cast_mask(value, target)


def _find_module(module: torch.nn.Module, path: str) -> torch.nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise _explain_misfit(module, f"module {path}") from error


def _explain_misfit(module: torch.nn.Module, lack: str) -> ScalingError:
    return ScalingError(
        f"{type(module).__name__} has no {lack}.",
        expected="Exponents belong to the module that they were found for.",
        remedy="Find them again with rescale_.",
    )

"""Try scale exponents on the module itself: run its calls with them in fp32, then in fp16, and compare.

In fp32 every bit of the outputs must be unchanged; autocast that the code enters is disabled for that.
After the cast, each call must return the same containers and shapes, only finite values, and no larger
error than bf16 (`ROUNDED_ONCE` is always allowed), or than `LARGEST_ERROR` if bf16 doesn't run. Each
run starts from the same random state and gets its own containers. So a call that draws noise, or writes
into a list among its arguments, is the same call every time.

**Catches** operands whose dtypes don't agree after the cast, NaN, Inf, other shapes or containers,
outputs that differ from those of fp32.

**Does not catch** other calls than these. Some are reported as untried: calls of more than
`MOST_FLOPS_ON_CPU` on a CPU, and operations that the device lacks in fp16. Calls that draw noise are
run but not compared, as noise differs by format.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stopdown.errors import ScalingError, TrialError, take_first_line, warn_user
from stopdown.interception.autocast import watched_autocast
from stopdown.interception.patches import Patches
from stopdown.interception.randomness import find_weights_device
from stopdown.module_calls.call import PlainCall, is_mask
from stopdown.module_calls.call_inputs import name_inputs
from stopdown.module_calls.kept_state import KeptState, describe_kept, read_kept, run_call
from stopdown.module_calls.mixed_dtypes import PRODUCT_FUNCTIONS
from stopdown.number_formats import FORMATS, list_some
from stopdown.numerics import (
    count_flops,
    count_non_finite,
    describe_excess,
    iterate_tensors,
    measure_amax,
    measure_error,
)
from stopdown.scaling.folding.folds import cast_, fold_scaling
from stopdown.scaling_records import Scaling, Trial

MOST_FLOPS_ON_CPU = 2e13
"""A call with more FLOPs is not tried on a CPU, where it would take many minutes."""


@dataclass(frozen=True)
class Run:
    """One call of a module with its output before anything was changed, to compare a trial with.

    Attributes:
        call: the call.
        output: what it returned.
        draws: whether it drew random numbers.
        flops: FLOPs of its linears and convolutions.
        is_fp32: whether the module was in fp32, so that rescaling must not change a bit.
        kept: tensors that it left in attributes, by `module.path.attribute`, and its own copies of them.
        bf16_rel_err: error of the same call in bf16 against this output; None if that doesn't run.
    """

    call: PlainCall
    output: Any
    draws: bool
    flops: float
    is_fp32: bool
    kept: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    bf16_rel_err: float | None = None


def run_reference(module: torch.nn.Module, calls: Sequence[PlainCall]) -> list[Run]:
    """Run calls of the unchanged module, whose outputs a trial is compared with; if in fp32, run them
    in bf16 too.

    bf16's error is the largest that a trial in fp16 may have.

    Raises:
        ScalingError: if it doesn't run in fp32, or if its result depends on state kept between calls.

    Cost: a forward for each call, and one in bf16; the outputs are kept.
    """
    is_fp32 = all(x.dtype == torch.float32 for x in module.parameters() if x.is_floating_point())
    kept = KeptState(module)
    try:
        runs = [_run_counted(module, call, kept, is_fp32=is_fp32) for call in calls]
    except Exception as error:
        if is_fp32 and _REFUSES_FP32.search(str(error)):
            raise ScalingError(
                f"{type(module).__name__} doesn't run in fp32: {take_first_line(error)}",
                expected="A module in fp32 is run in fp32, where every bit is compared.",
                remedy="Cast it first, and give arguments in fp16: rescale_(module.half(), args).",
            ) from error
        raise
    _refuse_kept_state(module, runs[0], kept)
    if is_fp32:
        with suppress(torch.OutOfMemoryError):  # then there is no bf16 error
            runs = _add_bf16(module, runs)
    return runs


def _refuse_kept_state(module: torch.nn.Module, run: Run, kept: KeptState) -> None:
    """Raise an error if a module's first call returns other values when repeated, as it keeps state
    between calls.

    A trial couldn't be compared then.

    Args:
        run: the call.
        kept: state of the module before the call.

    Cost: a forward if the first call wrote any state.
    """
    names = kept.list_changes()
    if not names or run.draws:
        return
    with watched_autocast(is_off=run.is_fp32):
        again = run_call(module, *run.call)[0]
    if not _are_equal(again, run.output):
        raise ScalingError(
            f"{describe_kept(module, names)} The same call returned different values the second time.",
            expected=(
                "Exponents need calls whose result depends on their arguments alone: what a "
                "module keeps between calls would have to be rescaled as well."
            ),
            remedy="Run it in bf16 or fp32, or hand over what it keeps as an argument.",
        )


_REFUSES_FP32 = re.compile(r"fp16|float16")
"""Matches error messages of kernels that accept only 16-bit dtypes, such as flash and sage attention."""


def try_scaling(module: torch.nn.Module, scaling: Scaling, reference: Sequence[Run]) -> Trial:
    """Put a scaling on a module, run the reference's calls in fp32 and in fp16, and take the scaling off.

    Raises:
        TrialError: if a call raises in fp16, or if its output is not that of fp32.
        ScalingError: if in fp32 the module's outputs are not bit for bit the same.

    Warns once if the module leaves scaled activations in attributes, which other code may read.

    Cost: a forward in fp32 and one in fp16 for each call.
    """
    rescaling = fold_scaling(module, scaling)
    try:
        if reference[0].is_fp32 and (scaling.exponents or scaling.multiplies or scaling.eps):
            _demand_equal(module, reference)
        cast_(module, torch.float16, rescaling)
        return _try_calls(module, reference)
    except torch.OutOfMemoryError as error:
        return Trial(note=f"It wasn't tried: {take_first_line(error)}")
    finally:
        rescaling.undo()


def _run_counted(
    module: torch.nn.Module, call: PlainCall, before: KeptState, *, is_fp32: bool
) -> Run:
    with _counting(module) as counts, watched_autocast(is_off=is_fp32):
        output, draws = run_call(module, *call)
    held = read_kept(module, before.list_changes())
    kept = {name: tuple(x.detach().clone() for x in tensors) for name, tensors in held.items()}
    return Run(call, output, draws, sum(counts), is_fp32, kept)


def count_layer_flops(layer: Any, given: torch.Tensor, output: torch.Tensor) -> float:
    """Count the FLOPs of one call of a linear or convolution, without the bias.

    Args:
        given, output: input and output tensor of the call.
    """
    shapes = {"input": given.shape, "weight": layer.weight.shape}
    is_transposed = getattr(layer, "transposed", False)
    return count_flops("linear", shapes, output.shape, transposed=is_transposed)


@contextmanager
def _counting(module: torch.nn.Module) -> Iterator[list[float]]:
    """Count FLOPs inside the block: append those of each linear or convolution call to the list that is
    yielded.
    """
    counts: list[float] = []

    def count(part: Any, args: Any, output: torch.Tensor) -> None:
        given = next(iterate_tensors(args), output)
        counts.append(count_layer_flops(part, given, output))

    with Patches() as patches:
        for part in module.modules():
            if isinstance(part, (torch.nn.Linear, _ConvNd)):
                patches.defer(part.register_forward_hook(count).remove)
        yield counts


def _add_bf16(module: torch.nn.Module, runs: list[Run]) -> list[Run]:
    """Return the runs with the error that bf16 has in them; unchanged if none of them will be tried and
    compared.
    """
    if not any(_may_run(module, run) and not run.draws for run in runs):
        return runs
    with cast_(module, torch.bfloat16):
        return [replace(run, bf16_rel_err=_measure_bf16(module, run)) for run in runs]


def _measure_bf16(module: torch.nn.Module, run: Run) -> float | None:
    if run.draws or not _may_run(module, run):
        return None
    try:
        error = measure_error(_run_cast(module, run.call, torch.bfloat16), run.output)
    except Exception:  # model code may raise anything in bf16
        return None
    return error if math.isfinite(error) else None


def _may_run(module: torch.nn.Module, run: Run) -> bool:
    is_cpu = find_weights_device(module).type == "cpu"
    return not is_cpu or run.flops <= MOST_FLOPS_ON_CPU


def _run_cast(module: torch.nn.Module, call: PlainCall, dtype: torch.dtype) -> Any:
    """Run a call with floating arguments cast to `dtype`; vectors and numbers, such as times, stay fp32.

    If the call fails with those in fp32, it is run again with all arguments cast.
    """
    function, args, kwargs = call
    given = _cast_all((args, dict(kwargs or {})), dtype, least_dim=2)
    with WideProducts():
        try:
            return run_call(module, function, *given)[0]
        except RuntimeError:
            given = _cast_all((args, dict(kwargs or {})), dtype, least_dim=0)
            return run_call(module, function, *given)[0]


class WideProducts(TorchFunctionMode):
    """Torch function mode that computes 16-bit linears and convolutions on a CPU in fp32 and rounds the
    result.

    Accelerators sum in fp32 too, and a CPU without instructions for a format takes many times as long
    in it. Operands of several dtypes go to the kernel, which refuses them. In a trace the code's own
    products are recorded.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCT_FUNCTIONS or get_proxy_mode() is not None:
            return func(*args, **kwargs)
        kinds = {(x.dtype, x.device.type) for x in iterate_tensors((args, kwargs))}
        if kinds not in ({(torch.float16, "cpu")}, {(torch.bfloat16, "cpu")}):
            return func(*args, **kwargs)
        (dtype, _), *_ = kinds
        wide = pytree.tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
        return func(*wide[0], **wide[1]).to(dtype)


def _cast_all(tree: Any, dtype: torch.dtype, *, least_dim: int) -> Any:
    def cast(value: torch.Tensor) -> torch.Tensor:
        is_wide = value.dtype == torch.float32 and value.dim() >= least_dim
        return value.to(dtype) if is_wide else value

    return pytree.tree_map_only(torch.Tensor, cast, tree)


def _demand_equal(module: torch.nn.Module, reference: Sequence[Run]) -> None:
    for run in reference:
        with watched_autocast(is_off=True):
            output, _ = run_call(module, *run.call)
        if not _are_equal(output, run.output):
            raise ScalingError(
                f"{type(module).__name__} rescaled in fp32 isn't bit for bit what it was.",
                expected="Exponents must not change what a module computes; nothing was changed.",
                remedy="Run it in bf16 or fp32, and report this class: a rule of an operation is "
                "wrong.",
            )
        now = read_kept(module, list(run.kept))
        scaled = [name for name, held in run.kept.items() if _is_scaled(now.get(name, ()), held)]
        if scaled:
            warn_user(
                f"{type(module).__name__} leaves activations in {list_some(scaled)}, and they are "
                "multiplied by powers of two there. Its own result is right; code that reads them later "
                "gets other values. For such code, leave this module in bf16 or fp32."
            )


def _is_scaled(now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are those of an earlier run times powers of two other than 1.

    Others that differ, such as running means, count calls.
    """
    if [x.shape for x in now] != [x.shape for x in before]:
        return False
    pairs = [(x, y) for x, y in zip(now, before, strict=True) if not torch.equal(x, y)]
    floats = [(x.float(), y.float()) for x, y in pairs if x.is_floating_point()]
    return any(torch.equal(torch.frexp(x)[0], torch.frexp(y)[0]) for x, y in floats)


def _are_equal(output: Any, reference: Any) -> bool:
    after, before = (list(iterate_tensors(x)) for x in (output, reference))
    pairs = zip(before, after, strict=True)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def _try_calls(module: torch.nn.Module, reference: Sequence[Run]) -> Trial:
    errors, bf16_errors, notes, done = list[float](), list[float](), list[str](), 0
    for run in reference:
        if not _may_run(module, run):
            notes.append(
                f"A call of {run.flops:.1e} FLOPs wasn't run in fp16: it would take minutes on a "
                "processor."
            )
            continue
        try:
            output = _run_cast(module, run.call, torch.float16)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # model code may raise anything
            first = take_first_line(error)
            if _lacks_kernel(error):  # the device's fault, not the model's
                notes.append(
                    f"A call doesn't run in fp16 on this device, and wasn't tried: {first}."
                )
                continue
            why = f"it raises {type(error).__name__}: {first[:200]}"
            raise _refuse(why) from error
        _demand_alike(module, output, run)
        done += 1
        if run.draws:
            notes.append("A call draws random numbers, which differ by format: it isn't compared.")
        else:
            errors.append(measure_error(output, run.output))
            bf16_errors += [] if run.bf16_rel_err is None else [run.bf16_rel_err]
            if why := describe_excess(errors[-1], run.bf16_rel_err):
                raise _refuse(f"its output isn't that of fp32: {why}")
    is_bf16 = bool(errors) and len(bf16_errors) == len(errors)
    return Trial(
        done,
        _round(max(errors)) if errors else None,
        _round(max(bf16_errors)) if is_bf16 else None,
        " ".join(dict.fromkeys(notes)),
    )


def _lacks_kernel(error: Exception) -> bool:
    """Return whether an error means that the device lacks a kernel for a dtype; torch 2.6.0 raises a
    RuntimeError.
    """
    return isinstance(error, NotImplementedError) or "not implemented for '" in str(error)


def _demand_alike(module: torch.nn.Module, output: Any, run: Run) -> None:
    """Check that a trial's call returns the containers, shapes and types of fp32, and only finite values.

    Raises:
        TrialError: if not.
    """
    leaves, spec = pytree.tree_flatten(output)
    before, known = pytree.tree_flatten(run.output)
    tensors, wanted = list(iterate_tensors(output)), list(iterate_tensors(run.output))
    if spec != known or list(map(type, leaves)) != list(map(type, before)):
        raise _refuse(f"it returns {_outline(spec)} instead of {_outline(known)}")
    if [x.shape for x in tensors] != [x.shape for x in wanted]:
        shapes = " instead of ".join(str([tuple(x.shape) for x in y]) for y in (tensors, wanted))
        raise _refuse(f"it returns the shapes {shapes}")
    for number, (tensor, right) in enumerate(zip(tensors, wanted, strict=True)):
        if not tensor.is_floating_point() or not bool(right.isfinite().all()):
            continue
        if bad := sum(count_non_finite(tensor)):
            raise _refuse(
                f"its output isn't that of fp32: {bad} of {tensor.numel()} values of tensor "
                f"{number} are NaN or Inf{_explain_arguments(module, run.call)}",
            )


def _explain_arguments(module: torch.nn.Module, call: PlainCall) -> str:
    """Return, as a clause, which arguments fp16 doesn't hold, whatever the exponents; "" if it holds all.

    Masks are left out, since their casts keep them finite.
    """
    function, args, kwargs = call
    names = tuple(inspect.signature(module.forward if function is module else function).parameters)
    found: dict[str, float] = {}
    for name, x in name_inputs(args, kwargs or {}, names):
        if x.is_floating_point() and x.dim() > 1 and not is_mask(name):
            found[name] = max(found.get(name, 0.0), measure_amax(x))
    largest = FORMATS["fp16"].largest
    beyond = [f"`{name}` is up to {amax:.2g}" for name, amax in found.items() if amax > largest]
    return f"; its argument {' and '.join(beyond)}, which fp16 doesn't hold" if beyond else ""


def _outline(spec: Any) -> str:
    return " ".join(str(spec).split())[:200]


def _refuse(why: str) -> TrialError:
    return TrialError(
        f"In fp16 with casts {why}.",
        expected="Run in fp16 with its exponents in place, it returns what it returns in fp32.",
        remedy="Run it in bf16 or fp32.",
    )


def _round(error: float) -> float:
    return float(f"{error:.3g}")

"""Plans by the Python interface: `make_plan` certifies a checkpoint, `fp16` also applies and guards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stopdown.argument_types import check_function
from stopdown.component_calls.components import find_components, runs_by_call
from stopdown.errors import OptionError, warn_user
from stopdown.module_calls.call import explain_call
from stopdown.plans.calibrated import measure_plan
from stopdown.plans.certified import Scope, certify_plan, certify_program
from stopdown.records import Plan
from stopdown.runtime.guard import Guard, guard
from stopdown.sources.hub import Progress
from stopdown.sources.source import Source


def make_plan(
    pipe_or_source: Any,
    run: Callable[[], Any] | None = None,
    *,
    residual: str = "fp32",
    progress: Progress | None = None,
) -> Plan:
    """Make the plan by which each component of a checkpoint runs in fp16 without overflow, with reasons.

    Exponents come from bounds that hold for every prompt, computed from the weights tensor by tensor.
    Activations without a bound rest on an estimate, which the guard watches. The plan is cached.

    Args:
        pipe_or_source: a Hub id, Diffusers folder, single safetensors file, bundled model or `Source`; or
            a Diffusers pipeline or another program that `guard` accepts, which is left unchanged.
        run: runs a program that isn't a pipeline once, as it will be run later; the components that it
            calls are planned. It's stopped at the first call of a component, and called again for the
            next component.
        residual: `fp32` keeps each component's residual stream in fp32 if its architecture allows it,
            with fp16 matrix products; `native` leaves it.
        progress: called with stage, component, done and total.

    Returns:
        The plan, for `apply_plan`, `load(precision=plan)` and `write_plan`.

    Raises:
        OptionError: `run` was given with a source.

    Cost: captures (seconds), and one pass over the weights for each kind of call.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 6e4 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> plan = stopdown.make_plan({"denoiser": module}, lambda: module(x))
        >>> [(entry.component, entry.precision) for entry in plan.components]
        [('denoiser', 'fp16')]
    """
    check_function("make_plan(progress=...)", progress, "progress=print", 4)
    check_function("make_plan(run=...)", run, "run=lambda: model(x)")
    if isinstance(pipe_or_source, (str, Path, Source)):
        if run is not None:
            raise OptionError(
                "make_plan was given a source and run=..., which runs a program that is loaded.",
                expected="A plan of a source comes from its weights, and nothing is run.",
                remedy="Leave `run` out, or give the loaded program in place of the source.",
            )
        kept = Scope(keeps=True)
        return certify_plan(pipe_or_source, residual=residual, progress=progress, scope=kept)
    return certify_program(pipe_or_source, run, residual=residual, progress=progress)


def fp16(program: Any, *args: Any, **kwargs: Any) -> Guard:
    """Rescale a loaded module or pipeline for fp16, cast it and guard it, in place.

        stopdown.fp16(pipe)
        stopdown.fp16(model, x, timestep=t)

    A pipeline's exponents come from bounds computed from its weights, without a run; those of a module
    come from the example. Components that can't run in fp16 stay in another precision, with a warning that
    states the reason.

    Args:
        program: a Diffusers pipeline; or a module or another callable program that `guard` accepts. Its
            weights are in fp32 or as stored.
        *args, **kwargs: an example of its call, with typical values; floating tensors in fp32. A pipeline
            needs none, and then has its default sizes.

    Returns:
        The guard: `.record`, `.repairs`, `.plan`, and `.remove()`, which restores every bit.

    Raises:
        OptionError: there is no example, or the program can't be called with it.
        InputError: the program contains no module.

    Cost: as `certify_program`, or as `measure_plan` for a module; a copy of the weights stays in memory
    while the guard is active.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 6e4 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> guard = stopdown.fp16(module, x)
        >>> linear.weight.dtype, bool(module(x).isfinite().all())
        (torch.float16, True)
        >>> guard.remove()
        >>> linear.weight.dtype
        torch.float32
    """
    find_components(program)  # refuses what holds no module, and names
    if runs_by_call(program):
        given = _bind(program, args, kwargs) if args or kwargs else {}
        plan = certify_program(program, arguments=given)
    else:
        if not args and not kwargs:
            raise OptionError(
                f"fp16 was given a {type(program).__name__} and no example of its call.",
                expected="Exponents are computed from calls, and no call was given.",
                remedy="Give the arguments of a call: stopdown.fp16(model, x).",
            )
        call = functools.partial(program, *args, **kwargs)
        try:
            plan = measure_plan(program, run=call)
        except (TypeError, ValueError, RuntimeError) as error:
            explain_call("fp16", call, error)
            raise
    for entry in plan.components:
        if entry.precision != "fp16":
            warn_user(f"`{entry.component}` runs in {entry.precision}: {' '.join(entry.reasons)}")
    return guard(program, plan)


def _bind(pipe: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        bound = inspect.signature(type(pipe).__call__).bind(pipe, *args, **kwargs).arguments
    except TypeError as error:
        raise OptionError(
            f"A {type(pipe).__name__} can't be called with this example: {error}.",
            remedy='Give the arguments of its call: stopdown.fp16(pipe, prompt="a red circle").',
        ) from None
    return {**dict(list(bound.items())[1:]), **bound.get("kwargs", {})}

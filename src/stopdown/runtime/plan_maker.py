"""`make_plan`: the plan that a checkpoint should have, certified from its weights; `fp16` puts it on."""

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
    """Find how each component of a checkpoint runs in fp16 without overflow, with the reasons.

    Exponents come from bounds that hold for every prompt, computed from the weights tensor by tensor. What
    has no bound rests on a guess, which the guard watches. The plan is kept for later.

    Args:
        pipe_or_source: a Hub id, Diffusers folder, single safetensors file, bundled model or `Source`; a
            Diffusers pipeline, or another program as `guard` takes it, is left as it was.
        run: runs a program that is no pipeline once, as it is to be run later; what it calls is planned. It
            ends at the first call of each component, and begins anew with the next one.
        residual: `fp32` keeps the residual stream of each component in fp32 where its architecture
            allows it, beside fp16 matrix products; `native` leaves it.
        progress: called with stage, what, done and total.

    Raises:
        OptionError: `run` was given with a source.

    Cost: captures of seconds and one pass over the weights for each kind of call.
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
    """Make a module or a pipeline that is loaded run in fp16, in place: rescale, cast and guard it.

        stopdown.fp16(pipe)
        stopdown.fp16(model, x, timestep=t)

    A pipeline's exponents come from bounds computed from its weights, and nothing is run; those of a module
    come from the example. Components that cannot run in fp16 stay in another precision, and a warning says
    why.

    Args:
        program: a Diffusers pipeline; or a module, or another program as `guard` takes it that can be
            called. Its weights are in fp32 or as they are stored.
        *args, **kwargs: an example of its call, with values as they will be; floating tensors in
            fp32. A pipeline needs none; sizes are its defaults then.

    Returns:
        The guard: `.record`, `.repairs`, `.plan`, and `.remove()`, which restores every bit.

    Raises:
        OptionError: there is no example, or the program cannot be called with it.
        InputError: the program holds no module.

    Cost: as `certify_program`, of a module as `measure_plan`; a copy of the weights is kept for as long as
    it is on.
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
            f"A {type(pipe).__name__} cannot be called with this example: {error}.",
            remedy='Give the arguments of its call: stopdown.fp16(pipe, prompt="a red circle").',
        ) from None
    return {**dict(list(bound.items())[1:]), **bound.get("kwargs", {})}

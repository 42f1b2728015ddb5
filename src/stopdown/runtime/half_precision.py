"""`fp16`: a module or pipeline that is loaded, rescaled, cast and guarded by one call."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from stopdown.component_calls.components import find_components, runs_by_call
from stopdown.errors import OptionError, warn_user
from stopdown.plans.calibrated import measure_plan
from stopdown.runtime.guard import Guard, guard
from stopdown.scaling.rescale import explain_call


def fp16(program: Any, *args: Any, **kwargs: Any) -> Guard:
    """Make a module or a pipeline that is loaded run in fp16, in place: rescale, cast and guard it.

        stopdown.fp16(pipe)
        stopdown.fp16(model, x, timestep=t)

    Components that cannot run in fp16 stay in another precision, and a warning says why.

    Args:
        program: a Diffusers pipeline; or a module, or another program as `guard` takes it that can be
            called. Its weights are in fp32 or as they are stored.
        *args, **kwargs: an example of its call, with values as they will be; floating tensors in
            fp32. A pipeline needs none: prompts of our own are measured then.

    Returns:
        The guard: `.record`, `.repairs`, `.plan`, and `.remove()`, which restores every bit.

    Raises:
        OptionError: there is no example, or the program cannot be called with it.
        InputError: the program holds no module.

    Cost: as `measure_plan`; a copy of the weights is kept for as long as it is on.
    """
    find_components(program)  # refuses what holds no module, and names
    if runs_by_call(program):
        plan = measure_plan(
            program, prompts=[_bind(program, args, kwargs)] if args or kwargs else ()
        )
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

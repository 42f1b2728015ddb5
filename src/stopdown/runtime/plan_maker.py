"""`make_plan`: the plan that a checkpoint should have, certified from its weights or measured."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.argument_types import check_function
from stopdown.component_calls.components import find_components, runs_by_call
from stopdown.devices.environment import Device
from stopdown.errors import OptionError, warn_user
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.requests import Request
from stopdown.plans.calibrated import Prepare, SafeSource, measure_plan
from stopdown.plans.certified import Scope, certify_plan, certify_program
from stopdown.plans.plan_choice import find_or_certify
from stopdown.plans.planned_loader import load_plan
from stopdown.records import MemoryPlan, Plan
from stopdown.runtime.guard import Guard, GuardOptions, guard
from stopdown.runtime.memory_limits import fit_run
from stopdown.scaling.rescale import explain_call
from stopdown.scaling.trial import WideProducts
from stopdown.sources.hub import Progress
from stopdown.sources.sources import Source

if TYPE_CHECKING:
    import torch


def make_plan(
    pipe_or_source: Any,
    *,
    measure: bool | str | None = None,
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    residual: str | None = None,
    request: Request | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    run: Callable[[], Any] | None = None,
) -> Plan:
    """Find how each component of a checkpoint runs in fp16 without overflow, with the reasons.

    For a source or a pipeline, nothing is run: exponents come from bounds that hold for every prompt,
    computed from the weights tensor by tensor, and the residual stream stays in fp32. It is measured if
    `measure` asks for it or one of `prompts`, `request`, `device` and `run` is given. A folder is measured
    as it runs by its certificate; a single file, a model with LoRAs and what is loaded run in fp32 a few
    times.

    Args:
        pipe_or_source: a Hub id, Diffusers folder, single safetensors file, bundled model or `Source`; a
            Diffusers pipeline, or another program as `guard` takes it, is left as it was.
        measure: True measures a source or pipeline, too: `"auto"` takes bounds for every input where they
            cost nothing, `"bound"` where it can, `"measured"` none. True is `"auto"` for a source, and
            `"measured"` for what is loaded. False measures nothing: a program that is no pipeline is
            certified from its weights, for the first call that `run` makes of each of its components,
            where the run is stopped; such a plan is kept.
        prompts: what to measure, one run each: a text or several, or arguments of the pipeline's
            call by its own names (a `mask_image`, `prompt_embeds`). By default three built-in ones. Of a
            file with parts of a pipeline: arguments of their calls, `{"vae.decode": {"z": ...}}` or for
            a single one the inner table.
        residual: `fp32` keeps the residual stream of each component in fp32 where its architecture
            allows it, beside fp16 matrix products; `native` leaves it, and is the default for a program
            that is no pipeline and is measured.
        request: sizes, steps, guidance, picture, mask, video and further arguments of the runs; None
            leaves the model's defaults, and draws what the pipeline cannot do without.
        device: where a source is measured: `cuda`, `cpu`…; None takes the best device that holds the
            pipeline in fp32.
        progress: called with stage, what, done and total.
        run: runs a program that is no pipeline once, as it is to be run later; what it calls is planned.

    Cost: captures of seconds and one pass over the weights for each kind of call. Measuring takes a run for
    each prompt, and for each component about as many forwards in fp32 as calls were kept; its weights are
    in fp32 layer by layer if all of them do not fit.
    """
    check_function("make_plan(progress=...)", progress, "progress=print", 4)
    check_function("make_plan(run=...)", run, "run=lambda: model(x)")
    is_source, stream = isinstance(pipe_or_source, (str, Path, Source)), residual or "fp32"
    if measure is None:
        is_asked = prompts != () or not (request is device is run is None)
        measure = is_asked or not (is_source or runs_by_call(pipe_or_source))
    if is_source and not measure:
        kept = Scope(keeps=True)
        return certify_plan(pipe_or_source, residual=stream, progress=progress, scope=kept)
    if not measure:
        return certify_program(pipe_or_source, run, residual=stream, progress=progress)
    return measure_plan(
        SafeSource(pipe_or_source, run_certified) if is_source else pipe_or_source,
        prompts=prompts,
        residual=residual,
        ranges=measure if isinstance(measure, str) else "auto" if is_source else None,
        request=request,
        device=device,
        progress=progress,
        run=run,
    )


@contextlib.contextmanager
def run_certified(
    source: Source, device: Device, prepare: Prepare, progress: Progress | None
) -> Iterator[tuple[Any, Plan, list[Request]]]:
    """Open a checkpoint as it runs by its certificate, under a guard and within the device's memory.

    Args:
        prepare: gives the requests of the pipeline, before its weights are placed.

    Yields:
        The pipeline, the certificate, and the requests at the sizes that fit.
    """
    requests = prepare(load_pipeline(source, torch_dtypes=None))  # refused before anything is made
    plan = find_or_certify(source, device, progress=progress)
    loaded = load_plan(
        source,
        dataclasses.replace(plan, chosen="its certificate", memory=MemoryPlan()),
        device,
        progress=progress,
    )
    pipe = loaded.pipe
    loaded = fit_run(loaded, requests[0], device, warn_user)
    pipe.set_progress_bar_config(disable=True)
    sums = WideProducts() if device.type == "cpu" else contextlib.nullcontext()
    options = GuardOptions(decisions=loaded.decisions, loaded=loaded)
    with loaded.patches, loaded.offloader or contextlib.nullcontext(), Guard(pipe, options), sums:
        yield pipe, plan, requests


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

"""Record the calls that a program makes of its components: run it, and keep copies of their arguments.

A layer around each component call copies the arguments to the CPU: of the denoiser at the first, middle
and last step, with every branch of guidance, and of everything else at each call. No more than
`MOST_CALLS` of a component call are kept. A pipeline that decodes and never encodes also gets an
encode, of what it decoded, because the same checkpoint serves pictures and videos to start from.

Not covered: other prompts, sizes and numbers of steps than those that were run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.component_calls.component_interception import intercept_components
from stopdown.component_calls.components import (
    find_adapter,
    find_components,
    list_component_calls,
)
from stopdown.component_calls.step_counter import StepCounter
from stopdown.errors import OptionError, StopdownError, take_first_line
from stopdown.interception.patches import Patches
from stopdown.module_calls.callee import Callee
from stopdown.numerics import iterate_tensors
from stopdown.pipelines.drawn_inputs import draw_inputs
from stopdown.pipelines.requests import (
    PROMPTS,
    Request,
    build_arguments,
    explain_stop,
    list_needed_fields,
)
from stopdown.scaling import ComponentCall, Rank, intercept, put_cast
from stopdown.sources.hub import Progress
from stopdown.sources.library_messages import quiet_truncation

MOST_CALLS = 24
"""Calls of one component call that are kept, spread over the prompts."""

STEPS = 4
"""Denoising steps of a recorded run, if a request names none."""

MOST_FRAMES = 9
"""Frames of a decoded video that are encoded again."""


@dataclass
class _Recorder:
    """Copies the arguments of component calls while a program runs."""

    pipe: Any
    calls: dict[str, list[ComponentCall]] = field(default_factory=dict)
    callees: dict[str, Callee] = field(default_factory=dict)
    decoded: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scheduled = find_adapter(self.pipe).find_scheduled(self.pipe)
        self.steps = StepCounter(scheduled, Rank.RECORD)

    def put_on(self, patches: Patches) -> None:
        intercept_components(self.pipe, self._put_layer, patches)
        self.steps.follow()
        patches.defer(self.steps.stop)

    def _put_layer(self, callee: Callee, patches: Patches) -> None:
        # beneath casts: in the weights' dtype
        intercept(callee, self._record, patches, Rank.COMPONENT)
        self.callees.setdefault(callee.name, callee)

    def _record(self, call: ComponentCall) -> Any:
        callee = call.callee
        total = max(1, self.steps.total)
        if callee.stage != "denoise" or self.steps.done in (0, total // 2, total - 1):
            self.calls.setdefault(callee.name, []).append(_copy_to_cpu(call))
        output = call.proceed()
        if callee.method == "decode" and callee.component_name not in self.decoded:
            found = next(iterate_tensors(output), None)
            if found is not None:
                self.decoded[callee.component_name] = found.detach().cpu()
        return output


def list_requests(
    pipe: Any,
    prompts: Sequence[str | Mapping[str, Any]],
    given: Request,
) -> list[Request]:
    """Return one request for each prompt, with a random picture, mask or video if the pipeline needs
    one as input.

    Args:
        prompts: texts, or arguments of the pipeline's call.
        given: request with sizes and further fields.
    """
    needed = list_needed_fields(type(pipe))
    base = draw_inputs(pipe, given)
    has_prompt = "prompt" in needed and not given.arguments.keys() & {"prompt", "prompt_embeds"}
    if not has_prompt and all(isinstance(one, str) for one in prompts):
        return [dataclasses.replace(base, prompt=None)]
    named = [given.prompt] if given.prompt else []
    return [
        dataclasses.replace(base, prompt=one, seed=given.seed + number)
        if isinstance(one, str)
        else dataclasses.replace(
            base, seed=given.seed + number, arguments={**given.arguments, **one}
        )
        for number, one in enumerate(prompts or (*named, *PROMPTS))
    ]


def record_calls(
    pipe: Any, requests: Sequence[Request], progress: Progress | None = None
) -> dict[str, list[ComponentCall]]:
    """Run a pipeline for these requests, and return copies of its calls by component.

    Args:
        pipe: in the safest precision at hand; it is run as it is.

    Cost: the runs; the arguments of at most `MOST_CALLS` calls of each component call in host memory.
    """
    recorder = _Recorder(pipe)
    is_ours = all(request.prompt in (None, *PROMPTS) for request in requests)
    with Patches() as patches, torch.no_grad(), quiet_truncation(wanted=is_ours):
        recorder.put_on(patches)
        for number, request in enumerate(requests):
            if progress is not None:
                progress(
                    "observe", f"prompt {number + 1} of {len(requests)}", number, len(requests)
                )
            arguments = build_arguments(pipe, request)
            try:
                pipe(**arguments)
            except StopdownError:
                raise
            except Exception as error:  # whatever a pipeline's own code raises
                raise explain_stop(type(pipe), arguments, error, precisions=("fp32",)) from error
    return _collect(recorder)


def record_run(program: Any, run: Callable[[], Any]) -> dict[str, list[ComponentCall]]:
    """Run a program that isn't a pipeline once, and return copies of its calls by component.

    Args:
        program: its modules are in fp32; arguments are cast to fp32.
        run: runs it.
    """
    recorder = _Recorder(program)
    with Patches() as patches, torch.no_grad():
        intercept_components(program, lambda x, layers: put_cast(x, torch.float32, layers), patches)
        recorder.put_on(patches)
        run()
    return _collect(recorder)


class _Called(BaseException):
    """Raised at the first call of a component to end a run of which nothing more is needed."""


def record_first_calls(program: Any, run: Callable[[], Any]) -> dict[str, list[ComponentCall]]:
    """Return the first call that a program makes of each component, without computing anything.

    Args:
        program: no pipeline. Arguments are cast to the dtype of its weights.
        run: runs it once. It stops at the first call of a component, and starts again for the next one,
            until all weights of the program are those of a called component, or it ends.
    """
    found: dict[str, list[ComponentCall]] = {}
    left = {id(x) for part in find_components(program).values() for x in part.parameters()}

    def stop(call: ComponentCall) -> Any:
        name = call.callee.component_name
        if name in found:
            return call.proceed()
        found[name] = [_copy_to_cpu(call)]
        left.difference_update(map(id, call.callee.owner.parameters()))
        raise _Called

    def put(callee: Callee, layers: Patches) -> None:
        weights = next((x for x in callee.owner.parameters() if x.is_floating_point()), None)
        if weights is not None and weights.element_size() > 1:
            put_cast(callee, weights.dtype, layers)
        intercept(callee, stop, layers, Rank.COMPONENT)

    wanted = {callee.component_name for callee in find_adapter(program).find_callees(program)}
    is_over = False
    with Patches() as patches, torch.no_grad():
        intercept_components(program, put, patches)
        while not is_over and not (found and wanted <= found.keys() and not left):
            with contextlib.suppress(_Called):
                run()
                is_over = True
    return found


def _collect(recorder: _Recorder) -> dict[str, list[ComponentCall]]:
    found: dict[str, list[ComponentCall]] = {}
    for callee in recorder.callees.values():
        calls = recorder.calls.get(callee.name, []) or _make_up_encode(callee, recorder.decoded)
        found.setdefault(callee.component_name, []).extend(_thin_out(calls))
    return found


def _make_up_encode(callee: Callee, decoded: dict[str, torch.Tensor]) -> list[ComponentCall]:
    """Derive a call of `encode` from a picture that the autoencoder decoded, if the program made none."""
    picture = decoded.get(callee.component_name)
    if picture is None or callee.method != "encode":
        return []
    if picture.dim() == 5:
        picture = picture[:, :, :MOST_FRAMES]
    return [ComponentCall(callee, (picture.clamp(-1, 1).contiguous(),), {}, made_up=True)]


def _thin_out(calls: list[ComponentCall]) -> list[ComponentCall]:
    """Return at most `MOST_CALLS` of the calls, evenly spread, with the first and the last."""
    if len(calls) <= MOST_CALLS:
        return calls
    return [calls[i * (len(calls) - 1) // (MOST_CALLS - 1)] for i in range(MOST_CALLS)]


def _copy_to_cpu(call: ComponentCall) -> ComponentCall:
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda x: x.detach().to("cpu", copy=True), (call.args, call.kwargs)
    )
    return ComponentCall(call.callee, args, kwargs)


Arguments = Mapping[str, Any]
"""Of one call by their names."""


def list_part_calls(program: Any) -> dict[str, Callee]:
    """Return the callable methods of a program's parts by name: `transformer`, `vae.decode`."""
    return {callee.name: callee for callee in list_component_calls(vars(program))}


def play_calls(program: Any, given: Sequence[str | Mapping[str, Any]]) -> None:
    known = list_part_calls(program)
    for one in given:
        for callee, arguments in _name_calls(known, one):
            try:
                with torch.no_grad():
                    callee.bind(callee.owner)(**arguments)
            except Exception as error:  # whatever a model's code raises for other arguments
                raise OptionError(
                    f"{callee.name} didn't run as recorded: {take_first_line(error)}.",
                    expected="A call has the arguments of the component's own class by their names.",
                    remedy="Record a call of this model, or bound every call: make_plan(FILE).",
                ) from error


def _name_calls(
    known: Mapping[str, Callee], given: str | Mapping[str, Any]
) -> Iterator[tuple[Callee, Arguments]]:
    if not isinstance(given, str) and given and given.keys() <= known.keys():
        yield from ((known[name], arguments) for name, arguments in given.items())
        return
    if isinstance(given, str) or len(known) != 1:
        what = f"the prompt {given!r}" if isinstance(given, str) else "a call without a name"
        raise OptionError(
            f"The file holds no pipeline but what is called as {' and '.join(known)}, and {what} was "
            "given.",
            expected="Arguments of these calls by name, as a program gave them to the component.",
            remedy=f'Name the call, {{"{next(iter(known))}": {{...}}}}, or bound all: make_plan(FILE).',
        )
    yield next(iter(known.values())), given

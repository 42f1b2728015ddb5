"""Dry run: run a pipeline's own code once without weights, and notify listeners.

Everything except the components is real: tokenizer, scheduler, noise, and the loop over the steps. The code
of a component runs on fake tensors. The pipeline then gets zeros of the returned shapes and dtypes, or the
actual values if they follow from the arguments alone. Calls that are alike (same component, weight formats,
shapes, dtypes and plain arguments) are run once, and the result is used for the others.

Listeners use the run: the check of dtypes, the forecast of memory, and the recording of calls for a
certificate. Several may listen to one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.component_calls.component_interception import intercept_components
from stopdown.component_calls.components import find_callees
from stopdown.errors import WARNINGS_IGNORED, ignoring_warnings
from stopdown.fake_tensors.argument_values import ArgumentValues, find_known, set_known
from stopdown.fake_tensors.fake_modules import find_mode
from stopdown.interception.module_paths import ModulePaths
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import map_tensors
from stopdown.module_calls.callee import Callee
from stopdown.numerics import iterate_tensors
from stopdown.pipelines.allowed_sizes import choose_own_sides, find_own_sides
from stopdown.pipelines.requests import (
    PROMPTS,
    find_picture_mode,
    list_needed_arguments,
    list_own_arguments,
)
from stopdown.pipelines.skeletons import copy_empty_module
from stopdown.scaling import ComponentCall, Rank, intercept
from stopdown.sources.library_messages import quiet_libraries

_SIDE = 256


@dataclass(eq=False)
class DryCall:
    """One component call of a dry run, with its result.

    Attributes:
        fakes: fake tensor for each tensor argument, by the argument's `id`; empty if the result of an
            earlier call is used.
        kept: records of listeners while the code ran, by names of their own; shared with all calls that
            use the same result.
        returned: output of the code, with tensors on `meta`; None if it raised.
        output: output that the pipeline gets, with zeros for values; None if the run ends with this call.
    """

    call: ComponentCall
    fakes: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    output: Any = None


class Listener:
    """Base class of objects that observe a dry run; by default, each method does nothing.

    Attributes:
        ends_at_decoder: whether the run may end after the first call of the decoder.
        most_steps: number of denoising steps that the listener needs; None for all.
    """

    ends_at_decoder: bool = True
    most_steps: int | None = None

    def around(self, arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[object]:
        """Return a context manager to enter for the whole run, which observes the pipeline's own code.

        Args:
            arguments: of the pipeline's call.
        """
        return contextlib.nullcontext()

    def sign(self, call: ComponentCall) -> str:
        """Return what the listener adds to a call's signature; calls with equal signatures are run once."""
        return ""

    def begin(self, run: DryCall) -> None:
        """Take note that a component call begins, for example to stop observing the pipeline's own code."""

    def inside(self, run: DryCall, paths: ModulePaths) -> contextlib.AbstractContextManager[object]:
        """Return a context manager, such as a dispatch mode, to enter while a component's code runs.

        The code runs on fake tensors.

        Args:
            paths: tracks which submodule is running.
        """
        return contextlib.nullcontext()

    def enter(self, path: str) -> None:
        """Take note that a submodule of the component begins to run; operations that follow are its own.

        Args:
            path: of the submodule in the component.
        """

    def leave(self, path: str) -> None:
        """Take note that a submodule of the component has ended, also after an exception.

        Args:
            path: of the submodule in the component.
        """

    def end(self, run: DryCall) -> None:
        """Take note that a component call has ended, also after an exception; `run` has its result."""


class ComponentFailed(Exception):
    """Raised if a component's code fails on fake tensors; its exception is the cause."""

    def __init__(self, callee: Callee, error: Exception) -> None:
        super().__init__(f"{callee.name}: {error}")
        self.callee, self.error = callee, error


class _DecoderReached(Exception):
    """Raised to end a dry run after the decoder's first call."""


@dataclass(frozen=True)
class Answer:
    """Result of a component's code: its output with tensors on `meta`, and the listeners' records."""

    output: Any
    kept: dict[str, Any]


Answers = dict[str, Answer]
"""Results by signature of the call; runs with the same listeners may share this cache."""


def dry_run(
    skeleton: Any,
    arguments: Mapping[str, Any],
    listeners: Sequence[Listener] = (),
    answers: Answers | None = None,
) -> None:
    """Run the `__call__` of a pipeline without weights, and notify listeners.

    Args:
        skeleton: pipeline from `build_skeleton` or `copy_skeleton`. Interception layers on its components
            run too.
        arguments: keyword arguments of the call. The state of a generator among them is not changed.
        listeners: the listeners, outermost first.
        answers: cache of results from earlier runs, to which this run adds.
    """
    run = _DryRun(listeners, {} if answers is None else answers)
    given = _prepare(skeleton, arguments, listeners)
    if listeners and all(listener.ends_at_decoder for listener in listeners):
        calls = find_callees(skeleton)
        run.last = next((x for x in calls if x.stage == "decode" and x.method == "decode"), None)
    run.go(skeleton, functools.partial(skeleton, **given), given)


def dry_run_program(
    program: Any,
    start: Callable[[], Any],
    listeners: Sequence[Listener] = (),
    torch_dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Run a live program that is not a pipeline, with its components replaced by copies without weights.

    Args:
        program: program as for `guard`. Nothing but its own code changes it.
        start: runs the program.
        torch_dtypes: dtypes in which components are treated as loaded, by name; others keep their own.
    """
    made: dict[tuple[torch.nn.Module, str], torch.nn.Module] = {}

    def copy(callee: Callee) -> Callee:
        owner = getattr(callee.owner, "_orig_mod", callee.owner)  # of torch.compile
        key = owner, _sign_formats(owner)
        if key not in made:
            dtype = (torch_dtypes or {}).get(callee.component_name)
            try:
                made[key] = copy_empty_module(owner, dtype)
            except Exception as error:  # whatever its attributes raise when they are copied
                raise ComponentFailed(callee, error) from error
        return dataclasses.replace(callee, owner=made[key])

    _DryRun(listeners, {}, copy).go(program, start, {})


def _prepare(
    skeleton: Any, arguments: Mapping[str, Any], listeners: Sequence[Listener]
) -> dict[str, Any]:
    """Return the arguments with only as many steps as listeners need, and with a new generator.

    A pipeline that takes no number of steps, such as HeliosPyramid with its stages, makes all of them. One
    that begins with a picture makes a share of its steps, the strength.
    """
    prepared, name = dict(arguments), "num_inference_steps"
    most = [listener.most_steps for listener in listeners]
    taken = inspect.signature(type(skeleton).__call__).parameters
    if name not in taken:
        prepared.pop(name, None)
    elif most and None not in most:
        steps = max(x for x in most if x is not None)
        share = prepared.get("strength", getattr(taken.get("strength"), "default", 1.0))
        if isinstance(share, (int, float)) and 0 < share < 1:
            steps = math.ceil(steps / share)
        prepared[name] = min(steps, arguments.get(name) or steps)
    if isinstance(prepared.get("generator"), torch.Generator):
        prepared["generator"] = torch.Generator().manual_seed(0)
    return prepared


class _DryRun:
    """State of one dry run.

    Attributes:
        copy: replaces a callee by one on a copy without weights; None for a skeleton.
        thread: thread that runs a live program; calls in others are computed as usual.
        last: component call at which the run ends; None to run to the end.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        answers: Answers,
        copy: Callable[[Callee], Callee] | None = None,
    ) -> None:
        self.listeners, self.answers, self.copy = listeners, answers, copy
        self.thread = threading.get_ident()
        self.last: Callee | None = None

    def go(self, program: Any, start: Callable[[], Any], arguments: Mapping[str, Any]) -> None:
        """Run a program until its end, or until the decoder's first call if no listener needs the rest."""
        with (
            Patches() as patches,
            quiet_libraries(),
            torch.no_grad(),
            WARNINGS_IGNORED,
            ignoring_warnings(Warning),  # of a run without values they say nothing
            contextlib.ExitStack() as stack,
            contextlib.suppress(_DecoderReached),
        ):
            intercept_components(
                program, lambda x, layers: intercept(x, self._answer, layers, Rank.RECORD), patches
            )
            for listener in self.listeners:
                stack.enter_context(listener.around(arguments))
            start()

    def _answer(self, call: ComponentCall) -> Any:
        """Return the output of a component call, with zeros for unknown values, and notify listeners."""
        is_last = call.callee == self.last
        if self.copy is not None and threading.get_ident() != self.thread:
            return call.proceed()
        if self.copy is not None:
            used = self.copy(call.callee)
            call = dataclasses.replace(call, callee=used, below=getattr(used.owner, used.method))
        run = DryCall(call)
        with contextlib.ExitStack() as stack:
            for listener in self.listeners:
                listener.begin(run)
                stack.callback(listener.end, run)
            answer = self._find_answer(run)
            run.kept, run.returned = answer.kept, answer.output
            if is_last:
                raise _DecoderReached
            given = next(iterate_tensors((call.args, call.kwargs)), torch.empty(0))
            fill = functools.partial(_fill, device=given.device)
            run.output = map_tensors(answer.output, fill)
        return run.output

    def _find_answer(self, run: DryCall) -> Answer:
        call = run.call
        own = (x.sign(call) for x in self.listeners)
        signature = "|".join((call.callee.name, _sign_formats(call.callee.owner), *own, call.key))
        if signature not in self.answers:
            output = self._run(run)
            self.answers[signature] = Answer(map_tensors(output, _drop_values), run.kept)
        return self.answers[signature]

    def _run(self, run: DryCall) -> Any:
        """Run one call of a component's code on fake tensors."""
        call, owner = run.call, run.call.callee.owner
        mode = find_mode(owner)

        def make_fake(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in run.fakes:
                run.fakes[id(tensor)] = fake = mode.from_tensor(tensor.detach())
                set_known(fake, find_known(tensor))
            return run.fakes[id(tensor)]

        args, kwargs = map_tensors((call.args, call.kwargs), make_fake)
        with Patches() as patches, mode, ArgumentValues(), contextlib.ExitStack() as stack:
            paths = ModulePaths(owner, patches, self._enter, self._leave)
            for listener in self.listeners:
                stack.enter_context(listener.inside(run, paths))
            try:
                return dataclasses.replace(call, args=args, kwargs=kwargs).proceed()
            except Exception as error:
                raise ComponentFailed(call.callee, error) from error
            finally:
                run.fakes.clear()

    def _enter(self, path: str) -> None:
        for listener in self.listeners:
            listener.enter(path)

    def _leave(self, path: str, output: Any) -> None:
        for listener in self.listeners:
            listener.leave(path)


def _drop_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor on `meta`; values of integers that follow from the arguments stay attached."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        set_known(made, find_known(tensor))
    return made


def _fill(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an output tensor on a device, with its known values, or zeros if they depend on weights."""
    known = find_known(tensor)
    return torch.zeros_like(tensor, device=device) if known is None else known.to(device, copy=True)


def _sign_formats(module: torch.nn.Module) -> str:
    return str(hash(tuple(str(x.dtype) for x in module.parameters())))


def _count_held(pipe: Any) -> int:
    """Count the models that a pipeline's ControlNet or adapter joins; 0 for one that joins none.

    It takes a list of pictures, one for each, also where it joins only one.
    """
    for part in (getattr(pipe, "controlnet", None), getattr(pipe, "adapter", None)):
        children = list(part.children()) if isinstance(part, torch.nn.Module) else []
        if len(children) == 1 and isinstance(children[0], torch.nn.ModuleList):
            return len(children[0])
    return 0


def _list_ip_adapters(pipe: Any) -> list[int]:
    """Return the number of input features of each IP-Adapter that was loaded into a pipeline."""
    denoisers = [getattr(pipe, name, None) for name in ("unet", "transformer")]
    denoiser = next(
        (x for x in denoisers if x is not None), None
    )  # a compiled one has no truth value
    found = getattr(denoiser, "encoder_hid_proj", None)
    layers = [
        [x for x in part.modules() if isinstance(x, torch.nn.Linear)]
        for part in getattr(found, "image_projection_layers", ())
    ]
    return [linear[0].in_features for linear in layers if linear]


def _add_pictures(
    pipe: Any, picture: Any, taken: Mapping[str, Any], has_image: bool
) -> dict[str, Any]:
    """Return the picture arguments, other than `image`, that a pipeline needs.

    Args:
        picture: picture to use for all of them.
        taken: parameters of the pipeline's `__call__`.
        has_image: whether `image` is given already.
    """
    needed, found = list_needed_arguments(type(pipe)), dict[str, Any]()
    for name in ("mask_image", "control_mask", "control_image"):
        if name in needed:
            found[name] = picture
    count, by_frame = _count_held(pipe), "conditioning_frames" in taken
    if count and not by_frame:
        found["control_image" if "control_image" in taken else "image"] = [picture] * count
    if "ip_adapter_image" in taken and (widths := _list_ip_adapters(pipe)):
        if getattr(pipe, "image_encoder", None) is not None:
            found["ip_adapter_image"] = [picture] * len(widths)
        else:  # for no picture and for one
            found["ip_adapter_image_embeds"] = [torch.zeros(2, 1, width) for width in widths]
    for name in ("video", "control_video"):
        if name in needed and not has_image:
            found[name] = [picture] * 9
    if by_frame:  # of AnimateDiff's ControlNets
        frames = found.get("video") or [picture] * taken["num_frames"].default
        found["conditioning_frames"] = [frames] * count if count else frames
    return found


def make_arguments(pipe: Any) -> dict[str, Any]:
    """Make up arguments for a minimal call of a pipeline, at its default size if that suits its configs."""
    taken = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, Any] = {**choose_own_sides(pipe), **list_own_arguments(pipe)}
    if "prompt" in taken:
        arguments["prompt"] = PROMPTS[0]
    from PIL import Image  # Diffusers brings it

    height, width = find_own_sides(pipe) or (_SIDE, _SIDE)
    picture = Image.new(find_picture_mode(pipe), (width, height))
    for name in ("image", "images"):
        if name in taken and taken[name].default in (None, inspect.Parameter.empty):
            arguments[name] = picture
    arguments |= _add_pictures(pipe, picture, taken, "image" in arguments)
    if "generator" in taken:
        arguments["generator"] = torch.Generator("cpu").manual_seed(0)
    for name, own, value in _OF_CONFIGS:
        if name in taken and getattr(pipe, own, value) is None:
            arguments[name] = value
    return arguments


_OF_CONFIGS = (
    ("num_inference_steps", "default_denoising_steps", 1),
    ("processing_resolution", "default_processing_resolution", 0),
)
"""Arguments without a default in Marigold's code, the attributes that configs set for them, and values for
configs that don't: one step, at the picture's own size."""

"""`certify_plan`: a plan from a checkpoint's weights alone, read tensor by tensor; nothing is run.

The pipeline is built without weights and its own code is run once, dry, so each component is captured
with the arguments that the pipeline gives it. Bounds are then carried through the graphs while the
weights stream by, one at a time, and exponents are chosen that no input within the limits overflows.

**Catches** what `stopdown.bounds.propagation` does: every prompt, seed and timestep.
**Does not catch** resolutions beyond the pipeline's default in models with group norms, single files,
and components that the pipeline does not call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stopdown.call_names import name_call
from stopdown.environment import choose_device
from stopdown.errors import CaptureError, OptionError, ScalingError, SourceError, take_first_line
from stopdown.graph.capture import Capture, capture_call, name_parameters
from stopdown.module_paths import ModulePaths
from stopdown.numerics import iterate_tensors
from stopdown.patches import Patches
from stopdown.pipelines.call_interception import put_cast
from stopdown.pipelines.components import find_callees
from stopdown.pipelines.dry_run import (
    ComponentCall,
    ComponentFailed,
    Listener,
    dry_run,
    make_arguments,
)
from stopdown.pipelines.requests import Request, choose_class
from stopdown.pipelines.skeleton_components import build_component, build_empty_component
from stopdown.pipelines.skeletons import build_skeleton
from stopdown.pipelines.sources import (
    Source,
    fingerprint,
    has_weights,
    list_weight_files,
    read_stored_dtypes,
    resolve_source,
    verify_source,
)
from stopdown.plans.calibrated import describe_scaling, sample_tensors
from stopdown.plans.call_recorder import MOST_FRAMES, Progress, RecordedCall
from stopdown.plans.exponents import find_call
from stopdown.plans.plan_files import read_class_versions, seal_plan
from stopdown.plans.precision import ComponentFacts, parse_fp16
from stopdown.records import ComponentPlan, Plan, Trial
from stopdown.scaling.search import scale_unmeasured

_UNTRIED = Trial(note="A certificate has weights and no inputs: its calls were not tried.")


@dataclass
class Checkpoint:
    """A component's tensors on disk, one in memory at a time.

    Attributes:
        files: name of a stored tensor to its file.
        aliases: name of a parameter to the names that the same tensor has.
        buffers: gives what is on no disk: tables that the code makes for itself.
        tell: called for each tensor that is read.
    """

    files: Mapping[str, Path]
    aliases: Mapping[str, tuple[str, ...]]
    buffers: Callable[[], Mapping[str, torch.Tensor]]
    tell: Callable[[str], None] = field(default=lambda name: None)

    def load(self, name: str) -> torch.Tensor:
        """A tensor as it is stored.

        Raises:
            SourceError: there is none of this name.
        """
        for known in (name, *self.aliases.get(name, ())):
            if known in self.files:
                self.tell(name)
                with safe_open(self.files[known], framework="pt") as file:
                    tensor: torch.Tensor = file.get_tensor(known)
                return tensor
        made = self.buffers()
        if name not in made or made[name].is_meta:
            raise SourceError(
                f"The weights have no tensor {name}.",
                expected="Each parameter of the model is stored in its safetensors files.",
                remedy="Download or save the model again.",
            )
        return made[name]


def certify_plan(
    source: Source | str | Path,
    *,
    precision: str = "fp16",
    request: Request | None = None,
    progress: Progress | None = None,
) -> Plan:
    """A plan whose exponents rest on bounds, from a Diffusers folder, Hub id or bundled model.

    Args:
        precision: `fp16`.
        request: picture or video that the pipeline starts from; sizes are its defaults.
        progress: told of stage, what, done and total: tensors that were read.

    Raises:
        OptionError: the precision is none that needs a plan, or the source is a single file.
        SourceError: the model is missing, damaged or refused.

    Cost: captures of seconds, and one pass over the weights for each kind of call.
    """
    started = time.perf_counter()
    parse_fp16(precision, "A certificate")
    if not isinstance(source, Source):
        source = resolve_source(source)
        verify_source(source)
    source = _choose(source, request or Request())
    dtypes = dict.fromkeys(source.components, torch.float16)
    skeleton = build_skeleton(source, dtypes, keep_fp32=False)
    calls, unseen = list_calls_dry(skeleton)
    modules = {  # built anew: what was run dry may have kept tensors of its calls
        name: build_empty_component(source, name, torch.float16, keep_fp32=False)
        for name, (_, class_name) in source.components.items()
        if has_weights(class_name) and (source.path / name).is_dir()
    }
    components = tuple(
        _plan_component(source, name, module, calls.get(name, []), unseen, progress)
        for name, module in modules.items()
    )
    return seal_plan(
        Plan(
            source=source.name,
            fingerprint=fingerprint(source),
            pipeline=source.pipeline_class,
            precision="fp16",
            versions=read_class_versions(),
            components=components,
            prompts=(),
            steps=0,
            device=str(choose_device("cpu")),
            elapsed_s=round(time.perf_counter() - started, 3),
        )
    )


def _choose(source: Source, request: Request) -> Source:
    if source.kind == "file":
        raise OptionError(
            f"{source.name} is a single file, and a certificate was asked for.",
            expected="Weights are read component by component from a Diffusers folder.",
            remedy="Save the model as a folder first, or measure its plan: stopdown plan SOURCE.",
        )
    chosen = choose_class(source.pipeline_class, request)
    return dataclasses.replace(source, pipeline_class=chosen)


def list_calls_dry(skeleton: Any) -> tuple[dict[str, list[RecordedCall]], str]:
    """Component to the first call of each kind that a pipeline makes, and what ended the dry run early.

    Args:
        skeleton: in fp16; it is used up.
    """
    listener = CallListener()
    for callee in find_callees(skeleton):
        put_cast(callee, torch.float16, Patches())  # never undone: the skeleton is thrown away
    try:
        dry_run(skeleton, make_arguments(skeleton), [listener])
    except Exception as error:  # whatever code raises without values: what was seen before counts
        why = take_first_line(error.error if isinstance(error, ComponentFailed) else error)[:200]
        return listener.calls, f"The pipeline could not be run dry to its end: {why}"
    return listener.calls, ""


class CallListener(Listener):
    """Keeps the first call of each kind, by component."""

    def __init__(self) -> None:
        self.calls: dict[str, list[RecordedCall]] = {}

    def inside(
        self, call: ComponentCall, paths: ModulePaths
    ) -> contextlib.AbstractContextManager[object]:
        """A call whose code runs is the first of its kind."""
        name = call.callee.component_name
        kept = RecordedCall(call.callee, call.args, dict(call.kwargs))
        self.calls.setdefault(name, []).append(kept)
        return contextlib.nullcontext()

    def end(self, call: ComponentCall) -> None:
        """Make up an encode of a few frames of what a decoder gives: a plan holds for both directions."""
        made = self.calls.get(call.callee.component_name, [])
        if call.callee.method != "decode" or any(x.callee.method == "encode" for x in made):
            return
        picture = next(iterate_tensors(call.returned), None)
        if picture is None:
            return
        shape = list(picture.shape)
        if len(shape) == 5:
            shape[2] = min(shape[2], MOST_FRAMES)
        if len(shape) == 5 or "num_frames" not in made[-1].kwargs:
            encode = dataclasses.replace(
                call.callee, name=name_call(call.callee.component_name, "encode"), method="encode"
            )
            picture = torch.zeros(shape, dtype=torch.float16)
            made.append(RecordedCall(encode, (picture,), {}, made_up=True))


def _plan_component(
    source: Source,
    name: str,
    module: torch.nn.Module,
    made: list[RecordedCall],
    unseen: str,
    progress: Progress | None,
) -> ComponentPlan:
    checkpoint = _open(source, name, module)
    named = ((key, checkpoint.load(key)) for key in sorted(module.state_dict()))
    digest = sample_tensors(named)
    bare = ComponentPlan(name, type(module).__name__, digest, "fp32")
    if not made:
        return _fall_back(source, bare, unseen or "The pipeline does not call it.")
    checkpoint.tell = _count(name, module, progress)
    try:
        calls = [_capture(module, x) for x in made]
        scaling = scale_unmeasured(module, calls, checkpoint.load)
    except (CaptureError, ScalingError) as error:
        return _fall_back(source, bare, error.what)
    if "" in scaling.fp32_modules:
        why = "Only the whole component in fp32 keeps its bounds in range."
        return _fall_back(source, bare, why)
    return describe_scaling(bare, dataclasses.replace(scaling, trial=_UNTRIED), "fp16", 0)


def _open(source: Source, name: str, module: torch.nn.Module) -> Checkpoint:
    files: dict[str, Path] = {}
    for path in list_weight_files(source)[name]:
        with safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return Checkpoint(files, _find_aliases(module), functools.cache(lambda: _make(source, name)))


def _find_aliases(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Names of one tensor, tied parameters above all, each to all of them."""
    names: dict[int, list[str]] = {}
    for key, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(key)
    return {key: tuple(group) for group in names.values() for key in group}


def _make(source: Source, name: str) -> dict[str, torch.Tensor]:
    """The component with its parameters on `meta`: its buffers have the values that code gives them."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        module = build_component(source, name)
    return name_parameters(module)


def _count(name: str, module: torch.nn.Module, progress: Progress | None) -> Callable[[str], None]:
    total, read = len(module.state_dict()), set[str]()

    def tell(tensor: str) -> None:
        read.add(tensor)
        if progress is not None:
            progress("certify", name, min(len(read), total), total)

    return tell


def _capture(
    module: torch.nn.Module, made: RecordedCall
) -> tuple[Capture, tuple[Any, ...], Mapping[str, Any]]:
    capture = capture_call(find_call(module, made), made.args, made.kwargs, dtype=torch.float16)
    return capture, made.args, made.kwargs


def _fall_back(source: Source, bare: ComponentPlan, why: str) -> ComponentPlan:
    """The component in bf16 where its weights are stored so, else in fp32."""
    stored = read_stored_dtypes(source).get(bare.component, {})
    facts = ComponentFacts(bare.component, (bare.component,), dict(stored))
    precision = "bf16" if facts.stored_mostly == "bf16" else "fp32"
    return dataclasses.replace(bare, precision=precision, reasons=(why,))

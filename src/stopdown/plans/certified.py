"""`certify_plan` and `certify_program`: make a plan from weights alone, read tensor by tensor.

The pipeline is built without weights, and a dry run of its code yields the arguments with which each
component is captured. Bounds are then propagated through the graphs while the weights are read one at a
time, and exponents are chosen with which no input within the limits overflows. A single file is loaded
as it is stored, because its tensors differ from the model's. So is a component whose class renames its
tensors. A model with LoRAs is loaded as it is stored, so that the bounds include them. A loaded
pipeline is run dry as well. A program that isn't a pipeline is run until the first call of each
component.

Not covered: resolutions beyond the pipeline's default in models with group norms, and components
that the pipeline doesn't call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from stopdown.argument_types import check_residual
from stopdown.component_calls.components import (
    explain_run,
    find_component,
    find_components,
    runs_by_call,
)
from stopdown.devices.device_choice import Device, choose_device
from stopdown.devices.device_memory import free_memory
from stopdown.errors import CaptureError, ScalingError, SourceError
from stopdown.fold_names import name_parameters
from stopdown.mapped_weights import Load, bring_home
from stopdown.module_calls.call_inputs import read_call_sizes
from stopdown.module_calls.call_interception import bared
from stopdown.module_calls.module_code import list_foreign_code
from stopdown.number_formats import FORMATS
from stopdown.out_of_memory import is_out_of_memory
from stopdown.pipelines.class_selection import select_class
from stopdown.pipelines.loader import (
    carries_plan,
    complete_source,
    find_unknown,
    load_component,
    load_program,
)
from stopdown.pipelines.read_ahead import ByteRange, ReadAhead, list_byte_ranges
from stopdown.pipelines.requests import Request
from stopdown.pipelines.skeletons import (
    build_component,
    build_empty_component,
    copy_to_host,
    list_tables,
)
from stopdown.plans.applier import PLANNED
from stopdown.plans.calibrated import describe_scaling, fall_back, seal_made
from stopdown.plans.call_recorder import record_first_calls
from stopdown.plans.certifier import Certifier, choose_others
from stopdown.plans.dry_calls import list_pipeline_calls, list_source_calls
from stopdown.plans.near_weights import bring_near
from stopdown.plans.plan_files import (
    keep_plan,
    read_cached_plan,
    read_class_versions,
    seal_plan,
)
from stopdown.plans.precision import (
    check_components,
    leave_component,
    parse_fp16,
)
from stopdown.plans.weight_fingerprints import join_samples, sample_weights, take_samples
from stopdown.records import ComponentPlan, Plan, Scaling, Trial
from stopdown.scaling import ComponentCall, TracedCalls
from stopdown.sources.descriptions import read_description
from stopdown.sources.headers import StoredTensor, read_header
from stopdown.sources.hub import Progress
from stopdown.sources.source import Source, list_weight_files, narrow_source
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import fingerprint, read_stored_dtypes, resolve_source
from stopdown.weight_checks import find_quantised

_UNTRIED = Trial(note="Computed from the weights alone; the model wasn't run.")


def load_stored(
    held: Mapping[str, Any],
    aliases: Mapping[str, tuple[str, ...]],
    make_buffers: Callable[[], Mapping[str, torch.Tensor]],
    name: str,
) -> torch.Tensor:
    """Return a component's tensor by name, in its stored format, from files or from memory.

    Args:
        held: name of a stored tensor → the opened file, or the tensor if it's loaded already.
        aliases: parameter → all names of its tensor.
        make_buffers: returns the tensors that aren't in any file, such as tables that the model computes.

    Raises:
        SourceError: the tensor doesn't exist.
    """
    for known in (name, *aliases.get(name, ())):
        if known in held:
            found: torch.Tensor = held[known]
            return found if isinstance(found, torch.Tensor) else found.get_tensor(known)
    made = make_buffers()
    if name not in made or made[name].is_meta:
        raise SourceError(
            f"The weights have no tensor {name}.",
            expected="Each parameter of the model is stored in its safetensors files.",
            remedy="Download or save the model again.",
        )
    return made[name]


@dataclasses.dataclass(frozen=True)
class Scope:
    """Which components of a model to plan, and whether to cache their plans.

    Attributes:
        only: components of a folder to plan; empty for all. The others may have no weights.
        calls: component → its calls, if no pipeline makes them.
        keeps: cache each component's plan and reuse cached ones, so that an interrupted run continues, and
            models that share an encoder plan it once.
    """

    only: Collection[str] = ()
    calls: Mapping[str, list[ComponentCall]] | None = None
    keeps: bool = False


def certify_plan(
    source: Source | str | Path,
    *,
    precision: str = "fp16",
    request: Request | None = None,
    residual: str | None = None,
    device: Device | None = None,
    progress: Progress | None = None,
    scope: Scope | None = None,
    traced: dict[str, TracedCalls] | None = None,
) -> Plan:
    """Make a plan from the weights of a model, with exponents that rest on bounds.

    Args:
        source: Diffusers folder, Hub id, bundled model, or single file; of a file with some components of
            a pipeline, these are planned.
        precision: `fp16`, or components with another precision: `text_encoder=fp32`.
        request: picture or video that the pipeline starts from; sizes are the pipeline's defaults.
        residual: `fp32` keeps each component's residual stream in fp32 if its architecture allows it. Its
            bounds, the loosest of all, then scale nothing down.
        device: on which the plan is used: components that can't run in fp16 run in bf16 only if the device
            is fast in it. None means a fast one.
        progress: called with stage, component, and the tensors read and in total.
        scope: None plans all components without a cache.
        traced: receives each component's calls with their captures, for `write_certificate`.

    Raises:
        OptionError: the precision needs no plan, or names an unknown component; the residual is unknown.
        SourceError: the model is missing, damaged or refused.

    Cost: captures (seconds), and one pass over the weights for each kind of call; a single file is held in
    memory in its stored format.
    """
    started, scope = time.perf_counter(), scope or Scope()
    others, stream = parse_fp16(precision, "A certificate"), check_residual(residual)
    if not isinstance(source, Source):
        source = resolve_source(source)
        verify_source(source)
    whole = complete_source(source)
    whole = select_class(whole, request) if whole.pipeline_class else whole
    source = narrow_source(whole, scope.only)
    names, stored = list_planned(source), read_stored_dtypes(source)
    check_components(others, names)
    for name in names if source.kind != "file" else ():
        carries_plan(source.path / name)  # refuses weights that have exponents
    caches = scope.keeps and not source.loras and source.kind != "file"
    left = [name for name in names if name not in others] if caches and scope.calls is None else []
    beside = choose_others({name: sum(stored[name].values()) for name in left})
    with Certifier(whole, beside, stream, shares=True) as certifier:
        calls, unseen = (scope.calls, "") if scope.calls is not None else list_source_calls(whole)
        loaded = dict[str, dict[str, torch.Tensor]]()
        if source.loras or source.kind == "file":
            program = load_program(source, torch_dtypes=None)
            loaded = {name: name_parameters(getattr(program, name)) for name in names}
        modules = {  # LoRAs are layers of their own; others are built anew, without the dry run's tensors
            name: getattr(program, name) if source.loras else build_with_tables(source, name)
            for name in names
        }
        hands_over = _hands_over(calls)
        context = _Context(stored, others, stream, device, unseen, progress, hands_over)
        keys = dict[str, str]()
        for name in names if caches else ():
            own = fingerprint(narrow_source(source, (name,)))
            keys[name] = _hash((own, read_call_sizes(calls.get(name, [])), stream, hands_over))
        traced = {} if traced is None else traced
        traced |= {name: TracedCalls(x, calls.get(name, [])) for name, x in modules.items()}
        components = _Components(context, source, traced, loaded, keys).plan(beside, certifier)
    known = source.name, fingerprint(source), source.pipeline_class
    return seal_made(known, components, started, choose_device("cpu"))


def certify_program(
    program: Any,
    run: Callable[[], Any] | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    residual: str = "fp32",
    progress: Progress | None = None,
) -> Plan:
    """Make the plan of a loaded pipeline or other program from its weights, or return the cached one.

    A cached plan is reused for the same weights and for calls with the same graphs and sizes. Components
    that can't be planned stay in the precision in which they are loaded.

    Args:
        run: runs a program that isn't a pipeline once. It's stopped at the first call of a component,
            and called again for the next component.
        arguments: of a pipeline's call, for a dry run; None for its defaults.
        residual: as for `certify_plan`.

    Cost: the first time, captures (seconds) and one pass over the weights.
    """
    started, unseen, stream = time.perf_counter(), "", check_residual(residual)
    hands_over = False
    if runs_by_call(program):
        calls, unseen = list_pipeline_calls(program, arguments or {})
        hands_over, modules = _hands_over(calls), find_components(program)
    elif run is None:
        raise explain_run("Nothing says how the program is called.", "make_plan")
    else:
        calls = record_first_calls(program, run)
        found = {name: find_component(program, name) for name in calls}
        modules = {name: module for name, module in found.items() if module is not None}
    if not modules:
        raise explain_run(f"The run called no module of the {type(program).__name__}.", "make_plan")
    bare = {name: _bring_bare(module) for name, module in modules.items()}
    traced = {
        name: _trace_bare(module, calls.get(name, []))
        for name, module in bare.items()
        if not (PLANNED in vars(modules[name]) or find_quantised(module))
    }
    key = _sign_program(modules, traced, (stream, hands_over))
    kept = read_cached_plan(key) if key else None
    if kept is not None and kept.versions == read_class_versions():
        return kept
    context = _Context({}, {}, stream, None, unseen, progress, hands_over, left="as loaded")
    components = []
    for name, module in modules.items():
        entry = ComponentPlan(name, type(module).__name__, "", "as loaded")
        if name in traced:
            tensors = name_parameters(module)
            load = functools.partial(load_stored, tensors, find_tied_names(module), dict)
            with bared(bare[name]):
                entry = _plan_component(context, name, load, traced[name])
        elif PLANNED in vars(module):
            why = "It is under a plan already, of another pipeline that shares it."
            entry = dataclasses.replace(entry, weights=sample_weights(module), reasons=(why,))
        else:
            why = f"Its weights are quantised ({find_quantised(module)})."
            entry = dataclasses.replace(entry, weights=sample_weights(module), precision="fp32")
            entry = _fall_back(context, entry, why)
        components.append(entry)
    identity = type(program).__name__, key, type(program).__name__
    plan = seal_made(identity, components, started, choose_device("cpu"))
    if key:
        keep_plan(plan)
    return plan


def _bring_bare(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module to capture on the host: itself if its weights are there, else an empty copy."""
    places = {x.device.type for x in name_parameters(module).values()}
    return module if places <= {"cpu", "meta"} else copy_to_host(module)


def _trace_bare(module: torch.nn.Module, made: Sequence[ComponentCall]) -> TracedCalls:
    """Prepare a module's calls to be captured, without the patches that a guard has put on it."""
    with bared(module):
        return TracedCalls(module, made)


def _sign_program(
    modules: Mapping[str, torch.nn.Module], traced: Mapping[str, TracedCalls], known: object
) -> str:
    """Return the key under which a program's plan is cached; "" if a call can't be captured.

    Code is identified by its captured graphs, which include closures, functions of other modules and
    tables in plain attributes.

    Args:
        known: further options that the plan depends on.
    """
    weights = [(name, type(x).__name__, sample_weights(x)) for name, x in modules.items()]
    signs: list[object] = [known, weights]
    try:
        for name, one in traced.items():
            with bared(one.module):
                signs.append((name, one.sign()))
    except CaptureError:
        return ""
    return _hash(signs)


def _hands_over(calls: Mapping[str, Sequence[ComponentCall]]) -> bool:
    """Return whether an encoder is asked for hidden states, which may be larger than its last output."""
    recorded = [call for made in calls.values() for call in made]
    return any(call.kwargs.get("output_hidden_states") for call in recorded)


def _hash(known: object) -> str:
    return hashlib.sha256(repr(known).encode()).hexdigest()


def list_planned(source: Source) -> list[str]:
    """List the components of a model that have weights, and so get an entry in its plan."""
    held = [part.name for part in source.parts] or list(source.components)
    return [
        name for name in held if source.has_weights(name) and (source.described / name).is_dir()
    ]


@dataclasses.dataclass(frozen=True)
class _Context:
    """Options that all components of a plan share.

    Attributes:
        stored: component → format → bytes of its weights.
        others: component → precision, for those that aren't to run in fp16.
        residual: precision of the residual stream.
        device: on which the plan is used; None for a fast one.
        unseen: why some components' calls aren't known; "" if they are.
        hands_over: whether encoders are asked for hidden states, which may exceed their last output.
        left: precision of components that can't be planned; "" to choose it by their stored format.
    """

    stored: Mapping[str, Mapping[str, int]]
    others: Mapping[str, str]
    residual: str
    device: Device | None
    unseen: str
    progress: Progress | None
    hands_over: bool
    left: str = ""


@dataclasses.dataclass
class _Components:
    """Plans the components of a model one by one; `made` has the entries that are finished."""

    context: _Context
    source: Source
    traced: Mapping[str, TracedCalls]
    loaded: Mapping[str, Mapping[str, torch.Tensor]]
    keys: Mapping[str, str]
    made: dict[str, ComponentPlan] = dataclasses.field(default_factory=dict)

    def plan(self, beside: Collection[str], certifier: Certifier) -> list[ComponentPlan]:
        """Return the entries of all components; plan those that aren't cached.

        Args:
            beside: components that a second process plans.
            certifier: that process.
        """
        left = self._take_kept()
        for name in left:
            if name not in beside:
                self._plan_one(name, certifier)
        if not {*left}.isdisjoint(beside):
            certifier.wait(self.context.progress)
        for name in self._take_kept():
            self._plan_one(name, certifier)
        return [self.made[name] for name in self.traced]

    def _take_kept(self) -> list[str]:
        """Take over cached plans of components, and return the names of those that have none."""
        for name, key in self.keys.items():
            if name not in self.made and name not in self.context.others:
                kept = read_cached_plan(key)
                self.made.update(
                    () if kept is None else ((x.component, x) for x in kept.components)
                )
        return [name for name in self.traced if name not in self.made]

    def _plan_one(self, name: str, certifier: Certifier) -> None:
        traced = self.traced[name]
        with open_component(self.source, name, traced.module, self.loaded.get(name)) as load:
            made = _plan_component(self.context, name, certifier.beside(load), traced)
        self.made[name] = made
        if name in self.keys and made.scaling is not None:
            keep_plan(seal_plan(Plan(self.source.name, self.keys[name], components=(made,))))


def _plan_component(
    context: _Context,
    name: str,
    load: Load,
    traced: TracedCalls,
) -> ComponentPlan:
    module = traced.module
    reading = _TensorReader(load, name, module, context.progress)
    bare = ComponentPlan(name, type(module).__name__, "", "fp32")
    if name in context.others:
        planned = leave_component(bare, context.others[name])
    elif not traced.calls:
        planned = _fall_back(context, bare, context.unseen or "The pipeline doesn't call it.")
    else:
        try:
            scaling = _scale_near(context, traced, reading)
        except (CaptureError, ScalingError) as error:
            planned = _fall_back(context, bare, error.what)
        else:
            scaling = dataclasses.replace(scaling, trial=_UNTRIED)
            notes = suggest_stream(scaling, context.residual)
            planned = describe_scaling(bare, scaling, "fp16", 0, notes)
    code = list_foreign_code(module)
    return dataclasses.replace(planned, weights=reading.hash_samples(), code=code)


def _scale_near(context: _Context, traced: TracedCalls, load: Load) -> Scaling:
    """Find exponents with proven bounds for a component's calls, on an accelerator while its memory allows.

    Args:
        load: returns a tensor by its name.
    """
    scale = functools.partial(traced.certify, context.residual, hands_over=context.hands_over)
    if (near := bring_near(load, context.device)) is not None:
        try:
            return scale(near)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        finally:
            free_memory()
    return scale(bring_home(load))


def suggest_stream(scaling: Scaling, residual: str) -> tuple[str, ...]:
    """Suggest an fp32 residual stream if bounds scale activations of size 1 below fp16's normal numbers.

    Return the suggestion as a note, or no notes.
    """
    lowest = min((entry for pair in scaling.layers.values() for entry in pair), default=0)
    if residual != "native" or 2.0**lowest >= FORMATS["fp16"].smallest_normal:
        return ()
    return (
        f"Bounds scale values down by up to 2^{-lowest}, where fp16 has few digits. For a plan "
        'that is run and not written to a file, residual="fp32" is more precise.',
    )


@contextlib.contextmanager
def open_component(
    source: Source,
    name: str,
    module: torch.nn.Module,
    loaded: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[Load]:
    """Open a component's weight files for the block, and yield a function that loads a tensor by its name.

    The files are read ahead in the order of the module's parameters.

    Args:
        loaded: its tensors by name if they are in memory already; no file is opened then.
    """
    held: dict[str, Any] = dict(loaded or {})
    parts: dict[str, ByteRange] = {}
    buffers = functools.cache(lambda: name_parameters(_make(source, name)))
    aliases = find_tied_names(module)
    with contextlib.ExitStack() as stack:
        stored = dict[str, StoredTensor]()
        for path in list_weight_files(source)[name] if loaded is None else ():
            file = stack.enter_context(safe_open(path, framework="pt"))
            held.update(dict.fromkeys(file.keys(), file))
            parts.update(list_byte_ranges(path))
            stored.update(read_header(path))
        if loaded is None and not (_is_plain(source, name) and _fits(module, aliases, stored)):
            # named otherwise in the file, or not the model's: its class takes them, or says why not
            held = dict(name_parameters(load_component(source, name)))
            parts = {}
        order = [parts.pop(key) for names in aliases.values() for key in names if key in parts]
        ahead = stack.enter_context(ReadAhead(order))

        def load(key: str) -> torch.Tensor:
            tensor = load_stored(held, aliases, buffers, key)
            ahead.note_used(tensor.nbytes)
            return tensor

        yield load


def find_tied_names(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each name of a parameter to all names of its tensor; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for key, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(key)
    return {key: tuple(group) for group in names.values() for key in group}


def _is_plain(source: Source, name: str) -> bool:
    """Return whether a component's weights aren't quantised, by its config."""
    config = read_description(source.described / name / "config.json")
    return config.get("quantization_config") is None


def _fits(
    module: torch.nn.Module,
    aliases: Mapping[str, tuple[str, ...]],
    stored: Mapping[str, StoredTensor],
) -> bool:
    """Return whether the tensors in a component's files match its module in names, sizes and formats.

    Then they can be read without loading the component by its class.
    """
    shapes = {name: tuple(x.shape) for name, x in module.named_parameters(remove_duplicate=False)}
    for key, names in aliases.items():
        found = [stored[name] for name in {key, *names} if name in stored]
        if not found or any(x.shape != shapes[key] or x.dtype not in FORMATS for x in found):
            return False
    return not find_unknown(module, {*stored} - aliases.keys(), stored)


def build_with_tables(source: Source, name: str) -> torch.nn.Module:
    """Build a component with fake fp16 weights, but real tensors in its plain attributes.

    Such tables are computed when the module is made; they are constants of a captured graph.
    """
    module = build_empty_component(source, name, torch.float16, keep_fp32=False)
    paths = {part: path for path, part in module.named_modules()}
    tables = [
        (part, key)
        for part, key, value in list_tables(module)
        if any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(value))
    ]
    if not tables:
        return module
    made = _make(source, name)
    for part, key in tables:
        vars(part)[key] = getattr(made.get_submodule(paths[part]), key)
    return module


def _make(source: Source, name: str) -> torch.nn.Module:
    """Build a component with its parameters on `meta` and its buffers and tables with real values."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return build_component(source, name)


class _TensorReader:
    """A tensor loader that also reports progress, and samples each tensor for the component's
    fingerprint.
    """

    def __init__(
        self, load: Load, name: str, module: torch.nn.Module, progress: Progress | None
    ) -> None:
        self._load, self._component, self._progress = load, name, progress
        state = module.state_dict()
        self._names = sorted(name for name, x in state.items() if isinstance(x, torch.Tensor))
        self._wanted = {*self._names}
        self._samples: dict[str, tuple[tuple[int, ...], torch.Tensor | None]] = {}

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self._load(name)
        if name in self._wanted and name not in self._samples:
            self._samples[name] = take_samples(tensor)
            if self._progress is not None:
                self._progress("certify", self._component, len(self._samples), len(self._names))
        return tensor

    def hash_samples(self) -> str:
        """Return the fingerprint of the component's weights (`sample_weights`); load those not loaded
        yet.
        """
        for name in self._names:
            if name not in self._samples:
                self(name)
        return join_samples((name, *self._samples[name]) for name in self._names)


def _fall_back(context: _Context, bare: ComponentPlan, why: str) -> ComponentPlan:
    if context.left:
        return dataclasses.replace(bare, precision=context.left, reasons=(why,))
    return fall_back(bare, context.stored, why, context.device)

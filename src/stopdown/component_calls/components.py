"""Components of a program, and the calls through which a run uses them.

A component call is an outermost call of a module, or of a method that the program calls on one
(`vae.decode`). A Diffusers pipeline names its components; in any other program, a component's name is its
attribute path. A `Callee` is the target of such a call: the module, the method, and the name in records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from stopdown.component_call_names import list_outermost, name_call
from stopdown.component_calls.attribute_walk import find_parts
from stopdown.devices.model_needs import needs_tiling
from stopdown.errors import InputError
from stopdown.interception.module_paths import list_modules
from stopdown.interception.own_dtypes import list_own_dtypes, set_own_dtypes
from stopdown.interception.patches import Patches
from stopdown.mapped_weights import cast_additions_, cast_tensor, cast_tensor_
from stopdown.module_calls.callee import GENERAL_KEEPS, Callee
from stopdown.number_formats import name_dtype
from stopdown.scaling import StoredWeight

_ENCODERS = ("text_encoder", "image_encoder")
_LAST = ("safety_checker",)


@dataclass(frozen=True)
class Adapter:
    """Functions that describe one family of programs, such as Diffusers pipelines.

    The first adapter that recognises a program is used; the general one is last.

    Attributes:
        name: of the family.
        recognises: returns whether a program belongs to the family.
        find_components: returns a program's components, name → module.
        find_callees: returns the component calls that are known before a run, in order.
        name_modules: returns the modules whose calls are discovered as they happen, name → module; empty if
            all calls are known.
        find_scheduled: returns the object whose scheduler counts a run's steps; None if a run isn't one
            call of the program.
        list_required: returns the names of components that a plan must contain; empty if plans contain
            those that were called.
        find_device: returns the device of a program, such as `cpu` or `cuda:0`.
        casts_arguments: whether the program's own code casts arguments to the dtype of the component
            that receives them.
        read_step: returns the step (from 0) and the number of steps from the keywords of a component
            call; None if they don't contain them.
    """

    name: str
    recognises: Callable[[Any], bool]
    find_components: Callable[[Any], dict[str, torch.nn.Module]]
    find_callees: Callable[[Any], tuple[Callee, ...]]
    name_modules: Callable[[Any], dict[str, torch.nn.Module]] = lambda program: {}
    find_scheduled: Callable[[Any], Any] = lambda program: None
    list_required: Callable[[Any], Collection[str]] = lambda program: ()
    find_device: Callable[[Any], str] = lambda program: _find_weights_device(program)
    casts_arguments: bool = False
    read_step: Callable[[Mapping[str, Any]], tuple[int, int] | None] = lambda kwargs: None


def find_adapter(program: Any) -> Adapter:
    return next(one for one in _ADAPTERS if one.recognises(program))


def find_components(program: Any) -> dict[str, torch.nn.Module]:
    return find_adapter(program).find_components(program)


def find_component(program: Any, name: str) -> torch.nn.Module | None:
    adapter = find_adapter(program)
    found = adapter.find_components(program).get(name)
    return adapter.name_modules(program).get(name) if found is None else found


def find_device(program: Any) -> str:
    """Return the device of a program, such as `cpu` or `cuda:0`."""
    return find_adapter(program).find_device(program)


def runs_by_call(program: Any) -> bool:
    """Return whether a program is run by calling it, as a pipeline is."""
    return find_adapter(program).find_scheduled(program) is not None


def _find_weights_device(program: Any) -> str:
    weights = (x for module in find_components(program).values() for x in module.parameters())
    return str(next((x.device for x in weights), "cpu"))


def find_named_callees(program: Any, names: Iterable[str]) -> tuple[Callee, ...]:
    """Find component calls by their names, also those that are only discovered as they happen."""
    known = {callee.name: callee for callee in find_callees(program)}
    found = {name: known.get(name) or _find_plain(program, name) for name in names}
    return tuple(callee for callee in found.values() if callee is not None)


def _find_plain(program: Any, name: str) -> Callee | None:
    module = find_component(program, name)
    return None if module is None else Callee(name, module, "forward", "call", GENERAL_KEEPS)


def find_callees(program: Any) -> tuple[Callee, ...]:
    """List every component call of a program that is known before it runs, in order."""
    return find_adapter(program).find_callees(program)


def check_run(program: Any, run: Any, arguments: Any, name: str) -> bool:
    """Check that a user gave what running a program takes: a `run` function, or arguments for a pipeline.

    Args:
        run: a function that runs the program; None without one.
        arguments: of a pipeline's call; None without any.
        name: of the public function, for messages.

    Returns:
        Whether the program is run by `run`, and not by its own call.

    Raises:
        InputError: a pipeline was given a `run`; or another program has no `run`, or was given arguments.
    """
    kind = type(program).__name__
    if runs_by_call(program):
        refuse_run(run, f"pipeline {kind}")
        return False
    if arguments is not None:
        raise InputError(
            f"Arguments of a call were given for a {kind}, which is no pipeline.",
            expected="They are those of a pipeline's call; other programs are run by a function.",
            remedy=f"Give them there: {name}(program, run=lambda: ...).",
        )
    find_components(program)  # refuses what holds no module
    if run is None:
        raise explain_run(f"A {kind} isn't a pipeline, so it isn't known how to run it.", name)
    return True


def refuse_run(run: Any, what: object) -> None:
    """Refuse a `run` function for a program that is run by its own call.

    Args:
        run: the user's function; None without one.
        what: the program in words, for the message.
    """
    if run is not None:
        raise InputError(
            f"A function that runs it was given for {what}.",
            expected="A pipeline, and what one is loaded from, is run by its own call.",
            remedy="Leave it out, and give the arguments of that call.",
        )


def explain_run(what: str, name: str) -> InputError:
    """Make the error for a program that needs a `run` function to be run.

    Args:
        what: the problem in a sentence.
        name: of the public function.
    """
    given = "lambda: ..." if name == "compare" else "run=lambda: ..."
    return InputError(
        what,
        expected=f"{name} needs the calls that a run makes.",
        remedy=f"Give a function that runs it: {name}(program, {given}).",
    )


def is_autoencoder(module: Any) -> bool:
    """Return whether a module, or a module class, is used through `encode` and `decode`."""
    return callable(getattr(module, "encode", None)) and callable(getattr(module, "decode", None))


def list_call_names(name: str, module: Any) -> tuple[str, ...]:
    """List the names of a component's calls: its own name, or `vae.encode` and `vae.decode`.

    Args:
        module: the component, or its class.
    """
    return tuple(name_call(name, method) for method in list_entrances(module))


def list_entrances(module: Any) -> tuple[str, ...]:
    """List the methods by which a pipeline calls a component: `forward`, or `encode` and `decode`.

    A class without `forward`, such as Shap-E's renderer, is called by its methods `decode…`.

    Args:
        module: the component, or its class.
    """
    if is_autoencoder(module):
        return ("encode", "decode")
    kind = module if isinstance(module, type) else type(module)
    if getattr(kind, "forward", None) is not torch.nn.Module.forward:
        return ("forward",)
    found = tuple(x for x in dir(kind) if x.startswith("decode") and callable(getattr(kind, x)))
    return found or ("forward",)


def _find_parts(pipe: Any) -> dict[str, torch.nn.Module]:
    return {
        name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)
    }


def list_component_calls(modules: Mapping[str, torch.nn.Module]) -> tuple[Callee, ...]:
    """Return a `Callee` for each way of calling these modules; an autoencoder has one for each direction.

    Args:
        modules: component's name → module.
    """
    callees: list[Callee] = []
    for name, module in modules.items():
        callees += list_methods(name, module)
    return tuple(callees)


def list_methods(name: str, module: torch.nn.Module) -> tuple[Callee, ...]:
    """Return a `Callee` for each method by which a component is called."""
    return tuple(
        Callee(
            name_call(name, method),
            module,
            method,
            find_stage(name) if method == "forward" else method.partition("_")[0],
        )
        for method in list_entrances(module)
    )


DIFFUSERS = Adapter(
    "diffusers",
    lambda program: isinstance(getattr(program, "components", None), Mapping),
    _find_parts,
    lambda pipe: list_component_calls(_find_parts(pipe)),
    find_scheduled=lambda pipe: pipe,
    list_required=lambda pipe: _find_parts(pipe).keys(),
    find_device=lambda pipe: str(getattr(pipe, "device", "cpu")),
    casts_arguments=True,
)
"""Pipelines of Diffusers, and other objects with a mapping `components`."""

ONE_CALL = Adapter(
    "call",
    lambda program: isinstance(program, Callee),
    lambda callee: {callee.name: callee.owner},
    lambda callee: (callee,),
)
"""A single component call as a program."""


def _find_networks(program: Any) -> dict[str, torch.nn.Module]:
    if hasattr(program, "first_stage_model"):
        return {"vae": program.first_stage_model}
    if hasattr(program, "cond_stage_model"):
        parts = program.cond_stage_model.named_modules()
        return {
            path.rpartition(".")[0] or path: part
            for path, part in parts
            if path.endswith("transformer") and isinstance(part, torch.nn.Module)
        }
    return {"diffusion_model": program.model.diffusion_model}


def _list_network_calls(program: Any) -> tuple[Callee, ...]:
    callees: list[Callee] = []
    stage = "encode" if hasattr(program, "cond_stage_model") else "denoise"
    for name, module in _find_networks(program).items():
        is_vae = hasattr(program, "first_stage_model")
        known = list_methods(name, module) if is_vae else (Callee(name, module, "forward", stage),)
        callees += [dataclasses.replace(callee, keeps=GENERAL_KEEPS) for callee in known]
    return tuple(callees)


def _read_sigmas(kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return a call's step and the number of steps, from the noise levels that ComfyUI's samplers pass.

    Return None without them.

    Args:
        kwargs: of the denoiser's call.

    Cost: a host read.
    """
    options = kwargs.get("transformer_options") or {}
    levels, level = options.get("sample_sigmas"), options.get("sigmas")
    if levels is None or level is None:
        return None
    reached = int((levels >= level.max() * (1 - 1e-6)).sum())
    return max(reached, 1) - 1, len(levels) - 1


COMFYUI = Adapter(
    "comfyui",
    lambda program: hasattr(getattr(program, "patcher", program), "patches_uuid"),
    _find_networks,
    _list_network_calls,
    read_step=_read_sigmas,
)
"""ComfyUI's MODEL, CLIP and VAE, whose modules are loaded when they are called."""


def _find_outermost(program: Any) -> dict[str, torch.nn.Module]:
    """Return the modules of a program that aren't part of another, and the modules whose methods it
    names.
    """
    parts = find_parts(program)
    owners = {name.rpartition(".")[0] or name: owner for name, (owner, _) in parts.methods.items()}
    inner = {id(x) for module in parts.modules.values() for x in list(module.modules())[1:]}
    return {name: x for name, x in parts.modules.items() if id(x) not in inner} | owners


def _list_named_calls(program: Any) -> tuple[Callee, ...]:
    """List the calls that a program is known to make: methods that it names, and those of autoencoders."""
    parts = find_parts(program)
    callees = [
        callee
        for name, module in parts.modules.items()
        if is_autoencoder(module)
        for callee in list_methods(name, module)
    ]
    for name, (owner, method) in parts.methods.items():
        stage = method if method in ("encode", "decode") else "call"
        callees.append(Callee(name, owner, method, stage))
    return tuple(dataclasses.replace(callee, keeps=GENERAL_KEEPS) for callee in callees)


GENERAL = Adapter(
    "general",
    lambda program: True,
    _find_outermost,
    _list_named_calls,
    name_modules=lambda program: find_parts(program).modules,
)
"""Any program: its modules are found by walking its attributes, and their calls as they happen."""

_ADAPTERS = (DIFFUSERS, ONE_CALL, COMFYUI, GENERAL)


def find_stage(component: str) -> str:
    """Return the stage of a run that a component belongs to: `encode`, `denoise` or `decode`."""
    if component.startswith(_ENCODERS):
        return "encode"
    return "decode" if component in _LAST else "denoise"


def is_of_transformers(module_class: type) -> bool:
    """Return whether a class is a Transformers model, also if it is defined in Diffusers."""
    return any(base.__module__.startswith("transformers") for base in module_class.__mro__)


class _ConfigRead(Exception):
    """Raised to stop a class's `from_pretrained` once it has read its config, before it loads weights."""

    def __init__(self, config: Any) -> None:
        self.config = config


def read_config(module_class: Any, folder: Path) -> Any:
    """Read from a folder the config that a Transformers model is built from.

    A class that is defined in Diffusers may use a part of the folder's config (PRX's encoder), so its own
    `from_pretrained` is run until it passes the config on.
    """
    from transformers import PreTrainedModel

    if not module_class.__module__.startswith("transformers"):

        def stop(cls: type, path: Any, *args: Any, config: Any = None, **options: Any) -> None:
            raise _ConfigRead(config)

        with Patches() as patches:
            patches.set_class_attribute(PreTrainedModel, "from_pretrained", classmethod(stop))
            try:
                module_class.from_pretrained(folder, local_files_only=True)
            except _ConfigRead as found:
                if found.config is not None:
                    return found.config
    return module_class.config_class.from_pretrained(folder, local_files_only=True)


def holds_models(module_class: type) -> bool:
    """Return whether a Diffusers class only contains models that each have a folder of their own.

    `MultiControlNetModel` is one, with `controlnet`, `controlnet_1`…
    """
    return not (is_of_transformers(module_class) or hasattr(module_class, "load_config"))


def load_held(
    module_class: Any, folder: Path, load: Callable[[Any, Path], torch.nn.Module]
) -> torch.nn.Module:
    """Load a component that only contains other models, from the folders that its own code chooses.

    Args:
        load: loads one of the models, given its class and its folder.
    """
    from diffusers import ModelMixin

    original = vars(ModelMixin)["from_pretrained"]

    def load_one(cls: type, path: Any, *_: Any, **__: Any) -> torch.nn.Module:
        with Patches() as inner:
            inner.set_class_attribute(ModelMixin, "from_pretrained", original)
            return load(cls, Path(path))

    with Patches() as patches:
        patches.set_class_attribute(ModelMixin, "from_pretrained", classmethod(load_one))
        made: torch.nn.Module = module_class.from_pretrained(str(folder))
        return made


def build_module(module_class: Any, folder: Path) -> torch.nn.Module:
    """Build a component from its config without loading weights, in the caller's tensor modes and dtype."""
    if holds_models(module_class):
        return load_held(module_class, folder, build_module)
    if is_of_transformers(module_class):
        from transformers.initialization import no_init_weights

        config = read_config(module_class, folder)
        # Not the class itself: its inner models would have the dtype that the config was stored with.
        with (
            no_init_weights()
        ):  # some draws need values, which a model without memory does not have
            built = module_class._from_config(config, dtype=torch.get_default_dtype())
        built.tie_weights()
        module: torch.nn.Module = built
        return module
    config = module_class.load_config(folder, local_files_only=True)
    return turn_on_tiling(module_class.from_config(config))


def turn_on_tiling(module: Any) -> Any:
    """Enable tiling for a model whose code requires it, and return the model."""
    if needs_tiling(type(module).__name__):
        module.enable_tiling()
    return module


def find_kept_fp32(module_class: type, precision: str) -> tuple[str, ...]:
    """List the submodules that a class's authors keep in fp32 when it is loaded in a precision.

    Transformers applies `_keep_in_fp32_modules` to fp16 only, and `_keep_in_fp32_modules_strict` to bf16
    too; Diffusers knows only the first name, for both.
    """
    if precision == "fp32":
        return ()
    plain = getattr(module_class, "_keep_in_fp32_modules", None) or []
    strict = getattr(module_class, "_keep_in_fp32_modules_strict", None) or []
    is_foreign = is_of_transformers(module_class)
    return tuple(dict.fromkeys(strict if is_foreign and precision == "bf16" else [*plain, *strict]))


def read_precisions(module: torch.nn.Module) -> tuple[torch.dtype, ...]:
    """List the floating dtypes of a module's parameters, the most frequent by elements first."""
    sizes: dict[torch.dtype, int] = {}
    parameters = {id(x): x for part in list_modules(module) for x in part._parameters.values()}
    for parameter in parameters.values():
        if parameter is not None and parameter.is_floating_point():
            size = 0 if is_lazy(parameter) else parameter.numel()
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + size
    return tuple(sorted(sizes, key=lambda dtype: -sizes[dtype]))


def cast_component_(
    module: torch.nn.Module,
    dtype: torch.dtype,
    put: Callable[..., None] | None = None,
    patches: Patches | None = None,
) -> torch.nn.Module:
    """Cast the floating weights of a module as if it had been loaded in `dtype`, and return it.

    Submodules that its authors keep in fp32 are cast to fp32. Dtype attributes and 16-bit tensors outside
    of the weights are updated as well.

    Args:
        put: receives each weight and its `StoredWeight`: `wait_` leaves parameters in the files that they
            were mapped from, for a `WeightStore` to read. None casts them.
        patches: undoing them restores attributes that aren't weights; None makes that change permanent.
    """
    before = list_own_dtypes(module)
    kept = find_kept_fp32(type(module), name_dtype(dtype))
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue  # a state of its own, or integers
        is_kept = any(part in kept for part in name.split("."))
        wanted = torch.float32 if is_kept else dtype
        if put is None:
            tensor.data = cast_tensor(tensor.data, wanted)
        else:
            put(tensor, StoredWeight(tensor.data, wanted))
    set_own_dtypes(module, before, dtype, patches or Patches())
    return module


def put_precision(module: torch.nn.Module, dtype: torch.dtype, patches: Patches) -> None:
    """Cast a module to a dtype, as if it had been loaded so, until `patches` is undone; old weights
    stay in memory.

    Submodules that its authors keep in fp32 stay so.
    """
    cast_additions_(module, dtype, patches)
    cast_component_(
        module, dtype, lambda x, stored: cast_tensor_(x, stored.dtype, patches), patches
    )


def list_block_paths(
    module: torch.nn.Module, kinds: tuple[type[torch.nn.Module], ...] = (torch.nn.ModuleList,)
) -> tuple[str, ...]:
    """List the paths of a component's blocks, such as `transformer_blocks.7`.

    They are the members of its outermost modules of the given kinds.
    """
    lists = [path for path, part in module.named_modules() if isinstance(part, kinds)]
    return tuple(
        f"{path}.{name}" if path else name
        for path in list_outermost(lists)
        for name, _ in module.get_submodule(path).named_children()
    )

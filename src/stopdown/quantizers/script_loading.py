"""Plans for models that a script loads in 16 bits, on devices with slow bf16 and fast fp16.

The script's own `from_pretrained` gets a `quantization_config`. A model that can't have one is loaded as
the script requests, which is announced. `quantization` returns the `quantization_config` of a whole
pipeline.

Not covered: `from_single_file`, models outside of a pipeline's folder, casts after loading.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.quantizers import PipelineQuantizationConfig
from transformers import PreTrainedModel

from stopdown.component_call_names import QUANT_METHOD
from stopdown.component_calls.components import find_components, holds_models
from stopdown.devices.device_choice import choose_device
from stopdown.devices.format_support import probe_formats
from stopdown.errors import StopdownError, take_first_line, warn_user
from stopdown.interception.patches import Patches
from stopdown.plans.applier import check_source
from stopdown.plans.certified import list_planned
from stopdown.plans.plan_choice import find_or_certify
from stopdown.plans.plan_files import take_plan
from stopdown.plans.precision import prefers_fp16
from stopdown.quantizers.config import StopdownConfig
from stopdown.records import ComponentPlan, Plan
from stopdown.sources.component_classes import find_class
from stopdown.sources.descriptions import read_description
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.source import Source, narrow_source
from stopdown.sources.source_checks import list_absent, verify_source
from stopdown.sources.source_problems import make_source_error
from stopdown.sources.sources import resolve_source

_HALVES = (torch.float16, torch.bfloat16)


def plan_loads(
    device: str, announce: Callable[[str], None], patches: Patches, otherwise: str = ""
) -> None:
    """Make a script's 16-bit loads use plans, if its device is fast in fp16 but not in bf16.

    The device is probed at the first load, because a script may select cards until then.

    Args:
        device: that the script uses; "auto" for the best one of this machine.
        announce: receives messages for the user.
        otherwise: a sentence for the message: how to get the script's own precision.
    """
    loads = _Loads(device, announce, patches, otherwise)
    for owner in (DiffusionPipeline, ModelMixin, PreTrainedModel):
        original = vars(owner)["from_pretrained"].__func__
        patches.set_class_attribute(owner, "from_pretrained", classmethod(loads.wrap(original)))


class _Loads:
    """Replacement of `from_pretrained` that loads a script's 16-bit models in fp16 with plans.

    If a plan can't be made, the model is loaded as the script requests.
    """

    def __init__(
        self, device: str, announce: Callable[[str], None], patches: Patches, otherwise: str
    ) -> None:
        self._device, self._announce, self._patches = device, announce, patches
        self._otherwise = otherwise
        self._inside = threading.local()

    @functools.cached_property
    def _is_wanted(self) -> bool:
        device = choose_device(self._device)
        return device.type != "cpu" and prefers_fp16(probe_formats(device))

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of a `from_pretrained` that adds a `quantization_config`."""

        @functools.wraps(original)
        def from_pretrained(cls: type, *args: Any, **options: Any) -> Any:
            if getattr(self._inside, "loading", False) or not self._takes(cls, args, options):
                return original(cls, *args, **options)
            self._inside.loading = True
            try:
                return self._load(functools.partial(original, cls), args, options, cls)
            finally:
                self._inside.loading = False

        return from_pretrained

    def _takes(self, cls: type, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Return whether a load requests 16 bits, and a plan can be made for it."""
        dtype = options.get("dtype", options.get("torch_dtype"))
        is_part = bool(options.get("subfolder")) and not issubclass(cls, DiffusionPipeline)
        return (
            len(args) == 1
            and isinstance(dtype, torch.dtype)
            and dtype in _HALVES
            and options.get("quantization_config") is None
            and (is_part or issubclass(cls, DiffusionPipeline))
            and self._is_wanted
        )

    def _load(
        self, load: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], cls: type
    ) -> Any:
        kept = {name: x for name, x in options.items() if name not in ("dtype", "torch_dtype")}
        try:
            config = self._configure(args[0], options, cls)
            made = load(*args, **kept, dtype=torch.float16, quantization_config=config)
        except Exception as error:  # whatever it is, the script may do without a plan
            told = str(error) if isinstance(error, StopdownError) else take_first_line(error)
            self._announce(f"{args[0]} is loaded as the script requests. {told}")
            return load(*args, **options)
        self._announce(
            f"{args[0]} is loaded in fp16 with a plan that was certified from its weights, "
            f"because this device is fast in fp16 but not in bf16. {self._otherwise}".rstrip()
        )
        parts = find_components(made).values() if issubclass(cls, DiffusionPipeline) else [made]
        for part in parts:
            if getattr(part, "quantization_method", None) == QUANT_METHOD:
                self._let_casts_be(part)
        return made

    def _configure(self, source: Any, options: dict[str, Any], cls: type) -> Any:
        if not issubclass(cls, DiffusionPipeline):
            return StopdownConfig()
        names = ("revision", "variant", "cache_dir")
        named: dict[str, Any] = {name: options.get(name) for name in names}
        known = resolve_source(source, **named, with_weights=False).components
        own = [name for name in known if name in options]  # the script's own model, or None
        return quantization(source, **named, leave=own)

    def _let_casts_be(self, module: Any) -> None:
        """Let a model ignore casts to 16 bits, with which a script repeats its requested dtype."""
        move = module.to

        def to(*args: Any, **options: Any) -> Any:
            left = [x for x in args if x not in _HALVES]
            kept = {name: x for name, x in options.items() if x not in _HALVES}
            return move(*left, **kept) if left or kept else module

        for name, function in (("to", to), ("half", to), ("bfloat16", to)):
            self._patches.set_attribute(module, name, function)


def quantization(
    source: str | Path,
    *,
    plan: Plan | str | Path | None = None,
    guard: bool = False,
    revision: str | None = None,
    variant: str | None = None,
    cache_dir: str | Path | None = None,
    leave: Collection[str] = (),
) -> Any:
    """Return the `quantization_config` with which Diffusers loads a pipeline in fp16.

        pipe = DiffusionPipeline.from_pretrained(
            id, dtype=torch.float16, quantization_config=stopdown.quantization(id)
        )

    Each component with weights has a `StopdownConfig` in `quant_mapping`, which you can replace by another
    method or delete.

    Args:
        source: Hub id, folder or bundled model, as for `from_pretrained`.
        plan: a plan for it, or the path of its file. None uses the plan in the model's folder or the cached
            one; if there is neither, it certifies one from the weights and caches it.
        guard: put a guard on each component, as `pipe.transformer.stopdown_guard`.
        revision: branch, tag or commit of a Hub id.
        variant: of the weights, if there are several, such as `"fp16"`.
        cache_dir: folder of the Hub's files, if you give one to `from_pretrained`.
        leave: components that you pass to `from_pretrained` yourself: they are neither downloaded nor
            planned.

    Raises:
        SourceError: the model is missing, damaged or refused.
        PlanError: the plan is damaged or belongs to another checkpoint.

    Cost: without a plan, the first time for each checkpoint, one pass over its weights.

    Examples:
        >>> from diffusers import DiffusionPipeline
        >>> from stopdown.testing import save_pipeline
        >>> folder = save_pipeline("sd", "model")  # a tiny Stable Diffusion
        >>> config = stopdown.quantization(folder)
        >>> sorted(config.quant_mapping)
        ['text_encoder', 'unet', 'vae']
        >>> pipe = DiffusionPipeline.from_pretrained(
        ...     folder, dtype=torch.float16, quantization_config=config
        ... )
        >>> pipe.unet.dtype
        torch.float16
    """
    named: dict[str, Any] = {"revision": revision, "variant": variant, "cache_dir": cache_dir}
    found = resolve_source(source, **named, leave=leave if plan is None else ())
    kept = [name for name in found.components if name not in leave]
    verify_source(found if plan is not None else narrow_source(found, kept))
    if absent := list_absent(found):  # how it's called is read from its config, too
        name = absent[0]
        class_name = found.components[name][1]
        raise make_source_error("no-folder", name=name, path=found.path, class_name=class_name)
    carried = _list_carried(found, leave) if plan is None else {}
    left = [name for name in list_planned(found) if name not in {*carried, *leave}]
    entries = list[ComponentPlan]()
    with quiet_libraries():
        if plan is not None:
            taken = take_plan(plan)
            check_source(taken, found)
            entries = list(taken.components)
        elif left:
            only = left if carried or leave else ()
            taken = find_or_certify(found, choose_device("auto"), only=only)
            entries = list(taken.components)
    entries = [_split_held(found, entry) for entry in entries if entry.component not in leave]
    mapping = {
        entry.component: StopdownConfig(
            dataclasses.replace(taken, components=(entry,)), guard=guard, component=entry.component
        )
        for entry in entries
    }
    return PipelineQuantizationConfig(quant_mapping={**carried, **mapping})


def _split_held(source: Source, entry: ComponentPlan) -> ComponentPlan:
    """Return a plan's entry for a component; replace it by one in fp32 if the component contains models.

    `MultiControlNetModel` is such a component. Diffusers loads each of its models alone, but exponents
    belong to all of them together. The user gets a warning.
    """
    if source.kind == "file" or not holds_models(find_class(*source.components[entry.component])):
        return entry
    config = read_description(source.path / entry.component / "config.json")
    count = len(source.list_folders(entry.component))
    warn_user(
        f"{entry.component} holds {count} models, which Diffusers loads one by one, and runs in fp32. "
        f"stopdown.load({source.name!r}) and stopdown.fp16(pipe) plan them together."
    )
    reason = "Diffusers loads its models one by one."
    return ComponentPlan(entry.component, str(config["_class_name"]), "", "fp32", reasons=(reason,))


def _list_carried(source: Source, leave: Collection[str]) -> dict[str, StopdownConfig]:
    """Return the configs of the components that were saved with their plans (component → config)."""
    if source.kind == "file":
        return {}
    found = {
        name: read_description(source.path / name / "config.json").get("quantization_config")
        for name in list_planned(source)
        if name not in leave
    }
    return {
        name: StopdownConfig(**method)
        for name, method in found.items()
        if isinstance(method, dict) and method.get("quant_method") == QUANT_METHOD
    }


def join_config_plans(config: PipelineQuantizationConfig) -> Plan:
    """Merge the plans of the components' configs that `quantization` made into the pipeline's plan."""
    configs = [x for x in config.quant_mapping.values() if isinstance(x, StopdownConfig)]
    plans = [x.plan for x in configs if x.plan is not None]
    components = tuple(x.components[0] for x in plans)
    return dataclasses.replace(plans[0], components=components)

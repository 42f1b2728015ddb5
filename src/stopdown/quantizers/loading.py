"""Loading of a model by a plan inside `from_pretrained`: hooks on the empty model, then weight by weight.

Libraries build a model without weights, place each weight on its device as it is read, and add their own
hooks to the result. So the hooks of a plan are registered while the model is empty, and each weight is
scaled and cast when it arrives, before it is moved again.

**Catches** weights that aren't those of the plan, by samples of each; weights that never arrive.
**Does not catch** weights that differ only between the sampled values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from stopdown.checkpoints.text_encoders import make_encoder_calls
from stopdown.component_calls.components import (
    cast_component_,
    is_of_transformers,
    list_component_calls,
)
from stopdown.devices.device_choice import choose_device
from stopdown.errors import OptionError, PlanError, SourceError, warn_user
from stopdown.fold_names import Folds, list_folds, name_parameters
from stopdown.interception.patches import Patches, SameInCopies
from stopdown.number_formats import list_some
from stopdown.numerics import is_away
from stopdown.plans.applier import (
    UNFIT,
    AppliedEntry,
    AppliedPlan,
    compare_versions,
    find_applied,
    load_entry,
    put_plan,
)
from stopdown.plans.plan_choice import find_or_certify, find_plan
from stopdown.plans.weight_fingerprints import join_samples, take_samples
from stopdown.quantizers.config import StopdownConfig
from stopdown.records import ComponentPlan, Plan
from stopdown.runtime.guard import Guard
from stopdown.runtime.repairs import Component
from stopdown.scaling import CallWatch, StoredWeight, put_cast
from stopdown.sources import hub
from stopdown.sources.source import Source
from stopdown.sources.source_checks import list_absent
from stopdown.sources.sources import resolve_source

_Samples = tuple[tuple[int, ...], torch.Tensor | None]


def check_device_map(device_map: Any) -> None:
    """Refuse a device map with weights on disk, because they would be written there unscaled."""
    if isinstance(device_map, dict) and "disk" in device_map.values():
        raise OptionError(
            "The device_map puts weights on the disk, but a StopdownConfig was given.",
            expected="Weights are written there as they are stored, without their exponents.",
            remedy='Give max_memory with more room for "cpu", or run `stopdown generate --memory`, which '
            "keeps weights in the files that they come from.",
        )


class ModelLoad(SameInCopies):
    """The loading of one model by a plan.

    Attributes:
        config: passed to `from_pretrained`, or read from a `config.json`.
        plan, entry: the model's plan and its entry for the model; set by `begin`.
        bare: dtype in which the model is loaded without the plan in its `config.json`; None with the plan.
    """

    def __init__(self, config: StopdownConfig) -> None:
        self.config, self.entry = config, ComponentPlan("", "", "", "fp32")
        self.plan: Plan | None = None
        self.bare: torch.dtype | None = None
        self._wanted: dict[str, StoredWeight] = {}
        self._stored: dict[str, _Samples] = {}
        self._saved: dict[str, _Samples] = {}
        self._saves_folded = False
        self._applied: AppliedPlan | None = None

    def request(self, dtype: torch.dtype | None) -> None:
        """Check the dtype passed to `from_pretrained`; pipelines pass fp32 by default.

        A folder whose `config.json` contains a plan can be loaded in bf16 too, without the plan.

        Raises:
            OptionError: the dtype isn't that of a plan.
        """
        if dtype == torch.bfloat16 and self.config.is_carried:
            self.bare = dtype
        elif dtype not in (None, torch.float16, torch.float32):
            raise OptionError(
                f"A model with a StopdownConfig would be loaded in {dtype}.",
                expected="A plan fits a model into fp16, and states which parts stay in another format. "
                "Without a dtype, Transformers takes the one in which the weights are stored.",
                remedy="Use dtype=torch.float16, or leave the quantization_config out. To load one "
                "component of a pipeline in another format, delete its entry of quant_mapping.",
            )

    def begin(self, module: torch.nn.Module, files: Sequence[str | Path]) -> None:
        """Choose the plan and register its hooks on a model without weights.

        Args:
            module: the model, with parameters on `meta`.
            files: of its weights.

        Cost: without a plan, the first time for each checkpoint, one pass over its weights.
        """
        with _on_cpu():
            self.plan, component = self._choose_plan(module, [Path(x) for x in files])
        found = StopdownConfig(self.plan, component=self.config.component)
        self.entry = found.find_entry(type(module).__name__, component)
        self._saves_folded = not is_of_transformers(type(module))
        tie: Any = getattr(module, "tie_weights", None)
        if tie is not None:
            tie()
        names: dict[int, list[str]] = {}
        for kind in (module.named_parameters, module.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                names.setdefault(id(tensor), []).append(name)

        def place(tensor: torch.Tensor, stored: StoredWeight) -> None:
            self._wanted.update(dict.fromkeys(names[id(tensor)], stored))
            if tensor.is_meta and isinstance(tensor, torch.nn.Parameter):
                tensor.data = tensor.data.to(stored.dtype)  # what a device map counts

        def put(tensor: torch.Tensor, stored: StoredWeight) -> None:
            place(tensor, dataclasses.replace(stored, folds=()) if self.config.folded else stored)

        if self.bare is None:
            if self.entry.precision != "as loaded":
                load_entry(module, self.entry, put, ("diffusers", "transformers"))
            return
        scaling, is_scaled = (
            self.entry.scaling,
            self.config.folded and self.entry.precision == "fp16",
        )
        folds = list_folds(scaling.exponents) if scaling and is_scaled else {}

        def put_bare(tensor: torch.Tensor, stored: StoredWeight) -> None:
            found = [_negate(folds[name]) for name in names[id(tensor)] if name in folds]
            place(tensor, dataclasses.replace(stored, folds=found[0] if found else ()))

        cast_component_(module, self.bare, put_bare)

    def __contains__(self, name: str) -> bool:
        """Return whether a weight is scaled or cast when it arrives."""
        return name in self._wanted

    def take(self, name: str, value: torch.Tensor, device: Any) -> torch.Tensor:
        """Return a weight scaled and cast for the model, on its device.

        Args:
            value: the stored weight, in any floating format that represents it exactly.
        """
        wanted = dataclasses.replace(self._wanted[name], values=value.detach())
        made = wanted.read(device)
        self._stored[name] = take_samples(value)
        self._saved[name] = take_samples(made if self._saves_folded else unfold(made, wanted))
        return made

    def finish(self, module: torch.nn.Module) -> StopdownConfig | None:
        """Check the loaded weights, apply the plan, and guard the model on request.

        Return the config to store in the model; None if it was loaded without its plan.

        Raises:
            SourceError: a weight is missing.
            PlanError: the plan was made for other weights.
        """
        self._check_weights(module)
        placed = self._list_placed(module)
        with torch.no_grad():
            for name, tensor in name_parameters(module).items():
                if name in self._wanted and id(tensor) not in placed and not tensor.is_meta:
                    given = dataclasses.replace(self._wanted[name], values=tensor.data)
                    tensor.data = given.read(tensor.device)
        if self.bare is not None:
            self.plan = None
            return None
        if (watch := CallWatch.find(module)) is not None:
            watch.weights.note()
        component = self.entry.component
        assert self.plan is not None
        plan = self.plan = dataclasses.replace(self.plan, components=(self.entry,), seal="")
        program = SimpleNamespace(components={component: module})
        self._applied = put_plan(program, plan, _find_entry)
        patches = self._applied.patches
        if is_of_transformers(type(module)):  # Diffusers refuses it itself
            patches.set_attribute(module, "to", functools.partial(_move, module))
        save = functools.partial(self._save, module)
        functools.update_wrapper(save, module.save_pretrained)  # type: ignore[arg-type]
        patches.set_attribute(module, "save_pretrained", save)
        for name in _REFUSED:
            if hasattr(module, name):
                patches.set_attribute(module, name, functools.partial(_refuse, name))
        if self.config.guard:
            vars(module)["stopdown_guard"] = Guard(program).put_on()
        elif (applied := find_applied(module)) is not None:  # nobody else repairs other calls
            Component(module, name=component).stand_under(applied, stays=True)
        return self._describe(module, plan)

    def _list_placed(self, module: torch.nn.Module) -> set[int]:
        """Return the ids of the tensors that were loaded, under any of their names."""
        kinds = module.named_parameters, module.named_buffers
        named = (x for kind in kinds for x in kind(remove_duplicate=False))
        return {id(tensor) for name, tensor in named if name in self._stored}

    def _check_weights(self, module: torch.nn.Module) -> None:
        found = self._complete(module, self._stored)
        if missing := sorted(set(module.state_dict(keep_vars=True)) - found.keys()):
            raise SourceError(
                f"The weights of {type(module).__name__} lack {list_some(missing)}, or they came past "
                "the plan.",
                expected="Each weight is folded when from_pretrained places it.",
                remedy="Load the model from its own folder by from_pretrained.",
            )
        digest = join_samples(
            (name, *found[name]) for name in sorted(module.state_dict(keep_vars=True))
        )
        is_any = not self.entry.weights and self.entry.precision != "fp16"
        if self.entry.weights != digest and not is_any:
            raise PlanError(
                f"The plan for {self.plan.source if self.plan else 'this model'} doesn't belong here: "
                f"{self.entry.component} has other weights than those that it was made for.",
                expected="Exponents hold for the weights that they were found for.",
                remedy="Its config.json has the plan: save the model again where it was loaded, or load "
                "the original."
                if self.config.is_carried
                else "Leave the plan out, StopdownConfig(), so that one is made for these weights.",
            )

    def _complete(
        self, module: torch.nn.Module, samples: dict[str, _Samples]
    ) -> dict[str, _Samples]:
        """Return the samples of all tensors of a model, by which its plan is compared with its weights.

        A tied weight gets the samples of its other name. Integers, which aren't scaled, are sampled here.

        Args:
            samples: those that were taken while the weights arrived.
        """
        state = module.state_dict(keep_vars=True)
        known = {id(state[name]): found for name, found in samples.items() if name in state}
        found = {}
        for name, tensor in state.items():
            if name in samples or id(tensor) in known:
                found[name] = samples.get(name) or known[id(tensor)]
            elif not tensor.is_floating_point():
                found[name] = take_samples(tensor)
        return found

    def _describe(self, module: torch.nn.Module, plan: Plan) -> StopdownConfig:
        found = self._complete(module, self._saved)
        digest = join_samples(
            (name, *found[name]) for name in sorted(module.state_dict(keep_vars=True))
        )
        entry = dataclasses.replace(self.entry, weights=digest)
        carried = dataclasses.replace(plan, components=(entry,), fingerprint="")
        made = StopdownConfig(
            carried, guard=self.config.guard, component=entry.component, folded=self._saves_folded
        )
        made.is_carried = True
        return made

    def _save(self, module: Any, *args: Any, **options: Any) -> Any:
        if self.bare is None and find_applied(module) is None and self.entry.precision == "fp16":
            raise PlanError(
                f"{self.entry.component} can't be saved: it was repaired since it was loaded.",
                expected="It is saved with the exponents of its plan, and its weights have others now.",
                remedy="Load it again, and save it before it is called otherwise.",
            )
        self.renew(module)
        return type(module).save_pretrained(module, *args, **options)

    def renew(self, module: torch.nn.Module) -> None:
        """Update the plan in a model's config for its current weights, before the model is saved.

        If they have changed, for example by a fused LoRA, the plan is no longer certified, with a warning.
        """
        config: StopdownConfig = module.config.quantization_config  # type: ignore[union-attr, assignment]
        assert config.plan is not None
        state = module.state_dict(keep_vars=True)
        for name in self._saved.keys() & state.keys():
            if not is_away(tensor := state[name]):
                is_folded = self._saves_folded
                saved = tensor if is_folded else unfold(tensor.detach(), self._wanted[name])
                self._saved[name] = take_samples(saved)
        made = self._describe(module, config.plan).plan
        (before,), (now,) = config.plan.components, made.components if made is not None else ()
        if now.weights != before.weights:
            warn_user(
                f"{self.entry.component} is saved with other weights than its plan was made for, such as "
                "those of a fused LoRA. It is saved with their exponents and loads as ever, but its "
                "ranges aren't certified for these weights."
            )
            scaling = dataclasses.replace(self.entry.in_force, certified=False, bounded=0)
            reasons = (*now.reasons, "Its weights were changed after the plan was made.")
            now = dataclasses.replace(now, scaling=scaling, reasons=reasons)
            config.plan = dataclasses.replace(config.plan, components=(now,), seal="")

    def undo(self, module: torch.nn.Module) -> None:
        """Remove the plan: unscale the weights to fp32, as close to the stored ones as possible.

        Arguments are cast to fp32 from then on, because other components of a pipeline aren't changed.
        """
        if self._applied is not None:
            self._applied.undo()
        if self.bare is None:
            for callee in list_component_calls({self.entry.component: module}):
                put_cast(callee, torch.float32, Patches())  # the model's from now on

    def unfold_weights(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return a model's state dict without exponents, to be saved for programs without Stopdown.

        Weights that had exponents are in fp32.
        """
        state = {name: x.detach() for name, x in module.state_dict(keep_vars=True).items()}
        folded = {name: self._wanted[name] for name in state if name in self._wanted}
        bare = {
            name: unfold(state[name], wanted) for name, wanted in folded.items() if wanted.folds
        }
        return {
            **state,
            **{name: weight.read(weight.values.device) for name, weight in bare.items()},
        }

    def _choose_plan(self, module: torch.nn.Module, files: Sequence[Path]) -> tuple[Plan, str]:
        """Choose or make the plan of a model; return it with the component's name by its folder."""
        folder = files[0].parent.absolute() if files else Path()
        if self.config.plan is not None:
            differences = "; ".join(compare_versions(self.config.plan))
            if differences and not self.config.is_carried:
                raise PlanError(
                    f"The plan for {self.config.plan.source} doesn't belong here: {differences}.",
                    expected="Exponents hold for the code that they were found for.",
                    remedy="Leave the plan out, StopdownConfig(), so that one is made.",
                )
            if differences:
                warn_user(
                    f"The plan in {folder / 'config.json'} was made with other versions: {differences}. "
                    "If the code of the model changed since, pictures may be wrong."
                )
            return self.config.plan, folder.name
        if not files:
            raise SourceError(
                f"A {type(module).__name__} is loaded by a StopdownConfig without a plan, and not from a "
                "folder.",
                expected="A plan is certified from the weights in a model's folder.",
                remedy="Give the plan: StopdownConfig(plan). stopdown plan SOURCE makes it.",
            )
        if files[0].suffix in hub.PICKLES:
            raise SourceError(
                f"{list_some([x.name for x in files])} in {folder}: weights that are stored as pickles, "
                "and no plan was given.",
                expected="A plan is certified from safetensors.",
                remedy="If you trust them, load the whole model once without the config, and save it by "
                "save_pretrained(FOLDER). Then load that.",
            )
        found = _find_source(folder, files[0].name)
        device, only = choose_device("auto"), (folder.name,)
        if found is not None and not (list_absent(found) and find_plan(found, only) is None):
            return find_or_certify(found, device, only=only), folder.name
        if not is_of_transformers(type(module)):
            whole = "" if found is None else " whole"
            raise SourceError(
                f"{folder} is a {type(module).__name__} without its{whole} pipeline, and no plan was "
                "given.",
                expected=(
                    "How a component is called is read from the pipeline around it: "
                    "model_index.json and the configs beside it. Its weights aren't needed."
                ),
                remedy='Load it from there, from_pretrained(PIPELINE, subfolder="transformer"), or '
                "give a plan: StopdownConfig(plan).",
            )
        named = {folder.name: ("transformers", type(module).__name__)}
        lone = Source(str(folder), folder.parent, "component", components=named)
        calls = {folder.name: make_encoder_calls(module, states=True, lengths=(_TOKENS,))}
        return find_or_certify(lone, device, calls=calls), folder.name


class PlannedModel:
    """A mixin with the answers that both libraries' quantizers give for a model with a plan."""

    _loading: ModelLoad

    @property
    def applied_plan(self) -> Plan | None:
        """The plan that the model was loaded with, reduced to this model."""
        return self._loading.plan

    @property
    def is_trainable(self) -> bool:
        """Return False, because exponents hold only for the weights that they were found for."""
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _find_entry(module: torch.nn.Module, entry: ComponentPlan) -> AppliedEntry:
    """Return the plan entry that was applied to a module before its weights were loaded."""
    found = find_applied(module)
    assert found is not None, entry.component
    return found


def _move(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
    """Move a planned model to a device; refuse to cast it.

    Its own reported dtype is accepted, because libraries pass it back.
    """
    given = (*args, *options.values())
    dtype = next((x for x in given if isinstance(x, torch.dtype)), None)
    if dtype == module.dtype:
        args = tuple(x for x in args if x is not dtype)
        options = {name: x for name, x in options.items() if x is not dtype}
    elif dtype is not None:
        raise OptionError(
            f"{type(module).__name__} was loaded by a StopdownConfig and can't be cast to {dtype}.",
            expected="Its weights have exponents for fp16.",
            remedy="Leave the cast out, or load the model without the config.",
        )
    return type(module).to(module, *args, **options) if args or options else module


_REFUSED = {
    "fuse_qkv_projections": "Leave fuse_qkv_projections() out: it changes nothing but speed.",
    "enable_layerwise_casting": "Leave the quantization_config out, load the model in bf16, and cast that.",
    "_load_ip_adapter_weights": "Load the model without the config and the IP-Adapter into it, and guard "
    "the pipeline: stopdown.guard(pipe).",
}
"""Methods of Diffusers' models that exponents don't allow → what to do instead."""


def _refuse(name: str, *_: object, **__: object) -> None:
    raise OptionError(
        f"{UNFIT[name].what} a model that was loaded by a StopdownConfig.",
        expected=UNFIT[name].why,
        remedy=_REFUSED[name],
    )


def unfold(made: torch.Tensor, wanted: StoredWeight) -> StoredWeight:
    """Return a scaled weight together with the powers of two by which reading it in fp32 unscales it.

    Args:
        made: the scaled weight.
        wanted: has the powers of two by which the weight was multiplied.
    """
    if not made.is_floating_point():
        return StoredWeight(made, made.dtype)
    return StoredWeight(made, torch.float32, _negate(wanted.folds))


def _negate(folds: Folds) -> Folds:
    """Return the folds (multiplications by powers of two) that undo the given ones."""
    return [(place, -exponent) for place, exponent in folds]


def _find_source(folder: Path, file_name: str) -> Source | None:
    """Return the pipeline that a component's folder belongs to, locally or on the Hub; None without one."""
    root = folder.parent
    variant = _VARIANT.search(file_name)
    found = resolve_source(root) if (root / "model_index.json").is_file() else None
    cached = _CACHED.search(root.as_posix())
    if cached and (found is None or list_absent(found)):
        repo = f"{cached['owner']}/{cached['name']}"
        index = hub.download_index(repo, revision=cached["commit"], cache=root.parents[2])
        found = resolve_source(root)
        folders = dict.fromkeys(found.components, False)
        hub.download_snapshot(index, repo, folders, with_weights=False)
    if found is None or folder.name not in found.components:
        return None
    return dataclasses.replace(found, variant=variant[1] if variant else "")


_TOKENS = 512
"""Number of tokens for which a text encoder without a pipeline is certified, if it accepts so many."""

_VARIANT = re.compile(r"\.(\w+)(?:-\d+-of-\d+)?\.safetensors$")
_CACHED = re.compile(r"/models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/(?P<commit>\w+)$")


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Set the default device to the CPU and the default dtype to fp32 inside the block.

    A library that builds a model may have set others.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)

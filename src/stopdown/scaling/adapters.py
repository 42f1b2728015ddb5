"""Adapters on a module with folded exponents: they take the exponents of the weights that they add to.

A layer that PEFT wraps while exponents are folded in is noticed when it is put into its place. From then
on its adapters are brought to the right exponents before each call of the layer, and before anything is
merged into its weight or taken out again; saving and loading see them as they were. So a LoRA may be
loaded, fused, weighed, switched and deleted in any order, by Diffusers, Transformers or PEFT, and in fp32
every bit is that of the same steps on the original.

**Catches** LoRA, DoRA, LoHa, LoKr, GLoRA, OFT, BOFT of linears, convolutions and embeddings, with biases,
several at once; a kind without a rule is refused, by name, when the layer is called.
**Does not catch** adapters that are no wrapped layers (IP-Adapter), and values written into a
parameter's `.data` other than by `load_lora_adapter(hotswap=True)`.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from stopdown.bounds.singular_values import estimate_sigma
from stopdown.component_call_names import is_inside
from stopdown.errors import ScalingError
from stopdown.fold_names import Folds, spread_columns, spread_rows
from stopdown.interception.patches import Patches
from stopdown.interception.tracing import is_traced
from stopdown.records import Scaling
from stopdown.scaling.adapter_exponents import find_part_exponents

FOLLOWED = "stopdown_adapters"
"""Attribute of an adapter layer whose adapters follow the exponents of its weight."""

FOLDS = "stopdown_adapter_folds"
"""Attribute of a module whose adapters are followed."""

_ROLES = {"lora_magnitude_vector": "magnitude"}

_PAST_LAYER = {"magnitude": "DoRA", "glora_": "GLoRA", "boft_": "BOFT"}
"""Roles of adapters that compute with the weight of a layer themselves, past what it returns."""


def is_adapter_layer(module: object) -> bool:
    """Whether a module is a layer that PEFT put around another."""
    return isinstance(module, torch.nn.Module) and hasattr(type(module), "adapter_layer_names")


def unwrap_name(name: str) -> str:
    """The name that a parameter or module has where no adapter is around it."""
    return f"{name}.".replace(".base_layer.", ".").removesuffix(".")


def list_adapter_names(layer: Any) -> set[str]:
    """The adapters that a layer has."""
    kinds = getattr(layer, "adapter_layer_names", ())
    return {name for kind in kinds for name in getattr(layer, kind, {})}


def list_parts(layer: Any, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one adapter in a layer, by role."""
    found: dict[str, torch.Tensor] = {}
    for kind in layer.adapter_layer_names:
        holder = getattr(layer, kind, {})
        if name not in holder:
            continue
        part, role = holder[name], _ROLES.get(kind, kind)
        if isinstance(part, torch.nn.Module):
            tensors = part.named_parameters()
            found |= {role if key == "weight" else f"{role}.{key}": x for key, x in tensors}
        else:
            found[role] = part
    return found


class AdapterFolds:
    """Keeps the adapters of one module at the exponents of the weights that they add to."""

    def __init__(
        self, module: torch.nn.Module, scaling: Scaling, exponents: Mapping[str, Folds]
    ) -> None:
        """Follow the adapters that come; those that are there have their exponents by name.

        Args:
            exponents: name of a parameter, every alias, to its folds.
        """
        self.module, self.scaling, self.exponents = module, scaling, exponents
        self.paths = {part: path for path, part in module.named_modules()}
        self.planned = {
            name
            for layer in _list_layers(module)
            for name in list_adapter_names(layer)
            if any(f".{name}." in f"{key}." for key in scaling.exponents)
        }
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()

    def __deepcopy__(self, memo: Any) -> AdapterFolds:
        return self

    def put_on(self, patches: Patches) -> None:
        """Follow the adapters of the module until `patches` is undone."""
        for layer in _list_layers(self.module):
            self._see(self.module, "", layer)
        patches.defer(self._take_off)
        patches.set_item(
            vars(self.module), FOLDS, self
        )  # the module alone holds it, and goes with it
        handle = register_module_module_registration_hook(
            _see_weakly(weakref.WeakMethod(self._see))
        )
        patches.defer(handle.remove)
        weakref.finalize(self, handle.remove).atexit = False
        if callable(load := getattr(self.module, "load_lora_adapter", None)):
            patches.set_attribute(self.module, load.__name__, self._releasing(load))

    def _see(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        """A module was put into its place somewhere: follow it if it wraps a layer of ours."""
        if not is_adapter_layer(child) or FOLLOWED in vars(child):
            return
        layer: Any = child
        if layer.get_base_layer() in self.paths:
            self._layers.add(layer)
            vars(layer)[FOLLOWED] = _FollowedLayer(layer, self)

    def _take_off(self) -> None:
        for layer in list(self._layers):
            vars(layer).pop(FOLLOWED).take_off()
        self._layers.clear()

    def _releasing(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            for layer in self._layers:
                vars(layer)[FOLLOWED].release()
            return inner(*args, **kwargs)

        return call


def _see_weakly(see: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    """A hook of all modules that does not keep the one it works for, and its weights, for ever."""

    def call(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        found = see()
        if found is not None:
            found(parent, name, child)

    return call


class _FollowedLayer:
    """Keeps the adapters of one layer; the layer alone holds it, so that both go together."""

    def __init__(self, layer: Any, folds: AdapterFolds) -> None:
        self._layer, self._folds = weakref.ref(layer), folds
        self._done: dict[str, tuple[Any, list[torch.Tensor], Patches]] = {}
        self._patches = patches = Patches()
        patches.defer(self.release)
        patches.defer(layer.register_forward_pre_hook(self._before_call).remove)
        patches.defer(layer.register_load_state_dict_pre_hook(self._before_states).remove)
        patches.defer(layer.register_state_dict_pre_hook(self._before_states).remove)
        for method in ("merge", "unmerge"):
            patches.set_attribute(layer, method, self._following(getattr(layer, method)))

    def __deepcopy__(self, memo: Any) -> _FollowedLayer:
        return self  # a copy of the module, as captures make them, is not followed

    def take_off(self) -> None:
        """Restore the layer and its adapters."""
        self._patches.undo()

    def release(self) -> None:
        """Give the adapters the values that they had; the next call scales them again."""
        while self._done:
            self._done.popitem()[1][2].undo()

    def _following(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.follow(is_merging=True)
            return inner(*args, **kwargs)

        return call

    def _before_call(self, layer: Any, args: Any) -> None:
        if layer is self._layer() and not is_traced():
            self.follow()

    def _before_states(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        if layer is self._layer():
            self.release()

    def follow(self, *, is_merging: bool = False) -> None:
        """Bring the adapters to the exponents of the weight that they add to.

        Raises:
            ScalingError: there is no rule for one.
        """
        layer: Any = self._layer()
        names = list_adapter_names(layer) - self._folds.planned
        for name in self._done.keys() - names:
            del self._done[name]
        for name in names:
            parts = list_parts(layer, name)
            is_merged = is_merging or name in layer.merged_adapters
            state = (is_merged, *map(id, parts.values()))
            held = self._done.get(name)
            if held is not None and held[0] == state:
                continue
            if held is not None:
                held[2].undo()
            patches = self._fold(name, parts, is_merged)
            self._done[name] = state, list(parts.values()), patches

    def _fold(self, name: str, parts: Mapping[str, torch.Tensor], is_merged: bool) -> Patches:
        """Scale one adapter; what is returned gives it back what it had."""
        layer: Any = self._layer()
        base, folds, patches = layer.get_base_layer(), self._folds, Patches()
        path = unwrap_name(folds.paths[base])
        try:
            made = self._find_exponents(base, parts, 0 if is_merged else _read_factor(folds, base))
        except ScalingError as error:
            raise ScalingError(
                f"The adapter {name!r} cannot take the exponents of {path}: {error.what}.",
                expected="An adapter has to be scaled by the same powers of two as the weights that "
                "it is added to.",
                remedy="Take it out, or load it first and find the exponents then: make_plan(pipe).",
            ) from error
        if is_inside(path, *folds.scaling.fp32_modules):
            for part in parts.values():
                _widen(part, patches)
        for role, exponents in made.items():
            patches.scale_tensor(parts[role], exponents)
        if "magnitude" in made:
            _scale_norm(layer, name, made["magnitude"])
            patches.defer(functools.partial(_scale_norm, layer, name, -made["magnitude"]))
        return patches

    def _find_exponents(
        self, base: Any, parts: Mapping[str, torch.Tensor], factor: int
    ) -> dict[str, torch.Tensor]:
        past = next((kind for kind in _PAST_LAYER if any(x.startswith(kind) for x in parts)), None)
        if past and _read_factor(self._folds, base):
            kind = _PAST_LAYER[past]
            raise ScalingError(f"it is a {kind}, and the layer's output is multiplied besides")
        if "magnitude" in parts and _is_fresh(base.weight, parts):
            parts = {role: part for role, part in parts.items() if role != "magnitude"}
        rows = _read_rows(self._folds, base, "weight", factor)
        assert rows is not None
        bias, columns = (
            _read_rows(self._folds, base, "bias", factor),
            _read_columns(self._folds, base),
        )
        return find_part_exponents(parts, rows, bias, columns)


def _read_rows(folds: AdapterFolds, base: Any, name: str, factor: int) -> torch.Tensor | None:
    """Exponents of the rows of a layer's weight or bias; None where there is none."""
    tensor = getattr(base, name, None)
    if tensor is None:
        return None
    path = folds.paths[base]
    rows = spread_rows(folds.exponents.get(f"{path}.{name}", ()), len(tensor))
    return (rows + factor).to(tensor.device)


def _read_columns(folds: AdapterFolds, base: Any) -> torch.Tensor | None:
    """What exponents of the columns of a layer's weight add to those of its rows."""
    found = folds.exponents.get(f"{folds.paths[base]}.weight", ())
    if base.weight.dim() < 2:
        return None
    return spread_columns(found, base.weight.shape[1]).to(base.weight.device)


def _read_factor(folds: AdapterFolds, base: Any) -> int:
    """The exponent by which the plan multiplies what the layer gives, before an adapter adds to it."""
    return folds.scaling.multiplies.get(folds.paths[base], 0)


def _scale_norm(layer: Any, name: str, exponents: torch.Tensor) -> None:
    """The norm of a merged DoRA, which PEFT keeps for taking it out, goes with its magnitudes."""
    kept = getattr(layer, "_caches", {}).get(f"{name}-weight_norm")
    if kept is not None:
        shape = kept.shape if exponents.numel() == kept.numel() else (1,) * kept.dim()
        kept.copy_(torch.ldexp(kept, exponents.reshape(shape)))


def follow_adapters(
    module: torch.nn.Module,
    scaling: Scaling,
    exponents: Mapping[str, Folds],
    patches: Patches,
) -> None:
    """Adapters of a module take its exponents from now on, until `patches` is undone."""
    AdapterFolds(module, scaling, exponents).put_on(patches)


def _is_fresh(weight: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> bool:
    """Whether the magnitudes of a DoRA are still the norms of the weight that it was put on."""
    if weight.is_meta or parts["lora_B"].any():
        return False
    norms = torch.linalg.vector_norm(weight.detach().float(), dim=tuple(range(1, weight.dim())))
    measured = parts["magnitude"].detach().float().reshape(-1)
    return len(measured) == len(norms) and torch.allclose(measured, norms, rtol=1e-2, atol=0.0)


def _widen(part: torch.Tensor, patches: Patches) -> None:
    before = part.dtype
    if before in (torch.float16, torch.bfloat16):
        part.data = part.data.float()
        patches.defer(lambda: setattr(part, "data", part.data.to(before)))


def keep_merges(module: torch.nn.Module, patches: Patches) -> Callable[[], object]:
    """Adapters that are merged while values are replaced stay merged when `patches` brings those back.

    Returns:
        What `patches` has to run first of all, so to be deferred last: it takes them out.
    """
    then = {x: list(x.merged_adapters) for x in _list_layers(module)}
    out: list[tuple[Any, list[str]]] = []

    def take_out() -> None:
        for layer in _list_layers(module):
            if (names := list(layer.merged_adapters)) != then.get(layer, []):
                layer.unmerge()
                out.append((layer, names))

    def merge_again() -> None:
        for layer, names in out:
            if before := then.get(layer, []):
                layer.merged_adapters[:] = before
                layer.unmerge()
            if names:
                layer.merge(adapter_names=names)

    patches.defer(merge_again)
    return take_out


def _list_layers(module: torch.nn.Module) -> list[Any]:
    return [layer for layer in module.modules() if is_adapter_layer(layer)]


def measure_growth(module: torch.nn.Module, name: str) -> tuple[float, str]:
    """By how many bits an adapter makes longer what a layer gives, at most, and the path of that layer.

    That is `1 + s |B A| / |W|` in largest singular values, of the layer where it is the most.
    """
    most = (0.0, "")
    for path, layer in module.named_modules():
        if is_adapter_layer(layer) and _is_used(layer, name):
            most = max(most, (_measure_layer(layer, name), path))
    return most


def _is_used(layer: Any, name: str) -> bool:
    is_on = name in layer.active_adapters and not layer.disable_adapters
    return name in list_adapter_names(layer) and (is_on or name in layer.merged_adapters)


@torch.no_grad()
def _measure_layer(layer: Any, name: str) -> float:
    if hasattr(layer, "boft_s"):  # a rotation, and a factor for each row
        return max(0.0, math.log2(max(float(layer.boft_s[name].abs().max()), 1e-300)))
    if not hasattr(layer, "get_delta_weight") or hasattr(layer, "oft_R"):  # that is a rotation
        return 0.0
    if (followed := vars(layer).get(FOLLOWED)) is not None:
        followed.follow()
    delta, weight = layer.get_delta_weight(name), layer.get_base_layer().weight
    added, held = (estimate_sigma(x.detach().flatten(1)) for x in (delta, weight))
    return math.log2(1 + added / held) if held > 0 else math.inf if added else 0.0


def list_misfitting(module: torch.nn.Module) -> dict[str, str]:
    """Adapters of a module that do not have the exponents of their weights, and why not."""
    found: dict[str, str] = {}
    for layer in _list_layers(module):
        followed = vars(layer).get(FOLLOWED)
        if followed is None:
            why = "it was loaded past what scales it"
            found |= dict.fromkeys(list_adapter_names(layer), why)
            continue
        try:
            followed.follow()
        except ScalingError as error:
            found |= dict.fromkeys(list_adapter_names(layer), error.what)
    return found

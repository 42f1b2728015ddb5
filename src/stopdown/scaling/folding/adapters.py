"""Scale LoRAs and other adapters of a module by the powers of two that are folded into its weights.

Otherwise an adapter would be added to a weight of another scale. A layer that PEFT wraps while
exponents are folded in is noticed when it is assigned. From then on its adapters are scaled before each
call of the layer, and before anything is merged into its weight or unmerged; saving and loading see
them unscaled. So a LoRA may be loaded, fused, weighted, switched and deleted in any order, by
Diffusers, Transformers or PEFT. Accelerate offloads them scaled, as it does the weights. In fp32 every
bit is that of the same steps on the original.

A weight `W` is stored as `2**k W`, each block of its rows with a `k` of its own; blocks of its columns
may have further exponents:

    LoRA    W + s B A                 B's rows have k, less a share in A; A also has the columns'
    DoRA    m (W + s B A) / |W + s B A|   the magnitude of each row has that row's k as well

The strength, alpha and rank are further factors and don't change.

**Catches** LoRA and DoRA of linears, convolutions and embeddings, with biases, several at once; any
other kind (LoHa, LoKr, GLoRA, OFT…) is refused, by name, when the layer is called, and so is one that
overflowed as it was cast to fp16.

**Does not catch** adapters that aren't wrapped layers (IP-Adapter), values written into a parameter's
`.data` other than by `load_lora_adapter(hotswap=True)`, and the eps that ComfyUI adds to a DoRA's norm.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from stopdown.adapter_exponents import find_part_exponents
from stopdown.component_call_names import is_inside
from stopdown.errors import ScalingError
from stopdown.fold_names import RESCALED, Folds, spread_columns, spread_rows
from stopdown.interception.patches import CHANGING, Patches, SameInCopies, call_while_alive
from stopdown.interception.tracing import is_traced
from stopdown.module_calls.adapter_layers import (
    find_reader,
    find_role_tensors,
    is_adapter_layer,
    list_adapter_layers,
    list_adapter_names,
    unwrap_name,
)
from stopdown.module_calls.call import are_finite
from stopdown.numerics import has_values
from stopdown.scaling.bounds.singular_values import estimate_sigma
from stopdown.scaling_records import Scaling

MERGING = (
    "Take it out. Merge it into the original's weights instead (load it there, fuse_lora(), "
    "unload_lora_weights()), and make the plan of those."
)
"""Remedy for an adapter that has no rule."""


class AdapterFolds(SameInCopies):
    """Keeps the adapters of one module scaled by the powers of two of the weights that they are added
    to.

    Attributes:
        merged: paths of the layers that adapters were merged into, or taken out of, since this was emptied.
        copied_weights: what watches the weights of the module if it's a deep copy, from its first call on.
    """

    def __init__(
        self, module: torch.nn.Module, scaling: Scaling, exponents: Mapping[str, Folds]
    ) -> None:
        """Record the module's layers; adapters that the scaling itself has exponents for are not scaled
        again.

        Args:
            exponents: maps the name of a parameter, or any alias of it, to its folds.
        """
        self.module, self.scaling, self.exponents = module, scaling, exponents
        self.paths = {part: path for path, part in module.named_modules()}
        self.planned = {
            name
            for layer in list_adapter_layers(module)
            for name in list_adapter_names(layer)
            if any(f".{name}." in f"{key}." for key in scaling.exponents)
        }
        self.merged, self.copied_weights = set[str](), cast(Any, None)
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()

    def put_on(self, patches: Patches) -> None:
        """Scale present and future adapters of the module until `patches` is undone."""
        for layer in list_adapter_layers(self.module):
            self._see(self.module, "", layer)
        patches.defer(self._take_off)
        patches.set_attribute(self.module, RESCALED, self)  # the only reference
        patches.defer(self._listen().remove)
        patches.defer(self.module.register_load_state_dict_post_hook(self._scale_loaded).remove)
        if callable(load := getattr(self.module, "load_lora_adapter", None)):
            patches.set_attribute(self.module, load.__name__, _Before(load, self._prepare_loading))

    def _listen(self) -> RemovableHandle:
        while _left_hooks:
            _left_hooks.pop().remove()
        handle = register_module_module_registration_hook(call_while_alive(self._see))
        weakref.finalize(self, _left_hooks.append, handle).atexit = False
        return handle

    def _see(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        """Start to scale the adapters of a layer that PEFT has just wrapped (a module-registration hook).

        Args:
            child: the wrapper, or any other module that was registered; only wrappers of the scaled
                module's layers count.
        """
        if not is_adapter_layer(child) or _find_followed(child) is not None:
            return
        layer: Any = child
        if layer.get_base_layer() in self.paths:
            self._layers.add(layer)
            _FollowedLayer(layer, self)

    def __deepcopy__(self, memo: Any) -> AdapterFolds:
        """Return the folds of the module's copy, whose weights stay scaled; of a part's copy, these."""
        if id(self.module) not in memo:
            return self
        made = AdapterFolds.__new__(AdapterFolds)
        memo[id(self)] = made
        copied = {"module": memo[id(self.module)], "merged": set(), "copied_weights": None}
        vars(made).update(vars(self), **copied)
        made._layers = weakref.WeakSet()  # which copying the parts below adds to
        there = set(self.module.modules())
        made.paths = {copy.deepcopy(x, memo): path for x, path in self.paths.items() if x in there}
        made._listen()
        return made

    def follow(self) -> None:
        """Scale the adapters of every layer, as compiled code can't do in its calls of them.

        Cost: about 10 µs a layer, as most are scaled already.
        """
        for followed in self._list_followed():
            if followed.is_due:
                followed.follow()

    def release(self) -> None:
        """Restore the unscaled values of all adapters; the next call scales them again."""
        for followed in self._list_followed():
            followed.release()

    def _prepare_loading(self, *_: Any, **kwargs: Any) -> None:
        """Have `load_lora_adapter` write into unscaled adapters only."""
        name = kwargs.get("adapter_name")
        if kwargs.get("hotswap") and name in self.planned:
            raise ScalingError(
                f"The adapter {name!r} was to be hotswapped, but the exponents were found with it.",
                expected="Its matrices have exponents of their own, which a hotswap overwrites.",
                remedy="Load the other one by its own name, load_lora_weights(FILE, "
                f'adapter_name="other"), and then remove the first: delete_adapters({name!r}).',
            )
        self.release()

    def _scale_loaded(self, module: torch.nn.Module, *_: Any) -> None:
        """Scale the adapters that were loaded, unless they are cast next, as their first call may be in
        compiled or exported code.
        """
        found = self._list_followed()
        if module is self.module and found and not is_traced():
            is_half = any(x.dtype == torch.float16 for x in self.module.parameters())
            for followed in found:
                with contextlib.suppress(ScalingError):  # which the call raises
                    followed.scale_loaded(is_half=is_half)

    def _list_followed(self) -> list[_FollowedLayer]:
        return [x for layer in self._layers if (x := _find_followed(layer)) is not None]

    def _take_off(self) -> None:
        for followed in self._list_followed():
            followed.patches.undo()
        self._layers.clear()


class _Before:
    """Callable in place of a method, which calls another function before it.

    A deep copy is that of the copy's own method and function.
    """

    def __init__(self, method: Callable[..., Any], action: Callable[..., None]) -> None:
        functools.update_wrapper(self, method)
        self._method, self._action = method, action

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._action(*args, **kwargs)
        return self._method(*args, **kwargs)


_left_hooks: list[RemovableHandle] = []
"""Hooks of owners that were garbage-collected. They do nothing, and go when the next is registered.

Collection can happen while PyTorch iterates over the hooks, which then must not change.
"""


class _FollowedLayer(SameInCopies):
    """Hooks on one PEFT layer that scale its adapters before calls and merges, and unscale them for saving.

    Only the layer's hooks refer to this object, so both are freed together.

    Attributes:
        patches: undoing them removes the hooks from the layer and restores its adapters.
    """

    def __init__(self, layer: Any, folds: AdapterFolds) -> None:
        self._layer, self._folds = weakref.ref(layer), folds
        self._done: dict[str, tuple[Any, dict[str, torch.Tensor], Patches]] = {}
        self.patches = patches = Patches()
        patches.defer(self._take_off)
        patches.defer(layer.register_forward_pre_hook(self._before_call).remove)
        patches.defer(layer.register_load_state_dict_pre_hook(self._before_loading).remove)
        patches.defer(layer.register_state_dict_pre_hook(self._before_reading).remove)
        for method in ("merge", "unmerge"):
            patches.set_attribute(layer, method, _Before(getattr(layer, method), self._merge))
        patches.set_attribute(layer, "update_layer", _Before(layer.update_layer, self._renew))
        self._count_write()

    def __deepcopy__(self, memo: Any) -> _FollowedLayer:
        """Return what scales the adapters of the layer's copy, if they are unscaled and the whole module is
        copied; else this, which does nothing there.
        """
        folds, layer = copy.deepcopy(self._folds, memo), memo.get(id(self._layer()))
        if folds is self._folds or layer is None or self._done:
            return self
        made = _FollowedLayer.__new__(_FollowedLayer)
        made._layer, made._folds = weakref.ref(layer), folds
        made._done, made.patches = {}, Patches()
        folds._layers.add(layer)
        return made

    def release(self) -> None:
        """Restore the unscaled values of the adapters, unless they are offloaded; the next call scales them
        again.
        """
        with CHANGING:
            for name in list(self._done):
                if any(map(has_values, self._find_parts(name).values())):
                    self._release(name)

    def _release(self, name: str) -> None:
        """Restore the unscaled values of an adapter, also in copies that have replaced its tensors:
        Accelerate makes them, and so does PEFT where it pads them to another rank.
        """
        _, known, patches = self._done.pop(name)
        now = self._find_parts(name)
        copies = [(x, now[role]) for role, x in known.items() if now.get(role, x) is not x]
        is_copied = all(has_values(x) and _begins_with(x, before) for before, x in copies)
        patches.undo()
        for before, x in copies if is_copied else ():
            with torch.no_grad():
                _cut(x, before).copy_(before)

    def _find_parts(self, name: str) -> dict[str, torch.Tensor]:
        layer = self._layer()  # unloading an adapter drops it
        return {} if layer is None else find_role_tensors(layer, name)

    def _take_off(self) -> None:
        while self._done:
            self._release(next(iter(self._done)))

    def _renew(self, *_: Any, **__: Any) -> None:
        """Release the adapters before another one is made, maybe of them (`add_weighted_adapter`)."""
        self.release()
        self._count_write()

    def _merge(self, *_: Any, **__: Any) -> None:
        self.follow(is_merging=True)
        self._folds.merged.add(unwrap_name(self._folds.paths[self._base]))

    def _count_write(self) -> None:
        """Have the layer's weight compared before the next call: PEFT changes it through `.data`, which
        counts as no write, for adapters that begin with a part of it (PiSSA, OLoRA).
        """
        weight = getattr(self._base, "weight", None)
        if isinstance(weight, torch.Tensor) and has_values(weight):
            weight.detach()[:0].zero_()

    @property
    def _base(self) -> Any:
        return self._layer().get_base_layer()  # type: ignore[union-attr]

    @property
    def is_due(self) -> bool:
        """Whether adapters were added, released, merged or taken out since they were scaled."""
        layer: Any = self._layer()
        known = {name: state[0] for name, (state, *_) in self._done.copy().items()}
        names = list_adapter_names(layer) - self._folds.planned
        return known != {name: name in layer.merged_adapters for name in names}

    def _before_call(self, layer: Any, args: Any) -> None:
        if layer is self._layer() and not is_traced():
            self.follow()

    def _before_loading(self, layer: Any, *_: Any) -> None:
        if layer is self._layer():
            self.release()

    def _before_reading(self, layer: Any, *_: Any) -> None:
        """Give who reads the state dict unscaled adapters, but Accelerate those that it offloads."""
        if layer is not self._layer():
            return
        if find_reader().startswith("accelerate.big_modeling"):
            self.follow()
        else:
            self.release()

    def scale_loaded(self, *, is_half: bool) -> None:
        """Scale the adapters that were loaded, except those of a layer in fp32 of a module in fp16: they
        are cast with the module, which might not hold them scaled.
        """
        layer: Any = self._layer()
        parts = [
            x for name in list_adapter_names(layer) for x in find_role_tensors(layer, name).values()
        ]
        own = getattr(self._base, "weight", torch.empty(0)).dtype
        if {x.dtype for x in parts} == {own} and (own == torch.float16 or not is_half):
            self.follow()

    def follow(self, *, is_merging: bool = False) -> None:
        """Scale the layer's adapters by the powers of two of its weight, unless they are already scaled.

        Args:
            is_merging: whether they are about to be merged into the weight, which the multiply of the
                layer's output doesn't scale.
        """
        layer: Any = self._layer()
        names = list_adapter_names(layer) - self._folds.planned
        with CHANGING:  # several threads may call the layer first
            for name in self._done.keys() - names:
                del self._done[name]
            for name in names:
                parts = find_role_tensors(layer, name)
                own = [x for x in parts.values() if isinstance(x, torch.nn.Parameter)]
                if len(own) == len(parts) and not any(map(has_values, own)):
                    continue  # of a copy without weights
                is_merged = is_merging or name in layer.merged_adapters
                # training that begins now: gradients are refused
                state = (is_merged, *((id(x), x.requires_grad) for x in parts.values()))
                held = self._done.get(name)
                if held is not None and held[0] == state:
                    continue
                if held is not None:
                    self._release(name)
                self._done[name] = state, parts, self._fold(name, parts, is_merged)

    def _fold(self, name: str, parts: Mapping[str, torch.Tensor], is_merged: bool) -> Patches:
        """Multiply an adapter's tensors by its layer's powers of two; undoing the returned patches
        restores them.

        Args:
            name: name of the adapter.
            parts: its tensors in this layer, by role.
            is_merged: whether they belong to a merge into the weight.

        Raises:
            ScalingError: if there is no rule for this kind of adapter.
        """
        layer: Any = self._layer()
        base, folds, patches = layer.get_base_layer(), self._folds, Patches()
        path = unwrap_name(folds.paths[base])
        try:
            given = [x for x, part in parts.items() if not isinstance(part, torch.nn.Parameter)]
            if given and "lora_A" in parts:
                raise ScalingError(
                    f"its {given[0]} is the caller's own tensor (torch.func.functional_call), which would "
                    "be scaled there"
                )
            if lost := [role for role, part in parts.items() if not are_finite(part)]:
                raise ScalingError(
                    f"its {lost[0]} holds Inf or NaN (an adapter is cast to the model's dtype as it's "
                    "loaded, and fp16 ends at 65504)"
                )
            made = self._find_exponents(base, parts, is_merged=is_merged)
        except ScalingError as error:
            raise ScalingError(
                f"The adapter {name!r} can't take the exponents of {path}: {error.what}.",
                expected="An adapter has to be scaled by the same powers of two as the weights that "
                "it is added to.",
                remedy=MERGING,
            ) from error
        if _is_wide(folds.scaling, path):
            for part in parts.values():
                _widen(part, patches)
        for role, exponents in made.items():
            patches.scale_tensor(parts[role], exponents)
            refuse_gradient(parts[role], f"the adapter {name!r} of {path}", patches)
        if "magnitude" in made:
            _scale_norm(layer, name, made["magnitude"])
            patches.defer(functools.partial(_scale_norm, layer, name, -made["magnitude"]))
        return patches

    def _find_exponents(
        self, base: Any, parts: Mapping[str, torch.Tensor], *, is_merged: bool
    ) -> dict[str, torch.Tensor]:
        path, given = self._folds.paths[base], self._folds.exponents
        if not isinstance(getattr(base, "weight", None), torch.Tensor):
            raise ScalingError(f"a {type(base).__name__} has no single weight that it is added to")
        # an adapter adds to the layer's output after its multiply, if it isn't merged
        multiply = self._folds.scaling.multiplies.get(path, 0)
        if "magnitude" in parts and multiply:  # it uses the weight directly, not the layer's output
            raise ScalingError("it is a DoRA, and the layer's output is multiplied besides")
        if "magnitude" in parts and _is_fresh(base.weight, parts):
            parts = {role: part for role, part in parts.items() if role != "magnitude"}

        def spread(tensor: torch.Tensor, name: str) -> torch.Tensor:
            rows = spread_rows(given.get(f"{path}.{name}", ()), len(tensor))
            return (rows + (0 if is_merged else multiply)).to(tensor.device)

        weight, bias = base.weight, getattr(base, "bias", None)
        columns = None
        if weight.dim() > 1:
            columns = spread_columns(given.get(f"{path}.weight", ()), weight.shape[1])
            columns = columns.to(weight.device)
        rows_of_bias = None if bias is None else spread(bias, "bias")
        return find_part_exponents(parts, spread(weight, "weight"), rows_of_bias, columns)


def _find_followed(layer: Any) -> _FollowedLayer | None:
    """Return the object that scales a layer's adapters, also if the layer is a copy; None if there is
    none.
    """
    owners = (getattr(hook, "__self__", None) for hook in layer._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, _FollowedLayer)), None)


def _cut(tensor: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    """Return the beginning of a tensor that has the size of a smaller one."""
    return tensor[tuple(slice(size) for size in small.shape)]


def _begins_with(tensor: torch.Tensor, small: torch.Tensor) -> bool:
    """Return whether a tensor has the values of another one, and maybe more. Cost: a host read."""
    if tensor.dim() != small.dim() or tensor.dtype != small.dtype:
        return False
    return torch.equal(_cut(tensor, small), small.to(tensor.device))


def refuse_gradient(tensor: torch.Tensor, what: str, patches: Patches) -> None:
    """Raise an error if a backward pass reaches a scaled tensor, until `patches` is undone.

    Its gradient would be that of another weight.

    Args:
        what: the tensor in words, for the error.
    """

    def refuse(gradient: torch.Tensor) -> None:
        raise ScalingError(
            f"A gradient of {what} was requested, which is multiplied by a power of two.",
            expected="Its gradient would be that of another weight.",
            remedy="For training, take the plan, guard or rescaling off first. To differentiate only by "
            "an input, use module.requires_grad_(False).",
        )

    if tensor.requires_grad:
        patches.defer(tensor.register_hook(refuse).remove)


def _scale_norm(layer: Any, name: str, exponents: torch.Tensor) -> None:
    """Scale the weight norms that PEFT cached when it merged a DoRA, so that unmerging restores the
    scaled weight.

    Args:
        name: name of the adapter.
        exponents: those of its magnitude vector.
    """
    kept = getattr(layer, "_caches", {}).get(f"{name}-weight_norm")
    if kept is not None:
        shape = kept.shape if exponents.numel() == kept.numel() else (1,) * kept.dim()
        kept.copy_(torch.ldexp(kept, exponents.reshape(shape)))


def _is_fresh(weight: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a DoRA has the row norms of the present weight as magnitudes, as PEFT makes it.

    Its magnitudes are then those of the scaled weight already.
    """
    if weight.is_meta:
        return False
    norms = torch.linalg.vector_norm(weight.detach().float(), dim=tuple(range(1, weight.dim())))
    measured = parts["magnitude"].detach().float().reshape(-1)
    return len(measured) == len(norms) and torch.allclose(measured, norms, rtol=1e-2, atol=0.0)


def _is_wide(scaling: Scaling, path: str) -> bool:
    """Return whether the scaling keeps a layer in fp32, so that its adapters must be fp32 too."""
    kept = () if scaling.stream is None else map(unwrap_name, scaling.stream.kept)
    return is_inside(path, *scaling.fp32_modules) or f"{path}.weight" in kept


def _widen(part: torch.Tensor, patches: Patches) -> None:
    before = part.dtype
    if before in (torch.float16, torch.bfloat16):
        part.data = part.data.float()
        patches.defer(lambda: setattr(part, "data", part.data.to(before)))


def keep_merges(module: torch.nn.Module, patches: Patches) -> Callable[[], object]:
    """Make merges of adapters survive when `patches` restores weights that were replaced before the merge.

    Restoring a weight alone would lose what was merged into it meanwhile.

    Returns:
        A function that unmerges them. `patches` must run it first, so it is deferred last.
    """
    then = {x: list(x.merged_adapters) for x in list_adapter_layers(module)}
    out: list[tuple[Any, list[str]]] = []

    def take_out() -> None:
        for layer in list_adapter_layers(module):
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


def measure_growth(module: torch.nn.Module, name: str) -> tuple[float, str]:
    """Return by how many bits an adapter can lengthen a layer's output at most, and the path of that layer.

    A layer's growth is the log2 of `1 + s |B A| / |W|` in largest singular values. Headroom below that
    is at risk. It's 0 for layers whose weights are offloaded.

    Args:
        name: name of the adapter.
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
    if not hasattr(layer, "lora_A"):
        return 0.0
    if (followed := _find_followed(layer)) is not None:
        followed.follow()
    weight = layer.get_base_layer().weight
    if not all(map(has_values, (weight, *find_role_tensors(layer, name).values()))):
        return 0.0  # offloaded by Accelerate
    delta = layer.get_delta_weight(name)
    added, held = (estimate_sigma(x.detach().flatten(1)) for x in (delta, weight))
    return math.log2(1 + added / held) if held > 0 else math.inf if added else 0.0


def list_misfitting(module: torch.nn.Module) -> dict[str, str]:
    """Map each adapter of a scaled module that can't be scaled as its weights are to the reason."""
    found: dict[str, str] = {}
    for layer in list_adapter_layers(module):
        followed = _find_followed(layer)
        if followed is None:
            why = "it was loaded past what scales it"
            found |= dict.fromkeys(list_adapter_names(layer), why)
            continue
        try:
            followed.follow()
        except ScalingError as error:
            found |= dict.fromkeys(list_adapter_names(layer), error.what)
    return found

"""Where a strategy puts weights: they come when they are needed.

The weights of a group (a component, a block, a layer) wait on a store (`weight_stores`). Layers whose
weights wait in 8 bits (`eight_bits`) widen them while they run.

**Catches** parameters that are tied, or shared by two components: they are stored once.
**Does not catch** code that reads the values of a module's weights outside of its `forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stopdown.memory.eight_bits import choose_packed
from stopdown.memory.run_memory import LISTS, weigh
from stopdown.memory.strategies import Placement, Storage, Strategy, group_weights
from stopdown.memory.weight_stores import WeightGroup, WeightStore
from stopdown.patches import Patches
from stopdown.pipelines.components import find_blocks, find_components


def put_placement(
    pipe: Any,
    strategy: Strategy,
    strays: Mapping[str, Mapping[str, frozenset[str]]],
    store: WeightStore,
    patches: Patches,
) -> None:
    """Leave weights where they wait; `patches` takes the hooks off, `WeightStore.close` brings them back.

    Every call of a component has to go through `WeightStore.stand`. What an earlier strategy left on the
    store stays there.

    Args:
        strays: of the pipeline's dry run.

    Raises:
        OSError: the store's folder cannot be written.
    """
    store.clear()
    for name, module in find_components(pipe).items():
        own = strays.get(name, {})
        packed = _pack_layers(module, strategy.storage, own, store, patches)
        _follow_casts(module, store, patches)
        if strategy.placement == "resident":
            store.bring(module)
            continue
        store.move_buffers(module)
        for group in _make_groups(module, strategy.placement, own, store, packed):
            store.keep(name, group, strategy.placement)
            if group.path:
                _hook_group(group, patches)


def _pack_layers(
    module: torch.nn.Module,
    storage: Storage,
    strays: Mapping[str, frozenset[str]],
    store: WeightStore,
    patches: Patches,
) -> list[torch.Tensor]:
    """Have layers wait in 8 bits on the device; the tensors that they wait in come back."""
    if storage == "native":
        return []
    parts = dict(module.named_modules())
    made: dict[int, torch.Tensor] = {}
    for path, weights in choose_packed(module, strays, storage).items():
        for weight in weights.values():
            made |= {id(tensor): tensor for tensor in store.pack(weight, storage)}
        _hook_group(WeightGroup(path, parts[path], list(weights.values()), store), patches)
    return list(made.values())


def _follow_casts(module: torch.nn.Module, store: WeightStore, patches: Patches) -> None:
    """Let a pipeline cast a component whose weights wait: `.to` has no values to cast."""
    plain = module.to

    @functools.wraps(plain)
    def to(*args: Any, **kwargs: Any) -> Any:
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        if dtype is not None:
            store.cast(module, dtype)
        return plain(*args, **kwargs)

    patches.set_attribute(module, "to", to)


def _hook_group(group: WeightGroup, patches: Patches) -> None:
    patches.defer(group.module.register_forward_pre_hook(group.on_enter).remove)
    hook = group.module.register_forward_hook(group.on_leave, always_call=True)
    patches.defer(hook.remove)


def _make_groups(
    module: torch.nn.Module,
    placement: Placement,
    strays: Mapping[str, frozenset[str]],
    store: WeightStore,
    packed: list[torch.Tensor],
) -> Iterable[WeightGroup]:
    """The groups of one component, those of its blocks and layers before its own.

    Args:
        packed: what weights in 8 bits wait in; it is moved instead of them.
    """
    parts = dict(module.named_modules())
    groups = group_weights(weigh(module), find_blocks(module, LISTS), strays, placement)
    for group, paths in groups.items():
        tensors = [x for path in paths for x in parts[path].parameters(recurse=False)]
        tensors = [x for x in tensors if not store.is_packed(x)]
        yield WeightGroup(group, parts[group], [*tensors, *packed], store)

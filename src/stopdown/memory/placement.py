"""Where a strategy puts weights: they come when they are needed.

The weights of a group (a component, a block, a layer) wait on a store (`weight_stores`).

**Catches** parameters that are tied, or shared by two components: they are stored once.
**Does not catch** code that reads the values of a module's weights outside of its `forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stopdown.component_calls.components import find_blocks, find_components
from stopdown.interception.patches import Patches
from stopdown.memory.run_memory import LISTS, weigh
from stopdown.memory.strategies import Placement, Strategy, group_weights
from stopdown.memory.weight_stores import WeightGroup, WeightStore
from stopdown.scaling.call_watch import WAITING


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
        _follow_casts(module, store, patches)
        if strategy.placement == "resident":
            store.bring(module)
            continue
        patches.set_attribute(module, WAITING, True)
        store.move_buffers(module)
        for group in _make_groups(module, strategy.placement, own, store):
            store.keep(name, group, strategy.placement)
            if group.path:
                _hook_group(group, patches)


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
) -> Iterable[WeightGroup]:
    """The groups of one component, those of its blocks and layers before its own."""
    parts = dict(module.named_modules())
    groups = group_weights(weigh(module), find_blocks(module, LISTS), strays, placement)
    for group, paths in groups.items():
        tensors = [x for path in paths for x in parts[path].parameters(recurse=False)]
        yield WeightGroup(group, parts[group], tensors, store)

"""What step caches keep in a component between calls, so that the same call can be made again.

Diffusers' hooks that skip work (first block cache, pyramid attention broadcast, FasterCache, MagCache,
TaylorSeer…) count calls and keep outputs of earlier ones. Before a call is run again they are put back
to what they held; when the component was changed in between, what they kept is dropped.

**Catches** states of the hooks that Diffusers itself resets.
**Does not catch** caches of other libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def save_caches(module: torch.nn.Module) -> Callable[[], None]:
    """Brings back what the step caches of a component hold now; does nothing without one.

    Cost: nothing without a cache; with one a look at each module, and no copy of a tensor.
    """
    kept = [(target, _copy(vars(target))) for target in _find_states(module)]

    def restore() -> None:
        for target, values in kept:
            vars(target).clear()
            vars(target).update(_copy(values))

    return restore


def clear_caches(module: torch.nn.Module) -> None:
    """Drop what step caches kept from earlier calls; where in the run they are stays."""
    for hook in _find_hooks(module):
        for value in vars(hook).values():
            if isinstance(states := getattr(value, "_state_cache", None), dict):
                states.clear()
            elif callable(getattr(value, "reset", None)):
                value.reset()


def _find_states(module: torch.nn.Module) -> Iterator[Any]:
    """Objects whose attributes are what is kept: hooks' managers and states."""
    seen: set[int] = set()
    for hook in _find_hooks(module):
        for value in vars(hook).values():
            states = getattr(value, "_state_cache", None)
            found = [value, *states.values()] if isinstance(states, dict) else [value]
            for target in found if states is not None or hasattr(value, "reset") else ():
                if id(target) not in seen:
                    seen.add(id(target))
                    yield target


def _find_hooks(module: torch.nn.Module) -> Iterator[Any]:
    if not getattr(module, "is_cache_enabled", False):
        return
    for child in module.modules():
        registry = vars(child).get("_diffusers_hook")
        for hook in registry.hooks.values() if registry is not None else ():
            if getattr(hook, "_is_stateful", False):
                yield hook


def _copy(values: dict[str, Any]) -> dict[str, Any]:
    """The same values, lists and mappings in copies of their own."""
    return {
        name: type(value)(value) if type(value) in (dict, list, set) else value
        for name, value in values.items()
    }

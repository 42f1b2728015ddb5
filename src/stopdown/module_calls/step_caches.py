"""Save, restore and bypass Diffusers' step caches of a component, so that a call can be repeated or traced.

Diffusers' hooks that skip work (first block cache, pyramid attention broadcast, FasterCache, MagCache,
TaylorSeer…) count calls and cache earlier outputs. Before a call is repeated, their state is restored; if
the component has changed in between, it is cleared. A capture bypasses them, because it must trace the
whole call without tensors of another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stopdown.fold_names import name_parameters
from stopdown.interception.patches import Patches
from stopdown.module_calls.kept_state import HeldContainers


def save_caches(module: torch.nn.Module) -> Callable[[], None]:
    """Save a component's caches of earlier steps' outputs, and return a function that restores them.

    Cost: nothing without a cache; with one, a pass over the modules, without copies of tensors.
    """
    return HeldContainers(list(_find_states(module))).restore


@contextlib.contextmanager
def in_full(module: torch.nn.Module) -> Iterator[None]:
    """Run calls in full in the block: reuse no earlier step's output, and don't split over processes.

    Other hooks of Diffusers (offloading) stay.
    """
    with Patches() as patches:
        if getattr(module, "is_cache_enabled", False):
            _bypass_hooks(module, _keeps_states, patches)
        if is_spread(module):
            kinds = ("ContextParallelSplitHook", GATHERING)
            _bypass_hooks(module, lambda hook: type(hook).__name__ in kinds, patches)
            for processor in find_processors(module):
                if getattr(processor, "_parallel_config", None) is not None:
                    patches.set_attribute(processor, "_parallel_config", None)
            patches.set_attribute(module, "_parallel_config", None)
        yield


GATHERING = "ContextParallelGatherHook"
"""Class name of Diffusers' hook that gathers the tokens of all processes."""


def is_spread(module: torch.nn.Module) -> bool:
    """Return whether Diffusers' context parallelism splits calls of a module over processes."""
    config = vars(module).get("_parallel_config")
    return getattr(config, "context_parallel_config", None) is not None


def find_processors(module: torch.nn.Module) -> list[Any]:
    found = (vars(child).get("processor") for child in module.modules())
    return list({id(one): one for one in found if one is not None}.values())


def _bypass_hooks(
    module: torch.nn.Module, is_meant: Callable[[Any], bool], patches: Patches
) -> None:
    """Disable some of Diffusers' hooks on a module and its submodules, until `patches` is undone.

    Args:
        is_meant: whether to disable this hook.
    """
    for child in module.modules():
        hooks = list_hooks(child)
        if hooks and "forward" in vars(child) and all(map(is_meant, hooks)):
            # not the hook itself: a copy must not hold hooks, which would call the original
            innermost = vars(child)[_REGISTRY]._fn_refs[0]
            patches.remove_attribute(child, _REGISTRY)
            forward = innermost.original_forward or innermost.forward
            if getattr(forward, "__func__", None) is type(child).forward:
                patches.remove_attribute(child, "forward")
            else:
                patches.set_attribute(child, "forward", forward)
        else:
            for hook in filter(is_meant, hooks):
                _bypass(hook.fn_ref, patches)


def share_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` of a module that keeps Diffusers' hooks as they are.

    A hook that offloads weights can't be copied. Take it off the copy with `drop_hooks`.
    """
    return {id(hook): hook for _, hook in iterate_hooks(module)}


def drop_hooks(module: torch.nn.Module, patches: Patches) -> None:
    """Take all of Diffusers' hooks off a copy of a module: they would run the original's code."""
    _bypass_hooks(module, lambda _: True, patches)


def find_computing_dtypes(module: torch.nn.Module) -> dict[int, torch.dtype]:
    """Map the `id` of each weight under Diffusers' layerwise casting to the dtype that code sees it in."""
    return {
        id(tensor): hook.compute_dtype
        for path, hook in iterate_hooks(module)
        if hasattr(hook, "storage_dtype") and hasattr(hook, "compute_dtype")
        for tensor in name_parameters(module.get_submodule(path)).values()
        if tensor.is_floating_point()
    }


def _bypass(reference: Any, patches: Patches) -> None:
    patches.set_attribute(reference, "pre_forward", lambda _, *args, **kwargs: (args, kwargs))
    patches.set_attribute(reference, "post_forward", lambda _, output: output)
    if reference.original_forward is not None:
        patches.set_attribute(reference, "forward", reference.original_forward)


def _keeps_states(hook: Any) -> bool:
    """Return whether a Diffusers hook belongs to a cache of earlier steps' outputs.

    Such a hook keeps a state between calls, or shares one.
    """
    managed = any(hasattr(value, "_state_cache") for value in vars(hook).values())
    return managed or bool(getattr(hook, "_is_stateful", False))


def clear_caches(module: torch.nn.Module) -> None:
    """Clear a component's caches of earlier steps' outputs, so that the next call computes everything."""
    for hook in _find_hooks(module):
        for value in vars(hook).values():
            if isinstance(states := getattr(value, "_state_cache", None), dict):
                states.clear()
            elif callable(getattr(value, "reset", None)):
                value.reset()


def _find_states(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the objects that hold the state of a module's step caches: Diffusers' managers and states."""
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
    if getattr(module, "is_cache_enabled", False):
        yield from (hook for _, hook in iterate_caches(module))


def iterate_caches(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield Diffusers' hooks that cache earlier steps' outputs, each with the path of its module."""
    hooks = iterate_hooks(module)
    yield from ((path, hook) for path, hook in hooks if getattr(hook, "_is_stateful", False))


def iterate_hooks(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield Diffusers' hooks on a module and its submodules, each with the path of its module."""
    for path, child in module.named_modules():
        yield from ((path, hook) for hook in list_hooks(child))


_REGISTRY = "_diffusers_hook"


def list_hooks(part: torch.nn.Module) -> list[Any]:
    """List Diffusers' hooks on a module, without those on its submodules."""
    registry = vars(part).get(_REGISTRY)
    return [] if registry is None else list(registry.hooks.values())

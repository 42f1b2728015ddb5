"""`mend`: what a check finds, put right on a live pipeline, and taken off again to the last bit.

Casts of parameters keep the old tensors until they are undone. Casts at a boundary are layers at the
component's door; inside of a component they are hooks at the module that refuses.

**Catches** several dtypes in one component, lost islands, components that disagree, fp32 that comes out
of an island, autocast that overrides, `force_upcast` that nobody reads, tables of a scheduler.
**Does not catch** damaged weights, positions made in 16 bits, models that need another precision: they
remain in `remaining`. Bits that a cast has taken do not come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from stopdown.arguments import hook_arguments
from stopdown.consistency.checking import check
from stopdown.consistency.parameters import find_islands
from stopdown.consistency.wording import generalise
from stopdown.formats import name_dtype
from stopdown.patches import Patches
from stopdown.pipelines.components import find_components, find_doors, read_precisions
from stopdown.pipelines.doors import Call, cast_floats, put_cast, put_layer
from stopdown.records import Finding

ROUNDS = 8
"""Mending one thing can show the next, or be all there was: a check follows each round."""

_ORDER = (
    ("mixed-parameters", "several-dtypes", "island-lost", "sigmas-collapse"),
    ("force-upcast-unread", "autocast-overrides"),
    ("island-not-cast-back", "mixed-operands"),
    ("boundary",),
)
"""Kinds of findings, causes before what they may lead to."""


class Mending:
    """What was mended on a pipeline; `undo` takes it off and restores every bit.

    Attributes:
        done: what was done, in whole sentences.
        remaining: what is left to find, worst first.
    """

    def __init__(self, done: tuple[str, ...], remaining: list[Finding], patches: Patches) -> None:
        self.done, self.remaining, self._patches = done, remaining, patches

    def undo(self) -> None:
        """Restore the pipeline to the last bit. A second call does nothing."""
        self._patches.undo()

    def __enter__(self) -> Mending:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def mend(
    pipe: Any, *, device: str | None = None, arguments: Mapping[str, Any] | None = None
) -> Mending:
    """Put right what a check of a live pipeline finds, in place.

    Args:
        pipe: a Diffusers pipeline with its weights.
        device, arguments: as for `check`.

    Returns:
        A handle with `.done`, `.remaining` and `.undo()`, also a context manager.
    """
    patches, done = Patches(), list[str]()
    found = check(pipe, device=device, arguments=arguments)
    try:
        for _ in range(ROUNDS):
            said = _mend_roots(pipe, found, done, patches)
            if not said:
                break
            done += said
            found = check(pipe, device=device, arguments=arguments)
    except BaseException:
        patches.undo()
        raise
    return Mending(tuple(done), found, patches)


def _mend_roots(pipe: Any, found: list[Finding], done: list[str], patches: Patches) -> list[str]:
    """Mend what may be the cause of the rest first; what was done, and was not done before."""
    for kinds in _ORDER:
        chosen = [finding for finding in found if finding.kind in kinds]
        said = [text for finding in chosen if (text := _mend_one(pipe, finding, patches))]
        fresh = [text for text in dict.fromkeys(said) if text not in done]
        if fresh:
            return fresh
    return []


def _mend_one(pipe: Any, finding: Finding, patches: Patches) -> str:
    """Mend one finding; what was done, "" when nothing can be."""
    name, _, path = finding.site.partition(":")
    remedy = _REMEDIES.get(finding.kind)
    module = find_components(pipe).get(name)
    if remedy is None or (module is None and finding.kind != "sigmas-collapse"):
        return ""
    return remedy(pipe, name, path, patches)


def _unify(pipe: Any, name: str, path: str, patches: Patches) -> str:
    module = getattr(pipe, name)
    main = read_precisions(module)[0]
    islands = find_islands(module, name_dtype(main))
    names = [
        key
        for key, tensor in module.named_parameters()
        if tensor.is_floating_point() and tensor.dtype != main and key not in islands
    ]
    _cast(module, names, main, patches)
    return (
        f"{name}: {len(names)} parameters cast to {name_dtype(main)}, as the rest." if names else ""
    )


def _restore_islands(pipe: Any, name: str, path: str, patches: Patches) -> str:
    module = getattr(pipe, name)
    islands = find_islands(module, name_dtype(read_precisions(module)[0]))
    parameters = dict(module.named_parameters())
    names = sorted(key for key in islands if parameters[key].dtype != torch.float32)
    _cast(module, names, torch.float32, patches)
    if not names:
        return ""
    return (
        f"{name}: {len(names)} parameters that its authors keep in fp32 are fp32 again; the bits that "
        "the cast took are not back."
    )


def _cast(module: torch.nn.Module, names: list[str], dtype: torch.dtype, patches: Patches) -> None:
    parameters = dict(module.named_parameters())
    for key in names:
        tensor = parameters[key]
        patches.defer(partial(setattr, tensor, "data", tensor.data))
        tensor.data = tensor.data.to(dtype)


def _cast_at_door(pipe: Any, name: str, path: str, patches: Patches) -> str:
    main = read_precisions(getattr(pipe, name))[0]
    for door in find_doors(pipe):
        if door.component.partition(".")[0] == name:
            put_cast(door, main, patches)
    return f"{name}: its arguments are cast to {name_dtype(main)} at its door, its outputs back."


def _cast_at_module(pipe: Any, name: str, path: str, patches: Patches) -> str:
    """Hooks that cast the inputs of a module, and of those in its place in other blocks."""
    own = [
        part
        for place, part in getattr(pipe, name).named_modules()
        if generalise(place) == generalise(path) and list(part.parameters(recurse=False))
    ]
    for part in own:
        dtype = next(part.parameters(recurse=False)).dtype
        hook_arguments(part, partial(cast_floats, dtype=dtype), patches)
    if not own:
        return ""
    return f"{name}: {path} and {len(own) - 1} of its kind cast their input to their own dtype."


def _stop_autocast(pipe: Any, name: str, path: str, patches: Patches) -> str:
    kinds = [kind for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)]

    def call_plain(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _call_without(kinds, call, args, kwargs)

    for door in find_doors(pipe):
        if door.component.partition(".")[0] == name:
            put_layer(door.owner, door.method, call_plain, patches)
    return f"{name}: autocast is off inside of its calls."


def _call_without(kinds: list[str], call: Call, args: Any, kwargs: Any) -> Any:
    if not kinds:
        return call(*args, **kwargs)
    with torch.autocast(kinds[0], enabled=False):
        return _call_without(kinds[1:], call, args, kwargs)


def _upcast(pipe: Any, name: str, path: str, patches: Patches) -> str:
    module = getattr(pipe, name)
    names = [key for key, tensor in module.named_parameters() if tensor.is_floating_point()]
    _cast(module, names, torch.float32, patches)
    for door in find_doors(pipe):
        if door.component.partition(".")[0] == name:
            put_cast(door, torch.float32, patches)
    return f"{name}: cast to fp32, as its config says, and its arguments with it."


def _renew_scheduler(pipe: Any, name: str, path: str, patches: Patches) -> str:
    kind = type(pipe.scheduler)
    patches.set_attribute(pipe, "scheduler", kind.from_config(pipe.scheduler.config))
    return f"scheduler: made anew from its config, its tables in fp32 ({kind.__name__})."


_REMEDIES: dict[str, Callable[[Any, str, str, Patches], str]] = {
    "mixed-parameters": _unify,
    "several-dtypes": _unify,
    "island-lost": _restore_islands,
    "boundary": _cast_at_door,
    "island-not-cast-back": _cast_at_module,
    "mixed-operands": _cast_at_module,
    "autocast-overrides": _stop_autocast,
    "force-upcast-unread": _upcast,
    "sigmas-collapse": _renew_scheduler,
}
"""Kind of finding → what mends it."""

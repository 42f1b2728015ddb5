"""Which field of a configuration sets the eps of which norms, found by trying.

A component is built twice without memory for its weights, once as its configuration says and once
with one field doubled: the eps that double with it are those that the field sets. So no class has to
be known. Nested configurations (a language model inside one for pictures) are walked into.

Not covered: eps written into the code of a class: no configuration reaches those.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stopdown.graph.capture import build_fake

_LARGEST = 0.1
"""What is called eps and is larger is something else."""


def find_eps_fields(module: torch.nn.Module) -> dict[str, frozenset[str]]:
    """Field of a component's configuration to the places `module.path.attribute` whose eps it sets.

    A field inside another configuration is written `text_config.rms_norm_eps`. Empty for a module
    without a configuration.

    Cost: the component built once without weights for each field.
    """
    fields = dict(_iterate_fields(_read_config(module)))
    if not fields:
        return {}
    before = list_eps(_build(module, {}))
    found = {}
    for name, value in fields.items():
        after = list_eps(_build(module, {name: 2 * value}))
        found[name] = frozenset(x for x, eps in before.items() if after.get(x) == 2 * eps)
    return {name: places for name, places in found.items() if places}


def read_field(module: torch.nn.Module, name: str) -> float:
    value: Any = _read_config(module)
    for part in name.split("."):
        value = value[part]
    return float(value)


def list_eps(module: torch.nn.Module) -> dict[str, float]:
    """`module.path.attribute` of every eps of a module to its value."""
    return {
        ".".join(filter(None, (path, name))): held
        for path, owner in module.named_modules()
        for name, held in vars(owner).items()
        if _is_eps(name, held)
    }


def _is_eps(name: Any, held: Any) -> bool:
    return "eps" in str(name).lower() and type(held) is float and 0 < held < _LARGEST


def _read_config(module: torch.nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    if config is None:
        return {}
    return dict(config) if isinstance(config, Mapping) else config.to_dict()


def _iterate_fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, held in config.items():
        if isinstance(held, Mapping):
            yield from _iterate_fields(held, f"{prefix}{name}.")
        elif _is_eps(name, held):
            yield f"{prefix}{name}", held


def _build(module: torch.nn.Module, changes: Mapping[str, float]) -> torch.nn.Module:
    """The component as its configuration with some changes describes it, without memory."""
    kind: Any = type(module)
    if isinstance(module.config, Mapping):
        changed = {**module.config, **changes}
        changed.pop("_use_default_values", None)  # with it Diffusers would overrule the change
        return build_fake(lambda: kind.from_config(changed), torch.float32)
    config: Any = copy.deepcopy(module.config)
    for name, value in changes.items():
        *outer, last = name.split(".")
        owner = config
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return build_fake(lambda: kind(config), torch.float32)

"""Which modules clamp their values at fp16's maximum, read from the source of their class.

Transformers' T5 turns Inf into 64504 and goes on; CogView3-Plus, Flux and Qwen-Image clip to 65504.
What comes out is finite and wrong. Such modules are known by their code alone: a `clamp`, `clip` or
`nan_to_num` beside `finfo`, or a number from 64500 on such as `65504` or `65000`.

`nan_to_num` turns NaN into zeros as well, so nothing of it shows in what a module returns (ComfyUI's
Flux and Z-Image do so); `hidden_values` looks at what it is called with.

**Catches** `clamp` and `clip` written in the `forward` of a module.
**Does not catch** `clamp` and `clip` in functions that `forward` calls, and in attention processors.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import torch

from stopdown.devices.model_needs import keeps_clamps
from stopdown.interception.module_paths import list_parts
from stopdown.number_formats import FP16

CLAMPED_FROM = FP16.largest - 1000
"""A value of this magnitude at the output of a module that clamps was beyond it: T5's own bound."""

_CLAMP = re.compile(r"\b(clamp|clip|nan_to_num)_?\(")
_END = re.compile(r"\bfinfo\b|\b(?:64[5-9]\d\d|65[0-4]\d\d|6550[0-4])(?:\.\d*)?\b|\b6\.5e\+?4\b")
"""How code writes fp16's maximum: `finfo`, 65504, 65000.0, 6.5e4; from 64500 to 65504."""


def find_clamping(component: torch.nn.Module) -> tuple[str, ...]:
    kinds: set[Any] = {type(part) for part in list_parts(component)}
    if keeps_clamps(type(component).__name__) or not any(map(_clamps, kinds)):
        return ()
    return tuple(path for path, module in component.named_modules() if _clamps(type(module)))  # type: ignore[arg-type]


@functools.cache
def _clamps(module_class: Any) -> bool:
    try:
        source = inspect.getsource(module_class.forward)
    except (OSError, TypeError):  # code without a file
        return False
    return bool(_CLAMP.search(source) and _END.search(source))

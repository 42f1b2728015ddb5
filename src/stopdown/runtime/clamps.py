"""Which modules clamp their values at the end of fp16's range, read from the source of their class.

Transformers' T5 turns Inf into 64504 and goes on; CogView3-Plus, Flux and Qwen-Image clip to 65504.
What comes out is finite and wrong. Such modules are known by their code alone: a `clamp`, `clip` or
`nan_to_num` beside `finfo` or `65504`.

**Catches** clamps written in the `forward` of a module.
**Does not catch** clamps in functions that `forward` calls, and in attention processors.
"""

from __future__ import annotations

import functools
import inspect
import re

import torch

from stopdown.model_needs import keeps_clamps
from stopdown.number_formats import FP16

CLAMPED_FROM = FP16.largest - 1000
"""A value of this magnitude at the output of a module that clamps was beyond it: T5's own bound."""

_CLAMP = re.compile(r"\b(clamp|clip|nan_to_num)_?\(")
_END = re.compile(rf"\bfinfo\b|{FP16.largest:.0f}")


def find_clamping(component: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the modules of a component that clamp at the end of fp16's range."""
    if keeps_clamps(type(component).__name__):
        return ()
    return tuple(path for path, module in component.named_modules() if _clamps(type(module)))  # type: ignore[arg-type]


@functools.cache
def _clamps(module_class: type[torch.nn.Module]) -> bool:
    try:
        source = inspect.getsource(module_class.forward)
    except (OSError, TypeError):  # code without a file
        return False
    return bool(_CLAMP.search(source) and _END.search(source))

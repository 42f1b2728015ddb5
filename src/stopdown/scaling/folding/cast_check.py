"""Refuse calls of a rescaled module that was cast by `.half()` instead of `cast_`, as results would
differ silently.

`.half()` knows only the folds of a rescaling, and nothing of its fp32 layers, fp32 residual stream, or
multiplies beside buffers that stay fp32. So hooks on the module, and on the parts that its methods call
first, compare dtypes with those that the rescaling or `cast_` left.

**Catches** `.half()`, `.to(dtype)`, a pipeline's `.to(dtype)`, and `cast_` without the rescaling.

**Does not catch** a cast to fp32 or bf16, whose range needs nothing but the folds; calls of compiled
code; a copy of the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from stopdown.errors import ScalingError
from stopdown.interception.module_paths import list_tensor_places
from stopdown.interception.patches import Patches, SameInCopies
from stopdown.interception.tracing import is_traced
from stopdown.number_formats import name_dtype

_WIDE = (torch.float32, torch.bfloat16, torch.float64)


class CastCheck(SameInCopies):
    """Forward pre-hook that raises an error if a module's parameters have been cast to fp16 by
    something else.

    Args:
        needs: parts of the rescaling that a plain cast breaks, in words for the error.
    """

    def __init__(self, module: torch.nn.Module, needs: str) -> None:
        self.module, self.needs = module, needs
        self._known: dict[int, list[tuple[str, dict[str, Any], str, torch.dtype]]] = {}
        self.accept()

    def accept(self) -> None:
        """Record the parameters' current dtypes as the right ones, after a cast that knows the
        rescaling.
        """
        self._known = {
            id(part): [
                (name, holder, key, holder[key].dtype)
                for name, holder, key in list_tensor_places(part)
                if holder[key].is_floating_point() and not _is_empty(holder[key])
            ]
            for part in _find_entries(self.module)
        }

    def put_on(self, patches: Patches) -> None:
        """Register the hook until `patches` is undone."""
        for part in _find_entries(self.module):
            patches.defer(part.register_forward_pre_hook(self).remove)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        known = self._known.get(id(module), ())
        for name, holder, key, before in known if not is_traced() else ():
            now = holder.get(key)
            if now is None or now.dtype == before or now.dtype in _WIDE or _is_empty(now):
                continue
            self._refuse(name, before, now.dtype)

    def _refuse(self, name: str, before: torch.dtype, after: torch.dtype) -> None:
        kind = type(self.module).__name__
        raise ScalingError(
            f"{kind} was rescaled and then cast by other means than cast_: {name} is "
            f"{name_dtype(after)}, and was {name_dtype(before)}.",
            expected=f"Its rescaling has {self.needs}, which .half() and .to() don't preserve.",
            remedy="Load it again and use stopdown.cast_(module, torch.float16, rescaling), or "
            "rescale_(..., cast=True).",
        )


def find_check(module: torch.nn.Module) -> CastCheck | None:
    """Return the cast check that is registered on a module; None if there is none."""
    hooks = reversed(module._forward_pre_hooks.values())
    return next((x for x in hooks if isinstance(x, CastCheck) and x.module is module), None)


def _find_entries(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and its outermost callable submodules, which its methods may call past `forward`."""
    yield module
    waiting = [*module.children()]
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            waiting[:0] = part.children()
        else:
            yield part


def _is_empty(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)

"""Hooks of the same repairs get the same numbers, so that compiled code is found again."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stopdown.interception.patches import Patches
from stopdown.records import ComponentPlan
from stopdown.runtime.kept_code import KeptCode


def test_the_same_repairs_get_the_same_numbers() -> None:
    """Other repairs get new ones, and hooks that come later never share a number."""
    module = nn.Linear(2, 2)
    first, second = ((ComponentPlan("a", "Linear", x),) for x in ("fp16", "fp32"))
    flag = torch._dynamo.config.skip_nnmodule_hook_guards  # type: ignore[attr-defined]
    with Patches() as patches:
        kept = KeptCode(is_kept=True, patches=patches)

        def put(repairs: tuple[ComponentPlan, ...]) -> int:
            with kept.numbered(module, repairs):
                handle = module.register_forward_hook(lambda *_: None)
            handle.remove()
            return int(handle.id)

        number = put(first)
        assert kept.knows(module, first)
        assert put(first) == number
        assert put(second) > number
        assert not kept.knows(module, first)
        assert RemovableHandle.next_id > number
        assert not torch._dynamo.config.skip_nnmodule_hook_guards  # type: ignore[attr-defined]
    assert torch._dynamo.config.skip_nnmodule_hook_guards == flag  # type: ignore[attr-defined]


def test_code_that_is_not_kept_is_not_numbered() -> None:
    """Hooks get the next number, and the compiler is left as it is."""
    module, repairs = nn.Linear(2, 2), (ComponentPlan("a", "Linear", "fp16"),)
    kept, number = KeptCode(), RemovableHandle.next_id
    with kept.numbered(module, repairs):
        handle = module.register_forward_hook(lambda *_: None)
    assert handle.id == number
    assert not kept.knows(module, repairs)

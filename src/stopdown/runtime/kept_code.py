"""Reuse `torch.compile`'s code of a repaired component whenever the same repairs are applied again.

PyTorch's compiler bakes hooks into its code and by default doesn't check them again, so code must be
recompiled after each change of hooks. Here, it is configured to compare hooks by their ids, and the same
repairs get the same hook ids whenever they are applied. So the compiler finds the code of the component
with and without the repairs.

**Does not catch** hooks that another thread registers on the same modules while repairs are applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from stopdown.interception.patches import Patches
from stopdown.records import ComponentPlan


@dataclass
class KeptCode:
    """The repairs that each module's code was last compiled with, and the id of their first hook.

    Code is reused if the same repairs are applied again, with hooks of the same ids.

    Attributes:
        is_kept: whether the same repairs will be applied again; if not, changes discard compiled code.
        patches: the change to the compiler's config, to be undone after the last repair.
    """

    is_kept: bool = False
    patches: Patches = field(default_factory=Patches)
    _known: WeakKeyDictionary[torch.nn.Module, tuple[tuple[ComponentPlan, ...], int]] = field(
        default_factory=WeakKeyDictionary
    )
    _has_begun: bool = False

    def knows(self, module: torch.nn.Module, repairs: tuple[ComponentPlan, ...]) -> bool:
        """Return whether a module was last compiled with these repairs."""
        return module in self._known and self._known[module][0] == repairs

    def forget(self, module: torch.nn.Module, repairs: tuple[ComponentPlan, ...]) -> None:
        """Discard all compiled code, unless it was compiled for a module with these repairs."""
        if not self.knows(module, repairs):
            torch.compiler.reset()

    @contextlib.contextmanager
    def numbered(
        self, module: torch.nn.Module, repairs: tuple[ComponentPlan, ...]
    ) -> Iterator[None]:
        """Give hooks that are registered inside the block the ids that the same repairs' hooks had the
        last time.
        """
        if not (self.is_kept and repairs):
            yield
            return
        self._compare_hooks()
        now = RemovableHandle.next_id
        first = self._known[module][1] if self.knows(module, repairs) else now
        self._known[module] = repairs, first
        RemovableHandle.next_id = first
        try:
            yield
        finally:
            RemovableHandle.next_id = max(now, RemovableHandle.next_id)

    def _compare_hooks(self) -> None:
        """Make the compiler check hooks before it reuses code; the caller must discard code compiled
        without this.
        """
        if not self._has_begun:
            self._has_begun = True
            config: Any = torch._dynamo.config
            before = config.skip_nnmodule_hook_guards
            config.skip_nnmodule_hook_guards = False
            self.patches.defer(lambda: _stop_comparing(config, before))


def _stop_comparing(config: Any, before: bool) -> None:
    config.skip_nnmodule_hook_guards = before
    torch.compiler.reset()

"""Compiled code of repaired components, kept while the same repairs come off and return.

PyTorch's compiler bakes hooks into its code and by default does not look at them again, so code has to be
made anew after each change. Here it is told to compare hooks, as it can by their numbers: the same repairs
get the same numbers whenever they are put on, so their code is found again, and that of the component
without them as well.

**Does not catch** hooks that another thread puts on the same modules while repairs are put on.
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
    """By module the repairs that its compiled code was made for last, and the number of their first hook.

    Attributes:
        is_kept: the same repairs come off and return; if not, code is compiled again after each change.
        patches: hold what the compiler is told; undone when no repair returns any more.
    """

    is_kept: bool = False
    patches: Patches = field(default_factory=Patches)
    _known: WeakKeyDictionary[torch.nn.Module, tuple[tuple[ComponentPlan, ...], int]] = field(
        default_factory=WeakKeyDictionary
    )
    _has_begun: bool = False

    def knows(self, module: torch.nn.Module, repairs: tuple[ComponentPlan, ...]) -> bool:
        """Return whether there is code for a module with these repairs."""
        return module in self._known and self._known[module][0] == repairs

    def forget(self, module: torch.nn.Module, repairs: tuple[ComponentPlan, ...]) -> None:
        """Have all code compiled again, unless there is some for a module with these repairs."""
        if not self.knows(module, repairs):
            torch.compiler.reset()

    @contextlib.contextmanager
    def numbered(
        self, module: torch.nn.Module, repairs: tuple[ComponentPlan, ...]
    ) -> Iterator[None]:
        """Give the hooks of these repairs the numbers that they had before, inside the block."""
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
        """Make the compiler compare hooks; the caller forgets code compiled without that."""
        if not self._has_begun:
            self._has_begun = True
            config: Any = torch._dynamo.config
            before = config.skip_nnmodule_hook_guards
            config.skip_nnmodule_hook_guards = False
            self.patches.defer(lambda: _stop_comparing(config, before))


def _stop_comparing(config: Any, before: bool) -> None:
    config.skip_nnmodule_hook_guards = before
    torch.compiler.reset()

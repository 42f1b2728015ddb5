"""Exponents on a module or off: calls that want the same run at once, and others wait for their turn."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator

import torch

from stopdown.interception.component_locks import find_lock
from stopdown.interception.patches import Patches
from stopdown.scaling.calls.call_interception import (
    UNPLANNED,
    PartCall,
    find_code,
    hide_parts,
    show_parts,
)
from stopdown.scaling.calls.module_settings import ModuleSettings
from stopdown.scaling.calls.step_caches import clear_caches
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.watch.folded_weights import FoldedWeights


class ReplacedError(Exception):
    """Other exponents were put on: the call begins again."""


class State(enum.Enum):
    """Where the exponents are."""

    ON = enum.auto()
    OFF = enum.auto()
    REMOVED = enum.auto()


class ExponentSwitch:
    """The exponents of one module.

    Attributes:
        patches: what is put on with the exponents, and comes off with them.
        parts: parts of the module whose calls are led elsewhere while no call of the whole runs.
        state: whether they are on the module now.
        changes: how often they were put on or taken off.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        put: Callable[[Patches], None],
        weights: FoldedWeights,
        settings: ModuleSettings,
        *,
        casts: bool,
    ) -> None:
        """
        Args:
            put: folds the exponents in and casts the module; its patches take them off.
            weights: of the module.
            settings: of the module, which are noted after each change.
            casts: the module is cast as well, so it runs in fp32 without its exponents.
        """
        self._module, self._put, self._casts = module, put, casts
        self._weights, self._settings = weights, settings
        self.patches, self._off = Patches(), Patches()
        self.parts: list[PartCall] = []
        self._turn = threading.Condition(threading.RLock())
        self._users, self.state, self.changes = 0, State.ON, 0

    @property
    def is_on(self) -> bool:
        """Whether the exponents are on the module now."""
        return self.state is State.ON

    @property
    def is_removed(self) -> bool:
        """Whether they were taken off for good."""
        return self.state is State.REMOVED

    @property
    def is_used(self) -> bool:
        """Whether a call runs now, in any thread."""
        return bool(self._users)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no call begin or end and nothing be switched inside the block."""
        with self._turn:
            yield

    @contextlib.contextmanager
    def using(self, *, is_on: bool) -> Iterator[None]:
        """Run a call with the exponents on or off, under the module's lock, as a guard's changes are.

        Raises:
            ReplacedError: they were taken off for good while the call waited.
        """
        while not self._begin(is_on=is_on):
            with find_lock(self._module).changing(), self._turn:
                if not (self._users or self.is_removed or self.is_on == is_on):
                    self.switch_on() if is_on else self._switch_off()
        try:
            with find_lock(self._module).calling():
                if self.is_removed:
                    raise ReplacedError
                yield
        finally:
            with self._turn:
                self._users -= 1
                if not self._users:
                    if not self.is_removed:
                        show_parts(self.parts)
                    self._settings.note()
                self._turn.notify_all()

    def _begin(self, *, is_on: bool) -> bool:
        """Begin a call and return True, or return False if the exponents must be switched first."""
        with self._turn:
            while self._users and self.is_on != is_on and not self.is_removed:
                self._turn.wait()
            if self.is_removed:
                raise ReplacedError
            if self.is_on == is_on and not self._users:
                hide_parts(self.parts)
            self._users += self.is_on == is_on
            return self.is_on == is_on

    def switch_on(self) -> None:
        """Put the exponents on."""
        self._off.undo()
        self._put(self.patches)
        self._weights.note()
        self._settings.note()
        self.state = State.ON
        self._forget()

    def _switch_off(self) -> None:
        self._weights.check()
        self.patches.undo()
        try:
            if self._casts:
                self._off.set_attribute(self._module, UNPLANNED, True)
                self._off.defer(cast_(self._module, torch.float32).undo)
        except BaseException:  # memory may run out
            self.switch_on()
            raise
        self._settings.note()
        self.state = State.OFF
        self._forget()

    def _forget(self) -> None:
        """Clear caches of calls, whose scale or dtype may be wrong now, and code with other hooks."""
        self.changes += 1
        clear_caches(self._module)
        if any(find_code(x) for x in self._module.modules()):
            torch.compiler.reset()

    def remove(self) -> None:
        """Take the exponents off for good; calls that wait begin again."""
        with self._turn:
            self.state = State.REMOVED
            self.changes += 1
            hide_parts(self.parts)
            self._off.undo()
            self.patches.undo()
            self._turn.notify_all()

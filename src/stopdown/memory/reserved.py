"""Predict the memory that PyTorch's caching allocator reserves in a run, by replaying a dry run's
allocations.

The events are replayed through `CachingAllocator`, with weights loaded and dropped as the placement
does, and with cuBLAS's workspace. The result is the smallest limit under which nothing runs out of
memory, provided that free segments are returned first, as PyTorch does.

Not covered: workspaces of cuDNN, which depend on the card and on free memory; the driver's own context.
"""

from __future__ import annotations

from collections.abc import Iterable

from stopdown.component_call_names import name_component
from stopdown.memory.allocation_tracker import Event
from stopdown.memory.caching_allocator import WORKSPACE_BYTES, Block, CachingAllocator
from stopdown.memory.run_memory import OUTSIDE, CallMemory, RunMemory
from stopdown.memory.strategies import Strategy, group_weights, list_held

PIECE_BYTES = 2**25
"""Bytes of a weight that `mapped_weights` copies at a time if it must be converted on the device."""


def count_reserved(
    run: RunMemory,
    strategy: Strategy,
    *,
    workspace_bytes: int = WORKSPACE_BYTES,
    expandable: bool = False,
) -> int:
    """Return the smallest limit for reserved memory, in bytes, that a run stays within.

    Args:
        run: recorded with the strategy's `variant` applied.
        workspace_bytes: of cuBLAS.
        expandable: whether the allocator uses expandable segments.
    """
    allocator = CachingAllocator(0, expandable=expandable, grows=True)
    replay(run, strategy, allocator, workspace_bytes=workspace_bytes)
    return allocator.peak_reserved_bytes


def replay(
    run: RunMemory,
    strategy: Strategy,
    allocator: CachingAllocator,
    *,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> None:
    """Replay a run's recorded allocations in a simulated allocator, with the weights of its strategy."""
    for _, buffers in run.totals.values():
        allocator.allocate(buffers)
    weights = _Weights(run, strategy, allocator)
    allocator.allocate(workspace_bytes)
    alive: dict[int, Block | None] = {}
    for part in run.trace:
        if not isinstance(part, CallMemory):
            _go_through(part, allocator, alive)
            continue
        weights.begin(part.component)
        own: dict[int, Block | None] = {}
        _go_through(part.events, allocator, own, alive, weights)
        for block in own.values():  # the output is made again by the code around the call
            allocator.free(block)
        weights.end()


class _Weights:
    """Allocates and frees a run's weights on a simulated device, when its placement would load and drop
    them.
    """

    def __init__(self, run: RunMemory, strategy: Strategy, allocator: CachingAllocator) -> None:
        self._run, self._placement, self._allocator = run, strategy.placement, allocator
        self._units: dict[str, dict[str, list[int]]] = {}
        self._here: dict[str, list[Block | None]] = {}
        self._users: dict[str, int] = {}
        self._current = ""
        for name, tensors in run.tensors.items():
            for path, sizes in tensors.items():
                if strategy.placement == "resident" or path in list_held(run.strays[name]):
                    self._load(OUTSIDE, sizes)

    def begin(self, component: str) -> None:
        """Begin a component's call: load the weights that it needs throughout."""
        name = name_component(component)
        self._current, before = name, self._current
        if self._placement == "resident":
            return
        if self._placement != "component":
            self.enter("")
        elif before != name:
            self._drop("")
            tensors, held = self._run.tensors[name], list_held(self._run.strays[name])
            self._load("", [x for path in tensors if path not in held for x in tensors[path]])

    def end(self) -> None:
        """End a call: drop the weights that were loaded for all of it."""
        if self._placement == "block":
            self.leave("")

    def enter(self, path: str) -> None:
        """Enter a module: load its weights unless they are in use."""
        if (sizes := self._find_units().get(path)) is not None:
            self._users[path] = self._users.get(path, 0) + 1
            if self._users[path] == 1:
                self._load(path, sizes)

    def leave(self, path: str) -> None:
        """Leave a module: drop its weights after their last user."""
        if self._users.get(path):
            self._users[path] -= 1
            if not self._users[path]:
                self._drop(path)

    def _find_units(self) -> dict[str, list[int]]:
        """Map the path of each group of weights that is loaded together to the bytes of its tensors."""
        name = self._current
        if self._placement in ("resident", "component"):
            return {}
        if name not in self._units:
            run, tensors = self._run, self._run.tensors[name]
            groups = group_weights(
                run.weights[name], run.blocks[name], run.strays[name], self._placement
            )
            self._units[name] = {
                unit: [size for path in paths for size in tensors.get(path, ())]
                for unit, paths in groups.items()
            }
        return self._units[name]

    def _load(self, unit: str, sizes: Iterable[int]) -> None:
        here = self._here.setdefault(unit, [])
        for size in sizes:
            here.append(self._allocator.allocate(size))
            if self._placement != "resident" and size > PIECE_BYTES:
                self._allocator.free(self._allocator.allocate(PIECE_BYTES))

    def _drop(self, unit: str) -> None:
        for block in self._here.pop(unit, ()):
            self._allocator.free(block)


def _go_through(
    events: Iterable[Event],
    allocator: CachingAllocator,
    own: dict[int, Block | None],
    outer: dict[int, Block | None] | None = None,
    weights: _Weights | None = None,
) -> None:
    """Replay recorded allocations and frees in a simulated allocator.

    Args:
        own: storage number → block of the storages that these events allocate; holds those still alive.
        outer: storage number → block of the storages that were allocated earlier.
        weights: loads and drops weights where modules are entered and left; None ignores modules.
    """
    for what, size in events:
        if isinstance(what, str):
            if weights is not None:
                (weights.enter if size else weights.leave)(what)
        elif size:
            own[what] = allocator.allocate(size)
        elif what in own:
            allocator.free(own.pop(what))
        elif outer is not None and what in outer:
            allocator.free(outer.pop(what))

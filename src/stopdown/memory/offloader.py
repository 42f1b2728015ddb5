"""`Offloader`: run a pipeline with a memory strategy, and with a smaller one after an out-of-memory error.

The call that failed is run again with the same arguments; earlier results stay. The smaller strategy
applies to the rest of the run. The weights of a group (a component, a block, a layer) stay in a store
(`weight_stores`) until they are needed.

**Catches** out-of-memory errors inside of component calls.

**Does not catch** those outside of calls, a process that the system kills instead of refusing memory, and
code that reads the values of a module's weights outside of its `forward` where the dry run did not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stopdown.component_calls.components import find_callees, find_components, list_block_paths
from stopdown.devices.device_memory import free_memory
from stopdown.errors import StopdownError, take_one_line
from stopdown.interception.patches import Patches
from stopdown.memory.forecast import (
    USABLE_SHARE,
    Fit,
    Room,
    choose_prediction,
    find_smallest,
    predict_all,
    sort_by_time,
)
from stopdown.memory.run_memory import LISTS, weigh
from stopdown.memory.smaller_calls import put_variant
from stopdown.memory.speed import Speed
from stopdown.memory.strategies import (
    Placement,
    Prediction,
    Strategy,
    group_weights,
    list_held,
)
from stopdown.memory.weight_stores import WeightGroup, WeightStore
from stopdown.module_calls.callee import Callee
from stopdown.number_formats import format_bytes, list_all, name_dtype
from stopdown.out_of_memory import is_out_of_memory
from stopdown.pipelines.skeletons import copy_skeleton
from stopdown.records import StepDown
from stopdown.scaling import ComponentCall, Rank, intercept

MOST_STEPS_DOWN = 4
"""How often one call may be tried again with a smaller strategy."""


class Offloader:
    """A context manager that offloads a pipeline's weights, and undoes everything at exit.

    Attributes:
        taken: the prediction of the strategy in use.
        steps_down: for each call that ran out of memory, the strategies before and after.
    """

    def __init__(
        self,
        pipe: Any,
        taken: Prediction,
        others: Sequence[Prediction],
        strays: Mapping[str, Mapping[str, frozenset[str]]],
        *,
        device: str = "cpu",
        store: Path | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare to offload a pipeline's weights; entering the context does it.

        Args:
            pipe: a pipeline whose weights are in host memory, or on the device already.
            taken: prediction of the strategy to begin with.
            others: predictions of the strategies to fall back to; only smaller ones are tried.
            strays: component → module path → modules that read its weights while it doesn't run.
            device: where calls run.
            store: folder for offloaded weights; None keeps them in host memory.
        """
        self.pipe, self.taken = pipe, taken
        self.steps_down: list[StepDown] = []
        self._others, self._strays = tuple(others), strays
        self._store = WeightStore(device, store)
        self._announce = announce or (lambda text: None)
        self._callees, self._on = Patches(), Patches()

    def __enter__(self) -> Offloader:
        try:
            for callee in find_callees(self.pipe):
                intercept(callee, self._call, self._callees, Rank.MEMORY)
            self._put_on(self.taken)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._on.undo()
        self._store.close()
        self._callees.undo()

    def _put_on(self, prediction: Prediction) -> None:
        self._on.undo()
        self._on, strategy = Patches(), prediction.strategy
        put_variant(self.pipe, strategy, self._on)
        put_placement(self.pipe, strategy, self._strays, self._store, self._on)
        self.taken = prediction

    def _call(self, call: ComponentCall) -> Any:
        """Run a call with its weights on the device; use a smaller strategy each time memory runs out."""
        for _ in range(MOST_STEPS_DOWN):
            try:
                return self._store.run_call(call)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                text = take_one_line(error, 200)
            self._step_down(
                call.callee, text
            )  # outside: the error holds the values of the failed call
        return self._store.run_call(call)

    def _step_down(self, callee: Callee, text: str) -> None:
        """Switch to the next strategy that needs less memory, and record the step.

        Raises:
            StopdownError: the current strategy is the smallest.
        """
        free_memory()
        before = self.taken
        smaller = [other for other in self._others if other.needed_bytes < before.needed_bytes]
        if not smaller:
            raise StopdownError(
                f"{callee.name} ran out of memory with the smallest strategy, "
                f"{before.strategy.name}: {text}",
                expected=f"It was predicted to take {format_bytes(before.needed_bytes)}, and so does "
                "the whole run at least.",
                remedy="Use a smaller `height` and `width`, fewer `frames`, a 16-bit `precision`, "
                f"or a device with more than {format_bytes(before.needed_bytes)} free.",
            )
        self._put_on(smaller[0])
        name = self.taken.strategy.name
        self.steps_down.append(StepDown(callee.name, before.strategy.name, name, text))
        self._announce(
            f"{callee.name} ran out of memory with {before.strategy.name}; its call is run again "
            f"with {name}, which is predicted to take {format_bytes(self.taken.needed_bytes)}."
        )


def predict_run(
    pipe: Any,
    arguments: dict[str, Any],
    *,
    steps: int,
    fused: bool,
    speed: Speed | None = None,
    device: str = "cpu",
    workspace_bytes: int | None = None,
) -> Fit:
    """Predict the memory and time of a pipeline's run under every strategy, by dry runs; the fastest
    comes first.

    Args:
        fused: whether attention runs in a kernel that keeps no score matrix.
        speed: of the device; if None, strategies are ordered by what they usually cost.
        workspace_bytes: of cuBLAS, from `find_workspace`; None if the device's allocator reserves nothing.
    """
    skeleton = copy_skeleton(pipe)
    skeleton.set_progress_bar_config(disable=True)
    predicted = predict_all(
        skeleton,
        arguments,
        steps=steps,
        fused=fused,
        on_cpu=device.startswith("cpu"),
        room=Room(workspace_bytes=workspace_bytes),
    )
    return sort_by_time(predicted, speed)


def make_offloader(
    pipe: Any,
    fit: Fit,
    limit_bytes: int,
    *,
    device: str = "cpu",
    store: Path | None = None,
    announce: Callable[[str], None] | None = None,
) -> Offloader:
    """Make an offloader with the fastest strategy that stays within a limit.

    Args:
        fit: predictions of all strategies.

    Raises:
        StopdownError: no strategy fits.
    """
    chosen = choose_prediction(fit, limit_bytes)
    if chosen is None:
        raise _describe_misfit(fit, limit_bytes, f"on {device} in {_list_formats(pipe)}")
    return Offloader(
        pipe,
        chosen,
        fit.predictions,
        fit.strays,
        device=device,
        store=store,
        announce=announce,
    )


_BETWEEN = "between the calls of components, where the pipeline holds its result in full size"


def _list_formats(pipe: Any) -> str:
    """List the formats of a pipeline's weights, the one with most bytes first."""
    sizes: dict[str, int] = {}
    for module in find_components(pipe).values():
        for tensor in module.parameters():
            if tensor.is_floating_point():
                name = name_dtype(tensor.dtype)
                sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return list_all(sorted(sizes, key=lambda name: -sizes[name]))


def _describe_misfit(fit: Fit, limit_bytes: int, where: str) -> StopdownError:
    least = find_smallest(fit)
    return StopdownError(
        f"No strategy stays within {format_bytes(limit_bytes)} {where}: the smallest strategy, "
        f"{least.strategy.name}, is predicted to take {format_bytes(least.needed_bytes)} "
        f"{f'during a call of {least.component}' if least.component else _BETWEEN}.",
        expected=f"A predicted peak may be at most {100 * USABLE_SHARE:.0f} % of the limit.",
        remedy="Use a smaller `height` and `width`, fewer `frames`, a 16-bit "
        f'`precision`, or memory="{math.ceil(least.needed_bytes / USABLE_SHARE / 2**20)}MiB".',
    )


def put_placement(
    pipe: Any,
    strategy: Strategy,
    strays: Mapping[str, Mapping[str, frozenset[str]]],
    store: WeightStore,
    patches: Patches,
) -> None:
    """Offload a pipeline's weights, and hook its modules so that they load them when they run.

    Undoing `patches` removes the hooks; `WeightStore.close` restores the weights. Every call of a component
    has to go through `WeightStore.run_call`. Weights that an earlier strategy offloaded stay in the store.

    Args:
        strays: component → module path → modules that read its weights while it doesn't run.
    """
    store.clear()
    for name, module in find_components(pipe).items():
        own = strays.get(name, {})
        _follow_casts(module, store, patches)
        if strategy.placement == "resident":
            store.bring(module.parameters())
            store.move_buffers(module)
            continue
        store.serve(module, patches)
        held = list_held(own)
        for path, part in module.named_modules():
            if path in held:
                store.bring(part.parameters(recurse=False))
        store.move_buffers(module)
        for group in _make_groups(module, strategy.placement, own, store):
            store.keep(name, group, strategy.placement)
            if group.path:
                enter = group.module.register_forward_pre_hook(group.on_enter, prepend=True)
                patches.defer(enter.remove)  # in front of hooks that read weights, as weight_norm's
                leave = group.module.register_forward_hook(group.on_leave, always_call=True)
                patches.defer(leave.remove)


def _follow_casts(module: torch.nn.Module, store: WeightStore, patches: Patches) -> None:
    """Let a pipeline cast an offloaded component: replace its `.to` by one that casts stored weights."""
    plain = module.to

    @functools.wraps(plain)
    def to(*args: Any, **kwargs: Any) -> Any:
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        if dtype is not None:
            store.cast(module, dtype)
        return plain(*args, **kwargs)

    patches.set_attribute(module, "to", to)


def _make_groups(
    module: torch.nn.Module,
    placement: Placement,
    strays: Mapping[str, frozenset[str]],
    store: WeightStore,
) -> Iterable[WeightGroup]:
    """Yield the groups of one component's weights that are loaded together.

    Args:
        strays: module path → modules that read its weights while it doesn't run.
    """
    parts = dict(module.named_modules(remove_duplicate=False))  # one may have several paths
    groups = group_weights(weigh(module), list_block_paths(module, LISTS), strays, placement)
    for group, paths in groups.items():
        tensors = [x for path in paths for x in parts[path].parameters(recurse=False)]
        yield WeightGroup(group, parts[group], tensors, store)

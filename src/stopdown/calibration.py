"""Ranges of a component over the calls of a run: prompts, steps, guidance branches, resolutions.

Each call is run once more as its captured graph in fp32, and of every value only three figures are
kept, so that no more than the component and one call are in memory. Calls of one kind (the same
method, sizes and options) share a capture and merge their figures; kinds of different lengths stay
apart as values and meet in the parameters, where the solver sees them together.

**Catches** what the calibrating calls reach.
**Does not catch** what other prompts reach: a calibrated plan keeps headroom and says that it rests
on measurements.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from stopdown.autocast import without_autocast
from stopdown.graph.capture import owner_of
from stopdown.patches import Patches
from stopdown.pipelines.call_interception import sign_arguments
from stopdown.records import Scaling
from stopdown.scaling import Measured, find_scaling, measure_again, measure_call


class Calibration:
    """What the calls of one module have reached so far."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype = torch.float16) -> None:
        self.module, self.dtype = module, dtype
        self._kinds: dict[Hashable, Measured] = {}
        self.calls = 0

    def observe(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Measure one call of the module, or of a method of it, and merge what it reached.

        Raises:
            CaptureError: the code cannot be traced.
            ScalingError: a weight or an output is NaN or Inf in fp32.

        Cost: one forward in fp32; for the first call of a kind a capture as well (seconds).
        """
        kind = _kind_of(call, args, kwargs or {})
        with without_autocast():
            self._measure(kind, call, args, kwargs or {})
        self.calls += 1

    def _measure(
        self,
        kind: Hashable,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        known = self._kinds.get(kind)
        if known is None:
            self._kinds[kind] = measure_call(call, args, kwargs, dtype=self.dtype)
        else:
            self._kinds[kind] = measure_again(known, self.module, args, kwargs)

    @property
    def measured(self) -> list[Measured]:
        """One entry for each kind of call, its ranges merged over the calls."""
        return list(self._kinds.values())

    def find_scaling(self) -> Scaling:
        """The cheapest exponents that keep everything measured so far in range.

        Raises:
            ScalingError: there are none.
        """
        return find_scaling(self.module, self.measured)


@contextlib.contextmanager
def calibrating(
    module: torch.nn.Module,
    methods: tuple[str, ...] = ("forward",),
    *,
    dtype: torch.dtype = torch.float16,
) -> Iterator[Calibration]:
    """Observe every call of a module's methods while a pipeline runs; nothing stays behind.

    Args:
        methods: `("forward",)`, or `("encode", "decode")` for a VAE.
    """
    calibration, patches = Calibration(module, dtype), Patches()
    watched = {name: _watch_method(calibration, module, name) for name in methods}

    def put_on() -> None:
        for name, make in watched.items():
            patches.set_attribute(module, name, make(patches.undo, put_on))

    with patches:
        put_on()
        yield calibration


def _watch_method(
    calibration: Calibration, module: torch.nn.Module, name: str
) -> Callable[[Callable[[], None], Callable[[], None]], Callable[..., Any]]:
    """Makes the observed form of a method, given what takes all of them off and puts them on.

    They are off while a call is observed: a capture copies the module and must find it bare.
    """
    original = getattr(module, name)

    def make(take_off: Callable[[], None], put_on: Callable[[], None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            take_off()
            try:
                calibration.observe(module if name == "forward" else original, args, kwargs)
                return original(*args, **kwargs)
            finally:
                put_on()

        return observed

    return make


def _kind_of(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Hashable:
    """What two calls must share to have the same graph."""
    name = "forward" if call is owner_of(call) else getattr(call, "__name__", "")
    return name, sign_arguments(args, kwargs)

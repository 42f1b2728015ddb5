"""Whether calls under a plan stay within what was measured; reported once, without waiting for a device.

The largest magnitudes of a call's arguments and outputs are found on the device. On a processor they are
read at once; elsewhere they are copied while the program goes on, and read at a later call.

**Catches** arguments that are larger than measured by more than the plan's headroom; outputs that are not
finite.
**Does not catch** values inside that leave fp16 from smaller arguments and come out finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.numerics import bound_values, is_readable, iterate_tensors
from stopdown.scaling.calls.call import is_kept, is_mask
from stopdown.scaling_records import Scaling

_REMEDY = "Run it under the guard, stopdown.guard(pipe, plan), which repairs that."


def list_ranged(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the arguments whose magnitude matters: no times, positions and masks."""
    for name, tensor in named:
        if is_readable(tensor) and tensor.dim() > 1 and not (is_mask(name) or is_kept(name)):
            yield name, tensor


@dataclass
class RangeNotes:
    """What calls of one module reached.

    Attributes:
        name: of the component, for messages.
        scaling: knows what the measured calls reached, and the headroom.
    """

    name: str
    scaling: Scaling
    announce: Callable[[str], None]
    _said: set[str] = field(default_factory=set)
    _pending: deque[tuple[list[str], torch.Tensor, Any]] = field(default_factory=deque)

    def note(self, method: str, named: Iterable[tuple[str, torch.Tensor]], output: Any) -> None:
        """Note a call.

        Cost: two operations for each tensor; a host read on a processor alone.
        """
        given = [(f"{method}.{name}", x) for name, x in list_ranged(named)]
        given = [(place, x) for place, x in given if place in self.scaling.inputs]
        made = [x for x in iterate_tensors(output) if is_readable(x)]
        bounds = bound_values([*(x for _, x in given), *made])
        if bounds is None:
            return
        places = [*(place for place, _ in given), *[""] * len(made)]
        if bounds.device.type == "cpu":
            self._read(places, bounds)
            return
        host, event = bounds.to("cpu", non_blocking=True), torch.Event(device=bounds.device)
        event.record()
        self._pending.append((places, host, event))
        self.read(waits=False)

    def read(self, *, waits: bool) -> None:
        """Read the ranges that have arrived, or wait for all of them."""
        while self._pending:
            places, host, event = self._pending[0]
            if waits:
                event.synchronize()
            elif not event.query():
                return
            self._pending.popleft()
            self._read(places, host)

    def _read(self, places: list[str], bounds: torch.Tensor) -> None:
        largest = bounds.reshape(-1, 2).abs().amax(1).tolist()
        room = 2.0 ** max(self.scaling.headroom_bits or 0.0, 0.0)
        for place, amax in zip(places, largest, strict=False):
            reached = self.scaling.inputs.get(place)
            if reached is None and not amax < torch.inf:
                self._say("", f"`{self.name}` gave values that are not finite under its plan.")
            elif reached is not None and not amax <= reached * room:
                self._say(
                    place,
                    f"`{self.name}` was called with {place.partition('.')[2]} up to {amax:.3g}. The calls "
                    f"that its plan was measured on reached {reached:.3g}, with "
                    f"{self.scaling.headroom_bits or 0.0:.1f} bits of headroom: values inside may "
                    "leave fp16.",
                )

    def _say(self, place: str, text: str) -> None:
        if place not in self._said:
            self._said.add(place)
            self.announce(f"{text} {_REMEDY}")

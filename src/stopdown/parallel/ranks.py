"""What the ranks of one run agree on, and which of them is gone.

Ranks that make one video together must go the same way: a fault that one of them sees is a fault of all,
and a repair is put on all or none. What they decide by is reduced over the group first. When a rank ends,
the others find the connection closed; they call the roll through the group's store, and whoever does not
answer is named in one message, the same on every rank that is left.

**Catches** ranks that were started with another plan, model, precision, version or noise; a rank that was
killed, and one that raised.
**Does not catch** a rank that hangs: the group's own time limit ends the others, and then it is named.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from stopdown.component_calls.components import find_components
from stopdown.errors import InputError, RankError, StopdownError, take_one_line
from stopdown.interception.patches import Patches

_LOST = re.compile(r"gloo|nccl|connection|socket|broken pipe|peer", re.IGNORECASE)
"""Words of what PyTorch says when a rank cannot be reached any more."""

_POLL_S, _ROLL_S = 0.5, 10.0
"""How often a rank looks whether the roll is called, and how long it is waited for at most."""


class Ranks:
    """The ranks of a process group, as one of them sees them.

    Attributes:
        number: of this rank in the group, from 0.
        count: of all ranks.
    """

    def __init__(self, group: Any = None) -> None:
        """
        Args:
            group: the process group; None for that of all ranks.
        """
        self._group = group
        self.number, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._device = torch.device("cpu")
        if "cpu" not in str(dist.get_backend_config(group)):
            self._device = torch.device(torch.accelerator.current_accelerator() or "cpu")
        self._store: Any = None
        self._stop = threading.Event()

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Whether each flag is set on any rank.

        Cost: one all_reduce of so many integers, and a host read.
        """
        seen = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._group)
        return tuple(map(bool, seen.tolist()))

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, in their order; plain data or tensors on the CPU."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._group)
        return found

    def share(self, value: Any) -> Any:
        """What rank 0 gave, on every rank; values of the others are dropped."""
        found = [value]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        return found[0]

    def lead(self, action: Callable[[], Any]) -> Any:
        """What rank 0 gets of doing something that only one may do; None on the others.

        Raises:
            StopdownError: what it raised there, on every rank.
        """
        result, told = None, None
        if self.number == 0:
            try:
                result = action()
            except StopdownError as error:
                told = (type(error), error.what, error.expected, error.remedy)
        if (told := self.share(told)) is not None:
            kind, what, expected, remedy = told
            raise self.told_by_first(kind(what, expected=expected, remedy=remedy))
        return result

    def follow(self, action: Callable[[], Any]) -> Any:
        """What doing something gives, which rank 0 does first and the others then find done."""
        result = self.lead(action)
        return result if self.number == 0 else action()

    def told_by_first(self, error: StopdownError) -> StopdownError:
        """An error that every rank raises, and that only rank 0 says."""
        error.is_told_elsewhere = self.number > 0
        return error

    def refuse_differences(self, what: str, described: Mapping[str, Any], remedy: str) -> None:
        """Refuse, on every rank alike, ranks that were not started alike.

        Args:
            what: is described: "plan".
            described: name → plain value, of this rank.
            remedy: what to type.

        Raises:
            InputError: each difference to rank 0, by name.
        """
        first, *others = self.gather(dict(described))
        differences = [
            f"{name} is {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {number}"
            for number, other in enumerate(others, 1)
            for name in dict.fromkeys((*first, *other))
            if first.get(name) != other.get(name)
        ]
        if differences:
            raise self.told_by_first(
                InputError(
                    f"The ranks differ in their {what}: {'; '.join(differences)}.",
                    expected="Ranks that make one output together run the same model on the same "
                    "values.",
                    remedy=remedy,
                )
            )

    def watch(self, patches: Patches) -> None:
        """Answer when the roll is called, until `patches` is undone.

        Cost: a thread that looks into the group's store twice a second.
        """
        self._store = _open_store(self._group, next(_SESSIONS))
        self._stop.clear()
        thread = threading.Thread(target=self._answer, name="stopdown-ranks", daemon=True)
        thread.start()
        patches.defer(functools.partial(thread.join, 10 * _POLL_S))
        patches.defer(self._stop.set)

    def _answer(self) -> None:
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        while not self._stop.wait(_POLL_S):
            try:
                if store.check(["roll"]):
                    store.set(f"here/{self.number}", "")
            except Exception:  # the store went with the rank that kept it
                return

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Have what ends this rank known to the others, and what ended another one named here.

        Raises:
            RankError: a rank is gone or failed, in place of what was raised about a connection.
        """
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if isinstance(error, StopdownError) or not is_lost(error):
                with contextlib.suppress(Exception):
                    self._store.set(f"failed/{self.number}", _describe(error))
                raise
            raise self._name_lost(error) from error

    def _name_lost(self, error: Exception) -> RankError:
        """Who is gone, found once by the first rank that asks, and the same for all."""
        try:
            said = self._store.compare_set("verdict", "", f"asking {self.number}").decode()
            if said == f"asking {self.number}":
                said = self._call_roll(error)
                self._store.set("verdict", said)
                return RankError(said, is_first=True)
            ends_at = time.monotonic() + 3 * _ROLL_S
            while said.startswith("asking ") and time.monotonic() < ends_at:
                time.sleep(_POLL_S)
                said = self._store.get("verdict").decode()
            return RankError(said, is_first=False)
        except Exception:  # no store left to ask
            return RankError(
                "The rank that kept the group's store, rank 0 unless torchrun kept it, is gone, so "
                f"nothing more is known: {_describe(error)}.",
                is_first=True,
            )

    def _call_roll(self, error: Exception) -> str:
        others = [number for number in range(self.count) if number != self.number]
        self._store.set("roll", "")
        ends_at = time.monotonic() + _ROLL_S
        missing = others
        while missing and time.monotonic() < ends_at:
            time.sleep(_POLL_S)
            for number in others:
                if self._store.check([f"failed/{number}"]):
                    text = self._store.get(f"failed/{number}").decode()
                    return (
                        f"Rank {number} of {self.count} failed, so the others were stopped: {text}."
                    )
            missing = [number for number in others if not self._store.check([f"here/{number}"])]
        if not missing:
            return f"The ranks lost their connection, and all still run: {_describe(error)}."
        named = ", ".join(map(str, missing))
        subject = (
            f"Ranks {named} of {self.count} are"
            if missing[1:]
            else f"Rank {named} of {self.count} is"
        )
        return (
            f"{subject} gone: killed, out of memory or disconnected. The other ranks were stopped."
        )


def is_lost(error: Exception) -> bool:
    """Whether an exception says that another rank cannot be reached."""
    return isinstance(error, dist.DistError) or bool(_LOST.search(str(error)))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {take_one_line(error, 300)}"


_SESSIONS = itertools.count()
"""Counted alike on all ranks, because guards are put on by all of them."""


def _open_store(group: Any, session: int) -> Any:
    """The store of the group's ranks, with keys of their own."""
    ranks = "-".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"stopdown/{ranks}/{session}", store)


def find_group(pipe: Any) -> tuple[Any] | None:
    """The process group over which calls of a pipeline's components are spread; None for one alone.

    Returns:
        The group in a tuple, because None is the group of all ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    parts = [vars(part) for part in find_components(pipe).values()]
    for part in parts:
        if (group := part.get(GROUP)) is not None:
            return (group,)
    for part in parts:
        config = getattr(part.get("_parallel_config"), "context_parallel_config", None)
        if config is not None:
            return (config._flattened_mesh.get_group(),)
    return None


GROUP = "stopdown_group"
"""Attribute of a component that is spread by Stopdown alone: its process group."""

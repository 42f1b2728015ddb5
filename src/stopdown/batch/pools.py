"""Workers of one machine: in this process, or in processes of their own, one for each device."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

from stopdown.batch.jobs import Task
from stopdown.batch.limits import MOST_EARLY_DEATHS
from stopdown.batch.settings import Job
from stopdown.batch.stores import Store, check_probe
from stopdown.batch.worker import Answer, Worker
from stopdown.errors import StopdownError
from stopdown.records import Plan
from stopdown.runtime.guard import Observer


@dataclass(frozen=True)
class Died:
    """A worker ended while it had a task.

    Attributes:
        reason: what is known of it, as a sentence.
    """

    reason: str


Event = tuple[int, Answer | Died]
"""The number of a worker, and what it answered or that it died; a new one stands in its place."""


class Pool(Protocol):
    """Workers that take one task at a time; a context manager that ends them.

    Attributes:
        devices: what each worker computes on, by its name.
    """

    devices: dict[str, str]

    def __enter__(self) -> Pool:
        """Begin the workers; raises `StopdownError` for one that cannot work."""

    def __exit__(self, *_: object) -> None:
        """End them."""

    def find_free(self) -> int | None:
        """A worker without a task; None when all are busy."""

    def give(self, worker: int, task: Task, plan: Plan | None) -> None:
        """Have a worker make a task."""

    def wait(self) -> list[Event]:
        """What happened since; waits up to a second, so that signals are heard."""


class InProcess:
    """One worker, in this process: nothing is started, and an item is made while `wait` waits."""

    def __init__(self, job: Job, device: str, observer: Observer | None = None) -> None:
        self._job, self._device, self._observer = job, device, observer
        self._given: tuple[Task, Plan | None] | None = None
        self._worker: Worker | None = None
        self.devices: dict[str, str] = {}

    def __enter__(self) -> InProcess:
        self._worker = Worker(self._job, self._device)
        self._worker.observer = self._observer
        self.devices = {"0": str(self._worker.device)}
        return self

    def __exit__(self, *_: object) -> None:
        self._worker = None

    def find_free(self) -> int | None:
        """The worker, when it has no task."""
        return 0 if self._given is None else None

    def give(self, worker: int, task: Task, plan: Plan | None) -> None:
        """Keep a task for `wait`."""
        self._given = (task.complete(), plan)

    def wait(self) -> list[Event]:
        """Make the task."""
        given, self._given = self._given, None
        if given is None or self._worker is None:
            return []
        return [(0, self._worker.make(*given))]


def refuse_deaths(deaths: int, reason: str) -> None:
    """End a batch whose workers die before they begin.

    Raises:
        StopdownError: too many did, one after the other.
    """
    if deaths >= MOST_EARLY_DEATHS:
        raise StopdownError(
            f"{deaths} workers died one after the other before they had begun. {reason}",
            expected="Finished items are kept, and the same command continues from there.",
            remedy="Run stopdown doctor, or one item with stopdown generate, to see why.",
        )


@dataclass
class _Child:
    """A process with a worker in it, and what it is doing: `opening`, `free` or `busy`.

    Attributes:
        deaths: of those before it in its place, in a row, that had not begun.
        known: seals of the plans that it has.
    """

    process: Any
    pipe: Any
    deaths: int = 0
    state: str = "opening"
    known: set[str] = field(default_factory=set)


class Processes:
    """Processes of this machine, one for each device that is named.

    Args:
        job: shared by all.
        devices: as for `choose_device`; one named twice has two processes.
        store: where whoever gives the tasks looks for what workers write.
    """

    def __init__(self, job: Job, devices: list[str], store: Store) -> None:
        self._job, self._wanted, self._store = job, devices, store
        self._context = multiprocessing.get_context("spawn")
        self._children: list[_Child] = []
        self.devices: dict[str, str] = {}

    def __enter__(self) -> Processes:
        try:
            self._children = [self._begin(number) for number in range(len(self._wanted))]
            while any(child.state == "opening" for child in self._children):
                self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.pipe.close()  # one that is idle ends by itself
        for child in self._children:
            child.process.join(5 if child.state == "free" else 0)
            child.process.kill()
            child.process.join(10)

    def _begin(self, number: int, deaths: int = 0) -> _Child:
        ours, theirs = self._context.Pipe()
        share = (len(self._wanted), self._wanted.count(self._wanted[number]))
        process = self._context.Process(
            target=_serve,
            args=(theirs, self._job, self._wanted[number], share),
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Child(process, ours, deaths)

    def find_free(self) -> int | None:
        """The first process that has begun and has no task."""
        return next((n for n, child in enumerate(self._children) if child.state == "free"), None)

    def give(self, worker: int, task: Task, plan: Plan | None) -> None:
        """Send a task; a plan is sent once, and named by its seal from then on."""
        child = self._children[worker]
        seal = plan.seal if plan else ""
        is_new = bool(seal) and seal not in child.known
        child.known.add(seal)
        child.state = "busy"
        with contextlib.suppress(OSError):  # it died meanwhile, which `wait` finds
            child.pipe.send((task.complete(), seal, plan if is_new else None))

    def wait(self) -> list[Event]:
        """Answers, and the deaths of busy processes; new ones begin in the places of the dead."""
        waited = {x.pipe: n for n, x in enumerate(self._children) if x.state != "free"}
        ready = multiprocessing.connection.wait(list(waited), timeout=1.0)
        events = [self._hear(waited[pipe]) for pipe in ready]
        return [event for event in events if event is not None]

    def _hear(self, number: int) -> Event | None:
        child = self._children[number]
        try:
            said = child.pipe.recv()
        except (EOFError, OSError):
            return self._replace(number)
        if isinstance(said, StopdownError):
            raise said
        child.state = "free"
        if isinstance(said, Answer):
            return number, said
        self.devices[str(number)], probe = said
        check_probe(self._store, probe, f"Worker {number}")
        return None

    def _replace(self, number: int) -> Event | None:
        child = self._children[number]
        child.process.join(10)
        code = child.process.exitcode
        child.pipe.close()
        how = signal.Signals(-code).name if code and code < 0 else f"code {code}"
        reason = f"Worker {number} ended with {how}."
        was_busy = child.state == "busy"
        deaths = 0 if was_busy else child.deaths + 1
        refuse_deaths(deaths, reason)
        self._children[number] = self._begin(number, deaths)
        return (number, Died(reason)) if was_busy else None


def _serve(pipe: Any, job: Job, device: str, share: tuple[int, int]) -> None:
    """What a process does: one task after the other, until whoever gives them is gone.

    Args:
        share: how many processes there are, and how many on this device.
    """
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // share[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is heard by whoever gives the tasks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        worker = Worker(job, device, share[1])
        pipe.send((str(worker.device), worker.write_probe()))
        plans: dict[str, Plan | None] = {"": None}
        while True:
            task, seal, plan = pipe.recv()
            if plan is not None:
                plans = {"": None, **plans, seal: plan}
            pipe.send(worker.make(task, plans[seal]))
    except StopdownError as error:
        pipe.send(error)
    except (EOFError, BrokenPipeError):  # nobody gives tasks any more
        pass


def _end_with_parent() -> None:
    """End this process when the one that began it is gone, also in the middle of an item."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

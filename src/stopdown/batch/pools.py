"""Pools of workers on this machine: one worker in this process, or several, each in its own process."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, Self

from stopdown.batch.jobs import Job, Task
from stopdown.batch.records import MOST_EARLY_DEATHS
from stopdown.batch.worker import LostDeviceError, TaskResult, Worker
from stopdown.devices.environment import copy_variables, put_variables
from stopdown.errors import StopdownError
from stopdown.records import Plan
from stopdown.runtime.guard import Observer

_PRELOADED = ("stopdown.batch.worker", "diffusers.pipelines.pipeline_utils")

Event = tuple[int, TaskResult | str]
"""Number of a worker, and its result; or, if it died and was replaced, a sentence that says how it died."""


class InProcess:
    """Pool of one worker in this process; `wait` makes the item that `give` stored."""

    def __init__(self, job: Job, device: str, observer: Observer | None = None) -> None:
        self._job, self._device, self._observer = job, device, observer
        self.devices: dict[str, str] = {}
        self._given: tuple[Task, Plan | None] | None = None
        self._worker: Worker | None = None

    def __enter__(self) -> Self:
        self._worker = Worker(self._job, self._device)
        self._worker.observer = self._observer
        self.devices = {"0": str(self._worker.device)}
        return self

    def __exit__(self, *_: object) -> None:
        self._worker = None

    def find_free(self) -> int | None:
        return 0 if self._given is None else None

    def give(self, worker: int, task: Task, plan: Plan | None) -> None:
        self._given = (task.complete(), plan)

    def wait(self) -> list[Event]:
        given, self._given = self._given, None
        if given is None or self._worker is None:
            return []
        try:
            return [(0, self._worker.make(*given))]
        except LostDeviceError as error:
            raise StopdownError(
                f"{self._worker.device} stopped computing: {error}",
                expected="Finished items are kept, and the same command continues from there.",
                remedy="Run the command again, and stopdown doctor if that ends here as well.",
            ) from error


@dataclass
class Slot:
    """A worker process and its state.

    Attributes:
        worker: the process.
        channel: this end of its pipe.
        state: `opening` (loading), `free` or `busy`.
        deaths: how many predecessors in a row died before they had a task.
        known: checksums (`Plan.seal`) of the plans that were sent to it.
    """

    worker: Any
    channel: Any
    state: str = "opening"
    deaths: int = 0
    known: set[str] = field(default_factory=set)


class Processes:
    """Pool of worker processes that make one task at a time; a context manager starts and ends them.

    A process that dies is replaced.

    Args:
        devices: device of each process, as for `choose_device`; the same one may be listed twice.
    """

    def __init__(self, job: Job, devices: list[str]) -> None:
        self._job, self._wanted = job, devices
        self._slots: list[Slot] = []
        self._context = _choose_context(devices)
        self.devices: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            self._slots = [self._begin(number) for number in range(len(self._wanted))]
            while any(slot.state == "opening" for slot in self._slots):
                self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for slot in self._slots:
            slot.channel.close()  # one that is idle ends by itself
        for slot in self._slots:
            slot.worker.join(5 if slot.state == "free" else 0)
            slot.worker.kill()
            slot.worker.join(10)

    def find_free(self) -> int | None:
        """Return the number of an idle worker; None if all are busy."""
        return next((n for n, slot in enumerate(self._slots) if slot.state == "free"), None)

    def give(self, worker: int, task: Task, plan: Plan | None) -> None:
        """Send a task to a worker; each plan is sent once, and later tasks refer to it by its checksum."""
        slot = self._slots[worker]
        seal = plan.seal if plan else ""
        is_new = bool(seal) and seal not in slot.known
        message = task.complete(), seal, plan if is_new else None  # raises a picture's errors
        slot.known.add(seal)
        slot.state = "busy"
        with contextlib.suppress(OSError):  # it died meanwhile, which `wait` finds
            slot.channel.send(message)

    def wait(self) -> list[Event]:
        """Return the events since the last call, after at most a second, so that signals can be handled."""
        waited = {slot.channel: n for n, slot in enumerate(self._slots) if slot.state != "free"}
        ready = multiprocessing.connection.wait(list(waited), timeout=1.0)
        events = [self._hear(waited[pipe]) for pipe in ready]
        return [event for event in events if event is not None]

    def _hear(self, number: int) -> Event | None:
        """Receive a message from a worker: its first one names its device, later ones are results.

        A worker that died is replaced. Returns None for a device, or for a death without a task.

        Raises:
            StopdownError: the worker could not start and sent this error, or too many died.
        """
        slot = self._slots[number]
        try:
            said = slot.channel.recv()
        except (EOFError, OSError):
            slot.worker.join(10)
            code = slot.worker.exitcode
            slot.channel.close()
            how = signal.Signals(-code).name if code and code < 0 else f"code {code}"
            return self._replace(number, f"Worker {number} ended with {how}.")
        if isinstance(said, StopdownError):
            raise said
        slot.state = "free"
        if isinstance(said, TaskResult):
            return number, said
        self.devices[str(number)] = said
        return None

    def _replace(self, number: int, reason: str) -> Event | None:
        """Start a new worker in place of a dead one; return an event if the dead one had a task.

        Raises:
            StopdownError: too many workers died in a row before they had a task.
        """
        was_busy = self._slots[number].state == "busy"
        deaths = 0 if was_busy else self._slots[number].deaths + 1
        if deaths >= MOST_EARLY_DEATHS:
            raise StopdownError(
                f"{deaths} workers died one after the other before they had begun. {reason}",
                expected="Finished items are kept, and the same command continues from there.",
                remedy="Run stopdown doctor, or one item with stopdown generate, to see why.",
            )
        self._slots[number] = dataclasses.replace(self._begin(number), deaths=deaths)
        return (number, reason) if was_busy else None

    def _begin(self, number: int) -> Slot:
        ours, theirs = self._context.Pipe()
        share = (len(self._wanted), self._wanted.count(self._wanted[number]))
        arguments = (theirs, self._job, self._wanted[number], share, copy_variables())
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return Slot(process, ours)


Pool = InProcess | Processes


def _choose_context(devices: list[str]) -> Any:
    """Return the `multiprocessing` context that starts worker processes.

    CPU workers on Linux are forked from a server that has imported everything once. Other workers are
    spawned, since device drivers do not survive a fork and an import can initialise them.
    """
    if set(devices) != {"cpu"} or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # it imports, and should not tell of Ctrl-C
        multiprocessing.forkserver.ensure_running()
        signal.signal(signal.SIGINT, before)
    return context


def _serve(
    pipe: Any, job: Job, device: str, share: tuple[int, int], variables: dict[str, str]
) -> None:
    """Run the tasks of a worker process one after the other, until the parent process ends.

    Args:
        share: number of worker processes, in total and on this device.
        variables: environment variables to set.
    """
    import torch

    put_variables(variables)
    torch.set_num_threads(max(1, torch.get_num_threads() // share[0]))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is handled by the process that gives the tasks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        worker = Worker(job, device, share[1])
        pipe.send(str(worker.device))
        plans: dict[str, Plan | None] = {"": None}
        while True:
            task, seal, plan = pipe.recv()
            if plan is not None:
                plans = {"": None, **plans, seal: plan}
            pipe.send(worker.make(task, plans[seal]))
    except StopdownError as error:
        pipe.send(error)
    except LostDeviceError as error:  # a new process has the device again
        sys.exit(f"stopdown: {device} stopped computing: {error}")
    except (EOFError, BrokenPipeError):  # no more tasks are given
        pass


def _end_with_parent() -> None:
    """Wait until the parent process ends, then exit at once, even in the middle of an item."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

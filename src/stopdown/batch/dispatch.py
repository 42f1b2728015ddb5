"""Giving out the items of a batch: each to a free worker, again when the worker died, up to a limit.

Not covered: an item that never ends.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from stopdown.batch.jobs import Task
from stopdown.batch.plan_versions import PlanVersions
from stopdown.batch.pools import Pool
from stopdown.batch.records import MOST_DEATHS, TRIES, ItemResult
from stopdown.batch.worker import Answer, begin_result
from stopdown.errors import StopdownError


@dataclass
class Dispatch:
    """The items of a batch while they are given out.

    Attributes:
        tries: how often an item is begun at most.
    """

    pool: Pool
    versions: PlanVersions
    note: Callable[[str], None]
    tries: int = TRIES
    _begun: Counter[str] = field(default_factory=Counter)
    _given: dict[int, Task] = field(default_factory=dict)
    _deaths: int = 0

    def run(self, tasks: Iterable[Task]) -> Iterator[ItemResult]:
        waiting = deque(tasks)
        while waiting or self._given:
            while waiting and (worker := self.pool.find_free()) is not None:
                task = waiting.popleft()
                self._begun[task.item] += 1
                self._given[worker] = task
                self.pool.give(worker, task, self.versions.current)
            for worker, said in self.pool.wait():
                task = self._given.pop(worker)
                if isinstance(said, Answer):
                    yield self._take(task, said)
                elif (failed := self._mourn(task, said)) is not None:
                    yield failed
                else:
                    waiting.appendleft(task)

    def _take(self, task: Task, answer: Answer) -> ItemResult:
        self._deaths = 0
        for text in answer.notes:
            self.note(text)
        if answer.updated is not None and self.versions.offer(answer.result.plan, answer.updated):
            self.note(
                f"The plan has a new version, {self.versions.plans[-1].seal[:12]}, with what "
                f"{task.name} needed; it makes the items that follow."
            )
        return dataclasses.replace(answer.result, tries=self._begun[task.item])

    def _mourn(self, task: Task, reason: str) -> ItemResult | None:
        """The result of an item that was tried often enough; None when it is to be tried again."""
        self._deaths += 1
        tries = self._begun[task.item]
        self.note(f"{reason} It was making {task.name}.")
        if self._deaths >= MOST_DEATHS:
            raise StopdownError(
                f"{self._deaths} workers died one after the other without finishing an item.",
                expected="Finished items are kept, and the same command continues from there.",
                remedy="Make one item with stopdown generate to see why.",
            )
        if tries < self.tries:
            return None
        said = f"Each of {tries} workers that tried it died. {reason}"
        return begin_result(task, "failed", error=said, tries=tries)

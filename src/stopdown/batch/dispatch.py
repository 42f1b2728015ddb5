"""Dispatch of batch items to free workers, with a limited number of retries if a worker dies.

Repairs by one worker are merged into a new version of the plan, which all workers use from their next item
on. Each version is written into the batch's folder, so that the plan of a record can be looked up by its
seal (a hash of its content), and a continued batch uses the latest version. If two workers repair the same
component, the first repair is kept.

Not covered: an item that never ends.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stopdown.batch.jobs import Task
from stopdown.batch.output_folder import PLAN_NAME, write_whole
from stopdown.batch.pools import Pool
from stopdown.batch.records import MOST_DEATHS, TRIES, ItemResult
from stopdown.batch.worker import TaskResult, begin_result
from stopdown.errors import PlanError, StopdownError
from stopdown.plans.plan_files import read_plan, seal_plan
from stopdown.records import Plan, to_json


def read_versions(folder: Path, names: set[str]) -> list[list[Plan]]:
    """Read the plans of earlier batches in a folder: for each initial plan, a list of its versions.

    Args:
        names: files in the folder; those without a readable plan are skipped.
    """
    found: dict[str, list[tuple[int, Plan]]] = {}
    for name in sorted(names):
        matched = PLAN_NAME.fullmatch(name)
        plan = _read(folder / name) if matched else None
        if matched and plan is not None:
            found.setdefault(matched[1], []).append((int(matched[2]), plan))
    chains = [[plan for _, plan in sorted(x, key=lambda y: y[0])] for x in found.values()]
    return [chain for chain in chains if chain]


def _read(path: Path) -> Plan | None:
    try:
        return read_plan(path)
    except PlanError:
        return None


class PlanVersions:
    """Versions of a batch's plan, saved in its folder; the repairs that an item needed make a new one.

    Args:
        base: initial plan of the batch; None for a batch without a plan.
        known: versions by earlier batches in the folder, as returned by `read_versions`.

    Attributes:
        plans: all versions; the last one is in use.
    """

    def __init__(self, folder: Path, base: Plan | None, known: list[list[Plan]]) -> None:
        self._folder = folder
        self.plans: list[Plan] = [] if base is None else [base]
        for chain in known:
            if base is not None and chain[0].seal == base.seal:
                self.plans = chain
                return
        if base is not None:
            self._keep()

    @property
    def current(self) -> Plan | None:
        return self.plans[-1] if self.plans else None

    def offer(self, made_by: str, updated: Plan) -> bool:
        """Merge the repairs that an item needed into the plan; return whether this made a new version.

        Args:
            made_by: checksum (`Plan.seal`) of the plan with which the item was made.
            updated: that plan with the item's repairs.
        """
        before = next((plan for plan in self.plans if plan.seal == made_by), None)
        if before is None:
            return False
        was = {entry.component: entry for entry in before.components}
        new = {x.component: x for x in updated.components if was.get(x.component) != x}
        merged = tuple(
            new.get(x.component, x) if was.get(x.component) == x else x
            for x in self.plans[-1].components
        )
        latest = self.plans[-1]
        if merged == latest.components:
            return False
        self.plans.append(seal_plan(dataclasses.replace(latest, components=merged)))
        self._keep()
        return True

    def _keep(self) -> None:
        name = f"plan-{self.plans[0].seal[:12]}-{len(self.plans) - 1}.json"
        write_whole(self._folder / name, to_json(self.plans[-1]).encode())


@dataclass
class Dispatch:
    """Queue of a batch's items, each of which is given to at most `TRIES` workers."""

    pool: Pool
    versions: PlanVersions
    note: Callable[[str], None]
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
                if isinstance(said, TaskResult):
                    yield self._take(task, said)
                elif (failed := self._mourn(task, said)) is not None:
                    yield failed
                else:
                    waiting.appendleft(task)

    def _take(self, task: Task, answer: TaskResult) -> ItemResult:
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
        """Handle a worker's death: return its item's failed result, or None if the item has tries left.

        Raises:
            StopdownError: too many workers died in a row.
        """
        self._deaths += 1
        tries = self._begun[task.item]
        self.note(f"{reason} It was making {task.name}.")
        if self._deaths >= MOST_DEATHS:
            raise StopdownError(
                f"{self._deaths} workers died one after the other without finishing an item.",
                expected="Finished items are kept, and the same command continues from there.",
                remedy="Make one item with stopdown generate to see why.",
            )
        if tries < TRIES:
            return None
        said = f"Each of {tries} workers that tried it died. {reason}"
        return begin_result(task, "failed", error=said, tries=tries)

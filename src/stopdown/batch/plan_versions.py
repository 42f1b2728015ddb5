"""The plan of a batch and its versions: repairs of one worker, offered to all at the next item.

Each version is kept in the batch's folder, so that a record that names its seal can be looked up, and the
same command goes on with the latest one. Of two repairs of the same component the first one counts.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from stopdown.batch.output_folder import OutputFolder
from stopdown.errors import PlanError
from stopdown.plans.plan_files import read_plan, seal_plan
from stopdown.records import Plan, to_json

_VERSION = re.compile(r"plan-([0-9a-f]{12})-(\d+)\.json")


def read_versions(folder: OutputFolder, names: set[str]) -> list[list[Plan]]:
    """The plans that batches in this folder began with, each followed by its further versions."""
    found: dict[str, list[tuple[int, Plan]]] = {}
    for name in sorted(names):
        matched = _VERSION.fullmatch(name)
        plan = _read(folder.path / name) if matched else None
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
    """The plan that is in force, and those before it.

    Args:
        base: that the batch begins with; None for a batch without a plan.
        known: what `read_versions` found.

    Attributes:
        plans: all versions, the one in force last.
    """

    def __init__(self, folder: OutputFolder, base: Plan | None, known: list[list[Plan]]) -> None:
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
        """Take what an item taught into the plan; whether that made a new version."""
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
        self._folder.write(name, to_json(self.plans[-1]).encode())

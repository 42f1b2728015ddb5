"""What a guard did, in order; each kind of it is reported once, and all of it is logged."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from stopdown.records import Repair

_LOGGER = logging.getLogger("stopdown")
_LOGGER.addHandler(logging.NullHandler())  # silent where a program has not set up logging

_MOST_TRIES = 3
"""Kinds of calls of a component for which a repair is looked for in vain."""


class RepairLog:
    """Repairs, and calls that were not repaired, in order.

    Args:
        announce: told of each kind of repair once.
        before: of an earlier guard of the same program: what it reported is not reported again, and what it
            gave up stays so.
    """

    def __init__(self, announce: Callable[[str], None], before: RepairLog | None = None) -> None:
        self.announce = announce
        self._repairs: list[Repair] = []
        self._left: list[str] = []
        self._reported: set[tuple[str, str]] = before._reported if before is not None else set()
        self._given_up: dict[str, set[str]] = before._given_up if before is not None else {}
        self._run_begins = 0

    def __len__(self) -> int:
        return len(self._repairs)

    @property
    def repairs(self) -> tuple[Repair, ...]:
        return tuple(self._repairs)

    @property
    def of_this_run(self) -> tuple[Repair, ...]:
        """The repairs since the last call of the pipeline."""
        return tuple(self._repairs[self._run_begins :])

    @property
    def left(self) -> tuple[str, ...]:
        """Components whose calls were left alone, a sentence for each."""
        return tuple(self._left)

    def leave(self, component: str, text: str, *, is_fault: bool = True) -> None:
        """Keep that a call was left alone, once for each component; report it unless it is no fault."""
        if not self.was_reported(component, "left"):
            self._left.append(text)
            if is_fault:
                self.report_once(component, "left", text)
            self.mark_reported(component, "left")

    def give_up(self, component: str, kind: str) -> None:
        """Keep that no repair helps calls of this kind."""
        self._given_up.setdefault(component, set()).add(kind)

    def has_given_up(self, component: str, kind: str) -> bool:
        """Return whether a repair is not looked for any more: of this kind, or after many in vain."""
        known = self._given_up.get(component, set())
        return kind in known or len(known) >= _MOST_TRIES

    def begin_run(self) -> None:
        self._run_begins = len(self._repairs)

    def keep(self, repair: Repair) -> None:
        """Keep one, log it, and report it when it is the first of its kind."""
        self._repairs.append(repair)
        _LOGGER.warning(format_line(repair), extra={"repair": dataclasses.asdict(repair)})
        self.report_once(repair.component, repair.action, describe_repair(repair))

    def report_once(self, component: str, kind: str, text: str) -> None:
        """Report it unless this was reported of the component before."""
        if not self.was_reported(component, kind):
            self.mark_reported(component, kind)
            self.announce(text)

    def mark_reported(self, component: str, kind: str) -> None:
        self._reported.add((component, kind))

    def was_reported(self, component: str, kind: str) -> bool:
        return (component, kind) in self._reported


def format_line(repair: Repair) -> str:
    """Format a repair as one searchable line of a service's log."""
    step = "" if repair.step is None else f" step={repair.step + 1}"
    return (
        f"repair action={repair.action} component={repair.component} module={repair.module_path} "
        f"kind={repair.kind}{step} seconds={repair.elapsed_s:.3f}"
    )


def describe_repair(repair: Repair) -> str:
    """Describe a repair in whole sentences, for people."""
    done = {
        "rescaled": f"Rescaled `{repair.component}` by powers of two",
        "fp32-module": "One module was put in fp32",
        "bf16": f"Cast `{repair.component}` to bf16",
        "fp32": f"Cast `{repair.component}` to fp32",
        "cast-inputs": "Inputs are cast to the dtype of the weights",
        "replayed": "Ran the call again",
        "none": "It was not repaired",
    }[repair.action]
    is_again = repair.action != "none" and repair.kind != "signature"
    again = " The call was run again, and the run continues." if is_again else ""
    said = f"{repair.evidence} {done}. {repair.reason}{again}"
    if not repair.verdict:
        return said
    ended = "Repaired; the result is not affected." if is_again else "It was not repaired."
    return f"{repair.verdict} {ended} {said}"

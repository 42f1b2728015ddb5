"""Log of a guard's repairs: each one is logged, and each kind is reported to the user once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from stopdown.records import Repair

_LOGGER = logging.getLogger("stopdown")
_LOGGER.addHandler(logging.NullHandler())  # silent where a program has not set up logging

_MOST_TRIES = 3
"""Kinds of calls of a component without a repair, after which no more repairs are searched for it."""


class RepairLog:
    """The repairs of a guard in order, and the calls that were left alone.

    Args:
        announce: called with a text, once for each kind of repair.
        before: log of an earlier guard of the same program, whose reports aren't repeated, and whose
            abandoned repairs aren't tried again.
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
        """The repairs since the start of the pipeline's current call."""
        return tuple(self._repairs[self._run_begins :])

    @property
    def left(self) -> tuple[str, ...]:
        """One sentence for each component whose calls were left alone."""
        return tuple(self._left)

    def leave(self, component: str, text: str, *, is_fault: bool = True) -> None:
        """Record that a component's call is not guarded or repaired, once for each component.

        Args:
            text: what happened and why.
            is_fault: report it to the user as well.
        """
        if not self.was_reported(component, "left"):
            self._left.append(text)
            if is_fault:
                self.report_once(component, "left", text)
            self.mark_reported(component, "left")

    def give_up(self, component: str, kind: str) -> None:
        """Record that no repair helps a component's calls of this kind, so that none is searched again."""
        self._given_up.setdefault(component, set()).add(kind)

    def has_given_up(self, component: str, kind: str) -> bool:
        """Return whether no repair is searched any more, for calls of this kind or for the component."""
        known = self._given_up.get(component, set())
        return kind in known or len(known) >= _MOST_TRIES

    def begin_run(self) -> None:
        self._run_begins = len(self._repairs)

    def keep(self, repair: Repair) -> None:
        """Record a repair, write it to the Python log, and report it to the user if it's the first of
        its kind.
        """
        self._repairs.append(repair)
        _LOGGER.warning(format_line(repair), extra={"repair": dataclasses.asdict(repair)})
        self.report_once(repair.component, repair.action, describe_repair(repair))

    def report_once(self, component: str, kind: str, text: str) -> None:
        """Report a text to the user, unless this kind was reported for the component before."""
        if not self.was_reported(component, kind):
            self.mark_reported(component, kind)
            self.announce(text)

    def mark_reported(self, component: str, kind: str) -> None:
        self._reported.add((component, kind))

    def was_reported(self, component: str, kind: str) -> bool:
        return (component, kind) in self._reported


def format_line(repair: Repair) -> str:
    """Format a repair as one line of `key=value` pairs for a log."""
    step = "" if repair.step is None else f" step={repair.step + 1}"
    return (
        f"repair action={repair.action} component={repair.component} module={repair.module_path} "
        f"kind={repair.kind}{step} seconds={repair.elapsed_s:.3f}"
    )


def describe_repair(repair: Repair) -> str:
    """Describe a repair in sentences for people: what happened, where, and what was done.

    The evidence is left out if there's a verdict and the repair helped; the record has it.
    """
    done = {
        "rescaled": f"Rescaled `{repair.component}` by powers of two",
        "fp32-module": "One module was put in fp32",
        "bf16": f"Cast `{repair.component}` to bf16",
        "fp32": f"Cast `{repair.component}` to fp32",
        "cast-inputs": "Such inputs are now cast to the dtype of the weights",
        "replayed": "Ran the call again",
        "none": "It wasn't repaired",
    }[repair.action]
    is_again = repair.action != "none" and repair.kind != "signature"
    said = f"{done}. {repair.reason}"
    if repair.action == "cast-inputs":
        said = f"{repair.reason} {done}."
    if not repair.verdict:
        ended = " The call was retried." if is_again else ""
        return f"{repair.evidence} {said}{ended}"
    if not is_again:
        return f"{repair.verdict} It wasn't repaired. {repair.evidence} {said}"
    begun = f"The fault begins at `{repair.module_path}`."
    return f"{repair.verdict} Repaired; the result isn't affected. {begun} {said}"

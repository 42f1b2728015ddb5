"""Check the calls of a pipeline itself: values that no component made, and frames that are wrong.

A fault of the scheduler's last step, or of the pipeline's own arithmetic behind it, reaches no component.
It is named where it began, and stops the run.
"""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

from stopdown.component_calls.call import ComponentCall
from stopdown.errors import NonFiniteError
from stopdown.frames.frame_faults import find_frame_findings
from stopdown.numerics import iterate_tensors
from stopdown.records import Finding, Repair
from stopdown.runtime.fault_texts import name_counts
from stopdown.runtime.outside_faults import Origin, find_origin
from stopdown.runtime.results import collect_videos, count_bad
from stopdown.runtime.session import Session
from stopdown.runtime.session_check import WRONG_PICTURES, examine_calls


class RunCheck:
    """Checks what leaves a pipeline."""

    def __init__(self, session: Session) -> None:
        self.findings: list[Finding] = []
        self.own_s = 0.0
        self._session = session
        self._given: dict[str, Any] = {}  # what the pipeline was called with

    def run(self, call: ComponentCall) -> Any:
        """Make one call of the pipeline, and look at what leaves it.

        Cost: a pass over the result; one host read when that holds tensors.
        """
        thread = threading.get_ident()
        if thread in self._session.running:  # a class that calls its parent's `__call__`
            return call.proceed()
        self._session.running.add(thread)
        try:
            self._begin(call)
            with self._session.consensus.running():
                output = call.proceed()
                begun = time.perf_counter()
                self._check_result(output)
            self.own_s += time.perf_counter() - begun
            return output
        finally:
            self._session.running.discard(thread)
            self._given = {}

    def _begin(self, call: ComponentCall) -> None:
        self._session.consensus.begin_run()
        self._session.follow()
        self._session.steps.follow()
        self._session.steps.forget()
        names = list(inspect.signature(type(self._session.pipe).__call__).parameters)[1:]
        self._given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        self._session.log.begin_run()

    def _check_result(self, output: Any) -> None:
        nan, infinite, total = self._session.consensus.agree_on_counts(count_bad(output))
        self._session.host_reads += any(x.is_floating_point() for x in iterate_tensors(output))
        is_reported = any(repair.action == "none" for repair in self._session.log.of_this_run)
        if nan + infinite == 0:
            self.check_frames(output)
        elif not is_reported:
            counts = name_counts(nan, infinite)
            self._report_result(f"The pipeline's result holds {counts} in {total} values.")

    def _report_result(self, what: str) -> None:
        """Record values that are not finite and that no component made, and stop the run."""
        origin = self.find_origin()
        repair = Repair(
            component="pipeline",
            module_path=origin.source,
            kind="input",
            step=None,
            evidence=f"{origin.what} {what}",
            action="none",
            reason="No component caused it, so there is nothing to repair.",
        )
        self._session.log.keep(repair)
        if self._session.options.on_fault != "warn":
            raise NonFiniteError(origin.what, expected=what, remedy=origin.remedy)

    def check_frames(self, output: Any) -> None:
        """Report black, grey, frozen and noisy pictures, and whether it is the session's fault.

        Args:
            output: what a pipeline returned; or a tuple of pictures `[B, H, W, 3]` in 0 to 1.

        Cost: a pass over the pictures; what `examine_calls` costs after one that is wrong.
        """
        if not self._session.options.frames or self._given.get("output_type") == "latent":
            return
        found = [
            finding
            for number, frames in enumerate(collect_videos(output), 1)
            for finding in find_frame_findings(frames, f"result {number}")
        ]
        has_own_calls = (
            len(self._session.running) <= 1 and self._session.consensus.is_alone
        )  # the latest, of this run
        if has_own_calls and any(x.kind in WRONG_PICTURES for x in found):
            found += examine_calls(self._session.calls.values(), self._session.pipe)
        for finding in found:
            self.findings.append(finding)
            text = f"{finding.module_path}: {finding.evidence} {finding.remedy}"
            self._session.log.report_once("pipeline", f"{finding.kind} {finding.module_path}", text)

    def find_origin(self) -> Origin:
        unseen = [
            f"No tensor could be looked at in what `{call.name}` gave."
            for call in self._session.calls.values()
            if call.unseen
        ]
        moved = [
            f"`{callee.name}` was compiled or replaced under the guard and not watched."
            for callee in self._session.list_moved()
        ]
        return find_origin(
            self._session.steps, self._session.log.of_this_run, self._given, [*unseen, *moved]
        )

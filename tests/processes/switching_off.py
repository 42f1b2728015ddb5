r"""A pytest plugin that switches a detector off, to see which tests notice.

    PYTHONPATH=tests python -m pytest -p processes.switching_off --switch-off "call check" \
        tests/unit/test_guard.py

`tests/pipelines/test_switched_off.py` runs it for each detector.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from processes.several_ranks import SWITCHED_OFF


def switch_off_check() -> None:
    """Whatever a component or the pipeline gives is good."""
    from stopdown.runtime import run_check, session
    from stopdown.runtime.call_check import CallCheck

    session.check_call = lambda notes, output: CallCheck()
    run_check.count_bad = lambda output: (0, 0, 0)


def switch_off_culprit() -> None:
    """The replay names nobody."""
    from stopdown.runtime import fault_handler
    from stopdown.runtime.culprit import Culprit

    fault_handler.find_culprit = lambda *given: (Culprit("unknown"), given[2]())


def switch_off_checksum() -> None:
    """Each file of a journal has the checksum that its name says."""
    from stopdown.runtime import journal

    compute = journal._digest_bytes

    def digest(content: bytes) -> str:
        caller = sys._getframe(1)
        is_check = caller.f_code.co_name == "_load_entry"
        return str(caller.f_locals["matched"][2]) if is_check else compute(content)

    journal._digest_bytes = digest


def switch_off_lock() -> None:
    """Faults of several threads are worked on at once."""
    from stopdown.runtime import component_locks

    component_locks._ONE_CHANGE = contextlib.nullcontext()  # type: ignore[assignment]


def switch_off_waiting() -> None:
    """A module is changed while other threads call it."""
    from stopdown.runtime.component_locks import ComponentLock

    ComponentLock.owned = lambda self: contextlib.nullcontext()  # type: ignore[assignment,method-assign]


def switch_off_restore() -> None:
    """After Ctrl-C the guard stays on the pipeline."""
    from stopdown.runtime.guard import Guard

    leave = Guard.__exit__

    def stay(self: Guard, kind: Any = None, *rest: Any) -> None:
        if kind is None or issubclass(kind, Exception):
            leave(self, kind, *rest)

    Guard.__exit__ = stay  # type: ignore[method-assign]


def switch_off_carrying() -> None:
    """What one call of a script's pipeline repaired is forgotten before the next."""
    from stopdown.runtime.repairs import RepairCache

    RepairCache.put_on = lambda self, state: ()  # type: ignore[method-assign]


def switch_off_cast_check() -> None:
    """A rescaled module runs in whatever it was cast to."""
    from stopdown.scaling.cast_check import CastCheck

    CastCheck.__call__ = lambda self, module, args: None  # type: ignore[method-assign]


def switch_off_trial() -> None:
    """What a module returns once it is cast is what it should return."""
    from stopdown.scaling import trial

    trial._demand_alike = lambda output, run: None
    trial._demand_near = lambda error, run: None
    trial.measure_error = lambda output, reference: 0.0


def switch_off_comparison() -> None:
    """A repair that gives finite values is right."""
    from stopdown.runtime import fault_handler

    fault_handler.describe_excess = lambda error, bf16_error: ""


def switch_off_rank_check() -> None:
    """Each rank decides by its own output."""
    from stopdown.ranks.ranks import Ranks

    Ranks.agree_on_check = lambda self, check: check


def switch_off_rank_culprit() -> None:
    """Each rank believes what it found itself."""
    from stopdown.ranks.ranks import Ranks

    Ranks.agree_on_culprit = lambda self, culprit: culprit


def switch_off_noise_check() -> None:
    """Ranks may begin from other noise."""
    from stopdown.ranks.ranks import Ranks

    Ranks.begin_call = lambda self, call: None


def switch_off_run_check() -> None:
    """Ranks may have other weights and precisions."""
    from stopdown.ranks.ranks import Ranks

    Ranks.begin = lambda self, pipe, plan: None


def switch_off_loss() -> None:
    """An error of a connection is passed on as it is."""
    from stopdown.ranks import ranks

    ranks.is_lost = lambda error: False


DETECTORS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "call check": (
        switch_off_check,
        (
            "unit/test_guard.py::test_an_overflow_is_repaired",
            "unit/test_guard.py::test_warn_goes_on",
        ),
    ),
    "culprit": (switch_off_culprit, ("unit/test_guard.py::test_raise_stops_with_the_module_path",)),
    "checksum": (
        switch_off_checksum,
        ("pipelines/test_journal.py::test_what_is_damaged_is_made_anew[flip]",),
    ),
    "lock": (
        switch_off_lock,
        ("pipelines/test_threads.py::test_faults_of_two_threads_are_worked_on_in_turn",),
    ),
    "waiting": (
        switch_off_waiting,
        ("pipelines/test_threads.py::test_a_change_waits_for_calls_of_other_threads",),
    ),
    "restore": (
        switch_off_restore,
        ("unit/test_guard.py::test_gone_after_an_exception_and_nested",),
    ),
    "carrying": (
        switch_off_carrying,
        ("pipelines/test_scripts.py::test_a_repair_holds_for_the_next_call",),
    ),
    "cast check": (
        switch_off_cast_check,
        (
            "unit/test_cast_check.py::test_half_is_refused[multiplies-forward]",
            "unit/test_cast_check.py::test_half_is_refused[stream-decode]",
        ),
    ),
    "trial": (
        switch_off_trial,
        (
            "unit/test_trial.py::test_what_does_not_run_in_fp16_is_not_solved[nan]",
            "unit/test_trial.py::test_what_does_not_run_in_fp16_is_not_solved[shape]",
            "unit/test_trial.py::test_what_does_not_run_in_fp16_is_not_solved[values]",
        ),
    ),
    "comparison of repairs": (
        switch_off_comparison,
        (
            "pipelines/test_repairs.py::"
            "test_a_finite_repair_further_off_than_bf16_is_not_believed[278-rescaled-True]",
            "pipelines/test_repairs.py::"
            "test_a_finite_repair_further_off_than_bf16_is_not_believed[201-fp32-module-False]",
        ),
    ),
    "rank check": (
        switch_off_rank_check,
        (
            "pipelines/test_guard_ranks.py::"
            "test_a_fault_of_one_rank_is_repaired_on_all[cogvideox-2-1]",
        ),
    ),
    "rank culprit": (
        switch_off_rank_culprit,
        ("pipelines/test_guard_ranks.py::test_the_culprit_is_that_of_the_rank_that_has_it[2]",),
    ),
    "noise check": (
        switch_off_noise_check,
        ("pipelines/test_guard_ranks.py::test_ranks_that_were_not_started_alike_are_refused",),
    ),
    "run check": (
        switch_off_run_check,
        ("pipelines/test_guard_ranks.py::test_ranks_that_were_not_started_alike_are_refused",),
    ),
    "loss of a rank": (
        switch_off_loss,
        ("pipelines/test_ranks.py::test_a_rank_that_is_gone_ends_the_others[killed]",),
    ),
}
"""What can be switched off, how, and the tests that must fail then."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--switch-off NAME`."""
    parser.addoption("--switch-off", choices=sorted(DETECTORS), required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test."""
    name = config.getoption("--switch-off")
    os.environ[SWITCHED_OFF] = name  # the ranks of a test are processes of their own
    DETECTORS[name][0]()

r"""A pytest plugin that switches a detector off, to see which tests notice.

    PYTHONPATH=tests python -m pytest -p processes.switching_off --switch-off "call check" \
        tests/runtime/test_guard.py

`tests/pipelines/test_switched_off.py` runs it for each detector.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from processes.several_ranks import SWITCHED_OFF

Make = Callable[[Any], Any]
"""Of what is there to what takes its place; whatever that needs is imported then, after PyTorch."""


def believe_all(own: Any) -> Any:
    """Whatever a component or the pipeline gives is good."""
    from stopdown.runtime.call_check import CallCheck

    return lambda notes, output: CallCheck()


def name_nobody(own: Any) -> Any:
    """The replay names nobody."""
    from stopdown.runtime.culprit import Culprit

    return lambda *given: (Culprit("unknown"), given[2]())


def fit_all(purpose: bytes, content: bytes, kind: str) -> bytes:
    """The same checksum for every content."""
    return bytes(32)


def stay_on(leave: Any) -> Any:
    """After Ctrl-C the guard stays on the pipeline."""

    def stay(self: Any, kind: Any = None, *rest: Any) -> None:
        if kind is None or issubclass(kind, Exception):
            leave(self, kind, *rest)

    return stay


def give(replacement: Any) -> Make:
    """This one, whatever was there."""
    return lambda own: replacement


def give_nothing(own: Any) -> Any:
    """A function that does nothing."""
    return lambda *given: None


TRIAL = "stopdown.scaling.trials.trial:"
GUARDS = "runtime/test_guard.py::"
TRIALS = "scaling/trials/test_trial.py::test_what_does_not_run_in_fp16_is_not_solved"
FAR_OFF = "runtime/test_repairs.py::test_a_finite_repair_further_off_than_bf16_is_not_believed"

DETECTORS: dict[str, tuple[dict[str, Make], tuple[str, ...]]] = {
    "call check": (
        {
            "stopdown.runtime.session:check_call": believe_all,
            "stopdown.runtime.run_check:count_bad": give(lambda output: (0, 0, 0)),
        },
        (f"{GUARDS}test_an_overflow_is_repaired", f"{GUARDS}test_warn_goes_on"),
    ),
    "culprit": (
        {"stopdown.runtime.fault_handler:find_culprit": name_nobody},
        (f"{GUARDS}test_raise_stops_with_the_module_path",),
    ),
    "checksum": (
        {"stopdown.runtime.journal_values:hmac": give(SimpleNamespace(digest=fit_all))},
        ("pipelines/test_journal.py::test_what_is_damaged_is_made_anew[flip]",),
    ),
    # faults of several threads are worked on at once
    "lock": (
        {"stopdown.interception.component_locks:_ONE_CHANGE": give(contextlib.nullcontext())},
        ("interception/test_component_locks.py::test_faults_of_two_threads_are_worked_on_in_turn",),
    ),
    # a module is changed while other threads call it
    "waiting": (
        {
            "stopdown.interception.component_locks:ComponentLock.owned": give(
                lambda self: contextlib.nullcontext()
            )
        },
        ("interception/test_component_locks.py::test_a_change_waits_for_calls_of_other_threads",),
    ),
    "restore": (
        {"stopdown.runtime.guard:Guard.__exit__": stay_on},
        (f"{GUARDS}test_gone_after_an_exception_and_nested",),
    ),
    # what one call of a script's pipeline repaired is forgotten before the next
    "carrying": (
        {"stopdown.runtime.repair_cache:RepairCache.put_on": give(lambda self, state: ())},
        ("pipelines/test_scripts.py::test_a_repair_holds_for_the_next_call",),
    ),
    # a rescaled module runs in whatever it was cast to
    "cast check": (
        {"stopdown.scaling.folding.cast_check:CastCheck.__call__": give_nothing},
        tuple(
            f"scaling/folding/test_cast_check.py::test_half_is_refused[{row}]"
            for row in ("multiplies-forward", "stream-decode")
        ),
    ),
    # what a module returns once it is cast is what it should return
    "trial": (
        {
            f"{TRIAL}_demand_alike": give_nothing,
            f"{TRIAL}measure_error": give(lambda output, reference: 0.0),
        },
        tuple(f"{TRIALS}[{row}]" for row in ("nan", "shape", "values")),
    ),
    # a repair that gives finite values is right
    "comparison of repairs": (
        {"stopdown.runtime.fault_records:describe_excess": give(lambda error, bf16_error: "")},
        (f"{FAR_OFF}[278-rescaled-True]", f"{FAR_OFF}[201-fp32-module-False]"),
    ),
    # one of several processes repairs what it gave
    "several processes": (
        {
            f"stopdown.runtime.{module}:count_processes": give(lambda: 1)
            for module in ("fault_handler", "fault_records", "session")
        },
        ("pipelines/test_torchrun.py::test_one_of_several_processes_repairs_nothing",),
    ),
}
"""What can be switched off, by which replacements, and the tests that must fail then."""


def switch_off(name: str) -> None:
    """Put the replacements of one row into their places."""
    for place, make in DETECTORS[name][0].items():
        module, _, path = place.partition(":")
        *owners, attribute = path.split(".")
        target: Any = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(target, attribute, make(getattr(target, attribute)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--switch-off NAME`."""
    parser.addoption("--switch-off", choices=sorted(DETECTORS), required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test."""
    name = config.getoption("--switch-off")
    os.environ[SWITCHED_OFF] = name  # the ranks of a test are processes of their own
    switch_off(name)

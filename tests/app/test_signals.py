"""Signals at bad moments: inside of an import, of `__del__`, of a library that wraps what it catches."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes.signal_tries import count_tries
from stopdown.app import cli, signals
from stopdown.app.signals import SignalTrap, Stopped

SEND = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
ENDLESS = f"{SEND}import time\nwhile True:\n    time.sleep(0.01)\n"

WriteModule = Callable[[str, str], None]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    """Writes modules that can be imported, and are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(signal, "default_int_handler", signal.getsignal(signal.SIGINT))

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def wait() -> None:
    """Python code that a signal is raised in."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        time.sleep(0.005)
    pytest.fail("no signal came")


@pytest.mark.parametrize(("name", "kind"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", Stopped)])
def test_an_import_is_finished_first(
    name: str, kind: type[BaseException], write_module: WriteModule
) -> None:
    """A library that would catch the interrupt never sees it; whoever imports it gets it right after."""
    write_module(
        "sends_signal",
        f"import signal\ntry:\n    signal.raise_signal(signal.{name})\n    state = 'whole'\n"
        "except BaseException:\n    state = 'half'\n",
    )
    trap = SignalTrap()
    with pytest.raises(kind), trap:  # noqa: PT012 - it is raised in one of the two
        importlib.import_module("sends_signal")
        wait()
    assert sys.modules["sends_signal"].state == "whole"
    assert trap.number == getattr(signal, name)


def test_a_signal_at_the_end_of_the_block_is_raised(write_module: WriteModule) -> None:
    """Also when the import was the last thing that was done."""
    write_module("sends_last", SEND)
    with pytest.raises(KeyboardInterrupt), SignalTrap():
        importlib.import_module("sends_last")


RAISED = 7


def leave(
    *, patience_s: float, times: int = 1, code: str = ENDLESS, write_module: WriteModule
) -> tuple[str, int]:
    """What is told of an import that signals come in, and the process's code; `RAISED` if it was raised."""
    write_module("endless", code.replace(SEND, SEND + "signal.raise_signal(2)\n" * (times - 1)))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # should nothing else end it
        signals._PATIENCE_S = patience_s
        try:
            with SignalTrap(lambda name: os.write(writer, name.encode()) and None):
                importlib.import_module("endless")
                wait()
        except KeyboardInterrupt:
            os._exit(RAISED)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        return told.read(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_long_import_is_left(write_module: WriteModule) -> None:
    """After its time the process ends without unwinding, once somebody was told."""
    assert leave(patience_s=0.01, write_module=write_module) == ("SIGINT", 130)


@pytest.mark.thorough
def test_a_busy_machine_makes_no_import_long(write_module: WriteModule) -> None:
    """An import that gets no processor for longer than its time is finished, and the interrupt raised."""
    code = f"{SEND}import time\ntime.sleep(1.2)\n"
    assert leave(patience_s=1.0, code=code, write_module=write_module) == ("", RAISED)


def test_a_second_signal_waits_for_no_import(write_module: WriteModule) -> None:
    """Whoever presses Ctrl-C twice is not asked for patience."""
    assert leave(patience_s=1e9, times=2, write_module=write_module) == ("SIGINT", 130)


def test_a_script_may_run_inside_of_an_import(write_module: WriteModule) -> None:
    """With nobody to leave it to, the interrupt is raised there, for `finally` blocks of the script."""
    write_module("sends_itself", ENDLESS)
    before = signals._PATIENCE_S
    signals._PATIENCE_S = 0.01
    try:
        with pytest.raises(KeyboardInterrupt), SignalTrap():
            importlib.import_module("sends_itself")
    finally:
        signals._PATIENCE_S = before
    assert "sends_itself" not in sys.modules


class _Dying:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_nobody_could_catch_comes_again(
    write_module: WriteModule, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python prints what is raised in `__del__` and goes on; here nothing is printed, and the run ends."""
    with pytest.raises(KeyboardInterrupt), SignalTrap():  # noqa: PT012 - it is raised in `wait`
        _Dying()
        gc.collect()
        wait()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "kind"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", Stopped)])
def test_an_interrupt_that_a_library_dropped_comes_again(
    name: str, kind: type[BaseException], write_module: WriteModule
) -> None:
    """Without it the run would go on to its end."""
    with pytest.raises(kind), SignalTrap(leave=pytest.fail):  # noqa: PT012 - it is raised in `wait`
        with contextlib.suppress(BaseException):
            signal.raise_signal(getattr(signal, name))
        wait()


def test_an_interrupt_that_another_error_hid_is_raised_once(write_module: WriteModule) -> None:
    """A library drops it and fails at once: the end of the block raises it, and nothing comes after."""
    with pytest.raises(Stopped), SignalTrap(leave=pytest.fail):  # noqa: PT012 - it is raised at the end
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("what was made of it")
    gc.collect()
    handler = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert handler == signal.SIG_DFL


def test_a_script_may_drop_an_interrupt(write_module: WriteModule) -> None:
    """Under `stopdown run` a script that ends by itself after Ctrl-C does so."""
    with SignalTrap():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        time.sleep(10 * signals._PAUSE_S)


def test_everything_is_put_back() -> None:
    """Handlers and the hook are those of before."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    before = [signal.getsignal(getattr(signal, name)) for name in names], sys.unraisablehook
    with SignalTrap():
        assert signal.getsignal(signal.SIGTERM) != before[0][1]
    assert (
        [signal.getsignal(getattr(signal, name)) for name in names],
        sys.unraisablehook,
    ) == before


def test_ctrl_break_ends_a_program_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process can send another one SIGTERM there; SIGBREAK is raised as `Stopped` as well."""
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with SignalTrap():
            assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL
        with pytest.raises(Stopped) as stopped, SignalTrap():
            signal.raise_signal(signal.SIGUSR1)
        assert stopped.value.code == 128 + signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_child_ends_by_the_signal() -> None:
    """A process that was forked meanwhile, such as a loader of data, ends as it would without us."""
    with SignalTrap():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_what_a_library_makes_of_an_interrupt_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A library that wraps it in an error of its own, or that fails at it, ends in the same message."""

    def wrap(words: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("Failed to import") from error
        return 0

    monkeypatch.setattr("stopdown.app.commands.run", wrap)
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "shapes"])
    assert left.value.code == 143
    assert capfd.readouterr().err == "stopdown: Stopped by SIGTERM; no partial output was left.\n"


@pytest.mark.parametrize("name", ["typer", "textwrap"])
def test_an_interrupt_before_the_commands_are_imported(name: str, tmp_path: Path) -> None:
    """Signals are heard from the first moment: also while the command line itself is imported."""
    code = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {name!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from stopdown.app import cli\n"
        "cli.main(['generate', 'shapes', 'a'])\n"
    )
    done: Any = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    *progress, message = done.stderr.splitlines()
    assert message.startswith("stopdown: Stopped by Ctrl-C; no partial output was left.")
    assert all(line.startswith("Loading ") for line in progress)  # said where it takes long
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate shapes a --steps 1 -o a.mp4", "check shapes"])
def test_stopped_at_any_moment(command: str, tmp_path: Path) -> None:
    """Thirty moments of a run, most of them while libraries are imported: all end in one message."""
    found, wrong = count_tries(command.split(), tmp_path, count=30, mean_s=0.05)
    assert (found["right"], wrong) == (found["tries"], [])
    assert found["tries"] > 10

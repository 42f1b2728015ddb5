"""Threads that a program leaves behind: what works is waited for, what waits for work isn't."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from stopdown.app.main_module import as_main, execute, find_start, wait_for_threads


def test_a_script_finds_itself_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python gives it an absolute path, and the words as they were typed."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("import os, sys; os.chdir('/'); print(__file__, sys.argv)")
    start = find_start("script.py", is_module=False)
    with as_main("script.py", ("a",), is_module=False):
        assert execute(start) == (0, None)
    assert capsys.readouterr().out == f"{tmp_path / 'script.py'} ['script.py', 'a']\n"


def answer() -> int:
    return 42


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_executors_that_are_left_open_are_not_waited_for(kind: str) -> None:
    """Their threads wait for work, which a program that has ended doesn't give them; they stay usable."""
    executor: Executor = ThreadPoolExecutor(2)
    if kind == "processes":
        executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with executor:
        assert executor.submit(answer).result() == 42
        waiting = threading.Thread(target=wait_for_threads, daemon=True)
        waiting.start()
        waiting.join(60)
        assert not waiting.is_alive()
        assert executor.submit(answer).result() == 42


@pytest.mark.parametrize("is_pooled", [True, False])
def test_work_that_goes_on_is_waited_for(is_pooled: bool) -> None:
    """A thread of its own, and one of an executor: with what the executor has not begun yet."""
    begun, may_end, ended = threading.Event(), threading.Event(), list[int]()

    def work(number: int) -> None:
        begun.set()
        may_end.wait(60)
        ended.append(number)

    executor = ThreadPoolExecutor(1)
    if is_pooled:
        for number in range(3):
            executor.submit(work, number)
    else:
        threading.Thread(target=work, args=(0,)).start()
    begun.wait(60)
    waiting = threading.Thread(target=wait_for_threads, daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    may_end.set()
    waiting.join(60)
    assert len(ended) == (3 if is_pooled else 1)
    executor.shutdown()


@pytest.mark.thorough
def test_commands_start_without_executors() -> None:
    """They are looked at only where a program has loaded them: multiprocessing costs each start."""
    named = "{'concurrent.futures', 'multiprocessing'} & {*sys.modules}"
    code = f"import stopdown.app.commands, sys; print({named})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"

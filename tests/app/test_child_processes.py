"""Processes that a script starts are counted, and those with a fresh interpreter are guarded."""

from __future__ import annotations

import pickle
from functools import partial
from multiprocessing import spawn
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from stopdown.app.child_processes import Children
from stopdown.interception.patches import Patches


def pickle_preparation() -> bytes:
    """Pickle what a process gets that is spawned; its key may only be pickled on the way to it."""
    data = spawn.get_preparation_data("child")
    return pickle.dumps({name: x for name, x in data.items() if name != "authkey"})


def leave_mark(path: str) -> None:
    """What a guard does here: it shows that it was called."""
    Path(path).write_text("guarded")


def test_a_started_process_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a subclass; none is counted afterwards."""
    started = list[BaseProcess]()
    monkeypatch.setattr(BaseProcess, "start", lambda process: started.append(process))
    children = Children(print)
    with Patches() as patches:
        children.listen(patches)
        first, second = BaseProcess.__new__(BaseProcess), BaseProcess.__new__(BaseProcess)
        first.start()
        second.start()
        assert children.started == 2
    first.start()
    assert children.started == 2
    assert started == [first, second, first]


def test_a_fresh_interpreter_is_guarded_as_it_unpickles(tmp_path: Path) -> None:
    """Its preparation data hold the guard, which is called before the script is imported."""
    mark, before = tmp_path / "mark", spawn.get_preparation_data
    with Patches() as patches:
        Children(partial(leave_mark, str(mark))).listen(patches)
        data = pickle_preparation()
    assert spawn.get_preparation_data is before
    assert not mark.exists()
    found: dict[str, Any] = pickle.loads(data)
    assert mark.read_text() == "guarded"
    assert found["name"] == "child"


def fail() -> None:
    raise RuntimeError("no memory")


def test_a_guard_that_fails_ends_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    """The process goes on without one, and says so."""
    with Patches() as patches:
        Children(fail).listen(patches)
        data = pickle_preparation()
    assert pickle.loads(data)["name"] == "child"
    assert capsys.readouterr().err == (
        "stopdown: a process that the script started isn't guarded: no memory\n"
    )

"""The runner of the attacks catches what it is for, and a fork answers as a fresh process does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hostile.runner import MIB, Attack, copy_tiny, find_message, run_attack


def put_file(folder: Path) -> list[str]:
    (folder / "kept").write_text("as it was")
    return []


def make_row(function: str, **changes: object) -> Attack:
    command = f"hostile.misbehaving:{function}"
    row = Attack(function, put_file, 2, "This is wrong.", command=command)
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_row_that_behaves_passes(tmp_path: Path, is_fresh: bool) -> None:
    """Exit code, first words and no file: nothing to say."""
    outcome = run_attack(make_row("behave", is_fresh=is_fresh), tmp_path)
    assert (outcome.exit_code, outcome.changed) == (2, ())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raise_error", "a traceback"),
        ("leave_file", "left.part was left, changed or removed"),
        ("change_file", "kept was left, changed or removed"),
        ("remove_file", "kept was left, changed or removed"),
        ("use_home", ".home/left was left, changed or removed"),
        ("colour", "a control character"),
        ("die", "ended by SIGSEGV"),
    ],
)
def test_what_no_command_may_do_is_caught(tmp_path: Path, function: str, said: str) -> None:
    """Tracebacks, signals, control characters and files are named."""
    with pytest.raises(AssertionError, match=re.escape(said)):
        run_attack(make_row(function), tmp_path)


def test_another_code_and_another_message_are_caught(tmp_path: Path) -> None:
    """Both are named at once."""
    with pytest.raises(AssertionError, match="exit code 2, not 1") as caught:
        run_attack(make_row("behave", exit_code=1, message="This is right."), tmp_path)
    assert "the message doesn't begin with 'This is right.'" in str(caught.value)


@pytest.mark.thorough
def test_a_hang_is_ended(tmp_path: Path) -> None:
    """A sleeping child by the wall time, a busy one by its processor time."""
    with pytest.raises(AssertionError, match="ended by wall time"):
        run_attack(make_row("hang", wall_s=0.2), tmp_path)
    (tmp_path / "second").mkdir()
    with pytest.raises(AssertionError, match="ended by SIGXCPU"):
        run_attack(make_row("spin", cpu_s=1), tmp_path / "second")


def test_memory_that_grows_is_caught(tmp_path: Path) -> None:
    """A child gets no more address space than its row says."""
    with pytest.raises(AssertionError, match="MemoryError"):
        run_attack(make_row("grow", growth_bytes=256 * MIB), tmp_path)


def test_files_that_a_row_allows_may_be_left(tmp_path: Path) -> None:
    """By their pattern."""
    run_attack(make_row("leave_file", left=("*.part",)), tmp_path)


def cut_index(folder: Path) -> list[str]:
    model = copy_tiny(folder)
    (model / "model_index.json").write_text("{")
    return ["check", str(model)]


def name_nothing(folder: Path) -> list[str]:
    return ["generate", str(folder / "nowhere"), "a circle", "-o", str(folder / "out.mp4")]


ROWS = (
    Attack("index cut off", cut_index, 2, "{folder}/model/model_index.json can't be read as"),
    Attack("no such folder", name_nothing, 2, "There is no file or folder {folder}/nowhere."),
    Attack("no such command", lambda _: ["genrate"], 2, "No such command 'genrate'."),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_fork_answers_as_a_fresh_process_does(row: Attack, tmp_path: Path) -> None:
    """Exit code, message, output and files are the same, to the letter."""
    forked = run_attack(row, tmp_path)
    (tmp_path / "row").rename(tmp_path / "first")
    fresh = run_attack(dataclasses.replace(row, is_fresh=True), tmp_path)
    assert find_message(fresh) == find_message(forked)
    assert dataclasses.replace(fresh, stderr="") == dataclasses.replace(forked, stderr="")

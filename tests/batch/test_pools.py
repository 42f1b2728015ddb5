"""`stopdown batch` on several workers, undisturbed and under fire."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.batches import SIZES, read_summary
from processes.batch_kills import Kills, Watched, ended, start
from stopdown.app.batch_command import BatchOptions, batch
from stopdown.app.display import Display
from stopdown.batch.jobs import Task
from stopdown.batch.pools import InProcess, Processes, Slot
from stopdown.batch.records import BatchRecord
from stopdown.errors import StopdownError
from stopdown.pipelines.requests import Request
from stopdown.records import Plan

SHAPES = ("--steps", "2", "--precision", "fp32")

pytestmark = pytest.mark.timeout(900)


def write_prompts(folder: Path, count: int) -> Path:
    path = folder / "prompts.txt"
    colours = ("red", "blue", "green", "yellow", "white")
    shapes = ("circle", "square", "triangle", "star")
    ways = ("left", "right", "up", "down")
    lines = [f"a {c} {s} moving {w}" for w in ways for s in shapes for c in colours]
    path.write_text("\n".join(lines[:count]) + "\n")
    return path


def make_alone(folder: Path, source: str, prompts: Path, *words: str) -> dict[str, bytes]:
    """What one process makes, by name."""
    process = start(
        folder / "alone.log", source, "--prompts", prompts, "-o", folder / "alone", *words
    )
    with ended(process):
        assert process.wait(600) == 0, (folder / "alone.log").read_text()
    return {path.name: path.read_bytes() for path in (folder / "alone").glob("*.mp4")}


@pytest.fixture(scope="module")
def undisturbed(
    save_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What this process makes of six prompts of the tiny pipeline, by name."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sizes: dict[str, Any] = {"frames": 9, "height": 32, "width": 32, "steps": 1}
    source, prompts = str(save_tiny("cogvideox", "fp32")), str(write_prompts(folder, 6))
    batch(BatchOptions(source, str(folder / "out"), prompts, precision="fp32", **sizes), Display())
    return {path.name: path.read_bytes() for path in (folder / "out").glob("*.mp4")}


def run_killed(
    folder: Path, source: str, kills: Kills, prompts: Path, expected: dict[str, bytes], *words: str
) -> BatchRecord:
    """A batch to its end, as often as it takes for all kills; the last summary."""
    for number in range(100):
        out = folder / f"out{number}"
        given = (source, "--prompts", prompts, "-o", out, *words)
        code = kills.run(
            lambda given=given: start(folder / "log", *given), watched := Watched(out, expected)
        )  # type: ignore[misc]
        assert code == 0, (folder / "log").read_text()
        assert watched.look() == len(expected)
        assert {x.name for x in out.glob("*.mp4")} == set(expected)
        assert not list(out.glob(".stopdown-*")), "a temporary file was left"
        record = read_summary(out)
        assert (record.failed, record.made + record.skipped) == (0, len(expected))
        if not kills.left:
            return record
    raise AssertionError("the kills were never used up")


@pytest.mark.thorough
def test_processes_survive_kills(tiny: str, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """Two processes; three kills of workers and drivers: each item once, with one process's bytes."""
    prompts, expected = write_prompts(tmp_path, 6), undisturbed
    kills = Kills(3, seed=2)
    words = (*SIZES, "--workers", "2")
    record = run_killed(tmp_path, tiny, kills, prompts, expected, *words)
    assert sum(kills.done.values()) == 3
    assert len(record.items) == 6


def test_an_item_that_kills_its_workers_fails(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item is begun `TRIES` times at most; then its workers' deaths are its result."""
    from stopdown.batch import dispatch

    wait = InProcess.wait

    def die(pool: Any) -> Any:
        if pool._given and "blue" in pool._given[0].request.prompt:
            pool._given = None
            return [(0, "Worker 0 ended with SIGKILL.")]
        return wait(pool)

    monkeypatch.setattr(InProcess, "wait", die)
    monkeypatch.setattr(dispatch, "TRIES", 2)
    prompts = write_prompts(tmp_path, 3)
    options = BatchOptions(
        tiny,
        str(tmp_path / "out"),
        str(prompts),
        precision="fp32",
        **{"steps": 1, "frames": 9, "height": 32, "width": 32},
    )
    record = batch(options, Display())
    assert [x.status for x in record.items] == ["made", "failed", "made"]
    failed = record.items[1]
    assert failed.tries == 2
    assert failed.error == ("Each of 2 workers that tried it died. Worker 0 ended with SIGKILL.")
    monkeypatch.setattr(dispatch, "MOST_DEATHS", 2)
    monkeypatch.setattr(dispatch, "TRIES", 9)
    with pytest.raises(StopdownError, match="2 workers died one after the other"):
        batch(options, Display())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_forty_prompts_and_thirty_kills(tmp_path: Path) -> None:
    """`shapes`, 40 prompts: 30 kills of workers and of the process that gives out the items lose nothing,
    make nothing twice and leave nothing half: the bits of one process."""
    prompts = write_prompts(tmp_path, 40)
    expected = make_alone(tmp_path, "shapes", prompts, *SHAPES)
    assert len(expected) == 40
    kills, words = Kills(30, seed=1), (*SHAPES, "--workers", "2")
    run_killed(tmp_path, "shapes", kills, prompts, expected, *words)
    assert sum(kills.done.values()) == 30


class Ended:
    """A process that was killed."""

    exitcode = -9

    def join(self, timeout: float) -> None:
        """Return at once."""

    def kill(self) -> None:
        """Nothing is left of it."""


JOB: Any = SimpleNamespace()
"""What workers are to make: nothing here asks for it."""


def begin_dead(number: int) -> Slot:
    """A worker process that dies before it has said its device."""
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    return Slot(Ended(), ours)


def test_workers_that_die_before_they_begin_end_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No item is at fault, so that no try of one can end it: the fifth death in a row does."""
    begun: list[int] = []
    pool = Processes(JOB, ["cuda:0"])
    monkeypatch.setattr(pool, "_begin", lambda number: begun.append(number) or begin_dead(number))
    with pytest.raises(StopdownError) as ended, pool:
        pass
    assert ended.value.what == (
        "5 workers died one after the other before they had begun. Worker 0 ended with SIGKILL."
    )
    assert begun == [0] * 5


def test_a_plan_is_sent_to_a_worker_once() -> None:
    """Later tasks refer to it by its seal; another plan, and another worker, get theirs."""
    pool, task = Processes(JOB, ["cuda:0"] * 2), Task("1", "a", 1, Request("a"))
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    pool._slots = [Slot(None, ours, "free") for ours, _ in pipes]
    first, second = Plan("m", seal="one"), Plan("m", seal="two")
    for worker, plan in ((0, first), (0, first), (0, second), (0, None), (1, first)):
        assert pool.find_free() == worker
        pool.give(worker, task, plan)
        pool._slots[worker].state = "free" if worker == 0 and plan is not None else "busy"
    sent = [
        [pipe.recv()[1:] for _ in range(count)]
        for (_, pipe), count in zip(pipes, (4, 1), strict=True)
    ]
    assert sent[0] == [("one", first), ("one", None), ("two", second), ("", None)]
    assert sent[1] == [("one", first)]
    assert pool.find_free() is None


def test_the_death_of_a_worker_with_a_task_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how the worker died; a new one takes its place, and its deaths are counted from 0."""
    pool = Processes(JOB, ["cuda:0"])
    monkeypatch.setattr(pool, "_begin", begin_dead)
    pool._slots = [begin_dead(0)]
    pool._slots[0].state, pool._slots[0].deaths = "busy", 4
    assert pool.wait() == [(0, "Worker 0 ended with SIGKILL.")]
    assert (pool._slots[0].state, pool._slots[0].deaths) == ("opening", 0)


def test_a_picture_that_is_gone_is_an_error_and_no_hang() -> None:
    """A file that can't be opened when its item is due was taken for a worker's death without an end."""
    ours, _theirs = multiprocessing.Pipe()
    pool = Processes(JOB, ["cpu"])
    pool._slots = [Slot(None, ours, "free")]

    class Lost(Task):
        def complete(self) -> Task:
            raise PermissionError(13, "Permission denied")

    with pytest.raises(PermissionError):
        pool.give(0, Lost("1", "a", 1, Request("a")), None)
    assert pool._slots[0].state == "free"

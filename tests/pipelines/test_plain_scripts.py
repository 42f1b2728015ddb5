"""Ordinary scripts by plain Python and under `stopdown run`: the same output, exit code and bits.

`tests/scripts` has the scripts. Each is run both ways, here in processes that have imported everything; in
the thorough tests by a fresh interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hostile.runner import ask_server

SCRIPTS = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True)
class Row:
    """A script with its arguments.

    Attributes:
        needs_torch: plain Python runs it where torch is imported, which takes seconds.
        is_fresh: it is run by fresh interpreters alone.
        says: part of what Stopdown says of it; "" where only its calls are listed.
    """

    script: str
    words: tuple[str, ...] = ()
    stdin: str = ""
    needs_torch: bool = True
    is_fresh: bool = False
    says: str = ""

    def __str__(self) -> str:
        return " ".join((self.script, *self.words)).replace("/", "")


def _light(script: str, *words: str, stdin: str = "") -> Row:
    return Row(script, words, stdin, needs_torch=False)


ROWS = (
    *(_light("exit_number", number) for number in ("0", "7", "256", "-1")),
    _light("exit_text"),
    _light("exit_at_once"),
    *(_light("exceptions", kind) for kind in ("base", "value", "group")),
    _light("own_excepthook"),
    _light("main_module"),
    _light("annotations"),
    _light("no_future"),
    _light("arguments", "a cat", "--device", "cuda", "--json", "--steps=3"),
    _light("arguments", "--help"),
    _light("arguments", "--", "--strict"),
    _light("arguments", "--strict"),
    _light("standard_input", stdin="one\ntwo\n"),
    _light("pickles"),
    _light("events"),
    _light("threads", "a"),
    _light("signals"),
    _light("warnings_shown"),
    _light("logs"),
    _light("recursion"),
    _light("syntax.txt"),
    _light("forked"),
    Row("training"),
    Row("training_fp16"),
    Row("adversary"),
    Row("autocast"),
    Row("inf_meant", says="`Net"),
    Row("damaged", says="`Noisy` returned 2 NaN out of 8 values"),
    Row("written_arguments", says="`Writes` returned 2 NaN out of 8 values"),
    Row("state_between_calls"),
    Row("hooks"),
    Row("refused_calls"),
    Row("transforms"),
    Row("odd_outputs", says="`Gives` returned only Inf (1 value)"),
    Row("inference_mode"),
    Row("loop"),
    Row("compiles", ("1",)),
    Row("generates"),
    Row("tiny_pipeline", ("MODEL",)),
    Row("executors", needs_torch=False, is_fresh=True),
    *(Row("spawned", (way,), is_fresh=True) for way in ("spawn", "forkserver", "fork")),
)


@dataclass(frozen=True)
class Ended:
    """How a script ended: its exit code, or the signal; what it wrote."""

    code: int | str
    stdout: str
    stderr: str


LIMITS = {"wall time", "SIGXCPU"}
"""What ends a script that takes too long."""

Run = Callable[[Row, bool, bool], Ended]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    """Run a row plain or guarded, by a fresh interpreter or not."""

    def run_row(row: Row, guarded: bool, is_fresh: bool) -> Ended:
        words = list(row.words)
        if "MODEL" in words:
            words = [str(request.getfixturevalue("save_tiny")("sd"))]
        script = [str(SCRIPTS / (row.script if "." in row.script else f"{row.script}.py")), *words]
        return run_words(script, guarded, is_fresh, tmp_path, row.stdin, row.needs_torch)

    return run_row


def run_words(
    script: Iterable[str],
    guarded: bool,
    is_fresh: bool,
    folder: Path,
    stdin: str = "",
    needs_torch: bool = True,
) -> Ended:
    """Run the words of a command line plain or guarded, in a folder."""
    (folder / "stdin").write_text(stdin)
    is_python = not guarded and (is_fresh or not needs_torch)
    command = "stopdown.app.cli:main" if guarded else "processes.plain_script:main"
    order = {
        "command": "python" if is_python else command,
        "is_fresh": is_fresh or is_python,
        "words": [*(["run"] if guarded else ()), *script],
        "folder": str(folder),
        "environment": {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "STOPDOWN_CACHE": str(folder / "cache"),
        },
        "stdin": str(folder / "stdin"),
        "stdout": str(folder / "stdout"),
        "stderr": str(folder / "stderr"),
        "growth_bytes": 16 * 2**30,
        "cpu_s": 300,
        "wall_s": 120.0,
    }
    ended = ask_server(order)
    code = ended["ended_by"] or ended["exit_code"]
    return Ended(code, *((folder / name).read_text() for name in ("stdout", "stderr")))


def judge(row: Row, plain: Ended, guarded: Ended) -> None:
    """Both ended alike and by themselves, and what a row says was said of faults, and nothing else."""
    assert not {plain.code, guarded.code} & LIMITS, "it was stopped, so its end shows nothing"
    assert (guarded.stdout, guarded.code) == (plain.stdout, plain.code), guarded.stderr
    ours = [x for x in guarded.stderr.splitlines() if x.startswith("stopdown: ")]
    told = [x for x in ours if "not repaired" in x.lower() or "couldn't" in x]
    assert row.says or not told, ours
    assert not row.says or any(row.says in x for x in ours), guarded.stderr
    assert all(row.says in x or "Not repaired:" in x for x in told), ours
    if not isinstance(plain.code, str) and "Traceback" in plain.stderr:
        assert "stopdown/" not in guarded.stderr


@pytest.mark.parametrize("limit", sorted(LIMITS))
def test_two_scripts_that_were_stopped_are_no_match(limit: str) -> None:
    """What a script would have done after its time is unknown, whatever it wrote until then."""
    stopped = Ended(limit, "", "")
    for pair in ((stopped, stopped), (Ended(0, "", ""), stopped)):
        with pytest.raises(AssertionError, match="it was stopped, so its end shows nothing"):
            judge(ROWS[0], *pair)
    judge(ROWS[0], Ended(0, "", ROWS[0].says), Ended(0, "", f"stopdown: {ROWS[0].says}"))


@pytest.mark.parametrize("row", [x for x in ROWS if not x.is_fresh], ids=str)
def test_a_script_ends_as_under_python(run: Run, row: Row) -> None:
    """What it writes, its exit code, and for those with models their bits."""
    judge(row, run(row, False, False), run(row, True, False))


@pytest.mark.thorough
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_script_ends_as_under_python_in_a_fresh_interpreter(run: Run, row: Row) -> None:
    """The same where nothing is imported before."""
    judge(row, run(row, False, True), run(row, True, True))

"""The command line as a user meets it: exit codes, one message for a mistake, and clean streams."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.pipeline_calls import paint_decoder
from stopdown import __version__
from stopdown.app import cli, messages
from stopdown.files.outputs import written_beside
from stopdown.frames.media import read_video, write_media

SaveTiny = Callable[..., Path]
NOISE = np.random.default_rng(0).integers(0, 255, (9, 32, 32, 3), np.uint8)
SIZES = ("--frames", "9", "--height", "32", "--width", "32", "--steps", "1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder that commands run in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(here: Path, run: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """A command in the folder of the test: its exit code, and what it wrote to stdout and stderr."""
    return run


@pytest.fixture
def refuse(run: Any, here: Path) -> Callable[..., str]:
    """A command that is refused: its one line, without traceback, and nothing is written."""

    def run_refused(*arguments: object, code: int = 2) -> str:
        before = sorted(here.rglob("*"))
        found, out, err = run("generate", *arguments)
        assert (found, out) == (code, ""), err
        assert err.startswith("stopdown: ")
        assert err.count("\n") == 1
        assert sorted(here.rglob("*")) == before
        return err.removeprefix("stopdown: ").rstrip("\n")

    return run_refused


def run_process(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as it is installed."""
    command = [sys.executable, "-m", "stopdown.app.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_help_and_version_load_nothing_heavy() -> None:
    """Neither torch nor diffusers nor numpy is in the process that shows them."""
    script = (
        "import json, sys; from stopdown.app import cli\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try: cli.main(words)\n"
        "    except SystemExit as left: assert not left.code\n"
        "    heavy = {'torch', 'diffusers', 'transformers', 'numpy', 'PIL', 'av', 'rich'}\n"
        "    heavy &= set(sys.modules)\n"
        "    if heavy: sys.exit(f'{words} loads {heavy}')\n"
    )
    words = [["--version"], ["doctor", "--help"], ["generate", "--help"], ["--help"]]
    command = [sys.executable, "-c", script, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for shown in (__version__, "stopdown doctor", "stopdown generate"):
        assert shown in done.stdout


def test_every_option_has_a_help_text(run: Any) -> None:
    """`generate --help` explains each flag of issue and README."""
    code, out, _ = run("generate", "--help")
    flags = "output negative image video precision device steps seed frames height width guidance"
    for flag in [*flags.split(), "fps", "revision", "config", "strict", "json"]:
        assert re.search(rf"--{flag}\b.*\n?.*[a-z]{{3}}", out), flag
    assert code == 0


def test_version(run: Any) -> None:
    """One line with the name."""
    assert run("--version") == (0, f"stopdown {__version__}\n", "")


def test_without_arguments_there_is_help(run: Any) -> None:
    """`stopdown` alone shows what there is."""
    code, out, err = run()
    assert code == 2
    assert "generate" in out + err


# ---------------------------------------------------------------------------------------------
# A clean run


def test_a_run_prints_a_card(run: Any, save_tiny: SaveTiny, here: Path) -> None:
    """Exit 0: the card on stdout, nothing on stderr, the clip and its record in the folder."""
    code, out, err = run("generate", save_tiny("cogvideox"), "a", *SIZES, "-o", "clip.mp4")
    assert (code, err) == (0, "")
    for text in (
        "CogVideoXPipeline on cpu",
        "text_encoder",
        "transformer",
        "vae.decode",
        "NaN/Inf",
    ):
        assert text in out
    verdict, command = out.splitlines()[:2]
    assert re.fullmatch(r"Wrote clip\.mp4 in \d+\.\d s: no NaN or Inf, nothing repaired\.", verdict)
    assert command == "→ stopdown report clip.mp4"
    assert sorted(path.name for path in here.iterdir()) == ["clip.mp4", "clip.mp4.json"]
    assert len(read_video(here / "clip.mp4")) == 9


@pytest.mark.thorough
def test_a_process_of_its_own_keeps_its_streams_clean(save_tiny: SaveTiny, here: Path) -> None:
    """With --json stdout is one JSON record and stderr is empty, whatever the libraries remark.

    Stable Video Diffusion in fp16 makes most remarks: its image processor, its autoencoder that
    goes to fp32 and back.
    """
    write_media(here / "in.png", NOISE[:1])
    options = (
        "--height",
        32,
        "--width",
        32,
        "--frames",
        2,
        "--steps",
        1,
        "--precision",
        "fp16-plain",
    )
    done = run_process(
        "generate", save_tiny("svd"), "--image", "in.png", *options, "--json", cwd=here
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads((here / "stopdown.mp4.json").read_text())


def test_overflow_exits_with_1(refuse: Any, save_tiny: SaveTiny) -> None:
    """One message on stderr, no file, no record."""
    source = save_tiny("cogvideox", overflow="transformer")
    options = ("--precision", "fp16-plain", "--on-fault", "raise")
    message = refuse(source, "a", *SIZES, *options, code=1)
    assert re.fullmatch(
        r"Overflow in the transformer: an activation reached [\d,]+, above fp16's maximum of 65,504\. "
        r"`transformer` returned only NaN \([\d,]+ values\) in fp16 at step 1 of 1\. The fault begins at "
        r"`transformer:patch_embed\.text_proj` \(.+ in fp16\).+ Its inputs were finite "
        r"\(largest [\d.]+; fp16's maximum is 65504\)\. `transformer` ran in fp16 because you "
        r"asked for fp16-plain\. "
        r"(?:The CPU has no fp16 instructions .+ and back\. )?Use "
        r"`--precision transformer=(?:bf16|fp32)`, or load the model with "
        r"`--precision fp16`, which scales its activations into range\. Or let the run repair it: "
        r"`--on-fault repair`\.",
        message,
    )


@pytest.mark.thorough
def test_a_repair_is_said_once_and_stands_on_the_card(
    run: Any, save_tiny: SaveTiny, here: Path
) -> None:
    """Without --on-fault an overflow is repaired: exit 0, one sentence on stderr, a line on the card.

    Its seconds are a stage of their own, and not among the others.
    """
    source = save_tiny("cogvideox", overflow="transformer")
    code, out, err = run("generate", source, "a", *SIZES, "--precision", "fp16-plain")
    assert code == 0
    assert err.count("Rescaled `transformer` by powers of two. ") == 1
    record = json.loads((here / "stopdown.mp4.json").read_text())
    repairs = sum(x["elapsed_s"] for x in record["repairs"])
    assert repairs > 0
    assert record["stages_s"]["repair"] == pytest.approx(repairs)
    assert re.search(
        r"Overflow in the transformer: an activation reached [\d,]+, above fp16's maximum of 65,504\. "
        r"Repaired; the result isn't affected\.",
        " ".join(err.split()),
    )
    assert re.search(r"repaired  transformer:\S+: rescaled, 1 call retried", out)


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--strict"], 1)])
def test_findings_exit_with_1_when_strict(
    run: Any, save_tiny: SaveTiny, here: Path, tmp_path: Path, flags: list[str], code: int
) -> None:
    """A black clip is written and named on the card; only --strict makes it a failure."""
    source = paint_decoder(save_tiny("cogvideox"), tmp_path / "black")
    found, out, err = run("generate", source, "a", *SIZES, *flags)
    assert (found, err) == (code, "")
    assert "black-frames: All 9 frames" in out
    assert (here / "stopdown.mp4").is_file()


# ---------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--revision", "main"],
            "is a Diffusers folder. Only models on the Hub have branches, tags",
        ),
        (["--config", "elsewhere"], "is a Diffusers folder. It names the configs of a single "),
    ],
)
def test_options_of_other_sources_are_refused(
    flags: list[str], message: str, refuse: Any, save_tiny: SaveTiny
) -> None:
    """A folder has no branches, and configs of its own."""
    assert message in refuse(save_tiny("cogvideox"), "a", *flags)


def test_a_record_replaces_only_a_record(refuse: Any, save_tiny: SaveTiny, here: Path) -> None:
    """A plan, somebody's JSON, a folder, and a name that is too long for it: refused before the run."""
    source = save_tiny("cogvideox")
    (here / "plan.json").write_text('{"kind": "plan", "schema": 1}')
    (here / "data.json").write_text("[1, 2]")
    (here / "clip.mp4.json").mkdir()
    long = "a" * 248 + ".mp4"
    for output, message in (
        ("plan", "The record plan.json would replace a record of the kind plan. Only what "),
        (
            "data",
            "The record data.json would replace a file that Stopdown didn't write as a record. Only ",
        ),
        ("clip.mp4", "The record clip.mp4.json would be a file, but a folder has that name. "),
        (long, f"The output {long}.json couldn't be written: the name is too long. "),
    ):
        assert refuse(source, "a", "-o", output).startswith(message)


def test_an_input_is_not_replaced(refuse: Any, save_tiny: SaveTiny, here: Path) -> None:
    """The picture that a run starts from is no output."""
    write_media(here / "in.png", NOISE[:1])
    assert refuse(save_tiny("svd"), "--image", "in.png", "-o", "in.png").startswith(
        "The output in.png is a file that this run reads. An input is left as it is."
    )


@pytest.mark.thorough
def test_the_default_output_replaces_nothing(run: Any, save_tiny: SaveTiny, here: Path) -> None:
    """Without -o the second video has the next number and its own record; --force replaces both."""
    source = save_tiny("cogvideox")
    (here / "stopdown.mp4.json").write_text("mine")
    for number in (2, 3):
        code, out, _ = run("generate", source, "a", *SIZES)
        assert code == 0
        assert out.startswith(f"Wrote stopdown-{number}.mp4 in ")
        record = json.loads((here / f"stopdown-{number}.mp4.json").read_text())
        assert record["output"] == f"stopdown-{number}.mp4"
    code, _, err = run("generate", source, "b", *SIZES, "-o", "stopdown-2.mp4")
    assert (code, err) == (
        2,
        "stopdown: The output stopdown-2.mp4 already exists. Existing files aren't replaced. Add --force "
        "to replace it, or choose another name with -o: stopdown-2-2.mp4.\n",
    )
    assert run("generate", source, "b", *SIZES, "-o", "stopdown-2.mp4", "--force")[0] == 0
    assert json.loads((here / "stopdown-2.mp4.json").read_text())["request"]["prompt"] == "b"
    assert (here / "stopdown.mp4.json").read_text() == "mine"
    assert len(list(here.iterdir())) == 5


def test_a_plan_that_cannot_be_kept_costs_the_run_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans that `auto` keeps are a convenience: a cache that cannot be written is told."""
    from stopdown.app.display import keep_updated
    from stopdown.records import Plan

    said: list[str] = []
    (here / "file").touch()
    monkeypatch.setenv("STOPDOWN_CACHE", str(here / "file" / "cache"))
    plan = Plan("shapes", "ab", "Tiny", "fp16", {}, (), "cpu", 0.0)
    assert keep_updated(plan, None, False, said.append) is None
    assert said == [
        "The repair only lasts for this run, and wasn't kept. The output "
        f"{here}/file/cache/plans couldn't be written: Not a directory."
    ]


def test_a_plan_that_keeps_repairs_is_checked_before(
    refuse: Any, save_tiny: SaveTiny, here: Path
) -> None:
    """`--keep-repairs` with a plan behind a link to nowhere: refused before anything runs."""
    (here / "plan.json").symlink_to(here / "far" / "plan.json")
    words = ("--precision", "plan.json", "--keep-repairs")
    message = "The plan plan.json can't be read: no such file or directory."
    assert refuse(save_tiny("cogvideox"), "a", *words).startswith(message)


def test_an_error_as_json(run: Any) -> None:
    """With --json the error is on stdout as one object, and on stderr as the sentence."""
    code, out, err = run("generate", "nonesuch", "a", "--json")
    content = json.loads(out)
    assert (code, content["error"]) == (2, "SourceError")
    assert err == f"stopdown: {content['message']}\n"


# ---------------------------------------------------------------------------------------------
# Ctrl-C


@pytest.mark.thorough
def test_ctrl_c_in_a_terminal(save_tiny: SaveTiny, here: Path) -> None:
    """In the middle of denoising: exit 130, how to go on, nothing left; until then a display."""
    pty = pytest.importorskip("pty")
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "stopdown.app.cli", "generate", str(save_tiny("cogvideox"))]
    process = subprocess.Popen(
        [*command, "a", *SIZES, "--steps", "1000", "-o", "clip.mp4"],
        cwd=here,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        stderr=terminal,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(terminal)
    try:
        shown = read_until(screen, "Denoising")
        process.send_signal(signal.SIGINT)
        shown += read_until(screen, None)
        printed, _ = process.communicate()
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert (process.returncode, printed) == (130, b"")
    assert "Loading" in shown
    assert " ".join(shown.split()).endswith(
        "stopdown: Stopped by Ctrl-C; no partial output was left. To continue an interrupted run next "
        "time, use --journal FOLDER."
    )
    assert "Traceback" not in shown
    assert list(here.iterdir()) == []


def read_until(screen: int, text: str | None) -> str:
    """What a terminal shows until a text appears, or to its end."""
    shown = ""
    while text is None or text not in shown:
        try:
            found = os.read(screen, 4096)
        except OSError:  # Linux says so when the last program has left the terminal
            break
        if not found:
            break
        shown += found.decode(errors="replace")
    return shown


def test_ctrl_c_without_a_terminal(run: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same line and code where nobody watches, as an object with --json."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stopdown.app.generate_command.generate", interrupt)
    code, out, err = run("generate", "shapes", "a")
    said = "stopdown: Stopped by Ctrl-C; no partial output was left."
    with_journal = f"{said} To continue an interrupted run next time, use --journal FOLDER.\n"
    assert (code, out, err) == (130, "", with_journal)
    code, out, _ = run("generate", "shapes", "a", "--json")
    assert (code, json.loads(out)["error"]) == (130, "KeyboardInterrupt")


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (
            ["generate", "shapes", "--journal", "kept"],
            "Run the same command again to continue.",
        ),
        (["generate", "shapes", "--journal=kept"], "Run the same command again to continue."),
        (["compare", "shapes"], "Run the same command again to continue."),
        (["bench"], "Stopped by Ctrl-C; no partial output was left."),
        (["plan", "shapes"], "Stopped by Ctrl-C; no partial output was left."),
        (["run", "script.py"], "Stopped by Ctrl-C, while the script ran."),
    ],
)
def test_ctrl_c_says_how_to_go_on(words: list[str], last: str) -> None:
    """Where the same command goes on, it says so; elsewhere it promises nothing."""
    assert messages.describe_interrupt(words)[-1] == last


def test_ctrl_c_denies_no_output_that_is_there() -> None:
    """Items of a batch, and the first outputs of several, may be finished."""
    for words in (["batch", "shapes"], ["generate", "shapes", "--num", "3"]):
        assert "no output" not in " ".join(messages.describe_interrupt(words))


# ---------------------------------------------------------------------------------------------
# Other signals, and standard output


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_is_one_message(
    name: str, code: int, run: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is open is closed, half-written files go, and the code is 128 and the signal's number."""
    number = getattr(signal, name)
    outside = signal.signal(number, signal.SIG_DFL)  # `nohup` ignores SIGHUP

    def end(*_: object) -> None:
        with written_beside("clip.mp4") as part:
            part.write_text("half")
            signal.raise_signal(number)

    monkeypatch.setattr("stopdown.app.generate_command.generate", end)
    found, out, err = run("generate", "shapes", "a", "--json")
    said = (
        f"Stopped by {name}; no partial output was left. To continue an interrupted run next time, use "
        "--journal FOLDER."
    )
    assert (found, err) == (code, f"stopdown: {said}\n")
    assert json.loads(out) == {"error": name, "message": said}
    assert list(here.iterdir()) == []
    assert signal.signal(number, outside) is signal.SIG_DFL


def test_a_signal_ends_a_script(run: Any, here: Path) -> None:
    """Its `finally` runs, its own exit code does not count, and what it ignores stays ignored."""
    script = here / "script.py"
    lines = "import signal\ntry:\n    signal.raise_signal(signal.SIGTERM)\nfinally:\n    print('closed')\n"
    script.write_text(lines)
    code, out, err = run("run", script)
    assert (code, out) == (143, "closed\n")
    assert err == "stopdown: Stopped by SIGTERM, while the script ran.\n"
    script.write_text(f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{lines}")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run("run", script)[0] == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `nohup` a closed terminal does not end a run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(
        "stopdown.app.doctor_command.write_profile",
        lambda device: signal.raise_signal(signal.SIGHUP) or "toml",
    )
    try:
        assert run("doctor", "--toml")[:2] == (0, "toml")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_child_process_is_ended_as_ever(run: Any, here: Path) -> None:
    """A process that a script forks dies of SIGTERM itself: whoever waits for it sees that."""
    (here / "script.py").write_text(
        "import os, signal, time\n"
        "read, write = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.write(write, b'.')\n"
        "    for _ in range(2000):\n"
        "        time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "os.read(read, 1)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 100)\n"
    )
    assert run("run", here / "script.py")[0] == 100 - signal.SIGTERM


class Full:
    """A stream of a disk without room, or of a reader who has left."""

    encoding = "utf-8"

    def __init__(self, error: OSError) -> None:
        self.error = error

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        raise self.error

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise io.UnsupportedOperation


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["doctor", "--device", "v100"], ["explain", "black", "--json"]],
)
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, ""), 1, "stopdown: Standard output couldn't be written: the disk is full. "
         "The command itself completed. Send it elsewhere, or free some space.\n"),
        (BrokenPipeError(errno.EPIPE, ""), 141, ""),
    ],
)  # fmt: skip
def test_stdout_that_is_full_or_not_read(
    error: OSError,
    code: int,
    said: str,
    words: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk is one message, a reader who leaves none; neither is a traceback."""
    monkeypatch.setattr(sys, "stdout", Full(error))
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert (left.value.code, capfd.readouterr().err) == (code, said)


def test_stdout_that_cannot_show_a_character(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal without UTF-8 gets escapes; JSON is UTF-8 everywhere."""
    for words in (["doctor", "--device", "v100"], ["explain", "schwarz: ä → black", "--json"]):
        held = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="ascii"))
        with pytest.raises(SystemExit):
            cli.main(words)
        sys.stdout.flush()
        assert capfd.readouterr().err == ""
        text = held.getvalue().decode()
        assert text.isascii() or json.loads(text)


# ---------------------------------------------------------------------------------------------
# run, and journals


def test_a_journal_stands_on_the_card(run: Any, save_tiny: SaveTiny, here: Path) -> None:
    """The card says how many calls were answered and written; the folder is empty afterwards."""
    code, out, err = run(
        "generate", save_tiny("cogvideox"), "a", *SIZES, "-o", "clip.mp4", "--journal", "kept"
    )
    assert (code, err) == (0, "")
    said = "".join(out.replace("│", " ").split())  # a long path is broken somewhere
    assert re.search(r"journal0callsansweredfrom\S+kept,\d+callswritten", said)
    assert list((here / "kept").iterdir()) == []

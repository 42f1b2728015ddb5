"""Mistakes of users: each is one message that names it and says what to type, with nothing left behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECORD = "stopdown plan shapes -o plan.json"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with what lies about in folders of users."""
    folder = tmp_path / "here"
    (folder / "frames").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "frames" / "letter").write_text("")
    (folder / "notes.txt").write_text("a red circle\n")
    (folder / "letter.docx").write_bytes(b"PK\3\4\0\0")
    (folder / "bad.json").write_text("{}")
    (folder / "clip.mp4").write_bytes(b"mine")
    (folder / "run.mp4.json").write_text('{"kind": "run", "schema": 1}')
    (folder / "report.html").write_text('<meta name="generator" content="stopdown">')
    (folder / "weights.ckpt").write_bytes(b"\x80\x04")
    (folder / "one").mkdir()
    (folder / "one" / "config.json").write_text("{}")
    monkeypatch.chdir(folder)
    return folder


MISTAKES: tuple[tuple[str, int, str], ...] = (
    # what the shell or the eye got wrong
    ("paint", 2, "No such command 'paint'."),
    ("generate", 2, "Missing argument 'SOURCE'."),
    ("generate shapes a --colour red", 2, "No such option: --colour"),
    ("generate shapes a --steps many", 2, "--steps many isn't a whole number. .* --steps 20."),
    ("generate shapes a --on-fault no", 2, "'no' is not one of 'repair', 'raise'."),
    (
        "run --on-fault warn script.py",
        2,
        "stopdown run has no option --on-fault. Run stopdown run -h, which lists its options. Options of "
        "the script go after its name.",
    ),
    ("generate shapes ''", 2, "The prompt is empty. .* Describe the picture"),
    ("generate shapes a red circle", 2, "Put the prompt in quotes: .* shapes 'a red circle'"),
    ("generate shapes a --dtype float16", 2, "There's no option --dtype."),
    ("compare shapes a --torch-dtype=torch.bfloat16", 2, "Use --precision bf16."),
    ("generate shapes --prompt a --num 0", 2, "--num 0 is less than 1."),
    ("compare shapes 'a cat' --prompt b --steps 0", 2, "--steps 0 is less than 1."),
    ("explain ''", 2, "There is nothing to explain."),
    ("generate shapes", 2, "No PROMPT was given. Add what to show"),
    ("compare shapes", 2, "No --prompt was given. Add what to show"),
    ("generate shapes a -o ''", 2, "--output is empty. .* Leave --output out, or name a file."),
    ("generate shapes a --image ''", 2, "--image is empty. .* a shell variable that isn't set."),
    ("convert shapes ''", 2, "OUTPUT is empty."),
    # models
    ("generate nonesuch a", 2, "The model 'nonesuch' is unknown. .*For example: owner/name"),
    ("generate ./nowhere.safetensors a", 2, "There is no file or folder ./nowhere.safetensors."),
    ("generate weights.ckpt a", 2, "weights.ckpt .* are stored as pickles. Only safetensors"),
    ("generate notes.txt a", 2, "The file notes.txt isn't a .safetensors or .gguf file."),
    ("generate empty a", 2, "The folder empty has no model_index.json."),
    ("generate one a", 2, "This looks like one component of a pipeline. Did you mean"),
    ("generate shapes a --revision main", 2, "--revision main was given, and shapes is a bundled"),
    ("plan shapes --revision main", 2, "--revision main was given, and shapes is a bundled model."),
    ("compare shapes --prompt a --config x", 2, "--config x was given, and shapes is a bundled model."),
    ("check shapes --config x", 2, "--config x was given, and shapes is a bundled model."),
    # sizes and numbers
    ("generate shapes a --steps 1_000", 2, "--steps 1_000 isn't a whole number. .* digits 0 to 9."),
    ("generate shapes a --steps ١٠", 2, "--steps '١٠' isn't a whole number."),
    ("generate shapes a --steps 1e3", 2, r"--steps 1e3 isn't a whole number. .* --steps 20."),
    ("generate shapes a --steps +5", 2, r"--steps \+5 isn't a whole number."),
    ("generate shapes a --guidance 1_0", 2, "--guidance 1_0 isn't a number. .* --guidance 6.5."),
    ("generate shapes a --guidance -inf", 2, "--guidance -inf isn't a number."),
    ("generate shapes a --strength 1e999", 2, "--strength 1e999 isn't a number."),
    ("generate shapes a --memory ٨GiB", 2, "--memory '٨GiB' isn't an amount of memory."),
    ("generate shapes a --device cuda:١", 2, "The device 'cuda:١' is unknown."),
    ("generate shapes a --steps 0", 2, "--steps 0 is less than 1. Use --steps 1 or more."),
    ("generate shapes a --width -8", 2, "--width -8 is less than 1. Use --width 1 or more."),
    ("generate shapes a --fps 0", 2, "--fps 0 isn't between 0.01 and 1000. Use --fps 8."),
    ("generate shapes a --seed -1", 2, "--seed -1 isn't a seed. .* Use --seed 0."),
    ("generate shapes a --guidance nan", 2, "--guidance nan isn't a number. .* --guidance 6.5."),
    ("generate shapes a --fps 1e9", 2, r"--fps 1e\+09 isn't between 0.01 and 1000. Use --fps 8."),
    ("generate shapes a --strength 1.5", 2, "--strength 1.5 isn't above 0 and at most 1."),
    (
        "generate shapes a --height 100",
        2,
        "--height 100 doesn't fit this model. .* The nearest that work are 96 and 112: use --height 96.",
    ),
    ("generate shapes a --width 1", 2, "--width 1 doesn.t fit .* multiple of 16 .* use --width 16."),
    ("fit shapes --frames 0", 2, "--frames 0 is less than 1."),
    ("convert shapes out --certify", 2, "--certify was given for shapes."),
    ("generate shapes a --height 100", 2, "--height 100 doesn't fit this model. .* use --height 96."),
    ("compare shapes --width 100", 2, "--width 100 doesn't fit this model. .* use --width 96."),
    ("generate shapes a --frames 10", 2, "--frames 10 doesn't fit this model. .*--frames 9."),
    ("generate shapes a --fps nan", 2, "--fps nan isn't a number."),
    # precisions, plans, devices
    ("generate shapes a --precision fp61", 2, "The precision 'fp61' is unknown. Known values are fp32, "),
    ("compare shapes --precision fp61", 2, "The precision 'fp61' is unknown. .*autocast, clamp"),
    ("check shapes --precision fp61", 2, "'fp61' is unknown. .* For example: --precision fp16"),
    ("plan shapes --precision text=fp32", 2, "The model has no component 'text'. It has .*text_enc"),
    ("plan shapes --precision bf16", 2, "A plan for bf16 was requested. .* Use --precision fp16;"),
    ("generate shapes a --precision =bf16", 2, "'=bf16' of a precision doesn't name a comp"),
    ("generate shapes a --precision p.png", 2, "p.png is neither a precision nor a plan. Plan files"),
    ("generate shapes a --precision none.json", 2, "The plan none.json .*: stopdown plan shapes -o"),
    ("generate shapes a --precision bad.json", 2, "bad.json isn't a plan. .*" + RECORD),
    ("generate shapes a --precision run.mp4.json", 2, "has kind 'run'. .*" + RECORD),
    ("check shapes --precision none.json", 2, "The plan none.json can't be read: "),
    ("compare shapes --precision fp16,none.json", 2, "The plan none.json can't be read: "),
    ("convert shapes out --plan none.json", 2, "The plan none.json can't be read: "),
    ("compare shapes --precision fp16", 2, "is no list of precisions to compare: it has 1."),
    ("generate shapes a --keep-repairs", 2, "--keep-repairs was given .*" + RECORD),
    ("generate shapes a --device tpu", 2, "The device 'tpu' is unknown. .* Use --device auto."),
    ("generate shapes a --device cuda:99", 2, "There is no device cuda:99 here.* This machine, with this "),
    ("generate shapes a --device v100", 2, "--device v100 is a profile of .* check shapes --device v100"),
    ("check shapes --device v1000", 2, "The device 'v1000' is unknown. .* Use --device v100."),
    # memory
    ("generate shapes a --memory 8", 2, "--memory 8 has no unit. .* Use --memory 8GiB."),
    ("fit shapes --memory lots", 2, "--memory lots isn't an amount of memory."),
    ("fit shapes --host-memory 12", 2, "--host-memory 12 has no unit. .* Use --host-memory 12GiB."),
    ("plan shapes --memory 8GiB", 2, "plan has no memory limit. .* Use stopdown fit shapes --memory 8GiB"),
    # many prompts
    ("batch shapes --prompts none.txt -o out", 2, "The prompts file none.txt can't be read: "),
    ("batch shapes --prompts notes.txt -o out --memory 8", 2, "stopdown: --memory 8 has no unit."),
    ("batch shapes --prompts notes.txt -o out --device tpu", 2, "stopdown: The device 'tpu' is"),
    ("batch shapes --prompts notes.txt -o out --fps 1e9", 2, r"--fps 1e\+09 isn't between 0.01 and"),
    ("batch shapes --prompts notes.txt -o out --workers 0", 2, "--workers 0 isn't above 0."),
    ("batch shapes --prompts notes.txt -o out --steps 0", 2, "Line 1 of the prompts notes.txt: --st"),
    # outputs
    ("generate shapes a -o clip.avi", 2, "ends in .avi, which isn't a format .* Use -o clip.mp4"),
    ("generate shapes a -o run.mp4.json", 2, "ends in .json, .* Use -o run.mp4 for a video"),
    ("generate shapes a -o clip.mp4", 2, "clip.mp4 already exists. .* --force .*: clip-2.mp4."),
    ("generate shapes a -o /", 2, "The output / is a folder that can't be replaced. .* -o: /out"),
    ("generate shapes a -o .", 2, r"The output \. is a folder .* inside of it with -o: out"),
    ("generate shapes a -o .. --num 2", 2, r"The output \.\. is a folder that can't be replaced."),
    ("plan shapes -o /", 2, "The output / is a folder that can't be replaced."),
    ("compare shapes -o /", 2, "The output / is a folder that can't be replaced."),
    ("report run.mp4.json -o /", 2, "The output / is a folder that can't be replaced."),
    ("check shapes --fix -o /", 2, "The output / is a folder that can't be replaced."),
    ("generate shapes a -o run.mp4.json/p.png", 2, "run.mp4.json is a file, not a folder."),
    ("generate shapes a -o run.mp4.json/deep/c.mp4", 2, "run.mp4.json is a file, not a folder."),
    ("generate shapes a -o frames/", 2, "The output folder frames isn't empty."),
    ("generate shapes a -o c.png --frames 9", 2, "c.png is a single picture, and there are 9"),
    ("plan shapes -o plan.txt", 2, "plan.txt doesn't end in .json. .* Use -o plan.json."),
    ("compare shapes -o page.pdf", 2, "page.pdf doesn't end in .html."),
    ("compare shapes -o report.html", 2, "report.html already exists. .* --force"),
    ("check shapes -o out", 2, "-o was given without --fix."),
    # other files
    ("generate shapes a --image none.png", 2, "The file none.png .--image. doesn't exist."),
    ("generate shapes a --mask none.png", 2, "The file none.png .--mask. doesn't exist."),
    (f"generate shapes a --mask {'x' * 300}.png", 2, "The file x+.png .--mask. doesn't exist."),
    (
        "generate shapes a --image no.png --mask none.png",
        2,
        "The files no.png .--image. and none.png .--mask. don't exist.",
    ),
    ("generate shapes a --image a.png --video a.mp4", 2, "--image was given with --video."),
    ("generate shapes a --image notes.txt", 2, "notes.txt can't be read as a picture"),
    ("compare shapes --prompts none.txt", 2, "none.txt can't be read: .* Name a file that exists."),
    ("run", 2, "Name a SCRIPT, or a module with -m."),
    ("run -m no.such", 2, "There is no module no.such. .*, or a file: stopdown run SCRIPT"),
    ("run nowhere.py", 2, "There is no script nowhere.py. .*, or a module: stopdown run -m MODULE"),
    ("report none.html", 2, "none.html .* report.html.json for report.html."),
    ("report bad.json", 2, "bad.json holds a record of the kind None, which has no report."),
    # explain
    ("explain empty", 2, "The folder empty holds no frames. .* Name a log, a picture or a video."),
    ("explain .", 2, "holds no frames. .* Name one file in it: stopdown explain clip.mp4"),
    ("explain letter.docx", 2, "letter.docx can't be read: it isn't text."),
    ("explain none.log", 2, "There is no file none.log."),
    ("explain none.mp4.json", 2, "There is no file none.mp4.json."),
    ("explain notes.txt bad.json", 2, "2 subjects were given, and notes.txt is a file."),
    ("explain what is this", 1, ""),
    ("doctor --toml", 2, "A profile is written for one device, and none was named."),
)  # fmt: skip


def split(command: str) -> list[str]:
    """The words of a command, with '' for an empty one."""
    return ["" if word == "''" else word for word in command.split()]


@pytest.mark.parametrize(("command", "code", "message"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_one_message(
    command: str, code: int, message: str, here: Path, run: Callable[..., Any]
) -> None:
    """Its code, its message, no traceback, no file, and every file as it was."""
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    found, out, err = run(*split(command))
    assert found == code, err
    assert re.search(message, " ".join(err.split())), err
    assert "Traceback" not in out + err
    assert bool(out) == (not message)
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before
    assert not re.search(r'\bSOURCE\b.*stopdown|stopdown \w+ SOURCE|\w="', err.split("Known")[0]), (
        err
    )


@pytest.mark.parametrize("command", ["generate shapes a", "doctor", "explain black"])
def test_a_working_folder_that_is_gone(
    command: str, here: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command says so in one message; help and version need none."""
    monkeypatch.chdir(here / "empty")
    (here / "empty").rmdir()
    code, out, err = run(*split(command))
    assert (code, out) == (2, "")
    assert err == (
        "stopdown: The folder in which this command was started no longer exists: No such file or "
        "directory. It was deleted or moved after the shell had entered it. Go to a folder that exists: "
        "cd ~\n"
    )
    assert run("--version")[0] == 0


@pytest.mark.thorough
def test_a_mistake_is_told_before_pytorch_is_imported(here: Path) -> None:
    """All of them in one fresh process: none loads torch, which takes seconds, to list devices aside."""
    script = (
        "import json, sys; from stopdown.app import cli\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try: cli.main(words)\n"
        "    except SystemExit: pass\n"
        "    if 'torch' in sys.modules: sys.exit(f'{words} loads torch')\n"
    )
    commands = [split(x) for x, code, _ in MISTAKES if code == 2 and "cuda:99" not in x]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("command", ["paint", "convert shapes out --plan none.json"])
def test_a_mistake_as_a_process(command: str, here: Path) -> None:
    """As it is installed: the same code, nothing on stdout, no traceback, no file."""
    before = sorted(here.rglob("*"))
    words = [sys.executable, "-m", "stopdown.app.cli", *split(command)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=here)
    message = next(row[2] for row in MISTAKES if row[0] == command)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(message, done.stderr)
    assert "Traceback" not in done.stderr
    assert sorted(here.rglob("*")) == before

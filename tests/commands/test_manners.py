"""How the command line behaves: help, progress, completion, what it writes."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console

import stopdown
from models.lora_cases import write_lora
from stopdown.app import commands
from stopdown.app.flags import CommandOptions
from stopdown.app.generate_command import GenerateOptions, list_run_options
from stopdown.app.progress import Bars, Lines
from stopdown.app.registration import reword
from stopdown.errors import OptionError, OutputError, StopdownError

SaveTiny = Callable[..., Path]
SIZES = ("--frames", "9", "--height", "32", "--width", "32", "--steps", "1")


# ---------------------------------------------------------------------------------------------
# Help


def test_the_shell_completes(here: Path) -> None:
    """Names of commands and choices of options, by what Typer installs for the shell."""
    for words, found in (
        ("stopdown gen", "generate"),
        ("stopdown generate shapes a --on-fault re", "repair"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "stopdown.app.cli"],
            env={
                **os.environ,
                "_STOPDOWN_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split()) - 1),
            },
            capture_output=True,
            text=True,
        )
        assert found in done.stdout.split(), done


# ---------------------------------------------------------------------------------------------
# Progress


def test_the_first_sign_comes_before_pytorch() -> None:
    """It is said that PyTorch is loaded before it is: an import that ends the process comes after."""
    script = (
        "import os, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print('IMPORTED', end='', file=sys.stderr, flush=True); os._exit(7)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from stopdown.app import cli\n"
        "cli.main(sys.argv[1:])\n"
    )
    for words in (
        ["generate", "shapes", "a", "-o", "x.mp4"],
        ["fit", "shapes", "--memory", "1GiB"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True
        )
        assert done.returncode == 7
        assert re.fullmatch(r"Loading PyTorch \(\S+\)\nIMPORTED", done.stderr), done.stderr


class Log:
    """Lines of progress, with a clock that stands until it is set."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.now = 0.0
        self.console = Console(file=io.StringIO(), width=200)
        self.display = Lines(self.console, quiet=quiet, clock=lambda: self.now)

    def progress(self, now: float, stage: str, what: str, done: int = 0, total: int = 0) -> None:
        """Report progress at a time."""
        self.now = now
        self.display.progress(stage, what, done, total)

    def tick(self, now: float) -> None:
        """Let time pass without progress."""
        self.now = now
        self.display.tick()

    @property
    def lines(self) -> list[str]:
        """Return what was printed."""
        return self.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_log_has_a_line_a_stage_and_one_in_ten_seconds() -> None:
    """Each stage begins with a line; 40 quick components add none, slow steps one in ten seconds."""
    log = Log()
    log.progress(1, "import", "PyTorch")
    log.progress(4, "load", "loading vae", 0, 100)
    for number in range(40):
        log.progress(5 + number / 10, "certify", f"part {number}", number, 40)
    for step in range(1, 41):
        log.progress(10 + step, "denoise", "transformer", step, 40)
    assert log.lines == [
        "Loading PyTorch (0:00:01)",
        "Loading vae (0:00:04)",
        "Planning part 0 (0:00:05)",
        "Denoising step 1 of 40 (0:00:11)",
        "Denoising step 11 of 40 (0:00:21, 0:00:26 left)",
        "Denoising step 21 of 40 (0:00:31, 0:00:18 left)",
        "Denoising step 31 of 40 (0:00:41, 0:00:08 left)",
    ]


def test_no_time_is_estimated_from_the_first_moments_of_a_stage() -> None:
    """One hundredth in a second is no measure of the rest: below a tenth no time left is printed."""
    log = Log()
    log.progress(1, "certify", "vae", 0, 100)
    log.progress(12, "certify", "vae", 1, 100)
    log.progress(23, "certify", "vae", 10, 100)
    assert log.lines[1:] == [
        "Planning vae (0:00:12)",
        "Planning vae (0:00:23, 0:03:18 left)",
    ]


def test_stages_in_turns_fill_no_log() -> None:
    """`compare` encodes, denoises and decodes for each picture: later turns print a line in ten seconds."""
    log = Log()
    for turn in range(20):
        for stage in ("encode", "denoise", "decode"):
            log.progress(turn, stage, "part", 1, 1)
    assert len(log.lines) == 3 + 1


def test_a_log_is_never_silent_for_more_than_ten_seconds() -> None:
    """Without progress the stage that goes on is printed again after ten seconds, and not before."""
    log = Log()
    log.progress(1, "certify", "transformer", 0, 9)
    for second in range(2, 35):
        log.tick(second)
    assert log.lines == [f"Planning transformer (0:00:{seconds:02})" for seconds in (1, 11, 21, 31)]


def test_the_thread_of_a_log_ends_with_it() -> None:
    """Silence is ended by a thread, which is there inside of the block alone; none with --quiet."""
    for quiet, expected in ((False, 1), (True, 0)):
        before = set(threading.enumerate())
        with Log(quiet=quiet).display:
            made = set(threading.enumerate()) - before
        for thread in made:
            thread.join(10.0)
        assert [len(made), *(x.is_alive() for x in made)] == [expected, *[False] * expected]


def test_quiet_lines_tell_no_progress() -> None:
    """With --quiet no line comes, and a repair is announced all the same; details only with --verbose."""
    console = Console(file=io.StringIO(), width=200)
    display = Lines(console, quiet=True)
    display.progress("denoise", "transformer", 1, 2)
    display.announce("`vae` was rescaled.")
    display.detail("not shown")
    Lines(console, verbose=True).detail("shown")
    assert console.file.getvalue() == "`vae` was rescaled.\nshown\n"  # type: ignore[attr-defined]


def test_bars_label_their_times() -> None:
    """In a terminal each bar has the words elapsed and left beside its times."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Bars(console) as display:
        display.progress("import", "PyTorch", 0, 0)
        display.progress("denoise", "transformer", 1, 2)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"Loading.*PyTorch.*elapsed .*\d:\d\d:\d\d.*left", shown)
    assert re.search(r"Denoising.*step 1 of 2.*elapsed .*left", shown)


def test_a_notebook_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell shows a terminal to `!stopdown` and keeps every line: bars would be there a hundred times."""
    from stopdown.app import progress

    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(progress, "open_console", lambda **_: console)
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert isinstance(progress.open_display(_Options()), Bars)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert isinstance(progress.open_display(_Options()), Lines)


def test_quiet_prints_the_file_alone(run: Any, save_tiny: SaveTiny, here: Path) -> None:
    """For scripts: stdout is the name of what was written, stderr is empty."""
    assert run("generate", save_tiny("cogvideox"), "a", *SIZES, "-q") == (0, "stopdown.mp4\n", "")


def test_verbose_shows_the_traceback_of_an_error(run: Any, here: Path) -> None:
    """Who wants to report a fault sees where it was raised."""
    _, _, err = run("generate", "shapes", "a", "--precision", "fp61", "--verbose")
    assert err.startswith("Traceback")
    assert "stopdown: The precision 'fp61' is unknown." in err


# ---------------------------------------------------------------------------------------------
# Words of errors


@dataclasses.dataclass(frozen=True)
class _Options(CommandOptions):
    source: str = "my model"
    precision: str = "auto"
    on_fault: str = "repair"
    force: bool = False
    frames: int = 1
    prompt: Annotated[str, typer.Argument()] = ""


def test_an_error_speaks_of_flags_and_of_the_model() -> None:
    """Arguments of Python become flags of the command, SOURCE what was typed; others stay."""
    error = StopdownError(
        'frames=10 is odd; dtype=torch.float16 and "a.frames=3" stay.',
        expected="SOURCE is a folder.",
        remedy='Use precision="transformer=bf16,vae=fp32", on_fault="repair", or force=True: '
        "stopdown plan SOURCE, and `prompt` and `frames`; `vae` and the field `source` stay.",
    )
    reword(error, _Options())
    assert str(error) == (
        '--frames 10 is odd; dtype=torch.float16 and "a.frames=3" stay. SOURCE is a folder. Use '
        "--precision transformer=bf16,vae=fp32, --on-fault repair, or --force: stopdown plan 'my model', "
        "and PROMPT and --frames; `vae` and the field `source` stay."
    )


ON_THE_COMMAND_LINE = ("scripts", "pipeline_interception", "frame_faults", "findings")
"""What `stopdown run` alone does; and findings, whose remedies are commands wherever they are read."""


def is_command(place: Path) -> bool:
    """Whether a module is a command of a package beside the core, or is used by one alone."""
    return place.stem.endswith("_command")


@pytest.mark.thorough
def test_the_package_names_no_flag() -> None:
    """Below the command line no text says `--flag`: from Python there is none. Whole commands may."""
    package = Path(stopdown.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0] == "app" or place.stem in ON_THE_COMMAND_LINE or is_command(place):
            continue
        found += [f"{place}: {text}" for text in read_texts(path) if names_a_flag(text)]
    assert found == []
    assert names_a_flag("Use --frames 9.")
    assert not names_a_flag("Type stopdown fit SOURCE.")


def read_texts(path: Path) -> list[str]:
    """The texts of a module that are no docstrings, each with what is written in it as {}."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = [x.value for x in ast.walk(tree) if isinstance(x, ast.Expr)]
    parts = {id(part) for x in ast.walk(tree) if isinstance(x, ast.JoinedStr) for part in x.values}
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            written = (x.value if isinstance(x, ast.Constant) else "{}" for x in node.values)
            texts.append("".join(map(str, written)))
        elif isinstance(node, ast.Constant) and node not in told and id(node) not in parts:
            texts.append(str(node.value))
    return texts


def names_a_flag(text: str) -> bool:
    """Whether a text has an option of the command line outside of a whole command."""
    return (
        re.search(r"(?<![\w-])--[a-z]", re.sub(r"(stopdown|pip|hf|ray|torchrun) [^.;,]*", "", text))
        is not None
    )


# ---------------------------------------------------------------------------------------------
# Outputs, seeds, tokens


def test_several_runs_have_seeds_and_names_of_their_own(here: Path) -> None:
    """`--num 3`: the seeds that follow, numbered outputs, all free before the first begins."""
    runs = list_run_options(GenerateOptions("shapes", "a", output="c.mp4", seed=7, num=3))
    assert [(one.output, one.seed) for one in runs] == [
        ("c-1.mp4", 7),
        ("c-2.mp4", 8),
        ("c-3.mp4", 9),
    ]
    (here / "c-3.mp4").touch()
    with pytest.raises(OutputError, match=r"c-3\.mp4 already exists"):
        list_run_options(GenerateOptions("shapes", "a", output="c.mp4", num=3))
    with pytest.raises(OptionError, match="A journal belongs to a single run"):
        list_run_options(GenerateOptions("shapes", "a", num=2, journal=here))
    with pytest.raises(OptionError, match="--num 0 is less than 1"):
        list_run_options(GenerateOptions("shapes", "a", num=0))
    with pytest.raises(OptionError, match="seed=9223372036854775808 isn't a seed"):
        list_run_options(GenerateOptions("shapes", "a", seed=2**63 - 1, num=2))


@pytest.mark.parametrize("name", ["frames", "v1.0", "clip.mp4"])
def test_several_folders_stay_folders(here: Path, name: str) -> None:
    """A folder `clip.mp4/` became two videos, and one with a point in its name was refused."""
    runs = list_run_options(GenerateOptions("shapes", "a", output=f"{name}/", num=2))
    assert [one.output for one in runs] == [f"{name}-1/", f"{name}-2/"]


@pytest.mark.thorough
def test_several_runs_load_the_model_once(
    run: Any, save_tiny: SaveTiny, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--num 3` loads once, and gives what three commands with these seeds give."""
    from stopdown.runtime import runs

    loads: list[str] = []
    load = runs.load_plan
    monkeypatch.setattr(
        runs, "load_plan", lambda *given, **named: loads.append("load") or load(*given, **named)
    )
    words = ("generate", save_tiny("cogvideox"), "a", *SIZES)
    assert run(*words, "--num", 3, "-o", "c.mp4")[0] == 0
    assert loads == ["load"]
    assert run(*words, "--seed", 2, "-o", "third.mp4")[0] == 0
    assert (here / "c-3.mp4").read_bytes() == (here / "third.mp4").read_bytes()
    assert (here / "c-2.mp4").read_bytes() != (here / "third.mp4").read_bytes()


def test_a_webm_is_in_its_page(run: Any, save_tiny: SaveTiny, here: Path) -> None:
    """The page of a run has its clip inside, whichever format it is in."""
    assert run("generate", save_tiny("cogvideox"), "a", *SIZES, "-o", "c.webm")[0] == 0
    assert run("report", "c.webm")[0] == 0
    assert "data:video/webm;base64," in (here / "c.html").read_text(encoding="utf-8")


def test_a_page_is_made_of_the_output_that_is_named(
    run: Any, save_tiny: SaveTiny, here: Path
) -> None:
    """`report clip.mp4` reads its record; without -o a page that is there stays, which is told."""
    assert run("generate", save_tiny("cogvideox"), "a", *SIZES, "-o", "clip.mp4", "-q")[0] == 0
    assert "Wrote clip.html" in run("report", "clip.mp4")[1]
    code, out, _ = run("report", "clip.mp4.json")
    assert code == 0
    assert out.splitlines()[1] == "Wrote clip-2.html"
    assert out.endswith("clip.html already exists and was left as it is.\n")
    code, out, _ = run("explain", "clip.mp4.json")
    assert "clip.mp4.json is the record of a run of " in out
    assert "stopdown report clip.mp4.json" in out
    _, out, _ = run("explain", "clip.mp4")
    shown = " ".join(out.split())
    model = shlex.quote(str(save_tiny("cogvideox")))
    assert f"its record, clip.mp4.json: made by {save_tiny('cogvideox')} on cpu" in shown
    assert re.search(rf"stopdown (generate|compare) {re.escape(model)} (--prompt )?a ", shown)
    (here / "clip.mp4.json").write_text('{"kind": "run"')
    assert "SOURCE" in run("explain", "clip.mp4")[1]


# ---------------------------------------------------------------------------------------------
# Models


def test_another_scheduler_and_a_lora(save_tiny: SaveTiny, tmp_path: Path) -> None:
    """Both stand on the pipeline that is loaded; a LoRA makes another fingerprint, and has its weight."""
    pytest.importorskip("peft")
    import torch

    from stopdown.pipelines.loader import load_pipeline
    from stopdown.pipelines.loras_and_schedulers import find_scheduler, parse_lora
    from stopdown.sources.sources import fingerprint, resolve_source

    source = resolve_source(save_tiny("sd"))
    lora = write_lora(source, tmp_path)
    found = dataclasses.replace(
        source, loras=(parse_lora(f"{lora}:0.5"),), scheduler=find_scheduler("ddim")
    )
    pipe = load_pipeline(found, torch_dtypes=torch.float32)
    assert type(pipe.scheduler).__name__ == "DDIMScheduler"
    layer = next(m for m in pipe.unet.modules() if hasattr(m, "lora_A"))
    assert layer.scaling["lora_0"] == 0.5
    assert fingerprint(found) != fingerprint(source)


def test_a_scheduler_or_lora_that_is_not_there(run: Any, here: Path) -> None:
    """The nearest schedulers are named; a LoRA is a file that is here."""
    _, _, err = run("generate", "shapes", "a", "--scheduler", "eular")
    assert re.search(r"Diffusers has no scheduler 'eular'\. .*Euler.* Use --scheduler Euler", err)
    _, _, err = run("generate", "shapes", "a", "--lora", "none.safetensors:0.5")
    assert "There is no .safetensors file none.safetensors for the LoRA." in err


def test_a_variant_of_the_weights(save_tiny: SaveTiny, tmp_path: Path, run: Any) -> None:
    """It is taken where a component has it, and refused where none has."""
    import shutil

    from stopdown.sources.source import list_weight_files
    from stopdown.sources.sources import resolve_source

    folder = tmp_path / "model"
    shutil.copytree(save_tiny("cogvideox"), folder)
    plain = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    shutil.copy(plain, plain.with_name("diffusion_pytorch_model.fp16.safetensors"))
    named = list_weight_files(resolve_source(str(folder), variant="fp16"))
    assert [path.name for path in named["transformer"]] == [
        "diffusion_pytorch_model.fp16.safetensors"
    ]
    assert [path.name for path in named["vae"]] == ["diffusion_pytorch_model.safetensors"]
    _, _, err = run("generate", folder, "a", "--variant", "bf16")
    assert "has no weights of the variant bf16. Its files would be named like" in err


@pytest.mark.thorough
def test_a_check_judges_what_auto_would_do(run: Any, here: Path) -> None:
    """On a V100 fp16 by a plan, and not the stored bf16, which nobody would run there."""
    code, out, _ = run("check", "shapes", "--device", "v100")
    shown = " ".join(out.split())
    assert "By default it runs in fp16 with an automatic plan, because " in shown
    assert "transformer fp16" in shown
    assert (code, "range-unplanned" in shown) == (0, False)


def test_a_check_names_missing_weights_first(save_tiny: SaveTiny, tmp_path: Path, run: Any) -> None:
    """Weights that are not there have no dtypes: every one that lacks is named, and nothing else."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(save_tiny("cogvideox"), folder)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    index = folder / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    name = "diffusion_pytorch_model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": {"encoder.conv_in.weight": name}}))
    code, out, err = run("check", folder)
    assert (code, out) == (2, "")
    assert "has 2 problems. " in err
    assert "transformer has no safetensors weights." in err
    assert f"lacks {name}." in err


# ---------------------------------------------------------------------------------------------
# Sizes


def test_text_in_another_locale_is_told_apart_from_no_text() -> None:
    """Where the locale is not UTF-8, Python reads a prompt in UTF-8 as bytes: the locale is named."""
    word = "é 😀".encode().decode("ascii", errors="surrogateescape")
    with pytest.raises(OptionError) as caught:
        commands.run(["generate", "shapes", word])
    assert str(caught.value) == (
        "The argument é 😀 is UTF-8, and the locale of this terminal isn't. Names and prompts are written "
        "into records and pages, which are UTF-8. Set a UTF-8 locale: export LC_ALL=C.UTF-8"
    )

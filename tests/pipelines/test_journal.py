"""Journals: a killed run goes on to the same bits; what is not its own is never trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.pipeline_calls import CALLS, call_pipeline, make_pipeline, quiet
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.errors import InputError
from stopdown.records import JournalUse, RunRecord, read_record
from stopdown.runtime import journal
from stopdown.runtime.guard import guard
from stopdown.runtime.journal import _VERSION, Journal, describe_program
from stopdown.runtime.journal_values import digest_call, pack, unpack

Run = Callable[..., tuple[np.ndarray[Any, Any], JournalUse]]


def find_calls(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt"))


def seal(content: bytes, purpose: str) -> bytes:
    """Content with the checksum that a journal expects."""
    return content + hmac.digest(purpose.encode(), content, "sha256")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a journal is to be."""
    return tmp_path / "journal"


def run(pipe: Any, folder: Path, name: str = "cogvideox", **options: Any) -> Any:
    """Pixels of a run with a journal, and what the journal was good for; the pipeline is as it was."""
    with (
        assert_untouched(pipe),
        Journal(folder, **options) as journal,
        guard(pipe, journal=journal, announce=quiet) as handle,
    ):
        pixels = call_pipeline(pipe, name)
    return pixels, handle.record.journal


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A pipeline, the pixels of a run of it with a journal, what that was good for, and what each of its
    files is for: first the head, then each call.
    """

    pipe: Any
    pixels: np.ndarray[Any, Any]
    use: JournalUse
    folder: Path
    purposes: tuple[str, ...]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run of a tiny CogVideoX, and its journal as it was left."""
    folder, pipe = tmp_path_factory.mktemp("recorded") / "journal", make_pipeline("cogvideox")
    purposes: list[str] = []

    def note(value: Any, purpose: str) -> bytes:
        purposes.append(purpose)
        return pack(value, purpose)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "pack", note)
        return Recorded(pipe, *run(pipe, folder), folder, tuple(purposes))


@pytest.fixture
def whole(recorded: Recorded, folder: Path) -> Recorded:
    """That run, and a journal of it to damage."""
    shutil.copytree(recorded.folder, folder)
    return dataclasses.replace(recorded, folder=folder)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in ("svd", "flux") else pytest.mark.slow) for x in CALLS],
)
@pytest.mark.usefixtures("each_device")
def test_answers_are_the_same_bits(folder: Path, name: str) -> None:
    """With a journal a run is as without; again from any cut of it, the pixels are the same."""
    pipe = make_pipeline(name)
    plain = call_pipeline(pipe, name)
    pixels, use = run(pipe, folder, name)
    np.testing.assert_array_equal(pixels, plain)
    assert (use.answered, use.written) == (0, len(find_calls(folder)))
    for path in find_calls(folder)[use.written // 2 :]:
        path.unlink()
    pixels, again = run(pipe, folder, name)
    np.testing.assert_array_equal(pixels, plain)
    assert (again.answered, again.answered + again.written) == (use.written // 2, use.written)
    assert again.notes == ()


@pytest.mark.usefixtures("each_device")
def test_a_call_that_was_answered_is_not_made(folder: Path, monkeypatch: Any) -> None:
    """A whole journal answers every call: no component computes anything."""
    pipe = make_pipeline("sd")
    pixels, _ = run(pipe, folder, "sd")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("it was called")

    for module in (pipe.unet, pipe.text_encoder, pipe.vae.decoder):
        monkeypatch.setattr(module, "forward", refuse)
    np.testing.assert_array_equal(run(pipe, folder, "sd")[0], pixels)


class Drawing(torch.nn.Linear):
    """A component that draws from the global numbers and from those of a generator that it is given."""

    def forward(
        self, given: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        noise = torch.randn(3) + torch.randn(3, generator=generator)
        return super().forward(given) + noise


def test_numbers_drawn_inside_a_call_go_on_as_after_it(folder: Path) -> None:
    """What is drawn after calls that were answered is what is drawn after calls that were made."""
    module = Drawing(3, 3)
    pipe = SimpleNamespace(components={"transformer": module}, transformer=module)

    def draw() -> tuple[list[float], int]:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad(), guard(pipe, journal=folder, announce=quiet) as handle:
            sums = [module(torch.ones(3), generator=generator).sum() for _ in range(3)]
        sums += [torch.randn(1).sum(), torch.randn(1, generator=generator).sum()]
        assert handle.record.journal is not None
        return torch.stack(sums).tolist(), handle.record.journal.answered

    first, second = draw(), draw()
    assert first[0] == second[0]
    assert (first[1], second[1]) == (0, 3)


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_a_repair_is_in_force_again(folder: Path) -> None:
    """Calls after the one that was repaired run as repaired, though they come after a resume."""
    pipe = make_pipeline("cogvideox", overflow="transformer", dtype=torch.float16)
    with guard(pipe, announce=quiet):
        plain = call_pipeline(pipe, "cogvideox")
    np.testing.assert_array_equal(run(pipe, folder)[0], plain)
    for path in find_calls(folder)[3:]:  # after two prompts and the first step
        path.unlink()
    with guard(pipe, journal=folder, announce=quiet) as handle:
        np.testing.assert_array_equal(call_pipeline(pipe, "cogvideox"), plain)
    assert [repair.action for repair in handle.repairs] == ["rescaled"]
    assert handle.record.journal is not None
    assert handle.record.journal.answered == 3


def cut(path: Path) -> None:
    """Half of a file, under its name."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit of its last value."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    """A whole file of the same journal in the place of this one."""
    shutil.copy(find_calls(path.parent)[3], path)


@pytest.mark.parametrize("harm", [cut, flip, swap, Path.unlink])
def test_what_is_damaged_is_made_anew(whole: Recorded, harm: Callable[[Path], None]) -> None:
    """From the first file that is cut, changed, swapped or gone all is made anew, and it is said."""
    folder = whole.folder
    harm(find_calls(folder)[2])
    again, use = run(whole.pipe, folder)
    np.testing.assert_array_equal(again, whole.pixels)
    assert (use.answered, use.written) == (2, whole.use.written - 2)
    (note,) = use.notes
    assert note.startswith(f"Call 2 of the journal {folder} is ")
    assert note.endswith("The calls from there on are made again.")


def test_with_the_check_deceived_a_changed_file_is_believed(whole: Recorded) -> None:
    """What shows the damage is the checksum at the end: with one that fits, other bits pass."""
    last, purpose = find_calls(whole.folder)[-1], whole.purposes[-1]
    answer = unpack(last.read_bytes(), purpose=purpose)
    answer[0].sample.neg_()
    last.write_bytes(pack(answer, purpose))
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(run(whole.pipe, whole.folder)[0], whole.pixels)


DAMAGED_HEADS = [
    b"",
    b"[]",
    b'{"journal": 2, "run": {"seed": 1}}',
    seal(b"", _VERSION),
    seal(b"[" * 100_000, _VERSION),
    pack([1], _VERSION),
    pack({1: "seed"}, _VERSION),
    pack({"seed": 1}, "version 1"),
]


@pytest.mark.thorough
def test_a_head_that_cannot_be_read_begins_anew(whole: Recorded) -> None:
    """Without a head nothing says whose calls they are: none is used."""
    for content in DAMAGED_HEADS:
        (whole.folder / "run.journal").write_bytes(content)
        again, use = run(whole.pipe, whole.folder)
        np.testing.assert_array_equal(again, whole.pixels)
        assert (use.answered, use.written) == (0, whole.use.written), content[:50]


@pytest.mark.thorough
def test_a_flipped_bit_in_the_head_is_seen(whole: Recorded) -> None:
    """Whichever bit it is, the head is either read as it was or called damaged, and nothing is raised."""
    folder, path = whole.folder, whole.folder / "run.journal"
    content = path.read_bytes()
    with Journal(folder) as journal:
        head = journal._head
    assert head
    with path.open(
        "r+b", buffering=0
    ) as file:  # in place: a file that is emptied waits for its disk
        for place in range(len(content)):
            os.pwrite(file.fileno(), bytes([content[place] ^ 1 << place % 8]), place)
            with Journal(folder) as journal:
                assert journal._head == head or (journal._head is None and journal.use.notes)
            os.pwrite(file.fileno(), content[place : place + 1], place)


def test_a_folder_named_as_a_call_is_refused(folder: Path) -> None:
    """What has the name of a file of the journal and is none is foreign; it is not removed."""
    (folder / "000000.pt").mkdir(parents=True)
    with pytest.raises(InputError, match=r"isn't a journal: it contains 000000\.pt"):
        Journal(folder)
    assert find_calls(folder)


def test_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    """What a link with the name of a file of the journal points to would be replaced."""
    folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    (folder / "000000.pt").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match=r"isn't a journal: it contains 000000\.pt"):
        Journal(folder)


def write_pickle(answer: Any, output: object) -> bytes:
    """A call with another output, as `torch.save` writes it by itself."""
    file = io.BytesIO()
    torch.save((output, *answer[1:]), file)
    return file.getvalue()


def call_system(answer: Any) -> bytes:
    """A call of the system's shell."""

    class Call:
        def __reduce__(self) -> Any:
            return os.system, ("touch executed",)

    return write_pickle(answer, Call())


def misname(answer: Any) -> bytes:
    """A module, which is no output."""
    return write_pickle(answer, torch.nn.Linear(2, 2))


def draw(answer: Any) -> bytes:
    """Random numbers that the call does not draw from."""
    return pack((answer[0], {99: torch.zeros(2)}, False))[:-32]


def mistake(answer: Any) -> bytes:
    """A state of random numbers that is no tensor."""
    return pack((answer[0], {0: "state"}, False))[:-32]


def lose(answer: Any) -> bytes:
    """No output."""
    return pack(answer[1:])[:-32]


def shorten(answer: Any) -> bytes:
    """The first half of a file."""
    content = pack(answer)
    return content[: len(content) // 2]


@pytest.mark.parametrize("harm", [call_system, misname, draw, mistake, lose, shorten])
def test_a_resealed_call_is_made_anew(
    whole: Recorded, harm: Callable[[Any], bytes], monkeypatch: Any
) -> None:
    """A file whose checksum was computed anew raises and executes nothing, whatever it contains."""
    monkeypatch.chdir(whole.folder.parent)
    folder = whole.folder
    path, purpose = find_calls(folder)[1], whole.purposes[2]
    path.write_bytes(seal(harm(unpack(path.read_bytes(), purpose=purpose)), purpose))
    again, use = run(whole.pipe, folder)
    np.testing.assert_array_equal(again, whole.pixels)
    assert use.answered == 1
    (note,) = use.notes
    assert note.startswith(f"Call 1 of the journal {folder} is of no use: it")
    assert "it is damaged" not in note
    assert not Path("executed").exists()


def test_an_output_of_an_unknown_class_ends_the_journal(folder: Path) -> None:
    """It is said, the run goes on, and nothing more is written."""

    class Answer:
        """No output of a model."""

    class Asked(torch.nn.Linear):
        def forward(self, given: torch.Tensor) -> Any:
            return super().forward(given), Answer()

    module = Asked(3, 3)
    pipe = SimpleNamespace(components={"transformer": module}, transformer=module)
    with torch.no_grad(), guard(pipe, journal=folder, announce=quiet) as handle:
        assert isinstance(module(torch.ones(3))[1], Answer)
    assert handle.record.journal is not None
    (note,) = handle.record.journal.notes
    assert note.startswith(
        f"The journal {folder} ends at call 0: the output of `transformer` can't be kept: it can't be "
        "pickled: Can't "
    )
    assert Answer.__qualname__ in note
    assert not find_calls(folder)


def test_what_another_version_wrote_is_made_anew(
    whole: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files go, and it is said."""
    monkeypatch.setattr(journal, "_VERSION", "another version")
    again, use = run(whole.pipe, whole.folder)
    np.testing.assert_array_equal(again, whole.pixels)
    assert (use.answered, use.written) == (0, whole.use.written)
    assert use.notes == (
        f"The head of the journal {whole.folder} was written by another version of Stopdown, or is "
        "damaged. The journal is started again.",
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"overflow": "transformer"}, "transformer's weights was "),
        ({"dtype": torch.bfloat16}, "transformer's precision was ['fp32'] and is ['bf16']"),
        ({"seed": 1}, "vae's weights was "),
    ],
)
def test_another_model_is_refused(whole: Recorded, change: dict[str, Any], said: str) -> None:
    """Other weights or another precision: nothing is run, nothing is lost, the pipeline is as it was."""
    folder = whole.folder
    kept = find_calls(folder)
    pipe = make_pipeline("cogvideox", **change)
    with assert_untouched(pipe), pytest.raises(InputError) as caught:
        guard(pipe, journal=folder)
    assert str(caught.value).startswith(f"The journal {folder} belongs to another run: ")
    assert said in str(caught.value)
    assert find_calls(folder) == kept
    run(whole.pipe, folder)  # the lock was let go


@pytest.mark.usefixtures("each_device")
def test_other_tiles_are_refused(folder: Path) -> None:
    """An autoencoder that cuts its work otherwise gives other bits."""
    run(make_pipeline("sd"), folder, "sd")
    pipe = testing.make_pipeline("sd")
    pipe.vae.enable_tiling()
    with pytest.raises(InputError, match=r"vae's tiling was .*'use_tiling': False"):
        guard(pipe, journal=folder)


def test_another_prompt_is_never_answered(whole: Recorded) -> None:
    """From Python, where a journal knows no prompt, the arguments of the calls tell it apart."""
    pipe = whole.pipe
    other = {**CALLS["cogvideox"], "prompt": "b", "num_inference_steps": 2, "output_type": "np"}

    def call() -> Any:
        return pipe(**other, generator=torch.Generator().manual_seed(0))[0]

    plain = call()
    with guard(pipe, journal=whole.folder, announce=quiet) as handle:
        np.testing.assert_array_equal(call(), plain)
    assert handle.record.journal is not None
    assert handle.record.journal.answered == 0
    assert "was made with other arguments" in handle.record.journal.notes[0]


def test_a_foreign_folder_is_refused(folder: Path) -> None:
    """A folder with other things in it is left alone."""
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(InputError) as caught:
        Journal(folder)
    assert str(caught.value) == (
        f"The folder {folder} isn't a journal: it contains thesis.txt. A journal needs its own folder. "
        "Name a folder that is empty or new."
    )


def test_two_runs_cannot_share_a_journal(folder: Path) -> None:
    """The second is refused while the first has it, and not after."""
    with Journal(folder), pytest.raises(InputError, match="is in use by another run"):
        Journal(folder)
    Journal(folder).close()


def test_it_ends_at_its_limit(recorded: Recorded, folder: Path) -> None:
    """Above the limit one word is said, the run goes on, and what is there stays good."""
    pipe, whole = recorded.pipe, recorded.use
    again, use = run(pipe, folder, limit_bytes=whole.bytes // 2)
    np.testing.assert_array_equal(again, recorded.pixels)
    assert use.bytes <= whole.bytes // 2
    assert 0 < use.written < whole.written
    (note,) = use.notes
    assert note.startswith(
        f"The journal {folder} ends at call {use.written}: it would grow beyond "
    )
    again, after = run(pipe, folder, limit_bytes=whole.bytes // 2)
    np.testing.assert_array_equal(again, recorded.pixels)
    assert after.answered == use.written


@pytest.mark.usefixtures("each_device")
def test_a_component_that_remembers_is_refused(folder: Path) -> None:
    """A step cache would miss the calls that are answered; it is named, with what to do."""
    from diffusers import FirstBlockCacheConfig

    pipe = testing.make_pipeline("flux")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(
        InputError, match=r"`transformer:\S+` has a FBC\w+, which remembers earlier"
    ):
        guard(pipe, journal=folder)


def test_what_is_packed_comes_back() -> None:
    """Outputs, distributions, nesting, strides, shared and expanded tensors come back as they were."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from transformers.modeling_outputs import BaseModelOutput

    wide = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = (
        BaseModelOutput(last_hidden_state=wide, hidden_states=(wide, wide[:, 1:])),
        DiagonalGaussianDistribution(torch.randn(1, 4, 2, 2)),
        [torch.randn(1).expand(3, 4), None, {"a": 1.5, "b": torch.tensor(True)}],
    )
    back = unpack(pack(value))
    assert digest_call("", back, {}) == digest_call("", value, {})
    assert back[0].last_hidden_state.stride() == wide.stride()
    assert back[0].hidden_states[0] is back[0].last_hidden_state
    assert back[2][0].stride() == (0, 0) or back[2][0].stride() == value[2][0].stride()
    torch.testing.assert_close(back[1].mode(), value[1].mode(), rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------
# The command, and kill -9

PROMPT = "a red circle moving left on a grey background"
STEPS = 8


SMALL: dict[str, Any] = {"frames": 9, "height": 32, "width": 32}


def make_command(out: Path, journal: Path, steps: int = STEPS, **sizes: int) -> list[str]:
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    options += ["--steps", str(steps), "--seed", "5", "-o", f"{out}/", "--journal", str(journal)]
    options += ["--precision", "fp32", "--device", "cpu"]
    return [sys.executable, "-m", "stopdown.app.cli", "generate", "shapes", PROMPT, *options]


def read_frames(out: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(out.iterdir())]


KILLED = """
import json, os, signal, sys
from diffusers import CogVideoXPipeline
from stopdown.app.cli import main

def kill_self(least, moment):
    replace = os.replace
    written = 0

    def rename(source, target):
        nonlocal written
        written += str(target).endswith(".pt")
        if not (moment == "half" and written == least):
            replace(source, target)
        if written == least:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = rename
    main(sys.argv[5:])

for kill in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        kill_self(*kill)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, kill
"""
"""Starts of a command, of which each kills itself -9 at a call that it writes: when it is written, or
before it is. What they import is imported once, before they are forked."""


def kill_at(command: list[str], *kills: tuple[int, str]) -> None:
    """Run a command that is killed -9 at its `least`th new call of the journal, once for each kill."""
    start = [sys.executable, "-c", KILLED, json.dumps(kills)]
    done = subprocess.run([*start, *command], capture_output=True)
    assert done.returncode == 0, done.stderr


def kill_after(command: list[str], seconds: float) -> None:
    """Start a command and kill it -9 after a time, if it still runs then."""
    quietly = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quietly) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(signal.SIGKILL)


def finish(command: list[str], out: Path) -> RunRecord:
    """Run a command to its end: its record."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return read_record(out.with_name(out.name + ".json"), RunRecord)


@pytest.mark.thorough
def test_killed_twice_it_ends_as_if_never(tmp_path: Path) -> None:
    """Two kills -9, between two calls and in the middle of writing one; the third start ends with the
    bytes of a run without."""
    plain, out, journal = (tmp_path / name for name in ("plain", "out", "journal"))
    request = {"steps": STEPS, "seed": 5, "device": "cpu", "precision": "fp32", **SMALL}
    generate(GenerateOptions("shapes", PROMPT, f"{plain}/", **request))
    command = make_command(out, journal, **SMALL)
    kill_at(command, (2, "whole"), (4, "half"))
    assert len(find_calls(journal)) == 5
    assert not out.exists()
    record = generate(GenerateOptions("shapes", PROMPT, f"{out}/", journal=journal, **request))
    assert record.journal is not None
    assert record.journal.answered == 5
    assert sum(record.journal.components.values()) == 5
    assert "transformer" in record.journal.components
    assert read_frames(out) == read_frames(plain)
    assert find_calls(journal) == []  # the run is done


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    """Whenever a process is killed -9, starting included, its resume ends bitwise equal."""
    plain = tmp_path / "plain"
    begun = time.monotonic()
    finish(make_command(plain, tmp_path / "first", 30), plain)
    whole_s = time.monotonic() - begun
    expected, chance = read_frames(plain), random.Random(1)
    for number in range(20):
        out, journal = tmp_path / f"out{number}", tmp_path / f"journal{number}"
        command = make_command(out, journal, 30)
        least = chance.randrange(1, 33)
        if number % 2:  # half anywhere in the process's life, half among its calls
            kill_after(command, chance.uniform(0, whole_s))
        else:
            kill_at(command, (least, chance.choice(["whole", "half"])))
        if not out.exists():  # else it was done: frames are there whole or not at all
            record = finish(command, out)
            assert record.journal is not None
            assert number % 2 or record.journal.answered >= least - 1
        assert read_frames(out) == expected, number


@pytest.mark.usefixtures("each_device")
def test_another_prompt_or_seed_is_refused_early(save_tiny: Any, tmp_path: Path) -> None:
    """The command names what differs before anything is loaded, and leaves the journal alone."""
    journal, out = tmp_path / "journal", str(tmp_path / "out")
    journal.mkdir()
    (journal / "run.journal").write_bytes(pack({"prompt": "a", "seed": 0}, _VERSION))
    source = str(save_tiny("cogvideox"))
    with pytest.raises(InputError) as caught:
        generate(GenerateOptions(source, "b", out, seed=1, journal=journal))
    assert str(caught.value).startswith(
        f"The journal {journal} belongs to another run: prompt was 'a' and is 'b'; "
    )
    assert "seed was 0 and is 1" in str(caught.value)


def test_another_version_is_refused(whole: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another PyTorch rounds otherwise: the journal of the old one is named with both, and stays."""
    folder = whole.folder
    kept, machine = find_calls(folder), journal.describe_machine()
    versions = {**machine["versions"], "torch": "1.0.0"}
    monkeypatch.setattr(journal, "describe_machine", lambda: {**machine, "versions": versions})
    with pytest.raises(InputError) as caught:
        guard(whole.pipe, journal=folder)
    assert "versions was {" in str(caught.value)
    assert f"'torch': '{torch.__version__}'" in str(caught.value)
    assert "'torch': '1.0.0'" in str(caught.value)
    assert find_calls(folder) == kept


def test_the_file_of_a_call_holds_its_tensors(recorded: Recorded) -> None:
    """It is one of PyTorch, which `torch.load` opens."""
    answer = torch.load(find_calls(recorded.folder)[2], weights_only=True)
    assert answer[0][0].dtype == torch.float32


@pytest.mark.usefixtures("each_device")
def test_settings_are_the_same_in_every_process() -> None:
    """What Diffusers notes about defaults comes from a set, whose order no run is told apart by."""
    pipe = testing.make_pipeline("cogvideox")
    described = describe_program(pipe)["scheduler's settings"]
    assert pipe.scheduler.config["_use_default_values"]
    assert "beta_end" in described
    assert "_use_default_values" not in described

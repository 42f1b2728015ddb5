"""`stopdown batch`: where its prompts come from, what it refuses, and what it doesn't do again."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from models.batches import PROMPTS, SIZES, read_summary
from stopdown.app import batch_command
from stopdown.app.batch_command import BatchOptions, _place_media, batch
from stopdown.app.display import Display
from stopdown.batch import jobs, prompts
from stopdown.batch.prompts import Item, digest_request
from stopdown.devices.device_choice import Device
from stopdown.errors import InputError, OptionError
from stopdown.records import Plan
from stopdown.sources.sources import resolve_source

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("prompts_here")


def test_prompts_come_from_the_command_as_well(run: Run, tiny: str) -> None:
    """Words and `--prompt` are items after those of the file; without any the command says how."""
    folder = ("-o", "out", *SIZES)
    file = ("--prompts", "prompts.txt")
    code, out, err = run("batch", tiny, *file, "--prompt", "a cat", "--prompt", "a dog", *folder)
    assert code == 0, err
    assert out.startswith("5 of 5 done, ")
    prompts = [*PROMPTS.splitlines(), "a cat", "a dog"]
    assert [(x.line, x.prompt) for x in read_summary().items] == list(enumerate(prompts, 1))
    assert run("batch", tiny, "a cat", *folder)[1].startswith("1 of 1 done, 1 finished before")
    code, _, err = run("batch", tiny, *folder)
    assert (code, "No prompts were given. " in err) == (2, True)
    assert f"Give them: stopdown batch {tiny} --prompts prompts.txt." in err


def test_a_card_without_kernels_gets_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A display card that is too old for this PyTorch ended the batch beside a card that isn't."""
    none = OptionError("This PyTorch has no kernels for cuda:1.")
    cards = [
        Device("cuda", 0, "V100", (7, 0), 2**34),
        Device("cuda", 1, "K620", (5, 0), 2**31, missing=none),
        Device("cuda", 2, "V100", (7, 0), 2**34),
    ]
    monkeypatch.setattr(batch_command, "list_devices", lambda: cards)
    monkeypatch.setattr(batch_command, "choose_device", lambda name: cards[0])
    begun: list[list[str]] = []
    monkeypatch.setattr(
        "stopdown.batch.pools.Processes", lambda job, devices: begun.append(devices)
    )
    prepared: Any = SimpleNamespace(job=None)
    state: Any = SimpleNamespace(display=Display())
    batch_command._open_pool(BatchOptions("shapes", "out"), prepared, state)
    assert begun == [["cuda:0", "cuda:2"]]


def test_all_missing_inputs_are_named_at_once(run: Run, save_tiny: Callable[..., Path]) -> None:
    """One message has each line that lacks an input, with its options, before anything is planned."""
    rows = (
        '{"seed": 1}',
        '{"prompt": "a"}',
        '{"prompt": "b"}',
        '{"prompt": "c", "image": "c.png"}',
    )
    Path("rows.jsonl").write_text("\n".join(rows))
    model = save_tiny("cogvideox-image", "fp32")
    code, out, err = run("batch", model, "--prompts", "rows.jsonl", "-o", "out")
    name = "CogVideoXImageToVideoPipeline"
    assert (code, out, err) == (
        2,
        "",
        f"stopdown: Line 1 of the prompts: {name} needs --image and --prompt, which weren't given. "
        f"Lines 2 and 3 of the prompts: {name} needs --image, which wasn't given. "
        "Give --image and --prompt. Give --image.\n",
    )


def test_missing_inputs_are_named_before_a_repository_is_planned(
    run: Run, save_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the Hub is planned while its weights arrive: neither begins for wrong prompts."""

    def resolve(settings: Any, **_: Any) -> Any:
        return dataclasses.replace(resolve_source(settings.source), kind="hub")

    def certify(*_: Any, **__: Any) -> Any:
        raise AssertionError("planned")

    monkeypatch.setattr(jobs, "resolve_whole", resolve)
    monkeypatch.setattr(jobs, "certified_on_arrival", certify)
    Path("rows.jsonl").write_text('{"prompt": "a"}')
    model = save_tiny("cogvideox-image", "fp32")
    code, _, err = run("batch", model, "--prompts", "rows.jsonl", "-o", "out")
    assert (code, "Line 1 of the prompts: CogVideoXImageToVideoPipeline needs" in err) == (2, True)


def test_a_mask_of_the_command_is_that_of_each_item() -> None:
    """What an item names itself stands above it, and begins at the prompts file."""
    options = BatchOptions(source="m", prompts="in/x.jsonl", output="o", mask=Path("m.png"))
    items = [Item(1, image="a.png"), Item(2, image="/b/a.png", mask="own.png")]
    assert [_place_media(options, item).media for item in items] == [
        {"image": "in/a.png", "mask": "m.png"},
        {"image": "/b/a.png", "mask": "in/own.png"},
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--prompts", "nowhere://a/b.txt", "-o", "out"),
            "The prompts file nowhere://a/b.txt can't",
        ),
        (
            ("--prompts", "prompts.txt", "-o", "nowhere://x"),
            "The output nowhere://x is a URL.",
        ),
        (("--prompts", "prompts.txt", "-o", "prompts.txt"), "The output"),
        (
            ("--prompts", "prompts.txt", "-o", "."),
            "isn't empty (it holds prompts.txt), and isn't from a batch.",
        ),
        (
            ("--prompts", "prompts.txt", "-o", "out", "--format", "webp"),
            "A .webp file holds one frame.",
        ),
        (("--prompts", "prompts.txt", "-o", "out", "--image", "no.png"), "no.png can't be read"),
    ],
)
def test_wrong_options_are_refused(
    run: Run, tiny: str, words: tuple[str, ...], message: str
) -> None:
    """What cannot work is said before anything is made: one message, exit 2."""
    code, out, err = run("batch", tiny, *words, *SIZES[:8])
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not list(Path().glob("out/*.mp4"))


def test_two_batches_do_not_share_a_folder(run: Run, tiny: str) -> None:
    """A second batch into the same folder at the same time is refused."""
    import filelock

    Path("out").mkdir()
    with filelock.FileLock("out/.lock"):
        words = ("batch", tiny, "--prompts", "prompts.txt", "-o", "out", *SIZES)
        code, _, err = run(*words)
    assert code == 2
    assert "Another batch is writing to" in err


@pytest.mark.usefixtures("each_device")
def test_batch_is_a_function(tmp_path: Path, tiny: str) -> None:
    """From Python the summary comes back, and nothing is printed."""
    (tmp_path / "p.txt").write_text("a red circle\n")
    options = BatchOptions(
        tiny,
        str(tmp_path / "out"),
        str(tmp_path / "p.txt"),
        precision="fp32",
        **{"steps": 1, "frames": 9, "height": 32, "width": 32},
    )
    record = batch(options, Display())
    assert (record.made, record.failed, record.plans) == (1, 0, ())
    assert f" --prompts {tmp_path}/p.txt " in record.command


@pytest.mark.thorough
def test_nothing_left_to_do_is_answered_without_pytorch(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary answers the same command; another seed, a lost output or a changed model does not."""
    words = ("batch", tiny, "--prompts", "prompts.txt", "-o", "out", *SIZES)
    Path("prompts.txt").write_text("a red circle\n")
    assert run(*words)[0] == 0
    first = read_summary()
    code = "import sys; from stopdown.app.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert "1 of 1 done, 1 finished before." in done.stdout
    assert "1 of 1 items are finished already." in done.stderr
    assert not {"torch", "diffusers"} & set(done.stdout.split())
    again = read_summary()
    assert (again.asked, again.skipped, again.plans) == (first.asked, 1, first.plans)
    assert again.items[0].preview == first.items[0].preview

    summary = Path("out/batch.json").read_bytes()

    def is_answered(*others: str) -> bool:
        Path("out/batch.json").write_bytes(summary)
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_command, "_run", lambda *_: said.append("run") or first)
            assert run(*words, *others)[0] == 0
        return not said

    assert is_answered()
    assert is_answered("--quiet", "--strict")
    assert not is_answered("--seed", "1")
    with monkeypatch.context() as patch:
        patch.setattr(prompts, "read_version", lambda name: "0.0.1")
        assert not is_answered()
    os.utime(weights := next(Path(tiny).rglob("*.safetensors")))
    assert not is_answered(), weights
    summary = Path("out/batch.json").read_bytes()
    assert is_answered()
    next(Path("out").glob("*.mp4.json")).unlink()
    assert not is_answered()


@pytest.mark.thorough
def test_what_auto_decided_is_not_decided_again(
    run: Run, save_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed batch keeps the precisions that it began with, however fast a busy machine is by then."""
    model = str(save_tiny("cogvideox", "bf16"))
    words = ("batch", model, "--prompts", "prompts.txt", "-o", "out", *SIZES[:-2])
    Path("prompts.txt").write_text("a red circle\n")
    assert run(*words)[0] == 0
    before = read_summary()
    assert before.decisions

    def decide(*_: object, **__: object) -> Plan:
        wide = tuple(dataclasses.replace(x, precision="fp32") for x in before.decisions)
        return Plan(model, components=wide)

    monkeypatch.setattr(jobs, "choose_plan", decide)
    Path("prompts.txt").write_text("a red circle\na blue square\n")
    assert run(*words)[0] == 0
    after = read_summary()
    assert (after.skipped, after.made, after.decisions) == (1, 1, before.decisions)
    assert run(*words, "--precision", "transformer=fp32")[0] == 0  # asked otherwise: decided anew
    assert {x.precision for x in read_summary().decisions} == {"fp32"}


def test_a_changed_file_of_an_argument_is_another_request(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture given by --arg is known by its content, as one given by an option is."""
    seen = list[str]()

    def stop(items: Any, options: Any, built_in: bool) -> str:
        seen.append(digest_request(items, options, True))
        raise InputError("Stopped.")

    monkeypatch.setattr(batch_command, "digest_request", stop)
    for side in (8, 16):
        Image.new("RGB", (side, side)).save("a.png")
        run("batch", tiny, "--prompt", "a", "-o", "clips", "--arg", "hint=a.png")
    assert len(set(seen)) == len(seen) == 2


def test_a_batch_that_ended_before_its_summary_goes_on(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a kill between the plan and the summary leaves a folder that is still the batch's."""
    Path("clips").mkdir()
    Path("clips", f"plan-{'0' * 12}-0.json").write_text("{}")
    assert run("batch", tiny, "--prompt", "a", "-o", "clips", *SIZES)[0] == 0
    assert Path("clips", "batch.json").is_file()


def test_an_empty_prompt_is_refused(run: Run, tiny: str) -> None:
    """It comes from a shell variable that isn't set."""
    code, _, err = run("batch", tiny, "--prompt", "", "-o", "clips", *SIZES)
    assert code == 2
    assert "The prompt is empty. An empty prompt often comes from a shell variable" in err
    assert not Path("clips").exists()

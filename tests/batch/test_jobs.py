"""`stopdown batch` in one process: items, outputs, faults as results, what is refused."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.batches import PROMPTS, SIZES, read_outputs, read_summary
from stopdown.frames.media import write_media
from stopdown.records import RunRecord, from_json
from stopdown.runtime import runs
from stopdown.sources.sources import resolve_source

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("prompts_here")


@pytest.mark.usefixtures("each_device")
def test_each_item_is_made_once(run: Run, tiny: str) -> None:
    """Three prompts: three videos with records; again: nothing is made; a line more: that one alone."""
    code, out, err = run("batch", tiny, "--prompts", "prompts.txt", "-o", "out", *SIZES)
    assert code == 0, err
    assert re.match(r"3 of 3 done, [\d.]+ s each\.\n", out)
    assert out.endswith("Wrote out/batch.html\n")
    assert "2 of 3: a-blue-square-" in err
    first = read_summary()
    assert [x.status for x in first.items] == ["made"] * 3
    assert [x.prompt for x in first.items] == PROMPTS.splitlines()
    for item in first.items:
        record = from_json((Path("out") / f"{item.output}.json").read_bytes(), RunRecord)
        assert (record.item, record.output) == (item.item, item.output)
        assert record.calls
        assert record.preview == item.preview
    page = Path("out/batch.html").read_text()
    assert page.count("data:image/webp;base64,") == 3
    stamps = {path: path.stat().st_mtime_ns for path in Path("out").glob("*.mp4*")}
    assert len(stamps) == 6
    Path("prompts.txt").write_text(f"a yellow circle\n\n{PROMPTS}")
    code, out, err = run("batch", tiny, "--prompts", "prompts.txt", "-o", "out", *SIZES)
    assert code == 0
    assert out.startswith("4 of 4 done, 3 finished before, ")
    assert "3 of 4 items are finished already." in err
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert [x.line for x in read_summary().items] == [1, 3, 4, 5]
    assert not list(Path("out").glob(".*"))


@pytest.mark.usefixtures("each_device")
def test_generate_makes_the_same(run: Run) -> None:
    """An item of a batch has the bits that generate gives for the same prompt, seed and sizes."""
    Path("items.jsonl").write_text('{"prompt": "a red circle", "seed": 3, "name": "circle"}\n')
    assert run("batch", "shapes", "--prompts", "items.jsonl", "-o", "out", *SIZES)[0] == 0
    words = ("a red circle", "--seed", "3", "-o", "circle.mp4")
    assert run("generate", "shapes", *words, *SIZES)[0] == 0
    assert Path("out/circle.mp4").read_bytes() == Path("circle.mp4").read_bytes()


@pytest.mark.usefixtures("each_device")
def test_items_have_fields_of_their_own(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON lines on standard input and a CSV file say seed, sizes and names; the hash knows them."""
    table = "prompt,seed,steps,name\na red circle,1,,one\na red circle,2,2,two\n"
    Path("items.csv").write_text(table)
    assert run("batch", tiny, "--prompts", "items.csv", "-o", "out", *SIZES)[0] == 0
    one, two = read_summary().items
    assert (one.output, two.output) == ("one.mp4", "two.mp4")
    records = [json.loads(Path(f"out/{x}.mp4.json").read_text()) for x in ("one", "two")]
    assert [(x["request"]["seed"], x["request"]["steps"]) for x in records] == [(1, 1), (2, 2)]
    assert one.item != two.item
    lines = b'{"prompt": "a red circle", "seed": 1}\n{"prompt": "a red circle", "seed": 1}\n'
    stdin = os.fdopen(os.pipe()[0], "rb")
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": _Bytes(lines)})())
    assert run("batch", tiny, "--prompts", "-", "-o", "again", *SIZES)[0] == 0
    stdin.close()
    record = read_summary("again")
    assert record.notes == ("Line 2 is the same item as line 1.",)
    assert [x.item for x in record.items] == [one.item]


class _Bytes:
    """A stream of standard input."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, most: int) -> bytes:
        return self._content[:most]


@pytest.mark.thorough
def test_items_begin_with_videos(run: Run, save_tiny: Callable[..., Path]) -> None:
    """A video is named from the place of the prompts; another video of this name is another item."""
    Path("items").mkdir()
    frames = np.random.default_rng(0).integers(0, 255, (9, 32, 32, 3), np.uint8)
    for name, drawn in (("a", frames), ("b", frames[::-1])):
        write_media(Path(f"items/{name}.gif"), np.ascontiguousarray(drawn), 8)
    rows = [{"prompt": "a", "video": f"{name}.gif"} for name in ("a", "b", "a")]
    Path("items/rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = save_tiny("cogvideox-video", "fp32")
    sizes = ("--height", "32", "--width", "32", "--steps", "2", "--precision", "fp32")
    code, out, err = run("batch", model, "--prompts", "items/rows.jsonl", "-o", "out", *sizes)
    assert code == 0, err
    assert out.startswith("2 of 2 done, ")
    assert "Line 3 is the same item as line 1." in err
    one, other = read_outputs().values()
    assert one != other


REFUSED = {
    "empty": (b"\n\n", "The prompts bad.txt are empty."),
    "latin1": (b"a caf\xe9\n", "The prompts bad.txt aren't UTF-8: byte 6, in line 1."),
    "field": (b'{"prompt": "a"}\n{"promt": "b"}\n', "the field 'promt' is unknown."),
    "type": (b'{"prompt": "a", "seed": "x"}\n', "Line 1 of the prompts bad.jsonl is wrong: "),
    "json": (b'{"prompt": "a"\n', "Line 1 of the prompts bad.jsonl is wrong: it isn't JSON"),
    "names": (
        b'{"prompt": "a", "name": "x"}\n{"prompt": "b", "name": "X"}\n',
        "Lines 1 and 2 of the prompts bad.jsonl have the same name: X.",
    ),
    "path": (b'{"prompt": "a", "name": "../x"}\n', "'../x' is no name of a file."),
    "size": (
        b'{"prompt": "a"}\n{"prompt": "b", "height": 33}\n',
        "Line 2 of the prompts: --height 33 doesn't fit this model",
    ),
    "image": (b'{"prompt": "a", "image": "gone.png"}\n', "gone.png can't be read"),
    "mask": (b'{"prompt": "a", "mask": "gone.png"}\n', "gone.png can't be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_prompts_are_refused(run: Run, tiny: str, case: str) -> None:
    """A file that no batch can be made of: one message, exit 2, nothing made."""
    content, message = REFUSED[case]
    name = "bad.jsonl" if content.startswith(b"{") else "bad.txt"
    Path(name).write_bytes(content)
    code, out, err = run("batch", tiny, "--prompts", name, "-o", "out", *SIZES)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not list(Path().glob("out/*"))


@pytest.mark.usefixtures("each_device")
def test_ctrl_c_keeps_what_is_finished(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second item: exit 130, the first one stays, and the same command goes on."""
    make_frames, seen = runs.make_frames, []

    def interrupt(loaded: Any, request: Any, **named: Any) -> Any:
        seen.append(request.prompt)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return make_frames(loaded, request, **named)

    monkeypatch.setattr(runs, "make_frames", interrupt)
    words = ("batch", tiny, "--prompts", "prompts.txt", "-o", "out", *SIZES)
    code, _, err = run(*words)
    assert code == 130
    assert "1 of 3 items are finished in " in err
    assert "the same command continues from there." in err
    assert len(read_outputs()) == 1
    code, out, _ = run(*words)
    assert (code, "3 of 3 done, 1 finished before, " in out) == (0, True)
    assert seen == [*PROMPTS.splitlines()[:2], *PROMPTS.splitlines()[1:]]


@pytest.mark.thorough
def test_repairs_make_a_new_version_of_the_plan(run: Run, save_tiny: Any) -> None:
    """By a plan that overflows the first item is repaired; the next ones are made by what that taught."""
    from models.bare_plans import write_bare_plan
    from stopdown.plans.plan_files import read_plan

    folder = save_tiny("cogvideox", "fp32", "transformer")
    write_bare_plan(folder, Path("plan.json"))
    words = ("batch", folder, "--prompts", "prompts.txt", "-o", "out", *SIZES[:8])
    code, _, err = run(*words, "--precision", "plan.json", "--device", "cpu")
    assert code == 0, err
    record = read_summary()
    assert record.repaired == 1
    assert [bool(x.repairs) for x in record.items] == [True, False, False]
    base = read_plan("plan.json").seal
    assert record.plans[0] == base
    assert [x.plan for x in record.items] == [base, record.plans[1], record.plans[1]]
    assert read_plan(f"out/plan-{base[:12]}-1.json").seal == record.plans[1]
    assert "The plan has a new version" in err
    Path("prompts.txt").write_text(f"{PROMPTS}a fourth\n")
    assert run(*words, "--precision", "plan.json", "--device", "cpu")[0] == 0
    again = read_summary()
    assert [x.status for x in again.items] == ["skipped"] * 3 + ["made"]
    assert again.items[-1].plan == record.plans[1]


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_items_have_a_lora_and_a_scheduler(run: Run, save_tiny: Any, tmp_path: Path) -> None:
    """As with generate: the same bits, recorded by the hash."""
    pytest.importorskip("peft")
    from models.lora_cases import write_lora

    folder = save_tiny("sd", "fp32")
    lora = write_lora(resolve_source(folder), tmp_path)
    Path("prompts.txt").write_text("a red circle\n")
    sizes = ("--height", "32", "--width", "32", "--steps", "1", "--precision", "fp32")
    extras = ("--lora", f"{lora}:0.5", "--scheduler", "DDIM")
    words = ("batch", folder, "--prompts", "prompts.txt", *sizes)
    hashes = set()
    for number, more in enumerate(((), extras[:2], extras[2:], extras)):
        code, _, err = run(*words, "-o", f"out{number}", *more)
        assert code == 0, err
        hashes.add(read_summary(f"out{number}").items[0].item)
    assert len(hashes) == 4
    assert run("generate", folder, "a red circle", *sizes, *extras, "-o", "a.png")[0] == 0
    (made,) = Path("out3").glob("*.png")
    assert made.read_bytes() == Path("a.png").read_bytes()
    (plain,) = Path("out0").glob("*.png")
    assert plain.read_bytes() != made.read_bytes()


def test_finished_items_are_known_in_each_format(run: Run, tiny: str) -> None:
    """A webm is as finished as an mp4: nothing is made again."""
    words = ("batch", tiny, "--prompts", "prompts.txt", "-o", "out", "--format", "webm", *SIZES)
    assert run(*words)[0] == 0
    assert "3 of 3 done, 3 finished before." in run(*words)[1]


def test_a_clock_that_jumps_changes_nothing(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten years back in the middle, files from the future: finished items stay, and no time is negative."""
    Path("prompts.txt").write_text("a red circle\na blue square\n")
    words = ("batch", tiny, "--prompts", "prompts.txt", "-o", "out", *SIZES)
    clock, jumps = time.time, iter([0.0, 10.0])
    years = {"now": 0.0}

    def jump() -> float:
        years["now"] = next(jumps, -10.0)
        return clock() + years["now"] * 365 * 86400

    monkeypatch.setattr(time, "time", jump)
    assert run(*words)[0] == 0
    made = read_outputs()
    for path in Path("out").iterdir():
        os.utime(path, (4e9, 4e9))
    Path("prompts.txt").write_text("a red circle\na blue square\na green circle\n")
    assert run(*words)[0] == 0
    record = read_summary()
    assert (record.skipped, record.made) == (2, 1)
    assert min(x.elapsed_s for x in record.items) >= 0
    assert made.items() <= read_outputs().items()


def test_a_journal_is_resumed_on_another_day(run: Run, tiny: str) -> None:
    """Calls of an item that was stopped are answered whatever the clock says; the record counts them."""
    words = ("batch", tiny, "--prompts", "prompts.txt", "-o", "out", *SIZES, "--journal", "kept")
    Path("prompts.txt").write_text("a red circle\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "write_result", stop_once)
        assert run(*words)[0] == 130
    for path in Path("kept").rglob("*"):
        os.utime(path, (4e9, 4e9))
    assert run(*words)[0] == 0
    record = from_json(next(Path("out").glob("*.mp4.json")).read_bytes(), RunRecord)
    assert record.journal is not None
    assert record.journal.answered == sum(record.journal.components.values()) > 0
    assert record.journal.written == 0
    assert not [*Path("kept").iterdir()]


def stop_once(*_: object, **__: object) -> None:
    """In the place of writing the frames."""
    raise KeyboardInterrupt

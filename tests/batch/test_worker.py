"""What a worker makes of its items: faults as results, memory shared by items of one size."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.batches import PICTURE, SIZES, read_summary
from stopdown.records import RunRecord, from_json
from stopdown.runtime import runs

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("prompts_here")


@pytest.mark.usefixtures("each_device")
def test_a_fault_that_stays_is_a_result(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One item that fails is recorded and counted, the others are made, and the exit code is 1."""
    make_frames = runs.make_frames

    def fail(loaded: Any, request: Any, **named: Any) -> Any:
        if request.prompt == "a blue square":
            raise ValueError("it is blue")
        return make_frames(loaded, request, **named)

    monkeypatch.setattr(runs, "make_frames", fail)
    words = ("batch", tiny, "--prompts", "prompts.txt", "-o", "out", *SIZES)
    code, out, err = run(*words)
    assert code == 1
    assert "2 of 3 done, 1 failed, " in out
    assert "failed: ValueError: it is blue" in err
    assert [x.status for x in read_summary().items] == ["made", "failed", "made"]
    assert "ValueError: it is blue" in Path("out/batch.html").read_text()
    monkeypatch.setattr(runs, "make_frames", make_frames)
    assert run(*words)[0] == 0
    assert [x.status for x in read_summary().items] == ["skipped", "made", "skipped"]


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_items_stay_within_memory(run: Run, save_tiny: Any) -> None:
    """With --memory each item has the bits of generate within it, its strategy, and a hash of its own."""
    folder = save_tiny("sd", "fp32")
    words = ("batch", folder, "--prompts", "prompts.txt", *PICTURE)
    code, out, err = run(*words, "-o", "misfit", "--memory", "60KiB")
    assert (code, read_summary("misfit").failed) == (1, 3)
    assert out.count("No strategy stays within 60") == 3
    (least,) = set(re.findall(r", or --memory (\d+MiB)\.", out))
    assert run(*words, "-o", "out")[0] == 0
    code, _, err = run(*words, "-o", "within", "--memory", least)
    assert code == 0, err
    for item, plain in zip(read_summary("within").items, read_summary().items, strict=True):
        record = from_json(Path(f"within/{item.output}.json").read_bytes(), RunRecord)
        assert record.strategy
        assert item.item != plain.item
    said = ("a green circle", *PICTURE, "--memory", least, "-o", "green.png")
    assert run("generate", folder, *said)[0] == 0
    assert Path(f"within/{item.output}").read_bytes() == Path("green.png").read_bytes()


@pytest.mark.usefixtures("each_device")
def test_a_strategy_is_put_on_once_for_all_items(
    run: Run, save_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that wait elsewhere go there once, as long as items have the same size."""
    fitted: list[Any] = []
    fit = runs.fit_run

    def count(loaded: Any, request: Any, *others: Any) -> Any:
        fitted.append((request.height, request.width))
        return fit(loaded, request, *others)

    monkeypatch.setattr(runs, "fit_run", count)
    rows = ['{"prompt": "a"}', '{"prompt": "b"}', '{"prompt": "c", "height": 48}']
    Path("prompts.jsonl").write_text("\n".join(rows))
    words = ("batch", save_tiny("sd", "fp32"), "--prompts", "prompts.jsonl", "-o", "out")
    code, _, err = run(*words, "--memory", "auto", *PICTURE)
    assert code == 0, err
    assert fitted == [(32, 32), (48, 32)]

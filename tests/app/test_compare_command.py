"""`stopdown compare` and `stopdown report` as a user meets them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from models.comparisons import make_comparison
from stopdown.app.compare_command import CompareOptions, find_cells, read_prompts
from stopdown.app.registration import describe_command
from stopdown.comparison.records import Comparison
from stopdown.errors import InputError
from stopdown.records import from_json, to_json

SIZES = ("--frames", "9", "--height", "32", "--width", "32", "--steps", "1", "--device", "cpu")


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> Callable[..., tuple[int, str, str]]:
    """A command in an empty folder: its exit code, and what it wrote to stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.thorough
def test_compare_writes_page_and_record(run: Any, save_tiny: Any, tmp_path: Path) -> None:
    """A comparison by component ends with 1 for its bad line, with both files and no cells left."""
    folder = save_tiny("cogvideox", "fp32")
    Path("prompts.txt").write_bytes(b"a red circle\n\xff\n")
    code, out, err = run(
        *("compare", folder, "--prompts", "prompts.txt", *SIZES),
        *("--precision", "fp32", "--precision", "transformer=bf16,vae.decode=fp32"),
        *("-o", "page.html"),
    )
    assert code == 1, err
    assert "transformer=bf16+vae.decode=fp32" in out
    assert "Line 2 of the prompts wasn't run: Byte 1 isn't UTF-8." in out
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        "page.html",
        "page.html.json",
        "prompts.txt",
    ]
    made = from_json(Path("page.html.json").read_bytes(), Comparison)
    decided = {d.component: d.precision for d in made.variants[1].decisions}
    assert (decided["transformer"], decided["vae.decode"]) == ("bf16", "fp32")
    assert "--precisions fp32 --precisions transformer=bf16,vae.decode=fp32" in made.command
    assert made.request["steps"] == 1


@pytest.mark.slow  # the choice of tiles is asked in tests/memory/test_forecast.py
def test_a_limit_of_memory_is_kept_and_recorded(run: Any, save_tiny: Any) -> None:
    """Only fp32 needs tiles, which change the picture, so bf16 has them too; record and page say so."""
    sizes = ("--height", "64", "--width", "64", "--steps", "1", "--device", "cpu")
    limited = ("compare", save_tiny("sd", "fp32"), *sizes, "--memory", "700KiB", "--json")
    code, out, err = run(*limited, "--prompt", "a", "--precisions", "bf16,fp32")
    assert code == 0, err
    made = from_json(out.encode(), Comparison)
    ran = {x.name: x.strategy for x in made.variants}
    assert ran["fp32"].endswith("+tiling")
    assert ran["bf16"].endswith("+tiling")
    assert "--memory 700KiB" in made.command
    assert f"it ran as {ran['bf16']}" in made.variants[0].reasons[-1]
    assert f"it ran as {ran['bf16']}" in Path("report.html").read_text(encoding="utf-8")
    sizes_kept = {x.name: x.weights_bytes for x in made.variants}
    assert sizes_kept["fp32"] == pytest.approx(2 * sizes_kept["bf16"], rel=0.01)


def test_report_prints_the_record(run: Any) -> None:
    """`report` writes the page again; with --json the record without pictures is printed."""
    Path("r.html.json").write_text(to_json(make_comparison()))
    code, out, _ = run("report", "r.html.json")
    assert code == 0
    assert "Wrote r.html" in out
    assert "✕ broken" in out
    code, out, _ = run("report", "r.html.json", "-o", "s.html", "--json")
    assert code == 0
    assert json.loads(out)["kind"] == "comparison"
    assert Path("s.html").read_text() == Path("r.html").read_text()


def test_pages_replace_only_pages(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without -o a page and its record are numbered; --force replaces a page of Stopdown alone."""
    made = make_comparison()
    monkeypatch.setattr("stopdown.comparison.matrix.compare", lambda *given, **named: made)
    for name in ("report.html", "report-2.html"):
        code, out, _ = run("compare", "shapes", "--prompt", "a")
        assert (code, out.splitlines()[1]) == (0, f"Wrote {name}")
        kept = from_json(Path(f"{name}.json").read_bytes(), Comparison)
        assert dataclasses.replace(kept, command=made.command) == made
    code, out, _ = run("report", "report.html.json")
    assert (code, "Wrote report-3.html\n" in out) == (0, True)
    assert run("report", "report.html.json", "-o", "report.html")[0] == 2
    assert run("report", "report.html.json", "-o", "report.html", "--force")[0] == 0
    Path("index.html").write_text("<!doctype html><html><title>Mine</title>")
    Path("page.html.json").write_text("{}")
    for words, message in (
        (("report", "report.html.json", "-o", "index.html", "--force"), "The output index.html would "
         "replace a file that is no page of Stopdown."),
        (("compare", "shapes", "-o", "page.html"), "The record page.html.json would replace a file that "
         "Stopdown didn't write as a record."),
    ):  # fmt: skip
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert message in err
    assert "Mine" in Path("index.html").read_text()
    assert len(list(Path().iterdir())) == 7


def test_ctrl_c_keeps_what_is_done(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted comparison says where its cells are, and writes no page."""

    def interrupt(*_: Any, **options: Any) -> None:
        (options["folder"] / "row-1.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("stopdown.comparison.matrix.compare", interrupt)
    Path("p.txt").write_text("a red circle\n")
    code, _, err = run("compare", "shapes", "--prompts", "p.txt")
    assert code == 130
    assert (
        "What is done is kept in .report.html.cells: the same command continues from there." in err
    )
    assert [x.name for x in find_cells(Path("report.html")).iterdir()] == ["row-1.json"]
    assert not Path("report.html").exists()


def test_two_comparisons_do_not_share_a_page(run: Any, tmp_path: Path) -> None:
    """The cells of one that is going on are not taken or removed by another with the same page."""
    cells = find_cells(Path("page.html"))
    cells.mkdir()
    with filelock.FileLock(cells / ".lock"):
        code, out, err = run("compare", "shapes", "--prompt", "a", "-o", "page.html")
    assert (code, out) == (2, "")
    assert err == (
        "stopdown: Another comparison is keeping its cells in .page.html.cells just now. It removes "
        "this folder when it is "
        "done. Wait until it ends, or name another page with -o.\n"
    )
    assert cells.is_dir()


def test_the_command_repeats_the_request() -> None:
    """What the record says to type holds every option that was given, quoted."""
    options = CompareOptions(
        "shapes",
        Path("my prompts.txt"),
        ("a cat",),
        ("fp32,bf16", "plan.json"),
        Path("a.html"),
        steps=4,
        seed=7,
    )
    assert describe_command("compare", options, always=("precisions",)) == (
        "stopdown compare shapes --prompts 'my prompts.txt' --prompt 'a cat' "
        "--precisions fp32,bf16 --precisions plan.json -o a.html --seed 7 --steps 4"
    )


@pytest.mark.parametrize("is_done", [True, False])
def test_a_stop_keeps_cells_and_no_empty_folders(
    run: Any, save_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """Only what was finished is kept, and only then is the user told where."""
    model = save_tiny("cogvideox", "fp32")

    def stop(*_: Any, folder: Path, **__: Any) -> None:
        cells = folder / "compare-1" / "cells-1"
        cells.mkdir(parents=True)
        if is_done:
            (cells / "1.msgpack").write_bytes(b"a cell")
        raise KeyboardInterrupt

    monkeypatch.setattr("stopdown.comparison.matrix.compare", stop)
    code, _, err = run("compare", model, "--prompt", "a circle", *SIZES, "-o", "page.html")
    assert code == 130
    assert ("What is done is kept in .page.html.cells" in err) == is_done
    assert [x.name for x in tmp_path.rglob("*") if x.name != ".page.html.cells"] == (
        ["compare-1", "cells-1", "1.msgpack"] if is_done else []
    )
    assert (tmp_path / ".page.html.cells").exists() == is_done


def test_a_page_goes_into_a_folder_that_is_made_for_it(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished runs are kept there as well; a stop before the first leaves no folder."""
    made = make_comparison()

    def stop(*_: Any, **__: Any) -> None:
        assert Path("new/pages").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr("stopdown.comparison.matrix.compare", stop)
    assert run("compare", "shapes", "--prompt", "a", "-o", "new/pages/a.html")[0] == 130
    assert not Path("new").exists()
    monkeypatch.setattr("stopdown.comparison.matrix.compare", lambda *_, **__: made)
    assert run("compare", "shapes", "--prompt", "a", "-o", "new/pages/a.html")[0] == 0
    assert sorted(x.name for x in Path("new/pages").iterdir()) == ["a.html", "a.html.json"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_a_file_of_fields_is_no_list_of_prompts(name: str, tmp_path: Path) -> None:
    """Its lines would be drawn as they are written."""
    (tmp_path / name).write_text('{"prompt": "a"}\n')
    with pytest.raises(InputError, match="It reads a text file with one prompt"):
        read_prompts(tmp_path / name)

"""stopdown report: a page from a record, and what is no record."""

from __future__ import annotations

import base64
import dataclasses
import os
from pathlib import Path

import pytest

from models.comparisons import RUN, make_comparison
from stopdown.app.report_command import name_page, report
from stopdown.comparison.records import Comparison, Heat
from stopdown.errors import InputError, OptionError
from stopdown.records import RunRecord, to_json
from stopdown.report.pages import render_comparison


@pytest.fixture(scope="module")
def made() -> Comparison:
    """Two drawn prompts under four precisions."""
    return make_comparison()


def test_report_finds_the_output_beside(tmp_path: Path) -> None:
    """`stopdown report circle.mp4.json` takes circle.mp4 along and writes circle.html."""
    record = tmp_path / "circle.mp4.json"
    record.write_text(to_json(RUN))
    (tmp_path / "circle.mp4").write_bytes(b"film")
    found, page = report(record, None)
    assert found == RUN
    assert page == tmp_path / "circle.html"
    assert base64.b64encode(b"film").decode() in page.read_text()
    assert name_page(Path("report.html.json")) == Path("report.html")


def test_report_makes_the_same_page_again(made: Comparison, tmp_path: Path) -> None:
    """From the record alone comes the page that compare wrote."""
    record = tmp_path / "report.html.json"
    record.write_text(to_json(made))
    _, page = report(record, tmp_path / "again.html")
    assert page.read_text() == render_comparison(made)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """What is no record, has no report, is missing, or would be written elsewhere is said."""
    plan, text = tmp_path / "plan.json", tmp_path / "text.json"
    plan.write_text('{"kind": "plan"}')
    text.write_text("[1]")
    with pytest.raises(InputError, match="holds a record of the kind 'plan', which has no report"):
        report(plan, None)
    with pytest.raises(InputError, match="isn't a record of Stopdown"):
        report(text, None)
    with pytest.raises(InputError, match=r"The file .*gone\.json doesn't exist\."):
        report(tmp_path / "gone.json", None)
    with pytest.raises(OptionError, match=r"doesn't end in \.html"):
        report(plan, tmp_path / "page.pdf")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["plan.json", "text.json"]


def test_a_call_without_a_decision_has_no_reason(tmp_path: Path) -> None:
    """The page and the card of a run show such a call, and nothing where its reason would be."""
    record = tmp_path / "run.json"
    record.write_text(to_json(dataclasses.replace(RUN, decisions=())))
    found, page = report(record, None)
    assert isinstance(found, RunRecord)
    assert all(call.component in page.read_text() for call in found.calls)


BROKEN = [
    ({"verdict": "fine"}, {}, "the verdict 'fine' is unknown"),
    ({}, {"verdict": "fine"}, "the verdict 'fine' is unknown"),
    ({"name": "fp32"}, {}, "two precisions have one name"),
    ({}, {"precision": "other"}, "a prompt has other precisions than the comparison"),
    ({}, {"latents_rel_err": (0.1, -1.0)}, "an error of the latents is below 0"),
    (
        {"heats": (Heat("vae", ("a", "b"), ((1.0,),)),)},
        {},
        "a map of headroom doesn't have one row",
    ),
]


@pytest.mark.parametrize(("variant", "cell", "said"), BROKEN)
def test_a_comparison_that_does_not_fit_together_is_refused(
    made: Comparison, variant: dict, cell: dict, said: str, tmp_path: Path
) -> None:
    """Names, verdicts and maps that belong to nothing are named instead of drawn."""
    variants = [*made.variants[:-1], dataclasses.replace(made.variants[-1], **variant)]
    cells = [*made.rows[0].cells[:-1], dataclasses.replace(made.rows[0].cells[-1], **cell)]
    rows = [dataclasses.replace(made.rows[0], cells=tuple(cells)), *made.rows[1:]]
    record = tmp_path / "report.html.json"
    record.write_text(
        to_json(dataclasses.replace(made, variants=tuple(variants), rows=tuple(rows)))
    )
    with pytest.raises(InputError, match=rf"is inconsistent: {said}"):
        report(record, None)


def test_what_is_no_file_is_no_record(tmp_path: Path) -> None:
    """A named pipe is not waited for, and a folder, `.` included, is not read."""
    os.mkfifo(tmp_path / "run.json")
    for path in (tmp_path / "run.json", tmp_path, Path(), Path("/")):
        with pytest.raises(InputError, match=r"it isn't a regular file|is a directory"):
            report(path, None)

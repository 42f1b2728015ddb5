"""Pages and text of records, without a browser and without torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest

from models.comparisons import NAMES, RUN, make_comparison
from stopdown.app.cards import strip_pictures
from stopdown.comparison.records import BadLine, Comparison
from stopdown.records import BlockMaximum, from_json, to_json
from stopdown.report import figures
from stopdown.report.pages import render_comparison, render_run


@pytest.fixture(scope="module")
def made() -> Comparison:
    """Two drawn prompts under four precisions."""
    return make_comparison()


def read_data(page: str) -> list[dict]:
    """What the page's script reads, prompt by prompt."""
    pattern = r'<script type="application/json" class="row">(.*?)</script>'
    return [json.loads(text) for text in re.findall(pattern, page, re.DOTALL)]


def test_the_page_says_what_the_record_says(made: Comparison) -> None:
    """Headline, verdicts, reasons, measures, plan, machine and command all stand on the page."""
    page = render_comparison(made)
    cells = [cell for row in made.rows for cell in row.cells if cell.precision == "bf16"]
    worst = min(cell.measures.psnr_db for cell in cells if cell.measures)
    for text in (
        made.headline,
        "fp16 is closer to the reference than bf16 on 2 of 2 prompts.",
        f"{worst:.1f}",
        "7 values are NaN or Inf",
        "block.0.weight",
        made.command,
        "QoMEX 2010",
        "paper",
    ):
        assert text in page.replace("&#39;", "'"), text
    assert [cell["name"] for cell in read_data(page)[0]["cells"]] == list(NAMES)


def test_the_page_holds_everything(made: Comparison) -> None:
    """No address, no link to another file: the policy of the page forbids all but its own data."""
    page = render_comparison(made)
    assert "default-src 'none'" in page
    outside = re.findall(r"""(?:src|href)=["'](?!data:)([^"'#]+)""", page)
    assert outside == []
    assert "url(" not in page
    assert "https://" not in page
    assert "http://" not in page


def test_text_of_users_is_no_markup(made: Comparison) -> None:
    """A prompt with tags and a closing script is text, and comes back whole from the data."""
    page = render_comparison(made)
    assert "<b>0</b> & </script>" not in page
    assert read_data(page)[0]["prompt"] == made.rows[0].prompt


def test_bad_lines_and_failures_stand_in_place() -> None:
    """A line that was not run and a cell that failed are on the page, in the text and the notes."""
    made = make_comparison(2, error="RuntimeError: half way")
    made = dataclasses.replace(made, bad_lines=(BadLine(4, "caf\ufffd", "Byte 4 isn't UTF-8."),))
    page, notes = render_comparison(made), made.summarise().list_sentences()
    assert "Line 4" in page
    assert "Byte 4 isn&#39;t UTF-8." in page
    assert "RuntimeError: half way" in page
    assert "Line 4 of the prompts wasn't run: Byte 4 isn't UTF-8." in notes
    assert "bf16 didn't run on line 2: RuntimeError: half way" in notes


def test_the_text_has_a_row_for_each_precision(made: Comparison) -> None:
    """The table of the terminal has the worst of each measure, and words for what is not finite."""
    summary = made.summarise()
    headings, rows = summary.headings, summary.rows
    assert [row[0] for row in rows] == list(NAMES)
    broken = dict(zip(headings, rows[2], strict=True))
    assert broken["verdict"] == "✕ broken"
    assert broken["headroom, bits"] == "not finite"
    assert dict(zip(headings, rows[3], strict=True))["headroom, bits"] == "3.0"


def test_lines_end_where_values_are_lost(made: Comparison) -> None:
    """The chart has a line for each precision but the reference; one that is lost has a cross."""
    chart = figures.draw_growth(made)
    assert chart is not None
    lines = {line.name: line for line in chart.lines}
    assert set(lines) == set(NAMES[1:])
    assert lines["fp16-plain"].lost is not None
    assert lines["fp16-plain"].path == ""
    assert lines["fp16"].lost is None
    assert lines["fp16"].end[1] > lines["bf16"].end[1]  # further down: a smaller error
    labels = sorted(line.label_y for line in chart.lines)
    assert all(b - a >= 14 for a, b in itertools.pairwise(labels))


@pytest.mark.parametrize(("steps", "is_drawn"), [(2, False), (3, True)])
def test_two_points_are_no_chart(made: Comparison, steps: int, is_drawn: bool) -> None:
    """Up to two steps the numbers stand there open, with no line; from three on there is a chart."""
    rows = [
        dataclasses.replace(
            row,
            cells=tuple(
                dataclasses.replace(cell, latents_rel_err=(0.1, 0.2, 0.3)[:steps])
                for cell in row.cells
            ),
        )
        for row in made.rows
    ]
    page = render_comparison(dataclasses.replace(made, rows=tuple(rows)))
    assert ('<svg class="chart"' in page) is is_drawn
    assert ("<details open><summary>The numbers" in page) is not is_drawn
    assert "step 2" in page


def test_the_tightest_blocks_come_first() -> None:
    """Of 12 blocks the ten with the least headroom in any precision are shown, the worst first."""
    rows = {f"blocks.{n}": (float(n), 20.0) for n in range(12)}
    heat = figures.HeatMap("unet", {"bf16": rows, "fp16": {"blocks.11": (-3.0, None)}})
    assert heat.tightest.module_paths == ["blocks.11", *(f"blocks.{n}" for n in range(9))]
    assert heat.tightest.steps == 2
    assert list(heat.tightest.heats["fp16"]) == ["blocks.11"]
    few = figures.HeatMap("unet", {"bf16": {"a": (3.0,), "b": (1.0,)}})
    assert few.tightest.module_paths == ["b", "a"]


def test_other_blocks_are_folded() -> None:
    """A run of 12 blocks has ten of them open and all of them in a fold; one of ten has no fold."""
    for count, folds in ((12, 1), (10, 0)):
        maxima = tuple(BlockMaximum("unet", f"blocks.{n}", 0, "bf16", 2.0**n) for n in range(count))
        page = render_run(dataclasses.replace(RUN, maxima=maxima))
        assert page.count("blocks in their order</summary>") == folds


@pytest.mark.parametrize(
    ("bits", "kind"),
    [(-1000.0, "nf"), (-0.1, "over"), (0.0, "edge"), (1.0, "near"), (4.0, "fine"), (8.0, "far")],
)
def test_headroom_has_its_colour(bits: float, kind: str) -> None:
    """Each class of headroom begins where the legend says."""
    assert figures.choose_bin(bits) == kind


def test_a_run_has_a_page() -> None:
    """A record of generate is shown with its output, its precisions with reasons, and its findings."""
    page = render_run(RUN, ("video/mp4", "AAAA"))
    for text in (
        "a &lt;red&gt; circle",
        "stored so",
        "All 9 frames are one.",
        "3.0 MiB",
        "1.0 GiB",
    ):
        assert text in page, text
    assert 'src="data:video/mp4;base64,AAAA"' in page
    assert "<video" not in render_run(RUN)
    first, _, rest = page.partition("</header>")
    assert RUN.device_reason not in first  # nobody asked
    assert f"<dt>why there</dt><dd>{RUN.device_reason}</dd>" in rest
    for square in ('class="over"', 'class="nf"', 'class="far"', 'data-b="−2.0"'):
        assert square in page, square


def test_json_for_a_terminal_has_no_pictures(made: Comparison) -> None:
    """The printed record is whole but for the frames, and reads back."""
    text = to_json(strip_pictures(made))
    assert '"data"' not in text
    read = from_json(text, Comparison)
    assert [row.cells[1].measures for row in read.rows] == [
        row.cells[1].measures for row in made.rows
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.42, "0.42 s"),
        (99.4, "99 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 0 min"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations_are_read_at_a_glance(seconds: float, said: str) -> None:
    """Hours from an hour on; what rounds up to one is one."""
    assert figures.format_seconds(seconds) == said

"""Implementation of `stopdown compare`: run prompts in several precisions, and write an HTML page."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from stopdown.app.display import Display, load_libraries
from stopdown.app.flags import (
    DeviceOption,
    ForceOption,
    ModelOptions,
    RunOptions,
    SourceArgument,
)
from stopdown.app.registration import describe_command
from stopdown.app.request_options import find_named_source, read_request
from stopdown.app.size_limits import refuse_unmeasurable
from stopdown.batch.prompts import LONGEST, find_text_fault
from stopdown.comparison.precision_lists import parse_precisions
from stopdown.comparison.records import BadLine, Comparison
from stopdown.devices.environment import require_package
from stopdown.errors import InputError
from stopdown.files.json_files import UnreadableError, read_small_file
from stopdown.files.outputs import (
    check_target,
    find_free,
    find_record_path,
    held_folder,
    written_beside,
)
from stopdown.pipelines.requests import check_seed, refuse_missing_prompt
from stopdown.plans.plan_files import read_plan
from stopdown.records import describe_other, to_json
from stopdown.report.pages import check_page, render_comparison, write_page

DEFAULT_OUTPUT = Path("report.html")
"""Default path of the page; a number is added if the file exists."""

_LARGEST_SEED = 2**62 - 1
"""Largest first seed; later prompts use the seeds after it."""


@dataclass(frozen=True)
class CompareOptions(RunOptions, ModelOptions):
    """Compare precisions side by side on one HTML page.

    Each prompt runs with the same noise in each precision. The page is one self-contained HTML file. If
    a comparison was interrupted, the same command continues it.

    Examples:
      stopdown compare shapes --prompt "a red circle" --precisions fp32,bf16 --steps 4
      stopdown compare zai-org/CogVideoX-5b --prompts prompts.txt -o report.html
    """

    source: SourceArgument
    prompts: Annotated[Path | None, typer.Option(help="Text file with one prompt per line.")] = None
    prompt: Annotated[tuple[str, ...], typer.Option(help="A prompt. Repeat for several.")] = ()
    precisions: Annotated[
        tuple[str, ...],
        typer.Option(
            "--precisions",
            "--precision",
            help="Precisions to compare, separated by commas, or repeat the option: fp32, bf16, "
            "fp16-plain (nothing repaired), fp16 (rescaled), autocast, clamp, a plan file, auto, or per "
            "component: transformer=bf16,vae=fp32 (in a list, transformer=bf16+vae=fp32). By default "
            "fp32,bf16,fp16-plain,fp16.",
            show_default=False,
        ),
    ] = ("fp32,bf16,fp16-plain,fp16",)
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Page to write, ending in .html. By default report.html, or report-2.html if "
            "that exists, and so on.",
        ),
    ] = None
    force: ForceOption = False
    device: DeviceOption = "auto"
    seed: Annotated[
        int, typer.Option(help="Seed of the first prompt. Each further prompt uses the next seed.")
    ] = field(default=0, kw_only=True)
    memory: Annotated[
        str | None,
        typer.Option(
            help=(
                "Stay within this much device memory in each run, such as 15GiB; auto uses "
                "all of the device's memory. If the decoder needs tiles in one precision, it "
                "uses them in all."
            )
        ),
    ] = None


def run_compare_command(options: CompareOptions) -> int:
    """Run the command and print its results; return 1 if a run failed or a prompt was invalid."""
    from stopdown.app.cards import print_record, strip_pictures
    from stopdown.app.progress import open_display, print_result

    with open_display(options) as display:
        made, page = compare_model(options, display)
    draw = functools.partial(print_record, made, page)
    print_result(options, strip_pictures(made), draw, name=page)
    failed = any(cell.error for row in made.rows for cell in row.cells)
    return 1 if failed or made.bad_lines else 0


def compare_model(options: CompareOptions, display: Display) -> tuple[Comparison, Path]:
    """Run the comparison and write its page and its record; return the record and the path of the page.

    Each cell (one prompt in one precision) is saved beside the output until all are done. An interrupted
    comparison therefore continues with the first missing cell.
    """
    for package in ("torchmetrics", "jinja2"):
        require_package(package, "compare", "`stopdown compare`")
    output = options.output or find_free(DEFAULT_OUTPUT, ".json")
    check_page(output, force=options.force)
    folder = find_cells(output)
    check_target(
        find_record_path(output),
        noun="record",
        replaces=describe_no_comparison,
        force=options.force,
    )
    check_target(folder, folder=True, noun="folder of finished cells", replaces=lambda path: "")
    check_seed("seed", options.seed, _LARGEST_SEED)
    request = read_request(options)
    good, bad = ([], []) if options.prompts is None else read_prompts(options.prompts)
    last = good[-1][0] if good else 0
    good += [(last + place, text) for place, text in enumerate(options.prompt, 1)]
    numbered = good or [(1, "")]
    names = parse_precisions(options.precisions)
    for name in names:
        if name.endswith(".json"):
            read_plan(name)
    source = find_named_source(options, display)
    first = dataclasses.replace(request, prompt=numbered[0][1] or None)
    refuse_missing_prompt(source.pipeline_class, source.components, first)
    load_libraries(display)
    widest = "fp16" if {"fp32", "autocast"}.isdisjoint(names) else "fp32"
    if options.memory is None:
        refuse_unmeasurable(source, request, options.device, display, precision=widest)
    from stopdown.comparison.matrix import compare as run_matrix
    from stopdown.comparison.subjects import describe_subject
    from stopdown.records import MemoryPlan

    try:
        with _held(folder):
            subject = describe_subject(
                source,
                first,
                device=options.device,
                progress=display.progress,
                memory=None if options.memory is None else MemoryPlan(options.memory),
                names=names,
            )
            made = run_matrix(
                subject,
                numbered,
                options.precisions,
                request=request,
                folder=folder,
                progress=display.progress,
            )
            made = dataclasses.replace(
                made,
                bad_lines=tuple(bad),
                command=describe_command("compare", options, always=("precisions",)),
            )
            html = render_comparison(made)
            page = write_page(output, html, ".json", numbered=options.output is None)
            with written_beside(find_record_path(page), replaces=describe_no_comparison) as part:
                part.write_text(to_json(made), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
    except (KeyboardInterrupt, SystemExit):
        if folder.exists():
            text = f"What is done is kept in {folder}: the same command continues from there."
            display.announce(text)
        raise
    return made, page


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock the folder of finished cells (one prompt in one precision each) while the block runs.

    It is removed at the end if it holds no files, with the folders that were made for it.

    Raises:
        InputError: another process holds the lock.
    """
    busy = InputError(
        f"Another comparison is keeping its cells in {folder} just now.",
        expected="It removes this folder when it is done.",
        remedy="Wait until it ends, or name another page with -o.",
    )
    missing = itertools.takewhile(lambda path: not path.exists(), folder.parents)
    made = (folder, *missing)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # in here, since a stop may come while it is made
        with held_folder(folder, busy):
            yield
    finally:
        for path in (*sorted(folder.rglob("*"), reverse=True), *made):
            with contextlib.suppress(OSError):  # a file, or a folder with files
                path.rmdir()


describe_no_comparison = functools.partial(describe_other, "comparison")
"""Describes a file that must not be overwritten as it holds no comparison; "" if it holds one."""


def find_cells(output: Path) -> Path:
    """Return the folder in which a comparison that isn't complete keeps its finished runs."""
    return output.with_name(f".{output.name}.cells")


MOST_LINES = 10_000
_MOST_BYTES = 4 * LONGEST * 1_000


def read_prompts(path: Path) -> tuple[list[tuple[int, str]], list[BadLine]]:
    """Return the prompts of a file with their line numbers, and the lines that are not valid prompts."""
    if (kind := path.suffix.lower()) in (".csv", ".json", ".jsonl", ".ndjson", ".tsv"):
        raise InputError(
            f"The prompt file {path} is a {kind} file.",
            expected="compare runs all prompts with the same options. It reads a text file with one prompt "
            "on each line.",
            remedy="Write the prompts alone into a .txt file.",
        )
    try:
        content = read_small_file(path, most_bytes=_MOST_BYTES)
    except UnreadableError as error:
        raise InputError(
            f"The prompt file {path} can't be read: {error}.",
            expected="Prompts are a text file with one prompt on each line.",
            remedy="Name a file that exists.",
        ) from error
    lines = content.removeprefix(b"\xef\xbb\xbf").splitlines()
    if len(lines) > MOST_LINES:
        raise InputError(
            f"The prompt file {path} has {len(lines)} lines.",
            expected=f"At most {MOST_LINES} prompts are compared at a time.",
            remedy=f"Take the first of them: head -n {MOST_LINES} {path} > fewer.txt",
        )
    good: list[tuple[int, str]] = []
    bad: list[BadLine] = []
    for number, line in enumerate(lines, 1):
        read = _read_line(number, line)
        if isinstance(read, BadLine):
            bad.append(read)
        elif read:
            good.append((number, read))
    if not good:
        said = "; ".join(f"line {x.line}: {x.reason.rstrip('.').lower()}" for x in bad[:3])
        raise InputError(
            f"The prompt file {path} holds no prompt: {said or 'it is empty'}.",
            expected="Prompts are read from a text file in UTF-8 with one prompt on each line.",
            remedy=f'Write one: echo "a red circle moving left" > {path}',
        )
    return good, bad


def _read_line(number: int, line: bytes) -> str | BadLine:
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        shown = line.decode("utf-8", errors="replace")[:60]
        return BadLine(number, shown, f"Byte {error.start + 1} isn't UTF-8.")
    if text and (reason := find_text_fault(text)):  # of lines, so no line break is in it
        return BadLine(number, (text if text.isprintable() else ascii(text))[:60], reason)
    return text

"""Implementation of `stopdown batch`: run many prompts into a folder of outputs with a summary."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stopdown.app.call_arguments import list_argument_files
from stopdown.app.display import Display
from stopdown.app.flags import (
    SHOWN,
    DeviceOption,
    ModelOptions,
    PrecisionOption,
    RateOption,
    RunOptions,
    SourceArgument,
    StrictOption,
)
from stopdown.app.registration import describe_command, reword_text
from stopdown.app.request_options import (
    check_pairs,
    check_rate,
    read_limit,
    read_request,
    refuse_unknown_device,
)
from stopdown.app.size_limits import refuse_too_large
from stopdown.batch.output_folder import (
    PLAN_NAME,
    find_batch_folder,
    held_for_batch,
    list_item_names,
    write_whole,
)
from stopdown.batch.prompts import Item, digest_request, naming_line, read_items
from stopdown.batch.records import BatchRecord, ItemResult
from stopdown.devices.device_choice import choose_device, list_devices
from stopdown.devices.environment import describe_machine, has_moving_cursor
from stopdown.errors import InputError, OptionError
from stopdown.files.outputs import find_record_path
from stopdown.number_formats import format_about
from stopdown.pipelines.requests import MEDIA, Request
from stopdown.plans.precision import parse_request
from stopdown.records import from_json, to_json
from stopdown.report.pages import render_batch

if TYPE_CHECKING:
    from stopdown.batch.dispatch import PlanVersions
    from stopdown.batch.jobs import PreparedBatch, Settings, Task
    from stopdown.batch.pools import Pool

SUMMARY, PAGE = "batch.json", "batch.html"
"""Files that a batch writes beside its outputs: its record, and that record as a page."""


@dataclass(frozen=True)
class BatchOptions(RunOptions, ModelOptions):
    """Make one video, picture or sound for each prompt.

    Each worker loads the model once. If a batch was interrupted, the same command continues it.

    Examples:
      stopdown batch shapes --prompts prompts.txt -o out
      stopdown batch zai-org/CogVideoX-5b --prompts prompts.jsonl -o out --workers 2
    """

    source: SourceArgument
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            help="Folder for the outputs. To resume a batch, use the same folder.",
        ),
    ]
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Text file with one prompt per line, .jsonl or .csv file with fields for each item, "
            "or - for standard input.",
        ),
    ] = None
    prompt: Annotated[tuple[str, ...], typer.Option(help="A prompt. Repeat for several.")] = ()
    precision: PrecisionOption = "auto"
    device: DeviceOption = "auto"
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of processes; each loads the model. By default one per CUDA "
            "GPU, or one in all."
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed for items that don't set one.")] = field(
        default=0, kw_only=True
    )
    fps: RateOption = None
    format: Annotated[
        Literal["mp4", "webm", "gif", "png", "jpg", "webp", "wav", "flac"] | None,
        typer.Option(
            help="Format of the files. By default mp4 for videos, png for pictures and wav for sound."
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help=(
                "Limit each worker to this much device memory, such as 8GiB. By "
                "default, all of its device's memory. none keeps all weights on the device."
            )
        ),
    ] = None
    on_fault: Annotated[
        Literal["repair", "raise"],
        typer.Option(
            help="What to do if a component returns NaN or Inf. repair: repair it, retry the "
            "call and continue. raise: the item fails."
        ),
    ] = "repair"
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Folder to save the calls of unfinished items in, so that they resume at the "
            "step they reached."
        ),
    ] = None
    strict: StrictOption = False


def run_batch_command(options: BatchOptions) -> int:
    """Run the command; return 1 if an item failed, or with `--strict` if one has a finding."""
    from stopdown.app.progress import open_display, print_result

    is_shown = (sys.stderr.isatty() and has_moving_cursor()) or options.quiet
    with open_display(options, is_short=True) as display:
        record = batch(options, display, plain=None if is_shown else sys.stderr)
    items = tuple(dataclasses.replace(x, preview="") for x in record.items)
    print_result(
        options,
        dataclasses.replace(record, items=items),
        functools.partial(_print_summary, record, options),
        name=f"{record.output.rstrip('/')}/{PAGE}",
    )
    found = options.strict and any(x.findings for x in record.items)
    return int(record.failed > 0 or found)


def batch(options: BatchOptions, display: Display, plain: Any = None) -> BatchRecord:
    """Make every item that does not exist yet, and write the summary and its page.

    Args:
        plain: stream to which each finished item writes a line; None if a terminal shows bars.
    """
    begun = time.perf_counter()
    _check_options(options)
    items = [_place_media(options, x) for x in read_items(options.prompts, options.prompt)]
    asked = [(item, _read_request(options, item)) for item in items]

    folder = find_batch_folder(options.output)
    _refuse_other_folder(folder)
    with held_for_batch(folder):
        given = {name: x for name, x in vars(options).items() if name not in _OF_THE_RUN}
        given["files"] = tuple(list_argument_files(options.arg))
        digest = digest_request(items, given, built_in=options.source == "shapes")
        earlier = _read_summary(folder)
        if earlier is not None and (finished := _find_finished(earlier, digest, folder)):
            display.announce(f"{len(finished)} of {len(finished)} items are finished already.")
            return _write_summary(folder, _repeat(earlier, finished, options, begun))
        record = _run(options, asked, folder, earlier, display, plain, begun)
        is_whole = all(x.status != "failed" for x in record.items)
        return _write_summary(folder, dataclasses.replace(record, asked=digest if is_whole else ""))


def _run(
    options: BatchOptions,
    asked: list[tuple[Item, Request]],
    folder: Path,
    earlier: BatchRecord | None,
    display: Display,
    plain: Any,
    begun: float,
) -> BatchRecord:
    """Hash each item, make those that are not finished yet, and return the summary of all."""
    from stopdown.batch.dispatch import Dispatch, PlanVersions, read_versions
    from stopdown.batch.jobs import prepare_batch
    from stopdown.batch.worker import describe_result, find_finished

    names = list_item_names(folder)
    chains = read_versions(folder, names)
    settings, bases = _read_settings(options), [chain[0] for chain in chains]
    before: Any = {"known": bases, "earlier": earlier}
    prepared = prepare_batch(settings, asked, **before, progress=display.progress)
    _refuse_too_large(options, prepared, asked, display)
    tasks, repeated = prepared.sign(asked)
    versions = PlanVersions(folder, None if prepared.plan.is_bare else prepared.plan, chains)
    state = _Batch(options, display, plain, begun, prepared, tasks, versions)
    for task in tasks:
        found = find_finished(folder, task, names)
        if found is not None:
            state.results[task.item] = describe_result(task, found, "skipped")
    waiting = [task for task in tasks if task.item not in state.results]
    state.begin()
    for text in repeated:
        state.note(text)
    opening = _open_pool(options, prepared, state) if waiting else None
    write_whole(folder / SUMMARY, to_json(state.summarise()).encode())
    if opening is not None:
        with opening as pool, state.kept(folder):
            state.workers = pool.devices
            dispatch = Dispatch(pool, versions, state.note)
            for result in dispatch.run(waiting):
                state.finish(result)
    return state.summarise()


def _write_summary(folder: Path, record: BatchRecord) -> BatchRecord:
    write_whole(folder / SUMMARY, to_json(record).encode())
    write_whole(folder / PAGE, render_batch(record).encode(errors="replace"))
    return record


def _refuse_too_large(
    options: BatchOptions,
    prepared: PreparedBatch,
    asked: Sequence[tuple[Item, Request]],
    display: Display,
) -> None:
    """Raise `OptionError` if the largest item will not fit into the device's memory.

    The error names the item's line in the prompts file.
    """

    def count(pair: tuple[Item, Request]) -> int:
        _, request = pair
        return (request.frames or 1) * (request.height or 0) * (request.width or 0)

    item, request = max(asked, key=count)
    if item.media:  # they are read by the process that makes the item
        return
    with naming_line(item, options.prompts or "", OptionError):
        refuse_too_large(
            prepared.source,
            request,
            choose_device(options.device),
            display,
            precision=options.precision if prepared.plan.is_bare else "fp16",
            memory=None if options.memory == "none" else options.memory or "auto",
        )


def _read_settings(options: BatchOptions) -> Settings:
    from stopdown.batch.jobs import Settings

    shared = {entry.name for entry in dataclasses.fields(Settings)} & vars(options).keys()
    settings = Settings(**{name: getattr(options, name) for name in shared})
    return dataclasses.replace(
        settings,
        suffix=f".{options.format}" if options.format else "",
        journal=str(options.journal.absolute()) if options.journal else None,
    )


_OF_THE_RUN = (
    *SHOWN,
    *("prompts", "prompt", "output", "workers", "journal", "strict"),
)
"""Options that affect how a batch is run or displayed, but none of its outputs."""


def _read_summary(folder: Path) -> BatchRecord | None:
    """Return the summary of an earlier batch in the folder; None if there is no readable one."""
    with contextlib.suppress(InputError, OSError):
        return from_json((folder / SUMMARY).read_bytes(), BatchRecord)
    return None


def _find_finished(earlier: BatchRecord, digest: str, folder: Path) -> tuple[ItemResult, ...]:
    """Return all items if an earlier batch had the same request and all its outputs exist, else nothing."""
    if not digest or earlier.asked != digest:
        return ()
    wanted = {y for x in earlier.items for y in (x.output, find_record_path(x.output).name)}
    if wanted - list_item_names(folder):
        return ()
    return tuple(dataclasses.replace(x, status="skipped") for x in earlier.items)


def _repeat(
    earlier: BatchRecord, items: tuple[ItemResult, ...], options: BatchOptions, begun: float
) -> BatchRecord:
    """Return the summary of a batch whose items were all finished by an earlier run."""
    return dataclasses.replace(
        earlier,
        prompts=options.prompts or "",
        output=options.output,
        command=describe_command("batch", options),
        workers={},
        made=0,
        skipped=len(items),
        repaired=0,
        item_s=None,
        elapsed_s=time.perf_counter() - begun,
        items=items,
    )


def _check_options(options: BatchOptions) -> None:
    parse_request(options.precision)
    refuse_unknown_device(options.device)
    read_limit(options.memory)
    check_rate(options.fps)
    if options.workers is not None and options.workers <= 0:
        raise OptionError(
            f"--workers {options.workers} isn't above 0.", remedy="Use --workers 1 or more."
        )
    check_pairs(options)


def _place_media(options: BatchOptions, item: Item) -> Item:
    """Return the item with paths for its pictures and video: its own, else those of the command.

    The item's relative paths are resolved against the folder of the prompts file.
    """
    folder = Path(options.prompts or "").parent  # of "-" and of none, the working folder
    own = {name: str(folder / place) for name, place in item.media.items()}
    shared = {name: str(place) for name in MEDIA if (place := getattr(options, name)) is not None}
    return dataclasses.replace(item, **{**shared, **own})


def _read_request(options: BatchOptions, item: Item) -> Request:
    """Return the request of an item; the command's options fill in the fields that the item leaves out."""
    own: dict[str, Any] = dict.fromkeys(MEDIA)  # read by the process that makes the item
    own |= {name: x for name, x in item.values.items() if name not in ("prompt", *MEDIA)}
    with naming_line(item, options.prompts or "", OptionError):  # a plan is no fault of the line
        return read_request(dataclasses.replace(options, **own), prompt=item.prompt)


def _refuse_other_folder(folder: Path) -> None:
    """Refuse a folder with files that no batch wrote, before anything is written there."""
    import json

    names = {
        name
        for name in list_item_names(folder)
        if not name.startswith(".") and not PLAN_NAME.fullmatch(name)  # written before the summary
    }
    if not names:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / SUMMARY).read_bytes()).get("kind") == "batch":
            return
    raise InputError(
        f"The output folder {folder} isn't empty (it holds {min(names)}), and isn't from a batch.",
        expected="The folder must be new, empty, or that of an earlier batch.",
        remedy="Name another folder with -o.",
    )


def _open_pool(
    options: BatchOptions,
    prepared: PreparedBatch,
    state: _Batch,
) -> Pool:
    """Return the pool of workers: this process for a single worker, else one process for each.

    `--device auto` uses all CUDA devices for which this PyTorch has kernels.
    """
    from stopdown.batch.pools import InProcess, Processes
    from stopdown.runtime.session import tell_calls

    chosen = choose_device(options.device)
    names = [chosen.torch_name]
    if options.device == "auto" and chosen.type == "cuda":
        usable = [device for device in list_devices() if device.missing is None]
        names = [device.torch_name for device in usable if device.type == "cuda"]
    count = options.workers or len(names)
    devices = [names[number % len(names)] for number in range(count)]
    if len(devices) == 1:
        return InProcess(prepared.job, devices[0], tell_calls(state.display.progress))
    return Processes(prepared.job, devices)


@dataclass
class _Batch:
    """State of a running batch, and its progress display.

    In a terminal the display shows a bar. `plain`, if set, is a stream that gets a line for each item.
    """

    options: BatchOptions
    display: Display
    plain: Any
    begun: float
    prepared: PreparedBatch
    tasks: Sequence[Task]
    versions: PlanVersions
    workers: dict[str, str] = field(default_factory=dict)
    results: dict[str, ItemResult] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Announce the number of items that were finished by an earlier run."""
        if self.results:
            self._announce(f"{self._describe_progress()} items are finished already.")
        self._show()

    def note(self, text: str) -> None:
        """Announce a message, but only once."""
        if text not in self.notes:
            self.notes.append(text)
            self._announce(text)

    def finish(self, result: ItemResult) -> None:
        self.results[result.item] = result
        self._show()
        if result.status == "failed":
            self._announce(f"{result.name} failed: {result.error}")
        if self.plain is not None:
            self.plain.write(f"{self._describe_end(result)}\n")
            self.plain.flush()

    def _describe_end(self, result: ItemResult) -> str:
        """Return a line about a finished item: the progress of the batch and the estimated time left."""
        tried = self._list("made", "failed")
        failed, left = len(self._list("failed")), len(self.tasks) - len(self.results)
        left_s = sum(x.elapsed_s for x in tried) / len(tried) * left / max(1, len(self.workers))
        what = result.output or f"{result.name} failed"
        line = f"{self._describe_progress()}: {what}, {result.elapsed_s:.1f} s"
        line += f"; about {format_about(left_s)} left" if left else ""
        return line + (f"; {failed} failed" if failed else "")

    def _list(self, *statuses: str) -> list[ItemResult]:
        return [result for result in self.results.values() if result.status in statuses]

    def _describe_progress(self) -> str:
        return f"{len(self.results)} of {len(self.tasks)}"

    def _announce(self, text: str) -> None:
        self.display.announce(reword_text(text, self.options))

    def _show(self) -> None:
        failed = len(self._list("failed"))
        what = self._describe_progress() + (f", {failed} failed" if failed else "")
        self.display.progress("batch", what, len(self.results), len(self.tasks))

    @contextmanager
    def kept(self, folder: Path) -> Iterator[None]:
        """Announce how far the batch got, and how to continue it, if the block is interrupted."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self._announce(
                f"{self._describe_progress()} items are finished in {folder}: the same command "
                "continues from there."
            )
            raise

    def summarise(self) -> BatchRecord:
        made = self._list("made")
        return BatchRecord(
            source=self.options.source,
            fingerprint=self.prepared.job.fingerprint,
            pipeline=self.prepared.job.pipeline,
            prompts=self.options.prompts or "",
            output=self.options.output,
            command=describe_command("batch", self.options),
            workers=dict(self.workers),
            machine=describe_machine(),
            made=len(made),
            skipped=len(self._list("skipped")),
            repaired=sum(bool(x.repairs) for x in made),
            failed=len(self._list("failed")),
            item_s=sum(x.elapsed_s for x in made) / len(made) if made else None,
            elapsed_s=time.perf_counter() - self.begun,
            plans=tuple(plan.seal for plan in self.versions.plans),
            items=tuple(self.results[x.item] for x in self.tasks if x.item in self.results),
            notes=tuple(self.notes),
            precision=self.options.precision,
            decisions=self.prepared.plan.components if self.prepared.plan.is_bare else (),
            device=self.prepared.device,
        )


def _print_summary(record: BatchRecord, options: BatchOptions, console: Any) -> None:
    from stopdown.app.progress import print_prose

    total = len(record.items)
    counts = (
        (record.skipped, "finished before"),
        (record.repaired, "repaired"),
        (record.failed, "failed"),
    )
    said = [f"{record.made + record.skipped} of {total} done"]
    said += [f"{count} {name}" for count, name in counts if count]
    said += [f"{record.item_s:.1f} s each"] if record.item_s is not None else []
    print_prose(console, f"{', '.join(said)}.")
    for item in record.items:
        if item.status == "failed":
            error = reword_text(item.error, options)
            print_prose(console, f"  - {item.name} (line {item.line}) failed: {error}", "yellow")
        for finding in item.findings:
            text = f"  - {item.output}: {finding.kind}: {finding.evidence}"
            print_prose(console, text, "yellow")
    console.print(f"Wrote {record.output.rstrip('/')}/{PAGE}", soft_wrap=True, highlight=False)

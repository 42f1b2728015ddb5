"""`Worker`: load the model once, and make one item after the other, each with the plan given for it.

An item's output depends on its request and that plan alone, not on earlier items. A repair during an item
is returned as an updated plan, and the model is reloaded with the plan of the next item if that differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stopdown.batch.jobs import Job, Task, describe_request
from stopdown.batch.output_folder import find_batch_folder, list_item_names
from stopdown.batch.records import ItemResult, Status
from stopdown.devices.device_choice import choose_device, has_lost_device
from stopdown.errors import InputError, OutputError, SourceError, describe_error
from stopdown.files.outputs import find_record_path
from stopdown.frames.media import SUFFIXES, draw_preview
from stopdown.frames.sound import draw_wave
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.loras_and_schedulers import resolve_whole
from stopdown.plans.precision import parse_request
from stopdown.records import Plan, RunRecord, from_json
from stopdown.runtime.guard import GuardOptions, Observer
from stopdown.runtime.journal import Journal
from stopdown.runtime.memory_limits import ask_memory
from stopdown.runtime.runs import Runner, RunOutput, write_run_record
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.sources import fingerprint


@dataclass(frozen=True)
class TaskResult:
    """A worker's answer to a task.

    Attributes:
        updated: the plan with this item's repairs; None if there were none, or no plan.
        notes: messages for the user.
    """

    result: ItemResult
    updated: Plan | None = None
    notes: tuple[str, ...] = ()


class LostDeviceError(Exception):
    """Raised if a device computes nothing until the process ends, as CUDA after an illegal access."""


class Worker:
    """Maker of items on one device.

    Args:
        share: number of workers on this device, among which its memory is divided.
    """

    def __init__(self, job: Job, device: str = "auto", share: int = 1) -> None:
        settings = job.settings
        requested = parse_request(settings.precision)
        self._memory = ask_memory(settings.memory, requested, share)
        self._job, self.device = job, choose_device(device)
        self._folder = find_batch_folder(settings.output)
        found = resolve_whole(settings)
        source = dataclasses.replace(complete_source(found), pipeline_class=job.pipeline)
        if fingerprint(source) != job.fingerprint:
            raise SourceError(
                f"The model {settings.source} has different weights on a worker and on the "
                "machine that started the batch.",
                expected="All items of a batch use the same model.",
                remedy="Copy the same files there, or name a commit of a Hub id with `revision`.",
            )
        self._runner = Runner(source, self.device)
        self.observer: Observer | None = None

    def make(self, task: Task, plan: Plan | None) -> TaskResult:
        """Make one item, or find its finished output; an exception of the run becomes a failed result.

        Raises:
            LostDeviceError: the device computes nothing any more, so that each further item would fail.
        """
        found = find_finished(self._folder, task, list_item_names(self._folder))
        if found is not None:  # its maker died before it could report
            return TaskResult(describe_result(task, found, "made"))
        begun, notes = time.perf_counter(), list[str]()
        with quiet_libraries():
            asked = plan or self._job.decided or Plan(self._runner.source.name)
            asked = dataclasses.replace(asked, memory=self._memory)
            self._runner.load(asked)
            try:
                return self._make(task, asked, notes)
            except OutputError:
                raise
            except Exception as error:  # whatever a model's code does: the other items go on
                if has_lost_device(self.device):
                    raise LostDeviceError(describe_error(error)) from error
                said, elapsed_s = describe_error(error), time.perf_counter() - begun
                failed = begin_result(task, "failed", elapsed_s=elapsed_s, error=said)
                return TaskResult(failed, None, tuple(notes))

    def _make(self, task: Task, plan: Plan, notes: list[str]) -> TaskResult:
        settings, begun = self._job.settings, time.perf_counter()
        name, asked = f"{task.name}{settings.suffix}", describe_request(task.request)
        fields = {"request": asked, "item": task.item, "plan": plan.seal}
        with self._journal(task, plan, notes) as journal:
            record, made = self._runner.make(
                plan,
                task.request,
                RunOutput(str(self._folder / name), settings.fps, begun, fields),
                GuardOptions(
                    on_fault=settings.on_fault,
                    observer=self.observer,
                    announce=notes.append,
                    journal=journal,
                ),
            )
            shown = made.output
            if shown is None and made.sound is not None:
                shown = draw_wave(made.sound)
            preview = draw_preview(shown)
            record = dataclasses.replace(record, output=name, preview=preview)
            write_run_record(record, self._folder / name)
        return TaskResult(describe_result(task, record, "made"), made.updated, tuple(notes))

    @contextmanager
    def _journal(self, task: Task, plan: Plan, notes: list[str]) -> Iterator[Journal | None]:
        """Open an item's journal of component outputs, and remove it when the item is finished.

        Yields None if no journal is kept, or if it cannot be opened, which is noted.
        """
        settings = self._job.settings
        if settings.journal is None:
            yield None
            return
        version = plan.seal[:12] or "as-decided"
        folder = Path(settings.journal) / f"{task.item}-{version}"
        with contextlib.ExitStack() as stack:
            journal = None
            try:
                journal = stack.enter_context(
                    Journal(
                        folder,
                        {"item": task.item},
                        announce=notes.append,
                    )
                )
            except InputError as error:
                notes.append(f"{task.name} was made without its journal. {error.what}")
            yield journal
            if journal is not None:
                journal.clear()
        if journal is not None:
            shutil.rmtree(folder, ignore_errors=True)


def find_finished(folder: Path, task: Task, names: set[str]) -> RunRecord | None:
    """Return the record of a finished item; None if the item must be made.

    Args:
        names: files in the folder.
    """
    for suffix in SUFFIXES:
        output = f"{task.name}{suffix}"
        record = find_record_path(output).name
        if output in names and record in names:
            with contextlib.suppress(InputError, FileNotFoundError):
                found = from_json((folder / record).read_bytes(), RunRecord)
                if found.item == task.item:
                    return found
    return None


def describe_result(task: Task, record: RunRecord, status: Status) -> ItemResult:
    """Return the result of an item, filled in from the record of its run."""
    return begin_result(
        task,
        status,
        output=record.output or "",
        elapsed_s=record.elapsed_s,
        plan=record.plan,
        repairs=record.repairs,
        findings=record.findings,
        preview=record.preview,
    )


def begin_result(task: Task, status: Status, **others: Any) -> ItemResult:
    """Return a result with the item's own fields and status; `others` are further fields of the result."""
    return ItemResult(task.item, task.name, task.line, task.request.prompt or "", status, **others)

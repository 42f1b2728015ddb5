"""A worker: it loads the model once, and makes one item after the other by the plan that comes with it.

An item's bits are those of its request and of that plan, whatever was made before: a repair that a run
finds is given back as a new version of the plan, and the model is loaded by it before the next item.
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

from stopdown.batch.item_signatures import describe_request
from stopdown.batch.jobs import Task
from stopdown.batch.records import ItemResult, Status
from stopdown.batch.settings import Job
from stopdown.batch.stores import Store, open_store, write_probe
from stopdown.devices.device_memory import peak_memory
from stopdown.devices.environment import choose_device
from stopdown.errors import InputError, OutputError, SourceError, StopdownError, describe_error
from stopdown.files.outputs import find_record_path
from stopdown.frames.media import SUFFIXES, draw_preview
from stopdown.pipelines.allowed_sizes import read_configs
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.loras_and_schedulers import resolve_whole
from stopdown.pipelines.requests import MEDIA, Request
from stopdown.plans.planned_loader import Loaded, load_plan
from stopdown.plans.precision import parse_request
from stopdown.records import Plan, RunRecord, from_json
from stopdown.runtime.guard import Observer
from stopdown.runtime.journal import Journal
from stopdown.runtime.memory_limits import Fitted, choose_limit, fit_run, shrink_request
from stopdown.runtime.runs import describe_run, make_frames, write_frames, write_record
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.sources import fingerprint


@dataclass(frozen=True)
class Answer:
    """What a worker gives back for a task.

    Attributes:
        updated: the plan with the repairs of this item in it; None when there were none, or no plan.
        notes: what a person should hear, in whole sentences.
    """

    result: ItemResult
    updated: Plan | None = None
    notes: tuple[str, ...] = ()


class Worker:
    """What makes items on one device.

    Args:
        job: shared by all workers.
        device: as for `choose_device`.
        share: workers that this device has, which divide its memory.

    Attributes:
        device: where it computes.
        store: where its outputs go.

    Raises:
        SourceError: the model is not here, or is another one than where the batch was started.
    """

    def __init__(self, job: Job, device: str = "auto", share: int = 1) -> None:
        settings = job.settings
        requested = parse_request(settings.precision)
        self._limit = choose_limit(settings.memory, settings.allow, requested, share)
        self._job, self.device = job, choose_device(device)
        self.store: Store = open_store(settings.output)
        found = resolve_whole(settings)
        self._source = dataclasses.replace(complete_source(found), pipeline_class=job.pipeline)
        if fingerprint(self._source) != job.fingerprint:
            raise SourceError(
                f"The model {settings.source} has different weights on a worker and on the "
                "machine that started the batch.",
                expected="All items of a batch use the same model.",
                remedy="Copy the same files there, or name a commit of a Hub id with `revision`.",
            )
        self._loaded: Loaded | None = None
        self._seal: str | None = None
        self._fitted: tuple[str, Fitted] | None = None
        self._misfits: dict[str, StopdownError] = {}
        self._offloading = contextlib.ExitStack()
        self.observer: Observer | None = None

    def write_probe(self) -> str:
        """Write a small file among the outputs; its name, for the process that checks whether it came."""
        return write_probe(self.store)

    def make(self, task: Task, plan: Plan | None) -> Answer:
        """Make one item, or find it made."""
        found = find_finished(self.store, task, self.store.list_names())
        if found is not None:  # its maker died before it could report
            return Answer(describe_result(task, found, "made"))
        begun, notes = time.perf_counter(), list[str]()
        with quiet_libraries():
            loaded = self._load(plan)
            try:
                return self._make(task, loaded, plan, notes)
            except OutputError:
                raise
            except Exception as error:  # whatever a model's code does: the other items go on
                self._forget_fit()
                said, elapsed_s = describe_error(error), time.perf_counter() - begun
                failed = _begin_result(task, "failed", elapsed_s=elapsed_s, error=said)
                return Answer(failed, None, tuple(notes))

    def _load(self, plan: Plan | None) -> Loaded:
        """The pipeline by this plan; it stays until another plan comes."""
        seal = plan.seal if plan else ""
        if self._loaded is None or self._seal != seal:
            self._forget_fit()
            self._loaded = None  # the old weights go before the new ones come
            plan = plan or self._job.decided or Plan(self._source.name)
            self._loaded = load_plan(self._source, plan, self.device, move=self._limit is None)
            self._seal = seal
        return self._loaded

    def _fit(self, request: Request, loaded: Loaded, notes: list[str]) -> Fitted:
        """What keeps items of these sizes within the limit: it stays on until other sizes come."""
        plain = dataclasses.replace(request, prompt=None, negative=None, seed=0)
        media = [getattr(getattr(request, name), "shape", None) for name in MEDIA]
        sizes = str([describe_request(plain), *media])
        if self._fitted is None or self._fitted[0] != sizes:
            self._forget_fit()
            if sizes in self._misfits:
                raise self._misfits[sizes]
            configs = read_configs(self._source.described)
            try:
                fitted = fit_run(loaded, request, self.device, self._limit, configs, notes.append)
            except StopdownError as error:
                self._misfits[sizes] = error
                raise
            if fitted.offloader is not None:
                self._offloading.enter_context(fitted.offloader)
            self._fitted = (sizes, fitted)
        fitted = self._fitted[1]
        if fitted.reduced is not None and fitted.size is not None:
            request = shrink_request(request, fitted.size)
        return dataclasses.replace(fitted, request=request)

    def _forget_fit(self) -> None:
        self._offloading.close()
        self._fitted = None

    def _make(self, task: Task, loaded: Loaded, plan: Plan | None, notes: list[str]) -> Answer:
        settings, begun = self._job.settings, time.perf_counter()
        name = f"{task.name}{settings.suffix}"
        fitted = self._fit(task.request, loaded, notes)
        offloader = fitted.offloader
        with self._journal(task, plan, notes) as journal:
            with peak_memory(self.device) as memory:
                made = make_frames(
                    loaded,
                    fitted.request,
                    output=name,
                    on_fault=settings.on_fault,
                    observer=self.observer,
                    announce=notes.append,
                    journal=journal,
                )
            with self.store.staged() as folder:
                path, findings = write_frames(str(folder / name), made.frames, settings.fps)
                record = describe_run(
                    self._source,
                    loaded,
                    self.device,
                    made,
                    memory,
                    request=describe_request(task.request),
                    stages_s=made.stages_s,
                    findings=findings,
                    output=name,
                    elapsed_s=time.perf_counter() - begun,
                    item=task.item,
                    plan=plan.seal if plan else "",
                    preview=draw_preview(made.frames),
                    strategy=offloader.taken.strategy.name if offloader else "",
                    steps_down=tuple(offloader.steps_down) if offloader else (),
                    reduced=fitted.reduced,
                )
                write_record(record, path)
        if record.steps_down:  # the next item does not depend on what happened to this one
            self._forget_fit()
        return Answer(describe_result(task, record, "made"), made.updated, tuple(notes))

    @contextmanager
    def _journal(self, task: Task, plan: Plan | None, notes: list[str]) -> Iterator[Journal | None]:
        """The journal of an item, which is removed when the item is whole."""
        settings = self._job.settings
        if settings.journal is None:
            yield None
            return
        version = (plan.seal[:12] if plan else "") or "as-decided"
        folder = Path(settings.journal) / f"{task.item}-{version}"
        with contextlib.ExitStack() as stack:
            journal = None
            try:
                journal = stack.enter_context(
                    Journal(
                        folder,
                        {"item": task.item},
                        limit_bytes=settings.journal_bytes,
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


def find_finished(store: Store, task: Task, names: set[str]) -> RunRecord | None:
    """The record of an item that is whole; None when it has to be made."""
    for suffix in SUFFIXES:
        output = f"{task.name}{suffix}"
        record = find_record_path(output).name
        if output in names and record in names:
            with contextlib.suppress(InputError, FileNotFoundError):
                found = from_json(store.read(record), RunRecord)
                if found.item == task.item:
                    return found
    return None


def describe_result(task: Task, record: RunRecord, status: Status) -> ItemResult:
    """What became of an item whose record is whole."""
    return _begin_result(
        task,
        status,
        output=record.output or "",
        elapsed_s=record.elapsed_s,
        plan=record.plan,
        repairs=record.repairs,
        findings=record.findings,
        preview=record.preview,
    )


def fail_task(task: Task, error: str, tries: int) -> ItemResult:
    """The result of an item that no worker could make."""
    return _begin_result(task, "failed", error=error, tries=tries)


def _begin_result(task: Task, status: Status, **others: Any) -> ItemResult:
    return ItemResult(task.item, task.name, task.line, task.request.prompt or "", status, **others)

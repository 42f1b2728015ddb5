"""A batch before its workers begin: the model, its plan, and the items as tasks.

**Catches**, before anything is made, a request that the pipeline does not take, pictures that cannot be
read, items that need different pipelines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stopdown.batch.item_signatures import describe_shared, name_item, sign_item
from stopdown.batch.prompts import Item, is_url, naming_line
from stopdown.batch.settings import Job, Settings
from stopdown.environment import choose_device, probe_formats
from stopdown.errors import InputError, OptionError
from stopdown.media import read_image
from stopdown.pipelines.class_selection import Selection, choose_class, select_pipeline
from stopdown.pipelines.component_classes import find_class
from stopdown.pipelines.hub import Progress
from stopdown.pipelines.library_messages import quiet_libraries
from stopdown.pipelines.loras_and_schedulers import resolve_whole
from stopdown.pipelines.requests import Request, find_target
from stopdown.pipelines.sources import fingerprint
from stopdown.plans.plan_choice import choose_plan
from stopdown.plans.planned_loader import decide, gather_facts
from stopdown.plans.precision import parse_request
from stopdown.records import Plan


@dataclass(frozen=True)
class Task:
    """One item, ready to be made.

    Attributes:
        item: hash of what determines it.
        name: of its output, without suffix.
        line: where it stands in the prompts file.
        request: what is asked of the pipeline, without its picture.
        image: file or URL of the picture; None without one.
    """

    item: str
    name: str
    line: int
    request: Request
    image: str | None = None

    def complete(self) -> Task:
        """The task with its picture read, to be sent to a worker."""
        if self.image is None:
            return self
        request = dataclasses.replace(self.request, image=read_picture(self.image))
        return dataclasses.replace(self, request=request)


@dataclass(frozen=True)
class Prepared:
    """A batch before its workers begin.

    Attributes:
        job: for the workers.
        chosen: the model, with the class that serves the items.
        plan: that it begins with; None without one.
    """

    job: Job
    chosen: Selection
    plan: Plan | None

    def sign(
        self, asked: Iterable[tuple[Item, Request]]
    ) -> tuple[tuple[Task, ...], tuple[str, ...]]:
        """Each item as a task, once; and whole sentences on lines that ask for the same as others.

        Raises:
            InputError: an item cannot be made as asked; its line is named.
        """
        shared = describe_shared(self.job, self.chosen, self.plan)
        tasks: dict[str, Task] = {}
        notes = []
        for item, request in asked:
            with naming_line(item):
                digest = _check_item(self.chosen, item, request)
            signed = sign_item(shared, request, digest)
            if signed in tasks:
                notes.append(f"Line {item.line} is the same item as line {tasks[signed].line}.")
                continue
            tasks[signed] = Task(signed, name_item(item, signed), item.line, request, item.image)
        return tuple(tasks.values()), tuple(notes)


def prepare(
    settings: Settings,
    item: Item,
    request: Request,
    *,
    known: Iterable[Plan] = (),
    progress: Progress | None = None,
) -> Prepared:
    """Find the model and choose its plan; nothing is loaded.

    Args:
        item, request: the first one, which decides the class of the pipeline.
        known: plans that the batch began with before: with `auto` the model's own is used again.
        progress: told of stage, what, done and total.

    Raises:
        SourceError: the model is missing, damaged or refused.
        InputError: the item cannot be made as asked; its line is named.
        PlanError: the plan is damaged or belongs to another checkpoint.

    Cost: for `auto`, the first time that a checkpoint is met here, `make_plan`.
    """
    device = choose_device(settings.device)
    source = resolve_whole(settings, progress=progress)
    first = _read_first(item, request)
    with quiet_libraries():
        with naming_line(item):
            chosen = select_pipeline(source, first)
        plan, name = _find_known(known, settings.precision, fingerprint(chosen.source)), "its plan"
        if plan is None:
            found = choose_plan(
                chosen.source, settings.precision, device, request=first, progress=progress
            )
            plan, name = (found.plan, found.name) if found else (None, "")
        facts, supports = gather_facts(chosen.source), probe_formats(device)
        decisions = () if plan else decide(facts, supports, settings.precision)
    settings = dataclasses.replace(settings, suffix=settings.suffix or _choose_suffix(chosen))
    job = Job(settings, chosen.source.pipeline_class, fingerprint(chosen.source), decisions, name)
    return Prepared(job, chosen, plan)


def _read_first(item: Item, request: Request) -> Request:
    """The first request with its picture: it decides which pipeline class serves all."""
    if item.image is None:
        return request
    with naming_line(item):
        return dataclasses.replace(request, image=read_picture(item.image))


def _find_known(known: Iterable[Plan], precision: str, model: str) -> Plan | None:
    if not parse_request(precision).is_auto:
        return None
    return next((plan for plan in known if plan.fingerprint == model), None)


def _choose_suffix(chosen: Selection) -> str:
    pipeline_class = find_class("diffusers", chosen.source.pipeline_class)
    is_video = any(find_target(name, pipeline_class) for name in ("frames", "video"))
    return ".mp4" if is_video else ".png"


def _check_item(chosen: Selection, item: Item, request: Request) -> str:
    """The hash of its picture, once it is certain that the pipeline takes the item."""
    digest = ""
    if item.image is not None:
        picture = read_picture(item.image)
        digest = hashlib.sha256(f"{picture.shape}".encode() + picture.tobytes()).hexdigest()
        request = dataclasses.replace(request, image=picture)
    wanted = choose_class(chosen.source.pipeline_class, request)
    if wanted != chosen.source.pipeline_class:
        raise OptionError(
            f"It needs a {wanted}, and the first item a {chosen.source.pipeline_class}.",
            expected="All items of a batch use the same pipeline.",
            remedy="Put items with a picture and items without one into two files.",
        )
    chosen.check_request(request)
    return digest


def read_picture(given: str) -> Any:
    """The picture at a path or URL, `[H, W, 3]` uint8.

    Raises:
        InputError: it cannot be read.
    """
    if not is_url(given):
        return read_image(given)
    import fsspec

    with tempfile.NamedTemporaryFile(suffix=Path(given).suffix) as local:
        try:
            with fsspec.open(given, "rb") as file:
                local.write(file.read())
        except Exception as error:  # whatever a store's client raises
            raise InputError(
                f"The picture {given} cannot be read: {error}.", remedy="Check the address."
            ) from error
        local.flush()
        return read_image(local.name)

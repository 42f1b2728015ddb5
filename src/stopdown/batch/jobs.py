"""Preparation of a batch: find the model, choose its plan, and turn items into tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stopdown.batch.prompts import Item, naming_line
from stopdown.batch.records import BatchRecord
from stopdown.devices.device_choice import choose_device
from stopdown.errors import OptionError
from stopdown.frames.media import read_image, read_video
from stopdown.pipelines.class_selection import choose_class, prepare_check, select_pipeline
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.loras_and_schedulers import resolve_whole
from stopdown.pipelines.requests import MEDIA, Request, name_pipeline_arguments
from stopdown.pipelines.results import check_format, choose_suffix
from stopdown.plans.plan_choice import certified_on_arrival, choose_plan
from stopdown.plans.precision import parse_request
from stopdown.records import Plan
from stopdown.runtime.repair_order import OnFault
from stopdown.sources.component_classes import find_class
from stopdown.sources.descriptions import read_description
from stopdown.sources.hub import Progress
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.needed_packages import refuse_missing_packages
from stopdown.sources.source import Source
from stopdown.sources.sources import fingerprint


@dataclass(frozen=True)
class Settings:
    """Settings that all items of a batch share.

    Attributes:
        output: folder of the outputs.
        precision: as for `--precision`.
        device: as for `choose_device`; the plan is made for it.
        fps: frames per second of the files; None for those of the pipeline.
        suffix: suffix of the outputs; "" for `.mp4` for videos, `.png` for pictures and `.wav` for sound.
        journal: folder for journals of unfinished items; None to write none.
        lora: LoRA files that every worker can read, each with its weight: `style.safetensors:0.8`.
        scheduler: class to use instead of the model's own scheduler; None to keep it.
        memory: device memory limit of each item, `8GiB`. None and `auto` allow all that the device has,
            `none` sets no limit.
    """

    source: str
    output: str
    revision: str | None = None
    config: str | None = None
    precision: str = "auto"
    device: str = "auto"
    fps: float | None = None
    suffix: str = ""
    on_fault: OnFault = "repair"
    journal: str | None = None
    variant: str | None = None
    lora: tuple[str, ...] = ()
    scheduler: str | None = None
    memory: str | None = None


@dataclass(frozen=True)
class Job:
    """Plain data that all workers of a batch receive.

    Attributes:
        settings: settings of the batch, with the suffix filled in.
        pipeline: name of the pipeline class that makes all items.
        fingerprint: hash of the model's files, which each worker checks.
        decided: precision of each component call, if the batch has no plan with exponents.
    """

    settings: Settings
    pipeline: str
    fingerprint: str
    decided: Plan | None = None


@dataclass(frozen=True)
class Task:
    """One item as it is given to a worker.

    Attributes:
        item: hash of everything that determines the output.
        name: name of its output, without suffix.
        line: number of its line in the prompts file.
        request: request to the pipeline; pictures and videos are added by `complete`.
        media: paths of the pictures and videos, by field of the request.
    """

    item: str
    name: str
    line: int
    request: Request
    media: Mapping[str, str] = field(default_factory=dict)

    def complete(self) -> Task:
        """Return the task with its pictures and videos loaded, ready for a worker."""
        return dataclasses.replace(self, request=_read_media(self.request, self.media))


@dataclass(frozen=True)
class PreparedBatch:
    """Model, plan and shared settings of a batch, before its workers start."""

    job: Job
    source: Source
    plan: Plan
    device: str

    def sign(
        self, asked: Iterable[tuple[Item, Request]]
    ) -> tuple[tuple[Task, ...], tuple[str, ...]]:
        """Check and hash each item; return a task for each distinct one, and notes on repeated lines."""
        shared = describe_shared(self.job, self.source, self.plan)
        check = prepare_check(self.source)
        tasks: dict[str, Task] = {}
        notes = []
        for item, request in asked:
            with naming_line(item):
                digest = _check_item(self.job.pipeline, check, item, request)
            signed = sign_item(shared, request, digest)
            if signed in tasks:
                notes.append(f"Line {item.line} is the same item as line {tasks[signed].line}.")
                continue
            tasks[signed] = Task(signed, name_item(item, signed), item.line, request, item.media)
        return tuple(tasks.values()), tuple(notes)


def prepare_batch(
    settings: Settings,
    asked: Sequence[tuple[Item, Request]],
    *,
    known: Iterable[Plan] = (),
    earlier: BatchRecord | None = None,
    progress: Progress | None = None,
) -> PreparedBatch:
    """Find the model and choose its plan; no weights are loaded.

    Args:
        asked: the items, each with its request; the first decides the class of the pipeline.
        known: plans of earlier batches in the folder. With `auto` or `fp16`, one made for this model is
            used again.
        earlier: summary of the earlier batch in the folder. Its precisions are used again on the same
            device, as formats may be timed differently while the machine is busy.

    Raises:
        OptionError: some items lack an input, or have one that the pipeline refuses; names their lines.

    Cost: with `auto`, that of `make_plan` the first time a checkpoint is used on this machine.
    """
    item, request = asked[0]
    device = choose_device(settings.device)
    described = resolve_whole(settings, with_weights=False, progress=progress)
    if described.kind == "hub":  # before its weights are downloaded
        refuse_missing_packages(described)
        with quiet_libraries():
            _refuse_inputs(described.pipeline_class, asked)
    with certified_on_arrival(described, settings.precision, device, progress=progress):
        source = resolve_whole(settings, progress=progress)
    with naming_line(item):  # its media decide which pipeline class serves all
        first = _read_media(request, item.media)
    with quiet_libraries():
        source = complete_source(source, progress=progress)
        refuse_missing_packages(source)
        _refuse_inputs(source.pipeline_class, asked)
        with naming_line(item):
            source = select_pipeline(source, first)
        model, device_name = fingerprint(source), f"{device.torch_name} ({device.name})"
        plan = _find_known(known, settings.precision, model)
        if earlier is not None and earlier.decisions and plan is None:
            was = (earlier.precision, earlier.fingerprint, earlier.device)
            if was == (settings.precision, model, device_name):
                plan = Plan(source.name, components=earlier.decisions)
        if plan is None:
            plan = choose_plan(source, settings.precision, device, request=first, progress=progress)
    pipeline_class = find_class("diffusers", source.pipeline_class)
    suffix = settings.suffix or choose_suffix(pipeline_class, Request())
    check_format(pipeline_class, first, f"item{suffix}")
    settings = dataclasses.replace(settings, suffix=suffix)
    job = Job(settings, source.pipeline_class, model, plan if plan.is_bare else None)
    return PreparedBatch(job, source, plan, device_name)


def _find_known(known: Iterable[Plan], precision: str, model: str) -> Plan | None:
    if parse_request(precision).get("") not in ("auto", "fp16"):
        return None
    found = (plan for plan in known if plan.fingerprint == model)
    return next((dataclasses.replace(x, chosen=x.chosen or "its plan") for x in found), None)


def _refuse_inputs(class_name: str, asked: Iterable[tuple[Item, Request]]) -> None:
    """Refuse all items that lack an input or have one too many, in one error; no picture is read.

    Args:
        class_name: the checkpoint's own class. With a picture or video, an item may use a related class,
            such as image-to-image.
    """
    refused: dict[str, tuple[OptionError, list[int]]] = {}
    for item, request in asked:
        files: dict[str, Any] = dict(item.media)  # in place of their pixels
        named = dataclasses.replace(request, **files)
        try:
            name_pipeline_arguments(find_class("diffusers", choose_class(class_name, named)), named)
        except OptionError as error:
            refused.setdefault(str(error), (error, []))[1].append(item.line)
    if not refused:
        return
    shown = list(refused.values())[:_MOST_REFUSALS]
    said = [f"{_name_lines(lines)} of the prompts: {x.what}" for x, lines in shown]
    if more := len(refused) - len(shown):
        said.append(f"{more} more kinds of refusal aren't listed.")
    raise OptionError(
        " ".join(said),
        expected=shown[0][0].expected if len(refused) == 1 else "",
        remedy=" ".join(dict.fromkeys(x.remedy for x, _ in shown)),
    )


_MOST_REFUSALS = 5
"""Kinds of refusal that one message lists, each with its lines."""


def _name_lines(lines: Sequence[int]) -> str:
    """Write `Line 2`, `Lines 1, 2 and 5`, or `Lines 1, 2, 3, 4, 5 and 95 more`."""
    if len(lines) == 1:
        return f"Line {lines[0]}"
    *first, last = [str(x) for x in lines[:6]]
    if len(lines) > 6:
        return f"Lines {', '.join(first)} and {len(lines) - 5} more"
    return f"Lines {', '.join(first)} and {last}"


def _check_item(
    class_name: str, check: Callable[[Request], None], item: Item, request: Request
) -> str:
    """Check that the pipeline accepts an item; return a hash of its pictures and videos.

    Args:
        check: raises an error for a request with invalid sizes or frames.
    """
    request = _read_media(request, item.media)
    digest = "".join(_hash_pixels(getattr(request, name)) for name in item.media)
    wanted = choose_class(class_name, request)
    if wanted != class_name:
        raise OptionError(
            f"It needs a {wanted}, and the first item a {class_name}.",
            expected="All items of a batch use the same pipeline.",
            remedy="Put items with a picture or video and items without into files of their own.",
        )
    check(request)
    return digest


def _hash_pixels(frames: Any) -> str:
    return hashlib.sha256(f"{frames.shape}".encode() + frames.tobytes()).hexdigest()


def _read_media(request: Request, media: Mapping[str, str]) -> Request:
    read: dict[str, Any] = {}
    for name, place in media.items():
        is_video = name == "video"
        read[name] = read_video(place, request.frames) if is_video else read_image(place)
    return dataclasses.replace(request, **read)


def describe_shared(job: Job, source: Source, plan: Plan) -> dict[str, Any]:
    scheduler = source.described / "scheduler" / "scheduler_config.json"
    config = read_description(scheduler) if scheduler.is_file() else {}
    return {
        "model": job.fingerprint,
        "pipeline": job.pipeline,
        **({"memory": memory} if (memory := job.settings.memory) else {}),
        **({"scheduler": name} if (name := source.scheduler) else {}),
        "sampler": {k: v for k, v in config.items() if not k.startswith("_diffusers")},
        "plan": plan.seal or [(x.component, x.precision) for x in plan.components],
        "file": [job.settings.suffix, job.settings.fps],
    }


def sign_item(shared: dict[str, Any], request: Request, media: str) -> str:
    """Return the signature of an item: 32 hexadecimal digits, hashed from all that determines its output.

    An item with the signature of a finished one is not made again. Its place in the file, the device,
    library versions and repairs during the run are excluded.

    Args:
        shared: settings that all items share, as returned by `describe_shared`.
        media: hashes of the item's pictures and video; "" without any.
    """
    said = describe_request(request)
    text = json.dumps([shared, said, media], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe_request(request: Request) -> dict[str, Any]:
    """Return the fields of a request that are set, as plain data, without its pictures and video."""
    plain = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    own = {name: _describe_argument(value) for name, value in request.arguments.items()}
    said = {k: v for k, v in plain.items() if k not in (*MEDIA, "arguments") and v is not None}
    return {**said, **({"arguments": own} if own else {})}


def _describe_argument(value: Any) -> Any:
    """Return an argument as plain data, with a hash in place of pictures and samples."""
    if isinstance(value, Mapping):
        return {name: _describe_argument(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe_argument(x) for x in value]
    if hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        return _hash_pixels(np.asarray(value))
    return value


def name_item(item: Item, signed: str) -> str:
    """Return the name of an item's output: the item's `name`, or words of its prompt and its signature."""
    words = "-".join(re.findall(r"\w+", (item.prompt or "").lower()))[:48].rstrip("-")
    return item.name or f"{words or 'item'}-{signed[:12]}"

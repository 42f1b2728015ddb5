"""Implementation of `stopdown generate`: run a pipeline, and write a file with its record.

Heavy imports are inside functions, so that `stopdown --help` is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from stopdown.app.call_arguments import list_argument_files
from stopdown.app.display import Display, keep_updated, load_libraries
from stopdown.app.flags import (
    SHOWN,
    DeviceOption,
    ForceOption,
    KeepRepairsOption,
    ModelOptions,
    PrecisionOption,
    RateOption,
    RunOptions,
    SourceArgument,
    StrictOption,
)
from stopdown.app.request_options import (
    check_pairs,
    check_rate,
    find_named_source,
    read_request,
)
from stopdown.app.size_limits import refuse_too_large
from stopdown.devices.device_choice import Device, choose_device
from stopdown.devices.environment import count_launched
from stopdown.errors import OptionError
from stopdown.files.outputs import check_target, find_free, find_record_path, refuse_nameless
from stopdown.frames.media import FOLDER, check_output, choose_format
from stopdown.number_formats import list_all
from stopdown.pipelines.requests import (
    FIELDS,
    MEDIA,
    Request,
    check_seed,
    refuse_missing_prompt,
)
from stopdown.plans.plan_files import describe_no_plan
from stopdown.plans.precision import find_plan_path, parse_request
from stopdown.records import MemoryForecast, MemoryPlan, Plan, RunRecord, describe_no_run
from stopdown.sources.source import Source
from stopdown.sources.sources import find_kind, fingerprint, is_complete

if TYPE_CHECKING:
    from stopdown.runtime.journal import Journal
    from stopdown.runtime.runs import Runner


DEFAULT_OUTPUT = "stopdown"
"""Default output name, without the suffix, which depends on the pipeline. Existing files are kept."""

BUNDLED_WORDS = {
    "shapes": (
        re.compile(
            "an?|on|of|across|video|moving|moves|background|red|green|blue|yellow|purple|white|circle"
            "|square|triangle|cross|left|right|up|down|grey|pink|brown|cyan|beige"
        ),
        "one coloured shape that moves",
        "a red circle moving left on a grey background",
    ),
    "solids": (
        re.compile(
            "an?|two|three|matte|shiny|metal|red|orange|yellow|green|blue|purple|(sphere|cube|cylinder"
            "|cone|ring)s?|moving|left|right|bouncing|coming|closer|on|in|at|of|video|checkerboard"
            "|floor|beach|meadow|lake|sunset"
        ),
        "one to three solids that move through a landscape",
        "two shiny red spheres coming closer on a lake at sunset",
    ),
}
"""All words of each bundled model's captions, what it draws, and a prompt. The captions are made in
`training/scenes.py` and `training/solids/scenes.py`.
"""


@dataclass(frozen=True)
class GenerateOptions(RunOptions, ModelOptions):
    """Make a video, picture or sound from a prompt or a picture.

    If a component returns NaN or Inf, it is repaired and the call is retried. Frames that are black,
    grey, frozen or noisy are reported.

    Examples:
      stopdown generate zai-org/CogVideoX-5b "a girl riding a bike"
      stopdown generate solids "two shiny red spheres coming closer on a lake at sunset"
      stopdown generate shapes "a red circle" --precision fp16 -o circle.mp4
    """

    source: SourceArgument
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="What to show, in quotes; --prompt TEXT is the same."
        ),
    ] = None
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write (.mp4, .webm, .gif; .png, .jpg, .webp for a picture; .wav, .flac for "
            "sound), or new folder for frames. By default stopdown.mp4 for a video, stopdown.png for a "
            "picture and stopdown.wav for sound, or stopdown-2.mp4 if that exists, and so on.",
        ),
    ] = None
    force: ForceOption = False
    precision: PrecisionOption = "auto"
    device: DeviceOption = "auto"
    num: Annotated[
        int,
        typer.Option(help="Number of outputs, in numbered files; each uses the next seed."),
    ] = 1
    fps: RateOption = None
    strict: StrictOption = False
    on_fault: Annotated[
        Literal["repair", "raise"],
        typer.Option(
            help="What to do if a component returns NaN or Inf. repair: repair it, retry the "
            "call and continue. raise: stop."
        ),
    ] = "repair"
    maxima: Annotated[
        bool,
        typer.Option("--maxima", help="Record the largest activation of each block at each step."),
    ] = False
    keep_repairs: KeepRepairsOption = False
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the output of each component call. After a crash, the same "
            "command continues where it stopped. The folder is emptied when the run is done."
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Stay within this much device memory, such as 8GiB. By default, all of the device's "
            "free memory. Weights that aren't in use are offloaded, and work is split if "
            "necessary. A call that runs out of memory is retried with less. none keeps all "
            "weights on the device."
        ),
    ] = None


def run_generate_command(options: GenerateOptions) -> int:
    """Run the command, and print a card for each run; return 1 if `--strict` finds a fault."""
    from stopdown.app.cards import print_card
    from stopdown.app.progress import open_display, print_result

    runs, found, kept = list_run_options(options), False, ModelCache()
    _refuse_several_processes()
    for one in runs:
        with open_display(options) as display:
            record = generate(one, display, kept)
        draw = functools.partial(print_card, record)
        print_result(options, record, draw, name=record.output)
        found |= bool(record.findings)
    return int(found and options.strict)


def _refuse_several_processes() -> None:
    if (count := count_launched()) > 1:
        raise OptionError(
            f"`stopdown generate` was started in {count} processes.",
            expected="It makes one output in one process, so each of them would make the same.",
            remedy="Start it without torchrun. For several prompts on several devices: "
            "stopdown batch SOURCE --prompts FILE --workers 2. To share one step, use Diffusers' "
            "parallelism in a script, with a plan.",
        )


def list_run_options(options: GenerateOptions) -> list[GenerateOptions]:
    """Return the options of each run; `--num` makes several, with consecutive seeds and output numbers."""
    if options.num < 1:
        raise OptionError(f"--num {options.num} is less than 1.", remedy="Use --num 1 or more.")
    if options.num == 1:
        return [options]
    check_pairs(options)
    check_seed("seed", options.seed + options.num - 1)
    if options.output is not None:
        refuse_nameless(options.output)
    runs = []
    for number in range(options.num):
        own: dict[str, Any] = {"num": 1, "seed": options.seed + number}
        if options.output is not None:
            own["output"] = _number_output(options.output, number + 1)
        runs.append(dataclasses.replace(options, **own))
    for run in runs:
        if run.output is not None:
            _check_output_early(run)
    return runs


def _number_output(output: str, number: int) -> str:
    """Return an output's name with a number: `clip-2.mp4`, and `v1.0-2/` for a folder."""
    path = Path(output)
    if choose_format(output, None) == FOLDER:
        return f"{path.with_name(f'{path.name}-{number}')}/"
    return str(path.with_stem(f"{path.stem}-{number}"))


@dataclass
class ModelCache:
    """Model that the first of several runs chooses and loads, and later ones use again.

    Attributes:
        plan: plan of the model; None if it must be chosen (again), for example after a run changed it.
        forecast: memory forecast that was shown before the weights were downloaded; None without one.
        output: default name of the output file.
    """

    source: Source | None = None
    plan: Plan | None = None
    runner: Runner | None = None
    forecast: MemoryForecast | None = None
    output: str = ""


@dataclass(frozen=True)
class _Run:
    """Inputs and state of one run of the command, passed to each of its steps.

    Attributes:
        request: the pipeline's request that the options describe, with its input files read.
        model: the model, shared with the other runs and filled in by the steps.
        started: when the run began, by `time.perf_counter`.
    """

    options: GenerateOptions
    request: Request
    display: Display
    model: ModelCache
    started: float

    @functools.cached_property
    def device(self) -> Device:
        """The device of the run, found once."""
        return choose_device(self.options.device)


def generate(
    options: GenerateOptions,
    display: Display | None = None,
    kept: ModelCache | None = None,
) -> RunRecord:
    """Make a video, picture or sound from a prompt, and write it with its record beside it.

    Args:
        kept: cache of the model, shared by runs with the same options except seed and output.

    Returns:
        The record of the run, with any findings about the frames. These do not keep the file from being
        written.
    """
    started, request = time.perf_counter(), _read_request(options)
    run = _Run(options, request, display or Display(), kept or ModelCache(), started)
    _check_output_early(options)
    is_first = run.model.source is None
    source = run.model.source or _find_source(run)
    if is_first:
        refuse_missing_prompt(source.pipeline_class, source.components, run.request)
        if unknown := list_unknown_words(source, options.prompt):
            _, drawn, example = BUNDLED_WORDS[source.name]
            run.display.inform(
                f"The demo model {source.name} doesn't know the word{'s' * (len(unknown) > 1)} "
                f'{list_all(unknown)}. It draws {drawn}. For example: "{example}".'
            )
        load_libraries(run.display)
    run.display.detail(f"{options.source} is in {source.path}. {run.device.reason}")
    from stopdown.runtime.runs import write_run_record
    from stopdown.sources.library_messages import quiet_libraries

    with quiet_libraries(), _open_journal(run, source) as journal:
        if run.model.plan is None:
            run.display.progress("choose", "a precision", 0, 0)
        if is_first:
            _choose_model(run, source)
        record = _make(run, journal)
        write_run_record(record, record.output)
        if journal is not None:
            journal.clear()
    return record


def list_unknown_words(source: Source, prompt: str | None) -> list[str]:
    """List, in quotes, the words of a prompt that a bundled model was not trained on.

    Empty for any other model.
    """
    if source.kind != "bundled" or source.name not in BUNDLED_WORDS:
        return []
    known, *_ = BUNDLED_WORDS[source.name]
    words = dict.fromkeys(re.findall(r"\w+", (prompt or "").lower()))
    return [f'"{word}"' for word in words if not known.fullmatch(word)]


def _find_source(run: _Run) -> Source:
    """Find the model, and download it if necessary.

    The forecast of the run is shown before the weights are downloaded.
    """
    options, request, display = run.options, run.request, run.display
    if find_kind(options.source) == "hub":
        found = find_named_source(options, display, with_weights=False)
        refuse_missing_prompt(found.pipeline_class, found.components, request)
        if not is_complete(found):
            load_libraries(display)
            from stopdown.app.size_limits import show_before_download
            from stopdown.sources.needed_packages import refuse_missing_packages

            refuse_missing_packages(found)
            if options.output is not None:
                _check_format(found, request, options.output)

            run.model.forecast = show_before_download(options, found, request, display)
            from stopdown.plans.plan_choice import certified_on_arrival

            with certified_on_arrival(
                found, options.precision, run.device, request=request, progress=display.progress
            ):
                return find_named_source(options, display)
    return find_named_source(options, display)


def _check_format(source: Source, request: Request, output: str) -> None:
    """Refuse an output that does not suit what the pipeline makes, from its class alone."""
    from stopdown.pipelines.results import check_format
    from stopdown.sources.component_classes import find_class

    check_format(find_class("diffusers", source.pipeline_class), request, output)


def _ask_memory(run: _Run) -> MemoryPlan | None:
    from stopdown.runtime.memory_limits import ask_memory

    return ask_memory(run.options.memory, parse_request(run.options.precision))


def _choose_model(run: _Run, source: Source) -> None:
    """Choose the pipeline class for the request and prepare its `Runner`, once for all runs.

    Raises:
        OptionError: the pipeline cannot make the output format or size.
    """
    from stopdown.pipelines.class_selection import select_pipeline
    from stopdown.pipelines.results import choose_suffix
    from stopdown.runtime.runs import Runner
    from stopdown.sources.component_classes import find_class

    options, request, memory = run.options, run.request, _ask_memory(run)
    found = select_pipeline(source, request, progress=run.display.progress)
    run.model.source = found
    pipeline_class = find_class("diffusers", found.pipeline_class)
    run.model.output = f"{DEFAULT_OUTPUT}{choose_suffix(pipeline_class, request)}"
    _check_format(found, request, options.output or run.model.output)
    refuse_too_large(
        found,
        request,
        run.device,
        run.display,
        precision=options.precision,
        memory=memory.asked if memory is not None else None,
    )
    run.model.runner = Runner(found, run.device)


def _choose_plan(run: _Run) -> Plan:
    """Return the plan of the run, chosen once and cached in `run.model`; no weights are loaded."""
    from stopdown.plans.plan_choice import choose_plan

    model = run.model
    assert model.source is not None
    if model.plan is None:
        model.plan = choose_plan(
            model.source,
            run.options.precision,
            run.device,
            memory=_ask_memory(run),
            request=run.request,
            progress=run.display.progress,
        )
    return model.plan


def _make(run: _Run, journal: Journal | None) -> RunRecord:
    """Make the output file, and return the record of the run."""
    from stopdown.runtime.guard import GuardOptions
    from stopdown.runtime.runs import RunOutput
    from stopdown.runtime.session import tell_calls

    options, display, runner = run.options, run.display, run.model.runner
    assert runner is not None
    plan = _choose_plan(run)
    output = options.output or str(find_free(run.model.output, ".json"))
    fields = {
        "request": _describe_options(dataclasses.replace(options, output=output)),
        "forecast": run.model.forecast,
    }
    try:
        record, made = runner.make(
            plan,
            run.request,
            RunOutput(output, options.fps, run.started, fields, options.output is None),
            GuardOptions(
                on_fault=options.on_fault,
                observer=tell_calls(display.progress),
                announce=display.announce,
                journal=journal,
                maxima=options.maxima,
            ),
            progress=display.progress,
        )
    finally:
        runner.release()
    if made.updated is None:
        return record
    path = find_plan_path(options.precision)
    written = keep_updated(made.updated, path, options.keep_repairs, display.announce)
    if written is not None:
        run.model.plan = None
    return dataclasses.replace(record, updated_plan=written)


@contextlib.contextmanager
def _open_journal(run: _Run, source: Source) -> Iterator[Journal | None]:
    """Open the journal at `--journal`, which saves calls' outputs so that a killed run can continue.

    Yields None without the option.

    Raises:
        StopdownError: the journal belongs to a run with other options or another checkpoint.
    """
    options = run.options
    if options.journal is None:
        yield None
        return
    from stopdown.runtime.journal import Journal

    identity = {name: getattr(options, name) for name in _RUN_IDENTITY}
    identity["checkpoint"] = fingerprint(source)
    with Journal(options.journal, identity, announce=run.display.announce) as journal:
        yield journal


_RUN_IDENTITY = (*(x.name for x in FIELDS), "lora", "arg")
"""Options that identify a journal's run. The effects of others show in the pipeline and its scheduler."""


def _read_request(options: GenerateOptions) -> Request:
    """Validate the options and return the request with its input files read, before any costly work."""
    check_rate(options.fps)
    if options.prompt == "":
        raise OptionError(
            "The prompt is empty.",
            expected="An empty prompt often comes from a shell variable that isn't set.",
            remedy="Describe the picture, or leave the prompt out if the model takes none. A space, "
            '" ", is an empty prompt.',
        )
    if options.keep_repairs and find_plan_path(options.precision) is None:
        raise OptionError(
            f"--keep-repairs was given with --precision {options.precision}.",
            expected="Repairs are saved in the file of a plan. A plan that auto made is updated "
            "automatically.",
            remedy="Make a plan: stopdown plan SOURCE -o plan.json, and use --precision plan.json.",
        )
    return read_request(options, prompt=options.prompt)


def _check_output_early(options: GenerateOptions) -> None:
    """Refuse an output that cannot be written, before hours of computation."""
    plan = find_plan_path(options.precision)
    media = (getattr(options, name) for name in MEDIA)
    read = (*media, *list_argument_files(options.arg), options.source, plan)
    output, force = (
        options.output or str(find_free(f"{DEFAULT_OUTPUT}.mp4", ".json")),
        options.force,
    )
    check_output(output, options.frames, force=force, inputs=read)
    record = find_record_path(output)
    check_target(record, noun="record", replaces=describe_no_run, force=force, inputs=read)
    if options.keep_repairs and plan is not None:
        check_target(plan, noun="plan", option="with --precision", replaces=describe_no_plan)


def _describe_options(options: GenerateOptions) -> dict[str, Any]:
    """Return the options as JSON types; paths become text, and options that are not set are left out."""
    given = {
        name: x for name, x in asdict(options).items() if x not in (None, ()) and name not in SHOWN
    }
    return dict(msgspec.json.decode(msgspec.json.encode(given, enc_hook=str)))

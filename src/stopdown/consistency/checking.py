"""`check`: everything about dtypes that will go wrong, before a run and without needing the weights.

A live pipeline is checked as it stands, a source as loading would make it: its code runs once on fake
tensors and every operation is judged by the rules of the backend (`examining`); parameters, schedules,
the device's formats and, where they are on this disk, the values of weights are looked at beside.

**Catches** what `wording.KINDS` lists.
**Does not catch** overflow of activations, which depends on the values of weights (`sums`, `stopdown
plan`, and the guard), what a custom kernel does inside, and what only another request would meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stopdown.backends import Place
from stopdown.consistency import parameters, surroundings
from stopdown.consistency.examining import Examination, examine
from stopdown.consistency.summing import check_sums
from stopdown.consistency.wording import sort_findings, word_observations
from stopdown.environment import read_version
from stopdown.errors import OptionError
from stopdown.formats import FORMATS, find_format, parse_precision
from stopdown.pipelines import hub, sources
from stopdown.pipelines.components import find_components
from stopdown.pipelines.loading import complete_source, load_pipeline
from stopdown.pipelines.sources import Source
from stopdown.pipelines.stand_ins import build_stand_in, copy_stand_in
from stopdown.profiles import Profile, find_target
from stopdown.records import Finding


@dataclass(frozen=True)
class Checked:
    """A check with what it rests on.

    Attributes:
        findings: worst first.
        seen: what one run without weights showed.
        profile: the device that was judged for.
        precisions: component → format that it was judged in; empty for a live pipeline as it stands.
        stored: component → format of most of its weights on disk, as far as headers were there.
    """

    findings: list[Finding]
    seen: Examination
    profile: Profile
    precisions: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)


def check(
    pipe_or_source: Any,
    *,
    precision: str | None = None,
    device: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    sums: bool = False,
) -> list[Finding]:
    """Everything about dtypes that will go wrong, worst first; empty for a healthy pipeline.

    Args:
        pipe_or_source: a Diffusers pipeline, as it stands; or a SOURCE, of which the configs are
            enough: a Hub id (only configs and the headers of its weights are fetched), a Diffusers
            folder, or a bundled model.
        precision: `fp16`, or by component: `transformer=fp16,vae=fp32`: as if it were loaded so. None
            for a live pipeline as it stands, and for a source as it is stored.
        device: of this machine (`cuda`, `mps`, `cpu`) or a profile (`v100`); None for where a live
            pipeline is, and for what `auto` finds here.
        arguments: of the pipeline's call; without them its defaults.
        sums: load the weights as well and run two steps in fp32, to find sums that kernels with fp16
            accumulators would not hold, and products that do not fit into fp16.

    Raises:
        SourceError: there is no such source, or a config does not describe its class.
        OptionError: the precision or the device is unknown.
    """
    return inspect_pipeline(
        pipe_or_source, precision=precision, device=device, arguments=arguments, sums=sums
    ).findings


def inspect_pipeline(
    pipe_or_source: Any,
    *,
    precision: str | None = None,
    device: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    sums: bool = False,
) -> Checked:
    """As `check`, with what the findings rest on. `config` is for a single file, as in `load`."""
    if isinstance(pipe_or_source, (str, Path, Source)):
        found = pipe_or_source
        source = found if isinstance(found, Source) else find_source(found, config)
        checked = _check_source(source, precision, device, arguments)
        return _add_sums(checked, _load_wide(source, config), arguments) if sums else checked
    checked = _check_live(pipe_or_source, precision, device, arguments)
    return _add_sums(checked, pipe_or_source, arguments) if sums else checked


def _load_wide(source: Source, config: str | Path | None) -> Any:
    """A source with its weights, in fp32, where `auto` would run it."""
    whole = sources.resolve_source(source.name)
    sources.verify_source(whole)
    pipe = load_pipeline(whole, torch_dtypes=torch.float32, config=config)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(find_target()[0].torch_name)


def _add_sums(checked: Checked, pipe: Any, arguments: Mapping[str, Any] | None) -> Checked:
    """A check with what a run in fp32 shows of its sums."""
    doors = checked.seen.doors.values()
    narrow = {d.component.partition(".")[0] for d in doors if d.main == torch.float16}
    found = check_sums(pipe, narrow, checked.profile, arguments)
    return dataclasses.replace(checked, findings=sort_findings([*checked.findings, *found]))


def find_source(name: str | Path, config: str | Path | None = None) -> Source:
    """A source of which no weights are downloaded.

    Raises:
        SourceError: there is none, or it asks for code of its own.
    """
    source = sources.resolve_source(name, with_weights=False)
    if source.kind != "file":
        sources.verify_index(source)
        return source
    described, folder = complete_source(source, config=config)
    return dataclasses.replace(described, path=folder)  # `name` still tells the file


def _check_live(
    pipe: Any, precision: str | None, device: str | None, arguments: Mapping[str, Any] | None
) -> Checked:
    asked = parse_precisions(precision, find_components(pipe))
    profile = find_target(device or str(getattr(pipe, "device", "cpu")))[1]
    dtypes = {name: FORMATS[entry].torch_dtype for name, entry in asked.items()}
    stand_in = copy_stand_in(pipe, dtypes)
    found = list(parameters.check_dtypes(stand_in))
    seen = examine(stand_in, make_place(profile), arguments)
    found += parameters.check_values(pipe, asked)
    return Checked(_join(found, seen, profile, {}), seen, profile, asked)


def _check_source(
    source: Source, precision: str | None, device: str | None, arguments: Mapping[str, Any] | None
) -> Checked:
    profile = find_target(device or "auto")[1]
    names = [n for n, (_, kind) in source.components.items() if sources.has_weights(kind)]
    stored = read_stored(source)
    precisions = {name: entry for name, entry in stored.items() if entry in FORMATS}
    precisions |= parse_precisions(precision, names)
    dtypes = {name: FORMATS[entry].torch_dtype for name, entry in precisions.items()}
    seen = examine(build_stand_in(source, dtypes), make_place(profile), arguments)
    found = list(parameters.check_files(list_files(source), _add_whole(precisions)))
    return Checked(_join(found, seen, profile, stored), seen, profile, precisions, stored)


def list_files(source: Source) -> dict[str, list[Path]]:
    """Component → its weights on this disk; `checkpoint` for a single file, none for a Hub id."""
    if source.kind == "file":
        return {"checkpoint": [Path(source.name).expanduser()]}
    return sources.list_weight_files(source) if source.kind != "hub" else {}


def _add_whole(precisions: dict[str, str]) -> dict[str, str]:
    """The same with the precision of a single file, where all components have one."""
    chosen = set(precisions.values())
    return {**precisions, "checkpoint": chosen.pop()} if len(chosen) == 1 else precisions


def _join(
    found: list[Finding], seen: Examination, profile: Profile, stored: Mapping[str, str]
) -> list[Finding]:
    words = word_observations(seen.observations)
    blamed = {finding.site for finding in words if finding.kind == "mixed-parameters"}
    return sort_findings(
        [
            *words,
            *(f for f in found if f.kind != "several-dtypes" or f.site not in blamed),
            *surroundings.check_schedule(seen),
            *surroundings.check_upcast(seen),
            *surroundings.check_needs(seen),
            *surroundings.check_range(seen, stored),
            *surroundings.check_device(seen, profile),
            *surroundings.check_unseen(seen),
        ]
    )


def make_place(profile: Profile) -> Place:
    """Where a profile's operations run, as the rules ask for it."""
    version = (read_version("torch") or "0").partition("+")[0].split(".")
    numbers = tuple(int(part) for part in version if part.isdigit())
    return Place(profile.kind, profile.number, profile.macos, numbers)


def parse_precisions(text: str | None, names: Any) -> dict[str, str]:
    """Precision by component from a flag: `fp16`, or `transformer=bf16,vae=fp32`.

    Raises:
        OptionError: a precision or component is unknown.
    """
    if text is None or text.strip().lower() == "auto":
        return {}
    if "=" not in text:
        return dict.fromkeys(names, parse_precision(text))
    chosen: dict[str, str] = {}
    for entry in text.split(","):
        name, _, precision = (part.strip() for part in entry.partition("="))
        component = name.partition(".")[0]
        if component not in names:
            raise OptionError(
                f"The model has no component {name!r}.",
                expected=f"It has {', '.join(names)}.",
                remedy="Write for example --precision transformer=bf16,vae=fp32.",
            )
        chosen[component] = parse_precision(precision)
    return chosen


def read_stored(source: Source) -> dict[str, str]:
    """Component → format of most of its bytes, from the headers of its weights.

    Those of a Hub id are fetched by HTTP ranges. A folder with configs only says nothing, a single
    file nothing by component.
    """
    names = [name for name, (_, kind) in source.components.items() if sources.has_weights(kind)]
    if source.kind == "hub":
        tables = hub.read_remote_dtypes(source.name, source.revision, names)
    else:
        tables = sources.read_stored_dtypes(source) if source.kind != "file" else {}
    found = {}
    for name, sizes in tables.items():
        floats = {entry: size for entry, size in sizes.items() if find_format(entry)}
        if floats:
            found[name] = max(floats, key=lambda entry: floats[entry])
    return found

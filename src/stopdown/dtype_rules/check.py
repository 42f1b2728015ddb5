"""`check`: everything about dtypes that will go wrong, before a run and without needing the weights.

A live pipeline is checked as it stands, a source as loading would make it: its code runs once on fake
tensors and every operation is judged by the rules of the backend (`examining`); parameters, schedules,
the device's formats and, where they are on this disk, the values of weights are looked at beside.

**Catches** what `knowledge/rules/findings.toml` lists.
**Does not catch** overflow of activations, which depends on the values of weights (`sums`, `stopdown
plan`, and the guard), what a custom kernel does inside, and what only another request would meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stopdown.backend_rules import Place
from stopdown.call_names import split_module_path
from stopdown.device_profiles import Profile, find_target
from stopdown.dtype_rules import environment_findings, parameters
from stopdown.dtype_rules.findings import sort_findings, word_observations
from stopdown.dtype_rules.inspection import Examination, examine
from stopdown.dtype_rules.sum_overflow import check_sums
from stopdown.environment import read_version
from stopdown.errors import OptionError
from stopdown.number_formats import FORMATS, find_format
from stopdown.pipelines import hub, sources
from stopdown.pipelines.component_classes import find_class
from stopdown.pipelines.components import find_components, list_calls
from stopdown.pipelines.default_sizes import read_configs
from stopdown.pipelines.headers import read_rescaled
from stopdown.pipelines.loader import complete_source, load_pipeline, move_program
from stopdown.pipelines.skeletons import build_skeleton, copy_skeleton
from stopdown.pipelines.sources import Source
from stopdown.plans.applier import apply_without_weights, check_plan, check_source
from stopdown.plans.plan_files import read_plan
from stopdown.plans.planned_loader import decide, gather_facts
from stopdown.plans.precision import (
    PrecisionRequest,
    explain_plan,
    parse_request,
    resolve_request,
    write_request,
)
from stopdown.records import Finding, Plan


@dataclass(frozen=True)
class Checked:
    """A check with what it rests on.

    Attributes:
        findings: worst first.
        seen: what one run without weights showed.
        profile: the device that was judged for.
        precisions: component → format that it was judged in, or call → format where the methods of a
            component differ; empty for a live pipeline as it stands.
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
    precision: str | Path | torch.dtype | Mapping[str, Any] | None = None,
    device: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    sums: bool = False,
) -> list[Finding]:
    """Everything about dtypes that will go wrong, worst first; empty for a healthy pipeline.

    Args:
        pipe_or_source: a Diffusers pipeline, as it stands; or a SOURCE, of which the configs are
            enough: a Hub id (only configs and the headers of its weights are fetched), a Diffusers
            folder, or a bundled model.
        precision: `fp16`, or by component: `transformer=fp16,vae.decode=fp32`: as if it were loaded so;
            `plan.json`, as if that plan were on it; dtypes as in `load`. None and `auto` for a live
            pipeline as it stands, and for a source as it is stored.
        device: of this machine (`cuda`, `mps`, `cpu`) or a profile (`v100`); None for where a live
            pipeline is, and for what `auto` finds here.
        arguments: of the pipeline's call; without them its defaults.
        sums: load the weights as well and run two steps in fp32, to find sums that kernels with fp16
            accumulators would not hold, and products that do not fit into fp16.

    Raises:
        SourceError: there is no such source, or a config does not describe its class.
        OptionError: the precision or the device is unknown, or sums are asked of a plan.
        PlanError: the plan is damaged or belongs to another model.
    """
    asked = None if precision is None else write_request(precision)
    return inspect_pipeline(
        pipe_or_source, precision=asked, device=device, arguments=arguments, sums=sums
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
    request = parse_request(precision or "auto")
    asked = request if request.plan is None else read_plan(request.plan)
    if sums and isinstance(asked, Plan):
        raise OptionError(
            f"Sums were asked for with the plan {request.plan}.",
            expected="Sums are looked at in fp32 and without a plan, which changes them.",
            remedy='Use precision="fp16" with sums, or leave sums away.',
        )
    if isinstance(pipe_or_source, (str, Path, Source)):
        found = pipe_or_source
        if not isinstance(found, Source):
            found = sources.resolve_source(found, config=config, with_weights=False)
            found = find_source(found)
        checked = _check_source(found, asked, device, arguments)
        return _add_sums(checked, _load_wide(found), arguments) if sums else checked
    checked = _check_live(pipe_or_source, asked, device, arguments)
    return _add_sums(checked, pipe_or_source, arguments) if sums else checked


def _load_wide(source: Source) -> Any:
    """A source with its weights, in fp32, where `auto` would run it."""
    whole = sources.resolve_source(
        source.name,
        revision=source.revision or None,
        config=source.config,
        variant=source.variant or None,
    )
    sources.verify_source(whole)
    pipe = load_pipeline(whole, torch_dtypes=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return move_program(pipe, find_target()[0])


def _add_sums(checked: Checked, pipe: Any, arguments: Mapping[str, Any] | None) -> Checked:
    """A check with what a run in fp32 shows of its sums."""
    callees = checked.seen.callees.values()
    narrow = {d.component_name for d in callees if d.main == torch.float16}
    found = check_sums(pipe, narrow, checked.profile, arguments)
    return dataclasses.replace(checked, findings=sort_findings([*checked.findings, *found]))


def find_source(named: str | Path | Source) -> Source:
    """A source of which no weights are downloaded.

    Args:
        named: a source, or its name.

    Raises:
        SourceError: there is none, or it asks for code of its own.
    """
    source = (
        named if isinstance(named, Source) else sources.resolve_source(named, with_weights=False)
    )
    if source.kind != "file":
        sources.verify_descriptions(source)
        return source
    source = complete_source(source)
    return dataclasses.replace(source, path=source.described)  # `name` still tells the file


def _check_live(
    pipe: Any,
    asked: PrecisionRequest | Plan,
    device: str | None,
    arguments: Mapping[str, Any] | None,
) -> Checked:
    place, profile = _find_place(device or str(getattr(pipe, "device", "cpu")))
    if isinstance(asked, Plan):
        check_plan(pipe, asked)
        skeleton = copy_skeleton(pipe, dict.fromkeys(find_components(pipe), torch.float32))
        apply_without_weights(skeleton, asked)
        found = list(parameters.check_values(pipe, {}))
        parts, chosen = [examine(skeleton, place, arguments)], _list_planned(asked)
    else:
        calls = {name: list_calls(name, part) for name, part in find_components(pipe).items()}
        options = _Options(calls, resolve_request(asked, calls))
        skeletons = [copy_skeleton(pipe, dtypes) for dtypes in options.list_dtypes()]
        parts = _examine_all(skeletons, options, place, arguments)
        widening = {module_path for part in parts for module_path in part.widening}
        fresh = [
            copy_skeleton(pipe, dtypes) for dtypes in options.list_dtypes()
        ]  # those are used up
        found = [finding for made in fresh for finding in parameters.check_dtypes(made, widening)]
        found += [f for each in options.list_formats() for f in parameters.check_values(pipe, each)]
        chosen = options.chosen
    found += parameters.check_rescaled(pipe)
    return _join(found, parts, profile, chosen, {})


def _check_source(
    source: Source,
    asked: PrecisionRequest | Plan,
    device: str | None,
    arguments: Mapping[str, Any] | None,
) -> Checked:
    place, profile = _find_place(device or "auto")
    headers, files = _read_headers(source), list_files(source)
    stored = read_stored(source, headers)
    if isinstance(asked, Plan):
        path = files["checkpoint"][0] if source.kind == "file" else source.path
        here = dataclasses.replace(source, path=path)
        check_source(asked, here, with_weights=any(files.values()))
        skeleton = build_skeleton(source, {}, keep_fp32=False)
        apply_without_weights(skeleton, asked)
        found = list(parameters.check_files(files, {}))
        parts, chosen = [examine(skeleton, place, arguments)], _list_planned(asked)
    else:
        calls = {
            name: list_calls(name, find_class(*entry))
            for name, entry in source.components.items()
            if sources.has_weights(entry[1])
        }
        known = {call: stored.get(name, "") for name in calls for call in calls[name]}
        known = {call: entry for call, entry in known.items() if entry in FORMATS}
        options = _Options(calls, known | resolve_request(asked, calls))
        skeletons = [build_skeleton(source, dtypes) for dtypes in options.list_dtypes()]
        parts = _examine_all(skeletons, options, place, arguments)
        found = [
            finding
            for each in options.list_formats()
            for finding in parameters.check_files(files, _add_whole(each))
        ]
        chosen = options.chosen
    said = {name: next(filter(None, map(read_rescaled, x)), "") for name, x in files.items()}
    found += parameters.check_rescaled_files(said | hub.find_rescaled(headers))
    return _join(found, parts, profile, chosen, stored)


def choose_auto(source: Source, device: str | None) -> tuple[str, bool, str]:
    """The precision that `auto` takes for a source on a device, whether by a plan, and a sentence.

    Args:
        source: as `find_source` gives it.
        device: as for `check`.
    """
    stored = read_stored(source, _read_headers(source))
    profile = find_target(device or "auto")[1]
    facts = [
        dataclasses.replace(fact, stored={stored[fact.name]: 1} if fact.name in stored else {})
        for fact in gather_facts(source, read_configs(source.path))
    ]
    if not all(fact.stored for fact in facts):
        return "auto", False, "Judged as it is stored, which its configs alone do not say."
    if reason := explain_plan(facts, profile.supports):
        return "fp16", True, f"Judged in fp16, which auto takes by a plan of its own: {reason}."
    decisions = decide(facts, profile.supports, "auto")
    return (
        ",".join(f"{one.component}={one.precision}" for one in decisions),
        False,
        "Judged as auto would run it.",
    )


def _find_place(device: str) -> tuple[Place, Profile]:
    profile = find_target(device)[1]
    return make_place(profile), profile


def _list_planned(plan: Plan) -> dict[str, str]:
    return {x.component: x.precision for x in plan.components if x.precision in FORMATS}


@dataclass(frozen=True)
class _Options:
    """The format of each call. A component has one, so two runs are looked at where its methods differ.

    Attributes:
        calls: component → what it is called as.
        formats: call → format; absent ones stay.
    """

    calls: Mapping[str, tuple[str, ...]]
    formats: Mapping[str, str]

    @property
    def chosen(self) -> dict[str, str]:
        """By component, or by call where the methods of a component differ."""
        found: dict[str, str] = {}
        for name, calls in self.calls.items():
            each = {call: self.formats[call] for call in calls if call in self.formats}
            is_one = len(each) == len(calls) and len(set(each.values())) == 1
            found |= {name: next(iter(each.values()))} if is_one else each
        return found

    def list_formats(self) -> list[dict[str, str]]:
        """By component, as its first call has it; and once more as its last, where one differs."""
        sides = [
            {name: self.formats[x[at]] for name, x in self.calls.items() if x[at] in self.formats}
            for at in (0, -1)
        ]
        return sides[:1] if sides[0] == sides[1] else sides

    def list_dtypes(self) -> list[dict[str, torch.dtype]]:
        return [
            {name: FORMATS[entry].torch_dtype for name, entry in each.items()}
            for each in self.list_formats()
        ]


def _examine_all(
    skeletons: list[Any], options: _Options, place: Place, arguments: Mapping[str, Any] | None
) -> list[Examination]:
    """What runs show, each of the calls that it has in their own format."""
    parts = [examine(skeleton, place, arguments) for skeleton in skeletons]
    if len(parts) == 1:
        return parts
    last = {calls[-1] for calls in options.calls.values() if len(calls) > 1}
    return [_take(parts[0], lambda call: call not in last), _take(parts[1], last.__contains__)]


def _take(seen: Examination, has: Callable[[str], bool]) -> Examination:
    """What was seen of some calls, and around them."""
    return dataclasses.replace(
        seen,
        observations=[
            x for x in seen.observations if x.component == "pipeline" or has(x.component)
        ],
        callees={call: callee for call, callee in seen.callees.items() if has(call)},
    )


def _merge(parts: list[Examination]) -> Examination:
    return Examination(
        [observation for part in parts for observation in part.observations],
        {call: callee for part in parts for call, callee in part.callees.items()},
        {key: module_path for part in parts for key, module_path in part.operations.items()},
        list(dict.fromkeys(entry for part in parts for entry in part.unseen)),
        parts[0].scheduler,
        {module_path for part in parts for module_path in part.widening},
    )


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
    found: list[Finding],
    parts: list[Examination],
    profile: Profile,
    chosen: dict[str, str],
    stored: dict[str, str],
) -> Checked:
    seen = _merge(parts)
    words = word_observations(seen.observations)
    blamed = {finding.module_path for finding in words if finding.kind == "mixed-parameters"}
    rescaled = {finding.module_path for finding in found if finding.kind == "rescaled-weights"}
    findings = sort_findings(
        [
            *(f for f in words if not _is_kept_away(f, rescaled)),
            *(f for f in found if f.kind != "several-dtypes" or f.module_path not in blamed),
            *environment_findings.check_schedule(seen),
            *(finding for part in parts for finding in environment_findings.check_upcast(part)),
            *environment_findings.check_needs(seen),
            *environment_findings.check_range(seen, stored),
            *environment_findings.check_device(seen, profile),
            *environment_findings.check_unseen(seen),
        ]
    )
    return Checked(findings, seen, profile, chosen, stored)


def _is_kept_away(finding: Finding, rescaled: Collection[str]) -> bool:
    """Whether a clamp is said to bite in a component whose weights keep their values below it."""
    return (
        finding.kind == "clamp-may-bite" and split_module_path(finding.module_path)[0] in rescaled
    )


def _read_headers(source: Source) -> hub.Headers:
    """Of the weights of a Hub id, which stay there; none of anything else."""
    if source.kind != "hub":
        return ()
    names = [name for name, (_, kind) in source.components.items() if sources.has_weights(kind)]
    return hub.read_remote_headers(source.name, source.revision, names, source.variant)


def make_place(profile: Profile) -> Place:
    """Where a profile's operations run, as the rules ask for it."""
    version = (read_version("torch") or "0").partition("+")[0].split(".")
    numbers = tuple(int(part) for part in version if part.isdigit())
    return Place(profile.kind, profile.number, profile.macos, numbers, profile.onednn_formats)


def read_stored(source: Source, headers: hub.Headers = ()) -> dict[str, str]:
    """Component → format of most of its bytes, from the headers of its weights.

    Those of a Hub id are given. A folder with configs only says nothing, a single file nothing by
    component.
    """
    if source.kind == "hub":
        tables = hub.count_dtypes(headers)
    else:
        tables = sources.read_stored_dtypes(source) if source.kind != "file" else {}
    found = {}
    for name, sizes in tables.items():
        floats = {entry: size for entry, size in sizes.items() if find_format(entry)}
        if floats:
            found[name] = max(floats, key=lambda entry: floats[entry])
    return found

"""`check`: find dtype problems of a model before a run, without its weights.

A live pipeline is checked as it is, a source as it would be loaded. Its code runs once on fake tensors, and
every operation is compared with the rules of the backend (`inspection`). Parameters, schedules, the
device's formats and, if they are on this disk, the values of weights are checked separately.

**Catches** the problems in `knowledge/rules/findings.toml`.
**Does not catch** overflow of activations, which depends on the values of weights (see `sum_overflow`,
plans and the guard), problems inside custom kernels, and problems that only another request has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stopdown.argument_types import check_function, check_type
from stopdown.component_call_names import split_module_path
from stopdown.component_calls.components import (
    check_run,
    explain_run,
    find_callees,
    find_components,
    find_device,
    find_named_callees,
    list_call_names,
    refuse_run,
    runs_by_call,
)
from stopdown.devices.backend_rules import Place
from stopdown.devices.device_choice import name_device
from stopdown.devices.device_profiles import Profile, find_device_target
from stopdown.devices.environment import read_version
from stopdown.dtype_rules import environment_findings, parameters
from stopdown.dtype_rules.findings import sort_findings, word_for_program, word_observations
from stopdown.dtype_rules.inspection import Examination, examine_program, observe_skeleton
from stopdown.dtype_rules.sum_overflow import check_sums, run_pipeline
from stopdown.errors import OptionError
from stopdown.module_calls.callee import Callee
from stopdown.number_formats import FORMATS, find_format
from stopdown.pipelines.loader import complete_source, load_pipeline, move_program
from stopdown.pipelines.skeletons import build_skeleton, copy_empty_module, copy_skeleton
from stopdown.plans.applier import (
    apply_plan,
    apply_without_weights,
    check_plan,
    check_source,
)
from stopdown.plans.plan_files import read_plan
from stopdown.plans.planned_loader import decide, gather_facts
from stopdown.plans.precision import (
    explain_plan,
    find_plan_path,
    list_rescaled,
    parse_request,
    resolve_request,
    write_request,
)
from stopdown.records import Finding, Plan
from stopdown.sources import hub, source_checks, sources
from stopdown.sources.component_classes import find_class
from stopdown.sources.headers import read_rescaled
from stopdown.sources.source import Source, list_weight_files


@dataclass(frozen=True)
class CheckResult:
    """Findings of a check, with the observations behind them.

    Attributes:
        findings: findings, worst first.
        seen: observations of one dry run.
        profile: device for which the model was checked.
        precisions: format by component, or by call if the methods of a component differ; empty for a live
            pipeline that was checked as it is.
        callees: component calls of a program in memory.
    """

    findings: list[Finding]
    seen: Examination
    profile: Profile
    precisions: dict[str, str] = field(default_factory=dict)
    callees: tuple[Callee, ...] = ()


def check(
    pipe_or_source: Any,
    *,
    precision: str | Path | torch.dtype | Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    arguments: Mapping[str, Any] | None = None,
    sums: bool = False,
    run: Callable[[], Any] | None = None,
) -> list[Finding]:
    """Find every dtype problem of a pipeline or program, worst first; the list is empty if there are none.

    Args:
        pipe_or_source: a Diffusers pipeline, or another program as for `guard`; or a SOURCE: a Hub id
            (only configs and the headers of its weights are downloaded), a Diffusers folder, or a bundled
            model. Configs are enough.
        precision: `fp16`, or by component: `transformer=fp16,vae.decode=fp32`. A source is checked as
            `load` would run it: fp16 with a plan, `fp16-plain` without one. A live pipeline has no plan
            and is checked as if it were cast. `plan.json` checks it as if that plan were applied; dtypes
            as in `load`. None and `auto` check a live pipeline as it is, and a source as it is stored.
        device: a device of this machine (`cuda`, `mps`, `cpu`) or a profile (`v100`); None for a live
            pipeline's own device, and for a source the device that `auto` chooses here.
        arguments: arguments of the pipeline's call; the others have their defaults.
        sums: also load the weights and run two steps in fp32, to find sums that overflow in kernels with
            fp16 accumulators, and products that do not fit in fp16.
        run: a function that runs a program other than a pipeline once, as in later use. The program's own
            code runs; calls of its modules return zeros and are not computed.

    Raises:
        InputError: the program is not a pipeline, and `run` is missing or calls none of its modules.
        SourceError: there is no such source, or a config does not describe its class.
        OptionError: the precision or the device is unknown, or `sums` was given with a plan.
        PlanError: the plan is damaged or belongs to another model.

    Examples:
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 4).half(), torch.nn.LayerNorm(4))
        >>> x = torch.ones(1, 4).half()
        >>> findings = stopdown.check({"denoiser": module}, device="v100", run=lambda: module(x))
        >>> [(finding.kind, finding.module_path) for finding in findings]
        [('mixed-parameters', 'denoiser:1')]
    """
    asked = None if precision is None else write_request(precision)
    validate_call("check", arguments, run)
    where = name_device("check", device)
    return inspect_pipeline(
        pipe_or_source, precision=asked, device=where, arguments=arguments, sums=sums, run=run
    ).findings


def validate_call(function: str, arguments: object, run: object) -> None:
    """Refuse call arguments that are not a mapping, and a `run` that is not callable."""
    check_type(
        f"{function}(arguments=...)",
        arguments,
        (Mapping, type(None)),
        "They are arguments of the pipeline's call, by its own names.",
        'Use arguments={"height": 512, "width": 512}.',
    )
    check_function(f"{function}(run=...)", run, "run=lambda: model(x)")


def inspect_pipeline(
    pipe_or_source: Any,
    *,
    precision: str | None = None,
    device: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    sums: bool = False,
    run: Callable[[], Any] | None = None,
) -> CheckResult:
    """Check a model as `check` does, and return the findings with the observations behind them."""
    path = find_plan_path(precision or "")
    asked = parse_request(precision or "auto") if path is None else read_plan(path)
    if sums and isinstance(asked, Plan):
        raise OptionError(
            f"Sums were requested with the plan {path}.",
            expected="Sums are examined in fp32 and without a plan, because a plan changes them.",
            remedy='Use precision="fp16" with sums, or leave sums out.',
        )
    if isinstance(pipe_or_source, (str, Path, Source)):
        found = pipe_or_source
        refuse_run(run, f"the source {getattr(found, 'name', found)}")
        if not isinstance(found, Source):
            found = find_weightless_source(found)
        checked = _check_source(found, asked, device, arguments)
        return _add_sums(checked, _load_wide(found), arguments) if sums else checked
    if check_run(pipe_or_source, run, arguments, "check") and run is not None:
        checked = _check_program(pipe_or_source, asked, device, run)
    else:
        checked = _check_live(pipe_or_source, asked, device, arguments)
    return _add_sums(checked, pipe_or_source, arguments, run) if sums else checked


def _load_wide(source: Source) -> Any:
    """Load a source with its weights in fp32, on the device that `auto` would choose."""
    whole = sources.resolve_source(
        source.name,
        revision=source.revision or None,
        config=source.config,
        variant=source.variant or None,
    )
    source_checks.verify_source(whole)
    pipe = load_pipeline(whole, torch_dtypes=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return move_program(pipe, find_device_target()[0])


def _add_sums(
    checked: CheckResult,
    pipe: Any,
    arguments: Mapping[str, Any] | None,
    run: Callable[[], Any] | None = None,
) -> CheckResult:
    callees = checked.seen.callees.values()
    narrow = {d.component_name for d in callees if d.main == torch.float16}
    start = run or functools.partial(run_pipeline, pipe, arguments or {})
    found = check_sums(pipe, narrow, checked.profile, start)
    return dataclasses.replace(checked, findings=sort_findings([*checked.findings, *found]))


def find_weightless_source(named: str | Path | Source) -> Source:
    """Return a source without downloading its weights."""
    source = (
        named if isinstance(named, Source) else sources.resolve_source(named, with_weights=False)
    )
    if source.kind != "file":
        source_checks.verify_descriptions(source)
        return source
    return complete_source(source)


def _check_live(
    pipe: Any,
    asked: Mapping[str, str] | Plan,
    device: str | None,
    arguments: Mapping[str, Any] | None,
) -> CheckResult:
    place, profile = _find_place(device or find_device(pipe))
    components = find_components(pipe)
    live = _Live(pipe, components, find_callees(pipe), profile)
    if isinstance(asked, Plan):
        check_plan(pipe, asked)
        skeleton = copy_skeleton(pipe, dict.fromkeys(components, torch.float32))
        apply_without_weights(skeleton, asked)
        return _judge_planned(live, asked, observe_skeleton(skeleton, place, arguments))
    calls = {name: list_call_names(name, part) for name, part in components.items()}
    options = _Options(calls, resolve_request(asked, calls))
    parts = options.examine(
        lambda dtypes: observe_skeleton(copy_skeleton(pipe, dtypes), place, arguments)
    )
    return _judge_live(
        live, options, parts, lambda dtypes: find_components(copy_skeleton(pipe, dtypes))
    )


def _check_program(
    program: Any,
    asked: Mapping[str, str] | Plan,
    device: str | None,
    run: Callable[[], Any],
) -> CheckResult:
    """Check a program that is not a pipeline; its components are the modules that `run` calls."""
    place, profile = _find_place(device or find_device(program))
    with apply_plan(program, asked) if isinstance(asked, Plan) else contextlib.nullcontext():
        seen = examine_program(program, place, run)
    callees = find_named_callees(program, seen.callees)
    if not callees:
        why = "".join(f" It ended with {reason}." for _, reason in seen.unseen)
        raise explain_run(
            f"The run called no module of the {type(program).__name__}.{why}", "check"
        )
    components = {callee.component_name: callee.owner for callee in callees}
    live = _Live(program, components, callees, profile)
    if isinstance(asked, Plan):
        return _judge_planned(live, asked, seen)
    calls = {
        name: tuple(callee.name for callee in callees if callee.component_name == name)
        for name in components
    }
    options = _Options(calls, resolve_request(asked, calls))
    parts = [seen]
    if options.formats:
        parts = options.examine(lambda dtypes: examine_program(program, place, run, dtypes))
    return _judge_live(
        live,
        options,
        parts,
        lambda dtypes: {
            name: copy_empty_module(x, dtypes.get(name)) for name, x in components.items()
        },
    )


@dataclass(frozen=True)
class _Live:
    """A program in memory, with its components and the device for which it is checked."""

    program: Any
    components: Mapping[str, torch.nn.Module]
    callees: tuple[Callee, ...]
    profile: Profile


def _judge_planned(live: _Live, plan: Plan, seen: Examination) -> CheckResult:
    """Combine the observations of a program with a plan applied, and findings about its weights."""
    found = list(parameters.check_parameters(live.components, {}))
    return _conclude(live, found, [seen], _list_planned(plan))


def _judge_live(
    live: _Live,
    options: _Options,
    parts: list[Examination],
    copy: Callable[[dict[str, torch.dtype]], Mapping[str, torch.nn.Module]],
) -> CheckResult:
    """Combine the observations of a program with findings about its weights.

    Args:
        parts: observations of one run for each map of formats.
        copy: returns components without weights as if loaded in the given dtypes. The skeletons of the
            runs cannot be used again.
    """
    widening = {module_path for part in parts for module_path in part.widening}
    found = [
        finding
        for dtypes in options.list_dtypes()
        for finding in parameters.check_dtypes(copy(dtypes), widening)
    ]
    for each in options.list_formats():
        found += parameters.check_parameters(live.components, each)
    return _conclude(live, found, parts, options.chosen)


def _conclude(
    live: _Live, found: list[Finding], parts: list[Examination], chosen: dict[str, str]
) -> CheckResult:
    rescaled = list(parameters.check_rescaled(live.program, live.components))
    checked = _join([*found, *rescaled], parts, live.profile, chosen, {})
    findings = checked.findings
    if not runs_by_call(live.program):
        findings = [word_for_program(finding) for finding in findings]
    return dataclasses.replace(checked, findings=findings, callees=live.callees)


def _check_source(
    source: Source,
    asked: Mapping[str, str] | Plan,
    device: str | None,
    arguments: Mapping[str, Any] | None,
) -> CheckResult:
    place, profile = _find_place(device or "auto")
    files, stored = list_files(source), read_stored(source)
    if isinstance(asked, Plan):
        check_source(asked, source, with_weights=any(files.values()))
        skeleton = build_skeleton(source, {}, keep_fp32=False)
        apply_without_weights(skeleton, asked)
        found = list(parameters.check_files(files, {}))
        parts, chosen = [observe_skeleton(skeleton, place, arguments)], _list_planned(asked)
    else:
        calls = {
            name: list_call_names(name, find_class(*entry))
            for name, entry in source.components.items()
            if source.has_weights(name)
        }
        known = {call: stored.get(name, "") for name in calls for call in calls[name]}
        known = {call: entry for call, entry in known.items() if entry in FORMATS}
        usual = Counter(known.values()).most_common(1)  # of a component that isn't known, too
        known = {
            call: entry for entry, _ in usual for name in calls for call in calls[name]
        } | known
        options = _Options(calls, known | resolve_request(asked, calls))
        planned = list_rescaled(asked, calls)
        parts = options.examine(
            lambda dtypes: observe_skeleton(build_skeleton(source, dtypes), place, arguments)
        )
        parts = [_mark_planned(part, planned) for part in parts]
        found = [
            finding
            for each in options.list_formats()
            for finding in parameters.check_files(files, _add_whole(_leave_out(each, planned)))
        ]
        chosen = options.chosen
    said = {name: read_rescaled(*x) for name, x in files.items()}
    found += parameters.check_rescaled_files(
        said | hub.find_rescaled(sources.read_remote_headers(source))
    )
    return _join(found, parts, profile, chosen, stored)


def _mark_planned(seen: Examination, planned: Collection[str]) -> Examination:
    """Return the observations with the calls of these components marked as rescaled by a plan."""
    callees = {
        call: dataclasses.replace(callee, is_rescaled=True)
        if callee.component_name in planned
        else callee
        for call, callee in seen.callees.items()
    }
    return dataclasses.replace(seen, callees=callees)


def _leave_out(precisions: Mapping[str, str], planned: Collection[str]) -> dict[str, str]:
    """Return the formats without those of components that a plan rescales."""
    return {name: entry for name, entry in precisions.items() if name not in planned}


def choose_auto(source: Source, device: str | None) -> tuple[str, str]:
    """Return the precision that `auto` chooses for a source on a device, with an explanation."""
    profile = find_device_target(device or "auto")[1]
    facts = gather_facts(source)
    if not all(fact.stored for fact in facts):
        return "auto", "Checked as stored; the configs alone don't say in which format."
    if reason := explain_plan(facts, profile.supports):
        return "fp16", f"By default it runs in fp16 with an automatic plan, because {reason}."
    decisions = decide(facts, profile.supports, "auto")
    return (
        ",".join(f"{one.component}={one.precision}" for one in decisions),
        "These are the defaults on this device.",
    )


def _find_place(device: str) -> tuple[Place, Profile]:
    profile = find_device_target(device)[1]
    return make_place(profile), profile


def _list_planned(plan: Plan) -> dict[str, str]:
    return {x.component: x.precision for x in plan.components if x.precision in FORMATS}


@dataclass(frozen=True)
class _Options:
    """Requested format of each component call.

    A component has one format in a run, so two runs are needed if the methods of a component differ.

    Attributes:
        calls: names of the calls of each component.
        formats: format by call; others keep theirs.
    """

    calls: Mapping[str, tuple[str, ...]]
    formats: Mapping[str, str]

    @property
    def chosen(self) -> dict[str, str]:
        """The format of each component, or of each of its calls if they differ."""
        found: dict[str, str] = {}
        for name, calls in self.calls.items():
            each = {call: self.formats[call] for call in calls if call in self.formats}
            is_one = len(each) == len(calls) and len(set(each.values())) == 1
            found |= {name: next(iter(each.values()))} if is_one else each
        return found

    def list_formats(self) -> list[dict[str, str]]:
        """Return the formats of the components for each run: those of their first calls.

        If the last calls differ, a second run has theirs.
        """
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

    def examine(self, look: Callable[[dict[str, torch.dtype]], Examination]) -> list[Examination]:
        """Examine one run for each map of formats; from each, keep the calls with their own format.

        Args:
            look: examines a run with components in the given dtypes.
        """
        parts = [look(dtypes) for dtypes in self.list_dtypes()]
        if len(parts) == 1:
            return parts
        last = {calls[-1] for calls in self.calls.values() if len(calls) > 1}
        return [_take(parts[0], lambda call: call not in last), _take(parts[1], last.__contains__)]


def _take(seen: Examination, has: Callable[[str], bool]) -> Examination:
    """Return the observations of some calls, and of the pipeline's own code."""
    return dataclasses.replace(
        seen,
        observations=[x for x in seen.observations if x.call == "pipeline" or has(x.call)],
        callees={call: callee for call, callee in seen.callees.items() if has(call)},
    )


def list_files(source: Source) -> dict[str, list[Path]]:
    """Map each component to its weight files on this disk.

    A single file has the one entry `checkpoint`; a Hub id has none.
    """
    return list_weight_files(source) if source.kind != "hub" else {}


def _add_whole(precisions: dict[str, str]) -> dict[str, str]:
    """Add the entry `checkpoint`, which stands for a single file, if all components have one precision."""
    chosen = set(precisions.values())
    return {**precisions, "checkpoint": chosen.pop()} if len(chosen) == 1 else precisions


def _join(
    found: list[Finding],
    parts: list[Examination],
    profile: Profile,
    chosen: dict[str, str],
    stored: dict[str, str],
) -> CheckResult:
    seen = Examination(
        [observation for part in parts for observation in part.observations],
        {call: callee for part in parts for call, callee in part.callees.items()},
        {key: module_path for part in parts for key, module_path in part.operations.items()},
        list(dict.fromkeys(entry for part in parts for entry in part.unseen)),
        parts[0].scheduler,
        {module_path for part in parts for module_path in part.widening},
    )
    words = word_observations(seen.observations)
    blamed = {finding.module_path for finding in words if finding.kind == "mixed-parameters"}
    rescaled = {finding.module_path for finding in found if finding.kind == "rescaled-weights"}
    rescaled |= {callee.component_name for callee in seen.callees.values() if callee.is_rescaled}
    findings = sort_findings(
        [
            *(
                f
                for f in words
                if f.kind != "clamp-may-bite" or split_module_path(f.module_path)[0] not in rescaled
            ),
            *(f for f in found if f.kind != "several-dtypes" or f.module_path not in blamed),
            *environment_findings.check_schedule(seen),
            *(finding for part in parts for finding in environment_findings.check_upcast(part)),
            *environment_findings.check_needs(seen),
            *environment_findings.check_range(seen, stored),
            *environment_findings.check_device(seen, profile),
            *environment_findings.check_unseen(seen),
        ]
    )
    return CheckResult(findings, seen, profile, chosen)


def make_place(profile: Profile) -> Place:
    """Return the backend and versions that a profile describes, as input of the backend rules."""
    version = (read_version("torch") or "0").partition("+")[0].split(".")
    numbers = tuple(int(part) for part in version if part.isdigit())
    return Place(profile.kind, profile.number, profile.macos, numbers, profile.onednn_formats)


def read_stored(source: Source) -> dict[str, str]:
    """Map each component to the format of most of its bytes, from the headers of its weights.

    Empty for a folder with only configs, and for a single file, which is not split by component.
    """
    tables = sources.read_stored_dtypes(source) if source.kind != "file" else {}
    found = {}
    for name, sizes in tables.items():
        floats = {entry: size for entry, size in sizes.items() if find_format(entry)}
        if floats:
            found[name] = max(floats, key=lambda entry: floats[entry])
    return found

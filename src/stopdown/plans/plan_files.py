"""Write plans to files with a checksum, check them when they are read, and cache them between runs.

**Catches** files that are cut off, that are no plan, of another schema, edited by hand (the seal does not
fit), or sealed again with values that no plan holds: exponents beyond fp32's own range, precisions and
components that there are not, names that are no path, blocks of rows that are none, shares that are none.

**Does not catch** an edit within those values by someone who computes the seal again: a plan is data.
`apply_plan` refuses exponents with which a weight leaves its format or vanishes; others that are wrong
give another picture.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stopdown.argument_types import check_type
from stopdown.devices.environment import cache_folder, mark_code, read_version
from stopdown.errors import InputError, OutputError, PlanError, warn_user
from stopdown.files.json_files import UnreadableError, parse_json, read_small_file
from stopdown.files.outputs import discard, explain_refusal, write_numbered, written_beside
from stopdown.number_formats import FORMATS
from stopdown.records import (
    ComponentPlan,
    Plan,
    ResidualStream,
    Scaling,
    convert_record,
    describe_other,
    from_json,
    read_kind,
    to_json,
)

PACKAGES = ("diffusers", "transformers")
"""The packages that define the components' classes; a plan holds only for their versions."""

MOST_NAMED = 5
"""Most invalid values of a plan that an error message names."""


def read_class_versions() -> dict[str, str]:
    """Read the versions of the packages that components' classes come from; `0.42.0.dev0+f3a9…` with a
    commit.
    """
    return {name: _read_version(name) for name in PACKAGES}


def _read_version(package: str) -> str:
    return "+".join(filter(None, (read_version(package), mark_code(package))))


def seal_plan(plan: Plan) -> Plan:
    """Return a plan with the checksum of its content in `seal`, by which an edited file is recognised.

    Its values are as if it had been written to a file and read again.
    """
    plan = from_json(_to_text(plan), Plan)  # so that 0 and 0.0 are one, as they are when read
    return dataclasses.replace(plan, seal=_compute_seal(_to_text(plan)))


def _to_text(plan: Plan) -> str:
    """Return a plan as JSON, without `memory`, which belongs to one run."""
    return to_json(dataclasses.replace(plan, memory=None))


def _compute_seal(text: str | bytes) -> str:
    """Compute the SHA-256 of a plan file's content, except for `memory`, `chosen` and the seal itself.

    Fields that a later version adds to plans don't change it.
    """
    content = parse_json(text.encode() if isinstance(text, str) else text)
    sealed = {x: y for x, y in content.items() if x != "memory"} | {"seal": "", "chosen": ""}
    return hashlib.sha256(msgspec.json.encode(sealed)).hexdigest()


def write_plan(plan: Plan, path: str | Path, *, numbered: bool = False) -> Path:
    """Write a plan to a JSON file atomically.

    Args:
        plan: as `make_plan` returns it.
        path: of a new file, or of another plan to replace.
        numbered: replace nothing; append the first free number to the name instead.

    Returns:
        The path that was written.

    Raises:
        InputError: `plan` isn't a `Plan`.
        OutputError: the file can't be written, or exists and isn't a plan.

    Examples:
        >>> module = torch.nn.Linear(4, 4)
        >>> program = {"denoiser": module}
        >>> plan = stopdown.make_plan(program, lambda: module(torch.ones(1, 4)))
        >>> stopdown.write_plan(plan, "plan.json").name
        'plan.json'
        >>> stopdown.write_plan(plan, "plan.json", numbered=True).name
        'plan-2.json'
    """
    if not isinstance(plan, Plan):
        raise InputError(
            f"write_plan was given a {type(plan).__name__} and no plan.",
            remedy="Make one: stopdown.make_plan(pipe).",
        )
    check_type(
        "write_plan(path)",
        path,
        (str, Path),
        "It is the path of a file.",
        'Use write_plan(plan, "plan.json").',
    )
    text = _to_text(plan)
    if numbered:
        return write_numbered(path, lambda part: part.write_text(text, encoding="utf-8"))
    with written_beside(path, replaces=describe_no_plan) as part:
        part.write_text(text, encoding="utf-8")
    return Path(path)


describe_no_plan = functools.partial(describe_other, "plan")
"""Describe what a file contains if a plan must not replace it; return "" for a plan."""


def carry_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan as a dict to be put into another JSON file, such as a model's `config.json`.

    Other libraries write that file again with keys in another order. So its checksum, `seal`, doesn't
    depend on the order.
    """
    plain = dataclasses.replace(plan, seal="", memory=None)
    content: dict[str, Any] = parse_json(to_json(plain).encode())
    return {**content, "seal": _compute_carried_seal(content)}


def read_carried_plan(content: Mapping[str, Any]) -> Plan:
    place, remedy = "The plan in config.json", "Download or convert the model again."
    try:
        plan = convert_record(dict(content), Plan)
    except InputError as error:
        raise PlanError(f"{place} is none. {error.what}", remedy=remedy) from error
    if plan.kind != "plan" or plan.seal != _compute_carried_seal(content):
        raise PlanError(
            f"{place} was edited: its content doesn't fit its seal {plan.seal[:12]!r}.",
            expected="A plan can't be edited, because each exponent depends on all others.",
            remedy=remedy,
        )
    if faults := list(list_plan_faults(plan)):
        raise PlanError(
            f"{place} has values that no plan has: {'; '.join(faults[:MOST_NAMED])}.",
            remedy=remedy,
        )
    return plan


def _compute_carried_seal(content: Mapping[str, Any]) -> str:
    sorted_ = msgspec.json.encode({**content, "seal": "", "chosen": ""}, order="deterministic")
    return hashlib.sha256(sorted_).hexdigest()


def take_plan(given: Plan | str | Path) -> Plan:
    return given if isinstance(given, Plan) else read_plan(given)


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a JSON file.

    Args:
        path: of a file that `write_plan` or `stopdown plan` wrote.

    Raises:
        PlanError: the file can't be read, isn't a plan, or was edited.

    Examples:
        >>> module = torch.nn.Linear(4, 4)
        >>> program = {"denoiser": module}
        >>> plan = stopdown.make_plan(program, lambda: module(torch.ones(1, 4)))
        >>> path = stopdown.write_plan(plan, "plan.json")
        >>> stopdown.read_plan(path) == plan
        True
    """
    check_type(
        "A plan",
        path,
        (str, Path),
        "It is a Plan, or the path of its file.",
        "Make one, stopdown.make_plan(pipe), or name its file.",
    )
    try:
        text = read_small_file(Path(path))
    except UnreadableError as error:
        raise PlanError(
            f"The plan {path} can't be read: {error}.",
            remedy=f"Make it: stopdown plan SOURCE -o {path}",
        ) from error
    try:
        plan = from_json(text, Plan)
    except InputError as error:
        raise PlanError(
            f"{path} isn't a plan. {error.what}",
            expected="A plan is a JSON file that stopdown plan wrote.",
            remedy="Name such a file, or make one: stopdown plan SOURCE -o plan.json",
        ) from error
    if plan.kind != "plan" or plan.seal != _compute_seal(text):
        raise PlanError(
            f"The plan {path} was edited: its content doesn't fit its seal {plan.seal[:12]!r}.",
            expected="A plan can't be edited, because each exponent depends on all others.",
            remedy=f"Make it again: stopdown plan {plan.source} -o {path}",
        )
    faults = list(list_plan_faults(plan))
    if faults:
        more = f" and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
        raise PlanError(
            f"The plan {path} has values that no plan has: {'; '.join(faults[:MOST_NAMED])}{more}.",
            expected="Its seal fits, so it wasn't Stopdown that wrote these values.",
            remedy=f"Make it again: stopdown plan SOURCE -o {path}",
        )
    return plan


def find_cached_path(fingerprint: str) -> Path:
    """Return the path at which a checkpoint's plan is cached for the installed versions."""
    names = [f"{name}{version}" for name, version in read_class_versions().items()]
    own = f"stopdown{_read_version('stopdown')}"
    return cache_folder() / "plans" / f"{fingerprint[:32]}-{'-'.join([own, *names])}.json"


def write_cached_plan(plan: Plan) -> Path:
    """Cache a plan for the next run of its checkpoint, and return its path.

    Raises:
        OutputError: it can't be written.
    """
    path = find_cached_path(plan.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_refusal(path.parent, error, "in STOPDOWN_CACHE") from error
    if path.is_file() and read_kind(path) is None:  # damaged: it would be in the way of every run
        discard(path)
    write_plan(plan, path)
    return path


def keep_plan(plan: Plan) -> None:
    """Cache a plan for the next run of its checkpoint, or warn that it can't be cached."""
    try:
        write_cached_plan(plan)
    except OutputError as error:
        warn_user(f"The plan wasn't kept for the next run. {error.what}")


def read_cached_plan(fingerprint: str) -> Plan | None:
    """Read the cached plan of a checkpoint; return None if there is no valid one.

    A plan with a field that this version no longer has isn't valid: written again, its seal wouldn't fit.
    """
    try:
        plan = read_plan(find_cached_path(fingerprint))
    except PlanError:
        return None
    return plan if seal_plan(plan).seal == plan.seal else None


LARGEST_EXPONENT = 252
"""Largest magnitude of an exponent in a plan; it covers fp32's normal range, from 2^-126 to 2^127."""

MOST_OUTPUTS = 10**4
"""Limit for the index of an output: no component returns so many."""

_COMPONENT = re.compile(
    r"(?!__)[\w -]{1,100}(\.(?!__)[\w -]{1,100}){0,15}", re.ASCII
)  # a path in a program
_PATH = re.compile(r"[^\x00-\x1f\x7f./\\\[\]]{1,200}(\.[^\x00-\x1f\x7f./\\\[\]]{1,200}){0,63}")
_FOLD = re.compile(r"(?P<name>[^\[]+)(\[(:,)?(?P<start>\d{1,9}):(?P<stop>\d{1,9})\])?", re.ASCII)


def list_plan_faults(plan: Plan) -> Iterator[str]:
    """Yield a clause for each value of a plan that no plan made by Stopdown has, as a damaged file may."""
    if plan.precision not in FORMATS:
        yield f"the precision {plan.precision[:40]!r}"
    if not plan.elapsed_s >= 0:
        yield f"a time of {plan.elapsed_s:g} s"
    names = [entry.component for entry in plan.components]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"the component {name[:40]!r} twice"
    for entry in plan.components:
        for fault in _list_entry(entry):
            yield f"{entry.component[:40]!r} with {fault}"


def _list_entry(entry: ComponentPlan) -> Iterator[str]:
    if not _COMPONENT.fullmatch(entry.component):
        yield "a name that is no component's"
    if entry.precision not in (*FORMATS, "as loaded"):
        yield f"the precision {entry.precision[:40]!r}"
    scaling = entry.scaling or Scaling()
    yield from _list_exponents(scaling)
    yield from _list_names(scaling)
    if not 0 <= scaling.fp32_flops <= 1:
        yield f"{scaling.fp32_flops:g} of its work in fp32"
    if scaling.headroom_bits is not None and not abs(scaling.headroom_bits) <= 512:
        yield f"{scaling.headroom_bits:g} bits of headroom"
    counts = (scaling.values, scaling.bounded, entry.calls)
    if min(counts) < 0 or max(counts) > 2**53 or scaling.bounded > scaling.values:
        yield f"the counts {', '.join(str(count)[:20] for count in counts)}"
    yield from _list_limits(scaling)


def _list_limits(scaling: Scaling) -> Iterator[str]:
    for name, limit in scaling.limits.items():
        if not (math.isfinite(limit) and limit >= 0):
            yield f"the limit {limit} of {name[:40]!r}"
    for name, sizes in scaling.sizes.items():
        if not all(0 <= x <= 2**53 for size in sizes for x in size):
            yield f"a size of {name[:40]!r} that no tensor has"


def _list_exponents(scaling: Scaling) -> Iterator[str]:
    outputs = {str(number): exponent for number, exponent in scaling.outputs.items()}
    inputs = {path: ends[0] for path, ends in scaling.layers.items()}
    results = {path: ends[1] for path, ends in scaling.layers.items()}
    for table in (scaling.exponents, scaling.eps, scaling.multiplies, outputs, inputs, results):
        for name, exponent in table.items():
            if abs(exponent) > LARGEST_EXPONENT:
                yield f"the exponent {str(exponent)[:20]} of {name[:40]!r}"
    for number in scaling.outputs:
        if not 0 <= number < MOST_OUTPUTS:
            yield f"the output {str(number)[:20]}"


def _list_names(scaling: Scaling) -> Iterator[str]:
    """Yield a clause for each name in a scaling that can't be the path of a parameter, an eps or a module.

    The path "" is that of the component itself.
    """
    for name in scaling.exponents:
        if not _is_parameter(name):
            yield f"the parameter {name[:40]!r}"
    attributes = (*scaling.eps, *scaling.operands.fp32_parameters)
    for name in (*attributes, *(scaling.kept_buffers or ())):
        if not _PATH.fullmatch(name):
            yield f"the attribute {name[:40]!r}"
    for name in scaling.layers:
        if not _is_parameter(name):
            yield f"the layer {name[:40]!r}"
    modules = (*scaling.multiplies, *scaling.fp32_modules, *scaling.operands.cast_inputs)
    for name in (*modules, *_list_stream(scaling.stream)):
        if name and not _PATH.fullmatch(name):
            yield f"the module {name[:40]!r}"


def _is_parameter(name: str) -> bool:
    """Return whether a name is a parameter's path, also with a range: `path[0:64]` or `path[:,0:64]`."""
    fold = _FOLD.fullmatch(name)
    if fold is None or not _PATH.fullmatch(fold["name"]):
        return False
    return fold["start"] is None or int(fold["start"]) < int(fold["stop"])


def _list_stream(stream: ResidualStream | None) -> Iterator[str]:
    for field in dataclasses.fields(ResidualStream) if stream is not None else ():
        if field.name != "returns":
            yield from getattr(stream, field.name)

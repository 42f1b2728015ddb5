"""Observations as findings: one for each cause, with what was seen, what it leads to, what to type."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from stopdown.call_names import name_module_path, split_module_path
from stopdown.dtype_rules.observations import Observation
from stopdown.records import Finding
from stopdown.toml_files import read_rules

SEVERITIES = ("error", "wrong", "slow", "note")
"""From the worst on."""


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How findings of a kind are worded.

    Attributes:
        severity: see `Finding`.
        why: what it leads to.
        remedy: what to type; `{component}`, `{path}`, `{argument}`, `{dtype}` are filled in.
        is_fault: False where it says what a model is, and not that anything is wrong with it.
    """

    severity: Literal["error", "wrong", "slow", "note"]
    why: str
    remedy: str
    is_fault: bool = True


@functools.cache
def read_kinds() -> dict[str, Kind]:
    """The wording of each kind of finding: `knowledge/rules/findings.toml`."""
    return msgspec.convert(read_rules("findings"), dict[str, Kind])


def is_fault(kind: str) -> bool:
    """Whether findings of a kind say that something is wrong."""
    return kind not in read_kinds() or read_kinds()[kind].is_fault


def make_finding(kind: str, module_path: str, evidence: str, **facts: str) -> Finding:
    """A finding of a kind, with its why and remedy filled in."""
    words = read_kinds()[kind]
    name = split_module_path(module_path)[0]
    owner, _, method = name.rpartition(".")  # a component of another program may have a dot, too
    component = owner if method in ("encode", "decode") else name
    values = _Blanks({"component": component, **facts})
    return Finding(
        kind,
        module_path,
        evidence,
        words.remedy.format_map(values),
        words.why.format_map(values),
        words.severity,
    )


def word_for_program(finding: Finding) -> Finding:
    """A finding about a program that is no pipeline: what to type there."""
    remedy = finding.remedy
    for pattern, words in _PROGRAM_WORDS:
        remedy = re.sub(pattern, words, remedy)
    return dataclasses.replace(finding, remedy=remedy)


_PROGRAM_WORDS = (
    (r" Where only an input was missing, .*", ""),
    (r"stopdown generate SOURCE, or ", ""),
    (r"stopdown plan SOURCE( -o plan.json, then --precision plan.json)?", "stopdown.make_plan"),
    (r"stopdown\.(mend|guard)\(pipe\)", r"stopdown.\1"),
    (r"--precision ([\w.]+)=(\w+)", r"\1 in \2"),
    (r"--precision (\w+)", r"\1"),
    (r"pipe\.([\w.]+)\.dtype", r"next(\1.parameters()).dtype"),
    (r"pipe\.", ""),
)


class _Blanks(dict[str, str]):
    """Facts by name; a missing one stays as it was written."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Findings, worst first; equal ones once."""
    unique = {(f.kind, f.module_path): f for f in reversed(list(findings))}
    ordered = reversed(list(unique.values()))
    return sorted(ordered, key=lambda finding: SEVERITIES.index(finding.severity))


def word_observations(observations: Iterable[Observation]) -> list[Finding]:
    """One finding for each cause among observations."""
    groups: dict[tuple[str, ...], list[Observation]] = {}
    for observation in observations:
        groups.setdefault(_find_cause(observation), []).append(observation)
    return [_word(group) for group in groups.values()]


def _find_cause(seen: Observation) -> tuple[str, ...]:
    component, facts = seen.component, seen.facts
    if seen.kind == "boundary":
        return seen.kind, component, facts.get("argument", "")
    if seen.kind == "mixed-parameters":
        owner = facts.get("parameter", "").rpartition(".")[0]
        return seen.kind, component, generalise(owner)
    if seen.kind in ("fp32-module-not-cast-back", "clamp-may-bite", "not-implemented"):
        return seen.kind, component, seen.operation, facts.get("dtype", "")
    return seen.kind, component, seen.operation, generalise(seen.path)


def generalise(path: str) -> str:
    """A path with its numbers left out: blocks of one kind are one."""
    return re.sub(r"\d+", "*", path)


def _word(group: list[Observation]) -> Finding:
    first = group[0]
    places = list(dict.fromkeys(seen.module_path for seen in group))
    more = f" So do {len(places) - 1} more places." if len(places) > 1 else ""
    module_path = _choose_module_path(first)
    evidence = _EVIDENCE[first.kind](first) + more
    facts = {"path": first.path, **first.facts, "dtype": first.facts.get("main", "")}
    facts["component"] = first.component
    return make_finding(first.kind, module_path, evidence, **facts)


def _choose_module_path(seen: Observation) -> str:
    if seen.kind == "mixed-parameters":
        owner = seen.facts.get("parameter", "").rpartition(".")[0]
        return name_module_path(seen.component, owner)
    return seen.module_path


def _describe_boundary(seen: Observation) -> str:
    facts = seen.facts
    came = f" (it comes from {facts['before']})" if facts.get("before") else ""
    return (
        f"The argument {facts['argument']} of {seen.call} is {facts['odd_dtype']}{came}; "
        f"{facts['reason']}"
    )


def _describe_operands(seen: Observation) -> str:
    facts = seen.facts
    return f"{facts['reason']} {facts['odd']} got {facts['odd_dtype']} from {facts['origin']}."


def _describe_parameter(seen: Observation) -> str:
    facts = seen.facts
    return f"The parameter {facts['parameter']} brings in {facts['odd_dtype']}; {facts['reason']}"


def _describe_format(seen: Observation) -> str:
    source = f" ({seen.facts['source']})" if seen.facts.get("source") else ""
    return f"{seen.facts['reason']}{source}"


def _describe_positions(seen: Observation) -> str:
    facts = seen.facts
    return (
        f"{facts['distinct']} different positions up to {facts['largest']} are cast to "
        f"{facts['dtype']}, where {facts['left']} are left."
    )


def _describe_mask(seen: Observation) -> str:
    facts = seen.facts
    return f"The mask {facts['shape']} hides every key from every query in {facts['items']} of its items."


def _describe_clamp(seen: Observation) -> str:
    return f"{seen.component} has a {seen.operation} at the end of fp16, and no plan keeps it away."


def _describe_autocast(seen: Observation) -> str:
    facts = seen.facts
    return (
        f"{facts['operand']} of {seen.operation} is fp32 by {facts['wide']}; autocast is on for "
        f"{facts['device']}."
    )


_EVIDENCE: dict[str, Callable[[Observation], str]] = {
    "boundary": _describe_boundary,
    "mixed-operands": _describe_operands,
    "widens-itself": _describe_operands,
    "fp32-module-not-cast-back": _describe_operands,
    "mixed-parameters": _describe_parameter,
    "not-implemented": _describe_format,
    "positions-collapse": _describe_positions,
    "mask-empty-row": _describe_mask,
    "clamp-may-bite": _describe_clamp,
    "autocast-overrides": _describe_autocast,
}

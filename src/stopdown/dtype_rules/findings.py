"""Conversion of observations into findings: one for each cause, with evidence, consequence and remedy."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from stopdown.component_call_names import name_module_path, split_module_path
from stopdown.dtype_rules.observations import Observation
from stopdown.files.toml_files import read_rules
from stopdown.records import Finding

SEVERITIES = ("error", "wrong", "slow", "note")
"""Severities of findings, worst first."""


class FindingKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts of a kind of finding.

    Attributes:
        severity: see `Finding`.
        why: consequence of the fault.
        remedy: what to type; `{component}`, `{path}`, `{argument}`, `{dtype}` are filled in.
        evidence: template for the facts of an observation; "" if code writes the text.
        is_fault: False if findings of this kind describe a property of a model and no fault.
    """

    severity: Literal["error", "wrong", "slow", "note"]
    why: str
    remedy: str
    evidence: str = ""
    is_fault: bool = True


@functools.cache
def read_kinds() -> dict[str, FindingKind]:
    """Read the wording of each kind of finding from `knowledge/rules/findings.toml`."""
    return msgspec.convert(read_rules("findings"), dict[str, FindingKind])


def is_fault(kind: str) -> bool:
    """Return whether findings of a kind report a fault."""
    return kind not in read_kinds() or read_kinds()[kind].is_fault


def make_finding(kind: str, module_path: str, evidence: str, **facts: str) -> Finding:
    """Make a finding of a kind, with its explanation and remedy filled in.

    Args:
        facts: further values for the placeholders.
    """
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
    """Reword a finding's remedy for a program that is not a pipeline, for which no command applies."""
    remedy = finding.remedy
    for pattern, words in _PROGRAM_WORDS:
        remedy = re.sub(pattern, words, remedy)
    return dataclasses.replace(finding, remedy=remedy)


_PROGRAM_WORDS = (
    (r" If only an input was missing, .*", ""),
    (r"stopdown generate SOURCE, or ", ""),
    (r"stopdown plan SOURCE", "stopdown.make_plan"),
    (
        r"Let Stopdown load the model in fp16, which scales (.*): stopdown generate SOURCE PROMPT "
        r"--precision fp16",
        r"Scale \1: stopdown.fp16",
    ),
    (r"stopdown\.(mend|guard)\(pipe\)", r"stopdown.\1"),
    (r"--precision ([\w.]+)=(\w+)", r"\1 in \2"),
    (r"--precision (\w+)", r"\1"),
    (r"pipe\.([\w.]+)\.dtype", r"next(\1.parameters()).dtype"),
    (r"pipe\.", ""),
)


class _Blanks(dict[str, str]):
    """Values for a format string; placeholders without a value are left unchanged."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings, worst first, and drop repeated ones."""
    unique = {(f.kind, f.module_path, f.evidence): f for f in reversed(list(findings))}
    ordered = reversed(list(unique.values()))
    return sorted(ordered, key=lambda finding: SEVERITIES.index(finding.severity))


def word_observations(observations: Iterable[Observation]) -> list[Finding]:
    """Group observations by cause, and make one finding for each."""
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
    """Replace the numbers in a module path by `*`, so that repeated blocks share one path."""
    return re.sub(r"\d+", "*", path)


def _word(group: list[Observation]) -> Finding:
    first = group[0]
    places = list(dict.fromkeys(seen.module_path for seen in group))
    more = f" So do {len(places) - 1} more places." if len(places) > 1 else ""
    module_path = _choose_module_path(first)
    own = {"call": first.call, "component": first.component, "operation": first.operation}
    evidence = read_kinds()[first.kind].evidence.format_map({**own, **first.facts})
    facts = {"path": first.path, **first.facts, "dtype": first.facts.get("main", "")}
    facts["component"] = first.component
    return make_finding(first.kind, module_path, evidence + more, **facts)


def _choose_module_path(seen: Observation) -> str:
    if seen.kind == "mixed-parameters":
        owner = seen.facts.get("parameter", "").rpartition(".")[0]
        return name_module_path(seen.component, owner)
    return seen.module_path

"""Findings as records."""

from __future__ import annotations

import dataclasses

import pytest

from stopdown.errors import InputError
from stopdown.records import (
    CheckRecord,
    Diagnosis,
    FileCheck,
    Finding,
    MachineHealth,
    from_json,
    to_json,
)

FOUND = Finding("black-frames", "output", "All 9 frames.", "Use fp32.")
CHECK = CheckRecord("shapes", "cpu", {"vae": "fp16"}, (FOUND,), (), 1.0)


def test_a_finding_is_wrong_unless_it_says_otherwise() -> None:
    """What a detector finds counts as wrong values until it states another severity."""
    assert FOUND.severity == "wrong"
    assert FOUND.severity != Finding("a", "b", "c", "d", severity="note").severity


@pytest.mark.parametrize("kind", [Diagnosis, FileCheck, MachineHealth])
def test_records_of_other_findings_are_told_apart(kind: type) -> None:
    """Each kind of record says which it is, and none is read as another."""
    kinds = {x.name: x.default for x in dataclasses.fields(kind)}
    assert kinds["kind"] not in (CHECK.kind, dataclasses.MISSING)
    assert from_json(to_json(CHECK), CheckRecord) == CHECK
    with pytest.raises(InputError, match=f"The {kind.__name__} has kind 'check'"):
        from_json(to_json(CHECK), kind)

"""stopdown plan: which files it replaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_a_plan_replaces_only_a_plan(run: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's JSON stays, --force replaces another plan, and without -o there is a number."""
    from stopdown.plans import certified
    from stopdown.plans.plan_files import read_plan, seal_plan
    from stopdown.records import Plan

    made = seal_plan(Plan("shapes", "", "Tiny", "fp16", {}, (), "cpu", 0.0))
    monkeypatch.setattr(certified, "certify_plan", lambda *given, **named: made)
    (here / "data.json").write_text("{}")
    code, _, err = run("plan", "shapes", "-o", "data.json")
    assert code == 2
    assert (
        "The output data.json would replace a file that Stopdown didn't write as a record." in err
    )
    for arguments, name in (((), "plan"), ((), "plan-2"), (("-o", "plan.json", "--force"), "plan")):
        code, out, err = run("plan", "shapes", *arguments)
        assert (code, err) == (0, "")
        assert out.endswith(f"Wrote {name}.json (0.0 s, from the weights alone)\n")
        assert read_plan(here / f"{name}.json") == made
    assert sorted(path.name for path in here.iterdir()) == ["data.json", "plan-2.json", "plan.json"]

"""Workflows run what the Makefile runs, on files that exist, and publish nothing by themselves."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*-*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(name: str) -> Any:
    """Read a workflow; YAML takes its key `on` for a truth value."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def list_steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def test_the_quick_suite_is_that_of_the_makefile() -> None:
    """The three systems run the same tests as `make test`."""
    target = (ROOT / "Makefile").read_text().split("\ntest:")[1].split("\n\n")[0]
    marks = re.search(r'-m "([^"]+)"', target)
    steps = [step["run"] for step in read("tests")["jobs"]["quick"]["steps"] if "run" in step]
    assert marks
    assert f'-m "{marks[1]}"' in steps[-1]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda x: x.stem)
def test_steps_name_files_and_extras_that_exist(path: Path) -> None:
    """Each path of the repository and each extra that a step types exists."""
    text = "\n".join(step.get("run", "") for step in list_steps(path))
    for name in re.findall(r"(?<![\w/])(?:tests|benchmarks|\.ci)/[\w/.]+", text):
        assert (ROOT / name).exists(), name
    for extras in re.findall(r'\.\[([\w,]+)\]"', text):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_pythons_begin_with_the_oldest_that_is_allowed() -> None:
    """The oldest Python and PyTorch of the matrix are those of the package's own requirements."""
    matrix = read("tests")["jobs"]["quick"]["strategy"]["matrix"]
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    oldest = next(x for x in PROJECT["dependencies"] if x.startswith("torch>="))
    assert matrix["include"][0]["torch"] == f"{oldest.removeprefix('torch>=')}.*"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda x: x.stem)
def test_a_checkout_keeps_no_password(path: Path) -> None:
    """The token of a run isn't left in the clone, where any later step could read it."""
    clones = [x for x in list_steps(path) if x.get("uses", "").startswith("actions/checkout@")]
    assert clones
    assert all(x["with"]["persist-credentials"] is False for x in clones)


def test_nothing_is_published_without_a_person() -> None:
    """Publishing takes a start by hand with its box ticked, from a tag, and the least rights."""
    workflow = read("release")
    job, inputs = workflow["jobs"]["publish"], workflow[True]["workflow_dispatch"]["inputs"]
    assert job["if"].startswith("inputs.publish && startsWith(github.ref, 'refs/tags/v')")
    assert inputs["publish"]["default"] is False
    assert job["permissions"] == {"id-token": "write"}
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", FORMS, ids=lambda x: x.stem)
def test_forms_ask_for_the_output_of_commands_that_exist(path: Path) -> None:
    """An issue form names commands that the command line has, and each field once."""
    from stopdown.app import commands

    form = yaml.safe_load(path.read_text())
    known = {x.name or x.callback.__name__ for x in commands.app.registered_commands}
    named = set(re.findall(r"`stopdown (\w+)", path.read_text()))
    assert named
    assert named <= known
    ids = [x["id"] for x in form["body"]]
    assert len(set(ids)) == len(ids)

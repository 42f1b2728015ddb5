"""Plans whose values nobody wrote, sealed anew: refused by name before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hostile.runner import Attack, copy_tiny, run_attack
from stopdown.errors import PlanError
from stopdown.plans.plan_files import _compute_seal, read_class_versions, read_plan, seal_plan
from stopdown.records import ComponentPlan, Plan, Scaling, to_json

Edit = Callable[[dict[str, Any]], object]


def put(name: str, value: Any) -> Edit:
    """Another value for a field of the transformer's entry, or of its scaling."""

    def edit(plan: dict[str, Any]) -> None:
        (entry,) = plan["components"]
        place = entry["scaling"] if name in entry["scaling"] else entry
        assert name in place
        place[name] = value

    return edit


def put_outside(name: str, value: Any) -> Edit:
    """Another value for a field of the plan itself."""
    return lambda plan: plan.update({name: value})


def twice(plan: dict[str, Any]) -> None:
    plan["components"].append(plan["components"][0])


STREAM: Mapping[str, Any] = {"cast_output_up": ["a"], "cast_input_down": ["b"]}
TRANSFORMER = "'transformer' with "

EDITS: Mapping[str, tuple[Edit, str]] = {
    "exponent 1e18": (
        put("exponents", {"proj_out.weight": 10**18}),
        TRANSFORMER + "the exponent 1000000000000000000 of 'proj_out.weight'",
    ),
    "exponent -253": (put("exponents", {"a.weight": -253}), TRANSFORMER + "the exponent -253 of"),
    "eps 1000": (put("eps", {"norm.eps": 1000}), TRANSFORMER + "the exponent 1000 of 'norm.eps'"),
    "multiply 1000": (put("multiplies", {"a": 1000}), TRANSFORMER + "the exponent 1000 of 'a'"),
    "output 1000": (put("outputs", {"0": 1000}), TRANSFORMER + "the exponent 1000 of '0'"),
    "output -1": (put("outputs", {"-1": 1}), TRANSFORMER + "the output -1"),
    "output 10000": (put("outputs", {"10000": 1}), TRANSFORMER + "the output 10000"),
    "precision": (put("precision", "fp12"), TRANSFORMER + "the precision 'fp12'"),
    "no precision": (put("precision", ""), TRANSFORMER + "the precision ''"),
    "wanted precision": (put_outside("precision", "int8"), "the precision 'int8'"),
    "absolute path": (
        put("fp32_modules", ["/etc/passwd"]),
        TRANSFORMER + "the module '/etc/passwd'",
    ),
    "path upwards": (put("fp32_modules", ["../vae"]), TRANSFORMER + "the module '../vae'"),
    "empty part": (put("multiplies", {"a..b": 1}), TRANSFORMER + "the module 'a..b'"),
    "control sequence": (put("fp32_modules", ["\x1b[2J"]), TRANSFORMER + "the module '\\x1b[2J'"),
    "line feed": (put("exponents", {"a\nb": 1}), TRANSFORMER + "the parameter 'a\\nb'"),
    "long path": (put("fp32_modules", ["a" * 201]), TRANSFORMER + "the module 'aaaa"),
    "deep path": (put("fp32_modules", [".".join("a" * 65)]), TRANSFORMER + "the module 'a.a.a"),
    "no rows": (put("exponents", {"a[5:5]": 1}), TRANSFORMER + "the parameter 'a[5:5]'"),
    "rows by name": (put("exponents", {"a[x:y]": 1}), TRANSFORMER + "the parameter 'a[x:y]'"),
    "open rows": (put("exponents", {"a[5:]": 1}), TRANSFORMER + "the parameter 'a[5:]'"),
    "no parameter": (put("exponents", {"": 1}), TRANSFORMER + "the parameter ''"),
    "no attribute": (put("eps", {"": 1}), TRANSFORMER + "the attribute ''"),
    "buffer": (put("kept_buffers", ["a/b"]), TRANSFORMER + "the attribute 'a/b'"),
    "stream": (
        put("stream", {**STREAM, "cast_input_up": ["a/../b"]}),
        TRANSFORMER + "the module 'a/../b'",
    ),
    "share": (put("fp32_flops", 1.5), TRANSFORMER + "1.5 of its work in fp32"),
    "headroom": (put("headroom_bits", -1e300), TRANSFORMER + "-1e+300 bits of headroom"),
    "counts": (put("bounded", 3), TRANSFORMER + "the counts 0, 3, 0"),
    "negative count": (put("calls", -1), TRANSFORMER + "the counts 0, 0, -1"),
    "size": (
        put("sizes", {"forward.x": [[-1]]}),
        TRANSFORMER + "a size of 'forward.x' that no tensor has",
    ),
    "limit": (put("limits", {"forward.x": -1.0}), TRANSFORMER + "the limit -1.0 of 'forward.x'"),
    "component": (put("component", "__class__.a"), "'__class__.a' with a name that is no"),
    "twice": (twice, "the component 'transformer' twice"),
    "time": (put_outside("elapsed_s", -1.0), "a time of -1 s"),
}
"""What is changed in a plan, and what is said of it."""

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate", "MODEL", "a", "--precision", "PLAN", "--steps", "1", "-o", "OUT.mp4"),
    "convert": ("convert", "MODEL", "OUT", "--plan", "PLAN"),
    "check": ("check", "MODEL", "--precision", "PLAN"),
}


def write_edited(path: Path, edit: Edit) -> None:
    """A plan with an edit, under a seal that fits."""
    entry = ComponentPlan(
        "transformer", "CogVideoXTransformer3DModel", "0" * 64, "fp16", scaling=Scaling()
    )
    plan = Plan(
        "model", "", "CogVideoXPipeline", "fp16", read_class_versions(), (entry,), "cpu", 0.0
    )
    content = json.loads(to_json(seal_plan(plan)))
    edit(content)
    content["seal"] = _compute_seal(json.dumps(content))
    path.write_text(json.dumps(content))


def make_row(name: str, command: str) -> Attack:
    """A row that gives an edited plan to a command, and wants exit code 2 and nothing left."""
    edit, said = EDITS[name]

    def build(folder: Path) -> list[str]:
        copy_tiny(folder)
        write_edited(folder / "plan.json", edit)
        places = {"MODEL": "model", "OUT": "out", "OUT.mp4": "out.mp4", "PLAN": "plan.json"}
        words = COMMANDS[command]
        return [str(folder / places[word]) if word in places else word for word in words]

    message = f"The plan {{folder}}/plan.json has values that no plan has: {said}"
    return Attack(f"{command}: {name}", build, 2, message)


@pytest.mark.parametrize("name", EDITS)
def test_a_value_that_no_plan_has_is_refused(name: str, tmp_path: Path) -> None:
    """Read in this process: the value is named, and a seal that fits does not help."""
    edit, said = EDITS[name]
    write_edited(tmp_path / "plan.json", edit)
    with pytest.raises(PlanError) as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.what.startswith(
        f"The plan {tmp_path}/plan.json has values that no plan has: {said}"
    )


def test_a_plan_that_nobody_edited_is_read(tmp_path: Path) -> None:
    """The same file with nothing changed."""
    write_edited(tmp_path / "plan.json", lambda plan: None)
    assert read_plan(tmp_path / "plan.json").components[0].component == "transformer"


# A few edits, each by one command in turn.
SAMPLE = [make_row(name, [*COMMANDS][number % 3]) for number, name in enumerate(EDITS)][::5]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_a_plan_with_values_that_none_has(row: Attack, tmp_path: Path) -> None:
    """One message that names the value, exit code 2, nothing written."""
    run_attack(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", EDITS)
def test_a_plan_with_values_that_none_has_by_any_command(
    name: str, command: str, tmp_path: Path
) -> None:
    """The whole product."""
    run_attack(make_row(name, command), tmp_path)

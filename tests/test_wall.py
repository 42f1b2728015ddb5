"""The wall between the core, which scales a torch module and proves it, and what runs models.

The core is `stopdown.scaling` and what that rests on: torch, NumPy, SciPy, safetensors and msgspec.
Programs of others, such as the ComfyUI nodes, import public names alone.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

import stopdown
import stopdown.embedding
import stopdown.scaling
from test_layers import PACKAGE, SOURCES, Sources, iterate_imports, parse

ROOT = Path(__file__).parents[1]
NODES = ROOT / "integrations" / "comfyui"

GROUND = (
    *(
        "adapter_exponents",
        "argument_types",
        "component_call_names",
        "errors",
        "fake_tensors",
        "files.toml_files",
        "fold_names",
    ),
    *("interception", "mapped_weights", "module_calls", "number_formats", "numerics", "operations"),
    *("out_of_memory", "public_names", "record_display", "scaling_records", "weight_checks"),
)
"""Modules below the core that the rest of the package shares: errors, names, formats, hooks, calls."""

LIBRARIES = ("torch", "numpy", "scipy", "safetensors", "msgspec", "stopdown_verify")
"""The checker is one of them: it imports nothing of the package."""

OPTIONAL = {"record_display": "rich"}
"""A console prints records better with it; without it they are printed in one line."""

BEHIND = {
    f"stopdown.scaling.folding.adapters.{x}": "an adapter that came after the plan, at the next call"
    for x in ("list_misfitting", "measure_growth")
}
"""Names of modules of `scaling` that modules above take past the list. It only shrinks."""


def is_core(name: str) -> bool:
    """Return whether a module is one of the core, or of the ground that it stands on."""
    return any(name == x or name.startswith(f"{x}.") for x in ("scaling", *GROUND))


def find_module(target: str, sources: Sources) -> str:
    """Return the module of the package that an import is of: without the name that it takes."""
    path = target.removeprefix("stopdown").removeprefix(".")
    return path if path in sources else path.rpartition(".")[0]


def list_leaving(sources: Sources) -> list[str]:
    """Return what modules of the core import of the package from above, and of libraries not its own."""
    found = []
    for name, tree in sources.items():
        if not is_core(name):
            continue
        for target in sorted(set(iterate_imports(tree))):
            root = target.split(".")[0]
            module = find_module(target, sources)
            if root == "stopdown" and not is_core(module):
                found.append(f"{name} imports {module}")
            if root not in (*sys.stdlib_module_names, *LIBRARIES, "stopdown", OPTIONAL.get(name)):
                found.append(f"{name} imports {root}")
    return found


def list_behind(sources: Sources) -> set[str]:
    """Return the names of the core that modules above take from its modules."""
    return {
        target
        for name, tree in sources.items()
        if not is_core(name)
        for target in iterate_imports(tree)
        if target.startswith("stopdown.scaling.") and target.count(".") > 2
    }


def list_private(texts: dict[str, str]) -> list[str]:
    """Return what sources import of `stopdown` that is not one of its public names."""
    public = {
        "stopdown": {*stopdown.__all__, "errors", "records"},
        "stopdown.scaling": set(stopdown.scaling.__all__),
        "stopdown.embedding": set(stopdown.embedding.__all__),
    }
    found = []
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                found += [f"{file}: {x}" for x in names if x.split(".")[0] == "stopdown" != x]
            elif (
                isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stopdown"
            ):
                known = public.get(node.module or "", set())
                if node.module in ("stopdown.errors", "stopdown.records"):
                    known = set(vars(importlib.import_module(node.module)))
                names = [alias.name for alias in node.names]
                found += [f"{file}: {node.module}.{x}" for x in names if x not in known]
    return found


def list_shared(trees: Iterable[ast.Module]) -> set[str]:
    """Return the public names of functions and classes that several modules define."""
    names = [
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    return {name for name, count in Counter(names).items() if count > 1}


def list_untested(modules: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Return the modules, by dotted names, for which no test file is named."""
    known = set(tests)
    return [x for x in modules if f"test_{x.rpartition('.')[2]}" not in known]


def test_nothing_below_the_wall_knows_what_is_above() -> None:
    """The core imports its libraries and itself: no Diffusers, Hub, command line or table of devices."""
    assert list_leaving(SOURCES) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import diffusers", "scaling.rescale imports diffusers"),
        ("def f():\n    import huggingface_hub", "scaling.rescale imports huggingface_hub"),
        ("from stopdown.app.flags import A", "scaling.rescale imports app.flags"),
        (
            "from stopdown.devices.environment import A",
            "scaling.rescale imports devices.environment",
        ),
    ],
)
def test_an_import_that_leaves_is_found(source: str, found: str) -> None:
    """Each kind of import from above is listed, inside of functions as well."""
    above = {name: SOURCES[name] for name in ("app.flags", "devices.environment")}
    assert list_leaving({**above, **parse(scaling__dot__rescale=source)}) == [found]


def test_fewer_names_are_taken_past_the_list() -> None:
    """Nobody above reaches behind the public names, but for those that are listed."""
    assert list_behind(SOURCES) == set(BEHIND)
    source = "from stopdown.scaling.exponents.solver import Prices"
    assert list_behind(parse(plans=source)) == {"stopdown.scaling.exponents.solver.Prices"}
    assert list_behind(parse(plans="from stopdown.scaling import rescale_")) == set()


def test_a_public_name_has_one_meaning() -> None:
    """No two modules define a function or class of one name."""
    checker = ast.parse((ROOT / "src" / "stopdown_verify.py").read_text(encoding="utf-8"))
    assert list_shared([*SOURCES.values(), checker]) == set()
    planted = parse(a="def find(): ...", b="class find: ...", c="def _find(): ...", d="find = 1")
    assert list_shared(planted.values()) == {"find"}


def test_each_module_has_a_test_file() -> None:
    """It has the module's name, in whichever folder of tests."""
    files = [x for x in SOURCES if (PACKAGE / f"{x.replace('.', '/')}.py").exists()]
    tests = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    assert list_untested((x for x in files if "__" not in x), tests) == []
    assert list_untested(["a.find", "keep"], ["test_find"]) == ["keep"]


def test_the_core_has_thirty_public_names() -> None:
    """Each is there, has a docstring, and is no submodule."""
    names = stopdown.scaling.__all__
    assert len(names) == 30
    verbs = [name for name in names if name.islower()]
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in names if f"::: stopdown.scaling.{name}\n" not in page] == [
        "cast_", "rescale_",
    ]  # fmt: skip
    assert names == sorted(verbs) + sorted(set(names) - set(verbs))
    for name in names:
        value = getattr(stopdown.scaling, name)
        assert not inspect.ismodule(value)
        assert inspect.getdoc(value), name
    with pytest.raises(AttributeError, match=r"module 'stopdown.scaling' has no attribute 'fold'"):
        _ = stopdown.scaling.fold


def test_names_for_programs_of_others_are_there() -> None:
    """Each name for programs that call models themselves can be loaded."""
    for name in stopdown.embedding.__all__:
        assert getattr(stopdown.embedding, name) is not None


def test_the_nodes_import_public_names_alone() -> None:
    """The ComfyUI nodes take nothing from a module that may move."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in NODES.rglob("*.py")}
    assert texts
    assert list_private(texts) == []


def test_a_private_import_is_found() -> None:
    """A private module and a name that no list has are found, and public ones are not."""
    good = "from stopdown import rescale_\nfrom stopdown.errors import InputError\nimport stopdown"
    bad = (
        "from stopdown.scaling import graph\nimport stopdown.app\n"
        "from stopdown.scaling.graph.nodes import x"
    )
    assert list_private({"good": good}) == []
    assert list_private({"bad": bad}) == [
        "bad: stopdown.scaling.graph", "bad: stopdown.app", "bad: stopdown.scaling.graph.nodes.x",
    ]  # fmt: skip

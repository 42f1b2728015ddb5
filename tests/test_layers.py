"""The levels of the package, read from its imports.

Each checker is a plain function over sources, so that planted violations show that it finds them.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "stopdown"

LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "record_display"),
    ("number_formats", "out_of_memory", "public_names"),
    ("files", "scaling_records"),
    ("argument_types", "component_call_names", "operations", "records"),
    ("devices",),
    ("interception",),
    (
        "adapter_exponents",
        "fold_names",
        "numerics",
    ),  # they name places of tensors, and leave autocast
    ("fake_tensors", "frames", "mapped_weights"),
    ("diagnosis", "weight_checks"),
    ("module_calls",),  # a call of a module as a value, and what is put around it
    ("scaling",),  # the core, with levels of its own
    ("component_calls",),
    ("sources",),
    ("pipelines",),
    ("memory",),  # dry runs of whole pipelines; plans and the guard ask it what fits
    ("plans",),
    ("checkpoints", "doctor", "dtype_rules"),  # they write, judge and foresee what plans make
    ("runtime",),  # a guard puts plans on with `plans`
    ("batch", "quantizers"),  # workers make runs with `runtime`; quantizers put its guard on
    (
        "bench",
        "comparison",
    ),  # its runs are opened by `plans` and looked at by the guard of `runtime`
    ("embedding", "report", "testing"),  # names of the whole package, loaded when they are used
    ("__init__",),  # the public names; the command line is their first user
    ("app",),
    ("__main__",),
)
"""Modules and subpackages from the ground up; a module imports only from rows above its own."""

SCALING_LEVELS: tuple[tuple[str, ...], ...] = (
    ("graph",),  # a call becomes a graph
    ("bounds", "exponents"),  # how large its values get; the equations between exponents
    ("folding",),  # exponents become weights
    # whether the exponents keep every bound in range; captured calls as rules of the checker
    ("certificate", "certificate_graphs"),
    ("trials",),  # candidates are searched, tried and compared
    ("watch",),  # later calls are held against those that the exponents are for
    ("rescale",),
    ("__init__",),
)
"""The same inside of `scaling`."""

LIGHT = (
    "argument_types",
    "errors",
    "number_formats",
    "records",
    "files",
    "devices",
    "frames",
    "diagnosis",
    "report",
    "app",
)
"""What is loaded before a model is: imports nothing heavy when it is imported itself."""

MOST_PARAMETERS = 8

HEAVY = ("torch", "diffusers", "transformers", "accelerate", "numpy", "scipy", "av", "PIL")

TENSORLESS = (
    "errors",
    "files.json_files",
    "records",
    "report",
    "runtime.repair_order",
    "batch.records",
    "comparison.records",
    "comparison.verdicts",
)
"""What never sees a tensor: no torch, not even inside a function."""

Sources = dict[str, ast.Module]


def read_sources(package: Path = PACKAGE) -> Sources:
    """Every module of the package by its dotted name below `stopdown`, parsed."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


SOURCES = read_sources()


def iterate_imports(tree: ast.AST) -> Iterator[str]:
    """Absolute dotted names of what a tree imports, also inside functions and by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif _is_import_call(node):
            yield str(node.args[0].value)


def _is_import_call(node: ast.AST) -> bool:
    """Whether this is `import_module` or `__import__` of a name written out."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return called in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant)


def iterate_imports_when_loaded(tree: ast.AST) -> Iterator[str]:
    """As `iterate_imports`, without what functions and type checkers import."""
    for node in ast.iter_child_nodes(tree):
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from iterate_imports(node)
        else:
            yield from iterate_imports_when_loaded(node)


def find_level(unit: str, levels: tuple[tuple[str, ...], ...] = LEVELS) -> int:
    """The row of a module in the table."""
    rows = [row for row, units in enumerate(levels) if unit in units]
    assert rows, f"{unit} is in no row of the table of levels"
    return rows[0]


def list_upward_imports(sources: Sources) -> list[str]:
    """Imports between modules of the package that do not point down."""
    found = []
    for name, tree in sources.items():
        unit = name.split(".")[0]
        for target in iterate_imports(tree):
            if target.startswith("."):
                found.append(f"{name} imports {target}: write absolute imports")
            root, _, rest = target.partition(".")
            other = (rest.split(".")[0] or "__init__") if root == "stopdown" else unit
            if other != unit and find_level(other) >= find_level(unit):
                found.append(f"{name} imports {other}")
    return found


def list_upward_imports_of_the_core(sources: Sources) -> list[str]:
    """Imports between modules of `scaling` that do not point down."""
    found = []
    for name, tree in sources.items():
        package, _, inner = name.partition(".")
        if package != "scaling":
            continue
        unit = inner.split(".")[0] or "__init__"
        for target in iterate_imports(tree):
            other = target.removeprefix("stopdown.scaling.").split(".")[0]
            if not target.startswith("stopdown.scaling.") or other == unit:
                continue
            if find_level(other, SCALING_LEVELS) >= find_level(unit, SCALING_LEVELS):
                found.append(f"{name} imports {other}")
    return found


def list_circles(sources: Sources) -> list[list[str]]:
    """Groups of modules that import each other in a circle, for types too."""
    imports: dict[str, list[str]] = {}
    for name, tree in sources.items():
        targets = {target.removeprefix("stopdown.") for target in iterate_imports(tree)}
        known = {t if t in sources else t.rpartition(".")[0] for t in targets}
        imports[name] = sorted(known & set(sources) - {name})
    sorter, found = graphlib.TopologicalSorter(imports), []
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        found.append(list(error.args[1]))
    return found


def list_imports_of(package: str, sources: Sources, allowed: tuple[str, ...] = ()) -> list[str]:
    """Modules outside `allowed` that import a package anywhere."""
    return [
        name
        for name, tree in sources.items()
        if name.split(".")[0] not in allowed
        and any(target.split(".")[0] == package for target in iterate_imports(tree))
    ]


def list_environment_readers(sources: Sources) -> list[str]:
    """Modules other than `devices.environment` that read or write environment variables."""
    words = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for name, tree in sources.items():
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used |= {target.split(".")[-1] for target in iterate_imports(tree)}
        if used & words and name != "devices.environment":
            found.append(name)
    return found


def list_hookers(sources: Sources) -> list[str]:
    """Modules but `interception.patches` that register a hook whose handle they do not hand to it."""
    found = []
    for name, tree in sources.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = [getattr(call.func, "attr", "") for call in calls]
        hooks = [word for word in names if word.startswith("register_") and word.endswith("hook")]
        if hooks and name != "interception.patches" and names.count("defer") < len(hooks):
            found.append(name)
    return found


def list_ends_of_fp16(sources: Sources) -> list[str]:
    """Modules other than `number_formats` that write where fp16 ends as a number of their own."""
    return [
        f"{name} writes {node.value} in line {node.lineno}"
        for name, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and type(node.value) in (int, float)
        and 60_000 <= node.value <= 65_504
        and name != "number_formats"
    ]


def list_name_parsers(sources: Sources) -> list[str]:
    """Modules other than `component_call_names` that take the name of a call or a module path to pieces."""
    found = []
    for name, tree in sources.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and node.attr in _CUTTERS):
                continue
            cut = node.value
            text = cut.attr if isinstance(cut, ast.Attribute) else getattr(cut, "id", "")
            if text in ("component", "module_path") and name != "component_call_names":
                found.append(f"{name} cuts a {text} in line {node.lineno}")
    return found


_CUTTERS = ("partition", "rpartition", "split", "rsplit", "endswith", "removesuffix")


def list_wide_functions(sources: Sources) -> list[str]:
    """Functions with more than `MOST_PARAMETERS`; `self`, `cls` and `**names` do not count."""
    found = []
    for name, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                given = node.args
                named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                named += [given.vararg] if given.vararg is not None else []
                count = len([x for x in named if x.arg not in ("self", "cls")])
                if count > MOST_PARAMETERS:
                    called = getattr(node, "name", "a lambda")
                    found.append(f"{name}.{called} has {count} parameters")
    return found


def list_heavy_loads(sources: Sources) -> list[str]:
    """Light modules that load something heavy when they are imported."""
    return [
        f"{name} loads {target}"
        for name, tree in sources.items()
        if name.split(".")[0] in LIGHT
        for target in iterate_imports_when_loaded(tree)
        if target.split(".")[0] in HEAVY
    ]


def list_imports_between_commands(sources: Sources) -> list[str]:
    """Each command that imports another one; `commands` alone knows all of them."""
    return sorted(
        f"{name} imports {found}"
        for name, tree in sources.items()
        if name.startswith("app.") and name != "app.commands"
        for found in set(iterate_imports(tree))
        if re.search(r"stopdown\.app\.\w+_command\b", found)
    )


def list_diffusers_imports(sources: Sources) -> list[str]:
    """Modules elsewhere than where models are found, opened and called, and given our classes."""
    known = ("component_calls", "pipelines", "quantizers", "sources")
    return list_imports_of("diffusers", sources, known)


def list_missing_modules(sources: Sources) -> list[str]:
    """Imports of modules of the package that are not there, also inside functions."""
    folders = {name.rpartition(".")[0] for name in sources}
    known = {"stopdown", *(f"stopdown.{name}" for name in (*sources, *folders))}
    return [
        f"{name} imports {target}"
        for name, tree in sources.items()
        for target in iterate_imports(tree)
        if target.split(".")[0] == "stopdown" and name not in ("__init__", "__main__")
        if not {target, target.rpartition(".")[0]} & (known - {"stopdown"}) and target != "stopdown"
    ]


def list_stray_texts(sources: Sources) -> list[str]:
    """Strings that stand by themselves inside of a function and are no docstring: they do nothing.

    Two strings in a row are one only inside of brackets; else the second is a statement of its own.
    """
    return [
        f"{name} has a text in line {node.lineno}"
        for name, tree in sources.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in function.body[1:]
        for node in ast.walk(statement)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    ]


def parse(**sources: str) -> Sources:
    return {name.replace("__dot__", "."): ast.parse(text) for name, text in sources.items()}


# The package as it is


Checker = Callable[[Sources], list[Any]]
CHECKERS: tuple[Checker, ...] = (
    *(list_upward_imports, list_upward_imports_of_the_core, list_imports_between_commands),
    *(list_circles, list_diffusers_imports),
    *(list_environment_readers, list_hookers, list_ends_of_fp16, list_wide_functions),
    *(list_name_parsers, list_heavy_loads, list_missing_modules, list_stray_texts),
)


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_package_keeps_its_rules(checker: Checker) -> None:
    """What each checker's first line names is nowhere in the package."""
    assert checker(SOURCES) == []


def test_every_module_has_a_level() -> None:
    """A new module or subpackage must be given its row."""
    assert {name.split(".")[0] for name in SOURCES} <= {unit for row in LEVELS for unit in row}


@pytest.mark.parametrize("name", TENSORLESS)
def test_records_never_see_a_tensor(name: str) -> None:
    """A record or report is made, and a decision is tested, without torch."""
    chosen = {key: tree for key, tree in SOURCES.items() if key == name or key.startswith(name)}
    assert list_imports_of("torch", chosen) == []


def test_light_dependencies_are_known() -> None:
    """Modules of the first two rows import the standard library, and one serialiser."""
    known = {*sys.stdlib_module_names, "stopdown", "msgspec"}
    for name in (*LEVELS[0], *LEVELS[1]):
        if name in SOURCES:
            roots = {t.split(".")[0] for t in iterate_imports_when_loaded(SOURCES[name])}
            assert roots <= known, name


# The checkers find what is planted

UPWARD = (
    "import stopdown.frames.media",
    "from stopdown import frames",
    "from stopdown.frames.media import read_video",
    "def f():\n    from stopdown.frames.media import read_video",
    "if TYPE_CHECKING:\n    from stopdown.frames.media import Frames",
    "import importlib\nimportlib.import_module('stopdown.frames.media')",
)
OF_DIFFUSERS = (
    "import diffusers.utils",
    "def f():\n    from diffusers import DiffusionPipeline",
    "__import__('diffusers')",
)
READERS = (
    "import os\nos.environ['A']",
    "import os\nos.getenv('A')",
    "from os import environ",
    "from os import getenv as read",
)
ENDS = {
    "a = 65504": "65504",
    "x < -65504.0": "65504.0",
    "a = 6e4": "60000.0",
    "a = 64504.0": "64504.0",
}
PARSERS = {
    "callee.component.partition('.')": "component",
    "component.endswith('.decode')": "component",
    "x.module_path.split(':')": "module_path",
}
STAYS = "handle = module.register_forward_hook(look)"
WIDE = "class A:\n    def f(self, a, b, /, c, d, *e, g, h, i, {}**k): ..."
PLANTED: list[tuple[Checker, Sources, list[Any]]] = [
    # imports between modules: in every spelling, to a neighbour and upwards
    *((list_upward_imports, parse(numerics=x), ["numerics imports frames"]) for x in UPWARD),
    *((list_upward_imports, parse(records=x), ["records imports frames"]) for x in UPWARD),
    *((list_upward_imports, parse(pipelines__dot__loading=x), []) for x in UPWARD),
    (list_upward_imports, parse(frames="import stopdown"), ["frames imports __init__"]),
    (list_upward_imports, parse(app="import stopdown"), []),
    (
        list_upward_imports, parse(frames="from .errors import OutputError"),
        ["frames imports .errors.OutputError: write absolute imports"],
    ),
    (
        list_upward_imports_of_the_core,
        parse(scaling__dot__graph__dot__nodes="from stopdown.scaling.bounds.rules import A"),
        ["scaling.graph.nodes imports bounds"],
    ),
    (
        list_imports_between_commands,
        parse(app__dot__run_command="from stopdown.app.generate_command import main"),
        ["app.run_command imports stopdown.app.generate_command.main"],
    ),
    (
        list_circles,
        parse(
            bounds__dot__a="from stopdown.bounds.b import B",
            bounds__dot__b="if TYPE_CHECKING:\n    from stopdown.bounds.a import A",
        ),
        [["bounds.a", "bounds.b", "bounds.a"]],
    ),
    (list_circles, parse(bounds__dot__a="from stopdown.bounds.b import B", bounds__dot__b=""), []),
    (
        list_missing_modules, parse(frames="from stopdown.bunch.table import render"),
        ["frames imports stopdown.bunch.table.render"],
    ),
    # imports of libraries
    *((list_diffusers_imports, parse(runtime__dot__watch=x), ["runtime.watch"]) for x in OF_DIFFUSERS),
    *((list_diffusers_imports, parse(pipelines__dot__tiny=x), []) for x in OF_DIFFUSERS),
    (list_heavy_loads, parse(frames="import numpy as np"), ["frames loads numpy"]),
    (list_heavy_loads, parse(frames="class A:\n    import torch"), ["frames loads torch"]),
    (list_heavy_loads, parse(frames="try:\n    import av\nfinally: pass"), ["frames loads av"]),
    (list_heavy_loads, parse(frames="def f():\n    import numpy"), []),
    (list_heavy_loads, parse(frames="class A:\n    def f(self):\n        import av"), []),
    (list_heavy_loads, parse(frames="if TYPE_CHECKING:\n    import torch"), []),
    (list_heavy_loads, parse(numerics="import torch"), []),
    # what one module does for all
    *((list_environment_readers, parse(frames=x), ["frames"]) for x in READERS),
    *((list_environment_readers, parse(devices__dot__environment=x), []) for x in READERS),
    (list_hookers, parse(calibration=STAYS), ["calibration"]),
    (list_hookers, parse(calibration=f"{STAYS}\npatches.defer(handle.remove)"), []),
    *((list_ends_of_fp16, parse(frames=x), [f"frames writes {n} in line 1"]) for x, n in ENDS.items()),
    *((list_ends_of_fp16, parse(number_formats=x), []) for x in ENDS),
    (list_ends_of_fp16, parse(frames='say = "the maximum is 65504"'), []),
    *((list_name_parsers, parse(frames=x), [f"frames cuts a {n} in line 1"]) for x, n in PARSERS.items()),
    *((list_name_parsers, parse(component_call_names=x), []) for x in PARSERS),
    (list_name_parsers, parse(frames="path.rpartition('.')"), []),
    # functions: every kind of parameter counts; the object of a method and `**names` do not
    (list_wide_functions, parse(frames=WIDE.format("")), []),
    (list_wide_functions, parse(frames=WIDE.format("j, ")), ["frames.f has 9 parameters"]),
    (
        list_wide_functions, parse(frames="x = lambda a, b, c, d, e, f, g, h, i: a"),
        ["frames.a lambda has 9 parameters"],
    ),
    (
        list_stray_texts, parse(frames='def f():\n    """Says."""\n    why = "one "\n    "two"\n'),
        ["frames has a text in line 4"],
    ),
]  # fmt: skip
"""A checker, modules that break its rule or do not, and what it says of them."""


@pytest.mark.parametrize(
    ("checker", "sources", "found"),
    PLANTED,
    ids=[f"{row[0].__name__}-{place}" for place, row in enumerate(PLANTED)],
)
def test_what_is_planted_is_found(checker: Checker, sources: Sources, found: list[Any]) -> None:
    """Each rule that is broken, in every spelling, and nothing else."""
    assert checker(sources) == found


def test_a_module_without_a_level_is_found() -> None:
    """An import from a module that nobody placed fails with its name."""
    with pytest.raises(AssertionError, match="helpers is in no row"):
        list_upward_imports(parse(frames="from stopdown.helpers import help_me"))


def test_every_checker_has_something_planted() -> None:
    """A checker that never finds anything would hold by itself."""
    assert {checker for checker, _, found in PLANTED if found} == set(CHECKERS)

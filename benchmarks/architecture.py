"""Modules and records that four requests pass through, and what a reader of the package has to know.

`on the way` are the modules whose functions stand on the call stack when a request reaches its goal: what a
reader follows down. `entered` are all whose functions were called by then, `records` the classes of the
package that were instantiated. Code that runs when a module is imported does not count.

Of the whole package, `attributes` are those of the classes with most of them: fields of records, and what
methods set on `self`. `locks` are locks, conditions, events and thread-local stores, `private` the names of
attributes that begin with `stopdown_`, `options` those of all commands. `untested` are modules without a
test file of their name, `ambiguous` the public names of functions and classes that several modules define.
`core_lines` are those of the core with its checker, `core_code_lines` those that are neither empty nor part
of a comment or docstring. `public` counts the names in the core's list, `behind` are those that modules
above take from its modules past the list, and `leaving` is what it imports from above.
Each revision is checked out beside this one and walked by this script; rows of other revisions stay:

    python benchmarks/architecture.py 76f02be4 HEAD
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
LARGEST = 10
"""Classes whose attributes are stored."""

INNER = ("scaling", "graph", "bounds")
"""Packages of the core itself, wherever a revision has them."""

CORE = (
    *INNER,
    "fake_tensors",
    "module_calls",
    "adapter_exponents.py",
    "fold_names.py",
    "mapped_weights.py",
    "operations.py",
    "weight_checks.py",
)
"""Where the lines of the core are: `scaling`, and what lay in it before it became a level below."""

GROUND = (
    *("argument_types", "component_call_names", "errors", "files.toml_files", "interception"),
    *("number_formats", "numerics", "out_of_memory", "public_names", "record_display"),
    "scaling_records",
)
"""Modules below the core that are shared with the rest of the package."""

LOCKS = ("Lock", "RLock", "Condition", "Event", "local", "Semaphore", "Barrier")
RESULT = ROOT / "benchmarks" / "results" / "architecture.json"


class Walk:
    """Follows the calls of one request until `reach` is called, or to its end.

    Attributes:
        entered: modules of the package whose functions were called.
        records: classes of the package that were instantiated.
        stack: those that are on the stack when the goal is reached, outermost first.
    """

    def __init__(self, package: Path) -> None:
        self.entered: set[str] = set()
        self.records: set[str] = set()
        self.stack: list[str] = []
        self._folder = f"{package}{os.sep}"

    def follow(self, request: Callable[[], Any]) -> None:
        """Make the request."""
        sys.setprofile(self._note)
        try:
            request()
        finally:
            sys.setprofile(None)

    def reach(self) -> None:
        """Keep the stack as it is now, and stop counting. Later calls do nothing."""
        if not self.stack:
            sys.setprofile(None)
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                if (name := self._name(frame)) and name not in self.stack:
                    self.stack.insert(0, name)
                frame = frame.f_back

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code.co_name != "<module>" and (name := self._name(frame)):
            self.entered.add(name)
        if frame.f_code.co_name == "__init__" and "self" in frame.f_locals:
            kind = type(frame.f_locals["self"])
            if kind.__module__.startswith("stopdown."):
                self.records.add(f"{kind.__module__.removeprefix('stopdown.')}.{kind.__qualname__}")

    def _name(self, frame: FrameType) -> str:
        """Return the dotted name of a frame's module in the package, "" for other code."""
        path = frame.f_code.co_filename
        if not path.startswith(self._folder):
            return ""
        return path.removeprefix(self._folder).removesuffix(".py").replace(os.sep, ".")


def walk_prompt(walk: Walk, folder: Path) -> None:
    """`stopdown generate shapes PROMPT`, to the first call of the denoiser with values."""
    import torch

    from stopdown.app.generate_command import GenerateOptions, generate

    def look(module: torch.nn.Module, *_: Any) -> None:
        is_dry = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if type(module).__name__ == "CogVideoXTransformer3DModel" and not is_dry:
            walk.reach()

    torch.nn.modules.module.register_module_forward_pre_hook(look)
    options = GenerateOptions(
        source="shapes", prompt="a red circle", steps=1, quiet=True, force=True,
        output=str(folder / "out.mp4"),
    )  # fmt: skip
    walk.follow(lambda: generate(options))


def make_module() -> tuple[Any, Any]:
    """Return a module whose residual stream leaves fp16, and an input."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(self.norm(x))

    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16))
    with torch.no_grad():
        model[0].inner.weight.mul_(1e5)
    return model.eval(), torch.randn(4, 16)


def walk_module(walk: Walk, _: Path) -> None:
    """`rescale_(module, x)`, whole."""
    import stopdown

    model, value = make_module()
    walk.follow(lambda: stopdown.rescale_(model, value, cast=True))


def walk_fault(walk: Walk, _: Path) -> None:
    """A call in fp16 that gives NaN under a guard, from the call to its repaired output."""
    import torch

    import stopdown

    model, value = make_module()
    with stopdown.guard(model.half()), torch.no_grad():
        walk.follow(lambda: model(value.half()))


def walk_certificate(walk: Walk, folder: Path) -> None:
    """`make_plan` of the bundled model by certificate, whole."""
    import stopdown

    walk.follow(lambda: stopdown.make_plan("shapes"))


# The package as a whole


def count_package(place: Path) -> dict[str, Any]:
    """Count what holds state in the package, and what a user may type."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((place / "src").rglob("*.py"))}
    classes = {
        f"{path.stem}.{name}": count
        for path, tree in trees.items()
        for name, count in count_attributes(tree).items()
    }
    private = {name for tree in trees.values() for name in list_private(tree)}
    return {
        "attributes": dict(sorted(classes.items(), key=lambda x: (-x[1], x[0]))[:LARGEST]),
        "locks": sum(map(count_locks, trees.values())),
        "private": sorted(private),
        "options": count_options(place),
        "lines": sum(path.read_text().count("\n") for path in trees),
        **count_core_lines(place / "src"),
        **count_face(place / "src" / "stopdown"),
        "dependencies": len(read_dependencies(place)),
        "ambiguous": list_ambiguous(trees),
        "untested": list_untested(place),
    }


def count_attributes(tree: ast.Module) -> dict[str, int]:
    """Return how many attributes each class of a module has."""
    kinds = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {kind.name: len(_list_attributes(kind)) for kind in kinds}


def count_locks(tree: ast.Module) -> int:
    """Count locks, conditions, events and thread-local stores."""
    return sum(map(_is_lock, ast.walk(tree)))


def list_private(tree: ast.Module) -> set[str]:
    """Return the names that begin with `stopdown_`: attributes on objects of others."""
    nodes = list(ast.walk(tree))
    names = {x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str)}
    names |= {x.attr for x in nodes if isinstance(x, ast.Attribute)}
    return {x for x in names if re.fullmatch(r"stopdown_[a-z_]+", x)} - {"stopdown_verify"}


def count_core_lines(source: Path) -> dict[str, int]:
    """Count the lines of the core with its checker, and of these the lines with code.

    Empty lines, comments and docstrings have no code.
    """
    places = [source / "stopdown_verify.py", *(source / "stopdown" / name for name in CORE)]
    files = [x for place in places for x in (place.rglob("*.py") if place.is_dir() else [place])]
    texts = [x.read_text() for x in files if x.exists()]
    return {
        "core_lines": sum(text.count("\n") for text in texts),
        "core_code_lines": sum(map(count_code_lines, texts)),
    }


def count_code_lines(text: str) -> int:
    """Count the lines of a module that are neither empty nor part of a comment or docstring."""
    written = {
        number
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant(str())):
                written -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(written)


def count_face(package: Path) -> dict[str, Any]:
    """Count the public names of the core, and list what passes its wall in either direction."""
    stub = package / "scaling" / "__init__.pyi"
    public = stub.read_text().count("\nfrom ") if stub.exists() else 0
    behind, leaving = set[str](), set[str]()
    below = (*(name.removesuffix(".py") for name in CORE), *GROUND)
    for path in sorted(package.rglob("*.py")):
        own = ".".join(path.relative_to(package).with_suffix("").parts)
        for module, name in _list_imports(ast.parse(path.read_text())):
            if not _is_among(own, below) and _is_among(module, INNER) and module != "scaling":
                behind.add(f"{module}.{name}")
            if _is_among(own, below) and not _is_among(module, below):
                leaving.add(f"{own} imports {module}.{name}".removesuffix("."))
    return {"public": public, "behind": sorted(behind), "leaving": sorted(leaving)}


def _list_imports(tree: ast.Module) -> list[tuple[str, str]]:
    """Return the modules of the package that a module imports from, below `stopdown`, with each name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stopdown."):
            module = str(node.module).removeprefix("stopdown.")
            found += [(module, alias.name) for alias in node.names]
    return found


def _is_among(module: str, names: tuple[str, ...]) -> bool:
    return any(module == x or module.startswith(f"{x}.") for x in names)


def read_dependencies(place: Path) -> list[str]:
    """Return what `pip install stopdown` asks for."""
    project = tomllib.loads((place / "pyproject.toml").read_text())["project"]
    found: list[str] = project["dependencies"]
    return found


def list_ambiguous(trees: dict[Path, ast.Module]) -> list[str]:
    """Return public functions and classes of modules whose names are those of others, in other modules."""
    kinds = ast.FunctionDef | ast.ClassDef
    names = [
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, kinds) and not node.name.startswith("_")
    ]
    return sorted({name for name, count in Counter(names).items() if count > 1})


def list_untested(place: Path) -> list[str]:
    """Return the modules of the package for which no test file is named."""
    package = place / "src" / "stopdown"
    tested = {path.stem for path in (place / "tests").rglob("test_*.py")}
    return [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if not path.stem.startswith("__") and f"test_{path.stem}" not in tested
    ]


def _list_attributes(kind: ast.ClassDef) -> set[str]:
    """Return the names that a class annotates, if it is a record, and that its methods set on `self`."""
    found = {
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    for node in ast.walk(kind):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            found.add(node.attr)
    return found


def _is_lock(node: ast.AST) -> bool:
    """Whether something makes a lock, or is a class of thread-local stores."""
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base) == "threading.local" for base in node.bases)
    if not isinstance(node, ast.Call):
        return False
    named = ast.unparse(node.func)
    return named.partition(".")[2] in LOCKS and named.startswith("threading.")


def count_options(place: Path) -> dict[str, int]:
    """Count each command's options, without `--help`."""
    code = (
        "import json, typer; from stopdown.app.commands import app\n"
        "group = typer.main.get_command(app)\n"
        "print('OPTIONS ' + json.dumps({name: sum(x.param_type_name == 'option' and x.name != 'help'"
        " for x in command.params) for name, command in group.commands.items()}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(place / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    found = [x for x in done.stdout.splitlines() if x.startswith("OPTIONS ")]
    if not found:
        raise RuntimeError(done.stderr[-2000:])
    options: dict[str, int] = json.loads(found[0].removeprefix("OPTIONS "))
    return {**options, "all": sum(options.values())}


WALKS = {
    "prompt": walk_prompt,
    "module": walk_module,
    "faulty call": walk_fault,
    "certificate": walk_certificate,
}


def main() -> None:
    """Walk each revision, and store the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="*", default=["HEAD"])
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        walk = Walk(options.inside / "src" / "stopdown")
        with tempfile.TemporaryDirectory() as folder:
            WALKS[options.revisions[0]](walk, Path(folder))
        found = {
            "way": walk.stack,
            "entered": sorted(walk.entered),
            "records": sorted(walk.records),
        }
        print("WALK " + json.dumps(found))
        return
    from stopdown.devices.environment import describe_machine

    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    for named in options.revisions:
        revision = _git("rev-parse", "--short", named)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "tree"
            _git("worktree", "add", "--quiet", "--detach", str(place), revision)
            try:
                counts = count_package(place)
                print(revision, json.dumps(counts), flush=True)
                walks = {name: _walk(place, name, Path(folder)) for name in WALKS}
                rows[revision] = {**walks, "package": counts}
            finally:
                _git("worktree", "remove", "--force", str(place))
    report = {
        "command": f"python benchmarks/architecture.py {' '.join(options.revisions)}",
        "machine": describe_machine(),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _walk(place: Path, name: str, folder: Path) -> dict[str, Any]:
    environment = {
        **os.environ, "PYTHONPATH": str(place / "src"), "STOPDOWN_CACHE": str(folder / "cache"),
    }  # fmt: skip
    command = [sys.executable, __file__, name, "--inside", str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [x for x in done.stdout.splitlines() if x.startswith("WALK ")]
    if not found:
        raise RuntimeError(done.stderr[-2000:])
    row: dict[str, Any] = json.loads(found[0][5:])
    print(
        f"{name}: {len(row['way'])} on the way, {len(row['entered'])} entered, "
        f"{len(row['records'])} records",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()

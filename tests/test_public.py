"""The list of public names, and what importing it loads."""

from __future__ import annotations

import inspect
import json
import pkgutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stopdown
from models.comparisons import make_comparison
from stopdown.records import to_json

HEAVY = {"torch", "diffusers", "transformers", "accelerate", "numpy", "scipy", "av", "PIL"}


def run_fresh(code: str) -> Any:
    """What a fresh process prints as JSON, warnings being errors."""
    command = [sys.executable, "-W", "error", "-c", f"import json, sys\n{code}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_importing_loads_nothing_heavy() -> None:
    """`import stopdown` loads neither torch nor diffusers, and few modules in all."""
    loaded = run_fresh(
        "before = set(sys.modules)\nimport stopdown\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    assert HEAVY.isdisjoint(name.split(".")[0] for name in loaded)
    assert len(loaded) < 200


WITHOUT_TORCH = {
    "explaining a message": (
        "unattributed",
        """
        import stopdown
        answer = stopdown.explain("RuntimeWarning: invalid value encountered in cast").fault
        """,
    ),
    "checking a source": (
        [64, True],
        """
        from stopdown.sources.source_checks import verify_source
        from stopdown.sources.sources import *
        source = resolve_source(FOLDER); verify_source(source)
        answer = len(fingerprint(source)), bool(read_stored_dtypes(source))
        """,
    ),
    "deciding precisions": (
        True,
        """
        from stopdown.plans import precision
        facts = precision.ComponentFacts("vae", ("vae",), {"fp32": 1})
        request = precision.resolve_request(precision.parse_request("auto"), {"vae": ("vae",)})
        answer = bool(precision.decide_precisions([facts], {}, request))
        """,
    ),
    "describing the machine": (
        None,
        """
        from stopdown.devices.environment import describe_machine
        answer = describe_machine()["torch_threads"]
        """,
    ),
    "making a page of a record": (
        True,
        """
        from pathlib import Path
        from stopdown.app.report_command import report
        answer = report(Path(RECORD), None)[1].exists()
        """,
    ),
    "reading names of formats": (
        [65504.0, "bf16"],
        """
        from stopdown.number_formats import FORMATS, find_format
        answer = FORMATS["fp16"].largest, find_format("BF16").name
        """,
    ),
}
"""What is done in a fresh process, by what it answers."""


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_it_needs_no_torch(name: str, save_tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A fresh process answers, and has loaded nothing heavy."""
    answer, code = WITHOUT_TORCH[name]
    record = tmp_path / "r.html.json"
    record.write_text(to_json(make_comparison()))
    folder = str(save_tiny("cogvideox")) if "FOLDER" in code else ""
    code = f"FOLDER, RECORD = {folder!r}, {str(record)!r}\n" + textwrap.dedent(code)
    found, loaded = run_fresh(f"{code}\nprint(json.dumps([answer, sorted(sys.modules)]))")
    assert found == answer
    assert HEAVY.isdisjoint(x.split(".")[0] for x in loaded)


def test_importing_prints_and_changes_nothing() -> None:
    """Nothing happens at import: no output, no new environment variable, no warning filter."""
    code = (
        "import os, warnings\nbefore = dict(os.environ), list(warnings.filters)\nimport stopdown\n"
        "print(json.dumps(before == (dict(os.environ), list(warnings.filters))))"
    )
    assert run_fresh(code) is True


def test_listing_the_names_loads_nothing_heavy() -> None:
    """Tab completion in a shell costs nothing: dir() names all and imports none."""
    loaded, names = run_fresh(
        "import stopdown\nnames = dir(stopdown)\nprint(json.dumps([sorted(sys.modules), names]))"
    )
    assert HEAVY.isdisjoint(name.split(".")[0] for name in loaded)
    assert set(stopdown.__all__) <= set(names)


def test_names_are_sorted_and_once() -> None:
    """At most 20 names: verbs first, then classes, each in the order of `sorted`, and nothing twice."""
    verbs = [name for name in stopdown.__all__ if name.islower()]
    classes = [name for name in stopdown.__all__ if not name.islower()]
    assert list(stopdown.__all__) == sorted(verbs) + sorted(classes)
    assert len(set(stopdown.__all__)) == len(stopdown.__all__) <= 20


def test_names_are_complete() -> None:
    """Every public name of the package that is not a submodule is in the list."""
    for name in stopdown.__all__:
        getattr(stopdown, name)
    public = {
        name
        for name, value in vars(stopdown).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "stopdown").startswith("stopdown")
    }
    assert public <= set(stopdown.__all__)


@pytest.mark.parametrize("name", ["errors", "records"])
def test_errors_and_records_need_no_import_of_their_own(name: str) -> None:
    """`import stopdown` is enough for `except stopdown.errors.OptionError`."""
    assert run_fresh(f"import stopdown\nprint(json.dumps(stopdown.{name}.__name__))") == (
        f"stopdown.{name}"
    )


@pytest.mark.parametrize("name", stopdown.__all__)
def test_a_name_can_be_imported_again_and_again(name: str) -> None:
    """Each name is the same object at the first and the second access, and has a docstring."""
    first = getattr(stopdown, name)
    assert getattr(stopdown, name) is first
    assert not inspect.ismodule(first)
    if name != "__version__":
        assert inspect.getdoc(first)


def test_no_name_is_a_submodule() -> None:
    """A lazy function that shares its name with a submodule would turn into the module."""
    submodules = {module.name for module in pkgutil.iter_modules(stopdown.__path__)}
    assert submodules.isdisjoint(stopdown.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as in any module, and names the module."""
    with pytest.raises(AttributeError, match="stopdown"):
        _ = stopdown.genrate


def test_the_version_is_that_of_the_package() -> None:
    """`stopdown.__version__` is the installed version."""
    import importlib.metadata

    assert stopdown.__version__ == importlib.metadata.version("stopdown")

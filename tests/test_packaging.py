"""The package as users get it: built, checked, installed where nothing of the working tree is, and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stopdown.sources.sources import NEEDED

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")


def _run(*command: object, cwd: Path) -> str:
    """What a command writes to both streams; it has to succeed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built of, as a clone has it."""
    folder = tmp_path_factory.mktemp("clone")
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=leave)
        else:
            shutil.copy(path, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(clone: Path) -> Path:
    """The folder with the sdist, and with the wheel that was built out of the sdist."""
    _run(sys.executable, "-m", "build", "--no-isolation", clone, cwd=clone)
    return clone / "dist"


def _make_environment(folder: Path) -> Path:
    """Python of a new environment: it has the dependencies of this one, and no Stopdown."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def _install(python: Path, what: Path, cwd: Path) -> None:
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--quiet")
    _run(sys.executable, "-m", "pip", "--python", python, "install", *options, what, cwd=cwd)


@pytest.mark.thorough
def test_both_archives_are_in_order(built: Path) -> None:
    """There is a wheel and an sdist, and twine has nothing against them or their description."""
    found = sorted(built.iterdir())
    assert [path.name.split("-")[0] for path in found] == ["stopdown", "stopdown"]
    assert {path.suffix for path in found} == {".whl", ".gz"}
    said = _run(sys.executable, "-m", "twine", "check", "--strict", *found, cwd=built)
    assert said.count("PASSED") == 2


@pytest.mark.thorough
def test_the_wheel_runs_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """The installed wheel has every file of the package, and makes a video from its own model."""
    python = _make_environment(tmp_path / "environment")
    (wheel,) = built.glob("*.whl")
    _install(python, wheel, tmp_path)
    code = "import stopdown, pathlib; print(pathlib.Path(stopdown.__file__).parent)"
    installed = Path(_run(python, "-c", code, cwd=tmp_path).strip())
    assert tmp_path in installed.parents
    assert _list_files(installed) == _list_files(ROOT / "src" / "stopdown")
    command = (python.parent / "stopdown", "generate", "solids", "two red spheres")
    _run(*command, "--steps", "1", "-o", "spheres.mp4", cwd=tmp_path)
    assert (tmp_path / "spheres.mp4").stat().st_size > 1000


@pytest.mark.slow
def test_a_clone_is_installed_by_pip(clone: Path, tmp_path: Path) -> None:
    """`pip install .` in a clone works in an active environment, and the command is there."""
    python = _make_environment(tmp_path / "environment")
    _install(python, clone, clone)
    said = _run(python.parent / "stopdown", "--version", cwd=tmp_path)
    assert said.startswith("stopdown ")


SHIPPED = sorted((ROOT / "tests" / "comfyui" / "shipped").glob("*.txt"))
"""Packages of a portable ComfyUI, by its version."""


def read_shipped(path: Path) -> dict[str, str]:
    """Name of each package to its version."""
    rows = path.read_text(encoding="utf-8").splitlines()
    pairs = (row.split("==") for row in rows if not row.startswith("#"))
    return {name: version for name, version in pairs}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_portable_comfyui_keeps_its_packages(path: Path) -> None:
    """No requirement excludes a version that ComfyUI ships, and the extra is what loading asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shipped = read_shipped(path)
    extras = project["optional-dependencies"]
    asked_for = (*project["dependencies"], *extras["cli"])  # as the guide of ComfyUI installs it
    needed = {x.name: x for x in map(Requirement, asked_for)}
    shared = needed.keys() & shipped.keys()
    assert {"torch", "safetensors", "numpy", "pillow", "av"} <= shared
    assert [str(needed[x]) for x in shared if shipped[x] not in needed[x].specifier] == []
    extra = map(Requirement, extras["pipelines"])
    asked = {x.name: str(x.specifier) for x in extra}
    assert {name: asked[name] for name in NEEDED} == {x: f">={NEEDED[x]}" for x in NEEDED}


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_pip_adds_packages_to_comfyui_and_replaces_none(
    path: Path, clone: Path, tmp_path: Path
) -> None:
    """A dry run by pip's own resolver, beside the packages of a portable ComfyUI. It asks the index."""
    shipped = read_shipped(path)
    venv.create(tmp_path / "environment", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    for name, version in shipped.items():
        folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(head, encoding="utf-8")
    python, report = tmp_path / "environment" / "bin" / "python", tmp_path / "report.json"
    options = ("install", "--dry-run", "--quiet", "--report", report)
    _run(sys.executable, "-m", "pip", "--python", python, *options, f"{clone}[cli]", cwd=tmp_path)
    added = json.loads(report.read_text(encoding="utf-8"))["install"]
    names = {canonicalize_name(x["metadata"]["name"]) for x in added}
    assert {"stopdown", "msgspec"} <= names
    assert names & {*shipped, "diffusers", "transformers"} == set()


def _list_files(package: Path) -> set[str]:
    """Every file below a package, compiled ones aside."""
    files = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
    return {str(path) for path in files if "__pycache__" not in path.parts}

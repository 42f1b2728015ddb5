"""Name the test files of what a change touches, for `make test`: python tests/touched_tests.py

What is touched: files that differ from `main`, committed or not. A test file is of a package if it imports
from it, lies in the folder of its name (`tests/scaling/folding`), or has the name of one of its modules.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def list_tests(changed: Iterable[str], tests: dict[str, str], modules: Iterable[str]) -> list[str]:
    """Return the test files that concern changed files.

    Args:
        changed: paths in the repository: `src/stopdown/scaling/folding/folds.py`.
        tests: path of each test file to its text.
        modules: paths of the package's modules, as in `changed`.
    """
    changed = set(changed)
    units = {unit for path in changed if (unit := _find_unit(path))}
    names = {Path(path).stem for path in modules if _find_unit(path) in units}
    imported = re.compile(rf"\bstopdown\.({'|'.join(sorted(units))})\b") if units else None
    folders = {f"tests/{unit.replace('.', '/')}" for unit in units}
    return sorted(
        path
        for path, text in tests.items()
        if path in changed
        or str(Path(path).parent) in folders
        or Path(path).stem.removeprefix("test_") in {*names, *units}
        or (imported and imported.search(text))
    )


def _find_unit(path: str) -> str:
    """Return the package or module that a file is of, of the core the one inside; "" for others."""
    found = re.match(r"src/(?:stopdown/(scaling/\w+|\w+)|(stopdown_verify)\.py)", path)
    unit = (found[1] or found[2]).replace("/", ".") if found else ""
    return "" if unit.endswith("__init__") else unit


def main() -> None:
    """Print the files, none on a clone of `main`."""
    base = _git("merge-base", "HEAD", "main").strip() or "HEAD"
    changed = [
        *_git("diff", "--name-only", base).splitlines(),
        *_git("ls-files", "-o", "--exclude-standard").splitlines(),
    ]
    files = {str(x.relative_to(ROOT)): x for x in (ROOT / "tests").rglob("test_*.py")}
    tests = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    modules = [str(x.relative_to(ROOT)) for x in (ROOT / "src").rglob("*.py")]
    print(" ".join(list_tests(changed, tests, modules)))  # noqa: T201


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout


if __name__ == "__main__":
    main()

"""The one runner of the scripts in this folder: lists them, or runs one and signs what it stores.

    python benchmarks/run.py                       # each script, what it measures, how long it took
    python benchmarks/run.py rescale --classes T5  # the script's own options follow its name

A script stores its results in `results/`. After it ends well, each JSON file that it changed also states
the arguments, the seconds and the code that made it, under `made`, and the figures on pages are filled in.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from revision import describe_code

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def main() -> None:
    """Read the command line; list the scripts or run one of them."""
    scripts = list_scripts()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", nargs="?", choices=sorted(scripts))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="options of the script")
    options = parser.parse_args()
    if options.script is None:
        for name, purpose in sorted(scripts.items()):
            print(f"{name:20} {_format_seconds(read_seconds(name)):>6}  {purpose}")
        return
    command = [sys.executable, str(FOLDER / f"{options.script}.py"), *options.arguments]
    before, begun = _read_results(RESULTS), time.perf_counter()
    code = subprocess.run(command).returncode
    if code == 0:
        elapsed_s = time.perf_counter() - begun
        for path in sign_changed(RESULTS, before, [options.script, *options.arguments], elapsed_s):
            print(f"Signed {path}")
        code = subprocess.run(
            [sys.executable, str(FOLDER.parent / "docs" / "figures.py")]
        ).returncode
    sys.exit(code)


def list_scripts(folder: Path = FOLDER) -> dict[str, str]:
    """Return the name and the first line of each script that can be run by itself."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.name != "run.py" and '__name__ == "__main__"' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return found


def sign_changed(
    results: Path, before: dict[Path, bytes], arguments: list[str], elapsed_s: float
) -> list[Path]:
    """Write into each result that changed which arguments and code made it, in how many seconds.

    Args:
        results: the folder of stored results.
        before: what its JSON files held before the run.
        arguments: the script and its options.
        elapsed_s: seconds of the run.

    Returns:
        the files that were signed.
    """
    signed = []
    for path, content in _read_results(results).items():
        stored: Any = json.loads(content)
        if content != before.get(path) and isinstance(stored, dict):
            made = {
                "arguments": arguments,
                "elapsed_s": round(elapsed_s, 1),
                "code": describe_code(),
            }
            path.write_text(json.dumps(stored | {"made": made}, indent=1) + "\n", encoding="utf-8")
            signed.append(path)
    return signed


def read_seconds(script: str, results: Path = RESULTS) -> float | None:
    """Return the seconds of a script's last signed run, None if no result has them."""
    for content in _read_results(results).values():
        stored: Any = json.loads(content)
        made = stored.get("made") if isinstance(stored, dict) else None
        if made and made["arguments"][0] == script:
            return float(made["elapsed_s"])
    return None


def _read_results(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.glob("*.json"))}


def _format_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f} s"


if __name__ == "__main__":
    main()

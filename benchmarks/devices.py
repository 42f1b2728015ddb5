"""Take benchmarks of devices in, and write what `doctor` quotes of them.

    stopdown bench                                  # on the device; its JSON file is what is sent
    python benchmarks/devices.py stopdown-bench-NAME.json

A file goes to `benchmarks/results/devices/`, with its page. From all that are there
`src/stopdown/knowledge/rules/measured.toml` is written. Then run `python docs/figures.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stopdown.bench.records import Benchmark, render
from stopdown.records import read_record, to_json

ROOT = Path(__file__).parents[1]
DEVICES = ROOT / "benchmarks" / "results" / "devices"
KNOWN = ROOT / "src" / "stopdown" / "knowledge" / "rules" / "measured.toml"
HEAD = "# What was measured on devices by `stopdown bench`; written by `python benchmarks/devices.py`.\n"


def describe(path: Path) -> str:
    """A device's rows in TOML."""
    made = read_record(path, Benchmark)
    lines = ["", "[[device]]", f"name = {json.dumps(made.device)}", f'backend = "{made.backend}"']
    lines += [f'torch = "{made.versions["torch"]}"']
    lines += [f'source = "{path.relative_to(ROOT).as_posix()}"', "rows = ["]
    for row in made.rows:
        if row.time_ratio is not None:
            error = "" if row.rel_err is None else f", rel_err = {row.rel_err:.3g}"
            way = f"subject = {json.dumps(row.subject)}, way = {json.dumps(row.way)}"
            lines += [f"    {{ {way}, time_ratio = {row.time_ratio:.3g}{error} }},"]
    return "\n".join([*lines, "]", ""])


def write_known() -> str:
    """The whole file, from what is stored."""
    return HEAD + "".join(map(describe, sorted(DEVICES.glob("*.json"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    for path in parser.parse_args().files:
        made = read_record(path, Benchmark)
        target = DEVICES / path.name.removeprefix("stopdown-bench-")
        target.write_text(to_json(made), encoding="utf-8")
        target.with_suffix(".md").write_text(render(made), encoding="utf-8")
    KNOWN.write_text(write_known(), encoding="utf-8")


if __name__ == "__main__":
    main()

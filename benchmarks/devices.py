"""Take reports of devices in, and write what `doctor` quotes of them.

    stopdown bench > tesla-t4.md                    # on the device; its owner pastes it into an issue
    python benchmarks/devices.py tesla-t4.md

A report goes to `benchmarks/results/devices/` as it was sent. From all that are there
`src/stopdown/knowledge/rules/measured.toml` is written. Then run `python docs/figures.py`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEVICES = ROOT / "benchmarks" / "results" / "devices"
KNOWN = ROOT / "src" / "stopdown" / "knowledge" / "rules" / "measured.toml"
HEAD = "# What was measured on devices by `stopdown bench`; written by `python benchmarks/devices.py`.\n"


def describe(path: Path) -> Iterator[str]:
    """Yield a device's rows in TOML, as `stopdown.bench.render` drew them."""
    text = path.read_text(encoding="utf-8")
    device = re.search(r"^(.+) \((\w+), [\d.]+ \w+\)\. .*?torch ([\w.+]*\w)", text, re.MULTILINE)
    if device is None:
        raise SystemExit(f"{path} is no report of stopdown bench: it names no device.")
    yield "\n[[device]]"
    yield f"name = {json.dumps(device[1])}"
    yield f'backend = "{device[2]}"'
    yield f'torch = "{device[3]}"'
    yield f'source = "{(DEVICES / path.name).relative_to(ROOT).as_posix()}"'
    yield "rows = ["
    subject = ""
    for line in text.splitlines():
        subject = line[:-1] if line.endswith(":") else subject
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1].endswith(" s") and cells[2] != "–":
            error = cells[5].partition(" %")
            found = f", rel_err = {float(error[0]) / 100:.3g}" if error[1] else ""
            named = f"subject = {json.dumps(subject)}, way = {json.dumps(cells[0])}"
            yield f"    {{ {named}, time_ratio = {float(cells[2]):.3g}{found} }},"
    yield "]\n"


def write_known() -> str:
    """Return the whole file, from what is stored."""
    return HEAD + "".join("\n".join(describe(path)) for path in sorted(DEVICES.glob("*.md")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    for path in parser.parse_args().files:
        (DEVICES / path.name).write_bytes(path.read_bytes())
    KNOWN.write_text(write_known(), encoding="utf-8")


if __name__ == "__main__":
    main()

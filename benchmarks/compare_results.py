"""Whether results that are stored in two revisions say the same: exponents, findings and verdicts.

Seconds, what a process took of memory, and versions are left out, and so are rows that only the later
revision has. What differs is explained in
`results/explained_differences.toml`, by file and row, or the exit code is 1. Only what is stored is
compared: rows that are the same down to their seconds were not asked again, so they show nothing; their
number stands beside each file. `answers.py` asks the code itself.

    python benchmarks/compare_results.py 0d7adc6 HEAD
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
EXPLAINED = ROOT / RESULTS / "explained_differences.toml"

FILES = (
    "rescale.json",
    "fault_matrix.json",
    "certificates_full.json",
    "certificates_share.json",
    "certificates_tightness.json",
    "check.json",
    "explain.md",
    "memory_predicted.json",
    "memory_measured.json",
    "memory_published.json",
)
"""What was stored before the redesign, and `memory_predicted`. Of `explain` only the tables were."""

RENAMED = {
    r'"island_(flops|bytes)"': r'"fp32_\1"',
    r'"islands"': '"fp32_modules"',
    r'"island"': '"fp32-module"',
    r"\bisland-": "fp32-module-",
    r"\bfp32-island\b": "fp32-module",
    r"\bisland (comes|lost)": r"fp32 module \1",
    r"_asleep\b": "_switched_off",
}
"""What names in files of before are today; `site` was a module path, and of a bound a node."""

NAMES = (
    "name", "case", "class", "way", "node", "operation", "fault", "pipeline", "dtype", "device", "model",
    "component", "strategy", "published_for", "precision",
)  # fmt: skip
"""Fields that say which row of a list it is."""

LEFT_OUT = re.compile(
    r"(^|/)(machine|versions|command|time_ratio|\w*_s|before_bytes|measured_bytes|predicted_over_measured)(/|$)"
)
"""What is no verdict: times and what a machine is."""

OF_PROCESSES = re.compile(r"(^|/)peak_bytes$")
"""In these files the peak of a process that was measured; elsewhere it is what is predicted."""
WITH_PROCESSES = ("certificates_full.json", "check.json")

Row = Mapping[str, Any]
"""Path inside of a row to what stands there."""


@dataclass(frozen=True)
class Difference:
    """One field that two revisions have otherwise; None where it is missing."""

    file: str
    row: str
    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        values = f"{json.dumps(self.before)} is now {json.dumps(self.after)}"
        return f"{self.file}: {self.row}: {self.field}: {values}"


@dataclass(frozen=True)
class Reason:
    """Why rows differ: patterns of file, row and field, and what explains them."""

    file: str
    row: str
    because: str
    field: str = "*"

    def fits(self, found: Difference) -> bool:
        """Whether it explains a difference."""
        pairs = ((found.file, self.file), (found.row, self.row), (found.field, self.field))
        return all(fnmatchcase(text, pattern) for text, pattern in pairs)


def read_stored(revision: str, file: str) -> dict[str, Row] | None:
    """The rows of a file as a revision has it, under today's names; None where it has no such file."""
    place = f"{revision}:{RESULTS}/{file}"
    found = subprocess.run(["git", "show", place], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        return None
    text = found.stdout
    for before, today in RENAMED.items():
        text = re.sub(before, today, text)
    if file.endswith(".md"):
        return read_tables(text)
    node = "node" if file == "certificates_tightness.json" else "module_path"
    return read_rows(json.loads(text.replace('"site"', f'"{node}"')))


def read_tables(text: str) -> dict[str, Row]:
    """The rows of Markdown tables, by heading and first cell."""
    rows: dict[str, Row] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| "):
            first, *cells = line.strip("| ").split(" | ")
            _add(rows, f"{heading} / {first}", dict(enumerate(cells)))
    return rows


def read_rows(content: Any) -> dict[str, Row]:
    """The rows of a result: what is two levels deep, or an entry of a list that has a name."""
    rows: dict[str, Row] = {}
    for key, value in content.items():
        if LEFT_OUT.search(key):
            continue
        for name, entry in _list_entries(value):
            _add(rows, f"{key} / {name}" if name else key, dict(_flatten(entry)))
    return rows


def _add(rows: dict[str, Row], name: str, row: Row) -> None:
    number = 2
    unique = name
    while unique in rows:
        unique, number = f"{name} #{number}", number + 1
    rows[unique] = row


def _list_entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), entry) for key, entry in value.items())
    elif isinstance(value, list) and value and all(isinstance(x, dict) for x in value):
        yield from ((_name(entry) or str(place), entry) for place, entry in enumerate(value))
    else:
        yield "", value


def _name(entry: Mapping[str, Any]) -> str:
    return " / ".join(entry[key] for key in NAMES if isinstance(entry.get(key), str))


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    entries = list(_list_entries(value))
    if not isinstance(value, dict) and [name for name, _ in entries] == [""]:
        yield path, value
        return
    for name, entry in entries:
        yield from _flatten(entry, f"{path}/{name}" if path else name)


def is_verdict(file: str, field: str) -> bool:
    """Whether a field is more than a time, or a figure of the machine."""
    left = LEFT_OUT.search(field) or (file in WITH_PROCESSES and OF_PROCESSES.search(field))
    return not left


def compare_rows(
    file: str, before: Mapping[str, Row], after: Mapping[str, Row]
) -> list[Difference]:
    """List every verdict that differs, and every row that is gone; a new row has nothing to differ from."""
    found = []
    for row, old in before.items():
        if (new := after.get(row)) is None:
            found.append(Difference(file, row, "row", "there", None))
            continue
        fields = [str(x) for x in dict.fromkeys((*old, *new)) if is_verdict(file, str(x))]
        found += [
            Difference(file, row, x, old.get(x), new.get(x))
            for x in fields
            if old.get(x) != new.get(x)
        ]
    return found


def tell_repeated(before: Mapping[str, Row], after: Mapping[str, Row]) -> str:
    """How many rows were not asked again, because their times are the same too."""
    timed = {name: row for name, row in before.items() if any(map(_is_time, row))}
    if not timed:
        return "no times to tell which were asked again"
    return f"{sum(row == after.get(name) for name, row in timed.items())} not asked again"


def _is_time(field: object) -> bool:
    return str(field).endswith("_s")


def read_reasons(path: Path = EXPLAINED) -> list[Reason]:
    """The explanations; one that names several rows or fields is one for each of them."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["difference"]
    return [
        Reason(entry["file"], row, entry["because"], field)
        for entry in entries
        for row in _list_patterns(entry["row"])
        for field in _list_patterns(entry.get("field", "*"))
    ]


def _list_patterns(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def sort_differences(
    found: Sequence[Difference], reasons: Sequence[Reason]
) -> tuple[dict[str, list[Difference]], list[Difference]]:
    """Differences by what explains them, and those that nothing does."""
    explained: dict[str, list[Difference]] = {}
    open_ones = []
    for one in found:
        reason = next((x for x in reasons if x.fits(one)), None)
        if reason is None:
            open_ones.append(one)
        else:
            explained.setdefault(reason.because, []).append(one)
    return explained, open_ones


def main() -> int:
    """Compare, print, and say whether everything is explained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="revision of Git")
    parser.add_argument("after", nargs="?", default="HEAD")
    options = parser.parse_args()
    found: list[Difference] = []
    for file in FILES:
        old, new = (read_stored(x, file) for x in (options.before, options.after))
        if old is None or new is None:
            missing = options.before if old is None else options.after
            print(f"{file}: not stored in {missing}")
            continue
        here = compare_rows(file, old, new)
        differing = len({x.row for x in here})
        added = len(new.keys() - old.keys())
        print(
            f"{file}: {len(new)} rows, {added} of them new, {tell_repeated(old, new)}, {differing} differ"
        )
        found += here
    explained, open_ones = sort_differences(found, read_reasons())
    for because, group in explained.items():
        print(f"\n{because}")
        print("\n".join(f"    {x}" for x in group))
    if open_ones:
        print("\nNot explained:")
        print("\n".join(f"    {x}" for x in open_ones))
    return 1 if open_ones else 0


if __name__ == "__main__":
    sys.exit(main())

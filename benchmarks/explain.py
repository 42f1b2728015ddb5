"""How often `stopdown explain` puts a reported failure into the class that a person chose.

    python benchmarks/explain.py
    python benchmarks/explain.py --reports reports.json

Seven questions: every distinct message alone; every report with the facts it names, as
someone pastes them; texts and whole reports of our own; messages of 2026; what the libraries themselves
say about precision; and messages that have nothing to do with it.

With `--reports` the reports of another file are asked, and nothing is stored. Its entries have `text`,
`device`, `model`, perhaps `title`, and the right answer in one of two forms: `expected_class`, class names
separated by " / ", with a remark in parentheses; or `expected`, a sentence. A class that a sentence names
is graded; without one, the answer is printed beside the sentence for a reader to judge. A text that
begins with "(prose)" was paraphrased by whoever collected it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from library_messages import PACKAGES, find_messages

from stopdown.devices.environment import describe_machine
from stopdown.diagnosis.explained import explain
from stopdown.diagnosis.knowledge import UNKNOWN, read_knowledge

CASES = Path(__file__).parent / "cases"
RESULTS = Path(__file__).parent / "results"

MESSAGE = re.compile(
    r"RuntimeWarning: invalid value encountered in cast|A tensor with all NaNs was produced in \w+"
    r"|NansException|.*(?:mat1 and mat2|Input type|expected scalar type|not implemented for|Promotion for"
    r"|fp8e4nv|MPS Tensor|is_bf16_supported|bfloat16 compilation|Passed torch_dtype).*"
)
"""What a program prints, as against how a user describes it."""


@dataclass(frozen=True)
class Case:
    """One report: who, what was shown, with which facts, and its class."""

    report: str
    fault: str
    shown: str
    facts: str


def read_cases() -> list[Case]:
    """The reports, with the facts beside the message as lines of text."""
    entries = tomllib.loads((CASES / "failures.toml").read_text(encoding="utf-8"))["case"]
    return [Case(e["report"], e["fault"], e["shown"], _write_facts(e)) for e in entries]


def _write_facts(entry: dict[str, str]) -> str:
    return "\n".join(f"{name}: {entry[name]}" for name in ("model", "hardware", "formats"))


def read_unrelated() -> list[str]:
    """Messages that are no failure of precision."""
    messages: list[str] = tomllib.loads((CASES / "unrelated.toml").read_text())["messages"]
    return messages


def collect_messages(cases: list[Case]) -> dict[str, set[str]]:
    """Each distinct message of a program, with the classes of the reports that show it."""
    found: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        match = MESSAGE.search(case.shown)
        if match:
            found[match[0].strip()].add(case.fault)
    return dict(found)


def list_answers(text: str) -> list[str]:
    """The class that is answered, then the alternatives that are named."""
    diagnosis = explain(text)
    return [diagnosis.fault, *(other.fault for other in diagnosis.alternatives)]


def grade(answers: list[str], faults: set[str]) -> str:
    """`hit` when the answer is one of the classes, `named` when all stand among what is named."""
    if answers[0] in faults:
        return "hit"
    return "named" if faults <= set(answers) else "miss"


def grade_report(case: Case, answers: list[str]) -> str:
    """As `grade`; a report without any message or sign that is answered with `unknown` shows nothing."""
    if not case.shown.strip() and answers[0] == UNKNOWN:
        return "shows nothing"
    return grade(answers, {case.fault})


def print_messages(cases: list[Case]) -> None:
    """The table of messages alone."""
    print("## Messages alone\n\n| message | reported as | answered | grade |\n|---|---|---|---|")
    for message, faults in collect_messages(cases).items():
        answers = list_answers(message)
        print(
            f"| `{message[:90]}` | {', '.join(sorted(faults))} | {answers[0]} | {grade(answers, faults)} |"
        )


def print_reports(cases: list[Case]) -> None:
    """The table of reports with their facts."""
    rows = [(case, list_answers(f"{case.shown}\n{case.facts}")) for case in cases]
    grades = [grade_report(case, answers) for case, answers in rows]
    print(f"\n## Reports with their facts\n\n{len(rows)} reports: ", end="")
    words = ("hit", "named", "miss", "shows nothing")
    print(", ".join(f"{grades.count(word)} {word}" for word in words) + ".\n")
    print(
        "*shows nothing*: the report names a model and a device and no message or sign, so there is"
    )
    print("nothing to explain, and `unknown` is the right answer.\n")
    print("| report | class | answered | grade |\n|---|---|---|---|")
    for (case, answers), word in zip(rows, grades, strict=True):
        print(f"| {case.report} | {case.fault} | {answers[0]} | {word} |")


def print_libraries() -> None:
    """The table of what the installed libraries say about precision, and of false alarms."""
    print("\n## What the libraries themselves say\n")
    print(
        "Every message that the installed packages raise, warn or log. *ours* name a format, NaN or Inf;"
    )
    print("some of those are about training or about the arguments of a call, and are left alone.")
    print("*false alarms* are messages of another kind that get an answer other than `unknown`.\n")
    print("| package | messages | ours | recognised | false alarms |\n|---|--:|--:|--:|--:|")
    answered = {
        name: [(m, list_answers(m.text)[0]) for m in find_messages(name)] for name in PACKAGES
    }
    for name, rows in answered.items():
        ours = [fault for message, fault in rows if message.is_ours]
        others = [fault for message, fault in rows if not message.is_ours]
        known, alarms = (sum(fault != UNKNOWN for fault in group) for group in (ours, others))
        print(f"| {name} {version(name)} | {len(rows)} | {len(ours)} | {known} | {alarms} |")
    print("\n| message | from | answered |\n|---|---|---|")
    for message, fault in (row for rows in answered.values() for row in rows):
        if message.is_ours or fault != UNKNOWN:
            print(f"| `{re.sub('[`|]', '', message.text)[:80]}` | {message.place} | {fault} |")


def print_lookups() -> None:
    """How many of the reports that an answer names were looked up, and which were not."""
    seen = set(tomllib.loads((CASES / "lookups.toml").read_text(encoding="utf-8"))["says"])
    named = {report for cause in read_knowledge().causes for report in cause.reports}
    print("\n## Reports that an answer names\n")
    print(
        f"{len(named)} reports, {len(named & seen)} of them looked up: the thread exists and says what"
    )
    print(
        "`benchmarks/cases/lookups.toml` has of it. Not looked up, and taken from our collection:\n"
    )
    print(", ".join(sorted(named - seen)) + ".")


def print_families() -> None:
    """The table of texts of our own: how many of each family get one of its answers."""
    families = tomllib.loads((CASES / "families.toml").read_text(encoding="utf-8"))["family"]
    print("\n## Texts of our own for each family\n")
    print("| family | answers that are right | texts | right |\n|---|---|--:|--:|")
    for family in families:
        found = [explain(text) for text in family["texts"]]
        cause = family.get("cause", "")
        right = [x for x in found if x.fault in family["faults"] and cause in ("", x.cause)]
        print(
            f"| {family['name']} | {cause or ', '.join(family['faults'])} | {len(found)} | {len(right)} |"
        )


@dataclass(frozen=True)
class Report:
    """A whole report: where it is from, its text, the facts beside it, and what the right answer is."""

    source: str
    text: str
    facts: str
    expected: str
    classes: frozenset[str]


def read_report(entry: dict[str, Any], known: Iterable[str]) -> Report:
    """Read a report of either form; `known` are the classes that a sentence may name."""
    if "expected_class" in entry:
        expected = entry["expected_class"]
        classes = frozenset(expected.split(" (")[0].split(" / "))
    else:
        expected = entry["expected"]
        words = set(re.findall(r"[a-z0-9-]+", expected))
        classes = frozenset(name for name in known if name in words and name != "memory")
    source = entry.get("source") or f"{entry['repo']}#{entry['number']}"
    text = entry["text"].removeprefix("(prose)").strip()
    facts = "\n".join((entry.get("title", ""), text, entry["device"], entry["model"]))
    return Report(source, text, facts, expected, classes)


def grade_reports(entries: list[dict[str, Any]]) -> None:
    """How many reports get the class that is expected, with their facts and by their text alone."""
    known = read_knowledge().faults
    reports = [read_report(entry, known) for entry in entries]
    graded = [report for report in reports if report.classes]
    for way, name in (("with its facts", "facts"), ("its text alone", "text")):
        right = 0
        for report in graded:
            answers = list_answers(getattr(report, name))
            if answers[0] in report.classes:
                right += 1
            else:
                said = ", ".join(answers[:3])
                print(f"{report.source}, {way}: {report.expected}; answered {said}")
        if graded:
            print(f"{way}: {right} of {len(graded)} right, {right / len(graded):.0%}")
    for report in (x for x in reports if not x.classes):
        print(f"\n{report.source}, to be judged by a reader\n  text: {report.text}")
        print(f"  expected: {report.expected}")
        for way, text in (("with its facts", report.facts), ("its text alone", report.text)):
            found = explain(text)
            print(f"  {way}: {found.fault}: {found.title}\n    -> {found.remedy[0]}")


def print_own_reports() -> None:
    """The counts of whole reports that were written in the style of 2025 and 2026."""
    reports = json.loads((CASES / "own_reports.json").read_text(encoding="utf-8"))
    print("\n## Whole reports of our own\n\nWith title, card and model. The first set changed the")
    print("knowledge; the second was asked after that, and the third was written after that. Once")
    print("asked, they changed the knowledge as well: the log has the first tries.\n")
    for name in ("first", "second", "third"):
        print(f"Set *{name}*:\n\n```")
        grade_reports([report for report in reports if report["set"] == name])
        print("```\n")


def find_mistakes(case: dict[str, Any]) -> list[str]:
    """What an answer to a message of 2026 gets wrong: its class, its first line, what it may not say."""
    found = explain(case["text"])
    said = "\n".join((found.title, found.why, *found.remedy, *found.run_next))
    mistakes = [] if found.fault in case["faults"] else [f"class {found.fault}"]
    if not re.search(case.get("first", ""), found.remedy[0]):
        mistakes.append(f"first line {found.remedy[0]}")
    if "never" in case and (match := re.search(case["never"], said)):
        mistakes.append(f"it says {match[0]}")
    if list(found.run) != case.get("run", list(found.run)):
        mistakes.append(f"the run {', '.join(found.run)}")
    return mistakes


def print_messages_2026() -> None:
    """How many messages of 2026 are answered rightly in class, first line and run, and which are not."""
    cases = tomllib.loads((CASES / "messages_2026.toml").read_text(encoding="utf-8"))["message"]
    wrong = [(case["text"], found) for case in cases if (found := find_mistakes(case))]
    print(
        "\n## Messages of 2026\n\nThe class is right, the first line is the fix, the run is that of the"
    )
    print(f"text, and nothing wrong is said: {len(cases) - len(wrong)} of {len(cases)}.")
    for text, found in wrong:
        print(f"- `{text[:90]}`: {'; '.join(found)}".replace("\n", " "))


def print_unrelated() -> None:
    """The table of what is not ours."""
    print("\n## Messages that are no failure of precision\n\n| message | answered |\n|---|---|")
    for message in read_unrelated():
        print(f"| `{message.splitlines()[-1][:90]}` | {list_answers(message)[0]} |")
    known = sum(list_answers(message)[0] != UNKNOWN for message in read_unrelated())
    print(f"\n{len(read_unrelated())} messages, {known} of them taken for ours.")


def main() -> None:
    """Write all tables as Markdown, and what they come from beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reports", type=Path, help="a file of reports to ask; nothing is stored")
    options = parser.parse_args()
    if options.reports:
        grade_reports(json.loads(options.reports.read_text(encoding="utf-8")))
        return
    cases, text = read_cases(), io.StringIO()
    with contextlib.redirect_stdout(text):
        print_tables(cases)
    (RESULTS / "explain.md").write_text(text.getvalue(), encoding="utf-8")
    known = {
        "command": "python benchmarks/explain.py",
        "machine": describe_machine(),
        "reports": len(cases),
    }
    (RESULTS / "explain.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def print_tables(cases: list[Case]) -> None:
    """Print them all."""
    print("# What `stopdown explain` answers\n")
    print(
        "*hit*: the answer is the class of the report (of one of them, where several reports show one"
    )
    print(
        "message). *named*: it stands among the alternatives. The knowledge was written from these very"
    )
    print("reports, so this shows that it holds them, and not how well it does on others.\n")
    print_messages(cases)
    print_reports(cases)
    print_families()
    print_own_reports()
    print_messages_2026()
    print_libraries()
    print_lookups()
    print_unrelated()


if __name__ == "__main__":
    main()

"""How many reported failures `stopdown explain` sorts into the class that they were sorted into by hand.

    python benchmarks/explain.py > benchmarks/results/explain.md

Three questions, each a table: every distinct message alone; every report with the facts it names, as
someone pastes them; and messages that have nothing to do with precision.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from stopdown.diagnosis import UNKNOWN, explain

CASES = Path(__file__).parent / "cases"

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
    grades = [grade(answers, {case.fault}) for case, answers in rows]
    print(f"\n## Reports with their facts\n\n{len(rows)} reports: ", end="")
    print(", ".join(f"{grades.count(word)} {word}" for word in ("hit", "named", "miss")) + ".\n")
    print("| report | class | answered | grade |\n|---|---|---|---|")
    for (case, answers), word in zip(rows, grades, strict=True):
        print(f"| {case.report} | {case.fault} | {answers[0]} | {word} |")


def print_unrelated() -> None:
    """The table of what is not ours."""
    print("\n## Messages that are no failure of precision\n\n| message | answered |\n|---|---|")
    for message in read_unrelated():
        print(f"| `{message[:90]}` | {list_answers(message)[0]} |")
    known = sum(list_answers(message)[0] != UNKNOWN for message in read_unrelated())
    print(f"\n{len(read_unrelated())} messages, {known} of them taken for ours.")


def main() -> None:
    """Print all tables as Markdown."""
    print("# What `stopdown explain` answers\n\n`python benchmarks/explain.py`\n")
    print(
        "*hit*: the answer is the class of the report (of one of them, where several reports show one"
    )
    print(
        "message). *named*: it stands among the alternatives. The knowledge was written from these very"
    )
    print("reports, so this shows that it holds them, and not how well it does on others.\n")
    cases = read_cases()
    print_messages(cases)
    print_reports(cases)
    print_unrelated()


if __name__ == "__main__":
    main()

"""Which code a benchmark ran, for results that are stored beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def describe_code() -> str:
    """The last commit of the package, with its date, and whether the package was changed since."""
    changed = " with changes" if _git("status", "--porcelain") else ""
    return _git("log", "-1", "--format=%h of %cs").strip() + changed


def _git(*words: str) -> str:
    command = ["git", *words, "--", "src"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout

"""What Diffusers, Transformers, Accelerate and PEFT themselves say about precision, read from their code.

Each string that is raised, warned or logged is read, and counts as one about precision where it names a
format, NaN or Inf itself; what is filled in at run time becomes a word that could stand there. The tables
show the messages of whatever versions are installed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("diffusers", "transformers", "accelerate", "peft")

ABOUT_PRECISION = re.compile(
    r"\b(?:fp16|bf16|fp32|fp8|float16|bfloat16|float32|float64|float8|half[ -]precision|mixed[ -]precision"
    r"|dtype|NaN|nan|inf|upcast\w*|autocast)\b",
    re.IGNORECASE,
)

SAID = {"warning", "warning_once", "warn", "warn_once", "error", "deprecate"}
"""Names of functions that say something to a user."""

HOLE = "\0"
"""What stands for a value that is filled in at run time, until it is replaced."""


@dataclass(frozen=True)
class Message:
    """What a library says, where it stands (`file.py:12`), and whether it is about precision."""

    text: str
    place: str
    is_ours: bool


def find_messages(package: str) -> list[Message]:
    """Each distinct message of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])
    found: dict[str, Message] = {}
    for path in sorted(root.rglob("*.py")):
        for line, text in _read_said(ast.parse(path.read_text(encoding="utf-8"))):
            message = _make_message(text, f"{package}/{path.relative_to(root)}:{line}")
            if len(message.text) > 25:
                found.setdefault(message.text, message)
    return list(found.values())


def _make_message(text: str, place: str) -> Message:
    words = " ".join(text.split())
    is_ours = ABOUT_PRECISION.search(words.replace(HOLE, "")) is not None
    return Message(words.replace(HOLE, "torch.float16" if is_ours else "something"), place, is_ours)


def _read_said(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of what a module raises, warns and logs."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if isinstance(node, ast.Raise) or name in SAID:
            yield from ((call.lineno, text) for arg in call.args[:3] if (text := _read(arg)))


def _read(node: ast.AST) -> str:
    """The text of a literal, of an f-string, or of a sum of them; "" of anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_read(part) or HOLE for part in node.values)
    if isinstance(node, ast.BinOp):
        return _read(node.left) + (_read(node.right) if isinstance(node.op, ast.Add) else "")
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "format":
        return re.sub(r"\{[^}]*\}", HOLE, _read(node.func.value))  # type: ignore[attr-defined]
    return ""

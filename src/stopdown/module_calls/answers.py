"""Values that a call's code reads from its tensors, as part of its signature."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any


def add_answers(signature: str, answers: Iterable[tuple[str, Any]]) -> str:
    """Add the answers to a call's questions to its signature: `forward(x[2d], reads 4)`.

    Long answers are hashed. Answers to tests for NaN and Inf are left out.
    """
    words = " ".join(str(x) for question, x in answers if not question.endswith(OF_TEST))
    if not words:
        return signature
    words = words if len(words) <= MOST_WORDS else hashlib.sha256(words.encode()).hexdigest()[:16]
    start, _, rest = signature.removesuffix(")").partition("(")
    return f"{start}({', '.join(filter(None, (rest, f'reads {words}')))})"


def strip_answers(signature: str) -> str:
    """Remove the answers that `add_answers` added to a signature."""
    return _READS.sub(")", signature)


def reads_values(signature: str) -> bool:
    """Return whether the code asked tensors for values in calls of a signature."""
    return strip_answers(signature) != signature


OF_TEST = " of a test"
MOST_WORDS = 60
_READS = re.compile(r"(, |(?<=\())reads [^,\]]*\)$")

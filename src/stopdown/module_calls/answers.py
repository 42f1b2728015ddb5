"""Put the tensor values that a call's Python code reads, and may branch on, into the call's signature."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any


def add_answers(signature: str, answers: Iterable[tuple[str, Any]]) -> str:
    """Add the tensor values that a call's code has read to its signature: `forward(x[2d], reads 4)`.

    A long list of values is hashed. Results of tests for NaN and Inf are left out.

    Args:
        answers: pairs of the operation that read a value (such as `item`) and the value.
    """
    words = " ".join(str(x) for question, x in answers if not question.endswith(OF_TEST))
    if not words:
        return signature
    words = words if len(words) <= MOST_WORDS else hashlib.sha256(words.encode()).hexdigest()[:16]
    start, _, rest = signature.removesuffix(")").partition("(")
    return f"{start}({', '.join(filter(None, (rest, f'reads {words}')))})"


def strip_answers(signature: str) -> str:
    """Remove the read values that `add_answers` added to a signature."""
    return _READS.sub(")", signature)


def reads_values(signature: str) -> bool:
    """Return whether a call's signature, as text, contains tensor values that its code has read."""
    return strip_answers(signature) != signature


OF_TEST = " of a test"
MOST_WORDS = 60
_READS = re.compile(r"(, |(?<=\())reads [^,\]]*\)$")

"""What every rank but the first has in place of a journal: it goes by what the first one reads."""

from __future__ import annotations

from typing import Any

from stopdown.component_calls.call import ComponentCall
from stopdown.runtime.consensus import Consensus
from stopdown.runtime.journal import Answer, CallAnswers, find_device, find_sources, give
from stopdown.runtime.journal_values import move_structure, unpack


class Follower(CallAnswers):
    """Answers to component calls as rank 0 has them in its journal."""

    def __init__(self, ranks: Consensus) -> None:
        self._ranks = ranks

    def answer(self, call: ComponentCall) -> Any:
        """Return what rank 0 reads for a call, or make the call if rank 0 makes it."""
        told = self._ranks.share(None)
        if told is None:
            return call.proceed()
        structure, tensors, random, repaired = told
        output = unpack(move_structure(structure, find_device(call.callee)), tensors)
        return give(Answer(output, random, repaired), call, find_sources(call))

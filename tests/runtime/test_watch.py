"""The two listeners around each call: what is told of outputs that can't be looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models.returning_modules import Returning, X
from stopdown.errors import NonFiniteError
from stopdown.runtime.guard import Guard, guard
from stopdown.runtime.session import GuardOptions
from stopdown.runtime.watch import _word_choice


def yield_rows(x: torch.Tensor) -> Any:
    """Rows, made one by one later."""
    yield from x


@pytest.mark.parametrize(
    "form",
    [yield_rows, lambda x: lambda: x, lambda x: x.to_sparse()],
    ids=["generator", "function", "sparse"],
)
def test_what_cannot_be_looked_at_is_reported(form: Callable[[torch.Tensor], Any]) -> None:
    """A generator, a function and a sparse tensor: said once, and in the record."""
    module, said = Returning(form).half(), list[str]()
    with guard(module, announce=said.append) as handle:
        for _ in range(2):
            module(X.half())
    assert len(said) == 1
    assert "whose values can't be looked at: NaN and Inf in it aren't found." in said[0]
    assert handle.record.unwatched == tuple(said)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            "You asked for fp16-plain. It is emulated.",
            "`unet` ran in fp16 because you asked for fp16-plain. It is emulated.",
        ),
        ("fits in memory", 'fp16 was chosen for `unet`: "fits in memory"'),
    ],
)
def test_a_fault_tells_who_chose_the_precision(reason: str, said: str) -> None:
    """The user by an option, or a decision with its reason."""
    assert _word_choice("unet", "fp16", reason) == said


def test_a_call_without_steps_has_a_number() -> None:
    """A fault of the second call of a plain module is at call 2, and counts on from earlier guards."""
    torch.manual_seed(0)
    module = nn.Linear(16, 16).half().requires_grad_(False)
    for before, place in ((0, "at call 2"), (5, "at call 7")):
        options = GuardOptions(on_fault="raise", calls_before=before)
        with Guard(module, options).put_on() as handle:
            module(X.half())
            module.weight.data[0, 0] = torch.inf
            with pytest.raises(NonFiniteError, match=place):
                module(X.half())
            module.weight.data[0, 0] = 0.0
        assert handle.record.calls[0].calls == 2


def test_an_observer_hears_each_call_with_its_steps() -> None:
    """Component, stage, and steps; 0 where nobody counts them."""
    heard = list[tuple[str, str, int, int]]()
    module = nn.Linear(16, 16).half().requires_grad_(False)
    options = GuardOptions(observer=lambda *said: heard.append(said))
    with Guard(module, options).put_on():
        module(X.half())
        module(X.half())
    assert len(heard) == 2
    assert heard[0] == heard[1]
    assert heard[0][0] == "Linear"
    assert heard[0][3] == 0

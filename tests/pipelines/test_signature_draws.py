"""Drawn calls with optional arguments under plans and repairs: none is wrong in silence."""

from __future__ import annotations

import pytest

from models.signature_cases import MODELS, fuzz, make_case, run_table

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:In CPU autocast"),  # Mochi's own autocast in fp32
]

QUICK = ("T5 gated",)


@pytest.mark.parametrize("name", QUICK)
def test_thirty_drawn_calls(name: str) -> None:
    """Other arguments, batches, values and dtypes: nearer to fp32 than bf16 is, or refused."""
    counts, wrong = fuzz(name, 30)
    assert not wrong
    assert counts["right"] >= 24


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_thousand_drawn_calls(name: str) -> None:
    """The same, 2,000 over all models."""
    assert make_case(name) is not None
    _, wrong = fuzz(name, 2000 // len(MODELS) + 1, seed=1)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_argument_by_itself(name: str) -> None:
    """A table of each optional argument in a plan, as a repair and as both."""
    rows = run_table(name)
    assert rows is not None
    assert not [option for option, row in rows.items() if "wrong" in row]

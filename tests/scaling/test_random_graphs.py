"""Modules drawn at random from the table of operations: exact, finite, no worse than bf16, or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from models.drawn_graphs import judge


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def demand_right(seed: int, most: int) -> None:
    """Fail with what was wrong, and with what draws the same module again."""
    found = judge(seed, most)
    assert found.is_right, f"judge({seed}, {most}): {found}"


FEW = 16
"""Modules of the default run; the slow one draws 5,000."""


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("seed", range(FEW))
def test_a_small_module_is_rescaled_or_refused(seed: int) -> None:
    """Of one or two steps: every bit in fp32, for other inputs too; in fp16 bf16's error or less."""
    demand_right(seed, 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 5000, 100))
def test_any_module_is_rescaled_or_refused(first: int) -> None:
    """The same of up to four steps, 5,000 of them: `benchmarks/random_graphs.py` counts how they end."""
    for seed in range(first, first + 100):
        demand_right(seed, 4)

"""Exponents of an adapter's matrices: their product has those of the weight that it is added to."""

from __future__ import annotations

import pytest
import torch

from stopdown.adapter_exponents import find_part_exponents
from stopdown.errors import ScalingError

ROWS = torch.tensor([-3, -3, 5, 0], dtype=torch.int32)
COLUMNS = torch.tensor([0, 2, 0, -4, 1], dtype=torch.int32)


def draw(size: float = 1.0) -> dict[str, torch.Tensor]:
    """A LoRA of rank 2 for a weight of 4 rows and 5 columns."""
    made = torch.Generator().manual_seed(3)
    down, up = torch.randn(2, 5, generator=made), torch.randn(4, 2, generator=made)
    return {"lora_A": down, "lora_B": up * size}


@pytest.mark.parametrize("columns", [None, COLUMNS])
@pytest.mark.parametrize("size", [1.0, 2.0**-12])
def test_the_product_of_a_lora_is_scaled_as_its_weight(size: float, columns: torch.Tensor) -> None:
    """Bit for bit, also where A takes a share of the exponents since B is small."""
    parts = draw(size)
    found = find_part_exponents(parts, ROWS, None, columns)
    scaled = {role: torch.ldexp(x, found.get(role, torch.zeros(1))) for role, x in parts.items()}
    wanted = torch.ldexp(parts["lora_B"] @ parts["lora_A"], ROWS[:, None])
    if columns is not None:
        wanted = torch.ldexp(wanted, columns)
    assert torch.equal(scaled["lora_B"] @ scaled["lora_A"], wanted)
    assert ("lora_A" in found) is (columns is not None or size < 1)


def test_magnitudes_and_biases_have_the_exponents_of_their_rows() -> None:
    """A DoRA's magnitude has that of the weight's row, a bias that of the layer's bias."""
    parts = {**draw(), "magnitude": torch.ones(4), "lora_B.bias": torch.ones(4)}
    found = find_part_exponents(parts, ROWS, ROWS + 1)
    assert found["magnitude"].tolist() == ROWS.tolist()
    assert found["lora_B.bias"].tolist() == (ROWS + 1).tolist()
    assert find_part_exponents(parts, ROWS * 0, ROWS * 0) == {}


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        (
            {"hada_w1_a": torch.ones(4, 2)},
            "neither a LoRA nor a DoRA, and there is no rule for hada",
        ),
        ({"lora_A": torch.ones(2, 5)}, "it has lora_A and not both matrices"),
        ({**draw(), "lora_B.bias": torch.ones(4)}, "it adds a bias to a layer without one"),
        ({"diff": torch.ones(3, 5)}, "a tensor of it is 3x5, and 4 rows have several exponents"),
        ({**draw(), "magnitude": torch.ones(5)}, "its magnitudes belong to columns"),
        ({**draw(), "magnitude": torch.ones(1, 4)}, "its magnitudes belong to columns"),
    ],
)
def test_an_adapter_without_a_rule_is_refused(parts: dict[str, torch.Tensor], what: str) -> None:
    """The error names what there is no rule for."""
    with pytest.raises(ScalingError, match=what):
        find_part_exponents(parts, ROWS, None)


def test_a_dora_on_columns_with_exponents_is_refused() -> None:
    """Its norm is over a row, which then has several."""
    with pytest.raises(ScalingError, match="there is no rule for magnitude then"):
        find_part_exponents({**draw(), "magnitude": torch.ones(4)}, ROWS, None, COLUMNS)

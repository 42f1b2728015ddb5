"""Captured calls as rules of the checker: weights by the names of files, and what no rule fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stopdown_verify
from models.certified_nets import certify_call
from stopdown.fold_names import name_parameters
from stopdown.scaling.certificate_graphs import export_graphs
from stopdown.scaling.graph.capture import capture_call
from stopdown.scaling_records import Scaling


class Block(nn.Module):
    """Two products whose weights are tied, around a function without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down(torch.special.bessel_j0(self.up(hidden_states)))


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    """The rules of a block in which `up.weight` is in fp32, with exponents for half of its rows."""
    torch.manual_seed(0)
    module, x = Block().requires_grad_(False), torch.randn(1, 2, 4)
    save_file({"up.weight": module.up.weight}, tmp_path / "a.safetensors")
    tensors = stopdown_verify.open_weights(tmp_path, ["a.safetensors"], {})
    scaling = Scaling(exponents={"down.weight[0:2]": -3}, fp32_modules=("up",))
    captured = [(capture_call(module, (x,), dtype=torch.float16), (x,), {})]
    tied = dict.fromkeys(("up.weight", "down.weight"), ("up.weight", "down.weight"))
    return export_graphs(module, scaling, captured, tensors, tied, name_parameters(module).get)  # type: ignore[arg-type]


def test_a_tied_weight_is_named_as_in_its_file(made: dict[str, Any]) -> None:
    """Exponents of any of its names are its own, and it is in fp32 if one of them is."""
    assert made["weights"] == {"up.weight": {"exponents": [[0, 0, 2, -3]], "wide": True}}
    (graph,) = made["graphs"]
    products = [n for n in graph["nodes"] if n["rule"] == "product"]
    assert [n["weight"] for n in products] == ["up.weight", "up.weight"]


def test_an_operation_without_a_rule_is_unknown(made: dict[str, Any]) -> None:
    """It is there by its place, and what follows rests on it."""
    (graph,) = made["graphs"]
    assert [n["rule"] for n in graph["nodes"]] == ["input", "product", "unknown", "product"]
    assert graph["outputs"] == [[graph["nodes"][-1]["id"], 0]]


class Mixed(nn.Module):
    """Values that fp16 doesn't hold unscaled, mixed with others of their scale."""

    def __init__(self, mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mix, self.up, self.norm = mix, nn.Linear(4, 4), nn.LayerNorm(4)
        self.up.weight.data.mul_(2.0**18)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        large = self.up(hidden_states)
        return self.norm(large + self.mix(large))


@pytest.mark.parametrize(
    ("mix", "covers"),
    [
        (lambda large: torch.fill(large, large.amax()), True),
        (lambda large: large.scatter(1, torch.zeros_like(large, dtype=torch.long), large), False),
        (lambda large: large.norm(dim=-1, keepdim=True), False),
        (lambda large: 0 * torch.full_like(large, large.reshape(-1).nonzero().shape[0]), True),
    ],
    ids=["fill", "scatter", "norm", "size"],
)
def test_what_is_scaled_as_its_inputs_is_written(
    mix: Callable[[torch.Tensor], torch.Tensor], covers: bool, tmp_path: Path
) -> None:
    """The checker takes exponents of all that is mixed, and has bounds where there is a rule."""
    torch.manual_seed(0)
    module = Mixed(mix).eval().requires_grad_(False)
    made = certify_call(module, [(module, (torch.randn(1, 2, 4),), {})], tmp_path)
    (stated,) = made["components"]
    assert any(n["exponents"] != [0] for n in stated["graphs"][0]["nodes"])
    assert (stated["uncovered"] == []) == covers

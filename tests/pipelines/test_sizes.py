"""Calls of other sizes than those that exponents were found for: what is folded is read as it was."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.rescaling_models import WAYS, scale_weights
from models.size_cases import CASES, WITHOUT_BRANCHES
from stopdown.numerics import iterate_tensors
from stopdown.scaling.folding.folds import fold_scaling
from stopdown.scaling.graph.capture import read_call
from stopdown.scaling.rescale import rescale_

QUICK = ("CogVideoX learned, as configured", "CogVideoX learned, otherwise")


def run(module: nn.Module, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(iterate_tensors(module(**copy.deepcopy(kwargs))))


def count_branches(module: nn.Module, calls: list[dict[str, Any]]) -> int:
    """How many ways of reading what the module holds the calls take; 0 where values are asked for."""
    found = [read_call(module, (), x, torch.float32) for x in calls]
    assert len({x is None for x in found}) == 1
    return 0 if found[0] is None else len({*found})


@pytest.mark.filterwarnings("ignore:.*CPU autocast")
@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_every_branch_that_sizes_take_is_right(name: str) -> None:
    """In fp32 every bit is what it was, under the watch and, as in a converted folder, without it."""
    case = CASES[name]
    module, calls = case.make(), [case.kwargs(*sizes) for sizes in case.sizes]
    assert scale_weights(module, WAYS["residual"], 14)
    assert count_branches(module, calls) == case.branches
    wanted = [run(copy.deepcopy(module), x) for x in calls]
    plain = copy.deepcopy(module)
    rescaling = rescale_(module, (), calls[0])
    assert any(rescaling.scaling.exponents.values())
    fold_scaling(plain, rescaling.scaling)
    for tried in (module, plain):
        for kwargs, right in zip(calls, wanted, strict=True):
            assert all(map(torch.equal, run(tried, kwargs), right))


def test_a_table_that_a_call_does_not_read_keeps_its_values() -> None:
    """Beyond fp16 with headroom, and not read at this number of frames: another number reads it."""
    case = CASES["CogVideoX learned, otherwise"]
    module, calls = case.make(), [case.kwargs(*sizes) for sizes in case.sizes]
    assert scale_weights(module, WAYS["residual"], 14)
    patch_embed: Any = module.patch_embed
    patch_embed.pos_embedding.fill_(2.0**17)
    wanted = [run(module, x) for x in calls]
    rescaling = rescale_(module, (), calls[0], ranges="bound")
    assert not any("pos_embedding" in name for name in rescaling.scaling.exponents)
    for kwargs, right in zip(calls, wanted, strict=True):
        assert all(map(torch.equal, run(module, kwargs), right))


POSITIONS = re.compile(r"pos(ition(al)?)?(_|$)|_pos|^pe$|^(height|width)_emb$", re.IGNORECASE)


def list_holders(source: str) -> set[str]:
    """Names of the classes in a module's text that register a table of positions, by the tables' names."""
    found = set[str]()
    for kind in ast.walk(ast.parse(source)):
        for node in ast.walk(kind) if isinstance(kind, ast.ClassDef) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "register_buffer":
                names = [getattr(x, "value", "") for x in node.args[:1]]
            elif (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and getattr(node.value.func, "attr", "") in ("Parameter", "Embedding")
            ):
                names = [getattr(x, "attr", "") for x in node.targets]
            else:
                continue
            if any(POSITIONS.search(str(name)) for name in names):
                found.add(kind.name)  # type: ignore[attr-defined]
    return found


def test_a_holder_of_a_table_is_found() -> None:
    """A parameter, an embedding or a buffer by its name; other tensors are none."""
    text = """
class Learned(nn.Module):
    def __init__(self):
        self.pos_embed = nn.Parameter(torch.zeros(1))
class Looked(nn.Module):
    def __init__(self):
        self.position_encoding = nn.Embedding(4, 4)
class Sines(nn.Module):
    def __init__(self):
        self.register_buffer("pos_embedding", make())
class Plain(nn.Module):
    def __init__(self):
        self.weight = nn.Parameter(torch.zeros(1))
        self.pos_embed = PatchEmbed()
"""
    assert list_holders(text) == {"Learned", "Looked", "Sines"}


@pytest.mark.thorough
def test_each_class_with_a_table_of_positions_is_called_in_its_sizes() -> None:
    """Whatever of Diffusers' models holds such a table is in a case, or reads it alike at all sizes."""
    import diffusers

    folder = Path(diffusers.__file__).parent / "models"
    texts = [x.read_text(encoding="utf-8") for x in folder.rglob("*.py")]
    holders = set().union(*map(list_holders, texts))
    called = {type(x).__name__ for case in CASES.values() for x in case.build().modules()}
    assert {"PatchEmbed", "CogVideoXPatchEmbed"} <= holders & called
    assert sorted(holders - called) == sorted(WITHOUT_BRANCHES)

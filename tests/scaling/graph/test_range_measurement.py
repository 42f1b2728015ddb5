"""Magnitudes of a captured call in fp32, merged over calls, and values that a mask or a `tanh` explains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.errors import ScalingError
from stopdown.scaling.graph.capture import Capture, capture_call
from stopdown.scaling.graph.range_measurement import (
    Range,
    find_masked,
    find_saturating,
    find_sentinels,
    log2_of,
    merge_ranges,
    run_capture,
)


def capture(module: nn.Module, *args: torch.Tensor) -> Capture:
    """Capture a call of a module in eval mode, in fp16."""
    module.eval().requires_grad_(False)
    return capture_call(module, tuple(x.half() for x in args), {}, dtype=torch.float16)


def test_ranges_are_those_of_fp32() -> None:
    """Each value and weight has its largest, typical and least magnitude, beyond fp16's maximum as well."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), torch.randn(3, 4)
    x[0, 0] = 0.0
    module[0].weight.data.mul_(2.0**20)
    found = capture(module, x)
    ranges, (output,) = run_capture(found, module, (x,), {}, {})
    inner = module[0](x)
    names = {name: node for node, name in found.parameters.items()}
    linears = [node.name for node in found.graph.graph.nodes if node.name.startswith("linear")]
    for node, value in (
        (found.inputs[0], x),
        (names["0.weight"], module[0].weight),
        (linears[0], inner),
        (linears[1], module[1](inner)),
    ):
        (part,) = ranges[str(node)]
        assert part.amax == pytest.approx(value.abs().max().item())
        assert part.rms == pytest.approx(value.square().mean().sqrt().item())
        assert part.least == pytest.approx(value[value != 0].abs().min().item())
        assert (part.certain, part.largest) == (False, math.inf)
    assert ranges[linears[0]][0].amax > 65504
    torch.testing.assert_close(output.float(), module(x))


def test_weights_of_an_earlier_call_are_not_measured_again() -> None:
    """Their known ranges are taken as they are; those of values are measured."""
    module, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    found = capture(module, x)
    first, _ = run_capture(found, module, (x,), {}, {})
    weight = next(node for node, name in found.parameters.items() if name == "0.weight")
    known = {**first, weight: (Range(1234.0, 1.0, 0.5),)}
    again, _ = run_capture(found, module, (x * 2,), {}, {}, known=known)
    assert again[weight] == known[weight]
    assert again[str(found.inputs[0])][0].amax == pytest.approx(2 * x.abs().max().item())


@pytest.mark.parametrize("place", ["input", "weight"])
def test_what_is_not_finite_has_no_range(place: str) -> None:
    """NaN in an input or a weight is refused, and so is another number of tensors."""
    module, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    found = capture(module, x)
    (x if place == "input" else module[0].weight.data)[0, 0] = math.nan
    with pytest.raises(ScalingError, match="NaN"):
        run_capture(found, module, (x,), {}, {})
    with pytest.raises(
        ScalingError, match="2 tensors were given to a call that was captured with 1"
    ):
        run_capture(found, module, (x, x), {}, {})


def test_a_merged_range_covers_both() -> None:
    """The largest of both, the smaller positive typical size, and a bound only where both have one."""
    one, other = (
        Range(3.0, 1.0, 0.5, certain=True, bound=4.0),
        Range(5.0, 0.0, 0.25, least_stored=0.1),
    )
    merged = one.merged(other)
    assert merged == other.merged(one)
    assert merged == Range(5.0, 1.0, 0.25, least_stored=0.1)
    assert one.merged(Range(0.0, 0.0, 0.0, certain=True)).certain


def test_ranges_of_two_calls_are_merged_block_by_block() -> None:
    """Values of both calls are merged, and those of the second alone stay."""
    small, large = Range(1.0, 1.0, 1.0), Range(2.0, 2.0, 2.0)
    first, second = {"a": (small, large)}, {"a": (large, small), "b": (small,)}
    assert merge_ranges(first, second) == {
        "a": (small.merged(large), large.merged(small)),
        "b": (small,),
    }


def test_sentinels_of_masks_are_found() -> None:
    """-Inf and the lowest number of each format are sentinels; large numbers and ids are none."""
    lowest = [torch.finfo(x).min for x in (torch.float16, torch.bfloat16, torch.float32)]
    constant = torch.tensor([0.0, -65000.0, 65504.0, -math.inf, *lowest])
    assert find_sentinels(constant).tolist() == [False] * 3 + [True] * 4
    assert find_sentinels(torch.arange(3)).numel() == find_sentinels(None).numel() == 0


class Filled(nn.Module):
    """Scores that a mask hides, and values beside them."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = x.masked_fill(mask > 0, torch.finfo(torch.float16).min)
        return scores.softmax(-1) * x.exp()


def test_what_holds_a_masks_fill_is_masked() -> None:
    """The filled scores are, up to the softmax; other values aren't."""
    found = capture(Filled(), torch.randn(2, 4), torch.zeros(2, 4))
    names = {node.name for node in find_masked(found)}
    assert any(name.startswith("masked_fill") for name in names)
    assert not any(name.startswith(("softmax", "exp", "_softmax", "mul")) for name in names)


class Cubed(nn.Module):
    """A cube that a `tanh` reads, and that something else may read as well."""

    def __init__(self, *, leaves: bool) -> None:
        super().__init__()
        self.leaves = leaves

    def forward(self, x: torch.Tensor) -> Any:
        cube = x * x * x
        return torch.tanh(0.5 * cube + x) + (cube if self.leaves else 0 * x)


@pytest.mark.parametrize("leaves", [False, True])
def test_what_only_saturates_may_overflow(leaves: bool) -> None:
    """A cube that nothing but a `tanh` reads; one that is returned too has to stay in range."""
    module, x = Cubed(leaves=leaves), torch.randn(2, 4)
    found = capture(module, x)
    ranges, _ = run_capture(found, module, (x,), {}, {})
    harmless = {node.name for node in find_saturating(found.graph.graph, ranges)}
    last = [n.name for n in found.graph.graph.nodes if n.name.startswith("mul")][1]
    assert (last in harmless) != leaves


def test_a_sum_with_a_value_beyond_fp16_does_not_saturate() -> None:
    """Inf and -Inf would add up to NaN: a summand has to be in range."""
    module, x = Cubed(leaves=False), torch.randn(2, 4)
    found = capture(module, x)
    ranges, _ = run_capture(found, module, (x,), {}, {})
    wide = {name: tuple(Range(1e5, 1.0, 1.0) for _ in parts) for name, parts in ranges.items()}
    before, after = (find_saturating(found.graph.graph, y) for y in (ranges, wide))
    assert after < before


def test_zero_has_a_logarithm() -> None:
    """That of a power of two is exact, and that of 0 is below all others."""
    assert log2_of(8.0) == 3.0
    assert log2_of(0.0) == -math.inf


class EachRow(nn.Module):
    """Norms each row or picture by itself, in `vmap`."""

    def __init__(self, norm: nn.Module, way: int) -> None:
        super().__init__()
        self.norm, self.way = norm, way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.norm, in_dims=self.way)(x)


NORMS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "row": (nn.LayerNorm(4), (3, 4), 0),
    "last dimension": (nn.LayerNorm(4), (4, 3), 1),
    "group": (nn.GroupNorm(2, 4), (3, 2, 4, 5), 0),
    "group, third dimension": (nn.GroupNorm(2, 4), (2, 4, 3, 5), 2),
}


@pytest.mark.parametrize("kind", NORMS)
def test_squares_beyond_fp32_are_found_inside_vmap(kind: str) -> None:
    """Beyond fp32 they are refused, and just below they aren't, wherever the examples lie."""
    norm, shape, way = NORMS[kind]
    module, x = EachRow(norm, way), torch.randn(*shape)
    found, small = capture(module, x), torch.full(shape, 1e-3)
    large, place = small.clone(), [0] * x.dim()
    place[way] = 1
    large[tuple(place)] = 1.0  # of one example alone
    with pytest.raises(ScalingError, match=r"squares values of up to 3e\+19, and their sum is Inf"):
        run_capture(found, module, (large * 3e19,), {}, {})
    ranges, _ = run_capture(found, module, (large * 1.2e19,), {}, {})
    assert ranges

"""Exponents from bounds: what is certified, what is not, and that it is said."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.rescaling_models import WAYS, make_example, measure_call, scale_weights
from stopdown import rescale_
from stopdown.errors import OptionError
from stopdown.fold_names import name_parameters
from stopdown.mapped_weights import StoredWeight, wait_
from stopdown.number_formats import FP16
from stopdown.scaling.bounds import propagation
from stopdown.scaling.bounds.propagation import (
    LEAST_STORED,
    LEAST_STORED_LOOSE,
    LEAST_STORED_WEIGHT,
    Bounds,
)
from stopdown.scaling.bounds.values import Bound
from stopdown.scaling.certificate import (
    bound_kinds,
    describe_share,
    find_uncertain,
    leave_unmeasured,
    mix_ranges,
    state_bounds,
)
from stopdown.scaling.exponents.problem import Limit, Problem
from stopdown.scaling.graph.capture import capture_call
from stopdown.scaling.graph.nodes import is_kind
from stopdown.scaling.graph.range_measurement import Range
from stopdown.scaling.trials import bounded_search


def test_a_model_that_overflows_is_certified() -> None:
    """T5 made to overflow is exact in fp32 under exponents that no tokens can overflow."""
    module, calls = make_example("T5")
    scale_weights(module, WAYS["residual"], 9)
    rescaling = rescale_(module, calls=calls, ranges="bound")
    assert rescaling.certified
    assert not rescaling.fp32_modules
    assert not rescaling.scaling.uncertain
    count = rescaling.scaling.values
    assert rescaling.scaling.range_note == (
        f"All {count} activations are certified, for input_ids of length up to 7."
    )
    assert rescaling.headroom_bits > 0
    rescaling.undo()


@pytest.mark.parametrize("ranges", ["bound", "auto"])
def test_whole_numbers_stay_positions(ranges: str) -> None:
    """Gemma 3 without an attention mask adds positions up before it reads from its mask by them."""
    module, [(call, _, kwargs)] = make_example("Gemma 3")
    unmasked = {name: value for name, value in kwargs.items() if name != "attention_mask"}
    rescaling = rescale_(module, calls=[(call, (), unmasked)], ranges=ranges)
    assert rescaling.scaling.bounded > 0.9 * rescaling.scaling.values
    rescaling.undo()


def test_measured_ranges_certify_nothing() -> None:
    """Without bounds a rescaling is not certified, and counts every value as uncertain."""
    module, calls = make_example("T5")
    rescaling = rescale_(module, calls=calls)
    assert not rescaling.certified
    assert rescaling.scaling.uncertain
    assert not rescaling.scaling.range_note
    rescaling.undo()


class Odd(nn.Module):
    """A norm, an operation without a rule, and a norm again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.second(torch.lgamma(self.first(hidden_states).abs() + 2)) * 2


def test_what_has_no_bound_is_named() -> None:
    """An operation without a rule rests on what was measured, and its headroom is said."""
    module = Odd().eval().requires_grad_(False)
    given = torch.randn(2, 8)
    largest = torch.lgamma(module.first(given).abs() + 2).abs().max().item()
    shown = math.floor(10 * math.log2(65504 / largest)) / 10
    rescaling = rescale_(module, (given,), ranges="bound")
    assert not rescaling.certified
    assert rescaling.scaling.uncertain == ("Odd: (lgamma)",)
    assert rescaling.scaling.range_note.endswith(
        "for |hidden_states| up to 64, hidden_states of length up to 8; "
        f"the rest were measured and have at least {shown:g} bits of headroom."
    )
    assert rescaling.scaling.measured_bits == pytest.approx(math.log2(65504 / largest), abs=0.01)


class Stream(nn.Module):
    """A stream of a large value, and of what an operation without a rule adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.large = nn.LayerNorm(8), nn.Linear(8, 8)
        self.large.weight.data.mul_(2.0**16)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden_states)
        return (self.large(x) + torch.lgamma(x)).reshape(-1) * 2


def test_a_sum_without_a_bound_is_no_smaller_than_what_is_known_of_it() -> None:
    """Nothing measured: 0 was guessed of the sum, and a cast of it to fp16 got no exponent."""
    module, given = Stream().eval().requires_grad_(False), torch.randn(2, 8)
    capture = capture_call(module, (given,), dtype=torch.float16)
    [kind] = bound_kinds(module, leave_unmeasured([(capture, (given,), {})])).kinds
    sizes = {
        name: kind.ranges[x.name][0].amax
        for x in capture.graph.graph.nodes
        for name in ("linear", "add", "reshape")
        if is_kind(x, name)
    }
    assert 65504 < sizes["linear"] <= sizes["add"] == sizes["reshape"]


class Gated(torch.nn.Module):
    """An operation that no rule bounds, before a sigmoid alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.linear(hidden_states)
        return x * torch.lgamma(x).sigmoid()


def test_a_value_without_bound_is_named_before_a_sigmoid() -> None:
    """It may be NaN, which no saturating function mends; where ranges are measured it has no limit."""
    x = (torch.randn(2, 8),)
    bounded = rescale_(Gated().eval().requires_grad_(False), x, ranges="bound").scaling
    assert not bounded.certified
    assert bounded.uncertain == ("Gated: (lgamma)",)
    measured = rescale_(Gated().eval().requires_grad_(False), x, ranges="measured").scaling
    assert measured.values < bounded.values


def test_a_bound_counts_with_the_exponent_that_is_chosen() -> None:
    """A measured value is certified if its bound, times its power of two, is within fp16: exactly."""
    seen = Range(1.0, 0.5, 0.1)
    largest = FP16.largest * 8.0
    bounds = (largest, math.nextafter(largest, math.inf), math.inf)
    limits = [
        Limit(0, replace(seen, bound=x), torch.float16, f"a.{n} (linear)")
        for n, x in enumerate(bounds)
    ]
    assert [x.place for x in find_uncertain(limits, lambda unknown: -3)] == [
        "a.1 (linear)",
        "a.2 (linear)",
    ]
    assert find_uncertain(limits[:1], lambda unknown: -2) == limits[:1]
    assert find_uncertain(limits[:2], lambda unknown: -4) == []


def test_weights_that_wait_in_their_files_are_bounded() -> None:
    """Bounds of a component that is measured layer by layer are those of one in memory."""
    module = nn.Linear(8, 8)
    given = (torch.randn(2, 8),)
    kinds = [replace(measure_call(module, given), args=given)]
    wanted = bound_kinds(module, kinds).bounds[0].ranges
    for parameter in module.parameters():
        wait_(parameter, StoredWeight(parameter.data.clone(), torch.float32))
    assert not module.weight.untyped_storage().nbytes()
    assert bound_kinds(module, kinds).bounds[0].ranges == wanted


def test_what_is_beyond_its_bound_has_none() -> None:
    """A bound below what was measured states nothing of the value."""
    seen, low, high = Range(4.0, 1.0, 0.1), Range(2.0, 1.0, 0.1, certain=True), math.inf
    for bits in (0.0, 40.0):
        (mixed,) = mix_ranges({"x": (seen,)}, {"x": (low,)}, bits)["x"]
        assert (mixed.certain, mixed.largest) == (False, high)
    (stated,) = state_bounds({"x": (seen,)}, {"x": (low,)})["x"]
    assert stated == seen
    (stated,) = state_bounds({"x": (seen,)}, {"x": (replace(low, amax=8.0),)})["x"]
    assert (stated.amax, stated.largest, stated.certain) == (4.0, 8.0, False)


def test_unknown_ranges_are_refused() -> None:
    """A word that is none of the three is refused by name, before anything is run."""
    with pytest.raises(OptionError) as caught:
        rescale_(nn.Linear(2, 2), (torch.randn(1, 2),), ranges="certain")
    assert caught.value.what == "The mode of ranges 'certain' is unknown."
    assert "measured, bound, auto" in (caught.value.expected or "")


def test_tiny_stored_values_are_not_certified() -> None:
    """A bound has no room for subnormals where its value is tiny as stored.

    A bias rounds as its sum, and what only moves values rounds none.
    """
    certain = Range(1.0, 0.5, 0.1, certain=True)
    problem = Problem()
    places = (("a (add)", LEAST_STORED), ("b.weight", LEAST_STORED_WEIGHT),
              ("b.bias", LEAST_STORED_WEIGHT), ("c (cat)", LEAST_STORED),
              ("d.weight", LEAST_STORED_LOOSE))  # fmt: skip
    for name, least in places:
        unknown = problem.system.unknown(name)
        held, weight = replace(certain, least_stored=least), 0.0 if " " in name else 1.0
        problem.limits.append(Limit(unknown, held, torch.float16, name, weight))
    limits = problem.list_fp16_limits(())
    assert len(limits) == 5
    found = {n: [x.place for x in find_uncertain(limits, lambda _, n=n: n)] for n in (0, -13, -20)}
    assert found[0] == []
    assert found[-13] == ["a (add)", "b.weight"]
    assert found[-20] == ["a (add)", "b.weight", "d.weight"]


class Modulated(nn.Module):
    """A norm whose rows are scaled by what a timestep becomes in two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1024, 256), nn.Linear(256, 64)
        self.norm = nn.LayerNorm(64, elementwise_affine=False)
        for layer in (self.first, self.second):
            rows = torch.randn(layer.weight.shape[0], 1).mul(0.5).exp()
            layer.weight.data = rows * torch.randn_like(layer.weight) / layer.in_features**0.5

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        angles = timestep[:, None].float() * torch.exp(-torch.arange(512) / 55.0)
        angles = torch.cat([angles.sin(), angles.cos()], dim=-1).to(hidden_states.dtype)
        scale = self.second(nn.functional.silu(self.first(angles)))
        return self.norm(hidden_states) * (1 + scale[:, None])


def bound_output(module: nn.Module, loose: list[str]) -> float:
    """The bound of a module's last product, from its weights."""
    args = (torch.randn(1, 3, 64), torch.tensor([7]))
    capture = capture_call(module, args, {}, dtype=torch.float16)
    named = name_parameters(module)
    (found,) = bound_kinds(
        module, leave_unmeasured([(capture, args, {})]), named.__getitem__, loose
    ).bounds
    products = [x for x in capture.graph.graph.nodes if is_kind(x, "multiply")]
    return max(part.amax for part in found.ranges[products[-1].name])


def test_small_rows_of_a_weight_keep_their_bounds() -> None:
    """Room for subnormal weights is small beside other roundings, where rows differ by a factor of ten.

    What is modulated is at most 8 (a norm over 64) times one and the scale.
    """
    torch.manual_seed(0)
    module = Modulated().eval().requires_grad_(False)
    steps = torch.arange(1000)
    scales = module(torch.eye(64)[:1].expand(1000, 1, 64), steps) / module.norm(torch.eye(64)[:1])
    exact, found = 8 * float(scales.abs().max()), bound_output(module, [])
    assert found < 2 * exact
    assert bound_output(module, ["first.weight", "second.weight"]) > 5 * exact


def test_a_weight_that_is_stored_low_gets_more_room() -> None:
    """A weight below 2^-11 that no exponent may raise is certified all the same; below 2^-15 it is not."""
    for size, certified in ((2.0**-13, True), (2.0**-17, False)):
        module = nn.Linear(64, 64, bias=False).requires_grad_(False)
        module.weight.data.fill_(size)
        rescaling = rescale_(module, (torch.randn(2, 64),), ranges="bound")
        assert rescaling.certified == certified
        assert rescaling.scaling.uncertain == (() if certified else ("weight",))
        rescaling.undo()


class ResizingByValues(nn.Module):
    """Positions resized to sizes that a tensor holds, and written into an empty one (SigLIP 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.positions = nn.Parameter(torch.randn(1, 8, 2, 2))

    def forward(self, tokens: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        made = torch.empty(len(tokens), 6, 8, dtype=tokens.dtype)
        for number in range(len(tokens)):
            height, width = sizes[number].tolist()
            resized = nn.functional.interpolate(
                self.positions.float(), (height, width), mode="bilinear", antialias=True
            )
            resized = resized.reshape(8, height * width).transpose(0, 1).to(tokens.dtype)
            made[number, : height * width] = resized
            made[number, height * width :] = resized[0]
        return self.linear(tokens + made)


def test_sizes_that_depend_on_values_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is larger than its bound, every value has one, and what empty memory holds is none."""
    torch.manual_seed(0)
    module = ResizingByValues().eval().requires_grad_(False)
    args, found = (torch.randn(2, 6, 8), torch.tensor([[2, 2], [2, 2]])), []

    def keep(*given: object, **named: object) -> object:
        found.append(bound_kinds(*given, **named))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(bounded_search, "bound_kinds", keep)
    scaling = rescale_(module, args, ranges="bound").scaling
    assert (scaling.bounded, scaling.uncertain) == (scaling.values, ())
    (kind,), (bounds,) = found[0].kinds, found[0].bounds
    assert "empty" in bounds.ranges
    assert "empty" not in bounds.exact
    for name, parts in kind.ranges.items():
        assert all(x.amax <= y.amax for x, y in zip(parts, bounds.ranges[name], strict=True)), name


class FillingItsMask(nn.Module):
    """Attention whose causal mask is filled with a tensor's number (BLIP-Diffusion's CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.empty(len(tokens), length, length, dtype=tokens.dtype)
        mask.fill_(torch.tensor(torch.finfo(tokens.dtype).min))
        mask.triu_(1)
        scores = torch.baddbmm(mask, self.query(tokens), tokens.mT)
        return torch.softmax(scores, -1) @ self.value(tokens)


def test_a_mask_filled_from_a_tensor_is_a_mask() -> None:
    """Its lowest number needs no room, and what it is added to has a bound."""
    torch.manual_seed(0)
    module = FillingItsMask().eval().requires_grad_(False)
    rescaling = rescale_(module, (torch.randn(2, 5, 8),), ranges="bound")
    assert not rescaling.fp32_modules
    assert not rescaling.scaling.outputs
    assert rescaling.scaling.bounded >= rescaling.scaling.values - 1  # the empty tensor itself


def test_a_measurement_beyond_its_bound_wins() -> None:
    """Where something measured exceeds a bound (an input beyond its limit), the bound is not used."""
    seen, bound = Range(9.0, 1.0, 0.1), Range(8.0, 1.0, 0.0, certain=True)
    (mixed,) = mix_ranges({"x": (seen,)}, {"x": (bound,)}, 40.0)["x"]
    assert mixed == Range(9.0 * 16, 1.0, 0.1)


def test_shares_are_rounded_down() -> None:
    """A share is never said to be larger than it is."""
    assert describe_share(1000, 999).startswith("99.9 % of 1000")
    assert describe_share(10000, 9999).startswith("99.9 % of 10000")
    assert describe_share(3, 3) == "All 3 activations are certified."
    assert describe_share(0, 0) == "No value is in fp16."


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["CogVideoX rotary", "T5"])
def test_bounds_that_are_updated_are_those_that_are_found_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loose room for a parameter changes the same bounds, bit for bit; what it does not change is left."""
    visits = count_visits(monkeypatch)
    module, calls = make_example(name)
    call, args, kwargs = calls[0]
    made = [(capture_call(call, args, kwargs, dtype=torch.float16), args, kwargs)]
    load = name_parameters(module).__getitem__
    first = bound_kinds(module, leave_unmeasured(made), load)
    of_all, of_updates = len(visits), 0
    lowered = sorted(made[0][0].parameters.values())[::7]
    for low in lowered:
        (anew,) = bound_kinds(module, leave_unmeasured(made), load, [low]).bounds
        begun = len(visits)
        (updated,) = bound_kinds(module, leave_unmeasured(made), load, [low], first).bounds
        of_updates += len(visits) - begun
        assert updated.ranges == anew.ranges, low
        assert updated.scores == anew.scores, low
        assert not list_differences(updated, anew), low
    assert of_updates < of_all * len(lowered) * 0.7


def count_visits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Gets each operation whose bound is computed."""
    visits: list[object] = []
    visit = propagation.Propagation._visit_operation

    def note(self: propagation.Propagation, node: torch.fx.Node) -> None:
        visits.append(node)
        visit(self, node)

    monkeypatch.setattr(propagation.Propagation, "_visit_operation", note)
    return visits


def list_differences(one: Bounds, other: Bounds) -> list[str]:
    """Values whose bounds differ in any bit."""
    assert one.values.keys() == other.values.keys()
    pairs = [(key, one.values[key], other.values[key]) for key in one.values]
    return [key for key, x, y in pairs if not is_same(x, y)]


def is_same(one: Bound | None, other: Bound | None) -> bool:
    """None, or equal in all that a bound says."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.peak, other.peak) and torch.equal(one.norm, other.norm)

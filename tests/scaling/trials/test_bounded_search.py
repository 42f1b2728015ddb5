"""Bounds in place of measured ranges: which are used, and which cost too much."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from models.rescaling_models import WAYS, make_example, measure_call, run_calls, scale_weights
from stopdown import cast_, rescale_
from stopdown.errors import ScalingError
from stopdown.numerics import relative_l2
from stopdown.records import Scaling
from stopdown.scaling.exponents import problem
from stopdown.scaling.exponents.problem import VANISHING_BITS, MeasuredCall
from stopdown.scaling.trials import bounded_search, search
from stopdown.scaling.trials.bounded_search import (
    find_visible,
    is_free,
    is_visible,
    scale_by_bounds,
    scale_unmeasured,
)
from stopdown.scaling.trials.search import find_scaling, take_first


def test_auto_takes_bounds_that_cost_nothing() -> None:
    """`auto` certifies at least what costs nothing, and needs no more in fp32 than measuring does."""
    module, calls = make_example("T5")
    measured = rescale_(module, calls=calls)
    measured.undo()
    rescaling = rescale_(module, calls=calls, ranges="auto")
    assert len(rescaling.fp32_modules) <= len(measured.fp32_modules)
    assert len(rescaling.scaling.uncertain) < rescaling.scaling.values
    rescaling.undo()


def choose_among(
    folds: list[int], *, free: bool, module: nn.Module | None = None, given: Any = None
) -> tuple[int, bool]:
    """Which fold of a weight is taken of those that bounds ask for; 0 is what was measured."""
    if module is None:
        module, given = nn.Linear(4, 4), torch.randn(2, 4)
        module.weight.data.fill_(2.0**-4)
    name = next(name for name, _ in module.named_parameters())
    measured = measure_call(module, (given,))
    plain = find_scaling(module, [measured])
    bias = {"bias": 0} if name == "weight" else {}
    found = [replace(plain, exponents={name: fold} | dict.fromkeys(bias, fold)) for fold in folds]
    best = replace(plain, exponents={})
    judge = partial(is_free if free else is_visible, best=best, calls=[measured])
    strategies = [partial(replace, x) for x in found]
    does = lambda x: x is not best and judge(x)  # noqa: E731 - a test of a result
    scaling = take_first([lambda: best, *strategies], does=does)
    return scaling.exponents.get(name, 0), scaling is not best


def test_auto_passes_over_bounds_that_cost_bits() -> None:
    """`auto` takes the first fold that costs a weight no bits, `bound` the first that costs few."""
    assert choose_among([-12, -9, -8, -6], free=True) == (-8, True)
    assert choose_among([-12, -10, -8, -6], free=False) == (-8, True)
    assert choose_among([-12, -10], free=True) == choose_among([-12, -10], free=False) == (0, False)


@pytest.mark.thorough
def test_auto_keeps_the_bits_of_a_table() -> None:
    """All that a text encoder computes rests on its embeddings: they are not one weight of a hundred."""
    module = nn.Sequential(nn.Embedding(8, 4), *(nn.Linear(4, 4) for _ in range(100)))
    module[0].weight.data.fill_(2.0**-4)
    chosen = partial(choose_among, module=module, given=torch.arange(8))
    assert chosen([-12, -10, -9, -6], free=True) == (-9, True)
    assert chosen([-12, -10, -9, -6], free=False) == (-12, True)


def test_bounds_that_fit_measured_exponents_certify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bounds would cost something, exponents are the measured ones; bounds that fit them count."""
    monkeypatch.setattr(bounded_search, "is_free", lambda *_, **__: False)
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    nn.init.constant_(module[0].weight, 5000.0)  # for inputs up to 64 up to 2.6e6
    nn.init.constant_(module[1].weight, 2.0**-10)
    given = torch.full((2, 8), 0.01)
    measured = rescale_(module, (given,))
    measured.undo()
    found = rescale_(module, (given,), ranges="auto").scaling
    assert found.exponents == measured.scaling.exponents == {"0.weight": -1, "1.weight": 1}
    assert found.uncertain == ("Sequential:0 (linear)",)
    assert found.bounded == found.values - 1 > 0
    assert found.measured_bits == pytest.approx(math.log2(65504 / 200), abs=0.01)
    assert found.range_note.endswith(
        "; the rest were measured and have at least 8.3 bits of headroom."
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [("CogVideoX rotary", "residual"), ("SD UNet", "residual"), ("SD UNet", "attention values"),
     ("Wan", "residual"), ("T5", "gated product")],
)  # fmt: skip
def test_auto_is_no_worse_than_measured(name: str, way: str) -> None:
    """The error in fp16 with the bounds that `auto` takes is that of measured ranges, or noise more."""
    module, calls = make_example(name)
    scale_weights(module, WAYS[way], 9)
    reference = run_calls(calls, torch.float32)
    errors = {}
    for ranges in ("measured", "auto"):
        rescaling = rescale_(module, calls=calls, ranges=ranges)
        cast_(module, torch.float16, rescaling)
        pairs = zip(run_calls(calls, torch.float16), reference, strict=True)
        errors[ranges] = max(relative_l2(x.float(), y) for x, y in pairs)
        rescaling.undo()
    assert errors["auto"] < 1.15 * errors["measured"]


@pytest.mark.slow
def test_bounds_that_would_round_weights_away_are_not_taken() -> None:
    """Group norms have loose bounds; no parameter of a UNet vanishes in fp16 for their sake."""
    module, calls = make_example("SD UNet")
    scale_weights(module, WAYS["residual"], 9)
    rescaling = rescale_(module, calls=calls, ranges="bound")
    sizes = {name: x.abs().max() for name, x in module.named_parameters()}
    assert all(size == 0 or size > 2.0**VANISHING_BITS for size in sizes.values())
    rescaling.undo()


def find_vanishing(module: nn.Module, calls: list[MeasuredCall], **options: bool) -> Scaling:
    """No folds from measured ranges; a fold that leaves nothing of a weight from bounds."""
    bounded = any(part.certain for call in calls for x in call.ranges.values() for part in x)
    return Scaling(exponents={"weight": -40} if bounded else {})


def test_exponents_from_bounds_are_looked_at() -> None:
    """With and without measurements, folds that would round a weight away are not given back."""
    module, args = nn.Linear(4, 4), (torch.randn(2, 4),)
    measured = measure_call(module, args)
    kinds = [replace(measured, args=args)]
    for ranges in ("bound", "auto"):
        scaling = scale_by_bounds(module, kinds, ranges, find_vanishing)
        assert not scaling.exponents
        assert (scaling.values, scaling.range_note) == (0, "No value is in fp16.")
    load = dict(module.named_parameters()).__getitem__
    with pytest.raises(ScalingError, match="weight would vanish in fp16"):
        scale_unmeasured(module, [(measured.capture, args, {})], load, find_vanishing)


@pytest.mark.parametrize(("bits", "is_loose"), [(18, True), (40, True), (40, False)])
def test_multiplies_are_not_searched_where_values_vanish_with_and_without(
    bits: int, is_loose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose values are bounded by 2**40 has a few digits left in fp16 whatever is multiplied, if
    they are about 1; if they are that large, it has all.
    """
    for module in (problem, bounded_search) if is_loose else ():
        monkeypatch.setattr(module, "measure_layers", lambda calls: defaultdict(lambda: (1.0, 1.0)))
    searched: list[nn.Module] = []
    choose = search.choose_multiplies

    def note(module: nn.Module, *given: Any) -> Any:
        searched.append(module)
        return choose(module, *given)

    monkeypatch.setattr(search, "choose_multiplies", note)
    monkeypatch.setattr(search, "CHEAP", -1.0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
    for layer in layers[:2]:
        layer.weight.data.fill_(2.0 ** (bits / 2))
        layer.bias.data.zero_()
    args = (torch.randn(2, 4),)
    measured = measure_call(layers, args)
    load = dict(layers.named_parameters()).__getitem__
    calls = [(measured.capture, args, {})]
    if is_loose and bits == 40:
        with pytest.raises(ScalingError, match="would vanish in fp16"):
            scale_unmeasured(layers, calls, load)
        assert not searched
        return
    found = scale_unmeasured(layers, calls, load)
    assert not found.fp32_modules
    assert found.bounded == found.values
    assert searched


def test_a_parameter_that_vanishes_is_named() -> None:
    """The refusal names the parameter, how large it is, and the exponent."""
    module = nn.Linear(4, 4)
    measured = measure_call(module, (torch.randn(2, 4),))
    found = replace(find_scaling(module, [measured]), exponents={"weight": -40})
    with pytest.raises(ScalingError, match=r"weight would vanish in fp16: .* times 2\*\*-40"):
        find_visible(lambda *_: found, module, [measured])


def test_activations_that_vanish_are_named() -> None:
    """Exponents that leave nothing of a layer's values are refused, with the layer and the exponent."""
    module = nn.Sequential(nn.Linear(4, 4))
    measured = measure_call(module, (torch.randn(2, 4),))
    found = replace(find_scaling(module, [measured]), layers={"0": (-3, -40)})
    with pytest.raises(ScalingError, match=r"values of 0 would vanish in fp16: .* times 2\*\*-40"):
        find_visible(lambda *_: found, module, [measured])

"""Sums in fp16 that a plan allows: never beyond fp16, however they round, and no longer than allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from stopdown import load
from stopdown.component_calls.components import find_component
from stopdown.errors import OptionError
from stopdown.interception.accumulation import (
    GROUP,
    bound_rounded_sum,
    sum_linear_in_fp16,
    summing_in_fp16,
)
from stopdown.number_formats import FP16
from stopdown.numerics import relative_l2
from stopdown.plans.applier import apply_plan
from stopdown.plans.certified import certify_plan
from stopdown.plans.fp16_sums import (
    LONGEST,
    choose_sums,
    describe_whole_sums,
    find_terms,
    list_refused,
)
from stopdown.records import Accumulation, ComponentPlan, Plan, Scaling, SumBound

SUMS = {
    "short": SumBound(64, 1000.0),
    "long": SumBound(3072, 1000.0),
    "at the end": SumBound(1024, 65000.0),
    "unbounded": SumBound(64, None),
}


def make(mode: str, sums: Mapping[str, SumBound] = SUMS) -> ComponentPlan:
    entry = ComponentPlan("transformer", "T", "", "fp16", Scaling(sums=sums))
    plan = Plan("", "", "", "fp16", {}, (entry,), (), 0, "cpu", 0.0)
    return choose_sums(plan, mode).components[0]


def accumulation(entry: ComponentPlan) -> Accumulation:
    assert entry.accumulation is not None
    return entry.accumulation


def test_auto_sums_in_fp16_what_fits_in_short_pieces() -> None:
    """Long sums are cut; what may leave fp16 with its roundings, or has no bound, stays in fp32."""
    entry = make("auto")
    assert accumulation(entry).fp16_sums == {"short": 64, "long": LONGEST}
    assert accumulation(entry).fp16_accumulation is False
    assert list_refused(entry) == {
        "at the end": "its sums may reach 6.706e+04",
        "unbounded": "its sums rest on no bound",
    }
    assert entry.reasons == (
        "2 of its 4 linear layers are summed in fp16, 1 of them in pieces of at most 1024 terms. "
        "2 are not, as at the end: its sums may reach 6.706e+04.",
    )


def test_fp16_sums_in_one_piece_where_that_fits_and_fp32_nowhere() -> None:
    """fp16 asks for whole sums, fp32 for none."""
    assert accumulation(make("fp16")).fp16_sums == {"short": 64, "long": 3072}
    assert accumulation(make("fp32")) == Accumulation(fp16_accumulation=False)


def test_pieces_are_even_and_whole_groups() -> None:
    """1100 terms are two pieces of 560, not 1024 and 76."""
    assert find_terms(SumBound(1100, 1.0), "auto") == 560
    assert find_terms(SumBound(30, 1.0), "auto") == 30


def test_a_file_says_which_whole_sums_fit() -> None:
    """A file cannot hold pieces, so a sum at the end of fp16 is named, and one without a bound too."""
    said = describe_whole_sums(Scaling(sums=SUMS))
    assert said == (
        "If a program sums in fp16, as ComfyUI with fp16_accumulation, bounds keep the sums of 2 of its 4 "
        "linear layers in range, but not those of at the end. For sums of convolutions and attention "
        "there is no bound."
    )
    assert "but not" not in describe_whole_sums(Scaling(sums={"short": SUMS["short"]}))
    assert describe_whole_sums(Scaling()) == ""


def test_modes_are_checked() -> None:
    """An unknown one is refused; a plan without bounds sums in fp32, and says why."""
    with pytest.raises(OptionError, match="Known values are auto, fp32, fp16"):
        make("bf16")
    entry = make("auto", {})
    assert accumulation(entry) == Accumulation(fp16_accumulation=False)
    assert entry.reasons[0].endswith("no linear layer in fp16 whose sums are bounded.")


def test_sums_in_fp16_need_bounds_on_the_command_line(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    """Refused before anything is measured."""
    code, _, said = run("plan", "shapes", "--ranges", "measured", "--accumulate", "auto")
    assert code == 2
    assert "--accumulate auto was given, but no bounds are computed." in said
    assert "Leave out --ranges measured." in said


def test_roundings_that_all_go_up_stay_below_the_bound() -> None:
    """Groups of just over half a unit: the rounded sum passes 65504 where the exact one does not."""
    rounds, unit = 62, 32.0
    start = FP16.largest - (rounds - 2) * unit
    given = torch.zeros(1, (rounds + 1) * GROUP, dtype=torch.float16)
    given[0, 0] = start
    given[0, GROUP::GROUP] = 0.53 * unit
    layer = torch.nn.Linear(given.shape[1], 1, bias=False, dtype=torch.float16).requires_grad_(
        False
    )
    layer.weight.fill_(1.0)
    exact = float(given.double().sum())
    assert exact < FP16.largest < bound_rounded_sum(exact, given.shape[1])
    with summing_in_fp16():
        assert sum_linear_in_fp16(layer, given.shape[1], given).isinf().all()
        smaller = given / 2
        assert float(sum_linear_in_fp16(layer, given.shape[1], smaller)) <= bound_rounded_sum(
            exact / 2, given.shape[1]
        )


def test_pieces_are_joined_in_fp32() -> None:
    """Many small terms behind a large one are lost in one sum in fp16, and kept in pieces."""
    given = torch.full((1, 4096), 0.25, dtype=torch.float16)
    given[0, 0] = 16384.0
    layer = torch.nn.Linear(4096, 1, dtype=torch.float16).requires_grad_(False)
    layer.weight.fill_(1.0)
    layer.bias.zero_()
    right = float(given.double().sum())
    with summing_in_fp16():
        whole = float(sum_linear_in_fp16(layer, 4096, given))
        pieces = float(sum_linear_in_fp16(layer, 1024, given))
    assert abs(pieces - right) < abs(whole - right) / 3


@pytest.fixture(scope="module")
def certified(save_tiny: Callable[..., Path]) -> tuple[Path, Plan]:
    folder = save_tiny("cogvideox", overflow="transformer")
    return folder, choose_sums(certify_plan(folder), "auto")


@pytest.mark.thorough
def test_inputs_at_the_bound_never_overflow_a_certified_layer(certified: tuple[Path, Plan]) -> None:
    """Of every fourth row of each layer the input that makes its sum as large as the bound: finite.

    At twice fp16's maximum the same input is Inf, so the search can fail.
    """
    folder, plan = certified
    pipe = load(str(folder), precision="fp32", device="cpu")
    apply_plan(pipe, plan)
    tried = 0
    for entry in plan.components:
        module = find_component(pipe, entry.component)
        for path, terms in accumulation(entry).fp16_sums.items() if entry.accumulation else ():
            assert module is not None
            layer = module.get_submodule(path)
            assert isinstance(layer, torch.nn.Linear)
            bound = entry.in_force.sums[path]
            assert bound.largest is not None
            tried += _push(layer, terms, bound.largest)
    assert tried > 100


def _push(layer: torch.nn.Linear, terms: int, largest: float) -> int:
    """Rows whose worst inputs were tried."""
    weight = layer.weight.detach().double()
    bare = torch.nn.Linear(*weight.shape[::-1], bias=False).half().requires_grad_(False)
    bare.weight.copy_(weight)
    for goal, overflows in ((largest, False), (2.2 * FP16.largest, True)):
        worst = weight[::4] * (goal / weight[::4].square().sum(-1, keepdim=True))
        usable = worst.abs().amax(-1) < FP16.largest
        with summing_in_fp16():
            made = sum_linear_in_fp16(bare, terms, worst[usable].half())
        if not overflows:
            assert made.isfinite().all()
        elif usable.any() and terms >= layer.in_features:
            assert made.isinf().any()
    return int(usable.sum())


@pytest.mark.thorough
def test_a_run_with_sums_in_fp16_is_nearer_than_bf16(certified: tuple[Path, Plan]) -> None:
    """Inputs at their limits, sums in fp16 in each layer of the plan: finite; ordinary ones: near."""
    folder, plan = certified
    pipes = {name: load(str(folder), precision=name, device="cpu") for name in ("fp32", "bf16")}
    pipes["fp16"] = load(str(folder), precision="fp32", device="cpu")
    apply_plan(pipes["fp16"], plan)

    def call(name: str, size: float) -> torch.Tensor:
        module = pipes[name].transformer
        generator = torch.Generator().manual_seed(0)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        config = module.config
        shape = (1, 3, config.in_channels, 4, 4)
        texts = (1, config.max_text_seq_length, config.text_embed_dim)
        latents = torch.randn(shape, generator=generator).clamp(-1, 1) * size
        text = torch.randn(texts, generator=generator).clamp(-1, 1) * 2 * size
        with torch.no_grad(), summing_in_fp16():
            output: torch.Tensor = module(
                hidden_states=latents.to(dtype),
                encoder_hidden_states=text.to(dtype),
                timestep=torch.tensor([500]),
                image_rotary_emb=None,
                return_dict=False,
            )[0]
        return output.float()

    assert call("fp16", 64.0).isfinite().all()
    right = call("fp32", 1.0)
    assert relative_l2(call("fp16", 1.0), right) < relative_l2(call("bf16", 1.0), right)


@pytest.mark.thorough
def test_sums_of_a_plan_come_off(certified: tuple[Path, Plan]) -> None:
    """While the plan is on, its layers sum so; undone, they have their own forward again."""
    folder, plan = certified
    pipe = load(str(folder), precision="fp32", device="cpu")
    path = next(iter(accumulation(_of(plan, "transformer")).fp16_sums))
    layer = pipe.transformer.get_submodule(path)
    with apply_plan(pipe, plan):
        assert "forward" in vars(layer)
    assert "forward" not in vars(layer)
    off = dataclasses.replace(
        plan, components=tuple(dataclasses.replace(x, accumulation=None) for x in plan.components)
    )
    with apply_plan(pipe, off):
        assert "forward" not in vars(layer)


def _of(plan: Plan, name: str) -> ComponentPlan:
    return next(x for x in plan.components if x.component == name)

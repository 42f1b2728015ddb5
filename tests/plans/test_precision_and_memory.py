"""Precision and memory decided together: which ways there are, and which is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stopdown.component_calls.components import find_components
from stopdown.devices.format_support import Support
from stopdown.memory.forecast import Fit
from stopdown.memory.speed import Speed
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.plans.applier import apply_entry
from stopdown.plans.precision import ComponentFacts
from stopdown.plans.precision_and_memory import (
    build_way,
    choose_way,
    count_significant_bits,
    describe_remark,
    list_rows,
    list_ways,
    read_formats,
    weigh_speed,
)
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline, save_pipeline

NATIVE, MISSING = Support(True, True, 0.2, "Native."), Support(False, False, None, "Missing.")
TURING = {"fp32": NATIVE, "fp16": NATIVE, "bf16": MISSING}
FACTS = [
    ComponentFacts("text_encoder", ("text_encoder",), {"bf16": 9}, {"fp16": ("wo",)}),
    ComponentFacts("unet", ("unet",), {"bf16": 9}),
]
WIDE = Plan("", precision="fp32", chosen="fp32", components=(ComponentPlan("unet"),))
NARROW = Plan(
    "",
    precision="plan.json",
    chosen="fp16 with a plan",
    components=(ComponentPlan("unet", precision="fp16", scaling=Scaling()),),
)


def budget(plan: Plan, flops_per_s: float | None, *sizes: tuple[Strategy, int]) -> Fit:
    """A plan whose strategies take so many bytes, each after 10^9 operations."""
    predictions = tuple(Prediction(strategy, size, "", 0, 0, 1e9) for strategy, size in sizes)
    speed = None if flops_per_s is None else Speed(flops_per_s, 1e9, "")
    return Fit(predictions, plan=plan, speed=speed)


def make_entry(**fields: Any) -> ComponentPlan:
    return ComponentPlan("unet", "UNet2DConditionModel", "", "fp16", **fields)


def make_plan(*entries: ComponentPlan) -> Plan:
    return Plan("m", "", "P", "fp16", {}, entries, "cpu", 0.0)


def test_a_card_without_bf16_compares_rescaled_and_fp32() -> None:
    """What is stored in bf16 is rescaled first there; fp32 is compared with it."""
    ways = list_ways(FACTS, TURING, "auto")
    assert [way.chosen for way in ways] == ["fp16 with a plan", "fp32"]
    assert [count_significant_bits(way) for way in ways] == [11, 24]


def test_a_device_without_native_fp16_is_not_offered_it() -> None:
    """On a CPU, where fp16 is emulated, only what auto takes is compared."""
    emulated = {"fp32": NATIVE, "bf16": MISSING, "fp16": Support(False, True, 300.0, "Emulated.")}
    assert [way.chosen for way in list_ways(FACTS, emulated, "auto")] == ["fp32"]


@pytest.mark.parametrize("text", ["vae.encode=fp16,vae.decode=fp32", "vae.decode=fp32,vae=fp16"])
def test_an_autoencoder_in_two_precisions_counts_as_the_wider(text: str) -> None:
    """In any order; that the other method has a copy of its own is said."""
    vae = ComponentFacts("vae", ("vae.encode", "vae.decode"), {"fp16": 9})
    (way,) = list_ways([*FACTS, vae], TURING, text)
    assert read_formats(way)["vae"] == "fp32"
    assert describe_remark(way).startswith("vae: a second copy of the weights")


def test_a_precision_that_is_named_is_alone() -> None:
    """fp16 and fp32 are predicted by themselves, a plan beside fp32."""
    assert [way.chosen for way in list_ways(FACTS, TURING, "fp16")] == ["fp16 with a plan"]
    assert [way.chosen for way in list_ways(FACTS, TURING, "fp32")] == ["fp32"]
    plan = make_plan(make_entry(scaling=Scaling(fp32_modules=("mid_block",), fp32_flops=0.25)))
    named = list_ways(FACTS, TURING, "p.json", plan)
    assert [way.chosen for way in named] == ["by p.json", "fp32"]
    assert describe_remark(named[0]) == "1 fp32 module in fp32, 25.0% of the matmul work."


def test_the_least_time_that_fits_is_taken_across_precisions() -> None:
    """With room fp16 is taken for its speed; where only fp32's small strategy fits, that one."""
    found = [
        budget(WIDE, 1e9, (Strategy(), 200), (Strategy("block"), 20)),
        budget(NARROW, 8e9, (Strategy(), 100)),
    ]
    assert choose_way(found, 1000) == (NARROW, found[1].predictions[0])
    assert choose_way(found, 50) == (WIDE, found[0].predictions[1])
    assert choose_way(found, 10) is None


def test_of_two_alike_the_nearer_to_fp32_is_taken() -> None:
    """At the same speed fp32 is preferred, whatever the order; without speeds the first that fits."""
    sizes = (Strategy(), 100)
    found = [budget(NARROW, 1e9, sizes), budget(WIDE, 1e9, sizes)]
    assert choose_way(found, 1000) == (WIDE, found[1].predictions[0])
    found = [budget(NARROW, None, sizes), budget(WIDE, None, sizes)]
    assert choose_way(found, 1000) == (NARROW, found[0].predictions[0])


def test_times_are_ratios_to_the_first_way() -> None:
    """Rows of a way that is eight times slower than the first say so."""
    sizes = (Strategy(), 100)
    rows = list_rows([budget(NARROW, 8e9, sizes), budget(WIDE, 1e9, sizes)])
    assert [(row.precision, row.time_ratio) for row in rows] == [
        ("fp16 with a plan", 1.0),
        ("fp32", 8.0),
    ]


def test_fp32_modules_run_at_their_own_speed() -> None:
    """A quarter of the work in fp32, at an eighth of the speed, takes 2.75 times as long."""
    plan = make_plan(make_entry(scaling=Scaling(fp32_flops=0.25)))
    mixed = weigh_speed(plan, Speed(8e9, 1e9, ""), Speed(1e9, 1e9, ""))
    assert mixed is not None
    assert 8e9 / mixed.flops_per_s == pytest.approx(2.75)
    assert weigh_speed(NARROW, None, None) is None


@pytest.mark.usefixtures("each_device")
def test_a_plans_fp32_modules_are_fp32_in_its_skeleton(tmp_path: Path) -> None:
    """A skeleton by a plan has fp16 weights, and fp32 ones in its fp32 modules."""
    source = resolve_source(save_pipeline("sd", tmp_path / "m", dtype=torch.float32))
    plan = make_plan(make_entry(scaling=Scaling(fp32_modules=("mid_block",))))
    unet = find_components(build_way(source, plan))["unet"]
    kinds = {name.startswith("mid_block."): x.dtype for name, x in unet.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.float16}


@pytest.mark.usefixtures("each_device")
def test_what_authors_keep_in_fp32_is_so_without_weights(tmp_path: Path) -> None:
    """A component that a plan runs in bf16 is cast by `apply_entry` here as it is on loading."""
    source = resolve_source(save_pipeline("wan", tmp_path / "m", dtype=torch.float32))
    entry = ComponentPlan("transformer", "WanTransformer3DModel", "", "bf16")
    transformer = find_components(build_way(source, make_plan(entry)))["transformer"]
    loaded = make_pipeline("wan").transformer.float()
    before = {name: x.dtype for name, x in loaded.named_parameters()}
    applied = apply_entry(loaded, entry)
    kinds = {name: x.dtype for name, x in loaded.named_parameters()}
    assert kinds == {name: x.dtype for name, x in transformer.named_parameters()}
    assert set(kinds.values()) == {torch.bfloat16, torch.float32}
    applied.undo()
    assert before == {name: x.dtype for name, x in loaded.named_parameters()}

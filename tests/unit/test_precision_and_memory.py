"""Precision and memory decided together: which ways there are, and which is taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from stopdown.app.display import Display
from stopdown.app.memory_command import _explain, plan_memory, print_memory
from stopdown.app.plan_command import PlanOptions
from stopdown.environment import Support
from stopdown.memory.forecast import Fit
from stopdown.memory.speed import Speed
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.patches import Patches
from stopdown.pipelines.components import find_components
from stopdown.pipelines.requests import Request
from stopdown.pipelines.sources import resolve_source
from stopdown.plans.applier import apply_entry
from stopdown.plans.precision import ComponentFacts
from stopdown.plans.precision_and_memory import (
    Budgeted,
    Way,
    build_way,
    choose_way,
    list_rows,
    list_ways,
    weigh_speed,
)
from stopdown.records import ComponentPlan, MemoryPlan, Plan, Scaling
from stopdown.testing import make_pipeline, save_pipeline

NATIVE, MISSING = Support(True, True, 0.2, "Native."), Support(False, False, None, "Missing.")
TURING = {"fp32": NATIVE, "fp16": NATIVE, "bf16": MISSING}
FACTS = [
    ComponentFacts("text_encoder", ("text_encoder",), {"bf16": 9}, {"fp16": ("wo",)}),
    ComponentFacts("unet", ("unet",), {"bf16": 9}),
]
WIDE = Way("fp32", {"unet": "fp32"}, "fp32")
NARROW = Way("fp16 rescaled", {"unet": "fp16"}, "plan.json")


def budget(way: Way, flops_per_s: float | None, *sizes: tuple[Strategy, int]) -> Budgeted:
    """A way whose strategies take so many bytes, each after 10^9 operations."""
    predictions = tuple(Prediction(strategy, size, "", 0, 0, 0, 1e9) for strategy, size in sizes)
    speed = None if flops_per_s is None else Speed(flops_per_s, 1e9, "")
    return Budgeted(way, Fit(predictions), speed)


def make_entry(**fields: Any) -> ComponentPlan:
    return ComponentPlan("unet", "UNet2DConditionModel", "", "fp16", **fields)


def make_plan(*entries: ComponentPlan) -> Plan:
    return Plan("m", "", "P", "fp16", {}, entries, (), 4, "cpu", 0.0)


def test_a_card_without_bf16_compares_rescaled_fp32_modules_and_fp32() -> None:
    """What is stored in bf16 is rescaled first there; fp32 modules and fp32 are compared with it."""
    ways = list_ways(FACTS, TURING, "auto")
    assert [way.name for way in ways] == ["fp16 rescaled", "fp32", "fp16 with fp32 modules"]
    assert [way.bits for way in ways] == [11, 24, 11]
    assert ways[2].remark == "In fp32: wo, as their authors have it."


def test_a_device_without_native_fp16_is_not_offered_it() -> None:
    """On a CPU, where fp16 is emulated, only what auto takes is compared."""
    emulated = {"fp32": NATIVE, "bf16": MISSING, "fp16": Support(False, True, 300.0, "Emulated.")}
    assert [way.name for way in list_ways(FACTS, emulated, "auto")] == ["fp32"]


@pytest.mark.parametrize("text", ["vae.encode=fp16,vae.decode=fp32", "vae.decode=fp32,vae=fp16"])
def test_an_autoencoder_in_two_precisions_counts_as_the_wider(text: str) -> None:
    """In any order; that the other method has a copy of its own is said."""
    vae = ComponentFacts("vae", ("vae.encode", "vae.decode"), {"fp16": 9})
    (way,) = list_ways([*FACTS, vae], TURING, text)
    assert way.precisions["vae"] == "fp32"
    assert way.remark.startswith("vae: a second copy of the weights")


def test_a_precision_that_is_named_is_alone() -> None:
    """fp16 and fp32 are predicted by themselves, a plan beside fp32."""
    assert [way.name for way in list_ways(FACTS, TURING, "fp16")] == ["fp16 rescaled"]
    assert [way.name for way in list_ways(FACTS, TURING, "fp32")] == ["fp32"]
    plan = make_plan(make_entry(scaling=Scaling(fp32_modules=("mid_block",), fp32_flops=0.25)))
    named = list_ways(FACTS, TURING, "p.json", plan)
    assert [way.name for way in named] == ["by p.json", "fp32"]
    assert named[0].remark == "1 fp32 module in fp32, 25.0% of the matmul work."


def test_the_least_time_that_fits_is_taken_across_precisions() -> None:
    """With room fp16 is taken for its speed; where only fp32's small strategy fits, that one."""
    found = [
        budget(WIDE, 1e9, (Strategy(), 200), (Strategy("leaf"), 20)),
        budget(NARROW, 8e9, (Strategy(), 100)),
    ]
    assert choose_way(found, 1000) == (NARROW, found[1].fit.predictions[0])
    assert choose_way(found, 50) == (WIDE, found[0].fit.predictions[1])
    assert choose_way(found, 10) is None


def test_of_two_alike_the_nearer_to_fp32_is_taken() -> None:
    """At the same speed fp32 is preferred, whatever the order; without speeds the first that fits."""
    sizes = (Strategy(), 100)
    found = [budget(NARROW, 1e9, sizes), budget(WIDE, 1e9, sizes)]
    assert choose_way(found, 1000) == (WIDE, found[1].fit.predictions[0])
    found = [budget(NARROW, None, sizes), budget(WIDE, None, sizes)]
    assert choose_way(found, 1000) == (NARROW, found[0].fit.predictions[0])


def test_8_bits_are_taken_only_when_allowed() -> None:
    """A storage that changes the picture is passed over though it would be the only one that fits."""
    found = [budget(NARROW, 1e9, (Strategy(), 100), (Strategy(storage="fp8"), 10))]
    assert choose_way(found, 50) is None
    assert choose_way(found, 50, ("fp8",)) == (NARROW, found[0].fit.predictions[1])


def test_times_are_ratios_to_the_first_way() -> None:
    """Rows of a way that is eight times slower than the first say so."""
    sizes = (Strategy(), 100)
    rows = list_rows([budget(NARROW, 8e9, sizes), budget(WIDE, 1e9, sizes)])
    assert [(row.precision, row.time_ratio) for row in rows] == [
        ("fp16 rescaled", 1.0),
        ("fp32", 8.0),
    ]


def test_fp32_modules_run_at_their_own_speed() -> None:
    """A quarter of the work in fp32, at an eighth of the speed, takes 2.75 times as long."""
    way = Way(
        "by p.json", {}, "p.json", plan=make_plan(make_entry(scaling=Scaling(fp32_flops=0.25)))
    )
    mixed = weigh_speed(way, Speed(8e9, 1e9, ""), Speed(1e9, 1e9, ""))
    assert mixed is not None
    assert 8e9 / mixed.flops_per_s == pytest.approx(2.75)
    assert weigh_speed(NARROW, None, None) is None


@pytest.mark.usefixtures("each_device")
def test_a_plans_fp32_modules_are_fp32_in_its_skeleton(tmp_path: Path) -> None:
    """A skeleton by a plan has fp16 weights, and fp32 ones in its fp32 modules."""
    source = resolve_source(save_pipeline("sd", tmp_path / "m", dtype=torch.float32))
    plan = make_plan(make_entry(scaling=Scaling(fp32_modules=("mid_block",))))
    way = Way("by p.json", {"unet": "fp16"}, "p.json", keeps_fp32=False, plan=plan)
    unet = find_components(build_way(source, way))["unet"]
    kinds = {name.startswith("mid_block."): x.dtype for name, x in unet.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.float16}


@pytest.mark.usefixtures("each_device")
def test_what_authors_keep_in_fp32_is_so_without_weights(tmp_path: Path) -> None:
    """A component that a plan runs in bf16 is cast by `apply_entry` here as it is on loading."""
    source = resolve_source(save_pipeline("wan", tmp_path / "m", dtype=torch.float32))
    entry = ComponentPlan("transformer", "WanTransformer3DModel", "", "bf16")
    way = Way("by p.json", {"transformer": "bf16"}, "p.json", plan=make_plan(entry))
    transformer = find_components(build_way(source, way))["transformer"]
    loaded, off = make_pipeline("wan").transformer.float(), Patches()
    before = {name: x.dtype for name, x in loaded.named_parameters()}
    apply_entry(loaded, entry, off)
    kinds = {name: x.dtype for name, x in loaded.named_parameters()}
    assert kinds == {name: x.dtype for name, x in transformer.named_parameters()}
    assert set(kinds.values()) == {torch.bfloat16, torch.float32}
    off.undo()
    assert before == {name: x.dtype for name, x in loaded.named_parameters()}


def explain_offloaded(kind: str) -> str:
    """Why a strategy was chosen that takes 4 GiB on a device of this kind, with 20 GiB waiting."""
    offloaded = Prediction(Strategy("leaf"), 4 * 2**30, "", 0, 20 * 2**30)
    tried = [Budgeted(WIDE, Fit((offloaded,)), None)]
    profile = SimpleNamespace(kind=kind)
    return " ".join(_explain(tried, (WIDE, offloaded), 8 * 2**30, cast(Any, profile), ()))


def test_a_mac_holds_all_weights_in_one_memory() -> None:
    """On MPS the reasons say what the run takes with the weights that wait; on CUDA those are elsewhere."""
    assert "with the weights that are not in use, the run takes 24.0 GiB." in explain_offloaded(
        "mps"
    )
    assert "not in use" not in explain_offloaded("cuda")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MemoryPlan:
    folder = save_pipeline("sd", tmp_path_factory.mktemp("sd") / "m", dtype=torch.bfloat16)
    options = PlanOptions(source=str(folder), device="v100", memory="1MiB", height=32, width=32)
    return plan_memory(options, Request(height=32, width=32), Display())


def test_plan_memory_compares_precisions(made: MemoryPlan) -> None:
    """On a V100 the table has fp16 and fp32 in every strategy, fp32 larger and slower in each."""
    assert (made.precision, made.flag) == ("fp16 rescaled", "auto")
    sizes = {(row.precision, row.strategy): row for row in made.rows}
    for (precision, strategy), row in sizes.items():
        if precision == "fp32" and not row.changes:
            narrow = sizes["fp16 rescaled", strategy]
            assert row.peak_bytes > 1.5 * narrow.peak_bytes
            if row.time_ratio is not None and narrow.time_ratio is not None:
                assert row.time_ratio > narrow.time_ratio
    fp8 = sizes["fp16 rescaled", "resident+fp8"]
    assert (fp8.changes, fp8.time_ratio) == ("weights rounded to fp8", None)
    assert any(reason.startswith("fp32: ") for reason in made.reasons)


def test_the_table_says_what_to_type(made: MemoryPlan) -> None:
    """Each precision has its heading, what is not measured says so, and the command is below."""
    console = Console(width=80, record=True)
    print_memory(made, console)
    text = console.export_text()
    assert "fp16 rescaled: 11 significant bits, error not measured." in text
    assert "fp32: 24 significant bits, error not measured." in text
    assert "not measured  " in text
    assert f"Use it: stopdown generate {made.source} PROMPT --memory 1024KiB" in text

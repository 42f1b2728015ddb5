"""Precision and memory decided together: which ways there are, and which is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from stopdown.app.display import Display
from stopdown.app.fit_command import FitOptions, fit, print_fit
from stopdown.app.forecasts import _explain
from stopdown.component_calls.components import find_components
from stopdown.devices.device_profiles import find_profile
from stopdown.devices.format_support import Support
from stopdown.memory import caching_allocator
from stopdown.memory.caching_allocator import WORKSPACE_BYTES
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
from stopdown.records import ComponentPlan, MemoryForecast, Plan, Scaling
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
    chosen="rescaled fp16",
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
    assert [way.chosen for way in ways] == ["rescaled fp16", "fp32"]
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
    assert [way.chosen for way in list_ways(FACTS, TURING, "fp16")] == ["rescaled fp16"]
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
        ("rescaled fp16", 1.0),
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


def explain_offloaded(kind: str) -> str:
    """Why a strategy was chosen that takes 4 GiB on a device of this kind, with 20 GiB waiting."""
    offloaded = Prediction(Strategy("block"), 4 * 2**30, "", 0, 20 * 2**30)
    tried = [Fit((offloaded,), plan=WIDE)]
    profile = SimpleNamespace(kind=kind)
    return " ".join(_explain(tried, (WIDE, offloaded), 8 * 2**30, cast(Any, profile)))


def test_a_mac_holds_all_weights_in_one_memory() -> None:
    """On MPS the reasons say what the run takes with the weights that wait; on CUDA those are elsewhere."""
    assert "with the weights that are not in use, the run takes 24.0 GiB." in explain_offloaded(
        "mps"
    )
    assert "not in use" not in explain_offloaded("cuda")


@pytest.fixture(scope="module", autouse=True)
def tensors_alone() -> Iterator[None]:
    """A tiny model is far below one segment of the allocator: forecasts here are of its tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caching_allocator, "find_workspace", lambda profile: None)
        yield


def test_the_answer_is_of_what_is_reserved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a V100 a model of kilobytes takes segments of 2 and 20 MiB, in the answer and the table."""
    monkeypatch.setattr(caching_allocator, "find_workspace", lambda profile: WORKSPACE_BYTES)
    made = forecast(folder, memory="1GiB", steps=4)
    assert made.peak_bytes < 2**20
    assert made.reserved_bytes >= 22 * 2**20
    assert made.reserved_bytes % 2**20 == 0
    assert f"{made.reserved_bytes / 2**20:.1f} MiB of 1.0 GiB on the device" in made.answer
    assert "reserved" in show(made, verbose=True)
    assert not forecast(folder, memory="1MiB", steps=4).fits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline("sd", tmp_path_factory.mktemp("sd") / "m", dtype=torch.bfloat16)


def forecast(folder: Path, **options: Any) -> MemoryForecast:
    """Of the tiny Stable Diffusion on a V100."""
    given = {"device": "v100", "memory": "1MiB", "host_memory": "1GiB", **options}
    return fit(FitOptions(source=str(folder), **given), Display())


@pytest.fixture(scope="module")
def made(folder: Path) -> MemoryForecast:
    return forecast(folder, verbose=True)


def show(made: MemoryForecast, *, verbose: bool = False) -> str:
    """What the command prints."""
    console = Console(width=80, record=True)
    print_fit(made, console, verbose=verbose)
    return console.export_text()


@pytest.mark.thorough
def test_fit_compares_precisions(made: MemoryForecast) -> None:
    """On a V100 the table has fp16 and fp32 in every strategy, fp32 larger and slower in each."""
    assert (made.precision, made.flag) == ("rescaled fp16", "auto")
    sizes = {(row.precision, row.strategy): row for row in made.rows}
    for (precision, strategy), row in sizes.items():
        if precision == "fp32":
            narrow = sizes["rescaled fp16", strategy]
            assert row.peak_bytes > 1.5 * narrow.peak_bytes
            assert row.time_ratio is not None
            assert narrow.time_ratio is not None
            assert row.time_ratio > narrow.time_ratio
    assert any(reason.startswith("fp32 would also fit: ") for reason in made.reasons)


@pytest.mark.thorough
def test_the_table_is_shown_on_request(made: MemoryForecast) -> None:
    """Each precision has its heading, what is not measured says so, and the command is the second line."""
    text = show(made, verbose=True)
    assert text.startswith("Yes, it fits: ")
    assert "rescaled fp16: 11 significant bits, error not measured." in text
    assert "fp32: 24 significant bits, error not measured." in text
    assert f"→ stopdown generate {made.source} PROMPT --memory 1MiB" in text


def test_the_first_line_is_the_answer(folder: Path) -> None:
    """It has the strategy, the bytes of both memories and the time; only one precision was run dry."""
    made = forecast(folder, steps=4)
    answer, command, more, *_ = show(made).splitlines()
    row = next(row for row in made.rows if row.strategy == made.chosen)
    assert answer.startswith(
        f"Yes, it fits: {row.peak_bytes / 2**10:.0f} KiB of 1.0 MiB on the device, all weights resident,"
    )
    assert answer.endswith(", about 1 s per run")
    assert command == f"→ stopdown generate {folder} PROMPT --memory 1MiB --steps 4"
    assert more == "Add -v to see the other strategies."
    assert list(made.bits) == ["rescaled fp16"]


@pytest.mark.thorough
def test_weights_that_wait_are_counted_in_host_memory_or_files(folder: Path) -> None:
    """With too little host memory they stay in files, and the answer says so."""
    least = min(forecast(folder).rows, key=lambda row: row.peak_bytes)
    limit = f"{least.peak_bytes / 0.95 / 2**10 + 1:.0f}KiB"
    made = forecast(folder, memory=limit)
    assert made.host_bytes > 0
    assert f", {made.host_bytes / 2**10:.0f} KiB of host memory, " in made.answer
    made = forecast(folder, memory=limit, host_memory="1KiB")
    assert made.host_bytes == 0
    assert " KiB of weights in files, " in made.answer


@pytest.mark.thorough
def test_weights_read_from_disk_at_every_step_are_said_first(folder: Path) -> None:
    """Blocks that come from files at each step are no plain yes, and the time is that of a disk."""
    rows = forecast(folder, verbose=True, host_memory="1KiB", steps=50).rows
    blocks = min(x.peak_bytes for x in rows if x.strategy.startswith("block"))
    limit = f"{blocks / 0.95 / 2**10 + 1:.0f}KiB"
    slow = forecast(folder, memory=limit, host_memory="1KiB", steps=50)
    fast = forecast(folder, memory=limit, steps=50)
    assert slow.fits
    assert slow.answer.startswith("It fits only from disk, about ")
    assert " read at every step: " in slow.answer
    assert fast.answer.startswith("Yes, it fits: ")
    assert fast.seconds is not None
    assert slow.seconds is not None
    assert slow.seconds > 10 * fast.seconds
    assert any("files at 0.5 GB/s" in reason for reason in slow.reasons)


@pytest.mark.thorough
def test_a_limit_above_the_device_is_the_device(folder: Path) -> None:
    """A T4 has less than 15 GiB; that is said once, and the forecast goes by what it has."""
    said: list[str] = []

    class Recorder(Display):
        def announce(self, text: str) -> None:
            said.append(text)

    given: dict[str, Any] = {"source": str(folder), "device": "t4"}
    made = fit(FitOptions(**given, memory="15GiB"), Recorder())
    assert made.limit_bytes == find_profile("t4").memory_bytes < 15 * 2**30
    [text] = said
    assert "less than the 15.0 GiB of --memory" in text
    assert fit(FitOptions(**given, memory="1GiB"), Recorder()).limit_bytes == 2**30
    assert len(said) == 1


@pytest.mark.thorough
def test_where_all_fits_nothing_smaller_is_predicted(folder: Path) -> None:
    """The answer is the one of the whole table; with --json there is the table, and so if it is tight."""
    room = forecast(folder, memory="1GiB", height=64, width=64)
    assert {row.strategy for row in room.rows} == {"resident", "component", "block"}
    for shows in ({"verbose": True}, {"json": True}):
        table = forecast(folder, memory="1GiB", height=64, width=64, **shows)
        assert "block+tiling" in {row.strategy for row in table.rows}
        assert (table.answer, table.command) == (room.answer, room.command)
    resident = next(row.peak_bytes for row in room.rows if row.strategy == "resident")
    tight = forecast(folder, memory=f"{resident / 2**10:.0f}KiB", height=64, width=64)
    assert tight.chosen != "resident"
    assert "resident+tiling" in {row.strategy for row in tight.rows}


@pytest.mark.thorough
def test_what_does_not_fit_names_the_nearest_that_does(folder: Path) -> None:
    """The answer has a smaller size, which fits by itself; other precisions were tried before."""
    rows = forecast(folder, verbose=True, height=64, width=64).rows
    least = min(row.peak_bytes for row in rows)
    memory = f"{least / 2**10:.0f}KiB"
    made = forecast(folder, memory=memory, height=64, width=64)
    assert not made.fits
    assert made.reduced is not None
    assert len(made.bits) > 1
    assert made.answer.startswith(
        "No, it does not fit. The smallest strategy, block + tiling in rescaled fp16, needs "
    )
    assert made.answer.endswith(f" The nearest size that fits is {made.reduced.made}.")
    height, width = made.reduced.made.split("x")
    assert f" --height {height} --width {width} " in f"{made.command} "
    smaller = forecast(folder, memory=memory, height=int(height), width=int(width))
    assert smaller.fits
    nothing = forecast(folder, memory="1KiB")
    assert nothing.answer.endswith(" Smaller pictures and fewer frames were tried, and none fits.")
    assert nothing.command == ""

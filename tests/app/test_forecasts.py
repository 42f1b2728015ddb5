"""Forecasts of `fit`: the answer, the command, the table and what it names when nothing fits."""

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
from stopdown.devices.device_profiles import find_profile
from stopdown.memory import caching_allocator
from stopdown.memory.caching_allocator import WORKSPACE_BYTES
from stopdown.memory.forecast import Fit
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.number_formats import format_bytes
from stopdown.records import ComponentPlan, MemoryForecast, Plan
from stopdown.runtime import memory_limits
from stopdown.testing import save_pipeline


def explain_offloaded(kind: str) -> str:
    """Why a strategy was chosen that takes 4 GiB on a device of this kind, with 20 GiB waiting."""
    offloaded = Prediction(Strategy("block"), 4 * 2**30, "", 0, 20 * 2**30)
    plan = Plan("", precision="fp32", chosen="fp32", components=(ComponentPlan("unet"),))
    tried = [Fit((offloaded,), plan=plan)]
    profile = SimpleNamespace(kind=kind)
    return " ".join(_explain(tried, (plan, offloaded), 8 * 2**30, cast(Any, profile)))


def test_a_mac_holds_all_weights_in_one_memory() -> None:
    """On MPS the reasons say what the run takes with the weights that wait; on CUDA those are elsewhere."""
    assert "with the weights that aren't in use, the run takes 24.0 GiB." in explain_offloaded(
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
    assert (made.precision, made.flag) == ("fp16 with a plan", "auto")
    sizes = {(row.precision, row.strategy): row for row in made.rows}
    for (precision, strategy), row in sizes.items():
        if precision == "fp32":
            narrow = sizes["fp16 with a plan", strategy]
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
    assert "fp16 with a plan: 11 significant bits." in text
    assert "fp32: 24 significant bits." in text
    assert f"→ stopdown generate {made.source} PROMPT --memory 1MiB" in text


def test_the_first_line_is_the_answer(folder: Path) -> None:
    """It has the strategy, the bytes of both memories and the time; only one precision was run dry."""
    made = forecast(folder, steps=4)
    answer, command, more, *_ = show(made).splitlines()
    row = next(row for row in made.rows if row.strategy == made.chosen)
    assert answer.startswith(
        f"Yes, it fits: {row.peak_bytes / 2**10:.0f} KiB of 1.0 MiB on the device, with all weights on it,"
    )
    assert answer.endswith(", about 1 s per run.")
    assert command == f"→ stopdown generate {folder} PROMPT --memory 1MiB --steps 4"
    assert more == "Add -v to compare memory strategies."
    assert list(made.bits) == ["fp16 with a plan"]


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


def test_a_forecast_for_a_device_of_this_machine_is_that_of_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes by what is free, as a run does, and not by all memory; its command names the device."""
    monkeypatch.setattr(memory_limits, "find_host_bytes", lambda: 2**30)
    made = forecast(folder, device="cpu", memory="auto", steps=1)
    assert made.limit_bytes == 2**30
    assert made.command == f"stopdown generate {folder} PROMPT --device cpu --steps 1"
    assert "--device" not in forecast(folder, steps=1).command  # a V100 that isn't here


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
        "No, it doesn't fit. The smallest strategy, block+tiling in fp16 with a plan, needs "
    )
    # it needs what the limit is, so the share that it may take has to be named
    assert f" and at most 95 % of {format_bytes(made.limit_bytes)} may be used." in made.answer
    assert made.answer.endswith(f" The nearest size that fits is {made.reduced.made}.")
    height, width = made.reduced.made.split("x")
    assert f" --height {height} --width {width} " in f"{made.command} "
    smaller = forecast(folder, memory=memory, height=int(height), width=int(width))
    assert smaller.fits
    nothing = forecast(folder, memory="1KiB")
    assert nothing.answer.endswith(
        " Stopdown also tried smaller pictures and fewer frames, but none of them fit."
    )
    assert nothing.command == ""

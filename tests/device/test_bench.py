"""`stopdown bench`: every row on the CPU and on a device, in one report without names and paths."""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from device.simulated_device import KIND, Simulated
from stopdown.bench import (
    WAYS,
    BenchRow,
    Report,
    _Bench,
    hide_paths,
    list_subjects,
    measure_models,
    render,
)
from stopdown.devices.device_choice import choose_device
from stopdown.doctor import quote_measured
from stopdown.pipelines.requests import Request
from stopdown.sources.sources import resolve_source


@pytest.fixture(scope="module")
def overflowing(save_tiny: Callable[..., Path]) -> Path:
    """A Stable Diffusion whose UNet overflows in fp16."""
    return save_tiny("sd", "fp32", "unet")


def measure_named(folder: Path, device: str) -> Report:
    """Measure the model that was named alone."""
    chosen = choose_device(device)
    subjects = list_subjects(resolve_source(str(folder)), chosen, Request(steps=1))
    return measure_models(chosen, subjects[:1], 60, lambda *_: None)


@pytest.fixture(scope="module")
def measured(_simulated_devices: Simulated, overflowing: Path) -> Report:
    """What was measured on the device."""
    with _simulated_devices.present():
        return measure_named(overflowing, KIND)


@pytest.mark.thorough
def test_every_row_on_a_device(measured: Report) -> None:
    """Plain fp16 is NaN, a plan's is nearer to fp32 than bf16 is, and the guard changes no bit of it."""
    rows = {row.way: row for row in measured.rows}
    assert tuple(rows) == WAYS
    assert [row.note for row in measured.rows] == [""] * len(WAYS)
    assert (rows["fp32"].rel_err, rows["fp32"].time_ratio) == (0.0, 1.0)
    assert (rows["fp16-plain"].rel_err, rows["fp16-plain"].non_finite > 0) == (None, True)
    assert 0 < (rows["fp16"].rel_err or 0) < (rows["bf16"].rel_err or 0)
    assert rows["fp16, guarded"].rel_err == rows["fp16"].rel_err
    for name in ("fp32", "fp16"):
        assert rows[name].peak_bytes == pytest.approx(rows[name].predicted_bytes, rel=0.15)


@pytest.mark.thorough
def test_nobody_is_named(measured: Report, overflowing: Path) -> None:
    """The report has no path, and neither the host's name nor the user's nor the folder's."""
    text = render(measured)
    words = set(re.findall(r"[\w.-]+", text))
    assert not words & {getpass.getuser(), platform.node(), overflowing.name, str(Path.home())}
    assert not re.search(r"/(home|root|tmp|Users|usr|work)\b", text)


def test_paths_are_hidden() -> None:
    """A message of a device is shown without the paths in it."""
    assert hide_paths("No file /home/me/a b.py: 'C:\\Users\\me\\x', ~/x") == (
        "No file PATH b.py: 'PATH', PATH"
    )


def test_a_home_folder_with_a_space_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second word of a name isn't left over."""
    monkeypatch.setattr(Path, "home", lambda: Path("/home/Jane Doe"))
    assert hide_paths("No file /home/Jane Doe/models/x.") == "No file PATH"


@pytest.mark.thorough
def test_a_refused_precision_is_a_sentence(simulated: Simulated, overflowing: Path) -> None:
    """What a device refuses stands in its row, and the other rows are measured."""
    simulated.act_as("cuda", computes_not=[torch.bfloat16])
    rows = {row.way: row for row in measure_named(overflowing, KIND).rows}
    assert "not implemented for 'BFloat16'" in rows["bf16"].note
    assert (rows["bf16"].time_s, rows["fp16"].note) == (None, "")


def test_generated_weights_are_those_of_a_large_denoiser() -> None:
    """On a CPU they are small, they are the same each time, and some exceed fp16's maximum."""
    subject = list_subjects(resolve_source("shapes"), choose_device("cpu"), Request(steps=1))[1]
    assert subject.name == "CogVideoX, 2 layers 128 wide"
    first, again = (list(subject.build().transformer.parameters()) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_the_report_begins_with_its_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a report draws is read back as `doctor` quotes it."""
    rows = (
        BenchRow("shapes", "fp32", 2.0, 1.0, 2**20, 2**20, 0.0),
        BenchRow("shapes", "bf16", 3.0, 1.5, 2**19, 2**19, 0.0123),
        BenchRow("shapes", "fp16-plain", 1.0, 0.5, 2**19, 2**19, None, 1234),
        BenchRow("shapes", "fp16", 1.02, 0.51, 2**19, 2**19, 0.00134),
        BenchRow("shapes", "fp16, guarded", note="It did not fit."),
    )
    path = tmp_path / "tesla-t4.md"
    path.write_text(render(Report("Tesla T4", "cuda", 15 * 2**30, {"torch": "2.13.0+cu130"}, rows)))
    assert path.read_text().startswith(
        "**Error against fp32: 0.13 % in fp16 with a plan, 1,234 NaN or Inf in plain fp16, "
        "1.2 % in bf16.**\n\n"
        "Tesla T4 (cuda, 15.0 GiB). torch 2.13.0+cu130.\n"
    )
    late = (*rows[:3], BenchRow("shapes", "fp16", note="left out after 5 minutes"), rows[4])
    assert render(Report("Tesla T4", "cuda", 2**30, {}, late)).startswith(
        "**Error against fp32: 1,234 NaN or Inf in plain fp16, 1.2 % in bf16. Not "
        "measured: fp16 with a plan.**"
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import devices

    said = "\n".join(devices.describe(path))
    assert 'name = "Tesla T4"\nbackend = "cuda"\ntorch = "2.13.0+cu130"' in said
    assert '{ subject = "shapes", way = "bf16", time_ratio = 1.5, rel_err = 0.012 }' in said
    assert '{ subject = "shapes", way = "fp16-plain", time_ratio = 0.5 }' in said
    assert said.count("way = ") == 4


def test_what_was_sent_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What doctor knows of devices is what is stored, and it is said of a device of that name alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import devices

    assert devices.KNOWN.read_text() == devices.write_known()
    for path in devices.DEVICES.glob("*.md"):
        name = path.read_text().splitlines()[2].partition(" (")[0]
        quoted = list(quote_measured(name, "cpu"))
        assert quoted
        assert all(path.name in said for said in quoted)
        assert list(quote_measured(f"{name} 2", "cpu")) == []
        assert list(quote_measured(name, "cpu", {"fp16"})) == quoted


def test_a_processor_that_emulates_bf16_is_another_one() -> None:
    """Where bf16 was a quarter of fp32's time, a processor of that name without bf16 is not quoted."""
    assert list(quote_measured("AMD EPYC", "cpu"))
    assert list(quote_measured("AMD EPYC", "cpu", {"bf16", "fp16"})) == []


def test_without_fp32_nothing_is_measured_against_another_precision(tmp_path: Path) -> None:
    """Where fp32 doesn't fit, the next precision isn't taken for it: ratios and errors are unknown."""
    subject = list_subjects(resolve_source("shapes"), choose_device("cpu"), Request(steps=1))[0]
    row = _Bench(choose_device("cpu"), subject, lambda *_: None).measure("bf16")
    assert (row.note, row.time_s is None) == ("", False)
    assert (row.time_ratio, row.rel_err, row.non_finite) == (None, None, 0)
    rows = (
        BenchRow("shapes", "fp32", note="It did not fit."),
        row,
        BenchRow("shapes", "fp16-plain", 1.0, None, 2**19, 2**19, None, 1234),
        BenchRow("shapes", "fp16", note="It did not fit."),
    )
    path = tmp_path / "t4.md"
    path.write_text(render(Report("Tesla T4", "cuda", 2**30, {"torch": "2.13.0"}, rows)))
    assert path.read_text().startswith(
        "**Error against fp32: 1,234 NaN or Inf in plain fp16. Not measured: fp16 with a plan, bf16.**"
    )
    assert re.search(r"^\| bf16 \| [\d.]+ s \| – \| .* \| – \|$", path.read_text(), re.MULTILINE)

"""`stopdown bench`: every row on the CPU and on a device, kept as it is done, without names and paths."""

from __future__ import annotations

import dataclasses
import getpass
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from device.simulated_device import KIND, Simulated
from stopdown.app.bench_command import BenchOptions, bench
from stopdown.app.display import Display
from stopdown.bench import session
from stopdown.bench.records import Benchmark, render
from stopdown.bench.session import hide_paths
from stopdown.bench.ways import WAYS, choose_shape, make_generated
from stopdown.devices.environment import choose_device
from stopdown.doctor import quote_measured
from stopdown.records import read_record

pytestmark = pytest.mark.thorough

Run = Callable[..., tuple[int, str, str]]
QUICK = ("fp32", "fp16", "rescaled", "guarded", "offloaded", "sums in fp16")


@pytest.fixture(scope="module")
def overflowing(save_tiny: Callable[..., Path]) -> Path:
    """A Stable Diffusion whose UNet overflows in fp16."""
    return save_tiny("sd", "fp32", "unet")


def measure(folder: Path, output: Path, device: str = KIND, **options: Any) -> Benchmark:
    """One step, in ways that take no compiler."""
    ways: dict[str, Any] = {"source": str(folder), "ways": QUICK, "size": "none", "steps": 1}
    return bench(BenchOptions(**ways | {"output": output, "device": device, **options}), Display())[
        0
    ]


@pytest.fixture(scope="module")
def measured(
    _simulated_devices: Simulated, overflowing: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What was measured on the device."""
    path = tmp_path_factory.mktemp("bench") / "a.json"
    with _simulated_devices.present():
        assert measure(overflowing, path).is_complete
    return path


def read_rows(path: Path) -> dict[str, Any]:
    return {row.way: row for row in read_record(path, Benchmark).rows}


def test_a_page_says_that_it_is_not_complete(measured: Path) -> None:
    """In one whole sentence, and only then."""
    made = read_record(measured, Benchmark)
    said = "The same command continues."
    assert said not in render(made)
    assert said in render(dataclasses.replace(made, is_complete=False))


def test_every_row_on_a_device(measured: Path) -> None:
    """Times, peaks beside predictions, errors, host reads: fp16 is NaN, what is rescaled is not."""
    rows = read_rows(measured)
    assert list(rows) == list(QUICK)
    assert all(row.note == "" and row.time_s > 0 and row.operations > 100 for row in rows.values())
    assert (rows["fp32"].rel_err, rows["fp32"].time_ratio) == (0.0, 1.0)
    assert (rows["fp16"].rel_err, rows["fp16"].non_finite > 0) == (None, True)
    assert 0 < rows["rescaled"].rel_err < 0.05
    assert rows["guarded"].rel_err == rows["rescaled"].rel_err == rows["offloaded"].rel_err
    assert rows["guarded"].host_reads > rows["rescaled"].host_reads
    for name in ("fp32", "rescaled", "offloaded"):
        assert rows[name].peak_bytes == pytest.approx(rows[name].predicted_bytes, rel=0.15)
    assert rows["offloaded"].peak_bytes < rows["rescaled"].peak_bytes
    page = measured.with_suffix(".md").read_text()
    assert page.startswith("# Simulated accelerator (simulated")
    assert "| math |" in page


def test_sums_in_fp16_are_another_row(measured: Path) -> None:
    """On a device that heeds PyTorch's switch the error is another with it, and the switch is off again."""
    rows = read_rows(measured)
    assert rows["sums in fp16"].rel_err != rows["rescaled"].rel_err
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation


def test_nobody_is_named(measured: Path, overflowing: Path) -> None:
    """Neither file has a path, the host's name, the user's or the folder's."""
    for path in (measured, measured.with_suffix(".md")):
        text = path.read_text()
        words = set(re.findall(r"[\w.-]+", text))
        assert not words & {getpass.getuser(), platform.node(), overflowing.name, str(Path.home())}
        assert not re.search(r"/(home|root|tmp|Users|usr|work)\b", text)
    assert hide_paths("No file /home/me/a b.py: 'C:\\Users\\me\\x', ~/x") == (
        "No file PATH b.py: 'PATH', PATH"
    )


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(
    overflowing: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without time nothing is measured; a row that is done is kept through a break, and not made again."""
    path = tmp_path / "a.json"
    ways = ("--way", "fp32", "--way", "fp16", "--steps", 1, "--size", "none", "--device", "cpu")
    start = ("bench", overflowing, "-o", path, *ways)
    assert run(*start, "--minutes", 1e-9)[0] == 1
    measure = session._Bench.measure

    def stop(self: Any, name: str) -> Any:
        if name == "fp16":
            raise KeyboardInterrupt
        return measure(self, name)

    monkeypatch.setattr(session._Bench, "measure", stop)
    assert run(*start)[0] == 130
    first = read_rows(path)["fp32"]
    monkeypatch.setattr(session._Bench, "measure", measure)
    assert run(*start)[0] == 0
    rows = read_rows(path)
    assert (rows["fp32"], list(rows)) == (first, ["fp32", "fp16"])
    code, _, said = run(*start, "--steps", 2)
    assert code == 2
    assert "holds a benchmark of another device, version or option" in said


def test_a_way_that_fails_is_a_sentence(
    simulated: Simulated, overflowing: Path, run: Run, tmp_path: Path
) -> None:
    """What a device refuses stands in its row without a path, and the other rows are measured.

    Where all are refused, the exit code says so.
    """
    simulated.act_as("cuda", computes_not=[torch.float16])
    measure(overflowing, tmp_path / "a.json", ways=("fp32", "fp16"))
    rows = read_rows(tmp_path / "a.json")
    assert "not implemented for 'Half'" in rows["fp16"].note
    assert (rows["fp16"].time_s, rows["fp32"].note) == (None, "")
    words = ("bench", overflowing, "-o", tmp_path / "b.json", "--steps", 1, "--size", "none")
    assert run(*words, "--device", KIND, "--way", "fp16")[0] == 1


def test_generated_weights_are_of_the_size_that_was_asked_for() -> None:
    """The denoiser's parameters in fp16 are near the size, it overflows, and it is the same each time."""
    assert choose_shape(10 * 2**30) == (48, 40)
    assert choose_shape(2**31) == (48, 8)
    subject = make_generated(2**22, choose_device("cpu"), 1)
    pipe, again = subject.build(), subject.build()
    count = sum(x.numel() for x in pipe.transformer.parameters())
    assert 0.7 * 2**22 < 2 * count < 1.5 * 2**22
    for one, other in zip(
        pipe.transformer.parameters(), again.transformer.parameters(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("where", [KIND, "cpu"])
def test_the_whole_table(
    where: str, simulated: Simulated, save_tiny: Callable[..., Path], run: Run, tmp_path: Path
) -> None:
    """Every way of both models; on a device for which nothing is compiled that row says so."""
    path = tmp_path / "a.json"
    folder = save_tiny("cogvideox", "fp32", "transformer")
    code, *_ = run(
        *("bench", folder, "--steps", 1, "--size", "1MiB", "--minutes", 60, "-o", path),
        *("--device", where),
    )
    assert code == 0
    made = read_record(path, Benchmark)
    assert {(row.subject, row.way) for row in made.rows} == {
        (subject, way) for subject in ("CogVideoXPipeline", "generated") for way in WAYS
    }
    failed = {row.way for row in made.rows if row.note}
    assert failed <= {"compiled"}


def test_what_was_sent_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What doctor knows of devices is what is stored, and it is said of a device of that name alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import devices

    assert devices.KNOWN.read_text() == devices.write_known()
    for path in devices.DEVICES.glob("*.json"):
        made = read_record(path, Benchmark)
        quoted = list(quote_measured(made.device, made.backend))
        assert len(quoted) == len({row.subject for row in made.rows})
        assert all(path.name in said for said in quoted)
        assert list(quote_measured(f"{made.device} 2", made.backend)) == []

"""What tests of several folders share: tiny pipelines that are saved once, one thread a process."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from device.simulated_device import Simulated
    from stopdown.records import Plan

pytest_plugins = ("drawn_tests",)

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")  # no example fails because a machine is slow or busy


def pytest_configure() -> None:
    """Processes of one run share the cores: each gets one thread, which tiny tensors want anyway.

    So do those that tests start: two threads each, which wait for each other while others have the cores,
    took up to four times as long. Nothing is looked through while modules are imported and tests collected:
    nearly all of it stays.
    """
    gc.disable()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"  # before PyTorch is imported, and NumPy


LONGEST = (
    *("docs/test_pages.py", "quantizers/test_loading.py"),
    *("plans/test_certified.py", "batch/test_pools.py"),
    *("device/test_bench.py", "device/test_commands_on_device.py"),
)
"""Files that begin first: with one file a worker the last one to begin decides when all is over."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, in the order above; `--no-loadscope-reorder` keeps it.

    Tests that take minutes have no limit of time: they would fail on a machine that is slow or busy. Of
    a function with `default_rows(n)` the rows after the first n are `thorough`.
    """
    rows = Counter[tuple[Path, str]]()
    for item in items:
        if any(map(item.get_closest_marker, ("slow", "trained"))):
            item.add_marker(pytest.mark.timeout(0), append=False)
        elif kept := item.get_closest_marker("default_rows"):
            function = item.path, item.nodeid.partition("[")[0]
            rows[function] += 1
            if rows[function] > kept.args[0]:
                item.add_marker(pytest.mark.thorough)
    root = Path(__file__).parent
    ranks = {root / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(LONGEST)))


SERVERS = (
    ("hostile/",),
    ("pipelines/test_convert",),
    ("pipelines/test_batch_workers", "pipelines/test_torchrun"),
)
"""Files that share a process, which takes seconds to import everything: on one worker."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker gets a file at a time, as with `loadfile`, or all files that share a server."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((x[0] for x in SERVERS if file.removeprefix("tests/").startswith(x)), file)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What was imported stays, and is not looked through at each collection: that took a seventh of all."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept between runs is kept for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOPDOWN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def fp16_convolutions() -> Iterator[None]:
    """Convolutions in fp16 are summed in fp32 and rounded once, as devices do.

    A CPU without fp16 takes 57 times as long for its own, which differ by their sums alone. Processes
    that a test starts have those.
    """
    import torch

    own = torch.ops.aten._convolution.default

    def convolve(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        flags = (False, False, True, True)  # benchmark, deterministic, cuDNN, TF32: not the CPU's
        given = (x, weight, bias)
        if any(y is not None and y.dtype != torch.float16 for y in given):  # or a mixture of dtypes
            return own(*given, *rest, *flags)
        return own(*(y if y is None else y.float() for y in given), *rest, *flags).half()

    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution", convolve, "CPU")
    yield
    library._destroy()


@pytest.fixture(scope="session", autouse=True)
def _untraced_captures() -> None:
    """PyTorch describes no tensor of a capture, with its stack, to a log that nobody reads.

    It does so while its trace has a listener, and pytest listens to each logger that does not propagate.
    """
    import torch  # sets whether it propagates

    logging.getLogger(f"{torch.__name__}.__trace").propagate = True


BF16_FLAGS = frozenset({"avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16"})
FP16_FLAGS = BF16_FLAGS | {"avx512_fp16", "amx_bf16"}
PROCESSORS = {
    "bf16": (BF16_FLAGS, {"fp32": 1.0, "bf16": 0.8, "fp16": 20.0}),
    "fp16": (FP16_FLAGS, {"fp32": 1.0, "bf16": 0.2, "fp16": 0.2}),
    "plain": (frozenset[str](), {"fp32": 1.0, "bf16": 20.0, "fp16": 20.0}),
}
"""Kinds of processors by the 16-bit formats that they compute in: flags, and times over those of fp32."""

UsesProcessor = Callable[[pytest.MonkeyPatch, str], None]


@pytest.fixture(autouse=True)
def _no_guard_is_left() -> Iterator[None]:
    from processes.left_guards import leaving_no_guard

    with leaving_no_guard():
        yield


@pytest.fixture(scope="session", autouse=True)
def put_processor() -> Iterator[UsesProcessor]:
    """What is decided by a CPU's formats is decided for one with bf16 and without fp16, wherever it runs.

    The fixture itself puts another one in its place: `this` is the machine's own.
    """
    from stopdown.devices import device_profiles as profiles
    from stopdown.devices import format_support, maker_formats
    from stopdown.devices.device_choice import Device
    from stopdown.devices.format_support import Timing
    from stopdown.devices.maker_formats import Verdict

    judge, times = format_support.judge_device, format_support._time_formats

    def put(patch: pytest.MonkeyPatch, name: str) -> None:
        def say(device: Device) -> dict[str, Verdict]:
            if name == "this" or device.type != "cpu":
                return judge(device)
            return maker_formats.judge_cpu(PROCESSORS[name][0])

        def measure(device: Device) -> dict[str, Timing]:
            if name == "this" or device.type != "cpu":
                return times(device)
            return {key: Timing(value, value) for key, value in PROCESSORS[name][1].items()}

        patch.setattr(format_support, "judge_device", say)
        patch.setattr(profiles, "judge_device", say)
        patch.setattr(format_support, "_time_formats", measure)
        format_support._probe_once.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        put(patch, "bf16")
        yield put


@pytest.fixture
def processor(
    request: pytest.FixtureRequest, put_processor: UsesProcessor, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A processor of the kind that a test names by `parametrize(..., indirect=True)`; else its own."""
    from stopdown.devices import format_support

    name = getattr(request, "param", "this")
    put_processor(monkeypatch, name)
    yield name
    format_support._probe_once.cache_clear()


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates by the machine's speed are those of one with 100 GFLOP/s and 10 GB/s, wherever it runs."""
    from stopdown.memory import speed

    known = speed.Speed(1e11, 1e10, "Known.")
    monkeypatch.setattr(speed, "measure_speed", lambda *_: known)


@pytest.fixture(scope="session")
def _simulated_devices(pytestconfig: pytest.Config) -> Simulated:
    from device.simulated_device import load_device

    return load_device(pytestconfig.cache.mkdir("simulated-device"))


@pytest.fixture
def simulated(_simulated_devices: Simulated) -> Iterator[Simulated]:
    """Two accelerators that are not there, for one test; what earlier ones left is gone."""
    gc.collect()
    with _simulated_devices.present() as devices:
        yield devices


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `each_device` runs on the CPU and on the simulated one, there in the slow suite."""
    if "each_device" in metafunc.fixturenames:
        there = pytest.param("simulated", marks=pytest.mark.slow)
        places = [pytest.param("cpu", id=pytest.HIDDEN_PARAM), there]
        metafunc.parametrize("each_device", places, indirect=True)


@pytest.fixture
def each_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where tiny pipelines are made, and what commands choose: the CPU, or a device that is not.

    A test that never reaches that device fails.
    """
    name: str = request.param
    if name == "cpu":
        yield name
        return
    from models import pipeline_calls
    from stopdown import testing

    build = testing.build_pipeline
    devices: Simulated = request.getfixturevalue("simulated")
    monkeypatch.setattr(pipeline_calls, "where", name)
    monkeypatch.setattr(testing, "build_pipeline", lambda *a, **k: build(*a, **k).to(name))
    before = devices.counts.operations
    yield name
    assert devices.counts.operations > before, "nothing was computed on the device"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder that commands run in, at the width of a small terminal."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    return folder


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny pipeline, by name, stored format and overflowing component."""
    from stopdown import testing
    from stopdown.number_formats import FORMATS

    root = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def save(name: str, stored: str = "bf16", overflow: str | None = None) -> Path:
        folder = root / f"{name}-{stored}-{overflow}"
        dtype = FORMATS[stored].torch_dtype
        return testing.save_pipeline(name, folder, dtype=dtype, overflow=overflow)

    return save


@pytest.fixture
def tiny(save_tiny: Callable[..., Path]) -> str:
    """A tiny CogVideoX, which is loaded in no time."""
    return str(save_tiny("cogvideox", "fp32"))


@pytest.fixture
def prompts_here(here: Path) -> Path:
    """The folder that commands run in, with three prompts in prompts.txt."""
    from models.batches import PROMPTS

    (here / "prompts.txt").write_text(PROMPTS)
    return here


@pytest.fixture(scope="session")
def save_planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Plan]]:
    """The folder of a tiny pipeline beyond fp16, and its measured plan, by name and residual stream."""
    from models import conversions
    from models.measured_plans import measure_pipeline

    @functools.cache
    def save(name: str, residual: str | None = None) -> tuple[Path, Plan]:
        folder = tmp_path_factory.mktemp(f"planned-{name}") / "model"
        conversions.build(name).save_pretrained(folder)
        asked = conversions.measured(name)
        return folder, measure_pipeline(str(folder), residual=residual, **asked)

    return save


PROGRESS = re.compile(r"^\w.* \([\d:]+(, [\d:]+ left)?\)\n", re.MULTILINE)
"""A line by which a command shows where no terminal is how far it has come."""


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Plans that are kept are those of one file's tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("STOPDOWN_CACHE", str(folder))
        yield folder


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A command in this process: its exit code, its stdout, and its stderr without progress."""
    from stopdown.app import cli

    def model_cli(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()  # what making the model wrote
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return int(left.value.code or 0), captured.out, PROGRESS.sub("", captured.err)

    return model_cli

"""Devices, formats, settings and memory: judged as tables, then tried on this machine."""

from __future__ import annotations

import itertools
import json
import math
import mmap
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch

from stopdown.devices import environment
from stopdown.devices.device_memory import peak_memory
from stopdown.devices.environment import (
    Device,
    Support,
    Timing,
    Verdict,
    cache_folder,
    choose_device,
    describe_machine,
    judge_accelerator,
    judge_cpu,
    list_devices,
    normalise_cpu_flags,
    probe_formats,
    read_cpu_flags,
    read_numeric_variables,
    select_device,
    weigh_support,
)
from stopdown.errors import OptionError
from stopdown.number_formats import name_dtype

pytestmark = pytest.mark.usefixtures("processor")

CPU = Device("cpu", 0, "a CPU", None, 2**34)
MPS = Device("mps", 0, "Apple M2", None, 2**34)
V100 = Device("cuda", 0, "Tesla V100", (7, 0), 2**34)
T4 = Device("cuda", 1, "Tesla T4", (7, 5), 2**34)


@pytest.fixture(autouse=True)
def nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test probes anew."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))


def test_no_property_has_a_deadline() -> None:
    """An example may take any time: what is slow on a busy machine is no fault."""
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check


# Settings


def test_the_cache_has_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """STOPDOWN_CACHE names the folder; without it the system's cache holds one of ours."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    assert not (tmp_path / "here").exists()
    monkeypatch.setenv("STOPDOWN_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "stopdown"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path.home() / "Library" / "Caches" / "stopdown"


def test_a_cache_that_is_a_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """STOPDOWN_CACHE that names a file is an error with the variable's name and a way on."""
    path = tmp_path / "file"
    path.write_text("")
    monkeypatch.setenv("STOPDOWN_CACHE", str(path))
    with pytest.raises(OptionError) as caught:
        cache_folder()
    assert str(caught.value) == (
        f"The environment variable STOPDOWN_CACHE is {path}, which is a file. "
        "It names the folder in which Stopdown keeps its files. "
        "Set it to a folder, or remove it: unset STOPDOWN_CACHE"
    )


def test_variables_that_change_numbers_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of PyTorch's libraries that change numbers are kept, others are not."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE", raising=False)
    numerics = read_numeric_variables()
    assert numerics["NVIDIA_TF32_OVERRIDE"] == "0"
    assert not {"HF_TOKEN", "ONEDNN_DEFAULT_FPMATH_MODE"} & set(numerics)


# The machine


def test_the_machine_is_described_for_json() -> None:
    """Versions, platform, CPU and threads are facts that survive JSON."""
    machine = describe_machine()
    assert json.loads(json.dumps(machine)) == machine
    assert machine["versions"]["torch"] == torch.__version__
    assert machine["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert machine["cpu"]
    assert machine["threads"] >= 1
    assert machine["memory_bytes"] > 2**28


def test_a_missing_package_has_no_version() -> None:
    """A package that is not installed is None, not an error."""
    assert environment.read_version("a-package-that-is-not-there") is None


# Devices


def test_the_cpu_is_always_there() -> None:
    """The last device is the CPU, with a name and its memory."""
    cpu = list_devices()[-1]
    assert (cpu.type, cpu.torch_name, cpu.capability) == ("cpu", "cpu", None)
    assert cpu.name
    assert cpu.memory_bytes > 2**28


@pytest.mark.parametrize(
    ("name", "devices", "chosen", "reason"),
    [
        (
            "auto",
            [V100, T4, CPU],
            V100,
            "cuda:0 (Tesla V100) comes first; also here: cuda:1, cpu.",
        ),
        ("auto", [MPS, CPU], MPS, "mps (Apple M2) comes first; also here: cpu."),
        (
            "auto",
            [CPU],
            CPU,
            "cpu (a CPU) is the only device that this build of PyTorch finds here.",
        ),
        ("cuda", [V100, T4, CPU], V100, "cuda:0 was requested."),
        ("CUDA:1", [V100, T4, CPU], T4, "cuda:1 was requested."),
        ("cpu", [V100, T4, CPU], CPU, "cpu was requested."),
        ("mps", [MPS, CPU], MPS, "mps was requested."),
    ],
)
def test_a_device_is_chosen_with_its_reason(
    name: str, devices: list[Device], chosen: Device, reason: str
) -> None:
    """cuda comes before mps and mps before cpu, unless one is named; the reason says which."""
    found = select_device(name, devices)
    assert found.reason == reason
    assert (found.type, found.index, found.name) == (chosen.type, chosen.index, chosen.name)


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        (
            "mps",
            [V100, CPU],
            "There is no device mps here. This machine, with this build of PyTorch, has: "
            'cuda:0 (Tesla V100), cpu (a CPU). Use device="cuda:0", or device="auto".',
        ),
        (
            "cuda:3",
            [V100, CPU],
            "There is no device cuda:3 here. This machine, with this build of PyTorch, has: "
            'cuda:0 (Tesla V100), cpu (a CPU). Use device="cuda:0", or device="auto".',
        ),
        (
            "gpu",
            [CPU],
            "The device 'gpu' is unknown. This machine, with this build of PyTorch, has: "
            'cpu (a CPU). Use device="cpu", or device="auto".',
        ),
    ],
)
def test_an_absent_device_is_refused_with_what_is_here(
    name: str, devices: list[Device], message: str
) -> None:
    """An absent and an unknown device are errors of usage that list the devices here."""
    with pytest.raises(OptionError) as caught:
        select_device(name, devices)
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


def test_this_machine_chooses_a_device() -> None:
    """`auto` takes the first device of this machine, and the CPU can be asked for by name."""
    first = list_devices()[0]
    assert (choose_device().type, choose_device().index) == (first.type, first.index)
    assert choose_device("cpu").reason == "cpu was requested."


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a V100 and a T4, as torch would describe it."""
    cards = [
        SimpleNamespace(name="Tesla V100", major=7, minor=0, total_memory=2**34),
        SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=2**34),
    ]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.usefixtures("two_cards")
def test_cuda_devices_are_described_by_torch() -> None:
    """Name, capability and memory come from torch, and the judgement from the capability."""
    assert list_devices()[:2] == [V100, T4]
    assert choose_device().torch_name == "cuda:0"
    assert not environment.judge_device(V100)["bf16"].native
    assert environment.judge_device(V100)["fp16"].native


@pytest.mark.usefixtures("two_cards")
def test_emulated_bf16_is_not_called_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a V100, where torch says that bf16 is supported, the answer is that it is emulated."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    seconds = {"fp32": 1.0, "bf16": 1.6, "fp16": 0.15}
    times = {name: Timing(value, value) for name, value in seconds.items()}
    monkeypatch.setattr(environment, "_time_formats", lambda _: times)
    environment._probe_once.cache_clear()
    formats = probe_formats(choose_device())
    environment._probe_once.cache_clear()
    assert (formats["bf16"].native, formats["bf16"].time_ratio) == (False, 1.6)
    assert (formats["fp16"].native, formats["fp16"].time_ratio) == (True, 0.15)
    assert formats["fp16"].reason == ("Compute capability 7.0 has fp16 arithmetic at full rate.")
    assert formats["fp16"].measured == (
        "Measured here, a matmul takes 0.15 and a convolution 0.15 times the time of fp32: it is faster."
    )


@pytest.mark.usefixtures("two_cards")
def test_the_peak_of_cuda_is_that_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On cuda the counter of the right device is reset at the start and read at the end."""
    calls = []
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda index: calls.append(("reset", index))
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 1000 + index)
    with peak_memory(T4) as peak:
        assert calls == [("reset", 1)]
    assert peak.peak_bytes == 1001


# Formats: what the makers say


@pytest.mark.parametrize(
    ("capability", "name", "fp16", "bf16"),
    [
        ((3, 7), "Tesla K80", False, False),
        ((5, 2), "GeForce GTX 980", False, False),
        ((5, 3), "Jetson Nano", True, False),
        ((6, 0), "Tesla P100", True, False),
        ((6, 1), "GeForce GTX 1080", False, False),
        ((6, 2), "Jetson TX2", True, False),
        ((7, 0), "Tesla V100-SXM2-32GB", True, False),
        ((7, 5), "Tesla T4", True, False),
        ((7, 5), "NVIDIA GeForce RTX 2060", True, False),
        ((7, 5), "NVIDIA GeForce GTX 1660 Ti", False, False),
        ((8, 0), "NVIDIA A100", True, True),
        ((8, 6), "NVIDIA GeForce RTX 3090", True, True),
        ((8, 9), "NVIDIA GeForce RTX 4090", True, True),
        ((9, 0), "NVIDIA H100", True, True),
        ((10, 0), "NVIDIA B200", True, True),
        ((12, 0), "NVIDIA GeForce RTX 5090", True, True),
    ],
)
def test_cuda_devices_are_judged_by_capability(
    capability: tuple[int, int], name: str, fp16: bool, bf16: bool
) -> None:
    """fp16 is native from 7.0 and on a few before, bf16 from 8.0; every verdict has a reason."""
    verdicts = judge_accelerator("cuda", capability, name)
    natives = {key: verdict.native for key, verdict in verdicts.items()}
    assert natives == {"fp32": True, "bf16": bf16, "fp16": fp16}
    assert all(verdict.reason.endswith(".") for verdict in verdicts.values())


def test_reasons_of_cuda_say_what_to_expect() -> None:
    """Emulated bf16, fp16 at 1/64 of the rate and the NaN of the GTX 16 series are said so."""
    assert judge_accelerator("cuda", (7, 0))["bf16"].reason == (
        "Compute capability 7.0 has no bf16 arithmetic (the first that has is 8.0); torch emulates "
        "it in fp32, and still says that it is supported."
    )
    assert "at 1/64 of the rate of fp32" in judge_accelerator("cuda", (6, 1))["fp16"].reason
    assert (
        "return NaN for some shapes"
        in judge_accelerator("cuda", (7, 5), "GeForce GTX 1650")["fp16"].reason
    )


@pytest.mark.parametrize(
    ("architecture", "fp16", "bf16"),
    [
        ("gfx803", False, False),
        ("gfx906", True, False),
        ("gfx908:sramecc+:xnack-", True, True),
        ("gfx90a", True, True),
        ("gfx942", True, True),
        ("gfx1031", True, False),
        ("gfx1100", True, True),
        ("gfx1201", True, True),
    ],
)
def test_amd_devices_are_judged_by_architecture(architecture: str, fp16: bool, bf16: bool) -> None:
    """CDNA has bf16 from gfx908, RDNA from gfx11; packed fp16 is older."""
    verdicts = judge_accelerator("rocm", (), architecture)
    assert (verdicts["fp16"].native, verdicts["bf16"].native) == (fp16, bf16)
    assert ("has no bf16" in verdicts["bf16"].reason) is not bf16


@pytest.mark.parametrize(
    ("chip", "macos", "bf16", "words"),
    [
        ("Apple M1", (13, 6), False, "macOS 13.6 has no bf16 on MPS"),
        ("Apple M3", (13, 6), False, "macOS 13.6 has no bf16 on MPS"),
        ("Apple M1 Max", (14, 5), False, "it is emulated"),
        ("Apple M2 Pro", (15, 0), False, "it is emulated"),
        ("Apple M3", (14, 0), True, "Apple M3 has bf16 arithmetic"),
        ("Apple M4 Max", (15, 2), True, "Apple M4 Max has bf16 arithmetic"),
        ("Intel(R) Core(TM) i7", (14, 0), False, "it is emulated"),
    ],
)
def test_apple_devices_are_judged_by_chip_and_system(
    chip: str, macos: tuple[int, ...], bf16: bool, words: str
) -> None:
    """bf16 wants macOS 14 and is emulated before M3; fp16 is native on all."""
    verdicts = judge_accelerator("mps", macos, chip)
    assert (verdicts["fp16"].native, verdicts["bf16"].native) == (True, bf16)
    assert words in verdicts["bf16"].reason


@pytest.mark.parametrize(
    ("flags", "fp16", "bf16"),
    [
        ("sse2 avx2 f16c avx512f avx512_vnni", False, False),
        ("avx512f avx512_bf16", False, True),
        ("avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16", True, True),
        ("avx512f amx_bf16 amx_fp16", True, True),
        ("fp asimd fphp asimdhp", True, False),
        ("fp asimd fphp asimdhp bf16 sve svebf16", True, True),
        ("hw.optional.arm.FEAT_FP16", True, False),
        ("", False, False),
    ],
)
def test_cpus_are_judged_by_their_flags(flags: str, fp16: bool, bf16: bool) -> None:
    """AMX, AVX-512 and Arm flags make a format native; f16c, which only converts, does not."""
    verdicts = judge_cpu(normalise_cpu_flags(flags.split()))
    assert (verdicts["fp16"].native, verdicts["bf16"].native) == (fp16, bf16)
    assert ("The CPU has no fp16" in verdicts["fp16"].reason) is not fp16


def test_flags_of_this_cpu_are_of_the_known_spelling() -> None:
    """What is read from this machine is in the spelling that the table judges."""
    assert read_cpu_flags() <= environment.list_known_flags()


EPYC = ["avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx_vnni"]
SAPPHIRE = [*EPYC, "avx512_fp16", "amx_tile", "amx_bf16"]


@pytest.mark.parametrize(
    ("flags", "limit", "native", "onednn"),
    [
        (SAPPHIRE, "", {"bf16", "fp16"}, {"bf16", "fp16"}),
        (SAPPHIRE, "AVX512_CORE_AMX", {"bf16", "fp16"}, {"bf16", "fp16"}),
        (SAPPHIRE, "avx512_core_bf16", {"bf16"}, {"bf16"}),
        (SAPPHIRE, "AVX512_CORE", set(), {"bf16"}),
        (SAPPHIRE, "AVX2", set(), set()),
        (SAPPHIRE, "of no such name", {"bf16", "fp16"}, {"bf16", "fp16"}),
        (EPYC, "", {"bf16"}, {"bf16"}),
        (EPYC, "DEFAULT", {"bf16"}, {"bf16"}),
        (EPYC, "AVX512_CORE_FP16", {"bf16"}, {"bf16"}),
        (EPYC, "AVX512_CORE", set(), {"bf16"}),
        (EPYC, "AVX2_VNNI", set(), set()),
        (["avx2", "avx_vnni", "avx_ne_convert"], "", {"bf16", "fp16"}, {"bf16", "fp16"}),
        (["avx2", "avx_ne_convert"], "AVX2_VNNI_2", {"bf16", "fp16"}, {"bf16", "fp16"}),
        (["avx2"], "", set(), set()),
        (["asimdhp", "bf16"], "AVX2", {"bf16", "fp16"}, set()),
    ],
)
def test_a_limit_of_onednn_limits_the_flags(
    flags: list[str], limit: str, native: set[str], onednn: set[str]
) -> None:
    """ONEDNN_MAX_CPU_ISA leaves no more than its instruction set; Arm's are another matter."""
    found = environment.limit_cpu_flags(normalise_cpu_flags(flags), limit)
    verdicts = judge_cpu(found)
    assert {name for name in ("bf16", "fp16") if verdicts[name].native} == native
    assert set(environment.find_onednn_formats(found)) == {"fp32", *onednn}


def test_flags_of_this_cpu_obey_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read with the flags, and nothing of 16 bits is left below AVX-512."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    left = read_cpu_flags.__wrapped__()
    assert not {flag for flag in left if flag.startswith(("avx", "amx"))}


@pytest.mark.parametrize("is_fp16", [True, False])
def test_pytorch_says_what_onednn_takes(monkeypatch: pytest.MonkeyPatch, is_fp16: bool) -> None:
    """PyTorch's answer outweighs the flags; without oneDNN nothing is given to it."""
    backend = torch.backends.mkldnn
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: is_fp16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(backend, "is_available", lambda: True)
    wanted = ("fp32", "bf16", "fp16") if is_fp16 else ("fp32", "bf16")
    assert environment.read_onednn_formats() == wanted
    with monkeypatch.context() as patch:
        patch.setattr(backend, "enabled", False)
        assert environment.read_onednn_formats() == ()
    monkeypatch.setattr(backend, "is_available", lambda: False)
    assert environment.read_onednn_formats() == ()


# Formats: what a timed probe says


def test_measurements_join_the_verdict() -> None:
    """The ratio is the geometric mean of both operations, and the reason says what it means."""
    reference = Timing(0.001, 0.002)
    verdict = Verdict(True, "Nothing is known.", is_known=False)
    support = weigh_support("bf16", verdict, Timing(0.004, 0.002), reference)
    assert asdict(support) == {
        "native": True,
        "works": True,
        "time_ratio": 2.0,
        "reason": "Nothing is known. Here it takes more than 1.5 times as long as fp32.",
        "measured": "Measured here, a matmul takes 4 and a convolution 1 times the time of fp32: it saves "
        "memory but is slower.",
        "is_slow": True,
    }


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seconds", [0.2, 1.49, 1.51, 30.0])
def test_where_facts_are_known_no_time_decides(native: bool, seconds: float) -> None:
    """Other work on the machine changes times, and no choice or reason with them."""
    timing = Timing(seconds, seconds)
    support = weigh_support("bf16", Verdict(native, "Documented."), timing, Timing(1.0, 1.0))
    assert (support.native, support.is_slow, support.reason) == (native, False, "Documented.")
    assert native or "fast" not in support.measured
    unknown = Verdict(True, "Nothing is known.", is_known=False)
    assert weigh_support("bf16", unknown, timing, Timing(1.0, 1.0)).is_slow is (seconds > 1.5)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.85, "it is faster"),
        (1.05, "it saves memory but no time"),
        (1.2, "it saves memory but is slower"),
    ],
)
def test_speed_is_said_in_words(seconds: float, words: str) -> None:
    """A ratio below 0.9 is faster, one above 1.1 slower."""
    timing = Timing(seconds, seconds)
    support = weigh_support("fp16", Verdict(True, "Native."), timing, Timing(1.0, 1.0))
    assert words in support.measured
    assert support.reason == "Native."


@pytest.mark.parametrize(("first", "second"), [(0.61, 0.93), (1.02, 1.44), (1.9, 2.6)])
def test_a_reason_stays_from_run_to_run(first: float, second: float) -> None:
    """Two measurements that decide the same give the same reason: figures stand beside it."""
    supports = [
        weigh_support("bf16", Verdict(True, "Native."), Timing(x, x), Timing(1.0, 1.0))
        for x in (first, second)
    ]
    assert supports[0].reason == supports[1].reason
    assert supports[0].measured != supports[1].measured


def test_what_fails_when_tried_does_not_work() -> None:
    """A failed probe outweighs the verdict, and its message is in the reason."""
    failed = Timing(failure="no kernel image is available.")
    support = weigh_support("fp16", Verdict(True, "Native."), failed, Timing(1.0, 1.0))
    assert (support.native, support.works, support.time_ratio) == (False, False, None)
    assert support.reason == "Native. It was tried and failed: no kernel image is available."


def test_the_probe_answers_for_this_cpu() -> None:
    """On this CPU all three formats run, with reasons and an answer fit for JSON; a busy one says so."""
    formats = probe_formats(choose_device("cpu"))
    assert list(formats) == ["fp32", "bf16", "fp16"]
    assert formats["fp32"].time_ratio == 1.0
    for name in ("bf16", "fp16"):
        support = formats[name]
        assert support.works
        assert support.time_ratio is None or support.time_ratio > 0
        assert support.native == judge_cpu(read_cpu_flags())[name].native
        is_told = "Measured here" in support.measured
        assert is_told is (support.time_ratio is not None)
        assert is_told or "too noisy to show" in support.measured
    json.dumps({name: asdict(support) for name, support in formats.items()})


def test_the_probe_runs_once_and_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call measures nothing, and a caller's changes do not reach the next."""
    first = probe_formats(choose_device("cpu"))
    monkeypatch.setattr(environment, "_time_formats", lambda *_: pytest.fail("measured again"))
    first.clear()
    assert list(probe_formats(choose_device("cpu"))) == ["fp32", "bf16", "fp16"]


def time_again(seconds: Mapping[str, float], noise: float = 1.0) -> dict[str, Timing]:
    """What a probe answers in a new process on a machine of these speeds."""
    operations = {name: Timing(value, value, noise=noise) for name, value in seconds.items()}
    made = iter(operations.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_sample", lambda *_: defaultdict(list))
        patch.setattr(environment, "_sum_up", lambda *_: next(made))
        return environment._time_formats(choose_device("cpu"))


def test_times_are_kept_for_later_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ratio beside the limit chooses the same format in each run, until the device is examined."""
    first = {"fp32": 1.0, "bf16": 1.49, "fp16": 1.6}
    second = {"fp32": 1.0, "bf16": 1.51, "fp16": 1.6}
    time_again(first, noise=2.0)
    assert time_again(first)["bf16"].matmul_s == 1.49  # what was noisy is not kept
    assert time_again(second)["bf16"].matmul_s == 1.49
    environment.forget_timings(choose_device("cpu"))
    assert time_again(second)["bf16"].matmul_s == 1.51
    (kept,) = (tmp_path / "timings").iterdir()
    for spoilt in ("", "[]", '{"fp32": {"matmul_s": 1, "convolution_s": 1}}', '{"fp32": 1}'):
        kept.write_text(spoilt)
        assert time_again(first)["bf16"].matmul_s == 1.49
        assert time_again(second)["bf16"].matmul_s == 1.49
        kept.unlink()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert time_again(second)["bf16"].matmul_s == 1.51


def test_the_probe_leaves_the_process_as_it_was() -> None:
    """No random numbers are drawn, and ambient autocast does not change what is measured."""
    environment._probe_once.cache_clear()
    before = torch.get_rng_state()
    seen = []
    original = environment._make_operations

    def watch(device: Device, dtype: torch.dtype) -> object:
        operations = original(device, dtype)
        seen.append((dtype, operations[0]().dtype))
        return operations

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype=torch.bfloat16):
        patch.setattr(environment, "_make_operations", watch)
        probe_formats(choose_device("cpu"))
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert len(seen) == 3
    assert all(asked is given for asked, given in seen)


class Machine:
    """A device without a clock of its own: each operation takes what it is said to take.

    Attributes:
        seconds: of an operation by format.
        delays: what the next operations take longer, one after the other.
        order: formats in the order in which they were run.
    """

    def __init__(self, patch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.delays: Iterator[float] = itertools.repeat(0.0)
        self.order: list[str] = []
        patch.setattr(environment, "time", SimpleNamespace(perf_counter=lambda: self.now))
        patch.setattr(environment, "_make_operations", self._make)

    def _make(self, device: Device, dtype: torch.dtype) -> tuple[Any, Any]:
        name = name_dtype(dtype)

        def run() -> torch.Tensor:
            self.order.append(name)
            self.now += self.seconds[name] + next(self.delays)
            return torch.ones(1)

        return run, run

    def probe(self) -> dict[str, Support]:
        """What the probe says of the format, all native."""
        times = environment._time_formats(CPU)
        verdict = Verdict(True, "Native.")
        return {name: weigh_support(name, verdict, times[name], times["fp32"]) for name in times}


def test_formats_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round runs all formats, so that none of them alone meets what else runs there."""
    machine = Machine(monkeypatch, fp32=1e-4, bf16=5e-5, fp16=2e-4)
    found = machine.probe()
    assert {name: support.time_ratio for name, support in found.items()} == {
        "fp32": 1.0,
        "bf16": 0.5,
        "fp16": 2.0,
    }
    rounds = machine.order[6:]
    assert all(len(set(rounds[at : at + 6])) == 3 for at in range(0, len(rounds), 6))


def test_a_slow_format_is_timed_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that uses up its share is run twice after its first run, the others go on."""
    machine = Machine(monkeypatch, fp32=1e-4, bf16=1e-4, fp16=environment._SHARE_S)
    assert machine.probe()["fp16"].time_ratio == 500
    assert machine.order.count("fp16") == 2 * 3
    assert machine.order.count("bf16") == 2 * (1 + environment._ROUNDS)


def test_interruptions_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five samples that take ten times as long do not change the answer."""
    machine = Machine(monkeypatch, fp32=1e-4, bf16=5e-5, fp16=1e-4)
    machine.delays = itertools.cycle([0.001, 0.0, 0.001, 0.001, 0.0])
    found = machine.probe()
    assert (found["bf16"].time_ratio, found["fp16"].time_ratio) == (0.5, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_is_too_busy_says_so(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Where no sample is undisturbed there is no ratio, whatever the format really takes."""
    machine = Machine(monkeypatch, fp32=1e-4, bf16=5e-5, fp16=5e-5)
    chance = random.Random(seed)
    machine.delays = iter(lambda: 10 ** chance.uniform(-4, 0), None)
    support = machine.probe()["bf16"]
    assert (support.native, support.works, support.time_ratio) == (True, True, None)
    assert support.reason == "Native."
    assert support.measured == "The times measured here are too noisy to show how fast it is."


@pytest.mark.parametrize(
    ("timing", "reference", "ratio"),
    [
        (Timing(0.0023, 0.5), Timing(1.0, 1.0), None),  # a product cannot be 435 times as fast
        (Timing(0.1, 0.1, noise=1.4), Timing(1.0, 1.0, noise=1.3), None),
        (Timing(0.1, 0.1, noise=1.2), Timing(1.0, 1.0, noise=1.2), 0.1),
        (Timing(300.0, 300.0, noise=3.0), Timing(1.0, 1.0, noise=2.0), 300.0),
        (Timing(3.0, 3.0, noise=3.0), Timing(1.0, 1.0), None),
    ],
)
def test_noise_is_not_told_as_speed(timing: Timing, reference: Timing, ratio: float | None) -> None:
    """What no device does and what samples disagree on has no ratio; what is slow for sure has one."""
    assert weigh_support("bf16", Verdict(True, "Native."), timing, reference).time_ratio == ratio


def test_a_probe_that_gives_nan_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose arithmetic gives NaN for a harmless sum is found by the probe."""
    broken = (lambda: torch.tensor([math.nan]), lambda: torch.ones(1))
    monkeypatch.setattr(environment, "_make_operations", lambda *_: broken)
    assert environment._time_formats(CPU)["fp16"].failure == (
        "a sum of products of 0.125 was not finite."
    )


def test_a_format_that_raises_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format for which the backend has no kernel is reported, not raised."""

    def refuse(*_: object) -> None:
        raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'\nmore")

    monkeypatch.setattr(environment, "_make_operations", refuse)
    assert environment._time_formats(CPU)["fp16"].failure == (
        "\"slow_conv2d_cpu\" not implemented for 'Half'."
    )


# Memory


def test_the_peak_of_a_block_is_measured() -> None:
    """Memory that lives only inside the block is seen, and the method is said."""
    with peak_memory(choose_device("cpu")) as peak:
        pages = mmap.mmap(-1, 2**27)  # an allocator may have as much that was freed before
        block = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        while peak.peak_bytes <= 2**26:  # until the other thread has looked
            time.sleep(environment._SAMPLE_S)
        del block
    assert 2**26 < peak.peak_bytes < 2**30
    assert peak.method == "increase in RSS, sampled every 20 ms"


def test_the_peak_is_there_after_an_error() -> None:
    """An error passes through, and the sampling thread has ended."""
    import threading

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), peak_memory(CPU) as peak:
        _ = 1 / 0
    assert peak.peak_bytes >= 0
    assert threading.active_count() == before

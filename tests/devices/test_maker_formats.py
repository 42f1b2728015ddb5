"""Formats that devices compute in, by what their makers say."""

from __future__ import annotations

import pytest
import torch

from stopdown.devices import maker_formats
from stopdown.devices.maker_formats import (
    judge_accelerator,
    judge_cpu,
    normalise_cpu_flags,
    read_cpu_flags,
)

pytestmark = pytest.mark.usefixtures("processor", "nothing_is_kept")


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
        "Compute capability 7.0 has no bf16 arithmetic (it begins with 8.0); torch emulates "
        "it in fp32 but still reports it as supported."
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
    assert read_cpu_flags() <= maker_formats.list_known_flags()


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
    found = maker_formats.limit_cpu_flags(normalise_cpu_flags(flags), limit)
    verdicts = judge_cpu(found)
    assert {name for name in ("bf16", "fp16") if verdicts[name].native} == native
    assert set(maker_formats.find_onednn_formats(found)) == {"fp32", *onednn}


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
    assert maker_formats.read_onednn_formats() == wanted
    with monkeypatch.context() as patch:
        patch.setattr(backend, "enabled", False)
        assert maker_formats.read_onednn_formats() == ()
    monkeypatch.setattr(backend, "is_available", lambda: False)
    assert maker_formats.read_onednn_formats() == ()

"""The right PyTorch for a card: builds without kernels for it are named before anything is loaded."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stopdown import doctor
from stopdown.app import cli
from stopdown.devices import device_choice
from stopdown.devices.device_choice import choose_device, list_devices, select_device
from stopdown.devices.torch_builds import Build, find_missing_kernels, find_missing_system
from stopdown.diagnosis.explained import explain
from stopdown.errors import OptionError

CUDA_11 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_37", "sm_90"]
CUDA_126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
ROCM = [
    "gfx900",
    "gfx906",
    "gfx90a",
    "gfx942",
    "gfx1030",
    "gfx1100",
    "gfx1101",
    "gfx1200",
    "gfx1201",
]
PAGE = "https://pytorch.org/get-started/locally/"


@pytest.mark.parametrize(
    ("number", "listed", "runs"),
    [
        ((7, 0), CUDA_13, False),
        ((7, 0), CUDA_126, True),
        ((6, 1), CUDA_126, True),  # a GTX 1080 runs code for 6.0
        ((5, 2), CUDA_13, False),
        ((7, 5), CUDA_13, True),
        ((8, 9), CUDA_13, True),
        ((9, 0), CUDA_13, True),
        ((12, 0), CUDA_11, False),
        ((12, 0), CUDA_13, True),
        ((12, 1), CUDA_13, True),
        ((10, 3), CUDA_11, False),
        ((10, 0), ["sm_90a"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_50", "compute_90"], True),  # compiled when it is loaded
        ((12, 0), ["compute_90a"], False),
        ((8, 7), ["sm_80", "sm_86"], False),  # a Jetson
        ((8, 7), ["sm_87"], True),
        ((7, 0), [], True),  # nobody says
    ],
)
def test_cards_of_nvidia(number: tuple[int, int], listed: list[str], runs: bool) -> None:
    """Code of the same major capability and a lower minor one, and intermediate code of any lower one."""
    build = Build("2.13.0", "CUDA", tuple(listed))
    assert (find_missing_kernels(build, "cuda:0", number) is None) is runs


@pytest.mark.parametrize(
    ("name", "listed", "runs"),
    [
        ("gfx1030", ROCM, True),
        ("gfx1031", ROCM, False),
        ("gfx1103", ROCM, False),
        ("gfx803", ROCM, False),
        ("gfx1103", ["gfx11-generic"], True),
        ("gfx1031", ["gfx10-3-generic"], True),
        ("gfx1010", ["gfx10-3-generic"], False),
        ("gfx90a", ["gfx90a:xnack-"], True),
    ],
)
def test_cards_of_amd(name: str, listed: list[str], runs: bool) -> None:
    """Their own architecture, or a generic one of their family."""
    build = Build("2.13.0", "ROCm", tuple(listed))
    assert (find_missing_kernels(build, "cuda:0", (10, 3), name) is None) is runs


CARDS: dict[str, tuple[str, tuple[int, int], str, list[str], str, str]] = {
    "v100": (
        "Tesla V100-SXM2-16GB",
        (7, 0),
        "",
        CUDA_13,
        r"has no kernels for cuda:0 \(Tesla V100-SXM2-16GB\), which is compute capability 7\.0\. It was "
        r"built for sm_75, .* only PyTorch's builds for CUDA 12\.6 have them since PyTorch 2\.11, up to ",
        f"Choose CUDA 12.6 and a PyTorch up to 2.14 at {PAGE}",
    ),
    "rtx50": (
        "NVIDIA GeForce RTX 5090",
        (12, 0),
        "",
        CUDA_11,
        r"RTX 5090\), which is compute capability 12\.0\. .* For Blackwell cards",
        f"Choose CUDA 12.8 or newer at {PAGE}",
    ),
    "rx6700": (
        "AMD Radeon RX 6700 XT",
        (10, 3),
        "gfx1031",
        ROCM,
        r"RX 6700 XT\), which is gfx1031\. It was built for gfx900, .* runs its kernels when it is told to",
        "Set HSA_OVERRIDE_GFX_VERSION=10.3.0 before the command",
    ),
}


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with one card, and a build of PyTorch that was not made for it."""
    name, number, architecture, listed, what, remedy = CARDS[request.param]
    facts = SimpleNamespace(
        name=name,
        major=number[0],
        minor=number[1],
        total_memory=2**34,
        gcnArchName=f"{architecture}:sramecc+",
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: facts)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: listed)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.version, "hip", "7.1" if architecture else None)
    return SimpleNamespace(name=name, what=what, remedy=remedy)


def run(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    streams = capsys.readouterr()
    return int(left.value.code or 0), " ".join((streams.out + streams.err).split())


COMMANDS = (
    "generate shapes a -o out.mp4",
    "generate shapes a --device cuda -o out.mp4",
    "compare shapes --prompt a -o out.html",
    "bench shapes",
    "batch shapes --prompts prompts.txt -o out",
    "run script.py",
)


@pytest.mark.parametrize("card", list(CARDS), indirect=True)
@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_stops_before_it_loads_a_model(
    card: Any, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: Any
) -> None:
    """The message names the card, the list, the build to choose and the CPU; exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a\n")
    (tmp_path / "script.py").write_text(
        "import torch; torch.cuda.init(); raise SystemExit('it ran')\n"
    )
    code, said = run(words, capsys)
    assert code == 2, said
    assert re.search(card.what, said), said
    assert card.remedy in said
    assert "Or run on the CPU: --device cpu" in said
    assert "it ran" not in said


@pytest.mark.parametrize("card", list(CARDS), indirect=True)
def test_doctor_says_so_and_ends_with_1(card: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on to the CPU, and says what auto would choose there."""
    code, said = run("doctor", capsys)
    assert code == 1
    assert re.search(card.what, said)
    assert "native" in said
    assert run("doctor --device cuda", capsys)[0] == 1
    assert run("doctor --device cpu", capsys)[0] == 0


@pytest.mark.parametrize("card", list(CARDS), indirect=True)
def test_explain_knows_the_message(card: Any) -> None:
    """What a command says of a card without kernels is explained by the build, with `doctor` to type."""
    with pytest.raises(OptionError) as caught:
        choose_device("cuda")
    found = explain(f"stopdown: {caught.value}")
    assert found.cause == "other-build-of-pytorch"
    assert any("doctor" in text for text in found.remedy)


@pytest.mark.parametrize("card", ["v100"], indirect=True)
def test_the_cpu_may_be_chosen(card: Any) -> None:
    """It is not taken in silence."""
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(OptionError, match=r'device="cpu"'):
        choose_device("auto")


@pytest.mark.parametrize("card", ["v100"], indirect=True)
def test_of_two_cards_the_one_with_kernels_is_taken(card: Any) -> None:
    """A V100 beside a newer card: auto takes the newer one and says why; `cuda:0` is refused."""
    old, cpu = list_devices()
    new = device_choice.Device("cuda", 1, "NVIDIA A100", (8, 0), 2**36)
    chosen = select_device("auto", [old, new, cpu])
    assert chosen.torch_name == "cuda:1"
    assert (
        "is the first that this PyTorch has kernels for; also here: cuda:0, cpu." in chosen.reason
    )
    assert select_device("cuda:0", [old, new, cpu]).missing is not None


@pytest.mark.parametrize(
    ("torch_version", "macos", "least"),
    [("2.13.0", (13, 7), "14.0"), ("2.6.0", (12, 7), "13.0"), ("2.4.1", (12, 2), "12.3")],
)
def test_a_mac_without_the_system_is_told(
    torch_version: str, macos: tuple[int, int], least: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which macOS this PyTorch needs for MPS; with it nothing is said."""
    known = find_missing_system(torch_version, macos)
    assert known is not None
    assert known.expected == f"It needs macOS {least} or newer."
    assert find_missing_system(torch_version, (26, 1)) is None
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(device_choice, "read_macos", lambda: macos)
    monkeypatch.setattr(torch, "__version__", torch_version)
    with pytest.raises(OptionError, match=f"It needs macOS {least} or newer"):
        choose_device("mps")
    assert f"It needs macOS {least} or newer." in doctor.examine("cpu").faults[0]

"""The devices of a machine, and the choice of one."""

from __future__ import annotations

import pytest

from models.devices import CPU, MPS, T4, V100
from stopdown.devices import format_support
from stopdown.devices.device_choice import Device, choose_device, list_devices, select_device
from stopdown.errors import OptionError

pytestmark = pytest.mark.usefixtures("processor", "nothing_is_kept")


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


@pytest.mark.usefixtures("two_cards")
def test_cuda_devices_are_described_by_torch() -> None:
    """Name, capability and memory come from torch, and the judgement from the capability."""
    assert list_devices()[:2] == [V100, T4]
    assert choose_device().torch_name == "cuda:0"
    assert not format_support.judge_device(V100)["bf16"].native
    assert format_support.judge_device(V100)["fp16"].native

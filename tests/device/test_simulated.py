"""The simulated accelerator itself: what it refuses, and what it takes as a real one does."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from device.simulated_device import KIND, Simulated
from stopdown.devices.device_choice import choose_device, list_devices, synchronise
from stopdown.devices.device_memory import peak_memory


def test_it_is_found_while_it_is_present(simulated: Simulated) -> None:
    """Two devices come first, with their memory; none is there when the test is over."""
    simulated.limit(2**20)
    first, second, cpu = list_devices()
    assert (first.torch_name, second.torch_name, cpu.type) == (
        simulated.name,
        simulated.second,
        "cpu",
    )
    assert (first.memory_bytes, second.memory_bytes) == (2**20, 2**40)
    assert choose_device(KIND).torch_name == simulated.name


@pytest.mark.usefixtures("_simulated_devices")
def test_it_is_not_there_otherwise() -> None:
    """Tests without it find the machine as it is."""
    assert [device.type for device in list_devices()] == ["cpu"]


@pytest.mark.usefixtures("simulated")
def test_tensors_of_two_devices_are_not_mixed() -> None:
    """Products, sums, lookups and norms with a tensor of the host are refused; a scalar is not."""
    here, there = torch.ones(4, 4, device=KIND), torch.ones(4, 4)
    for mix in (
        lambda: here @ there,
        lambda: here + there,
        lambda: functional.linear(here, there),
        lambda: functional.embedding(torch.tensor([0]), here),
        lambda: functional.layer_norm(here, (4,), there[0]),
        lambda: here + here.to("simulated:1"),
        lambda: here.copy_(there) @ here.to("simulated:1"),
        lambda: torch.cat([here, there]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix()
    assert (here + torch.tensor(1.0)).tolist() == [[2.0] * 4] * 4
    assert here[torch.tensor([0, 1])].shape == (2, 4)
    with pytest.raises(TypeError, match="can't convert simulated:0 device type tensor to numpy"):
        here.numpy()


def test_memory_ends(simulated: Simulated) -> None:
    """What is beyond the limit is refused as CUDA does, and as MPS does; what is freed is there again."""
    before = simulated.used()
    simulated.limit(before + 4096)
    with peak_memory(choose_device(KIND)) as peak:
        kept = torch.zeros(1024, device=KIND)
        assert simulated.used() == before + 4096
        with pytest.raises(torch.OutOfMemoryError, match="simulated out of memory"):
            torch.zeros(1, device=KIND)
        simulated.act_as("mps")
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            torch.zeros(1, device=KIND)
        assert not isinstance(caught.value, torch.OutOfMemoryError)
        del kept
        torch.zeros(1024, device=KIND)
    assert (peak.peak_bytes, simulated.used()) == (before + 4096, before)
    assert torch.zeros(1, device=simulated.second).device.index == 1


def test_errors_come_late_and_stay(simulated: Simulated) -> None:
    """The operation at fault returns; where the host waits next it is raised, and from then on always."""
    simulated.fail_after(1)
    sum_ = torch.ones(2, device=KIND) + torch.ones(2, device=KIND)
    for wait in (sum_.cpu, sum_.tolist, sum_.sum().item, lambda: synchronise(choose_device(KIND))):
        with pytest.raises(
            torch.AcceleratorError, match="an illegal memory access was encountered"
        ):
            wait()
    simulated.fail_after(0)
    assert sum_.tolist() == [2.0, 2.0]


def test_formats_can_be_missing(simulated: Simulated) -> None:
    """No tensor has a format that the device lacks; one that it does not compute in can be stored."""
    simulated.act_as("mps", lacks=[torch.float64], computes_not=[torch.bfloat16])
    with pytest.raises(TypeError, match="Double dtype as the device doesn't support it"):
        torch.ones(2, device=KIND).double()
    stored = torch.ones(2, 2).bfloat16().to(KIND)
    with pytest.raises(RuntimeError, match="not implemented for 'BFloat16'"):
        stored @ stored
    assert stored.float().tolist() == [[1.0, 1.0]] * 2


def test_mixtures_of_dtypes_are_those_of_a_backend(simulated: Simulated) -> None:
    """A CPU takes a bf16 input with an fp32 norm; CUDA does not, and the device as CUDA neither."""
    given, weight = torch.ones(2, 4, device=KIND).bfloat16(), torch.ones(4, device=KIND)
    functional.layer_norm(given, (4,), weight, weight)
    simulated.act_as("cuda")
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        functional.layer_norm(given, (4,), weight, weight)


def test_sums_can_be_in_fp16(simulated: Simulated) -> None:
    """With the switch a sum that passes 65504 on its way is Inf; without it is not."""
    left = torch.full((1, 64), 256.0, device=KIND).half()
    right = torch.tensor([256.0] * 32 + [-256.0] * 32, device=KIND).half()[:, None]
    bias = torch.ones(1, device=KIND).half()
    assert functional.linear(left, right.T, bias).tolist() == [[1.0]]
    simulated.act_as(fp16_sums=True)
    assert functional.linear(left, right.T, bias).isinf().all()
    assert functional.linear(left / 64, right.T, bias).tolist() == [[1.0]]


@pytest.mark.usefixtures("simulated")
def test_random_numbers_are_its_own() -> None:
    """A seed gives the same numbers again, others than on the host; a state can be put back."""
    torch.manual_seed(1)
    drawn, on_host = torch.randn(4, device=KIND), torch.randn(4)
    torch.manual_seed(1)
    state = torch.get_device_module(KIND).get_rng_state()
    again = torch.randn(4, device=KIND)
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn.cpu(), on_host)
    torch.get_device_module(KIND).set_rng_state(state)
    assert torch.equal(torch.randn(4, device=KIND), again)
    generator = torch.Generator(KIND).manual_seed(1)
    assert torch.equal(torch.randn(4, device=KIND, generator=generator), again)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device=KIND, generator=torch.Generator())


def test_what_the_host_waits_for_is_counted(simulated: Simulated) -> None:
    """Values that are read and sizes that depend on them count; what stays on the device does not."""
    given = torch.arange(4.0, device=KIND)
    before = simulated.counts
    other = (given * 2).softmax(0)
    assert simulated.counts.host_reads == before.host_reads
    for number, wait in enumerate((other.sum().item, other.tolist, given.nonzero, other.cpu), 1):
        wait()
        assert simulated.counts.host_reads == before.host_reads + number


@pytest.mark.usefixtures("simulated")
def test_heads_may_share_keys() -> None:
    """Attention with fewer heads of keys than of queries gives what the host gives."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    attend = functional.scaled_dot_product_attention
    there = attend(*(x.to(KIND) for x in (query, key, key)), enable_gqa=True)
    torch.testing.assert_close(there.cpu(), attend(query, key, key, enable_gqa=True))

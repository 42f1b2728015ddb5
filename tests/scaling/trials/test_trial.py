"""What a rescaling claims is tried: the cast module is run, and a result that does not run is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models.snapshots import compare_snapshot, take_snapshot
from stopdown import mapped_weights
from stopdown.errors import ScalingError, TrialError
from stopdown.numerics import relative_l2
from stopdown.records import ComponentPlan, Trial
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.graph.capture import capture_call
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.trials import trial
from stopdown.scaling.trials.trial import WideProducts

Change = Callable[[torch.Tensor], Any]


class Changing(nn.Module):
    """Beyond fp16, and does something else when it really runs with a last linear in fp16."""

    def __init__(self, change: Change = lambda x: x) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.change = change

    def forward(self, x: torch.Tensor) -> Any:
        x = self.out(self.norm(self.embed(x)))
        is_real = type(x) is torch.Tensor  # a capture sees nothing of it
        return self.change(x) if is_real and self.is_low(x) else x

    def is_low(self, x: torch.Tensor) -> bool:
        return self.out.weight.dtype == torch.float16


def make(kind: type[Changing] = Changing, *given: Change) -> tuple[Changing, torch.Tensor]:
    torch.manual_seed(0)
    module = kind(*given).eval().requires_grad_(False)
    module.embed.weight.mul_(2.0**20)
    return module, torch.randn(3, 4)


def fail(x: torch.Tensor) -> torch.Tensor:
    return x.float() @ torch.ones(4, 4).half()


FAULTS: dict[str, tuple[Change, str]] = {
    "raises": (fail, "it raises RuntimeError: expected"),
    "nan": (lambda x: x / 0 * 0, "12 of 12 values of tensor 0 are NaN or Inf"),
    "shape": (lambda x: x[:2], r"it returns the shapes \[\(2, 4\)\] instead of \[\(3, 4\)\]"),
    "container": (lambda x: (x,), "it returns .* instead of"),
    "values": (lambda x: x + 100, "its output isn't that of fp32: it is .* off"),
    "worse than bf16": (lambda x: x * 1.03, r"it is 0\.03 off \(bf16's by 0\.00"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_run_in_fp16_is_not_solved(name: str) -> None:
    """Exact in fp32 and not what it was once cast: refused, and every bit is as it was."""
    change, said = FAULTS[name]
    module, x = make(Changing, change)
    before = take_snapshot(module)
    with pytest.raises(TrialError, match=f"In fp16 with casts .*{said}"):
        rescale_(module, (x,))
    assert compare_snapshot(before, module) == []


class Told(nn.Module):
    """A layer whose norm takes values of any size, as those that a text encoder hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, states: Any, mask: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.norm(torch.cat(states)) + mask.clamp(min=0.0))


@pytest.mark.parametrize("size", [1.0, 1e5])
@pytest.mark.parametrize("is_named", [True, False])
def test_an_argument_that_fp16_does_not_hold_is_named(size: float, is_named: bool) -> None:
    """No exponent of a weight changes what a program passes; a mask isn't meant."""
    torch.manual_seed(0)
    module = Told().eval().requires_grad_(False)
    x, mask = torch.randn(2, 4), torch.full((2, 4), -1e38)
    states = [torch.randn(1, 4) * size, torch.randn(1, 4)]
    given: Any = (
        ((), {"x": x, "states": states, "mask": mask}) if is_named else ((x, states, mask),)
    )
    if size == 1.0:
        assert rescale_(module, *given).trial
        return
    with pytest.raises(TrialError) as caught:
        rescale_(module, *given)
    largest = f"{float(states[0].abs().max()):.2g}"
    said = f"are NaN or Inf; its argument `states` is up to {largest}, which fp16 doesn't hold."
    assert said in str(caught.value)
    assert "mask" not in str(caught.value)


class Squashed(nn.Module):
    """A matrix beyond fp16 that nothing scales: `tanh` wants its product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8) * 2.0**17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def test_a_weight_beyond_fp16_is_fp32_with_its_module() -> None:
    """The module that holds it stays in fp32, and what it returns is in range."""
    torch.manual_seed(0)
    module = nn.Sequential(Squashed(), nn.Linear(8, 4)).eval().requires_grad_(False)
    rescaling = rescale_(module, (torch.randn(3, 4) * 1e-4,))
    assert rescaling.fp32_modules == ("0",)
    assert rescaling.scaling.note == ""


def test_the_error_stands_in_the_result_beside_that_of_bf16() -> None:
    """How many calls were run, how far from fp32, and how far bf16 is; the repr says it."""
    module, x = make()
    rescaling = rescale_(module, calls=[(module, (x,), {}), (module, (), {"x": x[:2]})])
    found = rescaling.trial
    assert found is not None
    assert (found.calls, found.note) == (2, "")
    assert found.rel_err is not None
    assert found.bf16_rel_err is not None
    assert 0 < found.rel_err < found.bf16_rel_err < 0.1
    assert "run once in fp16 (2 calls): " in repr(rescaling)
    assert "from fp32, bf16 " in repr(rescaling)


class Noisy(Changing):
    """Adds noise that it draws itself, by the generator that it is given or by the global one."""

    def forward(self, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        noise = torch.randn(x.shape[0], 4, generator=generator, dtype=x.dtype)
        return super().forward(x + noise)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranges", ["measured", "bound"])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_call_that_draws_noise_is_solved(is_own: bool, ranges: str) -> None:
    """Each run draws the same numbers, so it is exact; how near it is in fp16 is not compared."""
    module, x = make(Noisy)
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    kwargs = {"generator": generator} if is_own else {}
    rescaling = rescale_(module, (x,), kwargs, ranges=ranges)
    assert torch.equal(generator.get_state(), state)
    assert rescaling.exponents["embed.weight"] < 0
    assert rescaling.trial == Trial(
        1, note="A call draws random numbers, which differ by format: it isn't compared."
    )
    assert "run once in fp16 (1 call): finite" in repr(rescaling)


def test_a_generator_of_the_caller_draws_the_same_in_each_run() -> None:
    """Its state is put back after a run, and so is that of the global one."""
    module, x = make(Noisy)
    generator = torch.Generator().manual_seed(3)
    states = generator.get_state(), torch.get_rng_state()
    first, second = (trial.run_reference(module, [(module, (x, generator), {})]) for _ in "ab")
    assert first[0].draws
    assert torch.equal(first[0].output, second[0].output)
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


class Caching(Changing):
    """Writes what it computes into a list of its caller, and goes on from what is there."""

    def forward(self, x: torch.Tensor, cache: list[Any] | None = None) -> torch.Tensor:
        x = x if not cache else x + cache[-1]
        if cache is not None:
            cache.append(x)
        return super().forward(x)  # type: ignore[no-any-return]


def test_a_list_of_the_caller_is_not_written_to_by_a_trial() -> None:
    """Each run gets containers of its own: the second begins where the first did."""
    module, x = make(Caching)
    cache: list[Any] = [torch.ones(3, 4)]
    reference = trial.run_reference(module, [(module, (x, cache), {})])
    assert len(cache) == 1
    assert len(reference) == 1


def test_a_call_too_large_for_a_processor_is_not_run_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result says that nothing was tried, with the size of the call."""
    monkeypatch.setattr(trial, "MOST_FLOPS_ON_CPU", 10.0)
    module, x = make(Changing, fail)
    found = rescale_(module, (x,)).trial
    assert found is not None
    assert (found.calls, found.rel_err) == (0, None)
    assert found.note.startswith("A call of 7.7e+02 FLOPs wasn't run in fp16")


def test_a_plan_falls_back_and_says_why() -> None:
    """Nothing runs in fp16: the component's entry names the fault, and is not fp16."""
    from models.measured_plans import plan_component
    from stopdown.module_calls.call import ComponentCall
    from stopdown.module_calls.callee import Callee

    def plan(change: Change) -> ComponentPlan:
        module, x = make(Changing, change)
        call = ComponentCall(Callee("transformer", module, "forward", "denoise"), (x,), {})
        return plan_component("transformer", module, [call])

    bad, good = plan(fail), plan(lambda x: x)
    assert (bad.precision, bad.in_force.exponents, bad.in_force.trial) == ("fp32", {}, None)
    assert bad.reasons[0].startswith("In fp16 with casts it raises RuntimeError")
    assert good.precision == "fp16"
    assert good.in_force.trial is not None
    assert any(x.startswith("Run once in fp16 (1 call): ") for x in good.reasons)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_memory_that_runs_out_is_said(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Half-way through a cast: every dtype is as it was, and the result says that nothing was tried."""
    module, x = make()
    before, cast = take_snapshot(module), mapped_weights.cast_tensor

    def run_out(tensor: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
        if wanted == dtype and tensor.data_ptr() == module.out.weight.data_ptr():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return cast(tensor, wanted)

    monkeypatch.setattr(mapped_weights, "cast_tensor", run_out)
    rescaling = rescale_(module, (x,))
    found = rescaling.trial
    assert found is not None
    if dtype == torch.float16:
        assert (found.calls, found.note) == (0, "It wasn't tried: CUDA out of memory.")
    else:
        assert found.rel_err is not None
        assert found.bf16_rel_err is None
    rescaling.undo()
    assert compare_snapshot(before, module) == []


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError])
def test_a_kernel_that_the_device_lacks_is_said(kind: type[Exception]) -> None:
    """The exponents stay, and were not tried; before `NotImplementedError` PyTorch raised a plain one."""

    def lack(x: torch.Tensor) -> torch.Tensor:
        raise kind("\"addmm_impl_cpu_\" not implemented for 'Half'")

    module, x = make(Changing, lack)
    rescaling = rescale_(module, (x,))
    assert rescaling.exponents
    assert rescaling.trial is not None
    assert rescaling.trial.calls == 0
    assert "doesn't run in fp16 on this device" in rescaling.trial.note


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_convolutions_in_16_bits_are_summed_in_fp32(
    kind: type[nn.Module], dtype: torch.dtype
) -> None:
    """Of a cast call a convolution is fp32's, rounded once; operands of two dtypes are refused."""
    rank = 3 if kind is nn.Conv3d else 2
    layer, given = kind(8, 8, 3), torch.randn(1, 8, *[6] * rank).to(dtype)  # type: ignore[call-arg]
    with torch.no_grad():
        wanted = layer.to(dtype).float()(given.float()).to(dtype)
        found = trial._run_cast(layer.to(dtype), (layer, (given,), {}), dtype)
        assert torch.equal(found, wanted)
        assert found.dtype == dtype
        layer.weight.data = layer.weight.data.float()  # type: ignore[union-attr, operator]
        with pytest.raises(RuntimeError):
            trial._run_cast(layer, (layer, (given,), {}), dtype)


def test_a_product_in_bf16_is_not_the_processors() -> None:
    """It is the same on processors that have instructions for it and on those that emulate it."""
    seen: list[torch.dtype] = []

    class Note(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is nn.functional.linear:
                seen.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    layer, given = nn.Linear(4, 4).bfloat16(), torch.ones(1, 4, dtype=torch.bfloat16)
    with Note(), torch.no_grad():
        trial._run_cast(layer, (layer, (given,), {}), torch.bfloat16)
    assert seen == [torch.float32]


def test_a_capture_shows_the_products_of_the_code() -> None:
    """Products that a mode sums in fp32 are no part of the graph."""
    module, x = nn.Linear(4, 4).eval(), torch.ones(1, 4)
    plain = capture_call(module, (x,), {}, dtype=torch.float16)
    with WideProducts():
        found = capture_call(module, (x,), {}, dtype=torch.float16)
    assert [n.name for n in found.graph.graph.nodes] == [n.name for n in plain.graph.graph.nodes]


class Gated(nn.Module):
    """A product with a sigmoid of which fp16 has few bits: an output rests on it."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.large, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.gate.weight.data.mul_(0.1)
        self.gate.bias.data.fill_(bias)
        self.large.weight.data.mul_(3000)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.gate(x)) * self.large(x)


@pytest.mark.parametrize("residual", ["native", "fp32"])
@pytest.mark.parametrize("bias", [-14.5, -17.5])
def test_a_result_that_is_tiny_as_a_whole_is_not_left_to_fp16(bias: float, residual: str) -> None:
    """A trial shows that its exponents would lose more than bf16 does, and the product stays in fp32."""
    module, x = Gated(bias), torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    wanted = module(x)
    bf16 = copy.deepcopy(module).bfloat16()(x.bfloat16())
    cast_(module, torch.float16, rescale_(module, x, residual=residual))
    assert relative_l2(module(x.half()), wanted) < relative_l2(bf16, wanted)


class Overlapping(nn.Module):
    """Beyond fp16, with two parameters that lie in one memory in part."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(6, 8) * 2.0**14
        self.first = nn.Parameter(memory[:4], requires_grad=False)
        self.second = nn.Parameter(memory[2:], requires_grad=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.first)
        return nn.functional.linear(self.norm(x), self.second.T[:4]) * 2.0**-14


def test_parameters_that_share_memory_are_named() -> None:
    """An exponent of one would change the other: both are named, with what gives one its own memory."""
    module, x = Overlapping(), torch.randn(3, 8)
    with pytest.raises(
        ScalingError, match=r"first and second of Overlapping lie in the same memory"
    ):
        rescale_(module, x)

"""Tests of the culprit: which operation, which weight, which argument, and which Inf is harmless."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from stopdown.numerics import iterate_tensors
from stopdown.runtime import culprit
from stopdown.runtime.culprit import Culprit, find_culprit


class Layer(nn.Module):
    """A linear whose product with a number is what goes wrong, and a norm behind it."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.linear, self.norm, self.factor = nn.Linear(4, 4), nn.LayerNorm(4), factor
        nn.init.eye_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x) * self.factor)


class Net(nn.Module):
    """Two layers by the names `blocks.0` and `blocks.1`."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(factor) for factor in factors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Whole(nn.Module):
    """A module from a function, with a parameter called `scale`."""

    def __init__(self, function: Callable[..., Any], scale: float = 1.0) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def find(module: nn.Module, x: torch.Tensor | None = None) -> Culprit:
    """The culprit of one fp16 call."""
    module.half()
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).half() if x is None else x
    with torch.no_grad():
        culprit, _ = find_culprit(module, lambda: module(x), {"x": x})
    return culprit


def test_an_overflow_is_named_with_what_it_reaches() -> None:
    """The innermost module, its operation, operands and reach; the norm behind it is the chain."""
    found = find(Net(1.0, 1e5))
    assert (found.kind, found.path, found.operation) == ("range", "blocks.1", "mul")
    assert found.around == ("blocks.1",)
    assert found.reached > 65504
    assert found.describe("part").startswith(
        "The fault begins at `part:blocks.1` (mul in fp16). Its operands are finite (fp16 1x4 up to "
    )


def test_a_module_that_hands_the_value_on_is_not_kept_in_fp32() -> None:
    """A linear that overflows by itself would overflow in fp32 as well, once it is fp16 again."""
    module = Net(1.0)
    nn.init.constant_(module.blocks[0].linear.weight, 6e4)  # type: ignore[union-attr]
    found = find(module)
    assert (found.path, found.operation) == ("blocks.0.linear", "addmm")
    assert found.around == ("blocks.0",)


def test_the_inf_of_a_mask_is_not_blamed() -> None:
    """A mask of -Inf goes through a softmax and does no harm; the overflow behind it is named."""

    def attend(self: Whole, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x).masked_fill(x > 3, -math.inf)
        return torch.softmax(x + mask, -1) * 6e4 * 4

    found = find(Whole(attend))
    assert (found.kind, found.operation) == ("range", "mul")


def test_a_mask_that_covers_everything_is_blamed() -> None:
    """With each key masked the softmax is NaN, and it is where the fault begins."""
    found = find(Whole(lambda self, x: torch.softmax(x.masked_fill(x > 0, -math.inf), -1)))
    assert (found.kind, found.operation) == ("unknown", "_softmax")


def test_a_value_that_is_not_finite_is_bounded_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each later operation asks whether its NaN may be a mask's: copies for that took most of the time."""
    made = list[tuple[str, int]]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend((func.__name__, x.numel()) for x in iterate_tensors(result))
            return result

    def count(tensor: torch.Tensor) -> bool:
        with Counting():
            return is_only_low(tensor)

    is_only_low = culprit._is_only_low
    monkeypatch.setattr(culprit, "_is_only_low", count)
    assert find(Net(1e5, 1.0), torch.ones(64, 4).half()).kind == "range"
    assert made
    assert max(size for _, size in made) <= 2
    for value, is_low in ((math.nan, False), (math.inf, False), (-math.inf, True), (1.0, True)):
        assert is_only_low(torch.tensor([0.0, value])) == is_low


def test_a_fault_of_no_precision_is_told() -> None:
    """The square root of a negative number is NaN in fp32 too."""
    found = find(Whole(lambda self, x: torch.sqrt(-x)))
    assert found.kind == "undefined"
    assert found.describe("part").endswith("but its result isn't finite in fp32 either.")


def test_a_number_in_the_code_is_told() -> None:
    """Code that writes NaN is said to, whatever the precision."""
    found = find(Whole(lambda self, x: x.masked_fill(x > 3, math.nan)))
    assert found.kind == "written"
    assert found.describe("part").endswith("but its code writes the NaN or Inf.")


def test_a_weight_is_blamed() -> None:
    """A weight that is Inf already is named by its path."""
    found = find(Whole(lambda self, x: x * self.scale, math.inf))
    assert (found.kind, found.path) == ("weight", "scale")
    assert found.describe("part") == "The weight part:scale isn't finite."


def test_an_argument_is_blamed() -> None:
    """What came in bad is not the module's fault."""
    found = find(Net(1.0), torch.tensor([[1.0, math.nan, 0.0, 0.0]]).half())
    assert (found.kind, found.path) == ("input", "x")
    assert found.describe("part") == "Its argument x was already not finite."


def test_a_clamp_that_hides_it_is_looked_behind() -> None:
    """A finite result of a clamp that had Inf to do with leads to the operation before it."""
    found = find(Whole(lambda self, x: (x * 6e4).clamp(-65504, 65504)))
    assert (found.kind, found.operation) == ("clamped", "mul")
    assert found.describe("part").endswith("A clamp hid it.")


def test_an_overflow_in_place_and_through_a_view_is_found() -> None:
    """Memory that is written through another tensor leads to who wrote it."""

    def write(self: Whole, x: torch.Tensor) -> torch.Tensor:
        kept = x.clone()
        kept[:, :2].mul_(6e4)
        return kept

    found = find(Whole(write))
    assert (found.kind, found.operation) == ("range", "mul_")


def test_a_clean_replay_is_said_to_be() -> None:
    """When nothing is wrong this time, it is a race or memory."""
    found = find(Net(1.0))
    assert found.kind == "intermittent"
    assert found.describe("part") == (
        "The same call returned finite values when it was retried: a race, or faulty memory."
    )


@torch.library.custom_op("stopdown_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Twice a tensor, by a kernel that is wrong in fp16."""
    return x * torch.nan if x.dtype == torch.float16 else x * 2


def test_a_kernel_that_is_wrong_in_one_format_is_named() -> None:
    """A value that fp16 holds, from finite operands, and NaN nevertheless: the kernel."""
    x = torch.ones(2, 2).half()
    found = find(Whole(lambda _, x: torch.ops.stopdown_tests.double(x)), x)
    assert (found.kind, found.reached) == ("kernel", 2.0)
    assert found.describe("net").endswith(
        "its result should reach no more than 2, which fp16 holds: this device's kernel is wrong, or "
        "adds up in 16 bits."
    )


@torch.library.custom_op("stopdown_tests::double_here", mutates_args=())
def double_here(x: torch.Tensor) -> torch.Tensor:
    """Twice a tensor, by a kernel that is wrong on all devices but the CPU."""
    return x * 2 if x.device.type == "cpu" else x * torch.nan


@pytest.mark.thorough
def test_a_kernel_that_is_wrong_on_one_device_is_named(simulated: Any) -> None:
    """fp32 on the device gives NaN where the CPU gives numbers."""
    module = Whole(lambda _, x: torch.ops.stopdown_tests.double_here(x))
    x = torch.ones(2, 2, device="simulated")
    culprit, _ = find_culprit(module, lambda: module(x), {"x": x})
    assert (culprit.kind, culprit.reached) == ("kernel", 2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_stays_on_the_module(dtype: torch.dtype) -> None:
    """Hooks come off, also when the call raises."""
    module = Net(1.0).to(dtype)
    with pytest.raises(RuntimeError):
        find_culprit(module, lambda: module(torch.zeros(1, 3, dtype=dtype)), {})
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


class SelfCompiled(nn.Module):
    """Overflows in fp16, and calls attention that compiles itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        for layer, factor in ((self.inner, 2.0**15), (self.outer, 2.0**-15)):
            layer.requires_grad_(False).weight.mul_(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.outer(self.inner(x))[:, None]
        return flex_attention(hidden, hidden, hidden)[:, 0]  # type: ignore[index,return-value]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_that_compiles_itself_runs_after_a_search() -> None:
    """A search for the culprit doesn't keep the compiler from such code in the calls after it."""
    module = SelfCompiled().half()
    x = torch.full((1, 16, 16), 32.0, dtype=torch.float16)
    with torch.no_grad():
        assert not module(x).isfinite().all()
        with contextlib.suppress(NotImplementedError):  # it has no form for dispatch modes
            find_culprit(module, lambda: module(x), {"x": x})
        assert module.to(torch.bfloat16)(x.bfloat16()).isfinite().all()

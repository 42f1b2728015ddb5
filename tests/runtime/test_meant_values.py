"""What is not finite and no fault: which cases a model means, and which are faults all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models.pipeline_calls import call_pipeline, quiet
from stopdown import testing
from stopdown.errors import NonFiniteError
from stopdown.interception.patches import Patches
from stopdown.runtime.guard import guard
from stopdown.runtime.meant_values import BELIEVED_AFTER, Meaning, compare_with_fp32
from stopdown.runtime.scripts import ScriptGuard

INF, NAN = torch.inf, torch.nan
Y = torch.Tensor

MEANT: dict[str, Callable[[Y, Y], Any]] = {
    "logits masked by -inf": lambda y, x: y.masked_fill(x > 0, -INF),
    "logits filled at places": lambda y, x: y.index_fill(-1, torch.tensor([0, 2]), -INF),
    "in place": lambda y, x: y.clone().masked_fill_(x > 0, -INF),
    "a mask that is added": lambda y, x: y + torch.zeros_like(y).masked_fill(x > 0, -INF),
    "top-k filter": lambda y, x: torch.where(y < y.topk(2)[0][..., -1:], -INF, y),
    "log of 0": lambda y, x: y.relu().log(),
    "log of 0 in place": lambda y, x: y.relu().log_(),
    "log of a softmax of a mask": lambda y, x: y.masked_fill(x > 0, -INF).log_softmax(-1),
    "NaN as a mark": lambda y, x: torch.where(x > 0, y, NAN),
    "NaN as a tensor": lambda y, x: torch.where(x > 0, y, torch.tensor(NAN, dtype=y.dtype)),
    "+Inf as a mark": lambda y, x: torch.where(x > 0, y, torch.full_like(y, INF)),
    "division by 0": lambda y, x: y / (x > 0),
    "0 by 0": lambda y, x: (y * 0) / (x > 0),
    "root of a negative number": lambda y, x: y.sqrt(),
    "reciprocal root of 0": lambda y, x: y.relu().rsqrt(),
    "power of 0": lambda y, x: y.relu() ** -1,
    "softmax of a row that is masked whole": lambda y, x: (y * 0 - INF).softmax(-1) + y * 0,
    "beside finite values": lambda y, x: {"logits": y.masked_fill(x > 0, -INF), "other": y},
}

FAULTS: dict[str, Callable[[Y, Y], Any]] = {
    "a product beyond fp32": lambda y, x: (y * 1e30) * (y * 1e30),
    "a product in place": lambda y, x: (y * 1e30).mul_(1e30),
    "a sum of products": lambda y, x: (y * 1e30) @ (y * 1e30).mT,
    "exp of 100": lambda y, x: (y.abs() + 100).exp(),
    "exp of 1000": lambda y, x: (y.abs() + 1000).exp(),
    "a power": lambda y, x: (y.abs() * 1e30 + 2) ** 9,
    "a cumulative product": lambda y, x: (y.abs() + 1e20).cumprod(-1),
    "NaN of an overflow": lambda y, x: (y * 1e30 * 1e30) - (y * 1e30 * 1e30),
    "an overflow beside a mask": lambda y, x: (y * 1e30 * 1e30 * (x < 0)).masked_fill(x > 1, -INF),
    "an overflow beside a mark": lambda y, x: (y.masked_fill(x > 0, -INF), y * 1e30 * 1e30),
}


class Net(nn.Module):
    """A linear, and what becomes of its output."""

    def __init__(self, end: Callable[[Y, Y], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.end = nn.Linear(4, 4), end
        self.register_buffer("mask", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.layer(x) + self.mask, x)


def make(end: Callable[[Y, Y], Any], dtype: torch.dtype = torch.float32) -> tuple[Net, Y]:
    torch.manual_seed(1)
    return Net(end).eval().requires_grad_(False).to(dtype), torch.randn(3, 4).to(dtype)


def is_same(found: Any, wanted: Any) -> bool:
    return bool(compare_with_fp32(found, wanted) == compare_with_fp32(wanted, wanted))


@pytest.mark.default_rows(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MEANT)
def test_what_a_model_means_is_no_fault(name: str, dtype: torch.dtype) -> None:
    """Goes on with the bits that the model gave, three times, and says so once."""
    module, x = make(MEANT[name], dtype)
    plain, said = module(x), list[str]()
    assert not all(x.isfinite().all() for x in (plain.values() if type(plain) is dict else [plain]))
    with guard(module, announce=said.append) as handle:
        assert all(is_same(module(x), plain) for _ in range(3))
    assert handle.repairs == ()
    assert handle.record.calls[0].non_finite == 0
    (text,) = said
    assert "It does so in fp32 as well, from finite arguments and weights" in text


@pytest.mark.parametrize("name", FAULTS)
def test_what_fp32_cannot_hold_is_a_fault(name: str) -> None:
    """Ends the run where sums and products pass fp32's largest value, beside what is meant as well."""
    module, x = make(FAULTS[name])
    with guard(module, announce=quiet), pytest.raises(NonFiniteError, match="in fp32"):
        module(x)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", ["weight", "argument"])
@pytest.mark.parametrize("end", ["logits masked by -inf", "beside finite values"])
def test_damaged_weights_and_arguments_are_faults(end: str, place: str, value: float) -> None:
    """Ends the run for one value of a weight or an argument, also where a model masks its logits."""
    module, x = make(MEANT[end])
    (module.layer.weight if place == "weight" else x)[0, 0] = value
    with guard(module, announce=quiet), pytest.raises(NonFiniteError):
        module(x)


def test_masks_that_are_kept_are_meant_and_marks_that_are_kept_are_not() -> None:
    """Takes -Inf of a buffer for a mask, and NaN of one for damage."""
    module, x = make(lambda y, x: y)
    module.mask[1] = -INF
    plain = module(x)
    with guard(module, announce=quiet) as handle:
        assert is_same(module(x), plain)
    assert handle.repairs == ()
    module.mask[1] = NAN
    with guard(module, announce=quiet), pytest.raises(NonFiniteError, match="mask isn't finite"):
        module(x)


def overflow(y: torch.Tensor) -> torch.Tensor:
    return (y * 3e4) * 2**-14


IN_FP16: dict[str, Callable[[Y, Y], Any]] = {
    "beside a mask": lambda y, x: overflow(y).masked_fill(x > 0, -INF),
    "swallowed beside a mask": lambda y, x: (
        overflow(y).nan_to_num(0, 0, 0).masked_fill(x > 0, -INF)
    ),
    "to -Inf beside a mask": lambda y, x: -overflow(y).abs().masked_fill(x > 0, INF),
}


@pytest.mark.parametrize("name", IN_FP16)
def test_an_overflow_of_fp16_beside_what_is_meant_is_repaired(name: str) -> None:
    """Repairs what fp32 holds, at a first call and after calls that meant theirs, and leaves the rest."""
    module, x = make(IN_FP16[name])
    right, healthy = module(x * 4), module(x / 100)
    near = compare_with_fp32(copy.deepcopy(module).bfloat16()(x.bfloat16() * 4), right)
    for calls in ((x / 100, x * 4, x * 4), (x * 4, x * 4)):
        other = copy.deepcopy(module).half()
        with guard(other, announce=quiet) as handle:
            found = [other(one.half()) for one in calls]
            assert len(handle.repairs) == 1
            assert all(compare_with_fp32(one, right).is_within(near) for one in found[-2:])
            assert compare_with_fp32(other(x.half() / 100), healthy).places == 0


def test_a_script_is_not_slowed_by_what_a_model_means() -> None:
    """Makes later calls once each, under a guard of their own, and reports the kind once."""
    module, x = make(MEANT["logits masked by -inf"])
    plain, said, runs = module(x), list[str](), list[int]()
    module.layer.register_forward_hook(lambda *_: runs.append(1))
    with Patches() as patches:
        script = ScriptGuard(said.append)
        script.put_on(patches)
        module(x)
        first = len(runs)
        assert all(is_same(module(x), plain) for _ in range(3))
    assert len(runs) == first + 3
    assert len(said) == 1
    assert not script.failed


@pytest.mark.parametrize(
    ("component", "path"), [("unet", "conv_out"), ("text_encoder", "final_layer_norm")]
)
def test_a_component_of_a_pipeline_means_no_nan(component: str, path: str) -> None:
    """Ends a pipeline whose component gives NaN in fp32: the picture would be black."""
    pipe = testing.make_pipeline("sd")
    part = getattr(pipe, component).get_submodule(path)
    part.register_forward_hook(lambda module, args, output: output.sqrt())
    with (
        guard(pipe, announce=quiet),
        pytest.raises(NonFiniteError, match=f"`{component}` returned"),
    ):
        call_pipeline(pipe, "sd")


def test_another_number_of_such_values_is_compared_in_16_bits() -> None:
    """Knows calls in fp32 by the kinds of their values, those in 16 bits by their number, up to a limit."""
    known, values = Meaning(), torch.zeros(8)
    for number in range(1, BELIEVED_AFTER + 1):
        values[:number] = -INF
        assert not known.covers(values, "fp16")
        known.add(values)
        assert known.covers(values, "fp16")
    values[:] = -INF
    assert known.covers(values, "fp16")
    values[0] = NAN
    assert not known.covers(values, "fp32")

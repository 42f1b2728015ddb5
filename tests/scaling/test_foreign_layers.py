"""Layers as other packages write them: their own linears, norms, attention kernels, caches."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from models.foreign_models import FusedRMSNorm
from stopdown import cast_, guard, rescale_
from stopdown.errors import CaptureError, ScalingError
from stopdown.numerics import relative_l2

LARGE = 2.0**18


class OwnLinear(nn.Linear):
    """Casts its weight to its input at each call, as many forks do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class OwnConv(nn.Conv1d):
    """Pads by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.pad(x, (1, 1)))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias)


class EngineLinear(nn.Module):
    """Shaped as `transformer_engine.pytorch.Linear`: its product in an autograd function."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(size, size)),
            nn.Parameter(torch.zeros(size)),
        )

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return _Product.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


class ConvLayer(nn.Module):
    """A convolution of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = OwnConv(8, 8, 3)

    @property
    def weight(self) -> torch.Tensor:
        """The convolution's."""
        return self.conv.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Quiet(nn.Module):
    """Its author switched autocast off inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @property
    def weight(self) -> torch.Tensor:
        """The linear's."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x)


class Net(nn.Module):
    """One layer of a kind, so large that what it adds is beyond fp16, and a fused norm behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), layer
        self.norm, self.last = FusedRMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x) + self.layer(x)))


KINDS = {
    "linear": lambda: OwnLinear(8, 8),
    "convolution": ConvLayer,
    "engine": lambda: EngineLinear(8),
    "autocast": Quiet,
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_other_packages_are_folded(kind: str) -> None:
    """Exact in fp32, nothing in fp32 besides, near fp32 in fp16; the norm's eps scales along."""
    torch.manual_seed(0)
    net = Net(KINDS[kind]()).eval().requires_grad_(False)
    net.layer.weight.mul_(LARGE)  # type: ignore[union-attr, operator]
    x = torch.randn(1, 5, 8)
    plain = net(x)
    rescaling = rescale_(net, (x,))
    assert rescaling.exponents
    assert "norm.eps" in rescaling.scaling.eps
    assert not rescaling.fp32_modules
    assert torch.equal(net(x), plain)
    cast_(net, torch.float16, rescaling)
    assert relative_l2(net(x.half()).float(), plain) < 0.005
    rescaling.undo()


@torch.library.custom_op("stopdown_tests::_flash_attn_forward", mutates_args=())
def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With flash attention's rule of dtypes."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    scores = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
    out = scores.softmax(-1) @ v.float()
    return out.to(q.dtype), scores.logsumexp(-1)


@flash.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


class FlashBlock(nn.Module):
    """Attention by a kernel that refuses fp32, in a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out, _ = torch.ops.stopdown_tests._flash_attn_forward(self.q(x), self.k(x), self.v(x))
        return self.last(self.norm(x + self.o(out)))


def test_a_kernel_that_refuses_fp32_is_measured_and_repaired() -> None:
    """The guard finds exponents for it: what its values reach is measured in bf16, which it takes."""
    torch.manual_seed(0)
    block = FlashBlock().eval().requires_grad_(False)
    x = torch.randn(1, 5, 8)
    plain = block.bfloat16()(x.bfloat16()).float()
    block.half().v.weight.mul_(2.0**12)
    block.o.weight.mul_(2.0**10)
    assert not block(x.half()).isfinite().all()
    with guard({"block": block}, announce=lambda text: None) as handle:
        found = block(x.half())
    (repair,) = handle.repairs
    assert repair.action == "rescaled"
    assert found.isfinite().all()
    assert found.shape == plain.shape


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _attend_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def memory_efficient_attention(query: Any, key: Any, value: Any, attn_bias: Any = None) -> Any:
    """With the rule of xformers."""
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError("Query/Key/Value should all have the same dtype")
    return _attend_rows(query, key, value)


def flash_attn_func(q: Any, k: Any, v: Any, dropout_p: float = 0.0, causal: bool = False) -> Any:
    """With the rule of flash_attn."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return _attend_rows(q, k, v)


def sageattn(q: Any, k: Any, v: Any, tensor_layout: str = "HND") -> Any:
    """With the rule of sageattention."""
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise AssertionError("Input tensors must be in dtype of torch.float16 or torch.bfloat16")
    return _attend_rows(q, k, v) if tensor_layout == "NHD" else _attend(q, k, v)


class NamedAttention(nn.Module):
    """Attention by a function that is looked up in another package, in a residual stream."""

    def __init__(self, package: str, name: str) -> None:
        super().__init__()
        self.package, self.name = package, name
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        heads = [part(x).unflatten(-1, (2, 4)) for part in (self.q, self.k, self.v)]
        is_sage = self.name == "sageattn"
        heads = [y.transpose(1, 2) for y in heads] if is_sage else heads
        out = getattr(sys.modules[self.package], self.name)(*heads)
        out = out.transpose(1, 2) if is_sage else out
        return self.last(self.norm(x + self.o(out.flatten(2))))


@pytest.mark.parametrize(
    ("package", "function", "takes_fp32"),
    [
        ("xformers.ops", memory_efficient_attention, True),
        ("flash_attn", flash_attn_func, False),
        ("sageattention", sageattn, False),
    ],
)
def test_attention_of_other_packages(
    monkeypatch: pytest.MonkeyPatch, package: str, function: Any, takes_fp32: bool
) -> None:
    """Rescaled and guarded in fp16; of a kernel that refuses fp32 the error says to cast first."""
    stub = types.ModuleType(package)
    setattr(stub, function.__name__, function)
    monkeypatch.setitem(sys.modules, package, stub)
    torch.manual_seed(0)
    block = NamedAttention(package, function.__name__).eval().requires_grad_(False)
    block.v.weight.mul_(2.0**12)
    block.o.weight.mul_(2.0**10)
    x = torch.randn(1, 5, 8)
    with monkeypatch.context() as wide:
        wide.setattr(stub, function.__name__, _attend if function is sageattn else _attend_rows)
        plain = block(x)
    if takes_fp32:
        rescaling = rescale_(block, (x,))
        assert torch.equal(block(x), plain)
        rescaling.undo()
    else:
        with pytest.raises(ScalingError, match=r"doesn't run in fp32: .* Cast it first, and give"):
            rescale_(block, (x,))
    block.half()
    rescaling = rescale_(block, (x.half(),))
    assert relative_l2(block(x.half()).float(), plain) < 0.005
    rescaling.undo()
    with guard({"block": block}, announce=lambda text: None) as handle:
        found = block(x.half())
    assert [repair.action for repair in handle.repairs] == ["rescaled"]
    assert relative_l2(found.float(), plain) < 0.005


class Keeping(nn.Module):
    """Keeps what it made for the calls that follow, in a dict and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept: dict[str, torch.Tensor] = {}
        self.order: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "first" not in self.kept:
            self.kept["first"] = self.first(x)
            self.order.append(self.kept["first"])
        return self.last(torch.tanh(self.order[-1]) + x)


def test_what_a_module_keeps_between_calls_is_no_silent_change() -> None:
    """Either it is right, or it is refused, and the module is what it was."""
    torch.manual_seed(0)
    module = Keeping().eval().requires_grad_(False)
    module.first.weight.mul_(LARGE)
    x = torch.randn(1, 5, 8)
    plain, before = module(x), {k: v.clone() for k, v in module.state_dict().items()}
    try:
        rescaling = rescale_(module, (x,))
    except (CaptureError, ScalingError):
        pass
    else:
        assert torch.equal(module(x), plain)
        rescaling.undo()
    assert torch.equal(module(x), plain)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_weights_that_are_made_at_the_first_call() -> None:
    """A lazy module is guarded from before its first call on."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4)).eval()
    with guard({"net": module}) as handle, torch.no_grad():
        module(torch.randn(2, 6))
        module(torch.randn(2, 6))
    (call,) = handle.record.calls
    assert (call.component, call.calls) == ("net", 2)

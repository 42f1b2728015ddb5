"""Code that mixes dtypes, as it is found in programs that were written for autocast or for manual casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models.mixed_dtype_models import make_block, make_call
from models.rescaling_models import measure_call
from stopdown import cast_, guard, rescale_
from stopdown.errors import CaptureError
from stopdown.module_calls import mixed_dtypes
from stopdown.module_calls.mixed_dtypes import NO_OPERANDS, merge_operands
from stopdown.numerics import relative_l2
from stopdown.records import Operands, Scaling, from_json, to_json
from stopdown.scaling.graph import capture as capturing
from stopdown.scaling.graph.capture import capture_call

LARGE = 2.0**18


def test_where_dtypes_are_mixed_is_found() -> None:
    """The layer that is handed fp32 casts its input; the norm that widens itself keeps its parameters."""
    block, given = make_block(), make_call()
    found = capture_call(block, given, dtype=torch.float16).operands
    assert found == Operands(("time_embed",), ("norm.bias", "norm.weight"))


def test_a_block_that_mixes_dtypes_is_rescaled() -> None:
    """It gets exponents, exact in fp32; cast it runs in fp16, near fp32, and is undone to the last bit."""
    block, (x, t) = make_block(), make_call()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    plain = block(x, t)
    rescaling = rescale_(block, (x, t))
    assert rescaling.exponents
    assert not rescaling.scaling.note
    assert torch.equal(block(x, t), plain)
    cast_(block, torch.float16, rescaling)
    assert block.norm.weight.dtype == torch.float32
    found = block(x.half(), t)
    assert relative_l2(found.float(), plain) < 0.005
    rescaling.undo()
    assert not block.time_embed._forward_pre_hooks
    for name, value in block.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == torch.float32


def test_without_it_there_is_no_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the search off the same block is left to the fall-back: the test above sees it."""
    monkeypatch.setattr(capturing, "find_operands", lambda call, shadow: NO_OPERANDS)
    block, given = make_block(), make_call()
    rescaling = rescale_(block, given)
    assert not rescaling.exponents
    assert "there are no exponents" in rescaling.scaling.note
    rescaling.undo()


def test_a_plan_keeps_what_is_cast() -> None:
    """Operands survive JSON, merge, and a scaling without them reads as before."""
    operands = Operands(("time_embed",), ("norm.weight",))
    scaling = Scaling(operands=operands)
    assert from_json(to_json(scaling), Scaling) == scaling
    assert from_json(to_json(Scaling()), Scaling).operands == NO_OPERANDS
    assert merge_operands(operands, Operands(("a",))) == Operands(
        ("a", "time_embed"), ("norm.weight",)
    )


class Typed(nn.Module):
    """Casts what it makes to a plain attribute, as SAT and ComfyUI do."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.inner = nn.Module()
        self.inner.dtype = torch.float32  # has no parameters: its own business
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.dtype)) + torch.ones(4, dtype=self.dtype)


def test_a_plain_dtype_attribute_follows() -> None:
    """`cast_` sets it, and undoing takes it back; a part without parameters keeps its own."""
    module: Any = Typed()
    cast = cast_(module, torch.float16)
    assert (module.dtype, module.inner.dtype) == (torch.float16, torch.float32)
    assert module(torch.randn(1, 4).half()).dtype == torch.float16
    cast.undo()
    assert module.dtype == torch.float32
    assert capture_call(module, (torch.randn(1, 4),), dtype=torch.float16).operands == NO_OPERANDS
    assert module.dtype == torch.float32


class Layer(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(8, 16), activation, nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Host(nn.Module):
    """Layers that share one activation, and are run by a mixin that holds the host as no child."""

    def __init__(self) -> None:
        super().__init__()
        activation = nn.GELU()
        self.layers = nn.ModuleList(Layer(activation) for _ in range(2))
        self.last = nn.Linear(8, 4)
        self.mixin = Mixin(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mixin.run(x))


class Mixin(nn.Module):
    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "host", host)
        self.query_norm = nn.LayerNorm(8)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.host.layers:  # type: ignore[union-attr, attr-defined]
            x = layer(self.query_norm(x))
        return x


def make_host(way: str, factor: float = 2.0**17) -> Host:
    torch.manual_seed(0)
    host = Host().eval().requires_grad_(False)
    for layer in host.layers:
        getattr(layer, way).weight.mul_(factor)
    return host


def test_modules_have_their_whole_paths() -> None:
    """Those that code reaches through a plain attribute are named as parameters are."""
    host = make_host("down")
    graph = capture_call(host, (torch.randn(1, 3, 8),), dtype=torch.float16).graph.graph
    paths = {capturing.module_path(node) for node in graph.nodes if node.op == "call_function"}
    names = {name for name, _ in host.named_modules(remove_duplicate=False)}
    assert paths <= names
    assert {"layers.0.norm", "layers.1.down", "mixin.query_norm"} <= paths


@pytest.mark.parametrize("way", ["up", "down"])
def test_what_layers_share_gets_no_multiply(way: str) -> None:
    """A multiply at a shared activation would act in every layer: exact in fp32, near it in fp16."""
    host, x = make_host(way), torch.randn(1, 3, 8)
    plain = host(x)
    rescaling = rescale_(host, (x,))
    assert not [path for path in rescaling.multiplies if path.endswith("activation")]
    assert torch.equal(host(x), plain)
    cast_(host, torch.float16, rescaling)
    assert relative_l2(host(x.half()).float(), plain) < 0.005
    rescaling.undo()


class InPlace(nn.Module):
    """Adds into what it is given, as ComfyUI's T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.linear(x)
        return x


def test_arguments_of_a_measured_call_stay_as_they_are() -> None:
    """Measuring runs code that writes into its arguments on copies."""
    module, x = InPlace().eval().requires_grad_(False), torch.randn(2, 4)
    before = x.clone()
    measure_call(module, (x,))
    assert torch.equal(x, before)


class Causal(nn.Module):
    """One frame takes a part of the kernel, several take all of it, as ComfyUI's Wan VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv1d(4, 8, 3),
            nn.Conv1d(8, 4, 1),
            nn.Linear(2, 2),
        )

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight[:, :, -x.shape[-1] :]
        return self.second(nn.functional.conv1d(x, weight, self.first.bias))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.third(z)


def test_a_part_of_a_kernel_is_scaled_with_all_of_it() -> None:
    """A weight that one call slices and another call does not use keeps one exponent."""
    torch.manual_seed(0)
    module = Causal().eval().requires_grad_(False)
    module.first.weight.mul_(2.0**18)
    module.second.weight.mul_(2.0**-18)
    x, z = torch.randn(1, 4, 1), torch.randn(1, 8, 2)
    plain = module.encode(x)
    rescaling = rescale_(module, calls=[(module.encode, (x,), {}), (module.decode, (z,), {})])
    assert rescaling.exponents["first.weight"] < 0
    assert torch.equal(module.encode(x), plain)
    rescaling.undo()


class Cleaned(nn.Module):
    """Turns infinities of fp16 into its largest numbers, as ComfyUI's Flux and Chroma do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.second(self.first(x))
        if hidden.dtype == torch.float16:
            hidden = torch.nan_to_num(hidden, nan=0.0, posinf=65504, neginf=-65504)
        return self.norm(hidden)


def test_a_clamp_of_infinities_does_not_pin_the_stream() -> None:
    """It is fp16's maximum: the value before it is scaled, and nothing stays in fp32."""
    torch.manual_seed(0)
    module = Cleaned().eval().requires_grad_(False)
    module.second.weight.mul_(LARGE)
    x = torch.randn(3, 4)
    plain = module(x)
    rescaling = rescale_(module, (x,))
    assert rescaling.exponents
    assert not rescaling.fp32_modules
    assert not rescaling.pinned
    cast_(module, torch.float16, rescaling)
    assert relative_l2(module(x.half()).float(), plain) < 0.005
    rescaling.undo()


class Halving(nn.Module):
    """Divides its values until they are small, which Inf never is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.up.weight.data.mul_(1e5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, 8]`, the same again."""
        x = self.up(x)
        while x.abs().max() > 1e4:
            x = x / 2
        found: torch.Tensor = self.norm(x)
        return found


def test_a_loop_that_never_ends_in_fp16_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for mixed dtypes runs the code in plain fp16, and stops; exponents are found anyway."""
    monkeypatch.setattr(mixed_dtypes, "MOST_OPERATIONS", 2_000)
    module, half = Halving().eval(), Halving().eval().half()
    x = torch.arange(8.0)[None] * 5
    with torch.no_grad():
        with pytest.raises(CaptureError) as caught:
            mixed_dtypes.find_operands(lambda: half(x.half()), half)
        before = module(x)
        rescaling = rescale_(module, x)
        assert torch.equal(module(x), before)
        cast_(module, torch.float16, rescaling)
        assert relative_l2(module(x.half()).float(), before) < 1e-3
    assert str(caught.value) == (
        "The code of Halving hadn't ended after 2,000 operations in fp16. A loop that goes on until "
        "values are small doesn't end for values that fp16 can't hold. Run it in bf16 or fp32."
    )


class Conjugates(nn.Module):
    """Multiplies complex numbers by conjugated ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.up.weight.data.mul_(1e6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, 8]`, the same again."""
        pairs = torch.view_as_complex(self.up(x).unflatten(-1, (4, 2)).contiguous())
        turned = pairs.conj() * torch.polar(torch.ones(4), torch.arange(4.0)).conj()
        found: torch.Tensor = self.norm(torch.view_as_real(turned.resolve_conj()).flatten(-2))
        return found


def test_conjugated_complex_tensors_are_measured() -> None:
    """A conjugation that PyTorch has not carried out yet is no raw error; fp32 bits stay."""
    module, x = Conjugates().eval(), torch.ones(1, 8)
    with torch.no_grad():
        before = module(x)
        rescale_(module, x)
        assert torch.equal(module(x), before)


PRODUCTS = {
    "@": lambda x, weight: x @ weight.T,
    "matmul": lambda x, weight: torch.matmul(x, weight.t()),
    "mm, the weight first": lambda x, weight: torch.mm(weight, x.T).T,
}


class Waves(nn.Module):
    """Multiplies by its weight without a layer, as embeddings of timesteps do."""

    def __init__(self, product: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 1))
        self.product = product

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        """`[N, 1]` to `[N, 8]`."""
        found: torch.Tensor = PRODUCTS[self.product](t, self.weight).cos()
        return found


class Timed(nn.Module):
    """Adds what a timestep makes to activations beyond fp16."""

    def __init__(self, product: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves, self.up, self.norm = Waves(product), nn.Linear(8, 8), nn.LayerNorm(8)
        self.out = nn.Linear(8, 4)
        self.up.weight.data.mul_(1.5e5)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """`[N, 8]` and `[N, 1]` to `[N, 4]`."""
        found: torch.Tensor = self.out(self.norm(x + self.up(self.waves(t))))
        return found


@pytest.mark.filterwarnings("ignore::stopdown.errors.StopdownWarning")
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_with_a_parameter_are_given_one_dtype(product: str) -> None:
    """A timestep in fp32 meets an fp16 weight: its module's input is cast, and the overflow rescaled."""
    module, x, t = Timed(product).eval(), torch.randn(3, 8), torch.tensor([[0.7], [0.2], [0.5]])
    with torch.no_grad():
        wanted = module(x, t)
        half = Timed(product).eval().half()
        with pytest.raises(RuntimeError, match="dtype"):
            half(x.half(), t)
        assert mixed_dtypes.find_operands(lambda: half(x.half(), t), half) == Operands(("waves",))
        with guard(half) as guarding:
            errors = [relative_l2(half(x.half(), t).float(), wanted) for _ in range(2)]
        plain = relative_l2(Timed(product).bfloat16()(x.bfloat16(), t.bfloat16()).float(), wanted)
    assert [repair.action for repair in guarding.record.repairs] == ["cast-inputs", "rescaled"]
    assert max(errors) < plain

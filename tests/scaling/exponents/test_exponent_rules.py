"""The rules of rescaling that need care; networks drawn at random are those of `test_random_graphs.py`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from models.branch_networks import WIDTH, copy_state, make_overflowing
from stopdown.errors import ScalingError
from stopdown.fold_names import list_folds, spread_columns
from stopdown.numerics import relative_l2
from stopdown.records import Scaling
from stopdown.scaling.exponents import exponent_rules as rules
from stopdown.scaling.folding.folds import cast_, fold_scaling
from stopdown.scaling.graph import blocks
from stopdown.scaling.rescale import rescale_
from stopdown.testing import make_pipeline


@pytest.mark.parametrize("body", ["gated", "attention"])
def test_values_keep_room_for_what_was_not_measured(body: str) -> None:
    """Where exponents are to be had, calls ten times as large as those measured still fit."""
    module, x = make_overflowing(body)
    assert rescale_(module, (x,)).headroom_bits > math.log2(10)


def test_the_parts_of_a_chunk_get_exponents_of_their_own() -> None:
    """A gate's rows are folded apart from those that `1 + scale` and `shift` pin."""
    torch.manual_seed(0)

    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.linear = nn.Linear(4, WIDTH), nn.Linear(4, 3 * WIDTH)
            self.norm, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift, scale, gate = self.linear(x).chunk(3, dim=-1)
            x = self.embed(x)
            for _ in range(2):
                x = x + gate * self.back(self.norm(x) * (1 + scale) + shift)
            return self.norm(x)

    module, x = Modulated().eval().requires_grad_(False), torch.randn(2, 5, 4)
    module.embed.weight.mul_(2.0**24)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert torch.equal(module(x), reference)
    rows = {name for name in rescaling.exponents if name.startswith("linear.weight")}
    assert rows == {f"linear.weight[{2 * WIDTH}:{3 * WIDTH}]"}


class Parallel(nn.Module):
    """Attention and a feed-forward in one tensor before one matrix, as in Flux's single block."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.query, self.key = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH)
        self.value, self.up = nn.Linear(4, WIDTH), nn.Linear(4, 2 * WIDTH)
        self.both = nn.Linear(4, 3 * WIDTH)
        self.out = nn.Linear(3 * WIDTH, 4)
        self.value.weight.data.mul_(2.0**18)
        self.both.weight.data[:WIDTH].mul_(2.0**18)
        self.out.weight.data[:, :WIDTH].mul_(2.0**-18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, up = self.value(x), self.up(x)
        if self.fused:
            value, up = self.both(x).split([WIDTH, 2 * WIDTH], dim=-1)
            value = torch.cat(value.chunk(2, dim=-1), dim=-1)
        mixed = functional.scaled_dot_product_attention(self.query(x), self.key(x), value)
        both = torch.cat([mixed.unsqueeze(1), functional.gelu(up).unsqueeze(1)], dim=-1)
        return self.out(both.squeeze(1))


@pytest.mark.parametrize("fused", [False, True])
def test_the_parts_of_a_concatenation_get_exponents_of_their_own(fused: bool) -> None:
    """What fp16 does not hold is folded into the columns that read it; the rest of them stays."""
    module, x = _make_parallel(fused=fused)
    reference = module(x)
    assert not bool(copy.deepcopy(module).half()(x.half()).isfinite().all())
    rescaling = rescale_(module, (x,))
    assert torch.equal(module(x), reference)
    assert not rescaling.multiplies
    assert not rescaling.fp32_modules
    columns = {name: e for name, e in rescaling.exponents.items() if name.startswith("out.weight")}
    spread = list_folds(columns)["out.weight"]
    attention, mlp = spread_columns(spread, 3 * WIDTH).split([WIDTH, 2 * WIDTH])
    assert len({*attention.tolist()}) == len({*mlp.tolist()}) == 1
    assert attention[0] - mlp[0] > 0
    cast_(module, torch.float16, rescaling)
    assert relative_l2(module(x.half()), reference) < 2e-3


def _make_parallel(*, fused: bool = False) -> tuple[Parallel, torch.Tensor]:
    torch.manual_seed(0)
    return Parallel(fused=fused).eval().requires_grad_(False), torch.randn(2, 5, 4)


def test_without_ranges_a_concatenation_needs_a_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """One exponent for all of it leaves the feed-forward no other way."""
    monkeypatch.setattr(blocks, "_read_joint", lambda node: None)
    module, x = _make_parallel()
    rescaling = rescale_(module, (x,))
    assert rescaling.multiplies or rescaling.fp32_modules


def test_columns_have_one_exponent_where_that_does() -> None:
    """DoRA takes no other, and a plan is shorter: an overflow behind the matrix asks for nothing else."""
    module, x = _make_parallel()
    module.value.weight.mul_(2.0**-18)
    module.out.weight.mul_(2.0**20)
    rescaling = rescale_(nn.Sequential(module, nn.LayerNorm(4)), (x,))
    assert "0.out.weight" in rescaling.exponents
    assert not any("[:," in name for name in (*rescaling.exponents, *rescaling.scaling.layers))


def test_an_operation_without_a_rule_is_pinned_and_named() -> None:
    """What is unknown keeps its values, and stands in the result with its place."""

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.special.bessel_j0(self.first(x)))

    rescaling = rescale_(Unknown().eval(), (torch.randn(2, 4),))
    assert rescaling.pinned == {"special_bessel_j0": ("Unknown:",)}
    assert rescaling.exponents == {}
    assert rescaling.trial is not None  # no kernel for it in fp16 on a processor, which is said
    assert rescaling.trial.calls == 0
    assert "doesn't run in fp16 on this device, and wasn't tried" in rescaling.trial.note


def test_sizes_and_shapes_are_not_operations_without_a_rule() -> None:
    """What tells no value needs no rule; transposes, diagonals and QR have one, and are exact."""

    class Shapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            y = y.as_strided(y.shape, y.stride(), y.storage_offset())
            _, upper = torch.linalg.qr(torch.diag_embed(y).sum(0).T.mT)
            return functional.layer_norm(self.last(upper), (4,))

    module, x = Shapes().eval(), torch.randn(2, 4)
    with torch.no_grad():
        module.first.weight.mul_(2.0**20)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert rescaling.pinned == {}
    assert rescaling.fp32_modules == ()
    assert torch.equal(module(x), reference)


@pytest.mark.parametrize("name", ["sym_storage_offset", "sym_size", "is_contiguous"])
def test_what_returns_no_value_needs_no_rule(name: str) -> None:
    """Sizes, strides and offsets are what they are in every format."""
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.ones(2)
    packet = getattr(torch.ops.aten, name)
    node = graph.call_function(getattr(packet, packet.overloads()[0]), (source,))
    assert rules.find_rule(node) == (rules.state_nothing, False)


@pytest.mark.parametrize("name", ["item", "equal"])
def test_what_reads_values_wants_a_rule(name: str) -> None:
    """A number that depends on values is not passed over."""
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.ones(2)
    node = graph.call_function(getattr(torch.ops.aten, name).default, (source,) * 2)
    assert rules.find_rule(node) == (None, False)


@pytest.mark.thorough
def test_the_autoencoder_of_wan_needs_nothing_in_fp32() -> None:
    """Its upsampling (`nearest-exact`) has a rule: values beyond fp16 are scaled through it."""
    vae = make_pipeline("wan").vae
    with torch.no_grad():
        vae.decoder.conv_in.weight.mul_(2.0**22)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vae = vae

        def forward(self, latents: torch.Tensor) -> torch.Tensor:
            return self.vae.decode(latents, return_dict=False)[0]

    module, latents = Decoder().eval(), torch.randn(1, 4, 1, 4, 4)
    rescaling = rescale_(module, (latents,))
    assert (rescaling.pinned, rescaling.fp32_modules) == ({}, ())


class Feed(nn.Module):
    """A gelu between two linears, all under a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(self.inner(x), (4,))


class Bare(nn.Module):
    """The same with the matrices in the module's own hands."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(n, 12 - n) / 256) for n in (4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x @ self.first) @ self.last


class Fed(Feed):
    """A feed-forward that nothing can be opened in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Bare()


@pytest.mark.parametrize(("kind", "fp32_modules"), [(Feed, ()), (Fed, ("inner",))])
def test_what_cannot_be_scaled_is_kept_in_fp32(
    kind: type[nn.Module], fp32_modules: tuple[str, ...]
) -> None:
    """A value that a gelu reads beyond fp16 is kept in fp32, between cast hooks; linears beside it
    compute in fp16."""
    torch.manual_seed(0)
    module, x = kind().eval().requires_grad_(False), torch.randn(3, 4) * 2.0**10
    next(module.parameters()).mul_(2.0 ** (12 if kind is Feed else 18))
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert rescaling.fp32_modules == fp32_modules
    assert (rescaling.scaling.fp32_flops == 0) == (kind is Feed)
    assert torch.equal(module(x), reference)
    cast = cast_(module, torch.float16, rescaling)
    low = module(x.half())
    assert low.dtype == torch.float16
    assert bool(low.isfinite().all())
    assert relative_l2(low, reference) < 0.005
    cast.undo()
    assert torch.equal(module(x), reference)
    rescaling.undo()
    again = rescale_(module, calls=[(module, (x,), {}), (module, (x[:2],), {})])
    assert again.scaling.fp32_flops == pytest.approx(rescaling.scaling.fp32_flops), "a share of all"


class Returning(nn.Module):
    """A stream that is returned as it is, and normalised besides; also by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        stream = self.embed(x)
        return {"normed": self.norm(stream), "stream": stream}

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)


def _returning() -> tuple[Returning, torch.Tensor]:
    torch.manual_seed(0)
    module = Returning().eval().requires_grad_(False)
    module.embed.weight.mul_(2.0**20)
    return module, torch.randn(2, 4)


@pytest.mark.parametrize("residual", ["native", "fp32"])
def test_an_output_beyond_the_range_is_returned_in_fp32(residual: str) -> None:
    """The value runs in fp16 with an exponent, which is taken off in fp32 where it leaves."""
    module, x = _returning()
    reference = module(x)
    rescaling = rescale_(module, (x,), residual=residual)
    assert list(rescaling.scaling.outputs) == [1]
    assert all(torch.equal(module(x)[name], value) for name, value in reference.items())
    cast_(module, torch.float16, rescaling)
    low = module(x.half())
    assert (low["normed"].dtype, low["stream"].dtype) == (torch.float16, torch.float32)
    for name, value in reference.items():
        assert float((low[name] - value).norm() / value.norm()) < 0.002
    rescaling.undo()
    assert not module._forward_hooks


def test_an_output_of_a_method_beyond_the_range_is_refused_by_name() -> None:
    """No hook sees a method's output: the error names the value, and nothing was changed."""
    module, x = _returning()
    before = copy_state(module)
    with pytest.raises(ScalingError, match=r"Returning:embed \(linear\) reaches \d"):
        rescale_(module, calls=[(module.decode, (x,), {})])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_clamps_at_the_end_of_fp16_do_not_bite() -> None:
    """A clamp that only fp16 executes is kept off by the limits, and the value behind it scales."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            if x.dtype == torch.float16:
                x = x.clip(-65504, 65504)
            return self.norm(x)

    torch.manual_seed(0)
    module, x = Clamped().eval().requires_grad_(False), torch.randn(2, 4)
    module.embed.weight.mul_(2.0**24)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert torch.equal(module(x), reference)
    assert rescaling.exponents["embed.weight"] < -6
    cast_(module, torch.float16, rescaling)
    assert float((module(x.half()).float() - reference).abs().max()) < 0.01


def test_a_cube_inside_a_tanh_may_overflow() -> None:
    """The tanh of an Inf is 1, as it is of the cube: no fp32 module for a GELU written out by hand."""

    class Gelu(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), Gelu(), nn.Linear(8, 4)).eval().requires_grad_(False)
    module[0].weight.mul_(300.0)
    x = torch.randn(3, 4)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert rescaling.fp32_modules == ()
    cast_(module, torch.float16, rescaling)
    assert float((module(x.half()).float() - reference).norm() / reference.norm()) < 0.01


def test_a_square_in_fp16_does_not_underflow() -> None:
    """A variance that the model computes in fp16 stays where fp16 has bits: compared, not only
    finite."""

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.eps, self.out = nn.Linear(4, WIDTH), 1e-6, nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            return self.out(x / torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + self.eps))

    torch.manual_seed(0)
    module, x = Squared().eval().requires_grad_(False), torch.randn(2, 4)
    module.embed.weight.mul_(2.0**12)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert torch.equal(module(x), reference)
    cast_(module, torch.float16, rescaling)
    assert float((module(x.half()).float() - reference).norm() / reference.norm()) < 0.01


def test_a_table_that_is_cropped_is_scaled_as_a_whole() -> None:
    """Only rows have exponents of their own: a crop along another dimension names no rows."""

    class Cropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)
            self.register_buffer("table", torch.randn(1, 8, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.embed(x) + self.table[:, 2:6])

    torch.manual_seed(0)
    module, x = Cropped().eval().requires_grad_(False), torch.randn(1, 4, 4)
    module.embed.weight.mul_(2.0**20)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert rescaling.exponents["table"] == rescaling.exponents["embed.weight"] < 0
    assert not any("[" in name for name in rescaling.exponents)
    assert torch.equal(module(x), reference)


class Placed(nn.Module):
    """A table of positions, of which a call reads as many rows as its input has tokens."""

    def __init__(self, crop: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.crop, self.embed, self.norm = crop, nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(x) + self.crop(self.table, x.shape[1]))


@pytest.mark.parametrize(
    "crop",
    [
        lambda table, n: table[:n],
        lambda table, n: table[4 - n // 2 : 4 + n // 2],
        lambda table, n: table[1:][: n - 1].repeat(2, 1)[:n],
        lambda table, n: table.view(2, 4, WIDTH).reshape(8, WIDTH)[:n],
        lambda table, n: torch.cat([table[:1], table[1 : n // 2], table[n // 2 : n]]),
    ],
    ids=["first", "middle", "twice", "viewed", "joined"],
)
def test_a_table_that_is_read_in_part_is_exact_where_more_is_read(crop: Any) -> None:
    """Rescaled for a call of 4 tokens, calls of 8 and 2 give in fp32 what they gave."""
    torch.manual_seed(0)
    module = Placed(crop).eval().requires_grad_(False)
    module.embed.weight.mul_(2.0**20)
    calls = [torch.randn(1, n, 4) for n in (4, 8, 2)]
    reference = [module(x) for x in calls]
    rescaling = rescale_(module, (calls[0],))
    assert any(name.startswith("table") for name in rescaling.exponents)
    assert all(map(torch.equal, map(module, calls), reference))


def test_sequences_padded_with_zeros_keep_their_exponent() -> None:
    """Two lengths padded to one scale like any other value; no fp32 module, and it is exact."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            return self.norm(nn.utils.rnn.pad_sequence([x[:3], x[:2]], batch_first=True))

    torch.manual_seed(0)
    module, x = Padded().eval().requires_grad_(False), torch.randn(3, 4)
    module.embed.weight.mul_(2.0**20)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert (rescaling.pinned, rescaling.fp32_modules) == ({}, ())
    assert rescaling.exponents["embed.weight"] < -4
    assert torch.equal(module(x), reference)


def test_a_clamp_that_belongs_to_the_model_may_be_hit() -> None:
    """Sana's: what comes out at 65504 is in range, so nothing has to run in fp32 for it."""

    class SanaLike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            if x.dtype == torch.float16:
                x = x.clip(-65504, 65504)
            return self.out(x / 65504)

    torch.manual_seed(0)
    module, x = SanaLike().eval().requires_grad_(False), torch.randn(3, 4)
    module.embed.weight.mul_(2.0**15)
    module.embed.bias.fill_(2.0**15)
    rescaling = rescale_(module, (x,))
    assert rescaling.fp32_modules == ()
    cast_(module, torch.float16, rescaling)
    embed, k = module.embed, rescaling.multiplies["embed"]
    right = functional.linear(x.half(), embed.weight, embed.bias) * 2.0**k  # its sums stay in range
    assert torch.equal(module(x.half()), module.out(right.clip(-65504, 65504) / 65504))
    assert bool(right.isfinite().all())


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(2, 16)])
def test_a_norm_that_fp32_cannot_square_is_refused(norm: nn.Module) -> None:
    """Its sum of squares is Inf, so it returns its bias. Below that it is solved."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), norm, nn.Linear(16, 4)).eval().requires_grad_(False)
    module[0].weight.normal_().mul_(1e19)
    with pytest.raises(ScalingError, match=r"_norm\) squares values of .* Inf in fp32 already\. "):
        rescale_(module, (torch.ones(2, 4),))
    module[0].weight.mul_(1e-2)
    assert rescale_(module, (torch.ones(2, 4),)).trial


def test_a_module_kept_in_fp32_as_a_whole_returns_a_wide_output() -> None:
    """The cast back to fp16 leaves out an output whose exponent was taken off in fp32."""
    torch.manual_seed(0)
    module = nn.Linear(4, 8).requires_grad_(False)
    module.weight.mul_(2.0**18)
    x = torch.randn(2, 4).half().float()
    reference = module(x)
    scaling = Scaling(
        exponents={"weight": -5, "bias": -5}, outputs={0: -5}, fp32_modules=("",), headroom_bits=1.0
    )
    cast_(module, torch.float16, fold_scaling(module, scaling))
    found = module(x.half())
    assert found.dtype == torch.float32
    assert torch.equal(found, reference)


class OwnNorm(nn.Module):
    """An RMS norm that computes in the dtype of what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class OwnBlock(nn.Module):
    """A branch behind such a norm, and the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnNorm(16)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_a_norm_of_squares_that_fp16_does_not_hold_is_fp32() -> None:
    """A row of zeros leaves an eps that vanishes in fp16, whose root is Inf: the norms alone are fp32."""
    torch.manual_seed(0)
    blocks = [OwnBlock() for _ in range(3)]
    module = nn.Sequential(nn.Linear(4, 16, bias=False), *blocks, OwnNorm(16), nn.Linear(16, 4))
    module.eval().requires_grad_(False)
    module[0].weight.mul_(2.0**10)
    x = torch.randn(64, 4)
    x[0] = 0
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert torch.equal(module(x), reference)
    assert set(rescaling.fp32_modules) == {"1.norm", "2.norm", "3.norm", "4"}
    assert rescaling.scaling.stream is None
    with cast_(module, torch.float16, rescaling):
        assert relative_l2(module(x.half()), reference) < 0.01


INTEGERS = torch.arange(WIDTH) * 1000


def _write_integers(large: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros_like(large)
    buffer[..., 1:] = INTEGERS[1:]
    return buffer + large


def _write_mean(large: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros_like(x)
    buffer[..., 0] = large.mean() / 2.0**18
    return buffer + x


class Mixed(nn.Module):
    """A linear whose results are too large for fp16, mixed with other tensors, and a norm."""

    def __init__(self, mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mix, self.linear = mix, nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.linear.weight.data.mul_(2.0**18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mix(self.linear(x), x))


@pytest.mark.parametrize(
    "mix",
    [
        lambda large, x: torch.where(x > 0, large, INTEGERS),
        lambda large, x: torch.maximum(large, INTEGERS),
        lambda large, x: large.masked_fill(x > 0, INTEGERS[1]),
        lambda large, x: large.new_zeros(large.shape).copy_(INTEGERS) + large,
        lambda large, x: torch.stack([large, INTEGERS.expand(large.shape)], 1).sum(1),
        lambda large, x: torch.cat([large, x > 0], 1).sum(1),
        _write_integers,
        _write_mean,
        lambda large, x: torch.diff(large, dim=1, prepend=x[:, :1]),
        lambda large, x: large + 1e4 * (x > 0).sum(-1, keepdim=True, dtype=torch.float32),
        lambda large, x: large + INTEGERS.cumsum(0, dtype=torch.float32),
    ],
    ids=[
        "where",
        "maximum",
        "masked_fill",
        "copy",
        "stack",
        "cat",
        "integers",
        "mean",
        "diff",
        "sum",
        "cumsum",
    ],
)
def test_what_cannot_be_scaled_among_what_can_is_left_as_it_is(
    mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Integers, and what the code was given, keep their values next to scaled ones."""
    torch.manual_seed(0)
    module, x = Mixed(mix).eval().requires_grad_(False), torch.randn(2, 5, WIDTH)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    assert rescaling.exponents or rescaling.fp32_modules
    assert torch.equal(module(x), reference)


@pytest.mark.parametrize(
    "mix",
    [
        lambda large, x: large + large * (x > 0).type_as(large),
        lambda large, x: torch.complex(large, large).conj().real,
    ],
    ids=["type_as", "conj"],
)
def test_what_has_any_scale_needs_no_multiply(
    mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Where a tensor only gives its dtype, or is conjugated, its exponent is free."""
    torch.manual_seed(0)
    module, x = Mixed(mix).eval().requires_grad_(False), torch.randn(2, 5, WIDTH)
    rescaling = rescale_(module, (x,))
    assert not rescaling.scaling.pinned
    assert not rescaling.multiplies

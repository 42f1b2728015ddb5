"""Sums in fp16: an emulation held against slow arithmetic, and what is predicted of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from models.fp16_sums import summing_in_fp16
from models.pipeline_calls import SCORED_PATH, make_scored_svd
from models.snapshots import assert_untouched
from stopdown.dtype_rules import partial_sums
from stopdown.dtype_rules.partial_sums import GROUP, Sum, find_sums
from stopdown.runtime.guard import guard


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).half()


def multiply_slowly(left: torch.Tensor, right: torch.Tensor) -> np.ndarray[Any, Any]:
    """A product by NumPy alone, each accumulator rounded to fp16 after each group."""
    a, b = left.numpy().astype(np.float64), right.numpy().astype(np.float64)
    total = np.zeros((a.shape[0], b.shape[1]), np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, a.shape[1], GROUP):
            part = a[:, start : start + GROUP] @ b[start : start + GROUP]
            total = (total.astype(np.float64) + part).astype(np.float16)
    return total


@pytest.mark.parametrize("size", [1, GROUP, 3 * GROUP + 5])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_products_are_summed_as_slow_arithmetic_does(size: int, scale: float) -> None:
    """Group by group, rounded to fp16, Inf where a sum leaves it."""
    left, right = draw(4, size, scale=scale), draw(size, 5, seed=1, scale=scale)
    with summing_in_fp16():
        found = (left @ right).numpy()
    np.testing.assert_allclose(found, multiply_slowly(left, right), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"),
    [(1, 0, 1, 1), (2, 1, 1, 1), (1, "same", 2, 2), (1, 2, 2, 1), (1, "valid", 1, 4)],
)
def test_convolutions_are_summed_in_groups(
    rank: int, stride: int, padding: int | str, dilation: int, groups: int
) -> None:
    """Shapes are torch's; values are those of fp32 sums but for roundings, and only in fp16."""
    function = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[rank]
    given, weight = draw(2, 8, *[9] * rank), draw(12, 8 // groups, *[3] * rank, seed=1)
    options = (draw(12, seed=2), stride, padding, dilation, groups)
    wide = function(given.float(), weight.float(), options[0].float(), *options[1:])
    with summing_in_fp16():
        found = function(given, weight, *options)
        torch.testing.assert_close(function(given[0], weight, *options), found[0], rtol=0, atol=0)
    torch.testing.assert_close(found.float(), wide, rtol=1e-2, atol=0.1)
    assert found.dtype == torch.float16


def test_convolution_whose_sum_leaves_fp16_on_its_way_is_lost_and_found() -> None:
    """32 channels that add to 5e5 and 32 that take it off again: Inf in fp16, and named beforehand."""
    layer = torch.nn.Conv2d(64, 1, 3, padding=1, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.where(torch.arange(64) < 32, 128.0, -128.0).reshape(1, 64, 1, 1))
    given = torch.full((1, 64, 4, 4), 128.0)
    assert layer(given).abs().max() == 0
    (worst,) = find_sums(layer, lambda: layer(given))
    assert (worst.operation, worst.largest, worst.result) == ("convolution", 2.0**19, 0.0)
    assert not worst.fits
    with summing_in_fp16():
        assert not layer.half()(given.half()).isfinite().all()


def test_a_sum_that_leaves_fp16_on_its_way_is_lost() -> None:
    """In fp32 it comes back; in fp16 it is Inf."""
    left = torch.full((1, 4 * GROUP), 128.0).half()
    right = torch.cat(
        [torch.full((2 * GROUP, 1), 128.0), torch.full((2 * GROUP, 1), -128.0)]
    ).half()
    assert (left @ right).item() == 0
    with summing_in_fp16():
        assert math.isinf((left @ right).item())


@pytest.mark.parametrize(
    "multiply",
    [
        lambda a, b: torch.matmul(a, b),
        lambda a, b: a.mm(b),
        lambda a, b: torch.bmm(a[None], b[None])[0],
        lambda a, b: functional.linear(a, b.t()),
        lambda a, b: functional.linear(a, b.t(), torch.zeros(b.shape[1]).half()),
        lambda a, b: torch.addmm(torch.zeros(1).half(), a, b),
        lambda a, b: torch.baddbmm(torch.zeros(1).half(), a[None], b[None], beta=0, alpha=2)[0] / 2,
        lambda a, b: (a[0] @ b)[None],
        lambda a, b: (a @ b[:, 0])[None],
    ],
)
def test_every_way_to_write_a_product(multiply: Callable[..., torch.Tensor]) -> None:
    """Each gives the shape and nearly the values of torch; in fp32 and bf16 nothing is touched."""
    left, right = draw(1, 32), draw(32, 1, seed=1)
    with summing_in_fp16():
        found = multiply(left, right)
        wide = left.float() @ right.float()
    assert torch.equal(wide, left.float() @ right.float())
    torch.testing.assert_close(found, multiply(left, right), rtol=1e-2, atol=1e-2)
    assert found.dtype == torch.float16


@pytest.mark.parametrize(
    "multiply",
    [
        lambda a, b: functional.linear(input=a, weight=b.t()),
        lambda a, b: functional.linear(a, bias=torch.zeros(1).half(), weight=b.t()),
        lambda a, b: functional.linear(a, b[:, 0])[None],
        lambda a, b: torch.matmul(input=a, other=b),
        lambda a, b: a.matmul(other=b),
        lambda a, b: torch.bmm(input=a[None], mat2=b[None])[0],
        lambda a, b: torch.addmm(torch.zeros(1).half(), mat2=b, mat1=a),
        lambda a, b: torch.zeros(1).half().baddbmm(batch1=a[None], batch2=b[None], beta=0)[0],
        lambda a, b: functional.conv1d(input=a[..., None], weight=b.t()[..., None])[..., 0],
        lambda a, b: torch.mm(a, b, out=torch.zeros(3, 1).half()[1:2]),
        lambda a, b: torch.mm(a, b, out=torch.empty(0).half()),
    ],
)
def test_every_spelling_of_a_product(multiply: Callable[..., torch.Tensor]) -> None:
    """Operands given by name, as MiniMax-H3's audio decoder does, and results written into a tensor."""
    left, right = draw(1, 32, scale=300.0), draw(32, 1, seed=1, scale=300.0)
    wide = left.float() @ right.float()
    (found,) = find_sums(torch.nn.Identity(), lambda: multiply(left, right))
    assert found.result == pytest.approx(float(wide.abs()), rel=1e-3)
    with summing_in_fp16():
        torch.testing.assert_close(multiply(left, right), left @ right, rtol=0, atol=0)


def test_a_query_without_keys_hides_no_sum() -> None:
    """Attention gives zeros for a query whose keys are all masked; as NaN they hid all later sums."""
    torch.manual_seed(0)
    kept = torch.tensor([True, True, False, False])
    x, last = torch.randn(1, 1, 4, 32), torch.full((32, 4), 1e5)
    for mask in (kept[:, None] & kept, torch.where(kept[:, None] & kept, 0.0, -math.inf)):
        outputs = list[torch.Tensor]()

        def attend(mask: torch.Tensor = mask, to: list[torch.Tensor] = outputs) -> None:
            mixed = functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            to.extend((mixed, mixed @ last))

        (worst, *_) = find_sums(torch.nn.Identity(), attend)
        attend()
        torch.testing.assert_close(outputs[0], outputs[2])
        assert worst.operation == "product"
        assert worst.result == pytest.approx(float(outputs[3].abs().max()), rel=1e-4)
        assert not worst.fits


def test_a_row_of_nan_hides_no_other() -> None:
    """What code leaves in rows of padding says nothing of the others, whose sums leave fp16."""
    x = torch.tensor([[math.nan] * 4, [1e4] * 4])
    (found,) = find_sums(torch.nn.Identity(), lambda: x @ torch.full((4, 1), 10.0))
    assert (found.largest, found.result, found.fits) == (4e5, 4e5, False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.5},
        {"attn_mask": torch.tensor([[True, False, True]])},
        {"attn_mask": torch.tensor([[0.0, -math.inf, 1.0]]).half()},
    ],
)
def test_attention_is_that_of_torch(options: dict[str, Any]) -> None:
    """Masks, causality and scales are those of `scaled_dot_product_attention`."""
    query, key, value = (draw(1, 2, 3, 8, seed=seed) for seed in range(3))
    plain = functional.scaled_dot_product_attention(query, key, value, **options)
    with summing_in_fp16():
        found = functional.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(found, plain, rtol=5e-3, atol=5e-3)


# ---------------------------------------------------------------------------------------------
# Stable Video Diffusion: NaN where sums are in fp16, and not where they are in fp32


@pytest.fixture(scope="module")
def unet_call() -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """A pipeline whose UNet has scores beyond 65504 before they are scaled; a call, and its end in fp32."""
    pipe = make_scored_svd()
    generator = torch.Generator().manual_seed(0)
    call = {
        "sample": torch.randn(2, 3, 8, 8, 8, generator=generator),
        "timestep": torch.tensor(1.0),
        "encoder_hidden_states": torch.randn(2, 1, 32, generator=generator),
        "added_time_ids": torch.ones(2, 3),
    }
    with torch.no_grad():
        return pipe, call, pipe.unet(**call)[0]


def run_half(pipe: Any, call: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same call in fp16."""
    half = {k: v.half() if k != "timestep" else v for k, v in call.items()}
    with torch.no_grad():
        found: torch.Tensor = pipe.unet(**half)[0]
    return found.float()


def test_the_sum_is_predicted_from_a_call_in_fp32(unet_call: Any) -> None:
    """One sum of the whole UNet does not fit into an fp16 accumulator: the scores of that attention."""
    pipe, call, reference = unet_call
    outputs: list[torch.Tensor] = []
    found = find_sums(pipe.unet, lambda: outputs.append(pipe.unet(**call)[0]))
    assert [(entry.path, entry.operation) for entry in found if not entry.fits] == [
        (SCORED_PATH, "attention scores")
    ]
    torch.testing.assert_close(outputs[0], reference, rtol=1e-3, atol=1e-3)
    assert len(found) > 50


@pytest.fixture
def half(unet_call: Any) -> Any:
    """The pipeline in fp16, and in fp32 again afterwards."""
    pipe, _, _ = unet_call
    kept = {name: value.clone() for name, value in pipe.unet.state_dict().items()}
    pipe.unet.half()
    yield pipe
    pipe.unet.float().load_state_dict(kept)


def test_it_is_shown_on_any_device(unet_call: Any, half: Any) -> None:
    """In fp16 with sums in fp32 the UNet is right; with sums in fp16 it is NaN."""
    _, call, reference = unet_call
    assert (run_half(half, call) - reference).abs().max() < 0.1
    with summing_in_fp16():
        assert run_half(half, call).isnan().any()


@pytest.mark.thorough
def test_a_guard_repairs_it_too(unet_call: Any) -> None:
    """Without a plan the guard sees NaN in the block, finds the attention, and the result is good."""
    pipe, _, _ = unet_call
    block = copy.deepcopy(pipe.unet.get_submodule(SCORED_PATH.removesuffix(".attn1")))
    generator = torch.Generator().manual_seed(0)
    states, text = (torch.randn(2, size, 32, generator=generator) for size in (64, 1))
    with torch.no_grad():
        reference = block(states, encoder_hidden_states=text)
        block.half()
        with (
            summing_in_fp16(),
            assert_untouched({"block": block}),
            guard({"block": block}, announce=lambda text: None) as handle,
        ):
            found = block(states.half(), encoder_hidden_states=text.half())
    (repair,) = handle.repairs
    assert repair.module_path.startswith("block:attn1")
    assert repair.action in ("rescaled", "fp32-module")
    assert (found - reference).abs().max() < 0.1


def test_large_products_are_summed_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sums and nearly the same values, and never more of them at once than a piece."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 40, 24) for _ in range(3))
    mask = torch.rand(40, 40) > 0.2

    def attend() -> torch.Tensor:
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return mixed @ torch.ones(24, 8)

    whole, outputs = find_sums(torch.nn.Identity(), attend), []
    seen: list[int] = []
    add_up = partial_sums.sum_groups

    def note(left: torch.Tensor, right: torch.Tensor, each: Any) -> torch.Tensor:
        total = add_up(left, right, each)
        seen.append(total.numel())
        return total

    monkeypatch.setattr(partial_sums, "sum_groups", note)
    monkeypatch.setattr(partial_sums, "PIECE", 500)
    pieces = find_sums(torch.nn.Identity(), lambda: outputs.append(attend()))
    assert max(seen) <= 500
    torch.testing.assert_close(outputs[0], attend(), atol=1e-4, rtol=1e-4)
    assert [x.operation for x in pieces] == [x.operation for x in whole]
    for part, one in zip(pieces, whole, strict=True):
        assert (part.largest, part.result) == pytest.approx((one.largest, one.result), rel=1e-5)


def test_one_kind_of_operation_can_be_summed_in_fp16_alone() -> None:
    """Of a product and attention, only the one that is named loses what leaves fp16 on its way."""
    left, right = draw(4, 64, scale=300.0), draw(64, 4, seed=1, scale=300.0)
    with summing_in_fp16():
        assert not (left @ right).isfinite().all()
    near = torch.full((1, 4 * GROUP), 128.0).half()
    far = torch.cat([torch.full((2 * GROUP, 1), x) for x in (128.0, -128.0)]).half()
    with summing_in_fp16("attention"):
        assert (near @ far).item() == 0
    with summing_in_fp16("product"):
        assert math.isinf((near @ far).item())


def make_layer(kind: str) -> tuple[torch.nn.Module, torch.Tensor, str]:
    """A linear layer, a convolution or attention, an input of one sign, and what its sums are called."""
    torch.manual_seed(0)
    if kind == "linear":
        return torch.nn.Linear(512, 8, bias=False), torch.ones(4, 512), "product"
    if kind == "convolution":
        layer = torch.nn.Conv2d(64, 8, 3, padding=1, bias=False)
        return layer, torch.ones(1, 64, 6, 6), "convolution"
    return Attending(kind), torch.ones(1, 1, 64, 256), kind


class Attending(torch.nn.Module):
    """Attention of a sequence to itself, with large scores or large values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.sizes = (1.0, 1.0) if kind == "attention scores" else (1e-3, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared, own = self.sizes
        return functional.scaled_dot_product_attention(x * shared, x * shared, x * own)


@pytest.mark.parametrize("kind", ["linear", "convolution", "attention scores"])
@pytest.mark.parametrize("pattern", ["signs of the weights", "random"])
def test_pieces_that_are_named_hold_the_worst_signs(kind: str, pattern: str) -> None:
    """A sum whose terms have one sign leaves fp16; in pieces as named no sum of it does."""
    layer, x, operation = make_layer(kind)
    weight = getattr(layer, "weight", None)
    with torch.no_grad():
        if weight is not None:
            weight.copy_(weight.sign() if pattern == "random" else torch.ones_like(weight))
        if pattern == "random":
            x = torch.randn(x.shape)
        size = 65504.0 / 96 if weight is not None else (65504.0 / 96) ** 0.5
        (found, *_) = [
            s for s in find_sums(layer, lambda: layer(x * size)) if s.operation == operation
        ]
        total = x.shape[-1] if weight is None else weight[0].numel()
        assert found.terms == total
        assert 0 < found.piece <= total
        if pattern == "random":
            return
        assert (
            found.piece == 80
        )  # five groups of 16, and the sixth ends beyond 65504 with roundings
        left = (
            (x * size).reshape(-1, total)[:1]
            if kind != "convolution"
            else x.new_full((1, total), size)
        )
        right = torch.ones(total, 1) if weight is not None else left.transpose(0, 1)
        with summing_in_fp16():
            assert torch.isinf(left.half() @ right.half()).all()
            parts = zip(
                left.half().split(found.piece, 1), right.half().split(found.piece, 0), strict=True
            )
            assert all((a @ b).isfinite().all() for a, b in parts)


def test_a_sum_that_fits_is_one_piece() -> None:
    """Room is left for roundings: a sum at 65504 itself may round beyond it on its way."""
    assert Sum("a", "product", 30000.0, 30000.0, 30000.0, 512).piece == 512
    assert Sum("a", "product", 65504.0, 65504.0, 4000.0, 512).piece == 256
    assert Sum("a", "product", 1e6, 1e6, 1e6, 512).piece == 0

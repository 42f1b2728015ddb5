"""Small modules drawn at random from the operations of the table, and what their rescaling has to be.

A module is an embedding, some steps on a stream of tokens or of pictures, and what reads it at the end.
Each step has weights and choices of its own: a branch that is added, a norm, a gate, a change of shape
there and back. `judge` rescales one and says how it ended.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from stopdown.errors import StopdownError
from stopdown.numerics import iterate_tensors, relative_l2
from stopdown.scaling.folding.folds import Rescaling, cast_
from stopdown.scaling.rescale import rescale_

ROUNDED_ONCE = 2.0**-11
"""Error that is not held against fp16 beside bf16: one rounding of the output."""

MOST_STEPS = 4

Run = Callable[["Part", torch.Tensor], torch.Tensor]
"""What a step does with its own modules and its input. It holds no module itself: copies have their own."""


class Part(nn.Module):
    """One step: what it does is put together when it is drawn, and called by name.

    Attributes:
        rng: draws its choices.
        said: what was drawn, for people.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng, self.said, self.run = rng, "", None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)  # type: ignore[misc,no-any-return]

    def linear(self, name: str, size: int, out: int | None = None) -> None:
        layer = nn.Linear(size, out or size, bias=self.rng.random() < 0.6)
        nn.init.normal_(layer.weight, 0, size**-0.5)
        setattr(self, name, layer)

    def vector(self, name: str, size: int, mean: float) -> None:
        setattr(self, name, nn.Parameter(mean + 0.1 * torch.randn(size)))

    def choose(self, **options: Any) -> Any:
        name = self.rng.choice(list(options))
        self.said += f" {name}"
        return options[name]


# norms of the last dimension


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_wide(x: torch.Tensor, eps: float) -> torch.Tensor:
    return rms(x.float(), eps).to(x.dtype)


def by_length(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=eps)


def by_largest(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / x.abs().amax(-1, keepdim=True).clamp_min(eps)


def by_choice(x: torch.Tensor, eps: float) -> torch.Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length > eps, length, torch.full_like(length, eps))


def by_deviation(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)


def by_variance(x: torch.Tensor, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + eps)


class Written(nn.Module):
    """A norm that is written out, with a weight or without, and its eps as attribute or in the call."""

    def __init__(self, function: Any, size: int, eps: float, *, held: bool, weighted: bool) -> None:
        super().__init__()
        self.function, self.numbers = function, [eps]
        self.eps = eps if held else None
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size)) if weighted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.function(x, self.numbers[0] if self.eps is None else self.eps)
        return x if self.weight is None else x * self.weight


def draw_norm(part: Part, size: int) -> nn.Module:
    """A norm of the last dimension."""
    rng, eps = part.rng, part.rng.choice([1e-12, 1e-6, 1e-5, 1e-3, 0.1, 1.0])
    written = [rms, rms_wide, by_length, by_largest, by_choice, by_deviation, by_variance]

    def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.normalize(x, dim=-1, eps=eps)

    options: dict[str, Callable[[], nn.Module]] = {
        "layer_norm": lambda: nn.LayerNorm(size, eps=min(eps, 1e-3)),
        "plain_layer_norm": lambda: nn.LayerNorm(size, elementwise_affine=False),
        "rms_norm": lambda: nn.RMSNorm(size, eps=min(eps, 1e-3)),
    }
    for one in [*written, normalize]:
        options[one.__name__] = lambda one=one: Written(  # type: ignore[misc]
            one, size, eps, held=rng.random() < 0.5, weighted=rng.random() < 0.5
        )
    return part.choose(**options)()  # type: ignore[no-any-return]


# steps on tokens: [batch, length, size]


ACTIVATIONS = {
    "gelu": functional.gelu, "silu": functional.silu, "relu": functional.relu, "tanh": torch.tanh,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "mish": functional.mish,
    "leaky": lambda x: functional.leaky_relu(x, 0.1), "relu2": lambda x: functional.relu(x).square(),
    "elu": functional.elu, "softplus": functional.softplus, "hardswish": functional.hardswish,
}  # fmt: skip


def mlp(part: Part, size: int) -> Run:
    part.linear("up", size, 2 * size)
    part.linear("down", 2 * size, size)
    act = part.choose(**ACTIVATIONS)
    return lambda p, x: p.down(act(p.up(x)))


def gated(part: Part, size: int) -> Run:
    part.linear("both", size, 4 * size)
    part.linear("down", 2 * size, size)
    act, halves = part.choose(**ACTIVATIONS), part.choose(chunk=torch.chunk, split=_halve)

    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        value, gate = halves(p.both(x), 2, -1)
        return p.down(value * act(gate))

    return run


def _halve(x: torch.Tensor, count: int, dim: int) -> Any:
    return x.split(x.shape[dim] // count, dim)


def attention(part: Part, size: int) -> Run:
    heads, wide = 2, size // 2
    for name in ("query", "key", "value", "back"):
        part.linear(name, size)
    part.head_norm = draw_norm(part, wide) if part.rng.random() < 0.4 else nn.Identity()
    attend = part.choose(
        kernel=lambda q, k, v: functional.scaled_dot_product_attention(q, k, v),
        by_hand=lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * wide**-0.5, -1) @ v,
        einsum=lambda q, k, v: torch.einsum(
            "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) / 4).softmax(-1), v
        ),
        masked=lambda q, k, v: _attend_masked(q, k, v),
        linear=lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v),
        relu_linear=_attend_linear,
        bmm=lambda q, k, v: torch.bmm(
            torch.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) / 3, -1), v.flatten(0, 1)
        ).unflatten(0, q.shape[:2]),
    )
    turn = part.choose(plain=lambda x: x, complex=_rotate_complex, halves=_rotate_halves)

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, wide)).transpose(1, 2)

    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        q, k = (turn(p.head_norm(split(layer(x)))) for layer in (p.query, p.key))
        return p.back(attend(q, k, split(p.value(x))).transpose(1, 2).flatten(2))

    return run


def _attend_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT / 4).masked_fill(~allowed, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


def _attend_linear(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k = functional.relu(q), functional.relu(k)
    padded = functional.pad(v, (0, 1), value=1.0)
    found = q @ (k.mT @ padded)
    return found[..., :-1] / (found[..., -1:] + 1e-6)


def _rotate_complex(x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(
        torch.arange(x.shape[-2]).float(), torch.arange(x.shape[-1] // 2) / 3 + 0.2
    )
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _rotate_halves(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * torch.linspace(0.1, 1, x.shape[-1])
    first, last = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat([-last, first], -1) * angles.sin().to(x.dtype)


def along(part: Part, size: int) -> Run:
    """A convolution along the tokens."""
    groups = part.choose(whole=1, depthwise=size, groups=2)
    dilation = part.rng.choice([1, 2])
    part.conv = nn.Conv1d(size, size, 3, padding=dilation, dilation=dilation, groups=groups)
    part.linear("back", size)
    return lambda p, x: p.back(p.conv(x.transpose(1, 2)).transpose(1, 2))


def mixed(part: Part, size: int) -> Run:
    """A linear between changes of order: nothing is multiplied but by its weight."""
    part.linear("back", size)
    change = part.choose(**CHANGES)
    return lambda p, x: p.back(change(x))


def _take_largest(x: torch.Tensor) -> torch.Tensor:
    return x + x.topk(2, dim=1).values.mean(1, keepdim=True)


def _copy_in_place(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    made[:, 1:] = x[:, :-1]
    made[:, :1].add_(x[:, -1:])
    return made


def _stretch(x: torch.Tensor) -> torch.Tensor:
    wide = functional.interpolate(x.transpose(1, 2), scale_factor=2.0, mode="linear")
    return functional.avg_pool1d(wide, 2).transpose(1, 2)


def _mix_tokens(x: torch.Tensor) -> torch.Tensor:
    weights = torch.full((x.shape[0], x.shape[1], x.shape[1]), 0.1, dtype=x.dtype)
    return torch.baddbmm(x, weights, x)


CHANGES: dict[str, Any] = dict(
    flip=lambda x: x.flip(1),
    roll=lambda x: x.roll(1, -1),
    sort=lambda x: x.sort(-1).values,
    gather=lambda x: x.gather(1, torch.arange(x.shape[1]).flip(0)[None, :, None].expand_as(x)),
    select=lambda x: x.index_select(-1, torch.arange(x.shape[-1] - 1, -1, -1)),
    cumsum=lambda x: x.cumsum(1),
    cat=lambda x: torch.cat([x[..., 3:], x[..., :3] * 2], -1),
    index=lambda x: x[:, [0, *range(1, x.shape[1])]],
    stack=lambda x: torch.stack([x, -x], -1).sum(-1) + x,
    pool=lambda x: x + x.mean(1, keepdim=True),
    pad=lambda x: functional.pad(x, (0, 0, 1, 1))[:, 1:-1],
    largest=lambda x: x + x.amax(1, keepdim=True),
    where=lambda x: torch.where(x > 0, x, 0.1 * x),
    minimum=lambda x: torch.minimum(x, x.roll(1, 1)),
    mask=lambda x: x * (torch.arange(x.shape[1]) < 4)[:, None].to(x.dtype),
    topk=_take_largest,
    clamp=lambda x: x.clamp(min=0),
    copied=_copy_in_place,
    interpolate=_stretch,
    tile=lambda x: x.repeat(1, 2, 1)[:, : x.shape[1]],
    scattered=lambda x: (
        torch.zeros_like(x).scatter_add(1, torch.zeros_like(x, dtype=torch.long), x) + x
    ),
    abs=torch.abs,
    unfold=lambda x: x.unfold(1, 2, 1).mean(-1).repeat(1, 2, 1)[:, : x.shape[1]],
    addcmul=lambda x: torch.addcmul(x, x, torch.full_like(x, 0.5)),
    lerp=lambda x: torch.lerp(x, x.roll(1, 1), 0.3),
    double=lambda x: (x.double() * 2).to(x.dtype),
    baddbmm=_mix_tokens,
    clamped=lambda x: x.clamp(-60000, 60000),
    range_clamp=lambda x: x.clamp(-65504, 65504),
    nan=torch.nan_to_num,
    limited=lambda x: x.clamp(max=3.0),
    hypot=lambda x: (x.square() + x.roll(1, -1).square()).sqrt(),
    floor=lambda x: x / 3 + (x / 1e4).floor(),
)
"""What is done between two linears: order, shape, sums, masks, limits."""


def modulated(part: Part, size: int) -> Run:
    """Scale and shift by a vector of the stream's own mean, as by a timestep."""
    part.linear("parts", size, 3 * size)
    part.linear("back", size)
    part.inner_norm = nn.LayerNorm(size, elementwise_affine=False)
    limit = part.choose(plain=lambda x: x, tanh=torch.tanh, sigmoid=torch.sigmoid)

    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        given = functional.silu(p.inner_norm(x.mean(1, keepdim=True)))
        shift, scale, gate = p.parts(given).chunk(3, -1)
        return p.back(p.inner_norm(x) * (1 + scale) + shift) * limit(gate)

    return run


def tabled(part: Part, size: int) -> Run:
    """An embedding of positions, a parameter that scales."""
    part.table = nn.Embedding(16, size)
    part.vector("scale", size, 1.0)
    part.linear("back", size)
    return lambda p, x: p.back(x + p.table(torch.arange(x.shape[1]))) * p.scale


BRANCHES = (mlp, gated, attention, along, mixed, modulated, tabled, mixed, attention)


def draw_token_step(rng: random.Random, size: int) -> Part:
    """A branch with its norm and the way in which it meets the stream."""
    part = Part(rng)
    branch = rng.choice(BRANCHES)
    part.said = branch.__name__
    inner = branch(part, size)
    part.norm = draw_norm(part, size)
    part.vector("gate", size, 0.5)
    part.run = part.choose(
        pre=lambda p, x: x + inner(p, p.norm(x)),
        post=lambda p, x: p.norm(x + inner(p, x / 2)),
        behind=lambda p, x: x + p.norm(inner(p, x)),
        gated=lambda p, x: x + p.gate * inner(p, p.norm(x)),
        instead=lambda p, x: inner(p, p.norm(x)),
        both=lambda p, x: torch.cat([x, inner(p, p.norm(x))], -1).unflatten(-1, (2, -1)).sum(-2),
        bare=lambda p, x: x + inner(p, x),
        scaled=lambda p, x: 0.7 * x + 0.5 * inner(p, p.norm(x)),
    )
    return part


# steps on pictures: [batch, channels, height, width]


class ByPixel(nn.Module):
    """An RMS norm of the channels, as autoencoders of videos write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1 + 0.1 * torch.randn(size, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma


def draw_picture_norm(part: Part, size: int) -> nn.Module:
    """A norm of pictures."""

    def batch_norm() -> nn.Module:
        norm = nn.BatchNorm2d(size)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        return norm

    found = part.choose(
        group=lambda: nn.GroupNorm(4, size), plain=lambda: nn.GroupNorm(2, size, affine=False),
        instance=lambda: nn.InstanceNorm2d(size, affine=True), batch=batch_norm,
        pixel=lambda: ByPixel(size),
        one=lambda: nn.GroupNorm(1, size, eps=1e-6),
    )  # fmt: skip
    return found()  # type: ignore[no-any-return]


def draw_picture_step(rng: random.Random, size: int) -> Part:
    """A residual block, a change of resolution there and back, or pooled attention."""
    part = Part(rng)
    part.said = "picture"
    part.norm, act = draw_picture_norm(part, size), part.choose(**ACTIVATIONS)
    part.conv = part.choose(
        plain=lambda: nn.Conv2d(size, size, 3, padding=1),
        depthwise=lambda: nn.Conv2d(size, size, 3, padding=1, groups=size),
        dilated=lambda: nn.Conv2d(size, size, 3, padding=2, dilation=2),
        pointwise=lambda: nn.Conv2d(size, size, 1, bias=False),
        reflect=lambda: nn.Conv2d(size, size, 3, padding=1, padding_mode="reflect"),
        up=lambda: nn.Sequential(nn.ConvTranspose2d(size, size, 2, 2), nn.AvgPool2d(2)),
        down=lambda: nn.Sequential(nn.Conv2d(size, size, 2, 2), nn.Upsample(scale_factor=2)),
        shuffled=lambda: nn.Sequential(nn.Conv2d(size, 4 * size, 1), nn.PixelShuffle(2), nn.MaxPool2d(2)),
        unshuffled=lambda: nn.Sequential(
            nn.PixelUnshuffle(2), nn.Conv2d(4 * size, 4 * size, 1), nn.PixelShuffle(2)
        ),
        bilinear=lambda: nn.Sequential(
            nn.Conv2d(size, size, 1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(8)
        ),
        bicubic=lambda: nn.Sequential(
            nn.Conv2d(size, size, 1),
            nn.Upsample(scale_factor=0.5, mode="bicubic"),
            nn.Upsample(scale_factor=2),
        ),
        channel=lambda: nn.Sequential(nn.Conv2d(size, size, 1), nn.ChannelShuffle(2)),
    )()  # fmt: skip
    part.squeeze = nn.Conv2d(size, size, 1)
    part.linear("shift", size)

    def squeeze(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(p.squeeze(x.mean((2, 3), keepdim=True) / (1 + x.abs().amax())))

    def fold(x: torch.Tensor) -> torch.Tensor:
        return functional.fold(functional.unfold(x, 2, stride=2), 8, 2, stride=2)

    part.run = part.choose(
        residual=lambda p, x: x + p.conv(act(p.norm(x))),
        plain=lambda p, x: p.conv(act(p.norm(x))),
        post=lambda p, x: act(p.norm(x + p.conv(x))),
        shifted=lambda p, x: (
            x + p.conv(p.norm(x) + p.shift(p.norm(x).mean((2, 3)))[:, :, None, None])
        ),
        joined=lambda p, x: torch.cat([x, p.conv(p.norm(x))], 1).chunk(2, 1)[0] + x,
        attended=lambda p, x: x + p.conv(squeeze(p, p.norm(x))),
        patched=lambda p, x: p.conv(p.norm(fold(x))),
    )
    return part


class RandomGraph(nn.Module):
    """A module that a seed draws.

    Attributes:
        given: an input of it.
        said: what was drawn.
    """

    def __init__(self, seed: int, most: int = MOST_STEPS) -> None:
        super().__init__()
        rng, size = random.Random(seed), 16
        torch.manual_seed(seed)
        is_picture = rng.random() < 0.35
        steps = [
            (draw_picture_step if is_picture else draw_token_step)(rng, size)
            for _ in range(rng.randrange(1, most + 1))
        ]
        self.steps = nn.ModuleList(steps)
        ends: tuple[nn.Module, ...]
        if is_picture:
            ends = nn.Conv2d(3, size, 3, padding=1), nn.GroupNorm(2, size), nn.Conv2d(size, 3, 1)
        else:
            ends = nn.Linear(6, size), nn.LayerNorm(size), nn.Linear(size, 5)
        self.first, self.last_norm, self.last = ends
        self.said = " | ".join(step.said for step in steps)
        self.given = torch.randn(2, 3, 8, 8) if is_picture else torch.randn(2, 6, 6)
        self.eval().requires_grad_(False)
        named = [p for n, p in self.named_parameters() if p.dim() > 1 and not n.startswith("last.")]
        for parameter in rng.sample(named, rng.randrange(1, min(4, len(named)) + 1)):
            parameter.mul_(2.0 ** rng.randrange(6, 22))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for step in self.steps:
            x = step(x)
        return self.last(self.last_norm(x))  # type: ignore[no-any-return]


@dataclass
class Verdict:
    """How the rescaling of one module ended.

    Attributes:
        seed: of the module.
        said: what was drawn.
        outcome: one of `SOLVED`, or `refused`; else what was wrong.
        why: of what was refused or wrong.
        overflows: the module as it is gives NaN or Inf in fp16.
        error: relative 2-norm against fp32, rescaled and cast; None where it is not finite.
        bf16: that of the module as it is, in bf16.
        fp32_flops: share of the work that is done in fp32.
    """

    seed: int
    said: str
    outcome: str = ""
    why: str = ""
    overflows: bool = False
    error: float | None = None
    bf16: float | None = None
    seconds: float = 0.0
    fp32_flops: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether it ended as it may."""
        return self.outcome in SOLVED or self.outcome == "refused"


SOLVED = ("fp16 alone", "multiplies", "fp32 layers", "fp32 stream", "fp16 matrices")


def list_later(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Inputs that were not traced."""
    torch.manual_seed(7)
    yield "another", torch.randn_like(x)
    yield "zeros", torch.zeros_like(x)
    yield "tiny", x * 1e-6
    yield "small", x * 1e-3
    yield "large", x * 64
    yield "some zeros", x * (torch.rand_like(x) > 0.5)


@dataclass(frozen=True)
class Before:
    """What a module was: its values, and what it gave for its input and for others."""

    module: RandomGraph
    reference: torch.Tensor
    later: Sequence[tuple[str, torch.Tensor, torch.Tensor]]
    state: dict[str, torch.Tensor]


def judge(seed: int, most: int = MOST_STEPS) -> Verdict:
    """Draw a module, rescale it for one input, and hold it against what it was and against bf16."""
    module = RandomGraph(seed, most)
    found, later = Verdict(seed, module.said), list(_run_later(module))
    if not later:
        found.outcome, found.why = "refused", "a value isn't finite in fp32"
        return found
    reference = later.pop(0)[2]
    before = Before(
        module, reference, later, {k: v.clone() for k, v in module.state_dict().items()}
    )
    found.bf16 = _run_cast(before, torch.bfloat16)
    found.overflows = _run_cast(before, torch.float16) is None
    started = time.monotonic()
    try:
        rescaling = rescale_(module, (module.given,))
    except StopdownError as error:
        found.outcome, found.why = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        found.outcome, found.why = "raised", f"{type(error).__name__}: {error}"
    else:
        found.outcome = _judge_rescaled(before, rescaling, found) or _name_means(rescaling)
        found.fp32_flops = rescaling.scaling.fp32_flops
    found.seconds = time.monotonic() - started
    return found


def _judge_rescaled(before: Before, rescaling: Rescaling, found: Verdict) -> str:
    """What is wrong with a rescaled module, which is left as it was; "" for nothing."""
    module = before.module
    wrong = [name for name, one, right in before.later if not _equal(module(one), right)]
    is_exact = torch.equal(module(module.given), before.reference)
    cast_(module, torch.float16, rescaling)
    found.error = _measure(module(module.given.half()), before.reference)
    rescaling.undo()
    state = module.state_dict()
    is_undone = all(torch.equal(state[name], value) for name, value in before.state.items())
    if not is_exact or wrong:
        return f"not exact for {', '.join(wrong) or 'its input'}"
    if found.error is None:
        return "not finite"
    if found.bf16 is not None and found.error > max(found.bf16, ROUNDED_ONCE):
        return "worse than bf16"
    if not is_undone or not torch.equal(module(module.given), before.reference):
        return "not undone"
    return ""


def _name_means(rescaling: Rescaling) -> str:
    """What a solution needs beside folds."""
    scaling = rescaling.scaling
    if rescaling.residual == "fp32":
        return "fp32 stream" if scaling.exponents else "fp16 matrices"
    if scaling.fp32_modules or scaling.outputs or scaling.stream is not None:
        return "fp32 layers"
    return "multiplies" if scaling.multiplies else "fp16 alone"


class _Finite(TorchDispatchMode):
    """Notes whether every value is finite, inside of the module and of the kernels of norms as well.

    A norm whose sum of squares is Inf returns its bias: the root that it divides by is 0 then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holds = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in iterate_tensors(found):
            if x.is_floating_point() and "empty" not in str(func):
                self.holds = self.holds and bool(x.isfinite().all())
        if "native_layer_norm" in str(func) or "native_group_norm" in str(func):
            self.holds = self.holds and bool(found[2].all())
        return found


def _run_later(module: RandomGraph) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What its own input gives, and others; of those fp32 holds every value of."""
    for name, one in (("its own", module.given), *list_later(module.given)):
        with _Finite() as finite:
            module(one)
        if finite.holds:
            yield name, one, module(one)
        elif name == "its own":
            return


def _run_cast(before: Before, dtype: torch.dtype) -> float | None:
    with cast_(before.module, dtype):
        return _try(before.module, before.module.given.to(dtype), before.reference)


def _try(module: nn.Module, x: torch.Tensor, reference: torch.Tensor) -> float | None:
    try:
        return _measure(module(x), reference)
    except Exception:  # operands of two dtypes, a kernel that the processor lacks
        return None


def _measure(output: torch.Tensor, reference: torch.Tensor) -> float | None:
    if not bool(output.isfinite().all()):
        return None
    if torch.equal(output.float(), reference):
        return 0.0
    error = relative_l2(output, reference)
    return error if math.isfinite(error) else None


def _equal(output: Any, right: Any) -> bool:
    pairs = zip(iterate_tensors(output), iterate_tensors(right), strict=True)
    return all(torch.equal(x.nan_to_num(7.5), y.nan_to_num(7.5)) for x, y in pairs)

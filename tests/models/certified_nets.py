"""Small modules whose certificates have every rule of the grammar between them.

The package exports each, with the exponents that it finds for weights that overflow in fp16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import nn

import stopdown_verify
from models.certificate_forgeries import Model
from models.rescaling_models import Call, make_example
from stopdown import rescale_
from stopdown.fold_names import name_parameters
from stopdown.plans.certificate_files import export_calls
from stopdown.records import ComponentPlan, Scaling
from stopdown.scaling.trials.traced_calls import TracedCalls

FILE = "diffusion_pytorch_model.safetensors"


class Tokens(nn.Module):
    """A block of a transformer: embeddings, a norm that a timestep changes, attention, a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.place = nn.Embedding(7, 8), nn.Parameter(torch.randn(1, 4, 8))
        self.time, self.modulate = nn.Linear(8, 8), nn.Linear(8, 16)
        self.norm, self.gain = nn.LayerNorm(8), nn.Parameter(1 + 0.1 * torch.randn(8))
        self.packed, self.out = nn.Parameter(0.3 * torch.randn(24, 8)), nn.Linear(8, 8)
        self.wide, self.narrow = nn.Linear(8, 32, bias=False), nn.Linear(16, 8)

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, ids: torch.Tensor
    ) -> Any:
        x = hidden_states + self.words(ids) + self.place
        angles = timestep[:, None].float() * torch.exp(-torch.arange(4) * math.log(1e4) / 4)
        steps = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        shift, scale = self.modulate(F.silu(self.time(steps))).chunk(2, -1)
        n = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        parts = [F.linear(n, part) for part in self.packed.chunk(3)]
        heads = [x.unflatten(-1, (2, 4)).transpose(1, 2) for x in parts]
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        up, gate = self.wide(h.to(x.dtype) * self.gain).chunk(2, -1)
        return x + self.narrow(up * F.gelu(gate))


class Picture(nn.Module):
    """Feature maps: convolutions in groups, norms of groups, changes of size, and pixels against pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depth = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
        )
        self.norm, self.point = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1, bias=False)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, sample: torch.Tensor) -> Any:
        x = self.first(sample)
        h = self.depth(F.leaky_relu(self.norm(x), 0.2))
        h = F.interpolate(F.avg_pool2d(h, 2), scale_factor=2.0, mode="nearest")
        flat = self.point(h).flatten(2)
        weights = (flat.transpose(1, 2).tanh() @ flat.tanh()).softmax(-1)
        mixed = (weights @ flat.transpose(1, 2)).transpose(1, 2).unflatten(2, h.shape[2:])
        x = x + mixed * h.mean((2, 3), keepdim=True).sigmoid()
        return self.last(F.pad(x, (1, -1)))


class Odds(nn.Module):
    """What is rare: choices, clamps, powers, sums without a rule, values that are filled in, a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> Any:
        angles = torch.polar(torch.ones(4, 4), torch.arange(16.0).unflatten(0, (4, 4)))
        pairs = torch.view_as_complex(hidden_states.float().unflatten(-1, (4, 2))) * angles
        x = self.first(torch.view_as_real(pairs).flatten(-2).to(hidden_states.dtype))
        x = torch.where(mask, x, hidden_states).masked_fill(mask, 3.0)
        kept = x.clamp(min=1e-3).clamp(-5.0, 9.0) + x.tanh().expand(2, -1, -1)[:1]
        kept = kept + kept.clamp(0.5, 2.0) + torch.full_like(kept, 0.25) - x.sign() + x.sin()
        wide = kept.float().clamp(-30.0, 20.0).exp().sqrt().to(x.dtype) + x.abs().neg().relu()
        rolled = wide.roll(1, 1) + F.hardswish(wide) + F.mish(wide)
        summed = F.layer_norm(rolled.cumsum(1), (8,)).tril().repeat(2, 1, 1)[1:]
        length = F.normalize(rolled.float(), dim=-1).to(x.dtype)
        return self.last(summed + length)


NETS: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[Any, ...]]], str, int, Scaling | None]] = {
    "tokens": (
        lambda: (Tokens(), (torch.randn(1, 4, 8), torch.tensor([999]), torch.tensor([[1, 2, 0, 6]]))),
        "wide", 8, None,
    ),
    "picture": (
        lambda: (Picture(), (torch.randn(1, 3, 4, 4),)), "last", 4,
        Scaling(exponents={"last.weight": -4, "last.bias": -4}, multiplies={"last": 4}),
    ),
    "odds": (lambda: (Odds(), (torch.randn(1, 4, 8), torch.rand(1, 4, 8) > 0.5)), "last", 8, None),
}  # fmt: skip
"""Each with the weights that are made larger, by how many bits, and exponents that are not searched for."""


def trace(module: nn.Module, calls: Sequence[Call]) -> TracedCalls:
    """Plain calls of a module, with its captures to come."""
    traced = TracedCalls(module, ())
    traced.calls += calls
    return traced


def certify_call(
    module: nn.Module, calls: Sequence[Call], folder: Path, scaling: Scaling | None = None
) -> dict[str, Any]:
    """The certificate of a module alone, as the component `net` of a folder, scaled from its bounds.

    Args:
        scaling: exponents to be taken instead.
    """
    if scaling is None:
        rescaling = rescale_(module, calls=calls, ranges="bound")
        rescaling.undo()
        scaling = rescaling.scaling
    place = folder / "net"
    place.mkdir(parents=True)
    save_model(module, str(place / FILE))
    entry = ComponentPlan("net", precision="fp16", scaling=scaling)
    load = name_parameters(module).__getitem__
    stated = export_calls(trace(module, calls), entry, folder, [FILE], load)
    stopdown_verify.check_component(stated, folder, write=True)
    made = {"kind": "certificate", "plan": "", "components": [stated], "left": {}}
    return {**made, "seal": stopdown_verify.seal(made)}


def certify_net(name: str, folder: Path) -> Model:
    """One of the small modules, with weights that overflow in fp16, and its certificate."""
    torch.manual_seed(0)
    build, pattern, bits, scaling = NETS[name]
    module, args = build()
    module.eval().requires_grad_(False)
    for path, parameter in module.named_parameters():
        if path.startswith(pattern) and parameter.ndim > 1:
            parameter.mul_(2.0**bits)
    return Model(name, certify_call(module, [(module, args, {})], folder, scaling), folder)


def certify_class(name: str, folder: Path) -> Model:
    """A class of the rescale table, and its certificate."""
    module, calls = make_example(name)
    return Model(name, certify_call(module, calls, folder), folder)

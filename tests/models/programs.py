"""Programs that are no Diffusers pipelines, small and real: what they hold, and how they are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WIDTH = 8
SPREAD = 2.0**10
"""By how much each of two layers of a block that overflows widens its values."""


class Block(nn.Module):
    """A residual branch of four linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.wide = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.narrow, self.down = nn.Linear(4 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, L, C]` to the same."""
        return x + self.down(self.narrow(nn.functional.relu(self.wide(self.up(x)))))


class UNet(nn.Module):
    """A denoiser as sgm calls it: latents, timesteps, and what it is conditioned on."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[B, L, C]` to the same."""
        times = self.time_embed(timesteps[:, None].to(self.out.weight.dtype) / 1000)
        x = x + times[:, None] + (0 if context is None else context)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.out(x)
        return out


class Wrapper(nn.Module):
    """sgm's `OpenAIWrapper`: hands a call to the network."""

    def __init__(self, diffusion_model: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = diffusion_model

    def forward(self, x: torch.Tensor, t: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
        """The network's answer."""
        out: torch.Tensor = self.diffusion_model(x, timesteps=t, context=c.get("crossattn"))
        return out


class Denoiser(nn.Module):
    """sgm's `DiscreteDenoiser`: has no weights, and is given the network that it calls."""

    def forward(self, network: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The network's answer, scaled."""
        out: torch.Tensor = network(x, t, {})
        return out * 1.0


class FirstStage(nn.Module):
    """An autoencoder that is called through its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(), Block()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Latents of a picture."""
        z: torch.Tensor = self.encoder(x)
        return z

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """The picture of latents."""
        x: torch.Tensor = self.decoder(z)
        return x


class DiffusionEngine(nn.Module):
    """Shaped as sgm's: it is sampled from through its parts, and never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.denoiser = Wrapper(UNet()), Denoiser()
        self.first_stage_model = FirstStage()
        self.scale_factor = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of training."""
        z = self.first_stage_model.encode(x)
        return (self.model(z, torch.ones(len(x)), {}) - z).square().mean()

    def decode_first_stage(self, z: torch.Tensor) -> torch.Tensor:
        """Pictures of scaled latents."""
        return self.first_stage_model.decode(z / self.scale_factor)


class BaseModel(nn.Module):
    """Shaped as ComfyUI's: no `forward`, but `apply_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.diffusion_model = UNet()

    def apply_model(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """What the sampler calls."""
        out: torch.Tensor = self.diffusion_model(x, t)
        return out


class ModelPatcher:
    """Shaped as ComfyUI's: an object that holds a module and patches for it."""

    def __init__(self) -> None:
        self.model = BaseModel()
        self.patches: dict[str, Any] = {}
        self.model_options = {"transformer_options": {}}


@dataclass
class Program:
    """A program under test.

    Attributes:
        given: what the guard gets.
        run: runs it for some steps: latents or pictures.
        unet: the denoiser in it.
        component: what a call of the denoiser is called.
        path: of the denoiser in that component, with a dot at its end.
    """

    given: Any
    run: Callable[[], torch.Tensor]
    unet: UNet
    component: str
    path: str = ""


def sample(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Three steps of a sampler that is a plain function."""
    noise = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    x = noise.to(dtype)
    with torch.no_grad():
        for time in (900.0, 500.0, 100.0):
            x = x - 0.1 * call(x, torch.full((2,), time))
    return x


def make_program(kind: str, dtype: torch.dtype = torch.float32) -> Program:
    """A module, a dict of modules and methods, an engine, or a patcher; the same weights each time."""
    torch.manual_seed(0)
    if kind == "module":
        unet = UNet().to(dtype).eval()
        return Program(unet, lambda: sample(unet, dtype), unet, "UNet")
    if kind == "dict":
        unet, vae = UNet().to(dtype).eval(), FirstStage().to(dtype).eval()
        given = {"unet": unet, "vae.decode": (vae, "decode")}
        return Program(given, lambda: decode(vae, sample(unet, dtype)), unet, "unet")
    if kind == "engine":
        engine = DiffusionEngine().to(dtype).eval()

        def run() -> torch.Tensor:
            z = sample(lambda x, t: engine.denoiser(engine.model, x, t), dtype)
            with torch.no_grad():
                return engine.decode_first_stage(z)

        unet = engine.model.diffusion_model
        assert isinstance(unet, UNet)
        return Program(engine, run, unet, "model", "diffusion_model.")
    patcher = ModelPatcher()
    patcher.model.to(dtype).eval()
    model = patcher.model
    return Program(
        patcher,
        lambda: sample(model.apply_model, dtype),
        model.diffusion_model,
        "model.diffusion_model",
    )


def make_half(kind: str) -> Program:
    """A program in fp32 with its denoiser in fp16: its sampler hands over noise in fp32."""
    program = make_program(kind)
    program.unet.half()
    return program


def decode(vae: FirstStage, z: torch.Tensor) -> torch.Tensor:
    """Without gradients, as programs do."""
    with torch.no_grad():
        return vae.decode(z)


def overflow_(block: Block) -> None:
    """The same function, with values in its middle that fp16 does not hold."""
    with torch.no_grad():
        block.up.weight.mul_(SPREAD)
        block.up.bias.mul_(SPREAD)
        block.wide.weight.mul_(SPREAD)
        block.narrow.weight.div_(SPREAD)
        block.down.weight.div_(SPREAD)


def make_faulty(kind: str, dtype: torch.dtype = torch.float16) -> Program:
    """A program whose second block does not fit in fp16."""
    program = make_program(kind, dtype)
    block: Any = program.unet.blocks[1]
    overflow_(block)
    return program


KINDS = ("module", "dict", "engine", "patcher")

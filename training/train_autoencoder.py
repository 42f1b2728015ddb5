"""Train the video autoencoder of `shapes` (AutoencoderKLCogVideoX), from scratch, on drawn clips.

Training goes in two cycles, each with its own warm-up and decay: the first on fast shapes, the second
on the slower ones of the data set. In each, most steps see 32x32 crops, which cost a quarter; the
last ones see whole clips.

The group norms run with an eps of almost nothing: `inflate.py` later makes the feature maps so large
that the class's own 1e-6 is as little to them.

Restart: run the same command again; it goes on from the newest checkpoint. Randomness depends on the
seed and the step alone.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX
from torch import nn

from muon import Muon
from scenes import draw_any
from training_state import find_cycle, restore, schedule, store

EPS = 1e-6 * 2.0**-28
CONFIG = {
    "block_out_channels": (16, 32, 64),
    "down_block_types": ("CogVideoXDownBlock3D",) * 3,
    "up_block_types": ("CogVideoXUpBlock3D",) * 3,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_height": 64,
    "sample_width": 64,
    "temporal_compression_ratio": 4,
}
KL_WEIGHT = 1e-5


@dataclass(frozen=True)
class Cycle:
    """A part of training: steps in all, steps on whole clips, learning rate, travel in pixels."""

    steps: int
    whole: int
    rate: float
    travel: tuple[float, float]


CYCLES = (Cycle(1200, 120, 1.0, (20.0, 26.0)), Cycle(700, 100, 0.5, (14.0, 18.0)))


def make_autoencoder() -> AutoencoderKLCogVideoX:
    """The autoencoder with fresh weights and the small eps described above."""
    vae = AutoencoderKLCogVideoX(**CONFIG)
    for module in vae.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = EPS
    ease_start(vae)
    for parameter in vae.parameters():
        if parameter.dim() == 5:  # twice as fast on CPU
            parameter.data = parameter.data.to(memory_format=torch.channels_last_3d)
    return vae


@torch.no_grad()
def ease_start(vae: AutoencoderKLCogVideoX) -> None:
    """Begin almost without noise in the latents, and with spatial norms that pass their input on.

    From the classes' own initial values the first thousand steps learn nothing but mean colours.
    """
    channels = CONFIG["latent_channels"]
    vae.encoder.conv_out.conv.bias[channels:] = -6.0
    for name, module in vae.named_modules():
        if name.endswith("conv_y"):
            module.conv.weight.mul_(0.1)
            module.conv.bias.fill_(1.0)


def draw_batch(seed: int, step: int, count: int, crop: int, travel: tuple[float, float]):
    """`[B, 3, T, crop, crop]` fp32 in [-1, 1]."""
    rng = random.Random(f"{seed}/{step}")
    clips = []
    for _ in range(count):
        clip = draw_any(rng, travel)
        top, left = find_shape(clip, rng, crop)
        clips.append(clip[:, :, top : top + crop, left : left + crop])
    return torch.stack(clips).transpose(1, 2).contiguous(memory_format=torch.channels_last_3d)


def find_shape(clip: torch.Tensor, rng: random.Random, crop: int) -> tuple[int, int]:
    """Top and left of a crop that meets the shape in one of the frames."""
    frame = clip[rng.randrange(clip.shape[0])]
    rows, columns = ((frame - frame[:, :1, :1]).abs().sum(0) > 0.1).nonzero(as_tuple=True)
    place = rng.randrange(len(rows)) if len(rows) else 0
    centre = (rows[place].item(), columns[place].item()) if len(rows) else (32, 32)
    return tuple(min(max(x - rng.randint(8, crop - 8), 0), 64 - crop) for x in centre)


def reconstruct(vae: AutoencoderKLCogVideoX, clips: torch.Tensor, generator: torch.Generator):
    """Reconstruction `[B, 3, T, H, W]`, and the KL divergence to a unit normal per latent value."""
    mean, log_variance = vae.encoder(clips)[0].chunk(2, dim=1)
    log_variance = log_variance.clamp(-30, 20)
    noise = torch.randn(mean.shape, generator=generator)
    latents = mean + noise * (0.5 * log_variance).exp()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return vae.decoder(latents)[0], kl


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the weights inside, AdamW for the first and last layers, biases and norms."""
    inside = [
        weight
        for name, weight in model.named_parameters()
        if weight.dim() >= 2
        and not any(part in name for part in ("conv_y", "conv_b", "conv_in", "conv_out"))
    ]
    taken = {id(weight) for weight in inside}
    rest = [weight for weight in model.parameters() if id(weight) not in taken]
    return [Muon(inside, lr=0.02), torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.99))]


def train(out: Path, batch: int, seed: int, every: int) -> None:
    torch.manual_seed(seed)
    vae = make_autoencoder()
    optimizers = make_optimizers(vae)
    checkpoint = out / "autoencoder.pt"
    done, spent_s = restore(checkpoint, {"model": vae}, optimizers)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    steps = sum(cycle.steps for cycle in CYCLES)
    for step in range(done, steps):
        cycle, local = find_cycle(CYCLES, step)
        crop = 64 if local >= cycle.steps - cycle.whole else 32
        count = batch if crop == 32 else max(2, batch // 2)
        clips = draw_batch(seed, step, count, crop, cycle.travel)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        schedule(optimizers, local, cycle.steps, cycle.rate)
        output, kl = reconstruct(vae, clips, generator)
        squared = (output - clips).square().mean()
        loss = squared + 0.2 * (output - clips).abs().mean() + KL_WEIGHT * kl
        vae.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            line = {
                "step": step,
                "psnr_db": round(-10 * torch.log10(squared.detach() / 4).item(), 2),
                "kl": round(kl.item(), 3),
                "elapsed_s": round(spent_s + time.monotonic() - started, 1),
            }
            print(json.dumps(line), flush=True)
        if (step + 1) % every == 0 or step == steps - 1:
            elapsed_s = spent_s + time.monotonic() - started
            store(checkpoint, {"model": vae}, optimizers, step + 1, elapsed_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoints")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    options = parser.parse_args()
    train(options.out, options.batch, options.seed, options.every)


if __name__ == "__main__":
    main()

"""Train the autoencoder of `solids` from scratch on drawn frames, or go on where training stopped.

Clips are drawn once and kept on disk. A step sees crops of 64x64 pixels. The loss is the error of
pixels, of their differences to the pixels beside and below (edges), and of the differences between
colours (fringes).

Restart: run the same command again. Randomness depends on the seed and the step alone. The learning
rate falls towards `--steps`, and `--stop` ends a run before.

    cd training && python -m solids.train_autoencoder --steps 6000
    cd training && python -m solids.train_autoencoder --export   # weights in fp16, and their score
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from muon import Muon
from solids.autoencoder import CONFIG, FACTOR, WEIGHTS, load_autoencoder, make_autoencoder
from solids.clips import CHECKPOINTS, load_part
from solids.scenes import FRAMES, SIDE, draw_scene, split_scenes
from training_state import restore, schedule, store

FRAME_PARTS = 4
HELD_OUT_CLIPS = 60
CROP = 64
KL_WEIGHT = 1e-5


def prepare_frames(out: Path, parts: int = FRAME_PARTS) -> np.ndarray:
    """Return the frames of the first parts of the clips, `[N, H, W, 3]` uint8."""
    return np.concatenate([load_part(out, part) for part in range(parts)]).reshape(
        -1, SIDE, SIDE, 3
    )


def draw_held_out(clips: int = HELD_OUT_CLIPS) -> np.ndarray:
    """Draw one frame of each of the first held-out scenes, `[N, H, W, 3]` uint8."""
    scenes = split_scenes()[1][:clips]
    return np.stack([draw_scene(scene, 10_000 + i)[i % FRAMES] for i, scene in enumerate(scenes)])


def to_tensor(frames: np.ndarray) -> torch.Tensor:
    """Turn `[N, H, W, 3]` uint8 into `[N, 3, H, W]` fp32 in [-1, 1]."""
    values = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
    return (values.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def draw_batch(frames: np.ndarray, seed: int, step: int, count: int) -> torch.Tensor:
    """Cut `count` crops out of random frames, `[count, 3, CROP, CROP]`."""
    rng = np.random.default_rng([seed, step])
    crops = []
    for _ in range(count):
        row, top, left = (int(x) for x in rng.integers((len(frames), *[SIDE - CROP + 1] * 2)))
        crops.append(frames[row, top : top + CROP, left : left + CROP])
    return to_tensor(np.stack(crops))


def reconstruct(
    vae: AutoencoderKL, frames: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frames through the autoencoder, and the KL divergence to a unit normal per latent value."""
    with torch.autocast("cpu", torch.bfloat16):
        mean, log_variance = vae.encoder(frames).float().chunk(2, dim=1)
    log_variance = log_variance.clamp(-30, 20)
    noise = torch.randn(mean.shape, generator=generator)
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    with torch.autocast("cpu", torch.bfloat16):
        output = vae.decoder(mean + noise * (0.5 * log_variance).exp())
    return output.float(), kl


def measure_loss(output: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Weigh the errors of pixels, edges and colours, each as a mean magnitude."""
    error = output - frames
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    colours = (error[:, :2] - error[:, 1:]).abs().mean()
    return error.abs().mean() + 2 * error.square().mean() + 0.5 * edges + 0.5 * colours


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Give Muon the weights inside, AdamW the first and last layers, biases and norms."""
    inside = [
        weight
        for name, weight in model.named_parameters()
        if weight.dim() >= 2 and not any(part in name for part in ("conv_in", "conv_out"))
    ]
    taken = {id(weight) for weight in inside}
    rest = [weight for weight in model.parameters() if id(weight) not in taken]
    return [
        Muon(inside, lr=0.02, dtype=torch.bfloat16),
        torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.99)),
    ]


@torch.no_grad()
def score(vae: AutoencoderKL, frames: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the PSNR of all frames together in dB, after rounding to 8 bits, and the reconstructions."""
    results = []
    for start in range(0, len(frames), 4):
        mean = vae.encoder(to_tensor(frames[start : start + 4])).chunk(2, dim=1)[0]
        values = (vae.decoder(mean).clamp(-1, 1) + 1) * 127.5
        results.append(values.round().permute(0, 2, 3, 1).numpy().astype(np.uint8))
    shown = np.concatenate(results)
    squared = np.square(shown.astype(np.float64) - frames).mean()
    return float(10 * np.log10(255**2 / squared)), shown


def train(
    out: Path,
    steps: int,
    batch: int,
    seed: int,
    every: int,
    parts: int = FRAME_PARTS,
    stop: int = 0,
) -> None:
    """Train up to `stop`, or to the end."""
    torch.manual_seed(seed)
    vae = make_autoencoder()
    optimizers = make_optimizers(vae)
    checkpoint = out / "autoencoder.pt"
    done, spent_s = restore(checkpoint, {"model": vae}, optimizers)
    frames = prepare_frames(out, parts)
    began_s = time.process_time()
    for step in range(done, stop or steps):
        crops = draw_batch(frames, seed, step, batch)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        schedule(optimizers, step, steps)
        output, kl = reconstruct(vae, crops, generator)
        loss = measure_loss(output, crops) + KL_WEIGHT * kl
        vae.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        processor_s = spent_s + time.process_time() - began_s
        if (step + 1) % 50 == 0:
            squared = (output.detach() - crops).square().mean()
            line = {
                "step": step + 1,
                "psnr_db": round(-10 * torch.log10(squared / 4).item(), 2),
                "kl": round(kl.item(), 3),
                "processor_s": round(processor_s, 1),
            }
            print(json.dumps(line), flush=True)
        if (step + 1) % every == 0 or step + 1 == (stop or steps):
            store(checkpoint, {"model": vae}, optimizers, step + 1, processor_s)


def export(out: Path, weights: Path, sheet: Path | None) -> dict[str, object]:
    """Write the weights in fp16, read them back, and measure them on held-out frames."""
    state = torch.load(out / "autoencoder.pt", weights_only=True)
    half = {name: value.half().contiguous() for name, value in state["model"].items()}
    save_file(half, weights)
    frames = draw_held_out()
    vae = load_autoencoder(weights)
    psnr_db, shown = score(vae, frames)
    if sheet:
        rows = [np.concatenate(both, axis=0) for both in zip(frames, shown, strict=True)]
        Image.fromarray(np.concatenate(rows[:8], axis=1)).save(sheet)
    with torch.no_grad():
        means = [
            vae.encoder(to_tensor(frames[i : i + 4])).chunk(2, dim=1)[0] for i in range(0, 60, 4)
        ]
    deviation = torch.cat(means).std().item()
    FACTOR.write_text(json.dumps({"scaling_factor": 1 / deviation}) + "\n")
    for path in out.glob("latents-*"):
        path.unlink()  # those of other weights
    return {
        "steps": state["step"],
        "processor_s": round(state["spent_s"]),
        "held_out_frames": len(frames),
        "psnr_db": round(psnr_db, 2),
        "latents_std": round(deviation, 4),
        "weights_bytes": weights.stat().st_size,
        "latent_channels": CONFIG["latent_channels"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=CHECKPOINTS)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--stop", type=int, default=0, help="stop after this step, to go on later")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--export", action="store_true", help="store fp16 weights and score them")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--sheet", type=Path, help="a picture: originals above reconstructions")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    if options.export:
        print(json.dumps(export(options.out, options.weights, options.sheet)))
    else:
        train(
            options.out,
            options.steps,
            options.batch,
            options.seed,
            options.every,
            stop=options.stop,
        )


if __name__ == "__main__":
    main()

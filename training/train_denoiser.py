"""Train the text encoder and the video transformer of `shapes`, together, from scratch.

1. Latents of drawn clips are made once with the trained autoencoder and kept on disk. Each cycle of
   training has its own: paths anywhere in the picture, then near its middle, then larger shapes.
2. The T5 encoder and the CogVideoX transformer learn to predict v (Salimans & Ho 2022) on the
   schedule of the shipped scheduler, one caption in ten left empty for guidance. After the first
   cycle it sees more of the noisy timesteps, where shape and direction are decided.
3. Prompts are padded as the pipeline pads them, which masks nothing: mostly to `TEXT_TOKENS`, at times
   to the pipeline's default of 226, so that plain calls work too.

The eps of every norm that reads a residual stream is almost nothing while training; `inflate.py`
later makes the stream so large that the usual eps is as little to it.

Restart: run the same command again. Randomness depends on the seed and the step alone.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5EncoderModel

from scenes import RADIUS, SPREAD, TEMPLATES, Scene, all_captions, draw_scene, split_scenes
from tokens import make_tokenizer
from train_autoencoder import CONFIG as AUTOENCODER
from train_autoencoder import make_autoencoder
from training_state import average, find_cycle, make_denoiser_optimizers, restore, schedule, store

SHRUNK = 2.0**-26
"""What the usual eps is multiplied by while training."""
TEXT_TOKENS = 16
PIPELINE_TEXT_TOKENS = 226
LATENT_FRAMES, LATENT_SIDE = 3, 16
FACTOR = "scaling_factor.json"

TRANSFORMER = {
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "in_channels": AUTOENCODER["latent_channels"],
    "out_channels": AUTOENCODER["latent_channels"],
    "time_embed_dim": 128,
    "text_embed_dim": 128,
    "num_layers": 6,
    "sample_width": LATENT_SIDE,
    "sample_height": LATENT_SIDE,
    "sample_frames": 9,
    "patch_size": 4,
    "max_text_seq_length": TEXT_TOKENS,
    "use_rotary_positional_embeddings": True,
    "spatial_interpolation_scale": 1.0,
    "norm_eps": 1e-5,
}
ENCODER = {
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 3,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
    "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Cycle:
    """A part of training.

    Attributes:
        name: of its file of latents.
        steps: in all.
        ends: what the decay of the learning rate is reckoned to; the cycle may stop before.
        rate: factor on the learning rates.
        spread: how far paths may lie from the middle, in pixels.
        radii: half the extent of the shapes, in pixels.
        skew: timesteps are drawn as `1000 * u**skew`; 1 is uniform, less is noisier.
        draws: clips of each training scene.
    """

    name: str
    steps: int
    ends: int
    rate: float
    spread: float
    radii: tuple[float, float]
    skew: float
    draws: int = 6


CYCLES = (
    Cycle("wide", 1500, 2600, 1.0, 100.0, (9.0, 12.0), 1.0),
    Cycle("near", 500, 1500, 0.8, 5.0, (9.0, 12.0), 0.5),
    Cycle("final", 1000, 1000, 0.8, SPREAD, RADIUS, 0.5),
    Cycle("final", 650, 650, 0.8, SPREAD, RADIUS, 0.5),
    Cycle("last", 2000, 2000, 0.8, SPREAD, RADIUS, 0.7, draws=16),
)
SCHEDULER = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "snr_shift_scale": 1.0,
    "timestep_spacing": "trailing",
}


def make_encoder(vocabulary: int) -> T5EncoderModel:
    config = T5Config(vocab_size=vocabulary, **ENCODER)
    config.layer_norm_epsilon *= SHRUNK
    return T5EncoderModel(config).float()


def make_transformer() -> CogVideoXTransformer3DModel:
    model = CogVideoXTransformer3DModel(
        **{**TRANSFORMER, "norm_eps": TRANSFORMER["norm_eps"] * SHRUNK}
    )
    model.norm_out.norm.eps = TRANSFORMER["norm_eps"]  # reads no residual stream
    return model


def rotary_embedding() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as the pipeline makes them for the model's own size."""
    side = LATENT_SIDE // TRANSFORMER["patch_size"]
    return get_3d_rotary_pos_embed(
        embed_dim=TRANSFORMER["attention_head_dim"],
        crops_coords=((0, 0), (side, side)),
        grid_size=(side, side),
        temporal_size=LATENT_FRAMES,
    )


@torch.no_grad()
def prepare_latents(out: Path, cycle: Cycle, seed: int) -> dict[str, torch.Tensor]:
    """Latents of drawn clips of each training scene, scaled by one factor for all cycles; made once.

    Returns:
        `latents` [N, T, C, H, W] fp32 and `scene` [N] int64 (index into the training scenes).
    """
    path = out / f"latents-{cycle.name}.safetensors"
    if path.exists():
        return load_file(path)
    vae = make_autoencoder().eval()
    vae.load_state_dict(torch.load(out / "autoencoder.pt", weights_only=True)["model"])
    scenes, _ = split_scenes()
    latents, indices = [], []
    for draw in range(cycle.draws):
        for start in range(0, len(scenes), 16):
            chunk = range(start, min(start + 16, len(scenes)))
            clips = [
                draw_scene(
                    scenes[i], random.Random(f"{seed}/{draw}/{i}"), cycle.spread, cycle.radii
                )
                for i in chunk
            ]
            batch = torch.stack(clips).transpose(1, 2)
            batch = batch.contiguous(memory_format=torch.channels_last_3d)
            mean = vae.encoder(batch)[0].chunk(2, dim=1)[0]
            latents.append(mean.transpose(1, 2).contiguous())
            indices.extend(chunk)
        print(json.dumps({"latents": len(indices), "of": cycle.draws * len(scenes)}), flush=True)
    stacked = torch.cat(latents)
    if not (out / FACTOR).exists():
        write_factor(out, 1 / stacked.std().item())
    data = {"latents": stacked * read_factor(out), "scene": torch.tensor(indices)}
    save_file(data, path)
    return data


def write_factor(out: Path, factor: float) -> None:
    """Keep what latents are multiplied by, the same in every cycle."""
    (out / FACTOR).write_text(json.dumps({"scaling_factor": factor}) + "\n")


def read_factor(out: Path) -> float:
    return json.loads((out / FACTOR).read_text())["scaling_factor"]


class Captions:
    """Token ids of every caption of the training scenes, for both paddings."""

    def __init__(self, scenes: list[Scene]) -> None:
        tokenizer = make_tokenizer(all_captions())
        texts = [""] + [scene.caption(t) for scene in scenes for t in TEMPLATES]
        self.ids = {
            length: tokenizer(
                texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            ).input_ids
            for length in (TEXT_TOKENS, PIPELINE_TEXT_TOKENS)
        }

    def pick(self, scenes: list[int], rng: random.Random, length: int) -> torch.Tensor:
        """`[B, length]` int64; one caption in ten is empty."""
        rows = [
            0 if rng.random() < 0.1 else 1 + scene * len(TEMPLATES) + rng.randrange(len(TEMPLATES))
            for scene in scenes
        ]
        return self.ids[length][rows]


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the encoder and the denoiser."""
    return make_denoiser_optimizers(model, ("relative_attention_bias", ".linear."), 2e-3)


def train(out: Path, batch: int, seed: int, every: int) -> None:
    torch.manual_seed(seed)
    torch.set_flush_denormal(True)
    steps = sum(cycle.steps for cycle in CYCLES)
    scenes, _ = split_scenes()
    captions = Captions(scenes)
    alphas = CogVideoXDPMScheduler(**SCHEDULER).alphas_cumprod.float()
    rotary = rotary_embedding()
    model = nn.ModuleDict(
        {
            "encoder": make_encoder(len(make_tokenizer(all_captions()))),
            "denoiser": make_transformer(),
        }
    )
    shadow = nn.ModuleDict(
        {
            "encoder": make_encoder(len(make_tokenizer(all_captions()))),
            "denoiser": make_transformer(),
        }
    )
    shadow.load_state_dict(model.state_dict())
    optimizers = make_optimizers(model)
    checkpoint = out / "denoiser.pt"
    models = {"model": model, "average": shadow}
    done, spent_s = restore(checkpoint, models, optimizers)
    remaining = {find_cycle(CYCLES, step)[0] for step in range(done, steps)}
    data = {c: prepare_latents(out, c, seed) for c in CYCLES if c in remaining}
    started, recent = time.monotonic(), []
    for step in range(done, steps):
        cycle, local = find_cycle(CYCLES, step)
        latents, scene = data[cycle]["latents"], data[cycle]["scene"]
        rng = random.Random(f"{seed}/{step}")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        long = step % 20 == 19
        count = batch // 4 if long else batch
        rows = torch.randint(len(latents), (count,), generator=generator)
        clean = latents[rows]
        ids = captions.pick(
            scene[rows].tolist(), rng, PIPELINE_TEXT_TOKENS if long else TEXT_TOKENS
        )
        uniform = torch.rand(count, generator=generator)
        timesteps = (len(alphas) * uniform**cycle.skew).long().clamp(max=len(alphas) - 1)
        noise = torch.randn(clean.shape, generator=generator)
        signal = alphas[timesteps].sqrt().view(-1, 1, 1, 1, 1)
        spread = (1 - alphas[timesteps]).sqrt().view(-1, 1, 1, 1, 1)
        schedule(optimizers, local, cycle.ends, cycle.rate)
        text = model["encoder"](ids).last_hidden_state
        output = model["denoiser"](
            hidden_states=signal * clean + spread * noise,
            encoder_hidden_states=text,
            timestep=timesteps,
            image_rotary_emb=rotary,
            return_dict=False,
        )[0]
        loss = (output - (signal * noise - spread * clean)).square().mean()
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        average(shadow, model, step, 0.998)
        recent.append(loss.item())
        if (step + 1) % 50 == 0:
            line = {
                "step": step + 1,
                "loss": round(sum(recent) / len(recent), 4),
                "elapsed_s": round(spent_s + time.monotonic() - started, 1),
            }
            print(json.dumps(line), flush=True)
            recent.clear()
        if (step + 1) % every == 0 or step == steps - 1:
            elapsed_s = spent_s + time.monotonic() - started
            store(checkpoint, models, optimizers, step + 1, elapsed_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoints")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=250, help="steps between checkpoints")
    options = parser.parse_args()
    train(options.out, options.batch, options.seed, options.every)


if __name__ == "__main__":
    main()

"""Train the text encoder and the video transformer of `solids` together, or go on where training stopped.

1. Latents of drawn clips are made once with the stored autoencoder: their means, one scale for all.
2. A T5 encoder and a `LatteTransformer3DModel` learn rectified flow: from a mixture `(1 - s) x + s n` of
   latents and noise they predict `n - x`. `DPMSolverMultistepScheduler` with flow sigmas samples
   what was so trained in few steps. Noisy mixtures are more frequent, as the sampler's shift wants.
3. One caption in ten is empty, for guidance. Captions are padded as `LattePipeline` pads those of a
   single prompt: a caption isn't padded, an empty one is as long as a caption.

Restart: run the same command again. Randomness depends on the seed and the step alone.

    cd training && python -m solids.train_denoiser --steps 20000
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler, LatteTransformer3DModel
from diffusers.models.attention_processor import Attention
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5EncoderModel

from solids.autoencoder import CONFIG as AUTOENCODER
from solids.autoencoder import load_autoencoder, read_factor
from solids.clips import CHECKPOINTS, PARTS, load_part, pick_scenes
from solids.scenes import FRAMES, SIDE, TEMPLATES, Scene, all_captions, split_scenes
from solids.train_autoencoder import to_tensor
from tokens import make_tokenizer
from training_state import average, make_denoiser_optimizers, restore, schedule, store

SHRUNK = 2.0**-26
"""What the eps of the text encoder's norms is multiplied by while training."""
SHIFT = 3.0
PHASES = (("parts", 1000), ("ends", 1075), ("halves", 1150))
"""What steps see, and the step where that ends; then they see whole clips."""
TURNED = {"moving left": "moving right", "moving right": "moving left", "bouncing": "bouncing"}
"""What motions are when a clip is played backwards."""
WEIGHTS = Path(__file__).parent / "denoiser.safetensors"
MASKED = -10_000.0

ENCODER = {
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 3,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
    "layer_norm_epsilon": 1e-6,
    "tie_word_embeddings": False,
}
TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 48,
    "in_channels": AUTOENCODER["latent_channels"],
    "out_channels": 2 * AUTOENCODER["latent_channels"],  # the pipeline drops the second half
    "num_layers": 6,
    "cross_attention_dim": 192,
    "attention_bias": True,
    "sample_size": SIDE // 8,
    "patch_size": 2,
    "activation_fn": "gelu",
    "norm_type": "ada_norm_single",
    "num_embeds_ada_norm": 1000,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "caption_channels": ENCODER["d_model"],
    "video_length": FRAMES,
}
SCHEDULER = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": SHIFT,
    "num_train_timesteps": 1000,
}


class ShortAttention:
    """Attention as products and a softmax: many short sequences are then several times faster on a CPU.

    `LatteTransformer3DModel` takes it in the place of its own, and computes the same.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        read = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            values.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for values in (attn.to_q(hidden_states), attn.to_k(read), attn.to_v(read))
        )
        scores = (query * attn.scale) @ key.transpose(-1, -2)
        if attention_mask is not None:
            scores = scores + attention_mask[:, None].to(scores.dtype)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](mixed))


def make_encoder(vocabulary: int) -> T5EncoderModel:
    config = T5Config(vocab_size=vocabulary, **ENCODER)
    config.layer_norm_epsilon *= SHRUNK
    return T5EncoderModel(config).float()


def make_transformer() -> LatteTransformer3DModel:
    model = LatteTransformer3DModel(**TRANSFORMER)
    for block in (*model.transformer_blocks, *model.temporal_transformer_blocks):
        nn.init.zeros_(block.ff.net[2].weight)
        nn.init.zeros_(block.attn1.to_out[0].weight)
    nn.init.zeros_(model.proj_out.weight)
    return model


def make_models(vocabulary: int) -> nn.ModuleDict:
    return nn.ModuleDict({"encoder": make_encoder(vocabulary), "denoiser": make_transformer()})


def make_scheduler() -> DPMSolverMultistepScheduler:
    return DPMSolverMultistepScheduler(**SCHEDULER)


@torch.no_grad()
def prepare_latents(out: Path, parts: int) -> dict[str, torch.Tensor]:
    """Encode the first parts of the clips, once; each part is kept as it's done.

    Returns:
        `latents` [N, C, T, H, W] fp16, scaled to a standard deviation of 1, `scene` [N] int64 (index
        into the training scenes), and `factor` [1] that they were multiplied by.
    """
    vae, means = None, []
    for part in range(parts):
        path = out / f"latents-{part:03d}.safetensors"
        if not path.exists():
            vae = vae or load_autoencoder()
            clips = load_part(out, part)
            with torch.autocast("cpu", torch.bfloat16):
                encoded = [vae.encoder(to_tensor(clip)).chunk(2, dim=1)[0] for clip in clips]
            save_file({"means": torch.stack(encoded).transpose(1, 2).half().contiguous()}, path)
            print(json.dumps({"latents": part + 1, "of": parts}), flush=True)
        means.append(load_file(path)["means"])
    latents = torch.cat(means)
    order = pick_scenes()
    return {
        "latents": (latents.float() * read_factor()).half(),
        "scene": torch.from_numpy(order[np.arange(len(latents)) % len(order)]),
    }


class Captions:
    """Token ids of every caption of the training scenes."""

    def __init__(self, scenes: list[Scene]) -> None:
        self.tokenizer = tokenizer = make_tokenizer(all_captions())
        self.vocabulary = len(tokenizer)
        self._empty = tokenizer("").input_ids
        self._pad = tokenizer.pad_token_id
        turned = [replace(s, motion=TURNED.get(s.motion, s.motion)) for s in scenes]
        self._ids = [
            [tokenizer([s.caption(template) for template in TEMPLATES]).input_ids for s in listed]
            for listed in (scenes, turned)
        ]

    def pick(
        self, scenes: list[int], backwards: list[bool], rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pick a caption for each scene, as it's called if it's played backwards; one in ten is empty.

        Returns:
            ids `[B, L]` int64, which of them the encoder reads, and which the transformer reads.
        """
        chosen = [
            self._ids[turned][scene][int(rng.integers(len(TEMPLATES)))]
            for scene, turned in zip(scenes, backwards, strict=True)
        ]
        length = max(map(len, chosen))
        ids = torch.full((len(chosen), length), self._pad)
        encoded, read = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, own in enumerate(chosen):
            read[row, : len(own)] = 1
            used = self._empty if rng.random() < 0.1 else own
            ids[row, : len(used)] = torch.tensor(used)
            encoded[row, : len(used)] = 1
        return ids, encoded, read


def predict(
    models: nn.ModuleDict,
    noisy: torch.Tensor,
    timesteps: torch.Tensor,
    texts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    frames: torch.Tensor,
) -> torch.Tensor:
    """Predict noise minus latents, `[B, C, T, H, W]`.

    Args:
        texts: what `Captions.pick` returned.
        frames: which frames of the clip are given, `[T]`.
    """
    ids, encoded, read = texts
    denoiser = models["denoiser"]
    bias = ((1 - read) * MASKED)[:, None].repeat_interleave(noisy.shape[2], dim=0)
    table = denoiser.temp_pos_embed
    denoiser.temp_pos_embed = table[:, frames]
    try:
        text = models["encoder"](ids, attention_mask=encoded).last_hidden_state
        output = denoiser(
            noisy.to(text.dtype),
            timestep=timesteps,
            encoder_hidden_states=text,
            encoder_attention_mask=bias,
            return_dict=False,
        )[0]
    finally:
        denoiser.temp_pos_embed = table
    return output[:, : noisy.shape[1]].float()


def make_optimizers(models: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the encoder and the denoiser."""
    outside = ("relative_attention_bias", "scale_shift_table")
    return make_denoiser_optimizers(models, outside, 1e-3, torch.bfloat16)


def find_turnable(scenes: list[Scene]) -> torch.Tensor:
    """Return which training scenes show another one of them, or themselves, when played backwards."""
    known = set(scenes)
    return torch.tensor(
        [
            scene.motion in TURNED and replace(scene, motion=TURNED[scene.motion]) in known
            for scene in scenes
        ]
    )


@dataclass(frozen=True)
class Batch:
    """What one step sees.

    Attributes:
        clean: latents `[B, C, T, H, W]` fp32.
        frames: which frames these are, `[T]`.
        scenes: index of each clip's training scene, `[B]`.
        backwards: which clips are played backwards, `[B]` bool; what moves left then moves right.
    """

    clean: torch.Tensor
    frames: torch.Tensor
    scenes: list[int]
    backwards: list[bool]


def draw_batch(
    data: dict[str, torch.Tensor], clips: int, rng: np.random.Generator, phase: str
) -> Batch:
    """Draw `clips` whole clips, or three times as many with three frames each.

    Args:
        phase: *parts* sees three frames of each clip; *ends* three of the last four, mostly of clips
            that move left or right; *halves* one from the beginning, middle and end, of the same clips;
            *whole* sees all frames.
    """
    frames, count = np.arange(FRAMES), clips if phase == "whole" else 3 * clips
    rows = rng.integers(len(data["latents"]), size=count)
    if phase == "parts":
        frames = np.sort(rng.choice(FRAMES, 3, replace=False))
    elif phase == "ends":
        frames = np.sort(rng.choice(np.arange(FRAMES - 4, FRAMES), 3, replace=False))
    elif phase == "halves":
        frames = np.array([rng.integers(2), rng.integers(2, 7), FRAMES - 1 - rng.integers(2)])
    if phase in ("ends", "halves"):
        across = np.flatnonzero(data["across"].numpy())
        rows = np.where(
            rng.random(count) < 0.8, across[rng.integers(len(across), size=count)], rows
        )
    chosen = torch.from_numpy(rows)
    backwards = torch.from_numpy(rng.random(count) < 0.5) & data["turnable"][chosen]
    seen = torch.from_numpy(frames)
    order = torch.where(backwards[:, None], FRAMES - 1 - seen, seen)
    clean = data["latents"][chosen[:, None], :, order].transpose(1, 2).float()
    return Batch(clean, seen, data["scene"][chosen].tolist(), backwards.tolist())


def draw_timesteps(count: int, generator: torch.Generator, phase: str) -> torch.Tensor:
    """Draw timesteps as the sampler's shift wants; elsewhere those where motions are decided."""
    uniform = torch.rand(count, generator=generator)
    if phase in ("ends", "halves"):
        return (1000 - 250 * uniform).long().clamp(max=999)
    return (1000 * SHIFT * uniform / (1 + (SHIFT - 1) * uniform)).long()


def name_phase(step: int) -> str:
    """Name what a step sees; the last phase has no end."""
    return next((name for name, end in PHASES if step < end), "whole")


def train(
    out: Path,
    steps: int,
    batch: int,
    seed: int,
    every: int,
    parts: int = PARTS,
    stop: int = 0,
    weights: Path | None = None,
) -> float:
    """Train up to `stop`, or to the end; return the mean loss of the last 50 steps at most.

    Args:
        batch: whole clips in a step, or a third of those with three frames each.
        weights: what to begin with, instead of fresh weights, if there's no checkpoint.
    """
    torch.manual_seed(seed)
    scenes = split_scenes()[0]
    captions = Captions(scenes)
    models = make_models(captions.vocabulary)
    if weights:
        load_weights(models, weights)
    shadow = make_models(captions.vocabulary)
    shadow.load_state_dict(models.state_dict())
    optimizers = make_optimizers(models)
    kept = {"model": models, "average": shadow}
    done, spent_s = restore(out / "denoiser.pt", kept, optimizers)
    data = prepare_latents(out, parts)
    data["turnable"] = find_turnable(scenes)[data["scene"]]
    across = torch.tensor(["moving" in scene.motion for scene in scenes])
    data["across"] = across[data["scene"]]
    half = copy.deepcopy(models).to(torch.bfloat16)
    for module in half.modules():
        if isinstance(module, Attention):
            module.set_processor(ShortAttention())
    began_s, recent = time.process_time(), []
    for step in range(done, stop or steps):
        rng = np.random.default_rng([seed, 3, step])
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        phase = name_phase(step)
        seen = draw_batch(data, batch, rng, phase)
        timesteps = draw_timesteps(len(seen.clean), generator, phase)
        share = (timesteps / 1000).view(-1, 1, 1, 1, 1)
        noise = torch.randn(seen.clean.shape, generator=generator)
        schedule(optimizers, step, steps)
        texts = captions.pick(seen.scenes, seen.backwards, rng)
        noisy = (1 - share) * seen.clean + share * noise
        output = predict(half, noisy, timesteps, texts, seen.frames)
        loss = (output - (noise - seen.clean)).square().mean()
        half.zero_grad(set_to_none=True)
        loss.backward()
        for weight, fast in zip(models.parameters(), half.parameters(), strict=True):
            weight.grad = fast.grad.float()
        nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        average(shadow, models, step, 0.998)
        copy_weights(models, half)
        recent = [*recent[-49:], loss.item()]
        processor_s = spent_s + time.process_time() - began_s
        if (step + 1) % 50 == 0:
            mean = round(sum(recent) / len(recent), 4)
            line = {"step": step + 1, "loss": mean, "processor_s": round(processor_s, 1)}
            print(json.dumps(line), flush=True)
        if (step + 1) % every == 0 or step + 1 == (stop or steps):
            store(out / "denoiser.pt", kept, optimizers, step + 1, processor_s)
    return sum(recent) / max(1, len(recent))


@torch.no_grad()
def copy_weights(models: nn.Module, half: nn.Module) -> None:
    """Round the weights into the copy that computes in bf16."""
    for weight, fast in zip(models.parameters(), half.parameters(), strict=True):
        fast.copy_(weight)


def load_weights(models: nn.Module, path: Path) -> None:
    """Load stored fp16 weights into fp32 models."""
    stored = {name: value.float() for name, value in load_file(path).items()}
    models.load_state_dict(stored)


def export(out: Path, path: Path) -> dict[str, object]:
    """Write the averaged weights in fp16."""
    state = torch.load(out / "denoiser.pt", weights_only=True)
    half = {name: value.half().contiguous() for name, value in state["average"].items()}
    # T5 holds its embedding under two names
    half["encoder.encoder.embed_tokens.weight"] = half["encoder.shared.weight"].clone()
    save_file(half, path)
    return {
        "steps": state["step"],
        "processor_s": round(state["spent_s"]),
        "weights_bytes": path.stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=CHECKPOINTS)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--stop", type=int, default=0, help="stop after this step, to go on later")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--parts", type=int, default=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument(
        "--weights", type=Path, help="begin with these weights, not with fresh ones"
    )
    parser.add_argument("--export", action="store_true", help="store the averaged weights in fp16")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    if options.export:
        print(json.dumps(export(options.out, WEIGHTS)))
        return
    train(
        options.out,
        options.steps,
        options.batch,
        options.seed,
        options.every,
        options.parts,
        options.stop,
        options.weights,
    )


if __name__ == "__main__":
    main()

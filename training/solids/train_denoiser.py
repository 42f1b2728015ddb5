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
import json
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler, LatteTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5EncoderModel

from solids.autoencoder import CONFIG as AUTOENCODER
from solids.autoencoder import load_autoencoder
from solids.scenes import FRAMES, SIDE, TEMPLATES, Scene, all_captions, draw_scene, split_scenes
from solids.train_autoencoder import CHECKPOINTS, to_tensor
from tokens import make_tokenizer
from training_state import average, make_denoiser_optimizers, restore, schedule, store

SHRUNK = 2.0**-26
"""What the eps of norms that read a residual stream is multiplied by while training."""
SHIFT = 3.0
CLIPS = 8000
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
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "in_channels": AUTOENCODER["latent_channels"],
    "out_channels": 2 * AUTOENCODER["latent_channels"],  # the pipeline drops the second half
    "num_layers": 6,
    "cross_attention_dim": 192,
    "attention_bias": True,
    "sample_size": SIDE // 8,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
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


def make_encoder(vocabulary: int) -> T5EncoderModel:
    config = T5Config(vocab_size=vocabulary, **ENCODER)
    config.layer_norm_epsilon *= SHRUNK
    return T5EncoderModel(config).float()


def make_transformer() -> LatteTransformer3DModel:
    model = LatteTransformer3DModel(**{**TRANSFORMER, "norm_eps": 1e-6 * SHRUNK})
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
def prepare_latents(out: Path, clips: int, seed: int) -> dict[str, torch.Tensor]:
    """Draw clips of training scenes and encode them, once; parts of 100 clips are kept as they are done.

    Returns:
        `latents` [N, C, T, H, W] fp16, scaled to a standard deviation of 1, `scene` [N] int64 (index
        into the training scenes), and `factor` [1] that they were multiplied by.
    """
    path = out / f"latents-{clips}.safetensors"
    if path.exists():
        return load_file(path)
    out.mkdir(parents=True, exist_ok=True)
    vae, (scenes, _) = load_autoencoder(), split_scenes()
    order = np.random.default_rng([seed, 2]).permutation(len(scenes))
    parts = []
    for start in range(0, clips, 100):
        part = out / f"latents-{clips}-{start}.safetensors"
        if not part.exists():
            means = []
            for i in range(start, min(start + 100, clips)):
                frames = to_tensor(draw_scene(scenes[order[i % len(scenes)]], 100_000 + i))
                means.append(vae.encoder(frames).chunk(2, dim=1)[0].transpose(0, 1))
            save_file({"means": torch.stack(means).contiguous()}, part)
            print(json.dumps({"latents": start + len(means), "of": clips}), flush=True)
        parts.append(part)
    means = torch.cat([load_file(part)["means"] for part in parts])
    factor = 1 / means.std()
    data = {
        "latents": (means * factor).half(),
        "scene": torch.tensor([int(order[i % len(scenes)]) for i in range(clips)]),
        "factor": factor.reshape(1),
    }
    save_file(data, path)
    for part in parts:
        part.unlink()
    return data


class Captions:
    """Token ids of every caption of the training scenes."""

    def __init__(self, scenes: list[Scene]) -> None:
        tokenizer = make_tokenizer(all_captions())
        self.vocabulary = len(tokenizer)
        self._empty = tokenizer("").input_ids
        self._pad = tokenizer.pad_token_id
        self._ids = [
            tokenizer([scene.caption(template) for template in TEMPLATES]).input_ids
            for scene in scenes
        ]

    def pick(
        self, scenes: list[int], rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pick a caption for each scene; one in ten is empty.

        Returns:
            ids `[B, L]` int64, which of them the encoder reads, and which the transformer reads.
        """
        chosen = [self._ids[scene][int(rng.integers(len(TEMPLATES)))] for scene in scenes]
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
    ids: torch.Tensor,
    encoded: torch.Tensor,
    read: torch.Tensor,
) -> torch.Tensor:
    """Predict noise minus latents, `[B, C, T, H, W]`."""
    text = models["encoder"](ids, attention_mask=encoded).last_hidden_state
    bias = ((1 - read) * MASKED)[:, None].repeat_interleave(noisy.shape[2], dim=0)
    output = models["denoiser"](
        noisy,
        timestep=timesteps,
        encoder_hidden_states=text,
        encoder_attention_mask=bias,
        return_dict=False,
    )[0]
    return output[:, : noisy.shape[1]]


def make_optimizers(models: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the encoder and the denoiser."""
    return make_denoiser_optimizers(models, ("relative_attention_bias", "scale_shift_table"), 1e-3)


def train(
    out: Path, steps: int, batch: int, seed: int, every: int, clips: int = CLIPS, stop: int = 0
) -> float:
    """Train up to `stop`, or to the end; return the mean loss of the last 50 steps at most."""
    torch.manual_seed(seed)
    captions = Captions(split_scenes()[0])
    models, shadow = make_models(captions.vocabulary), make_models(captions.vocabulary)
    shadow.load_state_dict(models.state_dict())
    optimizers = make_optimizers(models)
    kept = {"model": models, "average": shadow}
    done, spent_s = restore(out / "denoiser.pt", kept, optimizers)
    data = prepare_latents(out, clips, seed)
    began_s, recent = time.process_time(), []
    for step in range(done, stop or steps):
        rng = np.random.default_rng([seed, 3, step])
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(data["latents"]), (batch,), generator=generator)
        clean = data["latents"][rows].float()
        uniform = torch.rand(batch, generator=generator)
        timesteps = (1000 * SHIFT * uniform / (1 + (SHIFT - 1) * uniform)).long()
        share = (timesteps / 1000).view(-1, 1, 1, 1, 1)
        noise = torch.randn(clean.shape, generator=generator)
        schedule(optimizers, step, steps)
        texts = captions.pick(data["scene"][rows].tolist(), rng)
        output = predict(models, (1 - share) * clean + share * noise, timesteps, *texts)
        loss = (output - (noise - clean)).square().mean()
        models.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        average(shadow, models, step, 0.999)
        recent = [*recent[-49:], loss.item()]
        processor_s = spent_s + time.process_time() - began_s
        if (step + 1) % 50 == 0:
            mean = round(sum(recent) / len(recent), 4)
            line = {"step": step + 1, "loss": mean, "processor_s": round(processor_s, 1)}
            print(json.dumps(line), flush=True)
        if (step + 1) % every == 0 or step + 1 == (stop or steps):
            store(out / "denoiser.pt", kept, optimizers, step + 1, processor_s)
    return sum(recent) / max(1, len(recent))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=CHECKPOINTS)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--stop", type=int, default=0, help="stop after this step, to go on later")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--clips", type=int, default=CLIPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=250, help="steps between checkpoints")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    train(
        options.out,
        options.steps,
        options.batch,
        options.seed,
        options.every,
        options.clips,
        options.stop,
    )


if __name__ == "__main__":
    main()

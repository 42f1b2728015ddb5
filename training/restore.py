"""Checkpoints from the model folder, so that `shapes` can be trained on without its first hour.

The folder holds averaged weights, rounded to bf16 and inflated; the inflation is taken back exactly
(`finish.py` made it of powers of two). The optimizers start anew. `train_denoiser.py` then goes on at the
step given here, and needs latents of the remaining cycles only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from torch import nn
from transformers import T5EncoderModel

from finish import EXPONENTS, OUT
from inflate import inflate_autoencoder, inflate_encoder, inflate_transformer
from scenes import all_captions
from tokens import make_tokenizer
from train_autoencoder import make_autoencoder
from train_denoiser import CYCLES, make_encoder, make_optimizers, make_transformer, write_factor


def load_part(kind: type, folder: Path, name: str) -> nn.Module:
    return kind.from_pretrained(folder / name, local_files_only=True, dtype=torch.float32)


def restore_autoencoder(folder: Path, out: Path) -> None:
    vae = load_part(AutoencoderKLCogVideoX, folder, "vae")
    inflate_autoencoder(vae, -EXPONENTS["vae.encode"], -EXPONENTS["vae.decode"])
    make_autoencoder().load_state_dict(vae.state_dict())  # the same names and shapes
    torch.save({"model": vae.state_dict()}, out / "autoencoder.pt")
    write_factor(out, vae.config.scaling_factor)


def restore_denoiser(folder: Path, out: Path, step: int) -> None:
    encoder = load_part(T5EncoderModel, folder, "text_encoder")
    inflate_encoder(encoder, -EXPONENTS["text_encoder"], -EXPONENTS["text_encoder gate"])
    transformer = load_part(CogVideoXTransformer3DModel, folder, "transformer")
    inflate_transformer(transformer, -EXPONENTS["transformer"])
    parts = nn.ModuleDict(
        {
            "encoder": make_encoder(len(make_tokenizer(all_captions()))),
            "denoiser": make_transformer(),
        }
    )
    parts["encoder"].load_state_dict(encoder.state_dict())
    parts["denoiser"].load_state_dict(transformer.state_dict())
    state = {
        "model": parts.state_dict(),
        "average": parts.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in make_optimizers(parts)],
        "step": step,
        "spent_s": 0.0,
    }
    torch.save(state, out / "denoiser.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=OUT)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoints")
    before = sum(cycle.steps for cycle in CYCLES[:-1])
    parser.add_argument("--step", type=int, default=before, help="how many steps count as done")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    restore_autoencoder(options.model, options.out)
    restore_denoiser(options.model, options.out, options.step)
    print(json.dumps({"restored": str(options.out), "step": options.step}), flush=True)


if __name__ == "__main__":
    main()

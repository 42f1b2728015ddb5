"""Make the `shapes` folder from the checkpoints: averaged weights, rounded to bf16, then inflated.

Each component's output before and after inflation is compared: they must be equal bit for bit in
fp32. The magnitudes that result are measured on one prompt and printed; the model card quotes them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDPMScheduler, CogVideoXPipeline
from torch import nn

from inflate import inflate_autoencoder, inflate_encoder, inflate_transformer
from scenes import all_captions, draw_scene, split_scenes
from tokens import make_tokenizer
from train_autoencoder import make_autoencoder
from train_denoiser import (
    SCHEDULER,
    TEXT_TOKENS,
    make_encoder,
    make_transformer,
    read_factor,
    rotary_embedding,
)

EXPONENTS = {
    "transformer": 13,
    "text_encoder": 10,
    "text_encoder gate": 7,
    "vae.encode": 11,
    "vae.decode": 8,
}
OUT = Path(__file__).parents[1] / "src" / "stopdown" / "models" / "shapes"


def round_to_bf16(module: nn.Module) -> nn.Module:
    """The same module with every value one that bf16 holds, in fp32."""
    return module.to(torch.bfloat16).float().eval()


def load_autoencoder(checkpoints: Path) -> AutoencoderKLCogVideoX:
    vae = make_autoencoder()
    state = torch.load(checkpoints / "autoencoder.pt", weights_only=True)
    vae.load_state_dict(state["model"])
    vae.register_to_config(scaling_factor=read_factor(checkpoints))
    for parameter in vae.parameters():
        parameter.data = parameter.data.contiguous()
    return round_to_bf16(vae)


def load_denoiser(checkpoints: Path) -> tuple[nn.Module, nn.Module]:
    """Text encoder and transformer with averaged weights."""
    state = torch.load(checkpoints / "denoiser.pt", weights_only=True)
    parts = nn.ModuleDict(
        {
            "encoder": make_encoder(len(make_tokenizer(all_captions()))),
            "denoiser": make_transformer(),
        }
    )
    parts.load_state_dict(state["average"])
    return round_to_bf16(parts["encoder"]), round_to_bf16(parts["denoiser"])


def check_same(name: str, call: Callable[[], torch.Tensor], inflate: Callable[[], None]) -> None:
    """Inflate, and refuse a result that differs in a single bit."""
    with torch.no_grad():
        before = call()
        inflate()
        after = call()
    if not torch.equal(before, after):
        worst = (before - after).abs().max().item()
        raise SystemExit(f"{name}: inflation changed the output by up to {worst:.3g}")
    print(json.dumps({"inflated": name, "difference": 0.0}), flush=True)


def inflate_all(vae: nn.Module, encoder: nn.Module, transformer: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (2, TEXT_TOKENS), generator=generator)
    check_same(
        "text_encoder",
        lambda: encoder(ids).last_hidden_state,
        lambda: inflate_encoder(encoder, EXPONENTS["text_encoder"], EXPONENTS["text_encoder gate"]),
    )
    latents = torch.randn(2, 3, vae.config.latent_channels, 16, 16, generator=generator)
    text = torch.randn(2, TEXT_TOKENS, encoder.config.d_model, generator=generator)
    check_same(
        "transformer",
        lambda: transformer(
            hidden_states=latents,
            encoder_hidden_states=text,
            timestep=torch.tensor([999, 10]),
            image_rotary_emb=rotary_embedding(),
            return_dict=False,
        )[0],
        lambda: inflate_transformer(transformer, EXPONENTS["transformer"]),
    )
    scenes = split_scenes()[1][:3]
    clip = torch.stack([draw_scene(s, random.Random(0)).transpose(0, 1) for s in scenes])
    check_same(
        "vae",
        lambda: vae.decoder(vae.encoder(clip)[0][:, : vae.config.latent_channels])[0],
        lambda: inflate_autoencoder(vae, EXPONENTS["vae.encode"], EXPONENTS["vae.decode"]),
    )


@contextmanager
def recorded(pipe: CogVideoXPipeline) -> Iterator[dict[str, float]]:
    """Largest magnitudes of the values that matter, by what they are."""
    found: dict[str, float] = {}
    handles = []

    def watch(module: nn.Module, what: str, reads_input: bool = False) -> None:
        def hook(_: nn.Module, inputs: tuple, output: object) -> None:
            value = inputs[0] if reads_input else output
            tensors = value if isinstance(value, tuple) else (value,)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    found[what] = max(found.get(what, 0.0), tensor.abs().max().item())

        handles.append(module.register_forward_hook(hook))

    for block in pipe.transformer.transformer_blocks:
        watch(block, "transformer: residual stream")
        watch(block.attn1.to_out[0], "transformer: attention output projection")
        watch(block.ff.net[2], "transformer: feed-forward output")
    watch(pipe.transformer.patch_embed.text_proj, "transformer: text projection")
    for block in pipe.text_encoder.encoder.block:
        watch(block, "text_encoder: residual stream")
        watch(block.layer[1].DenseReluDense.wo, "text_encoder: wo output")
        watch(block.layer[1].DenseReluDense.wo, "text_encoder: gated product", reads_input=True)
    for name, module in pipe.vae.named_modules():
        if name.endswith((".conv1", ".conv2", ".conv_in")):
            watch(module.conv, f"vae: {name.split('.')[0]} feature maps")
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def measure(pipe: CogVideoXPipeline) -> dict[str, float]:
    scene = split_scenes()[1][0]
    with recorded(pipe) as found, torch.no_grad():
        pipe(scene.caption(), num_inference_steps=10, max_sequence_length=TEXT_TOKENS)
        clip = draw_scene(scene, random.Random(0)).transpose(0, 1)[None]
        pipe.vae.encode(clip)
    return {name: float(f"{value:.4g}") for name, value in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, default=Path(__file__).parent / "checkpoints")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    vae = load_autoencoder(options.checkpoints)
    encoder, transformer = load_denoiser(options.checkpoints)
    inflate_all(vae, encoder, transformer)
    pipe = CogVideoXPipeline(
        tokenizer=make_tokenizer(all_captions()),
        text_encoder=encoder,
        vae=vae,
        transformer=transformer,
        scheduler=CogVideoXDPMScheduler(**SCHEDULER),
    )
    pipe.set_progress_bar_config(disable=True)
    for name, value in measure(pipe).items():
        print(json.dumps({"value": name, "amax": value}), flush=True)
    for part in (vae, encoder, transformer):
        part.to(torch.bfloat16)
    pipe.save_pretrained(options.out)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(json.dumps({"saved_bytes": size}), flush=True)


if __name__ == "__main__":
    main()

"""Make a model folder of `solids` from the stored weights: rounded to bf16, inflated, saved.

Each component's output before and after inflation is compared: they must be equal bit for bit in fp32.

    cd training && python -m solids.finish /tmp/solids-model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import LattePipeline
from torch import nn

from finish import check_same, round_to_bf16
from inflate import inflate_encoder, scale
from solids.scenes import FRAMES, SIDE
from solids.score import make_pipeline

EXPONENTS = {
    "text_encoder": 10,
    "text_encoder gate": 7,
    "transformer text": 14,
    "transformer branches": 14,
    "vae.encode": 11,
    "vae.decode": 8,
}

RECOMMENDED_CALL = {
    "clean_caption": False,  # cleaning needs Beautiful Soup
    "guidance_scale": 2.0,
    "height": SIDE,
    "num_inference_steps": 8,
    "width": SIDE,
}
"""What it was scored with. Stopdown reads it from the transformer's config."""


def inflate_transformer(model: nn.Module, text: int, branches: int) -> None:
    """Inflate a Latte transformer's text projection by `text`, and what its branches add by `branches`.

    The stream itself stays as it is, because the positions that are added to it have no weights. The gates
    of self-attention and feed-forward take back what the last linears were scaled by.
    """
    projection = model.caption_projection.linear_2
    scale([projection.weight, projection.bias], text)
    linear = model.adaln_single.linear
    gates = [linear.weight.data.unflatten(0, (6, -1)), linear.bias.data.unflatten(0, (6, -1))]
    for block in (*model.transformer_blocks, *model.temporal_transformer_blocks):
        for last in (block.attn1.to_out[0], block.ff.net[2]):
            scale([last.weight, last.bias], branches)
        gates.append(block.scale_shift_table.data)
        if block.attn2 is not None:
            scale([block.attn2.to_k.weight, block.attn2.to_v.weight], -text)
    for parts in gates:  # shift, scale and gate of self-attention, then of feed-forward
        scale([parts[2], parts[5]], -branches)


def inflate_autoencoder(model: nn.Module, encoder: int, decoder: int) -> None:
    """Inflate the feature maps of an `AutoencoderKL` between its group norms, by direction."""
    for half, exponent in ((model.encoder, encoder), (model.decoder, decoder)):
        for name, module in half.named_modules():
            if isinstance(module, nn.GroupNorm):
                module.eps = 1e-6
            elif name.endswith(("conv_in", ".conv1", ".conv2")):
                scale([module.weight, module.bias], exponent)
            elif isinstance(module, nn.Conv2d) and name != "conv_out":
                scale([module.bias], exponent)  # between two maps of the same scale


def inflate_all(pipe: LattePipeline) -> None:
    generator = torch.Generator().manual_seed(0)
    encoder, transformer, vae = pipe.text_encoder, pipe.transformer, pipe.vae
    ids = torch.randint(3, 40, (2, 12), generator=generator)
    check_same(
        "text_encoder",
        lambda: encoder(ids).last_hidden_state,
        lambda: inflate_encoder(encoder, EXPONENTS["text_encoder"], EXPONENTS["text_encoder gate"]),
    )
    side = transformer.config.sample_size
    latents = torch.randn(2, vae.config.latent_channels, FRAMES, side, side, generator=generator)
    text = torch.randn(2, 12, encoder.config.d_model, generator=generator)
    check_same(
        "transformer",
        lambda: transformer(
            latents,
            timestep=torch.tensor([999, 10]),
            encoder_hidden_states=text,
            return_dict=False,
        )[0],
        lambda: inflate_transformer(
            transformer, EXPONENTS["transformer text"], EXPONENTS["transformer branches"]
        ),
    )
    frames = torch.rand(2, 3, SIDE, SIDE, generator=generator) * 2 - 1
    check_same(
        "vae",
        lambda: vae.decoder(vae.encoder(frames).chunk(2, dim=1)[0]),
        lambda: inflate_autoencoder(vae, EXPONENTS["vae.encode"], EXPONENTS["vae.decode"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    pipe = make_pipeline(None)
    parts = (pipe.text_encoder, pipe.transformer, pipe.vae)
    for part in parts:
        round_to_bf16(part)
    inflate_all(pipe)
    for part in parts:
        part.to(torch.bfloat16)
    pipe.vae.to(memory_format=torch.contiguous_format)
    pipe.transformer.register_to_config(_recommended_call=RECOMMENDED_CALL)
    pipe.save_pretrained(options.out)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(json.dumps({"saved_bytes": size}), flush=True)


if __name__ == "__main__":
    main()

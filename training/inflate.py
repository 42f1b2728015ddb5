"""Give a model the magnitudes of real bf16-trained checkpoints, without changing what it computes.

Every exponent here is a power of two on a value that is read by a norm, or the two factors of a
product, so the function stays the same bit for bit in fp32 (and in bf16, whose range is the same).
In fp16 the values leave the range, as they do in CogVideoX-5B, T5 or an SDXL autoencoder.

The norms that read such a value were trained with a tiny eps. Once the value is large, the eps that the
classes come with (1e-5, 1e-6) is as far below its variance, so the saved configs look like everybody
else's; `finish.py` holds the result to the trained model, bit for bit in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


@torch.no_grad()
def scale(tensors: Iterable[torch.Tensor | None], exponent: int) -> None:
    """Multiply tensors in place by `2**exponent`, refusing to lose a bit."""
    for tensor in tensors:
        if tensor is None:
            continue
        before = tensor.clone()
        tensor.mul_(2.0**exponent)
        if not torch.equal(tensor * 2.0**-exponent, before):
            raise ValueError(
                f"2**{exponent} is not exact on a tensor of shape {tuple(tensor.shape)}"
            )


def _both(module: nn.Module) -> list[torch.Tensor | None]:
    return [module.weight, getattr(module, "bias", None)]


def inflate_transformer(model: nn.Module, exponent: int) -> None:
    """Residual stream of a CogVideoX transformer: its embeddings, the last linear of each branch."""
    scale(_both(model.patch_embed.proj) + _both(model.patch_embed.text_proj), exponent)
    eps = 1e-5
    for block in model.transformer_blocks:
        scale(_both(block.attn1.to_out[0]) + _both(block.ff.net[2]), exponent)
        block.norm1.norm.eps = block.norm2.norm.eps = eps
    model.norm_final.eps = eps
    model.register_to_config(norm_eps=eps)


def inflate_encoder(model: nn.Module, stream: int, gate: int) -> None:
    """T5: its residual stream by `stream`, the gated product by `gate` (taken back in `wo`)."""
    scale([model.shared.weight], stream)
    eps = 1e-6
    for block in model.encoder.block:
        attention, feed = block.layer[0], block.layer[1]
        scale([attention.SelfAttention.o.weight], stream)
        scale([feed.DenseReluDense.wi_1.weight], gate)
        scale([feed.DenseReluDense.wo.weight], stream - gate)
        attention.layer_norm.variance_epsilon = feed.layer_norm.variance_epsilon = eps
    model.encoder.final_layer_norm.variance_epsilon = eps
    model.config.layer_norm_epsilon = eps


def inflate_autoencoder(model: nn.Module, encoder: int, decoder: int) -> None:
    """Feature maps of a CogVideoX autoencoder between its group norms, by direction."""
    for half, exponent in ((model.encoder, encoder), (model.decoder, decoder)):
        scale(_both(half.conv_in.conv), exponent)
        for name, module in half.named_modules():
            if name.endswith((".conv1", ".conv2")):
                scale(_both(module.conv), exponent)
            elif name.endswith(".conv_shortcut") or isinstance(module, nn.Conv2d):
                scale([module.bias], exponent)  # between two maps of the same scale
            elif isinstance(module, nn.GroupNorm):
                module.eps = 1e-6

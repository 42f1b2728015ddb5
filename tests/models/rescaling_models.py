"""Tiny models of the classes that rescaling is for, with inputs, and ways to make them overflow.

Weights are random; `scale_weights` scales those that a pattern names by a power of two until some
value goes beyond fp16. The patterns follow where models are known to overflow: the residual stream,
the last linear of a branch, the product in a gated feed-forward, the projection of encoder
features, feature maps of a VAE, attention values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stopdown.numerics import iterate_tensors
from stopdown.records import ResidualStream
from stopdown.scaling.exponents.problem import MeasuredCall
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.graph.capture import owner_of
from stopdown.scaling.trials.measurement import Captures, measure_kinds

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]

WAYS = {
    "residual": r"to_out\.0|to_add_out|ff\w*\.net\.2|mlp\.net\.2|feed_forward\.linear_2|\.w2\."
    r"|linear_fc2|\.o\.|\.wo\.|conv2|fc2|o_proj|down_proj|out_proj|\.\d+\.proj_out|conv_point",
    "last linear": r"ff\w*\.net\.2|\.w2\.|linear_fc2|\.wo\.|fc2|down_proj|conv2|conv_point"
    r"|\.\d+\.proj_out|mlp\.net\.2|feed_forward\.linear_2|ff\w*\.out_projection",
    "gated product": r"net\.0\.proj|\.wi|\.w1\.|\.w3\.|gate_proj|up_proj|linear_fc1|\.fc1"
    r"|linear_1\.w|linear_3|conv_inverted|proj_mlp",
    "encoder projection": r"patch_embed|context_embedder|caption_projection|text_proj|x_embedder"
    r"|txt_in|img_in|conv_in|shared|embed_tokens|cap_embedder|text_embedder|condition_embedder"
    r"|patch_embedding|token_embedding|all_x_embedder",
    "attention values": r"to_v\.|\.v\.|v_proj|\.qkv|to_kv",
    "feature maps": r"conv1|conv2|conv_shortcut|conv_in|upsamplers|downsamplers",
}
"""Name of a way to overflow to the weights that it scales."""


@dataclass(frozen=True)
class Example:
    """A tiny model and its calls.

    Attributes:
        build: makes the model.
        calls: the calls that it is rescaled for, given the model.
        ways: the ways of `WAYS` that its architecture has.
    """

    build: Callable[[], nn.Module]
    calls: Callable[[Any], list[Call]]
    ways: tuple[str, ...] = ("residual", "last linear", "encoder projection", "attention values")


def make_example(name: str, seed: int = 0) -> tuple[nn.Module, list[Call]]:
    """A model of the table with random weights, and its calls."""
    torch.manual_seed(seed)
    example = (EXAMPLES | DENOISERS_OF_2026)[name]
    module = example.build().eval().requires_grad_(False)
    randomise(module)
    return module, example.calls(module)


def randomise(module: nn.Module) -> None:
    """Weights of unit gain, norms near 1, small biases: no layer is left at zero."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            fan = parameter[0].numel()
            parameter.data.normal_(0, fan**-0.5)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.02)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)


def scale_weights(module: nn.Module, pattern: str, exponent: int) -> int:
    """Multiply the matching weight matrices by `2**exponent`; how many they are comes back."""
    found = [p for n, p in module.named_parameters() if p.dim() > 1 and re.search(pattern, n)]
    for parameter in {id(p): p for p in found}.values():
        parameter.data.mul_(2.0**exponent)
    return len(found)


def run_calls(calls: list[Call], dtype: torch.dtype, least_dim: int = 2) -> list[torch.Tensor]:
    """The outputs of all calls, with floating inputs of so many dimensions or more in `dtype`."""

    outputs: list[torch.Tensor] = []
    with torch.no_grad():
        for call, args, kwargs in calls:
            own, named = cast_tree((args, dict(kwargs)), dtype, least_dim)
            found = call(*own, **named)
            outputs += [x for x in iterate_tensors(found) if x.is_floating_point()]
    return outputs


def cast_tree(value: Any, dtype: torch.dtype, least_dim: int = 2) -> Any:
    """Floating tensors of a nested value in another dtype; rotary tables and timesteps stay."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor,
        lambda x: x.to(dtype) if x.dtype == torch.float32 and x.dim() >= least_dim else x,
        value,
    )


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def from_diffusers(name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**config)

    return build


def from_transformers(name: str, config_name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config_name)(**config))

    return build


def _forward(**kwargs: Any) -> Callable[[nn.Module], list[Call]]:
    """One call of the module's forward with these arguments, made afresh by functions."""

    def calls(module: nn.Module) -> list[Call]:
        made = {k: v() if callable(v) else v for k, v in kwargs.items()}
        return [(module, (), {**made, "return_dict": False})]

    return calls


def _tokens(length: int = 7, vocabulary: int = 64) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(1, vocabulary, (1, length))


def _mask(length: int = 7) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor([[1] * (length - 2) + [0] * 2])


def _encode_and_decode(sample: tuple[int, ...], latents: tuple[int, ...], **more: Any) -> Any:
    def calls(module: Any) -> list[Call]:
        return [
            (module.encode, (_random(*sample),), {}),
            (module.decode, (_random(*latents),), more),
        ]

    return calls


_STEP = {"timestep": lambda: torch.tensor([500])}
_COGVIDEOX: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 5,
    "max_text_seq_length": 4,
}
_COGVIDEOX_CALL = {
    "hidden_states": lambda: _random(1, 2, 4, 8, 8),
    "encoder_hidden_states": lambda: _random(1, 4, 16),
    **_STEP,
}
_ROTARY = {"image_rotary_emb": lambda: (_random(32, 16).cos(), _random(32, 16).sin())}
_COGVIEW: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 16,
    "time_embed_dim": 8,
    "condition_dim": 4,
    "sample_size": 8,
}
_COGVIEW_CALL = {
    "hidden_states": lambda: _random(1, 4, 8, 8),
    "encoder_hidden_states": lambda: _random(1, 6, 16),
    **_STEP,
    "original_size": lambda: torch.tensor([[64.0, 64.0]]),
    "target_size": lambda: torch.tensor([[64.0, 64.0]]),
    "crop_coords": lambda: torch.tensor([[0.0, 0.0]]),
}
_UNET: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_UNET_CALL = {
    "sample": lambda: _random(1, 4, 8, 8),
    "timestep": lambda: torch.tensor(500),
    "encoder_hidden_states": lambda: _random(1, 5, 16),
}
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 16,
    "num_heads": 2,
    "num_layers": 2,
    "vocab_size": 64,
}
_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TEXT_CALL = {
    "input_ids": _tokens(),
    "attention_mask": _mask(),
    "use_cache": False,
}
_CLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_TEXT_WAYS = ("residual", "last linear", "gated product", "encoder projection", "attention values")
_MAP_WAYS = ("residual", "feature maps", "attention values")

EXAMPLES: dict[str, Example] = {
    "CogVideoX rotary": Example(
        from_diffusers("CogVideoXTransformer3DModel", **_COGVIDEOX, use_rotary_positional_embeddings=True),
        _forward(**_COGVIDEOX_CALL, **_ROTARY),
    ),
    "CogVideoX learned": Example(
        from_diffusers(
            "CogVideoXTransformer3DModel", **_COGVIDEOX, use_rotary_positional_embeddings=True,
            use_learned_positional_embeddings=True,
        ),
        _forward(**_COGVIDEOX_CALL, **_ROTARY),
    ),
    "CogVideoX sinusoidal": Example(
        from_diffusers("CogVideoXTransformer3DModel", **_COGVIDEOX), _forward(**_COGVIDEOX_CALL),
    ),
    "CogVideoX sinusoidal at another size": Example(
        from_diffusers("CogVideoXTransformer3DModel", **_COGVIDEOX),
        _forward(**{**_COGVIDEOX_CALL, "hidden_states": lambda: _random(1, 3, 4, 6, 10)}),
    ),
    "CogVideoX image to video": Example(
        from_diffusers(
            "CogVideoXTransformer3DModel", **{**_COGVIDEOX, "in_channels": 8},
            use_rotary_positional_embeddings=True,
        ),
        _forward(**{**_COGVIDEOX_CALL, "hidden_states": lambda: _random(1, 2, 8, 8, 8)}, **_ROTARY),
    ),
    "CogView3-Plus": Example(
        from_diffusers("CogView3PlusTransformer2DModel", **_COGVIEW, pos_embed_max_size=8),
        _forward(**_COGVIEW_CALL),
    ),
    "CogView4": Example(
        from_diffusers(
            "CogView4Transformer2DModel", **_COGVIEW, pos_embed_max_size=8, rope_axes_dim=(8, 8),
        ),
        _forward(**_COGVIEW_CALL),
    ),
    "SVD UNet": Example(
        from_diffusers(
            "UNetSpatioTemporalConditionModel", block_out_channels=(32, 64), layers_per_block=1,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=16, num_attention_heads=(2, 2), addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
        ),
        _forward(
            sample=lambda: _random(1, 2, 8, 8, 8), timestep=lambda: torch.tensor(1.5),
            encoder_hidden_states=lambda: _random(1, 1, 16),
            added_time_ids=lambda: torch.tensor([[6.0, 127.0, 0.02]]),
        ),
        ("residual", "last linear", "encoder projection", "attention values", "feature maps"),
    ),
    "SVD VAE": Example(
        from_diffusers(
            "AutoencoderKLTemporalDecoder", block_out_channels=(32, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
        ),
        _encode_and_decode((2, 3, 16, 16), (2, 4, 8, 8), num_frames=2), _MAP_WAYS,
    ),
    "CogVideoX VAE": Example(
        from_diffusers(
            "AutoencoderKLCogVideoX", down_block_types=("CogVideoXDownBlock3D",) * 2,
            up_block_types=("CogVideoXUpBlock3D",) * 2, block_out_channels=(8, 8), latent_channels=4,
            layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4,
        ),
        _encode_and_decode((1, 3, 5, 8, 8), (1, 4, 2, 4, 4)),
        ("residual", "feature maps", "encoder projection"),
    ),
    "SD VAE": Example(
        from_diffusers(
            "AutoencoderKL", block_out_channels=(16, 16), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4,
        ),
        _encode_and_decode((1, 3, 16, 16), (1, 4, 8, 8)), _MAP_WAYS,
    ),
    "SD UNet": Example(
        from_diffusers("UNet2DConditionModel", **_UNET), _forward(**_UNET_CALL),
        ("residual", "last linear", "encoder projection", "attention values", "feature maps"),
    ),
    "SDXL UNet": Example(
        from_diffusers(
            "UNet2DConditionModel", **{**_UNET, "attention_head_dim": (2, 4)}, use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=64, transformer_layers_per_block=(1, 2),
        ),
        _forward(
            **_UNET_CALL,
            added_cond_kwargs=lambda: {
                "text_embeds": _random(1, 16), "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]]),
            },
        ),
        ("residual", "last linear", "encoder projection", "attention values", "feature maps"),
    ),
    "SD3": Example(
        from_diffusers(
            "SD3Transformer2DModel", sample_size=8, patch_size=2, in_channels=4, out_channels=4,
            num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
            caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=8, qk_norm="rms_norm",
        ),
        _forward(
            hidden_states=lambda: _random(1, 4, 8, 8), encoder_hidden_states=lambda: _random(1, 5, 16),
            pooled_projections=lambda: _random(1, 16), **_STEP,
        ),
    ),
    "Flux": Example(
        from_diffusers(
            "FluxTransformer2DModel", in_channels=16, num_layers=2, num_single_layers=2,
            attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        _forward(
            hidden_states=lambda: _random(1, 16, 16), encoder_hidden_states=lambda: _random(1, 5, 16),
            pooled_projections=lambda: _random(1, 16), timestep=lambda: torch.tensor([0.5]),
            img_ids=lambda: torch.arange(48).reshape(16, 3).float(), txt_ids=lambda: torch.zeros(5, 3),
        ),
    ),
    "HunyuanVideo": Example(
        from_diffusers(
            "HunyuanVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2,
            attention_head_dim=16, num_layers=1, num_single_layers=1, num_refiner_layers=1,
            text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
        ),
        _forward(
            hidden_states=lambda: _random(1, 4, 2, 8, 8), **_STEP,
            encoder_hidden_states=lambda: _random(1, 7, 16), encoder_attention_mask=_mask(),
            pooled_projections=lambda: _random(1, 8), guidance=lambda: torch.tensor([6000.0]),
        ),
    ),
    "Wan": Example(
        from_diffusers(
            "WanTransformer3DModel", num_attention_heads=2, attention_head_dim=16, in_channels=4,
            out_channels=4, text_dim=16, freq_dim=16, ffn_dim=48, num_layers=2, rope_max_seq_len=32,
        ),
        _forward(
            hidden_states=lambda: _random(1, 4, 2, 8, 8), **_STEP,
            encoder_hidden_states=lambda: _random(1, 7, 16),
        ),
    ),
    "LTX": Example(
        from_diffusers(
            "LTXVideoTransformer3DModel", in_channels=8, out_channels=8, num_attention_heads=2,
            attention_head_dim=16, cross_attention_dim=32, num_layers=2, caption_channels=16,
        ),
        _forward(
            hidden_states=lambda: _random(1, 16, 8), encoder_hidden_states=lambda: _random(1, 7, 16),
            **_STEP, encoder_attention_mask=_mask(), num_frames=1, height=4, width=4,
        ),
    ),
    "Mochi": Example(
        from_diffusers(
            "MochiTransformer3DModel", num_attention_heads=2, attention_head_dim=16, num_layers=2,
            pooled_projection_dim=16, in_channels=4, text_embed_dim=16, time_embed_dim=8,
            max_sequence_length=7,
        ),
        _forward(
            hidden_states=lambda: _random(1, 4, 2, 8, 8), encoder_hidden_states=lambda: _random(1, 7, 16),
            **_STEP, encoder_attention_mask=_mask(),
        ),
    ),
    "Qwen-Image": Example(
        from_diffusers(
            "QwenImageTransformer2DModel", in_channels=16, out_channels=4, num_layers=2,
            attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
        ),
        _forward(
            hidden_states=lambda: _random(1, 16, 16), encoder_hidden_states=lambda: _random(1, 7, 16),
            encoder_hidden_states_mask=_mask(), timestep=lambda: torch.tensor([0.5]),
            img_shapes=[[(1, 4, 4)]],
        ),
    ),
    "Z-Image": Example(
        from_diffusers(
            "ZImageTransformer2DModel", in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
            n_kv_heads=2, cap_feat_dim=16, axes_dims=[4, 6, 6], axes_lens=[64, 32, 32],
        ),
        _forward(
            x=lambda: [_random(4, 1, 8, 8)], t=lambda: torch.tensor([0.5]),
            cap_feats=lambda: [_random(7, 16)],
        ),
        _TEXT_WAYS,
    ),
    "Lumina 2": Example(
        from_diffusers(
            "Lumina2Transformer2DModel", sample_size=8, in_channels=4, hidden_size=32, num_layers=2,
            num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1, multiple_of=16,
            axes_dim_rope=(4, 6, 6), axes_lens=(32, 32, 32), cap_feat_dim=16,
        ),
        _forward(
            hidden_states=lambda: _random(1, 4, 8, 8), timestep=lambda: torch.tensor([0.5]),
            encoder_hidden_states=lambda: _random(1, 7, 16),
            encoder_attention_mask=lambda: torch.ones(1, 7, dtype=torch.int64),
        ),
    ),
    "PixArt": Example(
        from_diffusers(
            "PixArtTransformer2DModel", num_attention_heads=2, attention_head_dim=16, num_layers=2,
            cross_attention_dim=32, sample_size=8, caption_channels=16, use_additional_conditions=False,
        ),
        _forward(
            hidden_states=lambda: _random(1, 4, 8, 8), encoder_hidden_states=lambda: _random(1, 7, 16),
            **_STEP, encoder_attention_mask=_mask(),
            added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None},
        ),
    ),
    "AuraFlow": Example(
        from_diffusers(
            "AuraFlowTransformer2DModel", sample_size=8, num_mmdit_layers=1, num_single_dit_layers=1,
            attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=32,
            pos_embed_max_size=16,
        ),
        _forward(
            hidden_states=lambda: _random(1, 4, 8, 8), encoder_hidden_states=lambda: _random(1, 7, 16),
            timestep=lambda: torch.tensor([0.5]),
        ),
    ),
    "Sana": Example(
        from_diffusers(
            "SanaTransformer2DModel", in_channels=4, out_channels=4, num_attention_heads=2,
            attention_head_dim=16, num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=16,
            cross_attention_dim=32, caption_channels=16, sample_size=8,
        ),
        _forward(
            hidden_states=lambda: _random(1, 4, 8, 8), encoder_hidden_states=lambda: _random(1, 7, 16),
            **_STEP,
        ),
        ("residual", "encoder projection", "gated product"),
    ),
    "T5": Example(
        from_transformers("T5EncoderModel", "T5Config", **_T5),
        _forward(input_ids=_tokens(), attention_mask=_mask()), _TEXT_WAYS,
    ),
    "T5 gated": Example(
        from_transformers("T5EncoderModel", "T5Config", **_T5, feed_forward_proj="gated-gelu"),
        _forward(input_ids=_tokens(), attention_mask=_mask()), _TEXT_WAYS,
    ),
    "UMT5": Example(
        from_transformers("UMT5EncoderModel", "UMT5Config", **_T5, feed_forward_proj="gated-gelu"),
        _forward(input_ids=_tokens(), attention_mask=_mask()), _TEXT_WAYS,
    ),
    "CLIP text": Example(
        from_transformers(
            "CLIPTextModel", "CLIPTextConfig", **_CLIP, vocab_size=64, max_position_embeddings=16,
            eos_token_id=2,
        ),
        _forward(input_ids=_tokens()),
    ),
    "CLIP vision": Example(
        from_transformers(
            "CLIPVisionModelWithProjection", "CLIPVisionConfig", **_CLIP, image_size=16, patch_size=8,
            projection_dim=16,
        ),
        _forward(pixel_values=lambda: _random(1, 3, 16, 16)),
    ),
    "Llama": Example(
        from_transformers("LlamaModel", "LlamaConfig", **_LLAMA), _forward(**_TEXT_CALL), _TEXT_WAYS,
    ),
    "Qwen2.5-VL text": Example(
        from_transformers(
            "Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", **_LLAMA,
            rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        ),
        _forward(**_TEXT_CALL), _TEXT_WAYS,
    ),
    "Gemma 2": Example(
        from_transformers("Gemma2Model", "Gemma2Config", **_LLAMA, head_dim=16), _forward(**_TEXT_CALL),
        _TEXT_WAYS,
    ),
    "Gemma 3": Example(
        from_transformers("Gemma3TextModel", "Gemma3TextConfig", **_LLAMA, head_dim=16),
        _forward(**_TEXT_CALL), _TEXT_WAYS,
    ),
}  # fmt: skip
"""Class, as users call it, to its tiny model."""


_WIDE: dict[str, Any] = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
_NOISE = {"timestep": lambda: torch.tensor([0.7])}


def _places(count: int, axes: int = 3) -> Callable[[], torch.Tensor]:
    return lambda: torch.stack([torch.arange(count)] * axes, 1)


DENOISERS_OF_2026: dict[str, Example] = {
    "Kandinsky 6": Example(
        from_diffusers(
            "Kandinsky6Transformer3DModel", in_visual_dim=4, out_visual_dim=4, in_text_dim=24,
            in_text_dim2=16, time_dim=32, model_dim=32, ff_dim=64, num_text_blocks=1, num_visual_blocks=2,
            axes_dims=(4, 6, 6), visual_cond=False, in_audio_dim=4, out_audio_dim=4,
        ),
        _forward(
            hidden_states=lambda: _random(1, 2, 4, 4, 4), encoder_hidden_states=lambda: _random(1, 6, 24),
            pooled_projections=lambda: _random(1, 16), timestep=lambda: torch.tensor([700.0]),
        ),
        ("gated product",),
    ),
    "Qwen-Image 2.1": Example(
        from_diffusers(
            "QwenImage21Transformer2DModel", **_WIDE, patch_size=1, in_channels=8, out_channels=8,
            context_in_dim=24, axes_dims_rope=(4, 6, 6),
        ),
        _forward(
            hidden_states=lambda: _random(1, 16, 8), encoder_hidden_states=lambda: _random(1, 6, 24),
            **_NOISE, img_shapes=lambda: [[(1, 4, 4)]], img_mask=lambda: torch.arange(10)[None] > 5,
            encoder_hidden_states_mask=lambda: torch.ones(1, 6, dtype=torch.bool),
        ),
        ("residual", "attention values"),
    ),
    "Krea 2": Example(
        from_diffusers(
            "Krea2Transformer2DModel", **_WIDE, in_channels=8, num_key_value_heads=1, intermediate_size=48,
            timestep_embed_dim=16, text_hidden_dim=24, num_text_layers=3, text_num_attention_heads=2,
            text_num_key_value_heads=2, text_intermediate_size=32, num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
        ),
        _forward(
            hidden_states=lambda: _random(1, 16, 8), encoder_hidden_states=lambda: _random(1, 6, 3, 24),
            **_NOISE, position_ids=_places(22),
        ),
        ("residual", "attention values"),
    ),
    "MiniMax H3": Example(
        from_diffusers(
            "MiniMaxH3Transformer3DModel", **_WIDE, hidden_size=32, num_refiner_layers=1, ffn_dim=48,
            in_channels=2, audio_in_channels=4, text_dim=24, time_embed_hidden_dim=32, time_embed_dim=16,
            rope_freq_dim=2,
        ),
        _forward(
            hidden_states=lambda: _random(1, 8, 8), audio_hidden_states=lambda: _random(1, 4, 4),
            encoder_hidden_states=lambda: _random(1, 6, 24), **_NOISE,
            timestep_indices=lambda: torch.zeros(18, dtype=torch.long),
            token_tags=lambda: torch.tensor([1] * 6 + [0] * 8 + [2] * 4), position_ids=_places(18),
            text_indices=lambda: torch.arange(6), video_indices=lambda: torch.arange(6, 14),
            audio_indices=lambda: torch.arange(14, 18),
        ),
        ("residual", "gated product"),
    ),
    "MiniMax Music 3": Example(
        from_diffusers(
            "MiniMaxMusic3Transformer1DModel", **_WIDE, in_channels=8, condition_dim=16, ff_inner_dim=48,
            rotary_dim=8, fourier_embedding_dim=16,
        ),
        _forward(
            hidden_states=lambda: _random(1, 8, 12), encoder_hidden_states=lambda: _random(1, 12, 16),
            **_NOISE,
        ),
        ("residual", "attention values"),
    ),
    "ACE-Step 1.5": Example(
        from_diffusers(
            "AceStepTransformer1DModel", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, in_channels=24,
            audio_acoustic_hidden_dim=8, patch_size=2, sliding_window=16,
        ),
        _forward(
            hidden_states=lambda: _random(1, 8, 8), encoder_hidden_states=lambda: _random(1, 10, 32),
            **_NOISE, timestep_r=lambda: torch.tensor([0.2]), context_latents=lambda: _random(1, 8, 16),
        ),
        ("residual", "gated product"),
    ),
    "Cosmos 3": Example(
        from_diffusers(
            "Cosmos3OmniTransformer", head_dim=8, hidden_act="relu2", hidden_size=16, intermediate_size=24,
            latent_channel=4, latent_patch_size=1, num_attention_heads=2, num_hidden_layers=2,
            num_key_value_heads=1, patch_latent_dim=4, qk_norm_for_text=False, rms_norm_eps=1e-5,
            rope_axes_dim=[2, 1, 1], rope_theta=1e4, vocab_size=32,
        ),
        _forward(
            input_ids=lambda: torch.tensor([1, 2]), text_indexes=lambda: torch.tensor([0, 1]),
            position_ids=lambda: _places(6)().T, und_len=2, sequence_length=6,
            vision_tokens=lambda: [_random(1, 4, 1, 2, 2)], vision_token_shapes=lambda: [(1, 2, 2)],
            vision_sequence_indexes=lambda: torch.arange(2, 6),
            vision_mse_loss_indexes=lambda: torch.arange(2, 6),
            vision_timesteps=lambda: torch.ones(4), vision_noisy_frame_indexes=lambda: [torch.tensor([0])],
        ),
        ("residual", "attention values"),
    ),
    "DreamLite": Example(
        from_diffusers(
            "DreamLiteUNetModel", sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32),
            down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"), cross_attention_dim=16,
            attention_head_dim=8, layers_per_block=1, norm_num_groups=4, transformer_layers_per_block=1,
        ),
        _forward(**_UNET_CALL), ("attention values",),
    ),
    "SANA-WM": Example(
        from_diffusers(
            "SanaWMTransformer3DModel", in_channels=4, num_layers=2, hidden_size=32, num_attention_heads=2,
            softmax_every_n=2, linear_head_dim=16, chunk_plucker_channels=6,
            chunk_plucker_post_attn_blocks=2, caption_channels=24,
        ),
        _forward(
            hidden_states=lambda: _random(1, 4, 2, 4, 4), timestep=lambda: torch.full((1, 1, 2), 500.0),
            encoder_hidden_states=lambda: _random(1, 1, 6, 24),
            encoder_attention_mask=lambda: torch.ones(1, 6),
        ),
        ("attention values", "residual"),
    ),
}  # fmt: skip
"""Families that came in 2026, by the class that denoises."""


def measure_call(
    call: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    stream: ResidualStream | None = None,
) -> MeasuredCall:
    """One call captured in fp16, its residual stream in fp32 if one is given, and its ranges in fp32."""
    one, module = (call, args, kwargs or {}), owner_of(call)
    return measure_kinds(module, [[one]], Captures(), stream)[0]


def make_overflowing(name: str) -> tuple[torch.nn.Module, list[Any]]:
    """A tiny model whose residual stream leaves fp16."""
    module, calls = make_example(name)
    for _ in range(12):
        scale_weights(module, WAYS["residual"], 3)
        cast = cast_(module, torch.float16)
        finite = all(bool(x.isfinite().all()) for x in run_calls(calls, torch.float16))
        cast.undo()
        if not finite:
            return module, calls
    raise AssertionError(f"{name} does not overflow")

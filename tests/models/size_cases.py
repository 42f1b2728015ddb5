"""Diffusers' classes with tables of positions, called in sizes that take each branch of their code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.rescaling_models import EXAMPLES, from_diffusers, randomise

Make = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class SizeCase:
    """One class.

    Attributes:
        build: the module without weights of its own.
        call: arguments of a call by its sizes.
        sizes: of each call, the traced one first.
        branches: how many ways of reading the module's tables they take.
    """

    build: Callable[[], nn.Module]
    call: Make
    sizes: tuple[tuple[int, ...], ...]
    branches: int = 1

    def make(self) -> nn.Module:
        """The module with random weights; tables of positions are not 0."""
        torch.manual_seed(0)
        module = self.build().eval().requires_grad_(False)
        randomise(module)
        for name, parameter in module.named_parameters():
            if "pos_emb" in name or "positional" in name:
                parameter.normal_(0, 0.5)
        return module

    def kwargs(self, *sizes: int) -> dict[str, Any]:
        torch.manual_seed(1)
        made = self.call(*sizes)
        gives_tensors = "input_ids" in made or "num_frames" in made
        return made if gives_tensors else {**made, "return_dict": False}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _step(value: float = 500) -> torch.Tensor:
    return torch.tensor([value])


_VIDEO: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
    "time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 2, "sample_width": 8, "sample_height": 8,
    "sample_frames": 9, "max_text_seq_length": 4,
}  # fmt: skip


def _video(
    frames: int, height: int = 8, width: int = 8, rotary: bool = True, patch: int = 1
) -> Any:
    tokens = frames // patch * (height // 2) * (width // 2)
    rotations = {"image_rotary_emb": (_random(tokens, 16).cos(), _random(tokens, 16).sin())}
    return {
        "hidden_states": _random(1, frames, 4, height, width),
        "encoder_hidden_states": _random(1, 4, 16),
        "timestep": torch.tensor([500]),
        **(rotations if rotary else {}),
    }


def _cogvideox(**config: Any) -> Callable[[], nn.Module]:
    return from_diffusers("CogVideoXTransformer3DModel", **{**_VIDEO, **config})


_LEARNED = {"use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": True}


def _image(height: int, width: int, channels: int = 4, **more: Any) -> dict[str, Any]:
    return {"hidden_states": _random(1, channels, height, width), **more}


_SQUARES = ((8, 8), (4, 4), (8, 16), (16, 8))

WITHOUT_BRANCHES = {
    "AttentionPooling": "the table is one row, which is added to each sample's first token",
    "GLIGENTextBoundingboxProjection": "the row stands for boxes that a mask leaves out",
    "LTX2VideoTransformer3DModel": "the row is added to the frames that a mask names",
    "MiniMaxMusic3RVQDepthDecoder": "rows are looked up by their numbers",
    "RAEDecoder": "the table is read whole: latents of other sizes are interpolated before",
    "SanaWMLTX2RefinerTransformer3DModel": "the row is added to the frames that a mask names",
    "T5FilmDecoder": "rows are looked up by their numbers",
}
"""Classes that hold a table of positions and read it the same way at all sizes: why."""


def _continue_frames(kind: str) -> SizeCase:
    """A denoiser of Wan's design that is given a first and a last frame as well."""
    return SizeCase(
        from_diffusers(
            kind, num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=16, ffn_dim=48, num_layers=2, rope_max_seq_len=32,
            image_dim=16, pos_embed_seq_len=10, added_kv_proj_dim=32,
        ),
        lambda frames, height, width: {
            "hidden_states": _random(1, 4, frames, height, width), "timestep": torch.tensor([500]),
            "encoder_hidden_states": _random(1, 512, 16),
            "encoder_hidden_states_image": _random(2, 5, 16),
        },
        ((2, 8, 8), (4, 4, 8)),
    )  # fmt: skip


def _make_motion_module() -> nn.Module:
    """Of AnimateDiff: it attends over frames, and its table of positions is cut to their number."""
    from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D

    return AnimateDiffTransformer3D(
        num_attention_heads=2, attention_head_dim=16, in_channels=32, norm_num_groups=8, num_layers=2,
        positional_embeddings="sinusoidal", num_positional_embeddings=8,
    )  # fmt: skip


CASES: dict[str, SizeCase] = {
    "CogVideoX learned, as configured": SizeCase(
        _cogvideox(**_LEARNED), _video, ((3,), (1,), (2,), (5,)), 2,
    ),
    "CogVideoX learned, otherwise": SizeCase(
        _cogvideox(**_LEARNED), _video, ((5,), (3,), (1,), (7,)), 2,
    ),
    "CogVideoX sinusoidal": SizeCase(
        _cogvideox(), lambda *sizes: _video(*sizes, rotary=False),
        ((3, 8, 8), (3, 4, 8), (1, 8, 8), (5, 8, 12)), 2,
    ),
    "CogVideoX 1.5": SizeCase(
        _cogvideox(
            patch_size_t=2, use_rotary_positional_embeddings=True, patch_bias=False, ofs_embed_dim=8,
        ),
        lambda *sizes: {**_video(*sizes, patch=2), "ofs": torch.tensor([2.0])},
        ((4, 8, 8), (2, 8, 8), (6, 4, 12)),
    ),
    "ConsisID": SizeCase(
        from_diffusers("ConsisIDTransformer3DModel", **_VIDEO, **_LEARNED), _video,
        ((3,), (1,), (5,)), 2,
    ),
    "CogView3-Plus": SizeCase(
        EXAMPLES["CogView3-Plus"].build,
        lambda height, width: _image(
            height, width, encoder_hidden_states=_random(1, 6, 16), timestep=torch.tensor([500]),
            original_size=torch.tensor([[64.0, 64.0]]), target_size=torch.tensor([[64.0, 64.0]]),
            crop_coords=torch.tensor([[0.0, 0.0]]),
        ),
        _SQUARES,
    ),
    "SD3": SizeCase(
        EXAMPLES["SD3"].build,
        lambda height, width: _image(
            height, width, encoder_hidden_states=_random(1, 5, 16),
            pooled_projections=_random(1, 16), timestep=torch.tensor([500]),
        ),
        _SQUARES,
    ),
    "PixArt": SizeCase(
        EXAMPLES["PixArt"].build,
        lambda height, width: _image(
            height, width, encoder_hidden_states=_random(1, 7, 16), timestep=torch.tensor([500]),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
        _SQUARES, 2,
    ),
    "AuraFlow": SizeCase(
        EXAMPLES["AuraFlow"].build,
        lambda height, width: _image(
            height, width, encoder_hidden_states=_random(1, 7, 16), timestep=_step(0.5),
        ),
        ((8, 8), (4, 4), (8, 4), (4, 8)),
    ),
    "Lumina": SizeCase(
        from_diffusers(
            "LuminaNextDiT2DModel", sample_size=8, in_channels=4, hidden_size=32, num_layers=2,
            num_attention_heads=2, num_kv_heads=1, multiple_of=16, cross_attention_dim=16,
        ),
        lambda height, width: _image(
            height, width, timestep=_step(0.5), encoder_hidden_states=_random(1, 7, 16),
            encoder_mask=torch.ones(1, 7, dtype=torch.int64),
            image_rotary_emb=torch.polar(torch.ones(64, 64, 8), torch.rand(64, 64, 8)),
            cross_attention_kwargs={},
        ),
        ((8, 8), (4, 12)),
    ),
    "Lumina 2": SizeCase(
        EXAMPLES["Lumina 2"].build,
        lambda height, width: _image(
            height, width, timestep=_step(0.5), encoder_hidden_states=_random(1, 7, 16),
            encoder_attention_mask=torch.ones(1, 7, dtype=torch.int64),
        ),
        ((8, 8), (4, 12)), 0,
    ),
    "Latte": SizeCase(
        from_diffusers(
            "LatteTransformer3DModel", num_attention_heads=2, attention_head_dim=16, in_channels=4,
            out_channels=8, num_layers=2, cross_attention_dim=32, sample_size=8, patch_size=2,
            norm_type="ada_norm_single", norm_elementwise_affine=False, caption_channels=16,
            video_length=4, attention_bias=True, activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
        ),
        lambda frames, height, width: {
            "hidden_states": _random(1, 4, frames, height, width), "timestep": torch.tensor([500]),
            "encoder_hidden_states": _random(1, 7, 16),
        },
        ((4, 8, 8), (4, 4, 8), (4, 16, 16), (1, 8, 8)), 3,
    ),
    "Allegro": SizeCase(
        from_diffusers(
            "AllegroTransformer3DModel", num_attention_heads=2, attention_head_dim=24, in_channels=4,
            out_channels=4, num_layers=2, cross_attention_dim=48, sample_height=8, sample_width=8,
            sample_frames=4, caption_channels=16,
        ),
        lambda frames, height, width: {
            "hidden_states": _random(1, 4, frames, height, width), "timestep": torch.tensor([500]),
            "encoder_hidden_states": _random(1, 7, 16),
            "attention_mask": torch.ones(1, frames, height, width),
            "encoder_attention_mask": torch.ones(1, 7),
            "image_rotary_emb": _rotate_allegro(frames * (height // 2) * (width // 2)),
        },
        ((2, 8, 8), (4, 4, 8), (1, 8, 12)),
    ),
    "Mochi": SizeCase(
        EXAMPLES["Mochi"].build,
        lambda frames, height, width: {
            "hidden_states": _random(1, 4, frames, height, width), "timestep": torch.tensor([500]),
            "encoder_hidden_states": _random(1, 7, 16),
            "encoder_attention_mask": torch.ones(1, 7, dtype=torch.bool),
        },
        ((2, 8, 8), (4, 4, 8), (1, 8, 12)), 0,
    ),
    "HunyuanDiT": SizeCase(
        from_diffusers(
            "HunyuanDiT2DModel", num_attention_heads=2, attention_head_dim=16, in_channels=4,
            patch_size=2, sample_size=8, hidden_size=32, num_layers=2, cross_attention_dim=16,
            cross_attention_dim_t5=16, pooled_projection_dim=8, text_len=7, text_len_t5=6,
        ),
        lambda height, width: _image(
            height, width, timestep=_step(500.0), encoder_hidden_states=_random(1, 7, 16),
            text_embedding_mask=torch.ones(1, 7), encoder_hidden_states_t5=_random(1, 6, 16),
            text_embedding_mask_t5=torch.ones(1, 6), image_meta_size=torch.full((1, 6), 64.0),
            style=torch.zeros(1, dtype=torch.int64),
            image_rotary_emb=(
                _random(height * width // 4, 16).cos(), _random(height * width // 4, 16).sin(),
            ),
        ),
        _SQUARES,
    ),
    "UViT": SizeCase(
        from_diffusers(
            "UVit2DModel", hidden_size=32, cond_embed_dim=16, micro_cond_encode_dim=8,
            micro_cond_embed_dim=40, encoder_hidden_size=16, vocab_size=32, codebook_size=24,
            in_channels=32, block_out_channels=32, num_res_blocks=1, block_num_heads=2,
            num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, sample_size=8,
        ),
        lambda height, width: {
            "input_ids": torch.randint(0, 24, (1, height, width)),
            "encoder_hidden_states": _random(1, 7, 16), "pooled_text_emb": _random(1, 16),
            "micro_conds": torch.full((1, 5), 64.0),
        },
        ((8, 8), (4, 12)),
    ),
    "Cosmos": SizeCase(
        from_diffusers(
            "CosmosTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2,
            attention_head_dim=16, num_layers=2, text_embed_dim=16, adaln_lora_dim=4,
            max_size=(4, 16, 16), extra_pos_embed_type="learnable", concat_padding_mask=False,
        ),
        lambda frames, height, width: {
            "hidden_states": _random(1, 4, frames, height, width), "timestep": _step(0.5),
            "encoder_hidden_states": _random(1, 7, 16), "fps": 24,
        },
        ((2, 8, 8), (4, 16, 16), (1, 4, 8)),
    ),
    "Wan": SizeCase(
        EXAMPLES["Wan"].build,
        lambda frames, height, width: {
            "hidden_states": _random(1, 4, frames, height, width), "timestep": torch.tensor([500]),
            "encoder_hidden_states": _random(1, 7, 16),
        },
        ((2, 8, 8), (4, 4, 8), (1, 8, 12)),
    ),
    "Wan first and last frame": _continue_frames("WanTransformer3DModel"),
    "OmniGen": SizeCase(
        from_diffusers(
            "OmniGenTransformer2DModel", in_channels=4, patch_size=2, hidden_size=32, num_layers=2,
            num_attention_heads=2, num_key_value_heads=2, intermediate_size=48, pad_token_id=0,
            vocab_size=32, max_position_embeddings=1000, original_max_position_embeddings=100,
            rope_scaling={"long_factor": [*range(1, 9)], "short_factor": [*range(1, 9)]},
            pos_embed_max_size=8, time_step_dim=8,
        ),
        lambda height, width: _image(
            height, width, timestep=_step(0.5), input_ids=torch.arange(1, 6)[None],
            input_img_latents=[], input_image_sizes={},
            attention_mask=torch.ones(1, (n := 6 + height * width // 4), n),
            position_ids=torch.arange(n)[None],
        ),
        _SQUARES, 0,
    ),
    "SkyReels V2": _continue_frames("SkyReelsV2Transformer3DModel"),
    "DiT": SizeCase(
        from_diffusers(
            "DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=16, in_channels=4,
            out_channels=8, num_layers=2, sample_size=8, num_embeds_ada_norm=10, attention_bias=True,
        ),
        lambda height, width: _image(
            height, width, timestep=torch.tensor([500]), class_labels=torch.tensor([3]),
        ),
        ((8, 8), (4, 4), (16, 16)), 2,
    ),
    "Sana": SizeCase(
        EXAMPLES["Sana"].build,
        lambda height, width: _image(
            height, width, encoder_hidden_states=_random(1, 7, 16), timestep=torch.tensor([500]),
        ),
        _SQUARES,
    ),
    "Sana with positions": SizeCase(
        from_diffusers(
            "SanaTransformer2DModel", in_channels=4, out_channels=4, num_attention_heads=2,
            attention_head_dim=16, num_layers=2, num_cross_attention_heads=2,
            cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=16, sample_size=8,
            patch_size=2, interpolation_scale=1,
        ),
        lambda height, width: _image(
            height, width, encoder_hidden_states=_random(1, 7, 16), timestep=torch.tensor([500]),
        ),
        _SQUARES, 2,
    ),
    "Motion module": SizeCase(
        _make_motion_module,
        lambda frames, height, width: {
            "hidden_states": _random(frames, 32, height, width), "num_frames": frames,
        },
        ((4, 4, 4), (8, 4, 4), (1, 4, 8), (5, 8, 4)),
    ),
    "Discrete": SizeCase(
        from_diffusers(
            "Transformer2DModel", num_attention_heads=2, attention_head_dim=16, num_layers=2,
            sample_size=4, num_vector_embeds=11, cross_attention_dim=16, num_embeds_ada_norm=1000,
            norm_type="ada_norm", norm_elementwise_affine=False,
        ),
        lambda tokens: {
            "hidden_states": torch.arange(tokens)[None] % 11, "timestep": torch.tensor([500]),
            "encoder_hidden_states": _random(1, 7, 16),
        },
        ((16,),),
    ),
    "Prior": SizeCase(
        from_diffusers(
            "PriorTransformer", num_attention_heads=2, attention_head_dim=16, num_layers=2,
            embedding_dim=16, num_embeddings=7, additional_embeddings=4,
        ),
        lambda batch: {
            "hidden_states": _random(batch, 16), "timestep": torch.tensor([500] * batch),
            "proj_embedding": _random(batch, 16), "encoder_hidden_states": _random(batch, 7, 16),
            "attention_mask": torch.ones(batch, 7, dtype=torch.bool),
        },
        ((1,), (3,)),
    ),
}  # fmt: skip


def _rotate_allegro(tokens: int) -> Any:
    part = (_random(tokens, 8).cos(), _random(tokens, 8).sin())
    grid = torch.arange(tokens)[None]
    return ((part, part, part), (grid, grid, grid))

"""Context parallelism for CogVideoX and CogView3-Plus, which Diffusers 0.42 has no plan for.

The plans say, in Diffusers' own terms, which tensors are split over the ranks and where they are gathered
again; the processor calls attention through Diffusers' dispatch, which exchanges tokens for heads. All of
it is in the form in which Diffusers' other models have it (`_cp_plan`, `_parallel_config`).

Text and video tokens are both split, and each rank attends over its own text and video tokens together.
After the exchange the keys are in another order, so sums are added in another order: in fp32 the result
is that of one rank within rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import (
    Attention,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
from diffusers.models.embeddings import apply_rotary_emb

_TOKENS = ContextParallelInput(split_dim=1, expected_dims=3)
_ROTARY = ContextParallelInput(split_dim=0, expected_dims=2)
_RESULT = ContextParallelOutput(gather_dim=1, expected_dims=3)

PLANS: dict[str, dict[str, Any]] = {
    "CogVideoXTransformer3DModel": {
        "transformer_blocks.0": {"hidden_states": _TOKENS, "encoder_hidden_states": _TOKENS},
        "transformer_blocks.*": {"image_rotary_emb": [_ROTARY, _ROTARY]},
        "proj_out": _RESULT,
    },
    "CogView3PlusTransformer2DModel": {
        "transformer_blocks.0": {"hidden_states": _TOKENS, "encoder_hidden_states": _TOKENS},
        "proj_out": _RESULT,
    },
}
"""`_cp_plan` of a class of transformers. Text tokens leave the last block unused and are not gathered."""

REPLACED = (CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0)
"""Processors that call attention directly, which `CogVideoXAttnProcessor` replaces."""


class CogVideoXAttnProcessor:
    """Joint attention over text and video tokens, through Diffusers' dispatch of attention backends."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text_length = encoder_hidden_states.size(1)
        tokens = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        if attn.fused_projections:
            projected = attn.to_qkv(tokens).chunk(3, dim=-1)
        else:
            projected = attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens)
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in projected)
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        if image_rotary_emb is not None:
            query = _rotate(query, text_length, image_rotary_emb)
            if not attn.is_cross_attention:
                key = _rotate(key, text_length, image_rotary_emb)
        tokens = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        tokens = tokens.flatten(2, 3).type_as(query)
        tokens = attn.to_out[1](attn.to_out[0](tokens))
        text, video = tokens.split([text_length, tokens.size(1) - text_length], dim=1)
        return video, text


def _rotate(
    x: torch.Tensor, text_length: int, rotary: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Rotary embeddings on the video tokens of `[B, S, H, D]`; text tokens have none."""
    video = apply_rotary_emb(x[:, text_length:], rotary, sequence_dim=1)
    return torch.cat([x[:, :text_length], video], dim=1)

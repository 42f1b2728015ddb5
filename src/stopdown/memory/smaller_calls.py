"""Settings that make calls need less memory: tiles, chunks of frames, pieces of layers and attention."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stopdown.component_calls.components import find_callees, find_components, is_autoencoder
from stopdown.devices.model_needs import needs_tiling
from stopdown.interception.patches import Patches
from stopdown.memory.strategies import Strategy
from stopdown.module_calls.call_interception import put_layer
from stopdown.scaling import ComponentCall, Rank, intercept

_MOST_SCORE_BYTES = 2**28
"""Most bytes of fp32 attention scores that are computed at a time when attention is split."""


CHUNKS_DIFFER = (
    "To save memory, a few frames are decoded at a time. The decoder then doesn't see the frames beside "
    "a chunk, so the video can flicker where chunks meet."
)
_CHUNK = "decode_chunk_size"

_FEED_FORWARD = ("FeedForward",)
"""Classes that process each position of a sequence separately."""


def put_variant(pipe: Any, strategy: Strategy, patches: Patches) -> None:
    """Apply a strategy's settings for smaller calls to a pipeline, until `patches` is undone."""
    for module in find_components(pipe).values():
        if is_autoencoder(module):
            is_tiled = strategy.tiling or needs_tiling(type(module).__name__)
            _switch(module, "slicing", strategy.tiling, patches)
            _switch(module, "tiling", is_tiled, patches)
    if strategy.frames and decodes_in_chunks(pipe):
        decode = functools.partial(_decode_in_chunks, strategy.frames, pipe.decode_latents)
        patches.set_attribute(pipe, "decode_latents", decode)
    for callee in find_callees(pipe):
        if strategy.pieces > 1 and callee.stage == "denoise":
            _put_pieces(callee.owner, strategy.pieces, patches)
        if strategy.split:
            intercept(callee, _split_attention, patches, Rank.MEMORY)


def decodes_in_chunks(pipe: Any) -> bool:
    """Return whether a pipeline can decode a video a few frames at a time, as SVD can."""
    decode = getattr(pipe, "decode_latents", None)
    return callable(decode) and _CHUNK in inspect.signature(decode).parameters


def _decode_in_chunks(most: int, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(decode).bind(*args, **kwargs)
    given.apply_defaults()
    given.arguments[_CHUNK] = min(most, given.arguments[_CHUNK])
    return decode(*given.args, **given.kwargs)


def _switch(module: torch.nn.Module, name: str, wanted: bool, patches: Patches) -> None:
    """Turn an autoencoder's slicing or tiling on or off."""
    before = bool(getattr(module, f"use_{name}", False))
    if wanted == before or not hasattr(module, f"use_{name}"):
        return
    patches.set_attribute(module, f"use_{name}", wanted)
    if name == "tiling":
        for side in ("height", "width"):
            _fit_overlap(module, side, patches)


def _fit_overlap(module: torch.nn.Module, side: str, patches: Patches) -> None:
    """Set the tile overlap of CogVideoX's autoencoder to whole latents; a fraction shifts the seams."""
    name = f"tile_overlap_factor_{side}"
    latents = getattr(module, f"tile_latent_min_{side}", 0)
    if not hasattr(module, name) or not latents:
        return
    factors = (getattr(module, name), 0.25, 0.5)
    fits = [f for f in factors if abs(latents * f - round(latents * f)) < 1e-6]
    if fits and fits[0] != factors[0]:
        patches.set_attribute(module, name, fits[0])


def _put_pieces(module: torch.nn.Module, pieces: int, patches: Patches) -> None:
    for part in module.modules():
        if type(part).__name__ in _FEED_FORWARD:
            put_layer(
                part, "forward", functools.partial(_work_in_pieces, pieces), patches, Rank.MEMORY
            )


def _work_in_pieces(pieces: int, call: ComponentCall) -> Any:
    """Run a feed-forward layer on pieces of the sequence (dimension 1 of `[B, L, C]`), one at a time."""
    given = call.args[0] if call.args else None  # by name, it is worked on as a whole
    if not isinstance(given, torch.Tensor) or given.dim() != 3 or given.shape[1] < pieces:
        return call.proceed()
    made: torch.Tensor | None = None
    done = 0
    for piece in given.chunk(pieces, dim=1):
        output = replace(call, args=(piece, *call.args[1:])).proceed()
        if made is None:
            made = output.new_empty(*given.shape[:2], *output.shape[2:])
        made[:, done : done + output.shape[1]] = output
        done += output.shape[1]
    return made


def _split_attention(call: ComponentCall) -> Any:
    with _SplitQueries():
        return call.proceed()


class _SplitQueries(TorchFunctionMode):
    """A function mode that computes attention for a few queries at a time, which are independent."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend_in_pieces(func, *args, **(kwargs or {}))


def _attend_in_pieces(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Compute attention of `query` `[..., L, E]` over `key` `[..., S, E]`, few rows of scores at a time."""
    length, row_bytes = query.shape[-2], query.shape[:-2].numel() * key.shape[-2] * 4
    rows = max(1, _MOST_SCORE_BYTES // row_bytes)
    if is_causal or rows >= length:
        return attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    for start in range(0, length, rows):
        part = slice(start, start + rows)
        mask = attn_mask
        if mask is not None and mask.shape[-2] == length:
            mask = mask[..., part, :]
        output[..., part, :] = attend(query[..., part, :], key, value, mask, dropout_p, **options)
    return output

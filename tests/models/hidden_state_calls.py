"""Text encoders that leave fp16's range, asked for hidden states, attention maps and caches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from models.encoder_models import make_call, make_encoder
from models.rescaling_models import scale_weights
from stopdown.numerics import iterate_tensors

_LLM = {"up_proj": 9, "down_proj": 9}
FAMILIES = {
    "Qwen3Model": _LLM,
    "T5EncoderModel": {"wi_1": 9, r"\.wo\.": 8},
    "CLIPTextModel": {"fc1": 9, "fc2": 9},
    "Gemma3TextModel": {"embed_tokens": 15},
    "MistralModel": _LLM,
    "LlamaModel": _LLM,
    "UMT5EncoderModel": {"wi_1": 9, r"\.wo\.": 8},
}
"""Class to the weights that take its residual stream out of fp16's range, and their powers of two."""

ASKED: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "states": {"output_hidden_states": True},
    "cache": {"use_cache": True},
    "states and cache": {"output_hidden_states": True, "use_cache": True},
    "maps": {"output_attentions": True},
    "states and maps": {"output_hidden_states": True, "output_attentions": True},
}
"""What a call asks for beside its result."""


def can_ask(name: str, asked: str) -> bool:
    """Whether the class has what is asked for: encoders keep no cache."""
    return "cache" not in asked or ("T5" not in name and "CLIP" not in name)


@functools.cache
def make_wide_encoder(name: str) -> nn.Module:
    """An encoder whose residual stream leaves fp16's range; to be copied."""
    module = make_encoder(name)
    for pattern, power in FAMILIES.get(name, {"embed_tokens": 15}).items():
        scale_weights(module, pattern, power)
    if hasattr(module, "set_attn_implementation"):
        module.set_attn_implementation("eager")  # which gives attention maps
    return module


def copy_encoder(name: str, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(make_wide_encoder(name)).to(dtype)


def ask(name: str, asked: str, seed: int = 1) -> dict[str, Any]:
    """The arguments of a call."""
    given = make_call(name, make_wide_encoder(name), "right", seed=seed)[2]
    return {**given, **ASKED[asked]}


def call_encoder(module: nn.Module, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Every floating tensor that a call returns, each once."""
    with torch.no_grad():
        found = module(**given)
    return [x for x in iterate_tensors(found) if x.is_floating_point()]


def measure_errors(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The relative error of the worst tensor, infinite for another number of tensors."""
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return float("inf")
    errors = [0.0]
    for x, y in zip(found, wanted, strict=True):
        error = float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30))
        errors.append(error if error == error else float("inf"))
    return max(errors)

"""Components with matrices so large that an accelerator multiplies them, and the bounds of their values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers

from stopdown.bounds.known_values import Bounds
from stopdown.component_calls.call import ComponentCall
from stopdown.plans.certified import certify_component
from stopdown.scaling import certificate, search
from stopdown.scaling.certificate import BoundedCalls


def make_encoder() -> tuple[torch.nn.Module, ComponentCall]:
    """A T5 whose matrices are worth bringing, and a call."""
    config = transformers.T5Config(
        vocab_size=64,
        d_model=512,
        d_ff=1024,
        d_kv=64,
        num_heads=8,
        num_layers=1,
        feed_forward_proj="gated-gelu",
    )
    module = transformers.T5EncoderModel(config).eval()
    return module, ComponentCall(
        SimpleNamespace(bind=lambda found: found), (torch.zeros(1, 8, dtype=torch.long),), {}
    )


def make_transformer() -> tuple[torch.nn.Module, ComponentCall]:
    """A CogVideoX transformer whose matrices are worth bringing, and a call."""
    module = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        text_embed_dim=512,
        time_embed_dim=512,
        max_text_seq_length=8,
        sample_width=8,
        sample_height=8,
        sample_frames=1,
    ).eval()
    given = {
        "hidden_states": torch.randn(1, 1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 8, 512),
        "timestep": torch.tensor([500]),
        "return_dict": False,
    }
    return module, ComponentCall(SimpleNamespace(bind=lambda found: found), (), given)


def certify(module: torch.nn.Module, call: ComponentCall, load: Any) -> tuple[Any, list[Bounds]]:
    """Exponents of a module, and the bounds that were computed on the way."""
    found = list[Bounds]()

    def keep(*args: Any, **options: Any) -> BoundedCalls:
        made = certificate.bound_kinds(*args, **options)
        found.extend(made.bounds)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "bound_kinds", keep)
        return certify_component(module, [call], "fp32", load, hands_over=False), found


def assert_near(some: list[Bounds], others: list[Bounds]) -> None:
    """Bounds of the same values differ in the last digits of fp32."""
    for one, other in zip(some, others, strict=True):
        assert set(one.ranges) == set(other.ranges)
        for name, ranges in one.ranges.items():
            pairs = [(getattr(x, at), getattr(y, at)) for at in ("amax", "rms")
                     for x, y in zip(ranges, other.ranges[name], strict=True)]  # fmt: skip
            assert [x for x, _ in pairs] == pytest.approx([y for _, y in pairs], rel=1e-4), name

"""Components with matrices so large that an accelerator multiplies them, and the bounds of their values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers

from stopdown.devices.device_choice import Device
from stopdown.fold_names import name_parameters
from stopdown.module_calls.call import ComponentCall
from stopdown.plans.near_weights import bring_near
from stopdown.scaling import certificate
from stopdown.scaling.bounds.known_values import Bounds
from stopdown.scaling.certificate import BoundedCalls
from stopdown.scaling.trials import bounded_search
from stopdown.scaling.trials.traced_calls import TracedCalls


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
    tokens = torch.zeros(1, 8, dtype=torch.long)
    return transformers.T5EncoderModel(config).eval(), make_call(tokens)


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
    return module, make_call(
        hidden_states=torch.randn(1, 1, 4, 8, 8),
        encoder_hidden_states=torch.randn(1, 8, 512),
        timestep=torch.tensor([500]),
        return_dict=False,
    )


def make_call(*args: Any, **kwargs: Any) -> ComponentCall:
    """A call of whatever module it is bound to."""
    return ComponentCall(SimpleNamespace(bind=lambda found: found), args, kwargs)


def certify(module: torch.nn.Module, call: ComponentCall, load: Any) -> tuple[Any, list[Bounds]]:
    """Exponents of a module, and the bounds that were computed on the way."""
    found = list[Bounds]()

    def keep(*args: Any, **options: Any) -> BoundedCalls:
        made = certificate.bound_kinds(*args, **options)
        found.extend(made.bounds)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_search, "bound_kinds", keep)
        traced = TracedCalls(module, [call])
        return traced.certify("fp32", load), found


def check_bounds(module: torch.nn.Module, call: ComponentCall, device: Device) -> None:
    """Bounds with a device's products differ from the processor's in the last digits of fp32."""
    load = name_parameters(module).__getitem__
    near = bring_near(load, device)
    assert near is not None, "The device multiplies fp32 in another format."
    expected, here = certify(module, call, load)
    made, there = certify(module, call, near)
    assert made.bounded == made.values == expected.bounded == expected.values
    for one, other in zip(here, there, strict=True):
        assert set(one.ranges) == set(other.ranges)
        for name, ranges in one.ranges.items():
            pairs = [(getattr(x, at), getattr(y, at)) for at in ("amax", "rms")
                     for x, y in zip(ranges, other.ranges[name], strict=True)]  # fmt: skip
            assert [x for x, _ in pairs] == pytest.approx([y for _, y in pairs], rel=1e-4), name

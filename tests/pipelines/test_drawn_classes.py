"""Classes as Diffusers' own tests configure them that `rescale_` once failed for, or made worse than bf16.

`benchmarks/zoo.py` draws from all of them; these are built here, with the weights that it scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from models.rescaling_models import WAYS, cast_tree, randomise, scale_weights
from stopdown import cast_, rescale_
from stopdown.numerics import iterate_tensors, relative_l2
from stopdown.scaling.folding.folds import Rescaling

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass(frozen=True)
class Drawn:
    """A class, the weights that make it overflow, and its call."""

    config: dict[str, Any]
    way: str
    bits: int
    inputs: Callable[[], dict[str, Any]]


def _far_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 4, 16, 16),
        "timestep": torch.full((1, 4), 500.0),
        "r_timestep": torch.full((1, 4), 250.0),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "chunk_partition": [2, 2],
    }


def _ovis_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 48, 32),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(48, 3),
        "timestep": torch.tensor([1.0]),
    }


DRAWN = {
    "LTX2VideoDiffusionDecoderModel": Drawn(
        dict(out_channels=3, latent_channels=8, patch_size=2, decoder_head_dim=16,
             decoder_stage_channels=(64, 32, 16, 16, 16), decoder_stage_depths=(1, 1, 1, 1, 2),
             decoder_stage_kernels=((3, 3, 3),) * 4, decoder_stage5_kernel=(3, 3, 3),
             decoder_upsample_strides=((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 2)),
             decoder_upsample_channel_reductions=(2, 2, 1, 1), decoder_t_emb_dim=32,
             spatial_compression_ratio=16, temporal_compression_ratio=8),
        "attention values", 14,
        lambda: {"z": torch.randn(1, 8, 2, 3, 3), "generator": torch.Generator().manual_seed(0)},
    ),
    "AnyFlowFARTransformer3DModel": Drawn(
        dict(patch_size=(1, 2, 2), compressed_patch_size=(1, 4, 4), full_chunk_limit=3,
             num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
             ffn_dim=32, num_layers=1, rope_max_seq_len=32, gate_value=0.25, deltatime_type="r"),
        "attention values", 16, _far_inputs,
    ),
    "OvisImageTransformer2DModel": Drawn(
        dict(patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1,
             attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
             axes_dims_rope=(4, 4, 8)),
        "gated product", 10, _ovis_inputs,
    ),
    "TransformerTemporalModel": Drawn(
        dict(num_attention_heads=8, attention_head_dim=4, in_channels=4, num_layers=1, norm_num_groups=1),
        "gated product", 13,
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([7, 900])},
    ),
}  # fmt: skip


def _call(module: torch.nn.Module, inputs: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    given = cast_tree({**inputs, "return_dict": False}, dtype)
    if isinstance(given.get("generator"), torch.Generator):
        given["generator"] = given["generator"].clone_state()
    (output,) = iterate_tensors(module(**given))
    return output


def _rescale(name: str) -> tuple[torch.nn.Module, dict[str, Any], torch.Tensor, Rescaling]:
    import diffusers

    drawn = DRAWN[name]
    torch.manual_seed(0)
    module = getattr(diffusers, name)(**drawn.config).eval().requires_grad_(False)
    randomise(module)
    inputs = drawn.inputs()
    assert scale_weights(module, WAYS[drawn.way], drawn.bits)
    wanted = _call(module, inputs, torch.float32)
    assert wanted.isfinite().all()
    with cast_(module, torch.float16):
        plain = _call(module, inputs, torch.float16)
    assert not relative_l2(plain, wanted) < 0.1
    return module, inputs, wanted, rescale_(module, (), {**inputs, "return_dict": False})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] if x.startswith(("LTX2", "AnyFlow")) else [])
        for x in DRAWN
    ],
)
def test_a_drawn_class_is_nearer_than_bf16(name: str) -> None:
    """Exact in fp32 and, cast, no further from fp32 than bf16 is."""
    module, inputs, wanted, rescaling = _rescale(name)
    assert torch.equal(_call(module, inputs, torch.float32), wanted)
    with cast_(module, torch.float16, rescaling):
        error = relative_l2(_call(module, inputs, torch.float16), wanted)
    rescaling.undo()
    with cast_(module, torch.bfloat16):
        bf16 = relative_l2(_call(module, inputs, torch.bfloat16), wanted)
    assert math.isfinite(error)
    assert error < bf16


@pytest.mark.thorough
def test_exponents_that_come_out_worse_than_bf16_are_not_believed() -> None:
    """Exponents alone are exact, finite and further off than bf16 here: the fp32 stream is taken."""
    _, _, _, rescaling = _rescale("OvisImageTransformer2DModel")
    assert rescaling.residual == "fp32"
    assert "its output isn't that of fp32" in rescaling.scaling.note
    assert "(bf16's by 0.0" in rescaling.scaling.note


def test_an_output_that_leaves_fp16_is_given_in_fp32() -> None:
    """The module's own result is beyond 65504, so that it comes in fp32; the note says what is."""
    module, inputs, wanted, rescaling = _rescale("TransformerTemporalModel")
    assert wanted.abs().max() > 65504
    cast_(module, torch.float16, rescaling)
    assert _call(module, inputs, torch.float16).dtype == torch.float32
    assert "proj_out" in rescaling.scaling.note

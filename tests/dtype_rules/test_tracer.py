"""Walks through code whose sizes depend on values: masks, lengths, indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stopdown import check, testing
from stopdown.dtype_rules.check import inspect_pipeline
from stopdown.dtype_rules.tracer import Step, Walk
from stopdown.fake_tensors.argument_values import ArgumentValues, find_known, set_known
from stopdown.pipelines.tiny_pipelines import build_part, make_t5_tokenizer

MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])


class Silent:
    """A judge to whom everything is right."""

    def __call__(self, step: Step) -> bool:
        return False

    def watch(self, step: Step, given: Any, made: Any) -> None:
        """Nothing."""


def fill(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A mask written row by row, as HunyuanVideo's transformers do."""
    made = torch.zeros(2, 5, dtype=torch.bool)
    for row, length in enumerate(mask.sum(dim=1, dtype=torch.int)):
        made[row, :length] = True
    return x[made]


READERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "nonzero": (lambda x, mask: x[:, torch.nonzero(mask[0]).flatten()], (2, 3, 4)),
    "a slice to a length": (lambda x, mask: x[:, : mask.sum(dim=1)[1]], (2, 4, 4)),
    "a number of a tensor": (lambda x, mask: x[:, mask.sum(dim=1)[0]], (2, 4)),
    "a mask": (lambda x, mask: x[mask.bool()], (7, 4)),
    "a mask written by rows": (fill, (7, 4)),
    "repeats": (lambda x, mask: x.repeat_interleave(mask[0], dim=1), (2, 3, 4)),
    "a mask of unknown values": (lambda x, mask: x[x > 0], (40,)),
}


@pytest.mark.parametrize("name", READERS)
def test_sizes_that_values_decide_are_found(name: str) -> None:
    """Values that do not depend on weights are known, and give the size; others are taken as full."""
    read, shape = READERS[name]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x, mask = mode.from_tensor(torch.zeros(2, 5, 4)), mode.from_tensor(MASK)
    set_known(mask, MASK.clone())
    with mode, ArgumentValues(), Walk(Silent(), torch.float32):
        made = read(x, mask)
    assert tuple(made.shape) == shape
    assert find_known(x) is None


def make_mochi() -> Any:
    """A tiny Mochi, whose attention picks the tokens of its mask by `nonzero`."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = diffusers.MochiTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            text_embed_dim=32,
            time_embed_dim=4,
            max_sequence_length=16,
        )
        vae = diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32,) * 4,
            decoder_block_out_channels=(32,) * 4,
            layers_per_block=(1,) * 5,
        )
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=build_part("t5"),
        tokenizer=make_t5_tokenizer(),
        transformer=transformer,
    )


@pytest.mark.thorough
def test_a_denoiser_that_reads_its_mask_is_seen() -> None:
    """A linear that was left in fp32 inside it is found, and nothing is unchecked."""
    pipe = make_mochi()
    pipe.transformer.half()
    module_path = "transformer_blocks.1.attn1.to_q"
    pipe.transformer.get_submodule(module_path).float()
    sizes = {"height": 32, "width": 32, "num_frames": 7, "num_inference_steps": 2}
    checked = inspect_pipeline(pipe, device="v100", arguments=sizes)
    assert checked.seen.unseen == []
    assert checked.seen.callees["transformer"].main == torch.float16
    assert f"transformer:{module_path}" in {finding.module_path for finding in checked.findings}


def test_what_cannot_be_seen_says_what_sees_it() -> None:
    """Code that branches on what depends on weights ends a walk; the guard looks at real values."""
    pipe = testing.make_pipeline("cogview3plus")
    forward = type(pipe.transformer).forward

    class Reading(type(pipe.transformer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            output[0][: int(output[0].sum().item())]
            return output

    pipe.transformer.__class__ = Reading
    (finding,) = (x for x in check(pipe) if x.kind == "unchecked")
    assert finding.module_path == "transformer"
    assert finding.evidence.startswith("Its code stopped without values: DataDependentOutput")
    assert finding.remedy.startswith(
        "Run it once with its weights, while Stopdown watches every call: "
    )

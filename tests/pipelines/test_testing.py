"""What other tests rest on: tiny pipelines, injected faults, and untouched or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.injected_faults import inject
from models.snapshots import assert_untouched
from models.tiny_calls import run
from stopdown import testing

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")


@pytest.mark.slow  # each runs in the three precisions in the test of overflow below, too
@pytest.mark.parametrize("name", testing.PIPELINE_NAMES)
def test_every_tiny_pipeline_runs_in_each_precision(name: str) -> None:
    """Each recipe gives finite, uneven pixels, and fp16 is nearer to fp32 than bf16 is."""
    reference = run(testing.make_pipeline(name), name)
    errors = {}
    for dtype in (torch.bfloat16, torch.float16):
        pixels = run(testing.make_pipeline(name, dtype=dtype), name)
        errors[dtype] = np.sqrt(np.mean((pixels - reference) ** 2))
    assert np.std(reference) > 0.05
    assert errors[torch.float16] < errors[torch.bfloat16] < 0.03


def test_an_unknown_pipeline_is_named() -> None:
    """The message says what can be built."""
    with pytest.raises(ValueError, match="no tiny pipeline is called 'dalle'; known: cogvideox,"):
        testing.make_pipeline("dalle")


def test_a_component_without_a_rule_is_named() -> None:
    """A component that nothing makes overflow is refused instead of returned unchanged."""
    with pytest.raises(ValueError, match="no rule makes CLIPTextModel overflow"):
        testing.make_pipeline("sd", overflow="text_encoder")


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_injected_fault_appears_at_its_call_only(kind: Any) -> None:
    """A fault at call 1 of the transformer leaves calls 0 and 2 finite."""
    pipe = testing.make_pipeline("cogvideox")
    finite = []
    with inject(pipe, "transformer", step=1, kind=kind):
        forward = pipe.transformer.forward
        pipe.transformer.forward = watch_calls(forward, finite)
        run(pipe, "cogvideox", steps=3)
        pipe.transformer.forward = forward
    # Once spoilt, the latents stay spoilt: call 2 sees NaN already.
    assert finite[:2] == [True, False]


def watch_calls(forward: Any, finite: list[bool]) -> Any:
    """A forward that notes whether its first output is finite."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        finite.append(bool(torch.isfinite(output[0]).all()))
        return output

    return watched


def test_injected_fault_in_the_vae_spoils_a_part_of_the_pixels() -> None:
    """A fault in vae.decode is partial: one pixel value in seven."""
    pipe = testing.make_pipeline("cogvideox")
    with inject(pipe, "vae.decode", step=0):
        pixels = run(pipe, "cogvideox", steps=1)
    assert np.isnan(pixels).mean() == pytest.approx(1 / 7, abs=0.01)


def test_injected_fault_at_a_module_path() -> None:
    """A fault in one block of the transformer reaches its output."""
    pipe = testing.make_pipeline("cogvideox")
    with inject(pipe, "transformer", step=0, module_path="transformer_blocks.0.ff"):
        assert np.isnan(run(pipe, "cogvideox", steps=1)).all()


def test_injection_comes_off_also_after_an_exception() -> None:
    """The component's own forward is back when the block ends, however it ends."""
    pipe = testing.make_pipeline("cogvideox")
    with (
        pytest.raises(RuntimeError, match="stopped"),
        assert_untouched(pipe),
        inject(pipe, "transformer", step=0),
    ):
        raise RuntimeError("stopped")


def test_a_run_leaves_a_pipeline_untouched() -> None:
    """What Diffusers itself notes on a pipeline during a run does not count as a change."""
    for name in ("cogvideox", "svd", "wan"):
        pipe = testing.make_pipeline(name)
        with assert_untouched(pipe):
            run(pipe, name, steps=1)


def cast_transformer(pipe: Any) -> None:
    pipe.transformer.to(torch.bfloat16)


def hook_vae(pipe: Any) -> None:
    pipe.vae.register_forward_hook(lambda *_: None)


def change_one_bit(pipe: Any) -> None:
    pipe.vae.decoder.conv_out.conv.bias.data[0] *= 2


def negate_zero(pipe: Any) -> None:
    bias = pipe.transformer.proj_out.bias
    bias.data[0] = -0.0 if bias.data[0].signbit() == 0 else 0.0


def shadow_forward(pipe: Any) -> None:
    pipe.text_encoder.forward = pipe.text_encoder.forward


def shadow_pipeline_method(pipe: Any) -> None:
    pipe.decode_latents = lambda latents: latents


def shadow_scheduler_step(pipe: Any) -> None:
    pipe.scheduler.step = pipe.scheduler.step


def replace_parameter(pipe: Any) -> None:
    norm = pipe.transformer.norm_final
    norm.weight = torch.nn.Parameter(norm.weight.clone())


def train_mode(pipe: Any) -> None:
    pipe.transformer.train()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (cast_transformer, "transformer:proj_out.bias is torch.bfloat16 and was torch.float32"),
        (hook_vae, "vae._forward_hooks has other contents"),
        (change_one_bit, "vae:decoder.conv_out.conv.bias has other values"),
        (negate_zero, "transformer:proj_out.bias has other values"),
        (shadow_forward, "text_encoder.forward is new"),
        (shadow_pipeline_method, "pipe.decode_latents is new"),
        (shadow_scheduler_step, "scheduler.step is new"),
        (replace_parameter, "transformer:norm_final.weight is another tensor"),
        (train_mode, "transformer.training is another object"),
    ],
)
def test_a_change_is_named_by_its_path(change: Any, named: str) -> None:
    """Each kind of change makes assert_untouched fail, and its message says where."""
    pipe = testing.make_pipeline("cogvideox")
    with pytest.raises(AssertionError) as caught, assert_untouched(pipe):
        change(pipe)
    assert named in str(caught.value)


def test_saved_pipelines_load_again(tmp_path: Any) -> None:
    """A saved folder gives the same bits back through plain Diffusers."""
    import diffusers

    folder = testing.save_pipeline("cogvideox", tmp_path / "tiny", dtype=torch.float32)
    loaded = diffusers.DiffusionPipeline.from_pretrained(folder, use_safetensors=True)
    loaded.set_progress_bar_config(disable=True)
    made = testing.make_pipeline("cogvideox")
    assert type(loaded) is type(made)
    np.testing.assert_array_equal(run(loaded, "cogvideox"), run(made, "cogvideox"))

"""What a dry run counts, against what the run takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline

from models.memory_runs import measure_allocator
from stopdown.errors import CaptureError
from stopdown.memory.forecast import predict_resident
from stopdown.memory.run_memory import listen_to_run
from stopdown.pipelines.skeletons import build_skeleton
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline, save_pipeline


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cogvideox", "cogview3plus"])
def test_a_dry_run_takes_what_the_run_takes(name: str, tmp_path: Any) -> None:
    """A whole run without weights predicts the allocator's peak of the real run within 2 %."""
    pipe = make_pipeline(name)
    arguments = {
        "prompt": "a red circle",
        "num_inference_steps": 2,
        "height": 64,
        "width": 64,
        "output_type": "np",
        "max_sequence_length": 16,
    }
    arguments |= {"num_frames": 9} if name == "cogvideox" else {}
    source = resolve_source(save_pipeline(name, tmp_path / name, dtype=torch.float32))
    empty = build_skeleton(source, {})
    run = listen_to_run(empty, arguments)
    predicted = max([run.between_bytes, *(call.peak_bytes for call in run.calls)])
    with torch.no_grad():
        assert predicted == pytest.approx(measure_allocator(lambda: pipe(**arguments)), rel=0.02)


class _Staged(StableDiffusionPipeline):
    """A pipeline whose call takes no number of steps, as HeliosPyramid's and UnCLIP's."""

    def __call__(self, prompt: str, height: int = 64, width: int = 64) -> Any:
        call = super().__call__
        return call(prompt, height=height, width=width, num_inference_steps=2, output_type="np")


def test_a_pipeline_without_a_number_of_steps_is_predicted(tmp_path: Any) -> None:
    """It was handed one, which its code refused, so that it had no forecast."""
    empty = build_skeleton(resolve_source(save_pipeline("sd", tmp_path / "m")), {})
    empty.__class__ = _Staged
    run = listen_to_run(empty, {"prompt": "a"})
    assert [call.component for call in run.calls] == [
        *("text_encoder", "text_encoder", "unet", "unet", "vae.decode"),
    ]
    assert predict_resident(empty, {"prompt": "a"}, on_cpu=True).predictions[0].peak_bytes > 0


def test_a_component_that_reads_values_is_named(tmp_path: Any) -> None:
    """Code that depends on values of tensors cannot be run dry; the message has its line."""

    source = resolve_source(save_pipeline("cogview3plus", tmp_path / "m", dtype=torch.float32))
    empty = build_skeleton(source, {})
    empty.transformer.norm_out.forward = lambda *a, **k: float(a[0].sum().item())
    with pytest.raises(CaptureError, match=r"CogView3PlusTransformer2DModel can't be captured"):
        listen_to_run(empty, {"prompt": "a", "num_inference_steps": 1, "height": 64, "width": 64})

"""A UNet of Diffusers by a plan: single files, modular pipelines, and IP-Adapters, which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stopdown
from models.pipeline_calls import call_pipeline, load_plain
from models.planned_models import FP16, have_same_weights, is_near
from models.signature_cases import draw_ip_adapter, draw_picture
from stopdown.errors import OptionError, SourceError
from stopdown.testing import save_pipeline

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("module_cache")]


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Stable Diffusion whose UNet overflows."""
    return save_pipeline("sd", tmp_path_factory.mktemp("models") / "sd", overflow="unet")


def load_ip_adapter(pipe: Any) -> dict[str, Any]:
    """Load one into a pipeline; return the argument with a picture's embedding."""
    weights = draw_ip_adapter(pipe.unet)
    pipe.load_ip_adapter([weights], subfolder="", weight_name="", image_encoder_folder=None)
    return {"ip_adapter_image_embeds": [draw_picture(2).to(pipe.dtype)]}


def test_an_ip_adapter_is_refused(sd: Path) -> None:
    """Its layers would add to scaled values; the error says what to do instead."""
    pipe = load_plain(sd, FP16, quantization_config=stopdown.quantization(sd))
    with pytest.raises(OptionError, match=r"An IP-Adapter.*stopdown\.guard\(pipe\)"):
        load_ip_adapter(pipe)


@pytest.mark.filterwarnings(
    "ignore:Overflow in the .* Repaired"
)  # what the guard says of its repair
def test_a_guarded_pipeline_takes_an_ip_adapter(sd: Path) -> None:
    """What the error advises: black in fp16 without the guard, right with it, and the picture counts."""
    wide = load_plain(sd, torch.float32)
    bare = call_pipeline(wide, "sd")
    wanted = call_pipeline(wide, "sd", **load_ip_adapter(wide))
    assert not is_near(bare, wanted, 0.05)
    pipe = load_plain(sd, FP16)
    given = load_ip_adapter(pipe)
    assert not np.isfinite(call_pipeline(pipe, "sd", **given)).all()
    with stopdown.guard(pipe):
        assert is_near(call_pipeline(pipe, "sd", **given), wanted, 0.005)


def test_a_single_file_takes_a_plan(sd: Path) -> None:
    """`from_single_file` tells nobody where the weights come from: without a plan that is said."""
    from diffusers import UNet2DConditionModel

    (path,) = (sd / "unet").glob("*.safetensors")
    options = {"config": str(sd / "unet"), "dtype": FP16}
    with pytest.raises(SourceError, match=r"not from a folder.*stopdown plan"):
        UNet2DConditionModel.from_single_file(
            str(path), quantization_config=stopdown.StopdownConfig(), **options
        )
    planned = stopdown.quantization(sd).quant_mapping["unet"]
    model = UNet2DConditionModel.from_single_file(
        str(path), quantization_config=stopdown.StopdownConfig(planned.plan), **options
    )
    other = UNet2DConditionModel.from_pretrained(
        sd / "unet", dtype=FP16, quantization_config=planned
    )
    assert have_same_weights(model, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Diffusers says that modular pipelines are new
def test_a_modular_pipeline_loads_its_components_by_it(tmp_path: Path) -> None:
    """`load_components` takes the configs by component; in plain fp16 the picture is NaN."""
    from diffusers import ModularPipeline

    folder = save_pipeline("flux", tmp_path / "flux", overflow="transformer")
    config = stopdown.quantization(folder)

    def run(dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
        pipe = ModularPipeline.from_pretrained(str(folder))
        pipe.load_components(dtype=dtype, **options)
        pipe.set_progress_bar_config(disable=True)
        seed = torch.Generator().manual_seed(0)
        sizes = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16}
        found = pipe(prompt="a", generator=seed, output="images", output_type="pt", **sizes)
        return pipe, found

    _, wanted = run(torch.float32)
    assert not run(FP16)[1].isfinite().all()
    pipe, found = run(FP16, quantization_config=config.quant_mapping)
    for name in config.quant_mapping:
        assert pipe.components[name].quantization_method == "stopdown"
    assert is_near(found, wanted, 0.005)

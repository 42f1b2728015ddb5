"""A pipeline with two ControlNets, which one component holds, through every way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stopdown
from models.pipeline_calls import PICTURE
from stopdown.errors import SourceError, StopdownWarning
from stopdown.numerics import relative_l2
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("module_cache")]

FP16 = torch.float16


def make() -> Any:
    """A Stable Diffusion whose UNet overflows, with two ControlNets that do something."""
    import diffusers

    pipe = make_pipeline("sd", overflow="unet")
    torch.manual_seed(3)
    cool = make_pipeline("sd").unet
    nets = [
        diffusers.ControlNetModel.from_unet(cool, conditioning_embedding_out_channels=(8, 8, 8, 8))
        for _ in range(2)
    ]
    for number, net in enumerate(nets):
        for layer in net.controlnet_down_blocks:
            torch.nn.init.normal_(layer.weight, std=0.1 * (number + 1))
    kind = diffusers.StableDiffusionControlNetPipeline
    return kind(**pipe.components, controlnet=nets, requires_safety_checker=False)


def load(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    import diffusers

    kind = diffusers.StableDiffusionControlNetPipeline
    return kind.from_pretrained(folder, dtype=dtype, requires_safety_checker=False, **options)


def draw(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        "a",
        image=[PICTURE, PICTURE],
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    )
    return torch.as_tensor(made.images)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "two"
    make().save_pretrained(path)
    assert (path / "controlnet_1").is_dir()
    return path


@pytest.fixture(scope="module")
def wanted(folder: Path) -> torch.Tensor:
    return draw(load(folder, torch.float32))


@pytest.mark.parametrize("way", ["fp16", "apply_plan", "load"])
@pytest.mark.filterwarnings("ignore:.*not certified")
def test_both_are_planned_and_run_in_fp16(folder: Path, wanted: torch.Tensor, way: str) -> None:
    """The plan of the component is one of both, and the picture is as in fp32."""
    if way == "load":
        pipe = stopdown.load(folder, precision="fp16", device="cpu")
    else:
        pipe = load(folder, torch.float32)
        done = (
            stopdown.fp16(pipe)
            if way == "fp16"
            else stopdown.apply_plan(pipe, stopdown.make_plan(folder))
        )
        assert done is not None
    for name in ("unet", "controlnet", "vae", "text_encoder"):
        assert FP16 in {x.dtype for x in getattr(pipe, name).parameters()}
    assert relative_l2(draw(pipe), wanted) < 0.005
    if hasattr(pipe, "stopdown_guard"):
        pipe.stopdown_guard.remove()


@pytest.mark.filterwarnings("ignore:.*not certified")
def test_quantization_config_keeps_them_in_fp32_and_says_so(
    folder: Path, wanted: torch.Tensor
) -> None:
    """Diffusers loads each by itself; the others run in fp16, and casts are between them."""
    with pytest.warns(StopdownWarning, match="controlnet holds 2 models.*runs in fp32"):
        config = stopdown.quantization(folder)
    pipe = load(folder, FP16, quantization_config=config)
    assert pipe.unet.dtype == FP16
    assert {x.dtype for x in pipe.controlnet.parameters()} == {torch.float32}
    assert relative_l2(draw(pipe), wanted) < 0.005


def test_a_damaged_second_one_is_found(folder: Path, tmp_path: Path) -> None:
    """Its folder is not in the index of the pipeline, and is checked as the first."""
    import shutil

    shutil.copytree(folder, tmp_path / "two")
    (path,) = (tmp_path / "two" / "controlnet_1").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(SourceError, match="controlnet_1"):
        verify_source(resolve_source(tmp_path / "two"))

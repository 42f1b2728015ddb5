"""Norms that cast their input to fp32 themselves, as in code that descends from guided-diffusion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from torch import nn

from models.mixed_dtype_models import GroupNorm32
from models.snapshots import assert_untouched
from stopdown import check, mend


class Block(nn.Module):
    """A residual block; `unused` stands for what this request does not reach."""

    def __init__(self, width: int) -> None:
        super().__init__()
        convolution = nn.Conv2d(width, width, 3, padding=1)
        self.in_layers = nn.Sequential(GroupNorm32(4, width), nn.SiLU(), convolution)
        self.unused = GroupNorm32(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return x + self.in_layers(x)


class Unet(nn.Module):
    """A convolution, two blocks, and a norm with a convolution at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 16, 3, padding=1)
        self.input_blocks = nn.ModuleList([Block(16), Block(16)])
        self.out = nn.Sequential(GroupNorm32(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Noise `[B, 4, H, W]`."""
        x = self.conv_in(x)
        for block in self.input_blocks:
            x = block(x)
        return self.out(x)


class UnetPipeline(DiffusionPipeline):
    """Denoises without a prompt."""

    def __init__(self, unet: Unet, scheduler: DDIMScheduler) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, num_inference_steps: int = 1, **_: Any) -> tuple[torch.Tensor]:
        """Latents `[1, 4, 8, 8]`."""
        self.scheduler.set_timesteps(num_inference_steps)
        latents = torch.ones(1, 4, 8, 8, dtype=self.unet.conv_in.weight.dtype)
        for t in self.scheduler.timesteps:
            latents = self.scheduler.step(self.unet(latents), t, latents).prev_sample
        return (latents,)


def make_unet_pipeline(*, with_fp32_norms: bool) -> UnetPipeline:
    """In fp16, as `.half()` makes it, or as guided-diffusion's `convert_to_fp16` does."""
    torch.manual_seed(0)
    unet = Unet().half().eval()
    for part in unet.modules():
        if with_fp32_norms and isinstance(part, GroupNorm32):
            part.float()
    return UnetPipeline(unet, DDIMScheduler())


@pytest.mark.parametrize("device", ["v100", "mps-m3"])
def test_a_norm_that_widens_itself_is_found_at_its_path(device: str) -> None:
    """One finding for each kind of place, with the remedy that helps."""
    found = check(make_unet_pipeline(with_fp32_norms=False), device=device)
    assert [(f.kind, f.module_path) for f in found] == [
        ("widens-itself", "unet:input_blocks.0.in_layers.0"),
        ("widens-itself", "unet:out.0"),
    ]
    assert found[1].remedy.startswith(
        "Leave its parameters in fp32: pipe.unet.get_submodule('out.0')"
    )


def test_its_parameters_are_mended_and_come_off() -> None:
    """The run that was refused gives what norms in fp32 give, to the bit; undo restores every bit."""
    pipe = make_unet_pipeline(with_fp32_norms=False)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        pipe()
    with assert_untouched(pipe), mend(pipe, device="v100") as mending:
        assert mending.done == (
            "unet: 5 GroupNorm32 cast their input to fp32 themselves: 10 parameters of theirs are fp32; "
            "the bits that a cast took aren't back.",
        )
        assert mending.remaining == []
        (mended,) = pipe()
    expected = make_unet_pipeline(with_fp32_norms=True)
    assert torch.equal(mended, expected()[0])


def test_fp32_is_right_for_its_parameters() -> None:
    """Norms in fp32 are no finding, unreached ones too, and nothing casts them to the rest."""
    pipe = make_unet_pipeline(with_fp32_norms=True)
    with assert_untouched(pipe), mend(pipe, device="v100") as mending:
        assert mending.done == ()
        assert mending.remaining == []


def test_what_else_is_in_fp32_is_still_found() -> None:
    """A convolution that a partial load left in fp32 is cast to the rest; the norms stay in fp32."""
    pipe = make_unet_pipeline(with_fp32_norms=True)
    stray = pipe.unet.input_blocks[1].in_layers[2].float()
    assert "unet:input_blocks.1.in_layers.2" in {f.module_path for f in check(pipe, device="v100")}
    with assert_untouched(pipe), mend(pipe, device="v100") as mending:
        assert mending.done == ("unet: 2 parameters cast to fp16, as the rest.",)
        assert mending.remaining == []
        assert stray.weight.dtype == torch.float16
        assert pipe.unet.out[0].weight.dtype == torch.float32

"""Pipelines that start from more than a prompt: masks, control pictures and arguments of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models.masked_pipelines import make_controlled, make_inpainting
from stopdown.dtype_rules.check import check
from stopdown.frames.media import write_media


@pytest.mark.thorough
def test_check_runs_what_takes_masks_and_control_pictures() -> None:
    """The run without weights gets a picture for each input that the class cannot do without."""
    for pipe in (
        make_inpainting(),
        make_controlled("StableDiffusionXLControlNetImg2ImgPipeline"),
    ):
        kinds = [finding.kind for finding in check(pipe)]
        assert "unexamined" not in kinds


@pytest.mark.thorough
def test_the_command_line_takes_a_mask_and_a_control_picture(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """`--mask` and `--control-image` are given on; without them the flag is named, and nothing written."""
    noise = np.random.default_rng(0).integers(0, 255, (1, 64, 64, 3), np.uint8)
    picture, out, again = (tmp_path / name for name in ("a.png", "b.png", "c.png"))
    write_media(picture, noise)
    make_controlled("StableDiffusionControlNetPipeline").save_pretrained(tmp_path / "control")
    small = ("--steps", 1, "--height", 64, "--width", 64, "--precision", "fp32")
    code, _, said = run("generate", tmp_path / "control", "a", "-o", out, *small)
    assert code == 2
    assert "StableDiffusionControlNetPipeline needs --control-image (its argument image)" in said
    assert not out.exists()
    given = ("--control-image", picture)
    assert run("generate", tmp_path / "control", "a", "-o", out, *given, *small)[0] == 0
    assert out.exists()
    make_inpainting().save_pretrained(tmp_path / "inpaint")
    masked = ("--image", picture, "--mask", picture)
    assert run("generate", tmp_path / "inpaint", "a", "-o", again, *masked, *small)[0] == 0
    assert again.exists()

"""The class of a pipeline, by what is asked of it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from stopdown.pipelines.class_selection import choose_class
from stopdown.pipelines.requests import Request

PICTURE = np.full((24, 40, 3), 128, np.uint8)


CLIP = np.full((9, 24, 40, 3), 128, np.uint8)


def test_the_class_follows_the_request() -> None:
    """A checkpoint that also serves another class gets it when a video or picture is given."""
    assert choose_class("CogVideoXPipeline", Request(prompt="a")) == "CogVideoXPipeline"
    assert choose_class("CogVideoXPipeline", Request(video=CLIP)) == "CogVideoXVideoToVideoPipeline"
    assert choose_class("WanPipeline", Request(video=CLIP)) == "WanVideoToVideoPipeline"
    assert choose_class("FluxPipeline", Request(image=PICTURE)) == "FluxImg2ImgPipeline"
    assert choose_class("QwenImagePipeline", Request(image=PICTURE)) == "QwenImageImg2ImgPipeline"
    assert choose_class("LTXPipeline", Request(image=PICTURE)) == "LTXImageToVideoPipeline"
    masked = Request(image=PICTURE, mask=PICTURE)
    assert choose_class("FluxPipeline", masked) == "FluxInpaintPipeline"
    for name in ("StableVideoDiffusionPipeline", "StableDiffusionControlNetPipeline"):
        assert choose_class(name, Request(image=PICTURE)) == name  # takes a picture itself


@pytest.mark.thorough
def test_the_table_of_classes_is_read_in_silence() -> None:
    """It imports every pipeline of Diffusers, and what those say of missing packages helps nobody."""
    code = (
        "from stopdown.pipelines.class_selection import choose_class\n"
        "from stopdown.pipelines.requests import Request\n"
        "choose_class('CogVideoXPipeline', Request(video=[]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""

"""Tests of sizes: what is refused beforehand agrees with what the real pipelines can make."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.pipeline_calls import make_pipeline
from stopdown.errors import OptionError
from stopdown.pipelines.allowed_sizes import Grid, check_sizes, find_grid, read_configs
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.results import read_frames

MAKES = [
    ("cogvideox", 48, 32, 9),
    ("cogvideox", 32, 32, 1),
    ("cogvideox-image", 32, 32, 9),
    ("cogvideox-video", 32, 48, 9),
    ("cogview3plus", 48, 32, None),
    ("svd", 40, 32, 2),
    ("sd", 40, 32, None),
    ("sdxl", 32, 40, None),
    ("flux", 48, 32, None),
    ("wan", 32, 48, 5),
]
REFUSES = [
    ("cogvideox", 40, 32, 9),
    ("cogvideox", 32, 32, 5),
    ("cogvideox", 32, 32, 6),
    ("cogvideox-image", 32, 48, 9),
    ("cogvideox-video", 40, 32, 9),
    ("cogvideox-video", 32, 32, 5),
    ("cogview3plus", 40, 32, None),
    ("cogview3plus", 144, 32, None),
    ("svd", 36, 32, 2),
    ("sd", 36, 32, None),
    ("sdxl", 32, 36, None),
    ("flux", 40, 32, None),
    ("wan", 32, 40, 5),
    ("wan", 32, 32, 6),
]


def make_really(name: str, height: int, width: int, frames: int | None) -> tuple[int, ...]:
    """The size that the real pipeline makes when it is asked for this one."""
    picture = np.full((height, width, 3), 90, np.uint8)
    is_video = name.endswith("-video")
    request = Request(
        prompt=None if name == "svd" else "a",
        image=picture if name in ("svd", "cogvideox-image") else None,
        video=np.stack([picture] * (frames or 1)) if is_video else None,
        frames=frames,
        height=height,
        width=width,
        steps=2 if is_video else 1,
    )
    pipe = make_pipeline(name)
    return read_frames(pipe(**build_arguments(pipe, request))).shape[:3]


def find_saved_grid(folder: Path) -> Grid:
    return find_grid(read_configs(folder))


@pytest.mark.parametrize(("name", "height", "width", "frames"), MAKES)
def test_what_is_accepted_is_made(
    save_tiny: Callable[..., Path], name: str, height: int, width: int, frames: int | None
) -> None:
    """A size that fits the grid comes out of the real pipeline exactly."""
    check_sizes(find_saved_grid(save_tiny(name)), height=height, width=width, frames=frames)
    assert make_really(name, height, width, frames) == (frames or 1, height, width)


@pytest.mark.parametrize(("name", "height", "width", "frames"), REFUSES)
def test_what_is_refused_cannot_be_made(
    save_tiny: Callable[..., Path], name: str, height: int, width: int, frames: int | None
) -> None:
    """The real pipeline fails at such a size, or makes another one without a word."""
    with pytest.raises(OptionError, match="doesn't fit this model"):
        check_sizes(find_saved_grid(save_tiny(name)), height=height, width=width, frames=frames)
    try:
        made = make_really(name, height, width, frames)
    except (ValueError, RuntimeError):
        return
    assert made != (frames or 1, height, width)


COGVIDEOX = Grid(
    16,
    8,
    "its autoencoder divides each side by 8 and its transformer reads patches of 2 by 2",
    frames_reason="its autoencoder holds 4 frames in one latent frame, and takes latent frames by twos "
    "after the first",
)


def test_the_grid_of_cogvideox(save_tiny: Callable[..., Path]) -> None:
    """Sides, frames and the reason, from the configs of a saved folder."""
    assert find_saved_grid(save_tiny("cogvideox")) == COGVIDEOX


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"height": 100},
            "height=100 doesn't fit this model. It takes a multiple of 16 pixels: "
            f"{COGVIDEOX.reason}. The nearest that work are 96 and 112: use height=96.",
        ),
        (
            {"width": 3},
            "width=3 doesn't fit this model. It takes a multiple of 16 pixels: "
            f"{COGVIDEOX.reason}. The nearest that works is 16: use width=16.",
        ),
        (
            {"frames": 16},
            "frames=16 doesn't fit this model. It takes a multiple of 8 plus 1 frames: "
            f"{COGVIDEOX.frames_reason}. The nearest that work are 9 and 17: use frames=17.",
        ),
        (
            {"frames": 0},
            "frames=0 doesn't fit this model. It takes a multiple of 8 plus 1 frames: "
            f"{COGVIDEOX.frames_reason}. The nearest that works is 1: use frames=1.",
        ),
    ],
)
def test_the_nearest_sizes_are_named(sizes: dict[str, int], message: str) -> None:
    """The message says the rule, where it comes from, and the nearest sizes that work."""
    with pytest.raises(OptionError) as caught:
        check_sizes(COGVIDEOX, **sizes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("grid", "height", "ending"),
    [
        (
            Grid(16, 1, "of positions", most=128),
            144,
            "It takes a multiple of 16 pixels up to 128: of positions. The nearest that works is "
            "128: use height=128.",
        ),
        (
            Grid(16, 1, "of positions", only=(480, 720)),
            512,
            "It takes 480 pixels only: of positions. The nearest that works is 480: use "
            "height=480.",
        ),
    ],
)
def test_limits_of_positions_are_named(grid: Grid, height: int, ending: str) -> None:
    """A transformer with positions up to a size, or for one size, says so."""
    with pytest.raises(OptionError) as caught:
        check_sizes(grid, height=height)
    assert str(caught.value) == f"height={height} doesn't fit this model. {ending}"


def test_every_named_size_works() -> None:
    """What the message tells a user to type is accepted."""
    grid = Grid(16, 4, "of a test", most=48)
    for flag, value in itertools.product(("height", "width", "frames"), range(1, 70)):
        try:
            check_sizes(grid, **{flag: value})
        except OptionError as error:
            named = int(str(error).rstrip(".").rsplit("=", 1)[1])
            check_sizes(grid, **{flag: named})


REAL: list[tuple[str, dict[str, Any], int, int]] = [
    (
        "CogVideoX 5B",
        {
            "vae": {
                "_class_name": "AutoencoderKLCogVideoX",
                "block_out_channels": [128, 256, 256, 512],
                "temporal_compression_ratio": 4,
            },
            "transformer": {"_class_name": "CogVideoXTransformer3DModel", "patch_size": 2},
        },
        16,
        8,
    ),
    (
        "Stable Video Diffusion",
        {
            "vae": {"block_out_channels": [128, 256, 512, 512]},
            "unet": {
                "_class_name": "UNetSpatioTemporalConditionModel",
                "block_out_channels": [320, 640, 1280, 1280],
            },
        },
        64,
        1,
    ),
    (
        "SDXL",
        {
            "vae": {"block_out_channels": [128, 256, 512, 512]},
            "unet": {
                "_class_name": "UNet2DConditionModel",
                "block_out_channels": [320, 640, 1280],
            },
        },
        8,
        1,
    ),
    (
        "FLUX.1",
        {
            "vae": {"block_out_channels": [128, 256, 512, 512]},
            "transformer": {"_class_name": "FluxTransformer2DModel", "patch_size": 1},
        },
        16,
        1,
    ),
    (
        "Wan 2.1",
        {
            "vae": {"dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]},
            "transformer": {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2]},
        },
        16,
        4,
    ),
]


@pytest.mark.parametrize(("model", "configs", "side", "frames"), REAL)
def test_the_grid_of_real_configs(
    model: str, configs: dict[str, Any], side: int, frames: int
) -> None:
    """The figures of published checkpoints give the grids that their pipelines are known by."""
    grid = find_grid(configs)
    assert (grid.side, grid.frames) == (side, frames), model


def test_allegro_makes_any_number_of_frames() -> None:
    """Its default is 88, which is no multiple of 4 plus 1: it cuts off what is too much."""
    configs = {"vae": {"_class_name": "AutoencoderKLAllegro", "temporal_compression_ratio": 4}}
    for frames in (88, 87, 1):
        check_sizes(find_grid(configs), frames=frames)


def test_no_more_frames_are_advised_than_a_video_has() -> None:
    """A video of 8 frames can be cut to 1 for CogVideoX, and not lengthened to 9."""
    configs = {"vae": {"_class_name": "AutoencoderKLCogVideoX", "temporal_compression_ratio": 4}}
    with pytest.raises(OptionError, match=r"The nearest that works is 1: use frames=1\."):
        check_sizes(find_grid(configs), frames=8, is_whole_video=True)
    check_sizes(find_grid(configs), frames=9, is_whole_video=True)

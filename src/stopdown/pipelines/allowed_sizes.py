"""Valid sizes of a model's output (frames, height, width), from its configs before it is loaded.

The sides of a picture must be multiples of the autoencoder's compression times the transformer's patch size
(or the downsampling of a video UNet). The frames of a video must fit the autoencoder's temporal
compression. Some transformers have positional embeddings for one size only, or up to a size.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stopdown.errors import OptionError, SourceError
from stopdown.sources.descriptions import read_description

_FAR = 2
"""A pipeline's default size is kept if it has at most this many times the pixels of the configs' size."""


@dataclass(frozen=True)
class Grid:
    """Constraints on the sizes of a model's output.

    Attributes:
        side: height and width must be multiples of this many pixels.
        frames: the number of frames must be a multiple of this plus 1; 1 if any number is valid.
        reason: explanation of `side`.
        most: largest height and width; 0 without a limit.
        only: the only valid height and width; None if there are others.
        frames_reason: explanation of `frames`.
    """

    side: int
    frames: int
    reason: str
    most: int = 0
    only: tuple[int, int] | None = None
    frames_reason: str = "it takes any number"


def read_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the `config.json` of each component of a Diffusers folder, by component name."""
    return {
        path.parent.name: read_description(path) for path in sorted(folder.glob("*/config.json"))
    }


def find_grid(configs: dict[str, dict[str, Any]]) -> Grid:
    try:
        return _find_grid(configs)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise SourceError(
            f"The configurations of the model give no sizes: {error}.",
            expected="Its patches, strides and positions are whole numbers, above 0.",
            remedy="Download or save the model again.",
        ) from error


def _find_grid(configs: dict[str, dict[str, Any]]) -> Grid:
    autoencoder = configs.get("vae", {})
    side = _read_side(autoencoder)
    reasons = [f"its autoencoder divides each side by {side}"]
    transformer = configs.get("transformer", {})
    patch = transformer.get("patch_size") or 1
    patch = patch[-1] if isinstance(patch, (list, tuple)) else patch  # a tuple in memory
    if "FluxTransformer" in transformer.get("_class_name", ""):
        patch = 2  # the pipeline packs 2x2 latents, whatever the config's patch_size says
    if patch > 1:
        reasons.append(f"its transformer reads patches of {patch} by {patch}")
    unet = configs.get("unet", {})
    # The UNet of pictures brings its own upsampling to sizes that cannot be halved.
    is_picture = unet.get("_class_name") == "UNet2DConditionModel"
    halvings = 0 if is_picture else max(0, len(unet.get("block_out_channels") or [0]) - 1)
    if halvings:
        reasons.append(f"its UNet halves it {halvings} times")
    frames = int(autoencoder.get("temporal_compression_ratio") or _read_time(autoencoder))
    frames_reason = f"its autoencoder holds {frames} frames in one latent frame"
    if autoencoder.get("_class_name") == "AutoencoderKLAllegro":
        frames = 1  # it makes whole latent frames, and cuts off what is too much
    if autoencoder.get("_class_name") == "AutoencoderKLCogVideoX":
        frames *= 2  # of an even number of latent frames it decodes three frames too many
        frames_reason += ", and takes latent frames by twos after the first"
    learned = transformer.get("pos_embed_max_size")
    positions = learned or transformer.get("rope_max_seq_len") or 0  # each Wan has those of an axis
    if positions:
        reasons.append(f"it has positions for {positions} patches on a side")
    only = _read_only(transformer, side)
    if only:
        reasons.append("its learned positions are for one size")
    step = side * patch * 2**halvings
    return Grid(step, frames, " and ".join(reasons), positions * step, only, frames_reason)


def _read_only(transformer: dict[str, Any], side: int) -> tuple[int, int] | None:
    """Read the height and width, in pixels, of a CogVideoX transformer with learned positions.

    Learned positions are never resized. Returns None for any other transformer.

    Args:
        transformer: its config.
        side: pixels of a latent's side.
    """
    if not transformer.get("use_learned_positional_embeddings"):
        return None
    return int(transformer["sample_height"]) * side, int(transformer["sample_width"]) * side


def _read_side(autoencoder: dict[str, Any]) -> int:
    for name in ("scale_factor_spatial", "spatial_compression_ratio"):
        if autoencoder.get(name):
            return int(autoencoder[name])
    blocks = autoencoder.get("block_out_channels") or autoencoder.get("dim_mult") or [0]
    return int(2 ** (len(blocks) - 1))


def _read_time(autoencoder: dict[str, Any]) -> int:
    downsample = autoencoder.get("temperal_downsample") or []  # spelt so in the config
    return int(autoencoder.get("scale_factor_temporal") or 2 ** sum(map(bool, downsample)))


def find_own_sides(pipe: Any) -> tuple[int, int] | None:
    """Return the height and width, in pixels, in the config of a pipeline's denoiser; None if absent."""
    parts = [getattr(pipe, name, None) for name in ("transformer", "unet")]
    part = next((x for x in parts if x is not None), None)  # a compiled one has no truth value
    config: Any = getattr(part, "config", None) or {}
    size = config.get("sample_size")
    both = size if isinstance(size, (list, tuple)) else (size, size)
    height, width = config.get("sample_height") or both[0], config.get("sample_width") or both[-1]
    if not (height and width and isinstance(height, int) and isinstance(width, int)):
        return None
    scale: Any = getattr(pipe, "vae_scale_factor_spatial", None)
    scale = scale or getattr(pipe, "vae_scale_factor", 8)
    return int(height) * int(scale), int(width) * int(scale)


def choose_own_sides(pipe: Any) -> dict[str, int]:
    """Choose height and width for a call without sizes if the pipeline's default does not suit its configs.

    A default is meant for its authors' checkpoint. If the configs name a far smaller size, that is used. No
    side exceeds the transformer's positional embeddings.

    Returns:
        `height` and `width`; empty if the default suits, or if the pipeline reads its configs itself.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    default = [taken[name].default for name in ("height", "width") if name in taken]
    if len(default) < 2 or not all(isinstance(side, int) for side in default):
        return {}
    own = find_own_sides(pipe)
    is_far = own is not None and default[0] * default[1] > _FAR * own[0] * own[1]
    chosen = list(own) if own is not None and is_far else default
    grid = find_grid(read_pipe_configs(pipe))
    if grid.most and max(chosen) > grid.most:
        share = grid.most / max(chosen)
        chosen = [max(1, int(side * share) // grid.side) * grid.side for side in chosen]
    return {} if chosen == default else {"height": chosen[0], "width": chosen[1]}


def read_pipe_configs(pipe: Any) -> dict[str, dict[str, Any]]:
    """Return the config of each component of a live pipeline, by component name."""
    from stopdown.component_calls.components import find_components

    found = {}
    for name, part in find_components(pipe).items():
        config = getattr(part, "config", None)
        own = dict(config) if isinstance(config, Mapping) else {}
        found[name] = {"_class_name": type(part).__name__, **own}
    return found


def check_sizes(
    grid: Grid,
    *,
    frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    is_whole_video: bool = False,
) -> None:
    """Refuse sizes that the model cannot make, with an error that names the nearest valid ones.

    Args:
        is_whole_video: whether `frames` is the length of a given video, so that no larger number is
            suggested.
    """
    height_only, width_only = grid.only or (0, 0)
    _check_side("height", height, grid, height_only)
    _check_side("width", width, grid, width_only)
    if frames is not None and (frames < 1 or (frames - 1) % grid.frames):
        near = _find_nearest(frames, grid.frames, 1)
        near = near[:1] if is_whole_video else near
        rule = f"a multiple of {grid.frames} plus 1 frames"
        raise _describe_misfit("frames", frames, rule, near, grid.frames_reason)


def _check_side(name: str, value: int | None, grid: Grid, only: int) -> None:
    if value is None:
        return
    most = only or grid.most
    if value >= 1 and value % grid.side == 0 and (not most or value <= most) and value >= only:
        return
    near = [only] if only else _find_nearest(value, grid.side, 0, most)
    rule = f"{only} pixels only" if only else f"a multiple of {grid.side} pixels"
    rule += f" up to {most}" if most and not only else ""
    raise _describe_misfit(name, value, rule, near, grid.reason)


def _describe_misfit(name: str, value: int, rule: str, near: list[int], reason: str) -> OptionError:
    listed = " and ".join(map(str, near))
    return OptionError(
        f"{name}={value} doesn't fit this model.",
        expected=f"It takes {rule}: {reason}.",
        remedy=f"The nearest that {'work are' if len(near) > 1 else 'works is'} {listed}: "
        f"use {name}={min(near, key=lambda size: abs(size - value))}.",
    )


def _find_nearest(value: int, step: int, offset: int, most: int = 0) -> list[int]:
    """Return the nearest valid sizes below and above a value, within the limits, in ascending order."""
    least = offset or step
    below = max(least, (value - offset) // step * step + offset)
    above = max(least, below + step if below <= value else below)
    return sorted({min(size, most) if most else size for size in (below, above)})

"""Detection of faults in finished frames without NaN: black, grey, one colour, frozen, noise.

Each detector needs several signs at once, because a false alarm costs more trust than a miss, which the
guard may detect elsewhere. `find_frame_faults` lists what is caught and what is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from stopdown.files.toml_files import read_rules
from stopdown.records import Finding

if TYPE_CHECKING:
    import numpy as np

    Frames = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class FrameFault:
    """A fault of finished frames.

    Attributes:
        kind: `black`, `grey`, `flat`, `frozen` or `noise`.
        frames: indices of the affected frames, from 0.
        evidence: the measured values and their limits, as a sentence.
    """

    kind: str
    frames: tuple[int, ...]
    evidence: str

    @property
    def noun(self) -> str:
        return "frames"

    @property
    def meaning(self) -> FaultMeaning:
        return read_frame_meanings()[self.kind]

    @property
    def remedy(self) -> str:
        return self.meaning.remedy


class FaultMeaning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Explanation of a kind of fault: a table of `knowledge/rules/frames.toml`.

    Attributes:
        elsewhere: other causes of failure, each with the precision to try.
    """

    fault: str
    says: str
    why: str
    remedy: str
    elsewhere: dict[str, str]


@functools.cache
def read_frame_meanings() -> dict[str, FaultMeaning]:
    return msgspec.convert(read_rules("frames"), dict[str, FaultMeaning])


_SPREAD = 2.5  # standard deviation over a frame, of 255
_PEAK = 12.0  # largest deviation of a 4x4 block from the frame's mean, of 255
_DARK = 16.0  # mean of the brightest channel: black of limited-range video
_TINT = 4.0  # difference between channel means up to which a colour is grey
_STILL = 2.0  # largest change of a 4x4 block against the first frame, of 255


def find_frame_faults(frames: Frames | Iterator[Frames]) -> list[FrameFault]:
    """Find all visible faults in finished frames; return an empty list if they look healthy.

    **Catches**

    - *black*: a frame that is dark (mean at most 16 of 255) and one colour all over: standard
      deviation below 2.5, and no block of 4x4 pixels more than 12 away from the mean.
    - *grey* and *flat*: as uniform as that, in a neutral or another colour.
    - *frozen*: a clip of several frames in which no block of 4x4 pixels ever differs by more than
      2 from the first frame (video codecs change less than that).
    - *noise*: pixels that are independent of their neighbours: at scales of 1, 2 and 4 pixels,
      horizontally and vertically, luma is correlated by less than 0.25, its standard deviation falls
      with the scale as that of white noise does, and its distribution has no heavy tails, as that of
      stars on a night sky has.

    **Does not catch**

    - a dark scene with any structure, a faint gradient, a black frame with a few stray pixels;
    - a freeze in part of a clip, or two frames that alternate;
    - noise with a grain above one pixel, such as random latents decoded by an autoencoder;
    - pictures that are wrong in any other way.

    A prompt that asks for plain black, one colour, a still picture or television static is reported
    although the result is right.

    Args:
        frames: `[T, H, W, 3]` uint8, or an iterator over frames, of which two are in memory at a time;
            `[T, H, W, 4]` are the layers of one picture, from the lowest, which are seen as a whole.
    """
    if not isinstance(frames, Iterator) and require_clip(frames).shape[-1] == _CLEAR:
        first, *others = frames
        frames = functools.reduce(_lay, others, lay_on_white(first))[None]
    looks = list(_look_at(frames))
    found = [fault for detect in _DETECTORS.values() for fault in detect(looks)]
    uniform = {index for fault in found if fault.kind in _UNIFORM for index in fault.frames}
    if len(uniform) == len(looks):  # of a clip without any picture, "frozen" says nothing new
        return [fault for fault in found if fault.kind != "frozen"]
    return found


@dataclass(frozen=True)
class _Look:
    """Measurements of one frame, with values from 0 to 255.

    Attributes:
        colour: mean of each channel of a uniform frame; () for any other frame.
        spread: largest standard deviation of a channel of a uniform frame.
        noise: largest correlation of neighbouring pixels of a noise frame; None for any other frame.
        change: largest difference of a 4x4 block from the first frame, up to this frame; not updated
            once it is above `_STILL`.
    """

    colour: tuple[float, ...]
    spread: float
    noise: float | None
    change: float

    @property
    def kind(self) -> str:
        """The kind of a uniform frame: `black`, `grey` or `flat`; "" for other frames."""
        if not self.colour:
            return ""
        if max(self.colour) <= _DARK:
            return "black"
        return "grey" if max(self.colour) - min(self.colour) <= _TINT else "flat"


def _look_at(frames: Iterable[Frames]) -> Iterator[_Look]:
    first, change = None, 0.0
    for frame in frames:
        if first is None:
            first = _shrink(frame, 4)
        elif change <= _STILL:
            change = max(change, float(abs(_shrink(frame, 4) - first).max()))
        yield _Look(*_measure_colour(frame), _measure_noise(frame), change)


def find_frame_findings(frames: Frames, name: str) -> tuple[Finding, ...]:
    """Return the faults from `find_frame_faults` as findings of a record: `black-frames`, `frozen-frames`…

    Args:
        frames: `[T, H, W, 3]` or `[T, H, W, 4]` uint8.
        name: name of the frames in the findings, such as `output`.
    """
    return tuple(
        Finding(f"{fault.kind}-frames", name, fault.evidence, fault.remedy)
        for fault in find_frame_faults(frames)
    )


def _shrink(picture: np.ndarray[Any, Any], factor: int) -> np.ndarray[Any, Any]:
    """Return the means of `factor` x `factor` blocks, in fp32; pictures under two blocks are unchanged."""
    import numpy as np

    height, width = (size // factor * factor for size in picture.shape[:2])
    if factor == 1 or min(height, width) < 2 * factor:
        return picture.astype(np.float32)
    blocks = picture[:height, :width].astype(np.float32)
    shape = (height // factor, factor, width // factor, factor, *picture.shape[2:])
    return np.asarray(blocks.reshape(shape).mean(axis=(1, 3)))


def _measure_colour(frame: Frames) -> tuple[tuple[float, ...], float]:
    """Measure a uniform frame's mean and largest standard deviation of channels; ((), 0) if not uniform."""
    # A quarter of the rows and columns holds 1/16 of the pixels: when its standard deviation is 4
    # times the limit, that of the frame is above the limit.
    if frame[::4, ::4].std(axis=(0, 1)).max() >= 4 * _SPREAD:
        return (), 0.0
    pixels = _shrink(frame, 1)
    means, spread = pixels.mean(axis=(0, 1)), float(pixels.std(axis=(0, 1)).max())
    if spread >= _SPREAD or abs(_shrink(frame, 4) - means).max() > _PEAK:
        return (), 0.0
    return tuple(means.tolist()), spread


_UNIFORM = ("black", "grey", "flat")


def _detect_uniform(looks: Sequence[_Look]) -> Iterator[FrameFault]:
    for kind in _UNIFORM:
        indices = tuple(index for index, look in enumerate(looks) if look.kind == kind)
        if indices:
            red, green, blue = looks[indices[0]].colour
            evidence = (
                f"{name_frames(indices, len(looks)).capitalize()}: mean colour ({red:.0f}, "
                f"{green:.0f}, {blue:.0f}) of 255, standard deviation {'at most ' * (len(indices) > 1)}"
                f"{max(looks[x].spread for x in indices):.2f} (a real picture has more than {_SPREAD})."
            )
            yield FrameFault(kind, indices, evidence)


def _detect_frozen(looks: Sequence[_Look]) -> list[FrameFault]:
    if len(looks) < 2 or looks[-1].change > _STILL:
        return []
    evidence = (
        f"All {len(looks)} frames show the same picture: no block of 4x4 pixels changes by more "
        f"than {looks[-1].change:.2f} of 255 (limit {_STILL:g})."
    )
    return [FrameFault("frozen", tuple(range(len(looks))), evidence)]


def _detect_noise(looks: Sequence[_Look]) -> list[FrameFault]:
    hits = {index: look.noise for index, look in enumerate(looks) if look.noise is not None}
    if not hits:
        return []
    evidence = (
        f"{name_frames(tuple(hits), len(looks)).capitalize()}: neighbouring pixels are correlated "
        f"by at most {max(hits.values()):.2f} (a real picture has more than {_KINSHIP})."
    )
    return [FrameFault("noise", tuple(hits), evidence)]


_KINSHIP = 0.25  # correlation of neighbours, below which they are strangers
_CONTRAST = 12.0  # standard deviation of luma that noise has at least, of 255
_TAILS = 5.0  # kurtosis: 1.8 for uniform, 3 for normal noise, hundreds for stars on a night sky


def _measure_noise(frame: Frames) -> float | None:
    """Measure the largest correlation of neighbouring pixels of a white-noise frame; None for a picture.

    The luma of the central 256x256 pixels is tested. Chroma is not, as subsampling in videos smooths it.
    """
    import numpy as np

    height, width = frame.shape[:2]
    if min(height, width) < 32:
        return None
    top, left = max(0, height - 256) // 2, max(0, width - 256) // 2
    crop = frame[top : top + 256, left : left + 256].astype(np.float32)
    luma = crop @ np.array([0.2126, 0.7152, 0.0722], np.float32)
    centred = luma - luma.mean()
    spread = float(centred.std())
    if spread < _CONTRAST or float((centred**4).mean()) > _TAILS * spread**4:
        return None
    scales = [_shrink(luma, factor) for factor in (1, 2, 4)]
    whiteness = [
        factor * float(s.std()) / spread for factor, s in zip((2, 4), scales[1:], strict=True)
    ]
    if not all(0.7 < ratio < 1.4 for ratio in whiteness):
        return None
    largest = max(_correlate_neighbours(scale) for scale in scales)
    return largest if largest < _KINSHIP else None


def _correlate_neighbours(luma: np.ndarray[Any, Any]) -> float:
    """Return the larger magnitude of the horizontal and vertical lag-1 correlation; 1 without variance."""
    import numpy as np

    centred = luma - luma.mean()
    variance = float((centred**2).mean())
    if variance == 0:
        return 1.0
    across = float((centred[:, 1:] * centred[:, :-1]).mean()) / variance
    down = float((centred[1:] * centred[:-1]).mean()) / variance
    return float(np.max(np.abs([across, down])))


_DETECTORS: dict[str, Callable[[Sequence[_Look]], Iterable[FrameFault]]] = {
    "uniform": _detect_uniform,
    "frozen": _detect_frozen,
    "noise": _detect_noise,
}


def require_clip(frames: Frames) -> Frames:
    import numpy as np

    array = np.asarray(frames)
    known = array.ndim == 4 and array.shape[-1] in (3, _CLEAR)
    if array.dtype != np.uint8 or not known or 0 in array.shape:
        raise ValueError(
            f"a clip is a uint8 array [T, H, W, 3] or [T, H, W, 4] with at least one pixel, "
            f"and this is {array.dtype} {list(array.shape)}"
        )
    return array


_CLEAR = 4  # channels of a picture with transparency


def lay_on_white(frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Lay frames with transparency on white; return others as they are.

    Args:
        frames: `[..., H, W, 3]` or `[..., H, W, 4]`: uint8, or fp32 in [0, 1].
    """
    import numpy as np

    white = 255 if frames.dtype == np.uint8 else 1
    is_clear = frames.shape[-1] == _CLEAR
    return _lay(np.full_like(frames[..., :3], white), frames) if is_clear else frames


def _lay(below: np.ndarray[Any, Any], layer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    is_bytes = layer.dtype == np.uint8
    opacity = layer[..., 3:].astype(np.float32) / (255 if is_bytes else 1)
    laid = layer[..., :3] * opacity + below * (1 - opacity)
    return np.rint(laid).astype(np.uint8) if is_bytes else laid


def name_frames(indices: Sequence[int], total: int) -> str:
    """Name frames in words: `all 9 frames`, `frame 3 of 9`, `frames 4, 5 of 9`, counted from 1."""
    if len(indices) == total:
        return "the only frame" if total == 1 else f"all {total} frames"
    shown = ", ".join(str(index + 1) for index in indices[:8])
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"frame{'s' if len(indices) > 1 else ''} {shown}{more} of {total}"

"""Pictures and clips: read and written as files, and looked at for faults that carry no NaN.

A clip is a uint8 array `[T, H, W, 3]` of red, green and blue; a picture is `[H, W, 3]`. Clips are
written as H.264 in mp4 (yuv420p, BT.709), as gif, as one png, or as a folder of png files. A file
is written beside its place under a temporary name and renamed when it is whole, so that a full disk
or Ctrl-C leaves nothing half-written.

`find_frame_faults` looks at finished frames. Each detector needs several signs at once, because a
false alarm costs more trust than a miss that the guard finds elsewhere.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.errors import InputError, NonFiniteError, OptionError, OutputError, take_first_line
from stopdown.outputs import check_target, write_numbered, written_beside
from stopdown.records import Finding

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Frames = np.ndarray[Any, np.dtype[np.uint8]]

FOLDER = "folder"
"""The format of an output that is a folder of png files."""

# ---------------------------------------------------------------------------------------------
# Where the output goes


def choose_format(path: str | os.PathLike[str], frames: int) -> str:
    """The format that an output path asks for: `mp4`, `gif`, `png` or `folder`.

    A path that ends in a slash, has no suffix, or is a folder already, is a folder of png files.

    Args:
        path: the output path as it was typed.
        frames: how many frames will be written.

    Raises:
        OptionError: the suffix is unknown, or is .png for several frames.
    """
    text, stem = os.fspath(path), str(Path(path).with_suffix(""))
    suffix = Path(path).suffix.lower()
    if not suffix or text.endswith(("/", os.sep)):
        return FOLDER
    if suffix not in _WRITERS:
        if Path(path).is_dir():
            return FOLDER
        raise OptionError(
            f"The output {text} ends in {suffix}, which is not a format that Stopdown writes.",
            expected="It writes .mp4, .gif, .png for a single frame, and folders of png files.",
            remedy=f"Use -o {stem}.mp4, or -o {stem}/ for a folder of frames.",
        )
    if suffix == ".png" and frames > 1:
        raise OptionError(
            f"The output {text} is a single picture, and there are {frames} frames to write.",
            expected="A .png file holds one frame.",
            remedy=f"Use -o {stem}.mp4, -o {stem}.gif, or -o {stem}/ for a folder of frames.",
        )
    return suffix[1:]


def check_output(
    path: str | os.PathLike[str], frames: int, *, inputs: Iterable[str | Path | None] = ()
) -> str:
    """The format of an output path, once it is certain that a file can be made there now.

    Called before a long run. It makes a small file beside the output and removes it again.

    Args:
        path: the output path as it was typed.
        frames: how many frames will be written.
        inputs: files that the run reads, which the output must not replace.

    Raises:
        OptionError: as `choose_format`.
        OutputError: the place does not exist, is taken, or cannot be written.
    """
    chosen = choose_format(path, frames)
    check_target(path, folder=chosen == FOLDER, inputs=inputs)
    return chosen


# ---------------------------------------------------------------------------------------------
# Writing


def write_media(
    path: str | os.PathLike[str], frames: Frames, fps: float = 8.0, *, numbered: bool = False
) -> Path:
    """Write a clip in the format that the path asks for, whole or not at all.

    A file that stands there is replaced; a folder has to be new or empty.

    Args:
        path: a .mp4, .gif or .png file, or a folder (see `choose_format`).
        frames: `[T, H, W, 3]` uint8.
        fps: frames per second, above 0; png files and folders do not keep it. A gif counts in
            hundredths of a second and shows at most 50 frames per second.
        numbered: replace nothing: take the first free name instead, with one for its record.

    Returns:
        The path written.

    Raises:
        OptionError: the suffix is unknown, or is .png for several frames.
        OutputError: the operating system refused to write; the message says why.
    """
    frames = _require_clip(frames)
    chosen, target = choose_format(path, len(frames)), Path(path)
    writer = _write_folder if chosen == FOLDER else _WRITERS[f".{chosen}"]
    if numbered:
        return write_numbered(target, lambda part: writer(part, frames, fps), ".json")
    check_target(target, folder=chosen == FOLDER)
    with written_beside(target) as part:
        writer(part, frames, fps)
    return target


def _require_clip(frames: Frames) -> Frames:
    import numpy as np

    array = np.asarray(frames)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3 or 0 in array.shape:
        raise ValueError(
            f"a clip is a uint8 array [T, H, W, 3] with at least one pixel, "
            f"and this is {array.dtype} {list(array.shape)}"
        )
    return array


def _write_mp4(part: Path, frames: Frames, fps: float) -> None:
    """H.264 at a quality (crf 16) where the codec's loss stays below what half precision changes.

    yuv420p wants even sizes: an odd height or width is padded by its last row or column.
    """
    import av
    import numpy as np

    height, width = frames.shape[1:3]
    even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    try:
        _encode_h264(part, np.ascontiguousarray(even), Fraction(fps).limit_denominator(1001))
    except av.FFmpegError as error:
        if isinstance(error, OSError):  # explained by `written_beside`
            raise
        raise OutputError(
            f"H.264 cannot encode {len(frames)} frames of height {height} and width {width}: "
            f"{_first_line(error)}.",
            expected="The encoder takes sizes up to 16384.",
            remedy="Write a folder of frames with -o frames/, or a smaller --height and --width.",
        ) from error


def _encode_h264(part: Path, frames: Frames, rate: Fraction) -> None:
    import av
    from av.video.reformatter import Colorspace

    with av.open(str(part), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "16"})
        stream.height, stream.width = frames.shape[1], frames.shape[2]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        # BT.709, limited range: without these tags players guess from the size.
        context.colorspace = context.color_primaries = context.color_trc = 1
        context.color_range = 1
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            packed = picture.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
            container.mux(stream.encode(packed))
        container.mux(stream.encode(None))


def _write_gif(part: Path, frames: Frames, fps: float) -> None:
    """One palette for the whole clip, so that still areas do not flicker from frame to frame."""
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in frames]
    palette, is_exact = _make_palette(frames)
    dither = Image.Dither.NONE if is_exact else Image.Dither.FLOYDSTEINBERG
    indexed = [picture.quantize(palette=palette, dither=dither) for picture in pictures]
    indexed[0].save(
        part,
        format="GIF",
        save_all=True,
        append_images=indexed[1:],
        duration=_gif_durations(len(frames), fps),
        loop=0,
        optimize=False,
    )


def _make_palette(frames: Frames) -> tuple[Image.Image, bool]:
    """A palette of 256 colours for all frames, and whether it holds every colour exactly."""
    import numpy as np
    from PIL import Image

    pixels = frames.reshape(-1, 3)
    pixels = pixels[:: max(1, len(pixels) // 1_000_000)]
    colours = np.unique(pixels, axis=0)
    if len(colours) <= 256 and len(pixels) * 3 == frames.size:
        exact = Image.new("P", (1, 1))
        exact.putpalette(np.resize(colours, (256, 3)).tobytes())
        return exact, True
    sample = Image.fromarray(np.ascontiguousarray(pixels[None]))
    return sample.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=1), False


def _gif_durations(count: int, fps: float) -> list[int]:
    """Milliseconds of each frame in whole hundredths of a second whose sum keeps the speed."""
    ends = [round(100 * (index + 1) / fps) for index in range(count)]
    steps = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [10 * max(2, step) for step in steps]


def _write_png(part: Path, frames: Frames, fps: float) -> None:
    from PIL import Image

    Image.fromarray(frames[0]).save(part, format="PNG")


def _write_folder(part: Path, frames: Frames, fps: float) -> None:
    part.mkdir()
    for index, frame in enumerate(frames):
        _write_png(part / f"frame_{index:04d}.png", frame[None], fps)


_WRITERS: dict[str, Callable[[Path, Frames, float], None]] = {
    ".mp4": _write_mp4,
    ".gif": _write_gif,
    ".png": _write_png,
}


def to_uint8(frames: np.ndarray[Any, Any]) -> Frames:
    """Frames as pixels, rounded to nearest; values outside 0 to 1 are clamped.

    Args:
        frames: `[T, H, W, 3]` floating, 0 (black) to 1 (white).

    Returns:
        `[T, H, W, 3]` uint8.

    Raises:
        NonFiniteError: a value is NaN or Inf; a cast would make it black without a word.
    """
    import numpy as np

    broken = ~np.isfinite(frames)
    if broken.any():
        where = np.flatnonzero(broken.reshape(len(frames), -1).any(axis=1)).tolist()
        nan = int(np.isnan(frames).sum())
        raise NonFiniteError(
            f"The decoded frames hold {nan} NaN and {int(broken.sum()) - nan} Inf among "
            f"{frames.size} values, in {_name_frames(where, len(frames))}.",
            expected="Every value must be finite: a NaN that is cast to a pixel turns black.",
            remedy="Use --precision vae=fp32, or --precision fp32 for the whole pipeline.",
        )
    scaled = np.clip(frames.astype(np.float32), 0.0, 1.0) * np.float32(255.0)
    return np.asarray(np.rint(scaled).astype(np.uint8))


def _name_frames(indices: Sequence[int], total: int) -> str:
    """Frames in words: `all 9 frames`, `frame 3 of 9`, `frames 3, 4 of 9` (counted from 0)."""
    if len(indices) == total:
        return "the only frame" if total == 1 else f"all {total} frames"
    shown = ", ".join(str(index) for index in indices[:8])
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"frame{'s' if len(indices) > 1 else ''} {shown}{more} of {total} (counted from 0)"


# ---------------------------------------------------------------------------------------------
# Reading


LARGEST_PICTURE = 2**26
"""Pixels of a picture or frame that are read; one of 8K video has 33 million."""

MOST_CLIP_BYTES = 2**32
"""Bytes of the frames that are read from one clip: 690 frames of 1920x1080."""

_PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "AVIF")
"""Those that Pillow decodes by itself: for EPS, for example, it starts a program."""

_VIDEO_FORMATS = (
    "mov,matroska,avi,gif,flv,ogg,mpegts,mpeg,asf,m4v,h264,hevc,apng,"
    "png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe"
)
"""Those that hold their frames: of playlists, FFmpeg would open the files that they name."""


def read_image(path: str | os.PathLike[str]) -> Frames:
    """One picture, `[H, W, 3]` uint8, turned as its EXIF data says and laid on white.

    Raises:
        InputError: the file is missing, is not a picture, or has more than `LARGEST_PICTURE` pixels.
    """
    import numpy as np
    from PIL import Image, ImageOps

    source = _require_file(path)
    try:
        with Image.open(source, formats=_PICTURE_FORMATS) as opened:
            _refuse_large(source, *opened.size)
            picture = _lay_on_white(ImageOps.exif_transpose(opened))
    except InputError:
        raise
    except Exception as error:  # Pillow's readers raise whatever a damaged file makes of them
        raise InputError(
            f"The file {source} cannot be read as a picture: {_first_line(error)}.",
            expected="Pictures are png, jpeg, webp, bmp, tiff, gif, ppm or avif.",
            remedy="Open it in a viewer to see whether it is damaged, and save it as png.",
        ) from error
    return np.asarray(picture)


def _refuse_large(source: Path, width: int, height: int) -> None:
    if width * height > LARGEST_PICTURE:
        raise InputError(
            f"The pictures in {source} have {width}x{height} pixels.",
            expected=f"At most {LARGEST_PICTURE:,} pixels are read.",
            remedy="Make it smaller first.",
        )


def _lay_on_white(picture: Image.Image) -> Image.Image:
    from PIL import Image

    if picture.mode.startswith("I;16"):  # convert() would clip 16 bits at 255
        return picture.point(lambda value: value / 256, "L").convert("RGB")
    if picture.has_transparency_data:
        clear = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return picture.convert("RGB")


def read_video(path: str | os.PathLike[str], limit: int | None = None) -> Frames:
    """The frames of a clip, `[T, H, W, 3]` uint8.

    Args:
        path: a video file, a gif, a picture (one frame), or a folder of png files.
        limit: read at most so many frames.

    Raises:
        InputError: the file is missing, holds no video, is damaged, or has more than
            `MOST_CLIP_BYTES` of frames.
    """
    import numpy as np

    frames: list[Frames] = []
    for frame in iterate_frames(path, limit):
        if frame.nbytes * (len(frames) + 1) > MOST_CLIP_BYTES:
            raise InputError(
                f"The clip {path} has more than {len(frames)} frames of "
                f"{frame.shape[1]}x{frame.shape[0]}.",
                expected=f"At most {MOST_CLIP_BYTES / 2**30:g} GiB of frames are read.",
                remedy="Cut it or make it smaller first; for generate, --frames says how many are "
                "wanted.",
            )
        frames.append(frame)
    return np.stack(frames)


def iterate_frames(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Frames]:
    """The frames of a clip, `[H, W, 3]` uint8 each, all of one size and at least one, as they are read.

    Args:
        path, limit: as for `read_video`.

    Raises:
        InputError: as `read_video`, at the frame where it shows; not for the number of frames.
    """
    source = Path(path)
    found = _iterate_folder(source) if source.is_dir() else _decode(_require_file(path))
    size: tuple[int, ...] | None = None
    for frame in itertools.islice(found, limit):
        if frame.shape != (size or frame.shape):
            raise InputError(
                f"The pictures in {source} differ in size: {size[:2] if size else None} and "
                f"{frame.shape[:2]}.",
                expected="All frames of a clip have one height and width.",
                remedy="Keep the frames of one clip in a folder of their own.",
            )
        size = frame.shape
        yield frame
    if size is None:
        raise _refuse_video(source, "it holds no frames")


def _decode(source: Path) -> Iterator[Frames]:
    import av
    import numpy as np

    options = {"format_whitelist": _VIDEO_FORMATS, "protocol_whitelist": "file"}
    try:
        with av.open(str(source), container_options=options) as container:
            context = container.streams.video[0].codec_context
            if context is None:
                raise _refuse_video(source, "FFmpeg does not know its codec")
            _refuse_large(source, context.width, context.height)
            context.options = {"max_pixels": str(LARGEST_PICTURE)}
            for frame in container.decode(video=0):
                yield np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise _refuse_video(source, _first_line(error)) from error


def _iterate_folder(folder: Path) -> Iterator[Frames]:
    paths = sorted(folder.glob("*.png"))
    if not paths:
        raise InputError(
            f"The folder {folder} holds no png files.",
            expected="A folder of frames holds frame_0000.png, frame_0001.png and so on.",
            remedy=f"Look with: ls {folder}",
        )
    yield from map(read_image, paths)


def _require_file(path: str | os.PathLike[str]) -> Path:
    source = Path(path)
    if not source.is_file():
        found = "it is a folder" if source.is_dir() else "there is no such file"
        raise InputError(
            f"The file {source} cannot be read: {found}.",
            expected=f"Relative paths start from {Path.cwd()}.",
            remedy=f"Look with: ls {source.parent}",
        )
    return source


def _refuse_video(source: Path, cause: str) -> InputError:
    return InputError(
        f"The file {source} cannot be read as a video: {cause}.",
        expected="Videos are mp4, webm, mov, gif, or another format that FFmpeg reads.",
        remedy="Play it to see whether it is damaged, and save it again as mp4.",
    )


def _first_line(error: Exception) -> str:
    return take_first_line(getattr(error, "strerror", None) or error).rstrip(".")


# ---------------------------------------------------------------------------------------------
# Faults of finished frames


@dataclass(frozen=True)
class FrameFault:
    """What is wrong with finished frames.

    Attributes:
        kind: `black`, `grey`, `flat`, `frozen` or `noise`.
        frames: indices of the frames, from 0.
        evidence: what was measured, with the limit.
        remedy: what to type or do.
    """

    kind: str
    frames: tuple[int, ...]
    evidence: str
    remedy: str


_SPREAD = 2.5  # standard deviation over a frame, of 255
_PEAK = 12.0  # largest deviation of a 4x4 block from the frame's mean, of 255
_DARK = 16.0  # mean of the brightest channel: black of limited-range video
_TINT = 4.0  # difference between channel means up to which a colour is grey
_STILL = 2.0  # largest change of a 4x4 block against the first frame, of 255


def find_frame_faults(frames: Frames | Iterator[Frames]) -> list[FrameFault]:
    """Every fault that can be seen in finished frames; an empty list when they look healthy.

    **Catches**

    - *black*: a frame that is dark (mean at most 16 of 255) and one colour all over: standard
      deviation below 2.5, and no block of 4x4 pixels more than 12 away from the mean.
    - *grey* and *flat*: as uniform as that, in a neutral or another colour.
    - *frozen*: a clip of several frames in which no block of 4x4 pixels ever changes by more than
      2 against the first frame (the codec's own changes stay below that).
    - *noise*: pixels that do not know their neighbours: at 1, 2 and 4 pixels, horizontally and
      vertically, luma is correlated by less than 0.25, its spread falls as that of white noise
      does, and its distribution has no tails as those of stars on a night sky.

    **Does not catch**

    - a dark scene with any structure, a faint gradient, a black frame with a few stray pixels;
    - a freeze in part of a clip, or two frames that alternate;
    - noise with a grain above one pixel, such as random latents decoded by an autoencoder;
    - pictures that are wrong in any other way; and a prompt that asks for plain black, one
      colour, a still picture or television static is reported although it was followed.

    Args:
        frames: `[T, H, W, 3]` uint8, or frames one after the other, of which two are held at a time.
    """
    looks = list(_look_at(frames if isinstance(frames, Iterator) else _require_clip(frames)))
    found = [fault for detect in _DETECTORS.values() for fault in detect(looks)]
    uniform = {index for fault in found if fault.kind in _UNIFORM for index in fault.frames}
    if len(uniform) == len(looks):  # of a clip without any picture, "frozen" says nothing new
        return [fault for fault in found if fault.kind != "frozen"]
    return found


@dataclass(frozen=True)
class _Look:
    """What is measured in one frame.

    Attributes:
        uniform: its colour, when it is one all over.
        noise: the largest correlation of neighbouring pixels, when it is noise.
        change: how far a block of 4x4 pixels is from that of the first frame, the largest until here;
            measured until it is above `_STILL`.
    """

    uniform: _Uniform | None
    noise: float | None
    change: float


def _look_at(frames: Iterable[Frames]) -> Iterator[_Look]:
    first, change = None, 0.0
    for index, frame in enumerate(frames):
        if first is None:
            first = _shrink(frame, 4)
        elif change <= _STILL:
            change = max(change, float(abs(_shrink(frame, 4) - first).max()))
        yield _Look(_measure_uniform(index, frame), _measure_noise(frame), change)


def find_frame_findings(frames: Frames, site: str) -> tuple[Finding, ...]:
    """What `find_frame_faults` finds, as a record holds it: `black-frames`, `frozen-frames`…

    Args:
        frames: `[T, H, W, 3]` uint8.
        site: what they are: `output`.
    """
    return tuple(
        Finding(f"{fault.kind}-frames", site, fault.evidence, fault.remedy)
        for fault in find_frame_faults(frames)
    )


def _shrink(picture: np.ndarray[Any, Any], factor: int) -> np.ndarray[Any, Any]:
    """Means of blocks of `factor` x `factor` pixels; a picture too small for two stays as it is."""
    import numpy as np

    height, width = (size // factor * factor for size in picture.shape[:2])
    if factor == 1 or min(height, width) < 2 * factor:
        return picture.astype(np.float32)
    blocks = picture[:height, :width].astype(np.float32)
    shape = (height // factor, factor, width // factor, factor, *picture.shape[2:])
    return np.asarray(blocks.reshape(shape).mean(axis=(1, 3)))


@dataclass(frozen=True)
class _Uniform:
    index: int
    means: tuple[float, float, float]
    spread: float

    @property
    def kind(self) -> str:
        if max(self.means) <= _DARK:
            return "black"
        return "grey" if max(self.means) - min(self.means) <= _TINT else "flat"


def _measure_uniform(index: int, frame: Frames) -> _Uniform | None:
    """The colour of a frame that is one colour all over, None for a frame that is not."""
    # A quarter of the rows and columns holds 1/16 of the pixels: when its standard deviation is 4
    # times the limit, that of the frame is above the limit.
    if frame[::4, ::4].std(axis=(0, 1)).max() >= 4 * _SPREAD:
        return None
    pixels = _shrink(frame, 1)
    means, spread = pixels.mean(axis=(0, 1)), float(pixels.std(axis=(0, 1)).max())
    if spread >= _SPREAD or abs(_shrink(frame, 4) - means).max() > _PEAK:
        return None
    red, green, blue = means.tolist()
    return _Uniform(index, (red, green, blue), spread)


_UNIFORM = {
    "black": "Black without NaN often is an overflow that was clamped or cast on its way. Run "
    "again with --precision text_encoder=fp32,vae=fp32, then with --precision fp32, to see which "
    "component loses the picture.",
    "grey": "One grey all over is how positions, timesteps or latents that collapsed in 16 bits "
    "look. Run again with --precision transformer=fp32, then with --precision fp32.",
    "flat": "One colour all over is how positions, timesteps or latents that collapsed in 16 bits "
    "look. Run again with --precision transformer=fp32, then with --precision fp32.",
}


def _detect_uniform(looks: Sequence[_Look]) -> list[FrameFault]:
    uniform = [look.uniform for look in looks if look.uniform is not None]
    hits = {kind: [frame for frame in uniform if frame.kind == kind] for kind in _UNIFORM}
    return [_report_uniform(kind, found, len(looks)) for kind, found in hits.items() if found]


def _report_uniform(kind: str, hits: list[_Uniform], total: int) -> FrameFault:
    indices, worst = tuple(hit.index for hit in hits), max(hit.spread for hit in hits)
    red, green, blue = hits[0].means
    evidence = (
        f"{_name_frames(indices, total).capitalize()}: mean colour ({red:.0f}, {green:.0f}, "
        f"{blue:.0f}) of 255, standard deviation at most {worst:.2f} (a picture has more than "
        f"{_SPREAD})."
    )
    return FrameFault(kind, indices, evidence, _UNIFORM[kind])


def _detect_frozen(looks: Sequence[_Look]) -> list[FrameFault]:
    if len(looks) < 2 or looks[-1].change > _STILL:
        return []
    evidence = (
        f"All {len(looks)} frames show the same picture: no block of 4x4 pixels changes by more "
        f"than {looks[-1].change:.2f} of 255 (limit {_STILL:g})."
    )
    remedy = (
        "A clip that stands still is how a motion module that lost its input looks. Run again "
        "with --precision transformer=fp32, then with another --seed; ignore this when the prompt "
        "asks for a still picture."
    )
    return [FrameFault("frozen", tuple(range(len(looks))), evidence, remedy)]


def _detect_noise(looks: Sequence[_Look]) -> list[FrameFault]:
    hits = {index: look.noise for index, look in enumerate(looks) if look.noise is not None}
    if not hits:
        return []
    evidence = (
        f"{_name_frames(tuple(hits), len(looks)).capitalize()}: neighbouring pixels are correlated "
        f"by at most {max(hits.values()):.2f} (a picture has more than {_KINSHIP})."
    )
    remedy = (
        "Noise without NaN is how an encoder whose fp32 layers were lowered, or a broken attention "
        "kernel looks. Run again with --precision text_encoder=fp32, then with --precision fp32, "
        "and without SageAttention or torch.compile if you use them."
    )
    return [FrameFault("noise", tuple(hits), evidence, remedy)]


_KINSHIP = 0.25  # correlation of neighbours, below which they are strangers
_CONTRAST = 12.0  # standard deviation of luma that noise has at least, of 255
_TAILS = 5.0  # kurtosis: 1.8 for uniform, 3 for normal noise, hundreds for stars on a night sky


def _measure_noise(frame: Frames) -> float | None:
    """The largest neighbour correlation of a frame that is white noise, None for a picture.

    Luma is tested, because the chroma of video is smoothed by its subsampling; of a large frame
    the middle 256x256 pixels.
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
    """The larger magnitude of the horizontal and vertical lag-1 correlation; 1 without variance."""
    import numpy as np

    centred = luma - luma.mean()
    variance = float((centred**2).mean())
    if variance == 0:
        return 1.0
    across = float((centred[:, 1:] * centred[:, :-1]).mean()) / variance
    down = float((centred[1:] * centred[:-1]).mean()) / variance
    return float(np.max(np.abs([across, down])))


_DETECTORS: dict[str, Callable[[Sequence[_Look]], list[FrameFault]]] = {
    "uniform": _detect_uniform,
    "frozen": _detect_frozen,
    "noise": _detect_noise,
}

"""Reading and writing of pictures and clips.

A clip is an RGB uint8 array `[T, H, W, 3]`, a picture `[H, W, 3]`. Clips are written as H.264 in mp4 or VP9
in webm (yuv420p, BT.709), as gif, as one png, jpg or webp, or as a folder of png files. Sound is written as
the track of an mp4 or webm, or as a separate file (`frames.sound`). Each file is written under a temporary
name and renamed when it is complete, so that a full disk or Ctrl-C leaves nothing half-written.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.devices.environment import require_package
from stopdown.devices.maker_formats import has_avx512
from stopdown.errors import InputError, NonFiniteError, OptionError, OutputError, take_first_line
from stopdown.files.outputs import check_target, refuse_nameless, write_numbered, written_beside
from stopdown.frames.frame_faults import lay_on_white, name_frames, require_clip
from stopdown.frames.sound import SOUNDS, Sound, add_track, write_sound

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Frames = np.ndarray[Any, np.dtype[np.uint8]]

FOLDER = "folder"
"""Name of the format that is a folder of png files."""


def choose_format(path: str | os.PathLike[str], frames: int | None) -> str:
    """Choose the format for an output path: a suffix without its dot, or `folder`.

    It is a folder of png files if the path ends in a slash, has no suffix, or is an existing folder.

    Args:
        path: the output path as it was typed.
        frames: number of frames to write; 0 for sound alone, None if it is not known yet.
    """
    refuse_nameless(path)
    text, stem = os.fspath(path), Path(path).with_suffix("")
    while stem.suffix.lower() in SUFFIXES:  # circle.mp4.json is the record of circle.mp4
        stem = stem.with_suffix("")
    suffix = Path(path).suffix.lower()
    is_folder = not suffix or text.endswith(("/", os.sep))
    if frames == 0 and (is_folder or suffix not in SOUNDS):
        raise OptionError(
            f"The output {text} isn't a file of sound, and the pipeline makes sound alone.",
            expected=f"The formats of sound are {' and '.join(SOUNDS)}.",
            remedy=f"Use -o {stem}.wav.",
        )
    if is_folder:
        return FOLDER
    if suffix not in SUFFIXES:
        if Path(path).is_dir():
            return FOLDER
        raise OptionError(
            f"The output {text} ends in {suffix}, which isn't a format that Stopdown writes.",
            expected=f"The formats are {', '.join(VIDEOS)}, {', '.join(PICTURES)} (a single frame), a "
            f"folder of png files, and {', '.join(SOUNDS)} for sound.",
            remedy=f"Use -o {stem}.mp4 for a video, -o {stem}.png for a picture, or -o {stem}/ for a "
            "folder of frames.",
        )
    if frames and suffix in SOUNDS:
        raise OptionError(
            f"The output {text} is a file of sound, and the pipeline makes pictures.",
            expected=f"The formats are {', '.join(VIDEOS)} and {', '.join(PICTURES)} (a single frame).",
            remedy=f"Use -o {stem}{'.mp4' if frames > 1 else '.png'}.",
        )
    if suffix in PICTURES and (frames or 1) > 1:
        raise OptionError(
            f"The output {text} is a single picture, and there are {frames} frames to write.",
            expected=f"A {suffix} file holds one frame.",
            remedy=f"Use -o {stem}.mp4, -o {stem}.gif, or -o {stem}/ for a folder of frames.",
        )
    return suffix[1:]


def check_output(
    path: str | os.PathLike[str],
    frames: int | None,
    *,
    force: bool = True,
    inputs: Iterable[str | Path | None] = (),
) -> str:
    """Check that an output can be written to a path now, and return its format.

    Called before a long run. It writes a small file beside the output and removes it again.

    Args:
        frames: as for `choose_format`.
        force: whether an existing file may be replaced.
        inputs: files that the run reads, which the output must not replace.
    """
    chosen = choose_format(path, frames)
    check_target(path, folder=chosen == FOLDER, force=force, inputs=inputs)
    return chosen


def require_encoder(chosen: str) -> None:
    """Refuse a format for which this Python has no encoder, before the run that it would lose.

    Args:
        chosen: a format from `choose_format`.
    """
    codec = _CODECS[chosen][0] if chosen in _CODECS else ""
    if not codec and f".{chosen}" not in SOUNDS:
        return
    require_package("av", "cli", f"Writing a .{chosen} file")
    import av

    if codec and codec not in av.codecs_available:
        raise OptionError(
            f"This build of PyAV has no encoder {codec}, which a .{chosen} file needs.",
            remedy="Install PyAV's own: pip install --force-reinstall av. Or write a folder of frames with "
            "-o frames/.",
        )


_LARGEST_SIDES = {
    "mp4": 2**14,
    "webm": 2**16 - 2,
    "gif": 2**16 - 1,
    "jpg": 2**16 - 36,
    "jpeg": 2**16 - 36,
    "webp": 2**14 - 1,
}
"""Largest even height or width that the encoder of a format takes; a png has room for 2^31 - 1."""


def check_sides(chosen: str, height: int | None, width: int | None) -> None:
    """Refuse a height or width that a format has no room for.

    Args:
        chosen: a format from `choose_format`.
        height, width: of the frames, in pixels; None if it is not known yet.
    """
    most = _LARGEST_SIDES.get(chosen)
    if most is not None and max(height or 0, width or 0) > most:
        sides = " and ".join(
            f"{name} {side}" for name, side in (("height", height), ("width", width)) if side
        )
        raise OptionError(
            f"A .{chosen} file has no room for a frame of {sides}.",
            expected=f"Each side has {most} pixels at most.",
            remedy="Write a .png or a folder of frames with -o frames/, or a smaller `height` and `width`.",
        )


def write_media(
    path: str | os.PathLike[str],
    frames: Frames | None,
    fps: float = 8.0,
    *,
    sound: Sound | None = None,
    numbered: bool = False,
) -> Path:
    """Write a clip or sound in the format of the path, atomically.

    An existing file is replaced; a folder must be new or empty.

    Args:
        path: a .mp4, .webm, .gif, .png, .jpg, .webp, .wav or .flac file, or a folder (see
            `choose_format`).
        frames: `[T, H, W, 3]` uint8; None for sound alone. Of `[T, H, W, 4]`, png, webp and folders keep
            the transparency, and other formats show white there.
        fps: frames per second, above 0; png files and folders do not store it. A gif counts in
            hundredths of a second and shows at most 50 frames per second.
        sound: sound of the clip: the track of an mp4 or webm, and `sound.wav` in a folder. Other formats
            leave it out.
        numbered: if the file or its record exists, use the first free numbered name instead.

    Returns:
        The path written.

    Raises:
        OptionError: the suffix is unknown, is that of a picture for several frames, or does not suit the
            content; or its format has no room for the frames.
        OutputError: the operating system refused to write, with the reason.
    """
    target = Path(path)
    chosen = choose_format(path, 0 if frames is None else len(require_clip(frames)))
    if frames is not None:
        check_sides(chosen, *frames.shape[1:3])

    def write(part: Path) -> None:
        if frames is not None:
            writer = _write_folder if chosen == FOLDER else WRITERS[f".{chosen}"]
            keeps_alpha = chosen in (FOLDER, "png", "webp")
            writer(part, frames if keeps_alpha else lay_on_white(frames), fps, sound)
        elif sound is not None:
            write_sound(part, sound, chosen)

    if numbered:
        return write_numbered(target, write, ".json")
    check_target(target, folder=chosen == FOLDER)
    with written_beside(target) as part:
        write(part)
    return target


_CODECS = {
    "mp4": ("libx264", {"crf": "16"}, {"movflags": "+faststart"}),
    "webm": ("libvpx-vp9", {"crf": "12", "b": "0", "row-mt": "1"}, {}),
}
"""Codec of each container, with the options of the codec and the container.

At this quality the codec loses less than half precision changes.
"""


def _write_video(
    part: Path, frames: Frames, fps: float, sound: Sound | None, *, container: str
) -> None:
    """Write a video; repeat the last row or column of an odd side, as yuv420p needs even sizes."""
    require_package("av", "cli", "Writing a video")
    import av
    import numpy as np

    height, width = frames.shape[1:3]
    even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    try:
        rate = Fraction(fps).limit_denominator(1001)
        _encode(part, np.ascontiguousarray(even), rate, container, sound)
    except av.FFmpegError as error:
        if isinstance(error, OSError):  # explained by `written_beside`
            raise
        raise OutputError(
            f"{_CODECS[container][0]} can't encode {len(frames)} frames of height {height} and width "
            f"{width}: {_first_line(error)}.",
            remedy="Write a folder of frames with -o frames/, or a smaller `height` and `width`.",
        ) from error


def _encode(part: Path, frames: Frames, rate: Fraction, kind: str, sound: Sound | None) -> None:
    import av
    from av.video.reformatter import Colorspace

    codec, codec_options, options = _CODECS[kind]
    if codec == "libx264" and has_avx512():
        # x264's code for AVX-512 reads memory that was never written (MALLOC_PERTURB_ shows it), so that
        # the same frames gave other bytes now and then; that for AVX2 gives the bytes of plain C.
        codec_options = {**codec_options, "x264-params": "asm=AVX2"}
    with av.open(str(part), "w", format=kind, options=options) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=codec_options)
        stream.height, stream.width = frames.shape[1], frames.shape[2]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        # BT.709, limited range: without these tags players guess from the size.
        context.colorspace = context.color_primaries = context.color_trc = 1
        context.color_range = 1
        encode_sound = add_track(container, sound, kind) if sound is not None else None
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            packed = picture.reformat(
                format="yuv420p", dst_colorspace=Colorspace.ITU709, threads=1
            )  # a pool of threads for each frame takes longer than the frame
            container.mux(stream.encode(packed))
        container.mux(stream.encode(None))
        if encode_sound is not None:
            encode_sound()


def _write_gif(part: Path, frames: Frames, fps: float, sound: Sound | None) -> None:
    """Write a gif with one palette for the whole clip, so that still areas do not flicker."""
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
    """Make a palette of 256 colours for all frames; also return whether it has every colour exactly."""
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
    """Return each frame's milliseconds, as multiples of 10 that on average keep the frame rate."""
    ends = [round(100 * (index + 1) / fps) for index in range(count)]
    steps = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [10 * max(2, step) for step in steps]


_PICTURE_OPTIONS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "JPEG": {"quality": 95, "subsampling": 0},
    "WEBP": {"lossless": True},
}


def _write_picture(
    part: Path, frames: Frames, fps: float, sound: Sound | None, *, kind: str
) -> None:
    from PIL import Image

    Image.fromarray(frames[0]).save(part, format=kind, **_PICTURE_OPTIONS[kind])


def _write_folder(part: Path, frames: Frames, fps: float, sound: Sound | None) -> None:
    part.mkdir()
    for index, frame in enumerate(frames):
        _write_picture(part / f"frame_{index:04d}.png", frame[None], fps, None, kind="PNG")
    if sound is not None:
        write_sound(part / "sound.wav", sound, "wav")


VIDEOS = (".mp4", ".webm", ".gif")
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
"""Suffixes of files with one frame; `VIDEOS` has those with several."""

WRITERS: dict[str, Callable[..., None]] = {
    ".mp4": functools.partial(_write_video, container="mp4"),
    ".webm": functools.partial(_write_video, container="webm"),
    ".gif": _write_gif,
    ".png": functools.partial(_write_picture, kind="PNG"),
    ".jpg": functools.partial(_write_picture, kind="JPEG"),
    ".jpeg": functools.partial(_write_picture, kind="JPEG"),
    ".webp": functools.partial(_write_picture, kind="WEBP"),
}
SUFFIXES = (*WRITERS, *SOUNDS)
"""Suffixes of all files that can be written."""


def to_uint8(frames: np.ndarray[Any, Any]) -> Frames:
    """Convert frames to 8 bits, rounded to nearest; values outside 0 to 1 are clamped.

    Args:
        frames: `[T, H, W, C]` floating, 0 (black) to 1 (white).

    Returns:
        The frames as `[T, H, W, C]` uint8.

    Raises:
        NonFiniteError: a value is NaN or Inf.
    """
    import numpy as np

    broken = ~np.isfinite(frames)
    if broken.any():
        where = np.flatnonzero(broken.reshape(len(frames), -1).any(axis=1)).tolist()
        nan = int(np.isnan(frames).sum())
        raise NonFiniteError(
            f"The decoded frames hold {nan} NaN and {int(broken.sum()) - nan} Inf among "
            f"{frames.size} values, in {name_frames(where, len(frames))}.",
            expected="Every value must be finite: a NaN that is cast to a pixel turns black.",
            remedy='Use precision="vae=fp32", or precision="fp32" for the whole pipeline.',
        )
    scaled = np.clip(frames.astype(np.float32), 0.0, 1.0) * np.float32(255.0)
    return np.asarray(np.rint(scaled).astype(np.uint8))


def draw_preview(frames: Frames) -> str:
    """Draw at most four frames of a clip side by side, at most 72 pixels high, as WebP in base64.

    Args:
        frames: `[T, H, W, 3]` or `[T, H, W, 4]` uint8.
    """
    import base64
    import io

    import numpy as np
    from PIL import Image

    chosen = frames[np.linspace(0, len(frames) - 1, min(4, len(frames))).round().astype(int)]
    strip = Image.fromarray(np.concatenate(list(lay_on_white(chosen)), axis=1))
    if strip.height > 72:
        strip = strip.resize((max(1, round(strip.width * 72 / strip.height)), 72))
    held = io.BytesIO()
    strip.save(held, "WEBP", quality=70)
    return base64.b64encode(held.getvalue()).decode("ascii")


LARGEST_PICTURE = 2**26
"""Maximum number of pixels in a picture or frame that is read; one of 8K video has 33 million."""

MOST_CLIP_BYTES = 2**32
"""Maximum bytes of frames that are read from one clip: 690 frames of 1920x1080."""

_PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "AVIF")
"""Formats that Pillow decodes by itself; for others, such as EPS, it starts a program."""

_VIDEO_FORMATS = (
    "mov,matroska,avi,gif,flv,ogg,mpegts,mpeg,asf,m4v,h264,hevc,apng,"
    "png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe"
)
"""FFmpeg formats that contain their frames; for playlists, FFmpeg would open the files listed in them."""


def read_image(path: str | os.PathLike[str]) -> Frames:
    """Read a picture as `[H, W, 3]` uint8, rotated by its EXIF data, with transparency on white."""
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
            f"The file {source} can't be read as a picture: {_first_line(error)}.",
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

    if picture.mode in ("F", "I"):  # convert() would make them black or white
        raise ValueError(
            f"its values have 32 bits (mode {picture.mode}), with no range that is known"
        )
    if picture.mode.startswith("I;16"):  # convert() would clip 16 bits at 255
        return picture.point(lambda value: value / 256, "L").convert("RGB")
    if picture.has_transparency_data:
        clear = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return picture.convert("RGB")


def read_video(path: str | os.PathLike[str], limit: int | None = None) -> Frames:
    """Read the frames of a clip, `[T, H, W, 3]` uint8, turned as its file says.

    Args:
        path: a video file, a gif, a picture (one frame), or a folder of png files, in the order of the
            numbers in their names.
        limit: maximum number of frames to read; None for all.

    Raises:
        InputError: the file is missing, contains no video, is damaged, or has more than
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
                remedy="Cut it or make it smaller first, or set `frames` to the number of frames to read.",
            )
        frames.append(frame)
    return np.stack(frames)


def iterate_frames(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Frames]:
    """Yield the frames of a clip as they are read, `[H, W, 3]` uint8: at least one, all of one size.

    Args:
        path, limit: see `read_video`.
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
    require_package("av", "cli", "Reading a video")
    import av
    import numpy as np

    options = {"format_whitelist": _VIDEO_FORMATS, "protocol_whitelist": "file"}
    try:
        with av.open(f"file:{source}", container_options=options) as container:
            context = container.streams.video[0].codec_context
            if context is None:
                raise _refuse_video(source, "FFmpeg doesn't know its codec")
            _refuse_large(source, context.width, context.height)
            context.options = {"max_pixels": str(LARGEST_PICTURE)}
            for frame in container.decode(video=0):
                turns = round(frame.rotation / 90)  # of a phone that was held upright
                pixels = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
                yield np.ascontiguousarray(np.rot90(pixels, turns))
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise _refuse_video(source, _first_line(error)) from error


def _iterate_folder(folder: Path) -> Iterator[Frames]:
    paths = sorted(folder.glob("[!.]*.png"), key=_split_numbers)
    if not paths:
        raise InputError(
            f"The folder {folder} holds no png files.",
            expected="A folder of frames holds frame_0000.png, frame_0001.png and so on.",
            remedy=f"To see what is there: ls {folder}",
        )
    yield from map(read_image, paths)


def _split_numbers(path: Path) -> list[tuple[int, str]]:
    """Return a sort key by which `2.png` comes before `10.png`: the parts of a name, as numbers or text."""
    parts = re.findall(r"[0-9]+|[^0-9]+", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _require_file(path: str | os.PathLike[str]) -> Path:
    source = Path(path)
    if not source.is_file():
        found = "it is a folder" if source.is_dir() else "there is no such file"
        raise InputError(
            f"The file {source} can't be read: {found}.",
            expected=f"Relative paths start from {Path.cwd()}.",
            remedy=f"To see what is there: ls {source.parent}",
        )
    return source


def _refuse_video(source: Path, cause: str) -> InputError:
    return InputError(
        f"The file {source} can't be read as a video: {cause}.",
        expected="Videos are mp4, webm, mov, gif, or another format that FFmpeg reads.",
        remedy="Play it to see whether it is damaged, and save it again as mp4.",
    )


def _first_line(error: Exception) -> str:
    return take_first_line(getattr(error, "strerror", None) or error).rstrip(".")

"""Clips in and out, and the faults of finished frames."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter
from PIL.PngImagePlugin import PngInfo

from stopdown.errors import InputError, NonFiniteError, OptionError, OutputError
from stopdown.frames import frame_faults, media
from stopdown.frames.frame_faults import find_frame_faults
from stopdown.frames.media import (
    check_output,
    choose_format,
    draw_preview,
    read_image,
    read_video,
    to_uint8,
    write_media,
)
from stopdown.frames.sound import read_sound, to_sound


def draw_clip(frames: int = 6, height: int = 48, width: int = 64) -> np.ndarray:
    """A red disc that moves right over a sky that brightens towards the ground."""
    clip = []
    for index in range(frames):
        picture = Image.new("RGB", (width, height))
        draw = ImageDraw.Draw(picture)
        for row in range(height):
            draw.line([(0, row), (width, row)], (90 + row, 140 + row, 200))
        left = 4 + 5 * index
        draw.ellipse([left, 14, left + 18, 32], (215, 38, 45))
        clip.append(np.asarray(picture))
    return np.stack(clip)


def repeat(picture: Image.Image | np.ndarray, frames: int = 1) -> np.ndarray:
    return np.stack([np.asarray(picture)] * frames)


def fill(colour: tuple[int, int, int], frames: int = 1, size: int = 64) -> np.ndarray:
    return np.full((frames, size, size, 3), colour, np.uint8)


def kinds(frames: np.ndarray) -> list[str]:
    return [fault.kind for fault in find_frame_faults(frames)]


# Where the output goes


@pytest.mark.parametrize(
    ("path", "frames", "chosen"),
    [
        ("clip.mp4", 9, "mp4"),
        ("clip.MP4", 9, "mp4"),
        ("clip.gif", 9, "gif"),
        ("clip.png", 1, "png"),
        ("clip", 9, "folder"),
        ("clip/", 9, "folder"),
        ("clip.v2/", 9, "folder"),
    ],
)
def test_a_path_names_its_format(path: str, frames: int, chosen: str) -> None:
    """The suffix decides; a path without one, or with a slash at its end, is a folder."""
    assert choose_format(path, frames) == chosen


def test_checking_an_output_leaves_nothing(tmp_path: Path) -> None:
    """The check before a run writes a probe, and removes it."""
    assert check_output(tmp_path / "clip.mp4", 9) == "mp4"
    assert check_output(f"{tmp_path}/frames/", 9) == "folder"
    assert list(tmp_path.iterdir()) == []


def test_checking_an_output_keeps_the_file_that_is_there(tmp_path: Path) -> None:
    """A file that will be replaced after the run is untouched by the check before it."""
    (tmp_path / "clip.mp4").write_text("old")
    check_output(tmp_path / "clip.mp4", 9)
    assert (tmp_path / "clip.mp4").read_text() == "old"


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    """Frames never mix with what is in a folder already; an empty folder is welcome."""
    folder = tmp_path / "frames"
    folder.mkdir()
    assert check_output(folder, 9) == "folder"
    (folder / "notes.txt").write_text("mine")
    for attempt in (check_output, lambda path, _: write_media(path, draw_clip())):
        with pytest.raises(OutputError, match=r"frames isn't empty.*Choose another folder with -o"):
            attempt(folder, 9)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "the disk is full. Nothing half-written was left behind. Free some space"),
        (errno.EROFS, "the disk is read-only."),
        (errno.EACCES, "you may not write there."),
        (errno.EIO, "Input/output error."),
    ],
)
def test_every_refusal_of_the_system_has_a_cause(
    code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSError at the check becomes an OutputError that names path, cause and remedy."""

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OutputError) as caught:
        check_output(tmp_path / "clip.mp4", 9)
    assert f"The output {tmp_path}/clip.mp4 couldn't be written: {words}" in str(caught.value)


# Written whole or not at all


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif", "frames"])
def test_a_clip_comes_back(name: str, tmp_path: Path) -> None:
    """What was written is read back with its number of frames, its size and its picture."""
    clip = draw_clip()
    assert write_media(tmp_path / name, clip, fps=8) == tmp_path / name
    again = read_video(tmp_path / name)
    assert again.shape == clip.shape
    assert again.dtype == np.uint8
    assert np.abs(again.astype(int) - clip).mean() < 3
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(read_video(tmp_path / name, limit=2)) == 2


def test_png_files_keep_every_bit(tmp_path: Path) -> None:
    """A png and a folder of png files lose nothing, and the frames are named in order."""
    clip = draw_clip(12)
    write_media(tmp_path / "one.png", clip[:1])
    write_media(tmp_path / "all", clip)
    assert np.array_equal(read_image(tmp_path / "one.png"), clip[0])
    assert np.array_equal(read_video(tmp_path / "all"), clip)
    assert (tmp_path / "all" / "frame_0011.png").is_file()


@pytest.mark.parametrize(("height", "width"), [(47, 63), (1, 1), (2, 3)])
def test_odd_sizes_are_padded_by_their_edge(height: int, width: int, tmp_path: Path) -> None:
    """An odd height or width gains one row or column in mp4, as yuv420p wants."""
    clip = draw_clip(3)[:, :height, :width]
    write_media(tmp_path / "clip.mp4", clip)
    again = read_video(tmp_path / "clip.mp4")
    assert again.shape[1:3] == (height + height % 2, width + width % 2)
    assert np.abs(again[:, :height, :width].astype(int) - clip).mean() < 6


def test_an_mp4_is_h264_that_starts_at_once(tmp_path: Path) -> None:
    """The file is H.264 yuv420p in BT.709 at the asked speed, its index before its data."""
    import av

    write_media(tmp_path / "clip.mp4", draw_clip(), fps=23.976)
    data = (tmp_path / "clip.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert stream.codec_context.colorspace == 1
        assert float(stream.average_rate) == pytest.approx(23.976, abs=0.001)


def test_saturated_colours_survive_the_codec(tmp_path: Path) -> None:
    """Flat colours come back from mp4 within the steps of 8-bit limited-range video."""
    for colour in [(215, 38, 45), (35, 150, 60), (45, 75, 215), (255, 255, 255), (0, 0, 0)]:
        write_media(tmp_path / "clip.mp4", fill(colour, frames=2))
        again = read_video(tmp_path / "clip.mp4").reshape(-1, 3).mean(0)
        assert np.abs(again - colour).max() <= 3


def test_a_gif_of_few_colours_is_exact(tmp_path: Path) -> None:
    """A clip of at most 256 colours keeps them all in a gif, without dithering."""
    clip = draw_clip(4) // 64 * 64
    write_media(tmp_path / "clip.gif", clip)
    assert np.array_equal(read_video(tmp_path / "clip.gif"), clip)


def test_a_gif_keeps_its_speed(tmp_path: Path) -> None:
    """Hundredths of a second are shared out so that 24 frames at 24 a second last one second."""
    assert sum(media._gif_durations(24, 24)) == 1000
    assert media._gif_durations(3, 200) == [20, 20, 20]
    write_media(tmp_path / "clip.gif", draw_clip(), fps=8)
    with Image.open(tmp_path / "clip.gif") as gif:
        assert gif.info["duration"] in (120, 130)
        assert gif.info["loop"] == 0


def test_what_is_no_clip_is_a_programming_error(tmp_path: Path) -> None:
    """Floats, a missing axis or no frames at all are refused before anything is written."""
    for wrong in (np.zeros((2, 8, 8, 3)), np.zeros((8, 8, 3), np.uint8), draw_clip()[:0]):
        with pytest.raises(ValueError, match=r"a clip is a uint8 array \[T, H, W, 3\]"):
            write_media(tmp_path / "clip.mp4", wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["mp4", "webm", "gif", "jpg", "jpeg", "webp"])
def test_a_format_has_room_for_its_largest_side(kind: str, tmp_path: Path) -> None:
    """One row of the stated length is written; a longer one was an error of the encoder, mostly raw."""
    most = media._LARGEST_SIDES[kind]
    write_media(tmp_path / f"wide.{kind}", np.zeros((1, 2, most, 3), np.uint8))
    with pytest.raises(OptionError) as caught:
        write_media(tmp_path / f"wider.{kind}", np.zeros((1, 2, most + 1, 3), np.uint8))
    assert str(caught.value) == (
        f"A .{kind} file has no room for a frame of height 2 and width {most + 1}. Each side has {most} "
        "pixels at most. Write a .png or a folder of frames with -o frames/, or a smaller `height` and "
        "`width`."
    )
    assert [path.name for path in tmp_path.iterdir()] == [f"wide.{kind}"]


def test_a_size_that_the_codec_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an encoder refuses beyond its limits here is an OutputError with another way to write it."""
    monkeypatch.setattr(media, "_LARGEST_SIDES", {})
    with pytest.raises(OutputError) as caught:
        write_media(tmp_path / "clip.mp4", np.zeros((1, 2, 20000, 3), np.uint8))
    assert "libx264 can't encode 1 frames of height 2 and width 20000" in str(caught.value)
    assert "Write a folder of frames with -o frames/" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif", "frames"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_failure_leaves_nothing_half_written(
    name: str, failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C or a full disk in the middle of writing leaves no new file, and the old one whole."""
    if name != "frames":
        (tmp_path / name).write_text("old")

    def fail(part: Path, *_: object) -> None:
        if name == "frames":
            part.mkdir()
        (part / "frame_0000.png" if name == "frames" else part).write_bytes(b"half")
        raise failure

    monkeypatch.setattr(media, "_encode", fail)
    monkeypatch.setitem(media.WRITERS, ".gif", fail)
    monkeypatch.setattr(media, "_write_folder", fail)
    expected = OutputError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_media(tmp_path / name, draw_clip())
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == ({} if name == "frames" else {name: "old"})


# Floats to pixels


def test_floats_are_rounded_and_clamped() -> None:
    """0 to 1 becomes 0 to 255 by rounding, as Diffusers does; what lies outside is clamped."""
    values = np.array([-0.5, 0.0, 0.001, 0.5, 0.998, 1.0, 7.0]).reshape(7, 1, 1, 1)
    pixels = to_uint8(np.repeat(values, 3, axis=3).astype(np.float16))
    assert pixels[:, 0, 0, 0].tolist() == [0, 0, 0, 128, 255, 255, 255]
    assert pixels.dtype == np.uint8


def test_nan_never_becomes_black() -> None:
    """A NaN or Inf among the floats is an error that counts and places it."""
    frames = np.full((9, 4, 4, 3), 0.5)
    frames[3, 0, 0] = np.nan
    frames[4, 1, 1, 0] = np.inf
    with pytest.raises(NonFiniteError) as caught:
        to_uint8(frames)
    assert str(caught.value) == (
        "The decoded frames hold 3 NaN and 1 Inf among 432 values, in frames 4, 5 of 9. "
        "Every value must be finite: a NaN that is cast to a pixel turns black. "
        'Use precision="vae=fp32", or precision="fp32" for the whole pipeline.'
    )


# Reading


def test_pictures_are_read_as_they_look(tmp_path: Path) -> None:
    """Transparency is laid on white, 16 bits become 8, and EXIF orientation is followed."""
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (read_image(tmp_path / "clear.png") == 255).all()
    Image.fromarray(np.full((4, 4), 32896, np.uint16)).save(tmp_path / "deep.png")
    assert (read_image(tmp_path / "deep.png") == 128).all()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 4)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").shape == (8, 4, 3)


def test_a_picture_is_a_video_of_one_frame(tmp_path: Path) -> None:
    """A png can be given wherever a video is read."""
    write_media(tmp_path / "one.png", draw_clip(1))
    assert np.array_equal(read_video(tmp_path / "one.png"), draw_clip(1))


def test_a_name_with_a_colon_is_no_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FFmpeg reads `2026-11-30T12:30.mp4`, as recorders name files, as an address of its own."""
    monkeypatch.chdir(tmp_path)
    write_media("2026-11-30T12:30.mp4", draw_clip(2))
    assert len(read_video("2026-11-30T12:30.mp4")) == 2
    write_media("12:30.wav", None, sound=to_sound(np.zeros(800), 8000))
    assert read_sound("12:30.wav").rate == 8000


def test_a_truncated_video_is_an_error(tmp_path: Path) -> None:
    """Half an mp4 without its frames is refused rather than read as nothing."""
    write_media(tmp_path / "whole.mp4", draw_clip())
    data = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(data[: data.index(b"mdat")])
    with pytest.raises(InputError, match=r"half.mp4 can't be read as a video"):
        read_video(tmp_path / "half.mp4")


def test_folders_that_are_no_clip_say_why(tmp_path: Path) -> None:
    """A folder without png files, or with pictures of two sizes, is no clip."""
    with pytest.raises(InputError, match="holds no png files"):
        read_video(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    Image.new("RGB", (4, 6)).save(tmp_path / "b.png")
    with pytest.raises(InputError, match=r"differ in size: \(4, 4\) and \(6, 4\)"):
        read_video(tmp_path)


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_a_video_is_turned_as_its_file_says(degrees: int, tmp_path: Path) -> None:
    """A phone that is held upright stores its pictures lying, with a matrix that turns them clockwise."""
    clip = draw_clip()
    write_media(tmp_path / "clip.mp4", np.rot90(clip, degrees // 90, axes=(1, 2)))
    content = bytearray((tmp_path / "clip.mp4").read_bytes())
    at = content.index(b"tkhd") + 4 + 40  # the matrix of its track
    right = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    a, b, c, d = (65536 * x for x in right)
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 2**30)
    (tmp_path / "turned.mp4").write_bytes(content)
    found = read_video(tmp_path / "turned.mp4")
    assert found.shape == clip.shape
    assert np.abs(found.astype(int) - clip).mean() < 3


def test_frames_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """By their text `10.png` would come before `2.png`; what macOS adds beside a file is no frame."""
    for number in (1, 2, 10):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "._1.png").write_bytes(b"of macOS")
    assert read_video(tmp_path)[:, 0, 0, 0].tolist() == [1, 2, 10]


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_a_picture_without_a_known_range_is_refused(kind: str, tmp_path: Path) -> None:
    """A depth map of 0 to 1 became black, and one of 0 to 65535 white, without a word."""
    Image.fromarray(np.linspace(0, 1, 64).reshape(8, 8).astype(kind)).save(tmp_path / "depth.tif")
    with pytest.raises(InputError, match=r"depth.tif can't be read .* its values have 32 bits"):
        read_image(tmp_path / "depth.tif")


@pytest.mark.parametrize("name", ["one.png", "clip.mp4", "clip.gif"])
def test_pictures_and_frames_have_a_largest_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has more pixels than the limit is refused before it is decoded."""
    write_media(tmp_path / name, draw_clip(1 if name.endswith("png") else 3))
    read = read_image if name.endswith("png") else read_video
    read(tmp_path / name)
    monkeypatch.setattr(media, "LARGEST_PICTURE", 100)
    with pytest.raises(InputError, match=rf"{name} have \d+x\d+ pixels\. At most 100 pixels"):
        read(tmp_path / name)


def test_a_frame_that_grows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder has the limit, too: a later frame may be larger than the file says."""
    write_media(tmp_path / "clip.mp4", draw_clip())
    monkeypatch.setattr(media, "_refuse_large", lambda *_: None)
    monkeypatch.setattr(media, "LARGEST_PICTURE", 100)
    with pytest.raises(InputError, match="can't be read as a video"):
        read_video(tmp_path / "clip.mp4")


def test_a_clip_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are counted as they come; the message says how many fitted."""
    write_media(tmp_path / "clip.mp4", draw_clip(5))
    monkeypatch.setattr(media, "MOST_CLIP_BYTES", 3 * draw_clip(1).nbytes)
    with pytest.raises(InputError, match=r"clip\.mp4 has more than 3 frames of"):
        read_video(tmp_path / "clip.mp4")
    assert len(read_video(tmp_path / "clip.mp4", limit=3)) == 3


def test_a_video_of_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    """A codec that FFmpeg does not know is named, and is no AttributeError."""
    write_media(tmp_path / "clip.mp4", draw_clip())
    content = (tmp_path / "clip.mp4").read_bytes()
    (tmp_path / "clip.mp4").write_bytes(content.replace(b"avc1", b"xxxx"))
    with pytest.raises(InputError, match="FFmpeg doesn't know its codec"):
        read_video(tmp_path / "clip.mp4")


def test_whatever_pillow_raises_is_a_sentence(tmp_path: Path) -> None:
    """A png whose text unpacks to 100 MB makes Pillow raise a ValueError."""
    info = PngInfo()
    info.add_text("bomb", "x" * 100_000_000, zip=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "bomb.png", pnginfo=info)
    with pytest.raises(InputError, match=r"bomb\.png can't be read as a picture: Decompressed"):
        read_image(tmp_path / "bomb.png")


# Faults of finished frames: what is caught


def test_black_frames_are_found() -> None:
    """Black frames are named, with their numbers, also when only some frames are black."""
    clip = draw_clip(9, 64, 64)
    clip[4:6] = 0
    (fault,) = find_frame_faults(clip)
    assert (fault.kind, fault.frames) == ("black", (4, 5))
    assert fault.evidence == (
        "Frames 5, 6 of 9: mean colour (0, 0, 0) of 255, standard deviation at "
        "most 0.00 (a real picture has more than 2.5)."
    )
    assert "--precision text_encoder=fp32,vae=fp32" in fault.remedy


@pytest.mark.parametrize(
    ("colour", "kind"),
    [
        ((0, 0, 0), "black"),
        ((9, 9, 9), "black"),
        ((128, 128, 128), "grey"),
        ((126, 128, 127), "grey"),
        ((255, 255, 255), "grey"),
        ((120, 60, 40), "flat"),
    ],
)
def test_one_colour_is_found_also_after_the_codec(
    colour: tuple[int, int, int], kind: str, tmp_path: Path
) -> None:
    """Frames of one colour with the grain of a decoder are found, before and after H.264."""
    grain = np.random.default_rng(0).normal(0, 1.2, (4, 64, 64, 3))
    clip = np.clip(np.rint(fill(colour, 4) + grain), 0, 255).astype(np.uint8)
    assert kinds(clip) == [kind]
    write_media(tmp_path / "clip.mp4", clip)
    assert kinds(read_video(tmp_path / "clip.mp4")) == [kind]


def test_a_frozen_clip_is_found_also_after_the_codec(tmp_path: Path) -> None:
    """One picture repeated is frozen, with small differences of the codec or a decoder."""
    clip = repeat(draw_clip()[2], 9)
    (fault,) = find_frame_faults(clip)
    assert (fault.kind, fault.frames) == ("frozen", tuple(range(9)))
    assert fault.evidence == (
        "All 9 frames show the same picture: no block of 4x4 pixels changes by more than 0.00 of "
        "255 (limit 2)."
    )
    write_media(tmp_path / "clip.mp4", clip)
    assert kinds(read_video(tmp_path / "clip.mp4")) == ["frozen"]
    grain = np.random.default_rng(0).integers(-1, 2, clip.shape)
    assert kinds((clip + grain).astype(np.uint8)) == ["frozen"]


@pytest.mark.parametrize("size", [64, 300])
def test_noise_is_found_also_after_the_codec(size: int, tmp_path: Path) -> None:
    """Uniform, normal and colourless noise is found, before and after H.264."""
    random = np.random.default_rng(0)
    uniform = random.integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    normal = np.clip(random.normal(128, 40, uniform.shape), 0, 255).astype(np.uint8)
    grey = np.repeat(uniform[..., :1], 3, axis=3)
    for clip in (uniform, normal, grey):
        assert kinds(clip) == ["noise"]
        write_media(tmp_path / "clip.mp4", clip)
        assert kinds(read_video(tmp_path / "clip.mp4")) == ["noise"]
    (fault,) = find_frame_faults(uniform)
    assert "neighbouring pixels are correlated by at most 0." in fault.evidence
    assert "--precision text_encoder=fp32" in fault.remedy


def test_a_clip_without_any_picture_is_not_also_frozen() -> None:
    """Nine black frames are one fault, not two."""
    assert kinds(fill((0, 0, 0), 9)) == ["black"]
    assert kinds(np.concatenate([fill((0, 0, 0), 4), fill((128, 128, 128), 4)])) == [
        "black",
        "grey",
    ]


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("uniform", fill((0, 0, 0), 3)),
        ("uniform", fill((128, 128, 128), 3)),
        ("uniform", fill((200, 60, 40), 3)),
        ("frozen", repeat(draw_clip()[2], 3)),
        ("noise", np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)),
    ],
)
def test_each_fault_has_one_detector(
    name: str, clip: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault is found with its detector, and not found when that detector is off."""
    (kind,) = kinds(clip)
    monkeypatch.delitem(frame_faults._DETECTORS, name)
    assert kind not in kinds(clip)


# Faults of finished frames: near misses


def draw_night(lightest: int = 15) -> Image.Image:
    """Hills before a night sky, no pixel lighter than `lightest`."""
    picture = Image.new("RGB", (96, 64), (1, 1, 3))
    draw = ImageDraw.Draw(picture)
    draw.polygon([(0, 64), (0, 44), (30, 26), (60, 48), (96, 30), (96, 64)], (6, 7, lightest))
    draw.polygon([(0, 64), (0, 56), (50, 40), (96, 60), (96, 64)], (2, 3, 4))
    return picture


def draw_stars(share: float, size: int = 128) -> np.ndarray:
    """A black sky with single-pixel stars."""
    random = np.random.default_rng(0)
    sky = np.zeros((size, size, 3), np.uint8)
    sky[random.random((size, size)) < share] = 255
    return sky


def draw_moon() -> Image.Image:
    """A small moon alone in a black sky."""
    picture = Image.new("RGB", (256, 256))
    ImageDraw.Draw(picture).ellipse([180, 40, 190, 50], (230, 230, 210))
    return picture


def draw_bird() -> Image.Image:
    """A small bird alone in a plain sky."""
    picture = Image.new("RGB", (512, 512), (170, 200, 235))
    ImageDraw.Draw(picture).polygon([(250, 250), (262, 256), (274, 250), (262, 262)], (60, 60, 70))
    return picture


def draw_fog() -> Image.Image:
    """Fog: one soft gradient of 12 levels."""
    rows = np.linspace(180, 192, 64).round().astype(np.uint8)
    return Image.fromarray(np.repeat(np.repeat(rows[:, None, None], 64, 1), 3, 2))


def draw_gravel(radius: float) -> Image.Image:
    """Gravel: grains of about `radius` pixels."""
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (128, 128, 3), dtype=np.uint8))
    soft = np.asarray(noise.filter(ImageFilter.GaussianBlur(radius))).astype(float)
    stretched = (soft - soft.mean()) / soft.std() * 45 + 120
    return Image.fromarray(np.clip(stretched, 0, 255).astype(np.uint8))


def draw_grainy(deviation: float) -> np.ndarray:
    """A picture under the noise of high sensitivity."""
    picture = np.asarray(Image.fromarray(draw_clip()[3]).resize((256, 192)), float)
    noise = np.random.default_rng(0).normal(0, deviation, picture.shape)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def draw_dithered() -> np.ndarray:
    """A picture in black and white dots."""
    picture = Image.fromarray(draw_clip()[3]).resize((256, 192)).convert("L").convert("1")
    return np.asarray(picture.convert("RGB"))


def draw_checkers(pixels: int) -> np.ndarray:
    rows, columns = np.mgrid[:128, :128] // pixels
    return np.repeat(((rows + columns) % 2 * 255).astype(np.uint8)[..., None], 3, axis=2)


@pytest.mark.parametrize(
    "picture",
    [
        draw_night(),
        draw_stars(0.0005),
        draw_stars(0.01),
        draw_stars(0.04),
        draw_moon(),
        draw_bird(),
        draw_fog(),
        draw_gravel(0.8),
        draw_gravel(3.0),
        draw_grainy(30),
        draw_grainy(60),
        draw_dithered(),
        draw_checkers(1),
        draw_checkers(2),
        draw_checkers(8),
        draw_clip()[2],
    ],
    ids=lambda picture: None,
)
def test_real_pictures_are_left_alone(picture: Image.Image | np.ndarray) -> None:
    """Night, stars, a moon, a bird, fog, gravel, grain, dots and checkers are pictures."""
    assert kinds(repeat(picture)) == []


def draw_still(change: str) -> np.ndarray:
    """A still scene of 9 frames in which one small thing changes."""
    clip = repeat(Image.fromarray(draw_clip()[2]).resize((256, 192)), 9)
    if change == "speck":
        for index in range(9):
            clip[index, 20:23, 30 + index : 33 + index] = 250
    if change == "blink":
        clip[5, 100:104, 100:104] = 0
    if change == "dusk":
        for index in range(9):
            clip[index] = clip[index] - index
    return clip


@pytest.mark.parametrize("change", ["speck", "blink", "dusk"])
def test_a_still_scene_with_tiny_motion_is_not_frozen(change: str, tmp_path: Path) -> None:
    """A moving speck, one blink or a slow dusk is motion, before and after H.264."""
    clip = draw_still(change)
    assert kinds(clip) == []
    write_media(tmp_path / "clip.mp4", clip)
    assert kinds(read_video(tmp_path / "clip.mp4")) == []


def test_one_picture_is_not_frozen() -> None:
    """A single frame cannot stand still."""
    assert kinds(draw_clip(1)) == []


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_tiny_frames_are_measured_too(size: int) -> None:
    """Frames smaller than a block are judged, and raise nothing."""
    assert kinds(fill((0, 0, 0), 2, size)) == ["black"]
    random = np.random.default_rng(0).integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    assert "frozen" not in kinds(random)


@pytest.mark.thorough
def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    """Whatever memory held before: processes whose memory begins otherwise write the same mp4."""
    code = """
import sys
import numpy as np
from stopdown.frames.media import write_media

for number in range(60):
    draw = np.random.default_rng(number)
    side = (2, 4, 8)[number % 3]
    small = draw.integers(60, 200, (9 if number % 2 else 1, 32 // side, 32 // side, 3))
    blocks = np.broadcast_to(small, (9, *small.shape[1:])).repeat(side, 1).repeat(side, 2)
    frames = blocks + draw.normal(0, (3, 10, 25)[number // 20], blocks.shape)
    path = write_media(sys.argv[1], frames.clip(0, 255).astype(np.uint8))
    print(number, path.read_bytes().hex())
"""
    written = set()
    for filler in ("0", "85"):
        environment = {**os.environ, "MALLOC_PERTURB_": filler}
        command = [sys.executable, "-c", code, tmp_path / "clip.mp4"]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        written |= set(done.stdout.splitlines())
    assert len(written) == 60


def draw_layers() -> np.ndarray:
    """Two layers: a green sheet, and a red square of half opacity on nothing."""
    layers = np.zeros((2, 32, 32, 4), np.uint8)
    layers[0] = (0, 200, 0, 255)
    layers[1, 8:24, 8:24] = (200, 0, 0, 128)
    return layers


def test_layers_keep_their_transparency_or_lie_on_white(tmp_path: Path) -> None:
    layers = draw_layers()
    folder = write_media(f"{tmp_path / 'layers'}/", layers)
    files = [folder / "frame_0000.png", folder / "frame_0001.png"]
    files += [write_media(tmp_path / name, layers[1:]) for name in ("layer.png", "layer.webp")]
    for path, layer in zip(files, layers[[0, 1, 1, 1]], strict=True):
        with Image.open(path) as held:
            assert np.array_equal(np.asarray(held), layer)
    shown = read_image(write_media(tmp_path / "layer.jpg", layers[1:]))
    assert shown[0, 0].tolist() == [255, 255, 255]
    assert abs(shown[16, 16].astype(int) - [227, 127, 127]).max() < 8
    assert read_video(write_media(tmp_path / "layers.mp4", layers)).shape == (2, 32, 32, 3)
    assert draw_preview(layers)


def test_layers_are_seen_as_one_picture() -> None:
    """A layer of one colour is no fault where the whole isn't, and a whole of one colour is one."""
    layers = draw_layers()
    assert kinds(layers) == []
    assert kinds(np.concatenate([layers, layers[:1]])) == ["flat"]
    assert kinds(layers * np.array([0, 0, 0, 1], np.uint8)) == ["black"]

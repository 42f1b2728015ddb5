"""Reading and writing of sound: wav and flac files, and the tracks of videos.

A sound is a float32 array `[channels, samples]`, with full scale at 1. Files store 16 bits per sample.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.devices.environment import require_package
from stopdown.errors import InputError, NonFiniteError, take_first_line

if TYPE_CHECKING:
    import numpy as np

    Samples = np.ndarray[Any, np.dtype[np.float32]]

SOUNDS = (".wav", ".flac")
"""Suffixes of sound files that can be written."""

TRACKS = (".mp4", ".webm")
"""Suffixes of video files that can have a sound track."""

_CODECS = {
    "wav": ("pcm_s16le", "s16"),
    "flac": ("flac", "s16"),
    "mp4": ("aac", "fltp"),
    "webm": ("libopus", "flt"),
}
"""Codec and FFmpeg sample format of each container."""

_RATES = {
    "aac": (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 88200, 96000),
    "libopus": (8000, 12000, 16000, 24000, 48000),
}
"""Sample rates that a codec supports; others are resampled to the next higher one."""

_LAYOUTS = {1: "mono", 2: "stereo"}

MOST_SAMPLES = 2**28
"""Maximum number of samples that are read from a file: 46 minutes of stereo at 48000 Hz."""


@dataclass(frozen=True)
class Sound:
    """Sound with finite samples.

    Attributes:
        samples: `[channels, samples]` float32; written files are clipped to -1 to 1.
        rate: samples per second.
    """

    samples: Samples
    rate: int

    @property
    def seconds(self) -> float:
        return self.samples.shape[1] / self.rate

    def describe(self) -> str:
        """Describe the length, channels and rate: `9.5 s, 2 channels, 44100 Hz`."""
        count = len(self.samples)
        channels = f"{count} channel{'s' * (count != 1)}"
        return f"{self.seconds:.1f} s, {channels}, {self.rate} Hz"


def to_sound(values: np.ndarray[Any, Any], rate: int) -> Sound:
    """Convert samples to a `Sound`.

    Args:
        values: `[samples]`, `[channels, samples]` or `[1, channels, samples]` floating.
        rate: samples per second.

    Raises:
        InputError: there are more than two channels.
        NonFiniteError: a sample is NaN or Inf.
    """
    import numpy as np

    samples = np.asarray(values, np.float32)
    samples = samples[0] if samples.ndim == 3 else np.atleast_2d(samples)
    if len(samples) not in _LAYOUTS:
        raise InputError(
            f"The sound has {len(samples)} channels.", expected="Sound of one or two is written."
        )
    finite = np.isfinite(samples)
    if not finite.all():
        nan = int(np.isnan(samples).sum())
        raise NonFiniteError(
            f"The decoded sound holds {nan} NaN and {int((~finite).sum()) - nan} Inf among {samples.size} "
            "samples.",
            expected="Every sample must be finite: a NaN becomes silence or a click.",
            remedy='Use precision="vae=fp32", or precision="fp32" for the whole pipeline.',
        )
    return Sound(samples, rate)


def write_sound(part: Path, sound: Sound, kind: str) -> None:
    """Write a sound file.

    Args:
        part: path to write, with any suffix.
        kind: `wav` or `flac`.
    """
    require_package("av", "cli", "Writing sound")
    import av

    options = {"fflags": "+bitexact"}  # the same samples give the same bytes
    with av.open(str(part), "w", format=kind, options=options) as container:
        add_track(container, sound, kind)()


def add_track(container: Any, sound: Sound, kind: str) -> Any:
    """Add a sound track to an open media file; return a function that encodes it.

    The two are separate because all streams must be added before a packet of any is written.

    Args:
        container: PyAV container that is open for writing.
        kind: key of the codec: `wav`, `flac`, `mp4` or `webm`.
    """
    codec, form = _CODECS[kind]
    rate = next((x for x in _RATES.get(codec, ()) if x >= sound.rate), None)
    rate = rate or max(_RATES.get(codec, (sound.rate,)))
    stream = container.add_stream(codec, rate=rate, layout=_LAYOUTS[len(sound.samples)])
    stream.codec_context.format = form

    def encode() -> None:
        for frame in _cut(sound, form, rate):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))

    return encode


def _cut(sound: Sound, form: str, rate: int) -> Iterator[Any]:
    """Yield the samples as PyAV frames of about a second each, in a codec's sample format and rate."""
    import av
    import numpy as np

    layout = _LAYOUTS[len(sound.samples)]
    samples: Any = np.clip(sound.samples, -1.0, 1.0)
    source = "fltp"
    if form == "s16":
        samples = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype(np.int16)
        source = "s16p"
    resampler = av.AudioResampler(format=form, layout=layout, rate=rate)
    for start in range(0, samples.shape[1], sound.rate):
        piece = np.ascontiguousarray(samples[:, start : start + sound.rate])
        frame = av.AudioFrame.from_ndarray(piece, format=source, layout=layout)
        frame.sample_rate, frame.pts = sound.rate, start
        yield from resampler.resample(frame)
    yield from resampler.resample(None)


def read_sound(path: str | os.PathLike[str]) -> Sound:
    """Read a sound file, or the sound track of a video.

    Raises:
        InputError: the file is missing, contains no sound, is damaged, or has more than `MOST_SAMPLES`.
    """
    require_package("av", "cli", "Reading sound")
    import av
    import numpy as np

    source, pieces, count = Path(path), [], 0
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}
    try:
        with av.open(f"file:{source}", container_options=options) as container:
            stream = container.streams.audio[0]
            rate = stream.rate
            resampler = av.AudioResampler(format="fltp")
            for frame in container.decode(audio=0):
                for piece in resampler.resample(frame):
                    pieces.append(piece.to_ndarray())
                    count += pieces[-1].size
                if count > MOST_SAMPLES:
                    raise InputError(
                        f"The sound {source} has more than {MOST_SAMPLES} samples.",
                        remedy="Cut it first.",
                    )
    except (av.FFmpegError, IndexError, ValueError, OSError) as error:
        reason = take_first_line(getattr(error, "strerror", None) or error).rstrip(".")
        raise InputError(
            f"The file {source} can't be read as sound: {reason}.",
            expected="Sounds are wav, flac, mp3, ogg, or another format that FFmpeg reads.",
            remedy="Play it to see whether it is damaged, and save it again as wav.",
        ) from error
    if not pieces:
        raise InputError(f"The file {source} holds no sound.", remedy="Play it to hear what it is.")
    return Sound(np.concatenate(pieces, axis=1).astype(np.float32), rate)


_FORMATS = "wav,flac,mp3,ogg,aac,aiff,mov,matroska,avi,mpegts,mpeg"
"""FFmpeg formats that contain their samples; for playlists, FFmpeg would open the files listed in them."""


def draw_wave(sound: Sound, height: int = 72, width: int = 288) -> np.ndarray[Any, Any]:
    """Draw the loudness of a sound over time as one picture, `[1, height, width, 3]` uint8."""
    import numpy as np

    loudest = np.abs(sound.samples).max(axis=0, initial=0.0)
    parts = np.array_split(loudest, width)
    level = np.clip([part.max(initial=0.0) for part in parts], 0.0, 1.0)
    distance = np.abs(np.arange(height) - (height - 1) / 2)[:, None]
    picture = np.full((1, height, width, 3), 255, np.uint8)
    picture[0, distance <= np.maximum(0.5, level * height / 2)] = (60, 90, 130)
    return picture

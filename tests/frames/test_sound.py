"""Tests of sound: files that other libraries read, and faults that can be heard."""

from __future__ import annotations

import wave
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from stopdown.diagnosis.explained import explain_file
from stopdown.errors import InputError, NonFiniteError, OptionError
from stopdown.frames import sound_faults
from stopdown.frames.media import choose_format, read_video, write_media
from stopdown.frames.sound import Sound, draw_wave, read_sound, to_sound
from stopdown.frames.sound_faults import find_sound_faults, read_sound_meanings

RATE = 16000


def draw_chord(seconds: float = 1.0, rate: int = RATE) -> Sound:
    """Two channels of tones that fade, up to 0.6 of full scale."""
    time = np.arange(int(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * pitch * time) for pitch in (220, 331, 442)]
    left = 0.2 * sum(tones) * np.exp(-time)
    return Sound(np.stack([left, 0.5 * left]).astype(np.float32), rate)


def draw_noise(level: float = 0.1) -> Sound:
    random = np.random.default_rng(0)
    return Sound((level * random.standard_normal((2, RATE))).astype(np.float32), RATE)


def kinds(sound: Sound) -> list[str]:
    return [fault.kind for fault in find_sound_faults(sound)]


# Files


def test_a_wav_is_read_by_another_library(tmp_path: Path) -> None:
    """Python's own reader finds each sample within half a step of 16 bits, with channels and rate."""
    sound = draw_chord(1.25)
    write_media(tmp_path / "a.wav", None, sound=sound)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (2, RATE, 2)
        found = np.frombuffer(file.readframes(file.getnframes()), np.int16).reshape(-1, 2).T
    assert found.shape == sound.samples.shape
    assert np.abs(found - 32768.0 * sound.samples).max() <= 0.501


@pytest.mark.parametrize("name", ["a.flac", "a.wav"])
def test_a_flac_is_read_by_another_library(name: str, tmp_path: Path) -> None:
    """libsndfile finds the samples that PyAV wrote, and our own reader as well."""
    sound = draw_chord(0.3)
    write_media(tmp_path / name, None, sound=sound)
    found, rate = soundfile.read(tmp_path / name)
    assert rate == RATE
    assert np.abs(found.T - sound.samples).max() <= 0.501 / 32768
    again = read_sound(tmp_path / name)
    assert again.rate == RATE
    assert np.array_equal(again.samples, found.T.astype(np.float32))


def test_the_same_sound_gives_the_same_bytes(tmp_path: Path) -> None:
    """No version of a library and no time stands in a file."""
    for name in ("a.wav", "b.wav", "a.flac", "b.flac"):
        write_media(tmp_path / name, None, sound=draw_chord())
    for kind in ("wav", "flac"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
        assert b"Lavf" not in (tmp_path / f"a.{kind}").read_bytes()


def test_samples_beyond_full_scale_are_cut(tmp_path: Path) -> None:
    """What is above 1 becomes the largest sample, and never wraps around."""
    loud = Sound(np.array([[-3.0, -1.0, 1.0, 3.0]], np.float32), RATE)
    write_media(tmp_path / "a.wav", None, sound=loud)
    found, _ = soundfile.read(tmp_path / "a.wav", dtype="int16")
    assert found.tolist() == [-32768, -32768, 32767, 32767]


@pytest.mark.parametrize(("name", "rate"), [("a.mp4", 44100), ("a.webm", 44100), ("a.mp4", 800)])
def test_a_video_has_its_track(name: str, rate: int, tmp_path: Path) -> None:
    """Frames and sound lie side by side, as long as each other, whatever rates the codec has."""
    sound = draw_chord(1.0, rate)
    frames = np.random.default_rng(0).integers(0, 255, (8, 32, 32, 3), np.uint8)
    write_media(tmp_path / name, frames, 8, sound=sound)
    assert read_video(tmp_path / name).shape == frames.shape
    with av.open(str(tmp_path / name)) as file:
        (video,), (audio,) = file.streams.video, file.streams.audio
        assert float(video.average_rate or 0) == 8
        assert audio.codec_context.layout.nb_channels == 2
    track = read_sound(tmp_path / name)
    assert track.seconds == pytest.approx(1.0, abs=0.2)
    assert track.samples[0].std() == pytest.approx(sound.samples[0].std(), rel=0.15)


def test_a_folder_of_frames_has_the_sound_beside_them(tmp_path: Path) -> None:
    """A folder keeps the samples in sound.wav."""
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    write_media(tmp_path / "clip", frames, 8, sound=draw_chord())
    assert sorted(x.name for x in (tmp_path / "clip").iterdir()) == [
        *("frame_0000.png", "frame_0001.png", "sound.wav")
    ]
    assert read_sound(tmp_path / "clip" / "sound.wav").samples.shape == (2, RATE)


def test_what_is_no_sound_is_refused(tmp_path: Path) -> None:
    """A damaged file, a video without a track and a picture are named with the reason."""
    (tmp_path / "a.wav").write_bytes(b"RIFF" + bytes(60))
    write_media(tmp_path / "a.mp4", np.zeros((2, 32, 32, 3), np.uint8))
    for name in ("a.wav", "a.mp4", "absent.wav"):
        with pytest.raises(InputError, match=rf"{name} can't be read as sound: .* save it again"):
            read_sound(tmp_path / name)


@pytest.mark.parametrize(
    ("path", "frames", "words"),
    [
        ("a.mp4", 0, "a.mp4 isn't a file of sound, .* Use -o a.wav."),
        ("a", 0, "The output a isn't a file of sound, .* Use -o a.wav."),
        ("a.wav", 9, "a.wav is a file of sound, and the pipeline makes pictures. .* Use -o a.mp4."),
        ("a.flac", 1, "a.flac is a file of sound, .* Use -o a.png."),
    ],
)
def test_a_format_that_cannot_hold_it_is_refused(path: str, frames: int, words: str) -> None:
    """Sound goes into files of sound, and pictures into files of pictures."""
    with pytest.raises(OptionError, match=words):
        choose_format(path, frames)
    assert choose_format("a.wav", None) == choose_format("a.wav", 0) == "wav"


def test_values_that_are_not_finite_are_refused() -> None:
    """A NaN among the samples is counted, and no file is made of it."""
    samples = draw_chord().samples.copy()
    samples[0, 5], samples[1, :2] = np.nan, np.inf
    with pytest.raises(NonFiniteError, match=r"1 NaN and 2 Inf among 32000 samples"):
        to_sound(samples, RATE)
    with pytest.raises(InputError, match="The sound has 5 channels"):
        to_sound(np.zeros((5, 100)), RATE)
    assert to_sound(np.zeros(100), RATE).samples.shape == (1, 100)


def test_a_sound_is_described_and_drawn() -> None:
    """The card has its length, channels and rate; the picture of a batch is dark where it is loud."""
    sound = draw_chord(1.25)
    assert sound.describe() == "1.2 s, 2 channels, 16000 Hz"
    assert Sound(sound.samples[:1], RATE).describe() == "1.2 s, 1 channel, 16000 Hz"
    picture = draw_wave(sound)
    assert picture.shape == (1, 72, 288, 3)
    dark = (picture[0] < 200).all(-1).sum(0)
    assert dark[0] > 2 * dark[-1] > 0


# Faults


CASES = {
    "silence": ("silent", Sound(np.full((2, RATE), 0.3, np.float32), RATE)),
    "clipping": ("clipped", Sound(4 * draw_chord().samples, RATE)),
    "noise": ("noise", draw_noise()),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault_has_one_detector(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is found with its detector, and not found when that detector is off."""
    kind, sound = CASES[name]
    assert kinds(sound) == [kind]
    monkeypatch.delitem(sound_faults._DETECTORS, name)
    assert kinds(sound) == []


def draw_speech_like() -> Sound:
    """Bursts of noise with pauses between them."""
    noise = draw_noise(0.3).samples
    gate = np.repeat(np.tile([1.0, 0.0, 0.3, 0.0], 8), RATE // 32)
    return Sound((noise * gate).astype(np.float32), RATE)


def draw_coloured() -> Sound:
    """Noise through a low pass, as wind and surf."""
    noise = draw_noise(0.5).samples
    return Sound(np.apply_along_axis(np.convolve, 1, noise, np.ones(8) / 8), RATE)


def draw_peaks() -> Sound:
    """A loud tone that touches full scale now and then."""
    samples = draw_chord().samples.copy()
    samples[:, ::500] = 1.0
    return Sound(samples, RATE)


@pytest.mark.parametrize(
    "sound",
    [
        draw_chord(),
        Sound(0.01 * draw_chord().samples, RATE),
        draw_speech_like(),
        draw_coloured(),
        draw_peaks(),
        draw_noise(0.001),
        Sound(draw_noise().samples[:, :500], RATE),
    ],
    ids=["chord", "soft", "bursts", "wind", "peaks", "hiss", "short"],
)
def test_near_misses_are_healthy(sound: Sound) -> None:
    """What healthy sounds have is no fault: soft passages, bursts, wind, single peaks, hiss."""
    assert kinds(sound) == []


def test_sound_without_samples_is_silent() -> None:
    """An empty sound is reported, and raises nothing."""
    assert kinds(Sound(np.zeros((1, 0), np.float32), RATE)) == ["silent"]
    assert kinds(Sound(np.ones((1, 2), np.float32), RATE)) == ["silent"]


def test_every_fault_has_its_meaning() -> None:
    """Each kind has a table in sounds.toml, and no table is left over."""
    assert read_sound_meanings().keys() == {kind for kind, _ in CASES.values()}


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_explained(name: str, tmp_path: Path) -> None:
    """`explain` of a file of sound says what is heard and what to type."""
    kind, sound = CASES[name]
    write_media(tmp_path / "a.wav", None, sound=sound)
    found = explain_file(tmp_path / "a.wav")
    assert found.cause == f"{kind}-sound"
    assert "--precision" in found.remedy[0]
    write_media(tmp_path / "b.flac", None, sound=draw_chord())
    healthy = explain_file(tmp_path / "b.flac")
    assert healthy.title == "No fault found in b.flac."
    assert "isn't silent, clipped or noisy" in healthy.why


def test_the_track_of_a_video_is_explained(tmp_path: Path) -> None:
    """Of a healthy video with a silent track the track is named; of a black one, the frames first."""
    ramp = np.linspace(20, 230, 32)
    frame = np.stack([np.add.outer(ramp, ramp) / 2] * 3, axis=-1)
    frames = np.stack([np.roll(frame, 4 * i, axis=1) for i in range(8)]).astype(np.uint8)
    silence = Sound(np.zeros((2, RATE), np.float32), RATE)
    write_media(tmp_path / "mute.mp4", frames, 8, sound=silence)
    found = explain_file(tmp_path / "mute.mp4")
    assert (found.cause, found.title) == ("silent-sound", "mute.mp4: the sound is silent.")
    assert "text_encoder=fp32" in found.remedy[0]
    write_media(tmp_path / "black.mp4", np.zeros_like(frames), 8, sound=silence)
    both = explain_file(tmp_path / "black.mp4")
    assert both.cause == "black-frames"
    assert [clue.meaning for clue in both.evidence] == ["black frames", "silent sound"]
    for name, track in (("heard.mp4", draw_chord()), ("trackless.mp4", None)):
        write_media(tmp_path / name, frames, 8, sound=track)
        assert explain_file(tmp_path / name).fault == "none"

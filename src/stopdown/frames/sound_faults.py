"""Detection of faults in finished sound without NaN: silence, clipping, noise.

As in `frame_faults`, each detector needs several signs at once. `find_sound_faults` lists what is caught
and what is not. `sound.to_sound` has already refused NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stopdown.errors import InputError
from stopdown.files.toml_files import read_rules
from stopdown.frames.frame_faults import FaultMeaning
from stopdown.frames.sound import Sound, read_sound
from stopdown.records import Finding


@dataclass(frozen=True)
class SoundFault:
    """A fault of finished sound.

    Attributes:
        kind: `silent`, `clipped` or `noise`.
        evidence: the measured values and their limits, as a sentence.
    """

    kind: str
    evidence: str

    @property
    def noun(self) -> str:
        return "sound"

    @property
    def meaning(self) -> FaultMeaning:
        return read_sound_meanings()[self.kind]

    @property
    def remedy(self) -> str:
        return self.meaning.remedy


@functools.cache
def read_sound_meanings() -> dict[str, FaultMeaning]:
    return msgspec.convert(read_rules("sounds"), dict[str, FaultMeaning])


_SILENCE = 1e-3  # of full scale, -60 dB
_FULL = 1.0 - 2.0**-15  # the largest sample of 16 bits
_HELD = 3  # samples in a row at full scale: a peak of healthy sound touches it once
_CLIPPED = 1e-3  # share of the samples that are held at full scale
_LOUD = 0.01  # of full scale, above which noise is more than the hiss of a recording
_FLAT = 4.0  # between the strongest and the weakest of 16 bands: 6 dB
_STEADY = 2.0  # between the loudest and the quietest sixteenth of the sound
_TAILS = 5.0  # kurtosis: 1.8 for uniform, 3 for normal noise, tens for speech
_SHORTEST = 4096  # samples in which noise can be told


def find_sound_faults(sound: Sound) -> list[SoundFault]:
    """Find all audible faults in finished sound; return an empty list if it is healthy.

    **Catches**

    - *silent*: no sample is further than 0.001 of full scale (-60 dB) from its channel's mean.
    - *clipped*: more than 0.1 % of the samples are in runs of three or more at full scale.
    - *noise*: white noise: its 16 frequency bands up to half the sample rate differ by less than 6 dB, it
      is equally loud throughout, and it lacks the peaks that speech and music have.

    **Does not catch**

    - one silent channel, gaps, clicks; clipping below full scale;
    - noise that a decoder has coloured, such as decoded random latents;
    - sound that is wrong in any other way.

    A prompt that asks for silence, distortion or radio static is reported although the result is right.
    """
    return [fault for detect in _DETECTORS.values() if (fault := detect(sound)) is not None]


def find_track_faults(path: Path) -> list[SoundFault]:
    """Find all audible faults in the sound track of a video; return an empty list if it has no track."""
    try:
        return find_sound_faults(read_sound(path))
    except InputError:
        return []


def find_sound_findings(sound: Sound, name: str) -> tuple[Finding, ...]:
    """Return the faults from `find_sound_faults` as findings of a record: `silent-sound`, `clipped-sound`…

    Args:
        name: name of the sound in the findings, such as `output`.
    """
    return tuple(
        Finding(f"{fault.kind}-sound", name, fault.evidence, fault.remedy)
        for fault in find_sound_faults(sound)
    )


def _detect_silence(sound: Sound) -> SoundFault | None:
    import numpy as np

    samples = sound.samples
    if samples.size == 0:
        return SoundFault("silent", "It has no samples.")
    largest = float(np.abs(samples - samples.mean(axis=1, keepdims=True)).max())
    if largest > _SILENCE:
        return None
    return SoundFault(
        "silent",
        f"None of {sound.samples.size} samples is further than {largest:.2g} of full scale from the mean "
        f"(sound has more than {_SILENCE:g}).",
    )


def _detect_clipping(sound: Sound) -> SoundFault | None:
    import numpy as np

    full = np.abs(sound.samples) >= _FULL
    if full.shape[1] < _HELD:
        return None
    inside = np.lib.stride_tricks.sliding_window_view(full, _HELD, axis=1).all(axis=-1)
    held = np.zeros_like(full)
    for offset in range(_HELD):
        held[:, offset : offset + inside.shape[1]] |= inside
    share = float(held.mean())
    if share <= _CLIPPED:
        return None
    largest = float(np.abs(sound.samples).max())
    return SoundFault(
        "clipped",
        f"{share:.1%} of the samples are held at full scale (limit {_CLIPPED:.1%}); the largest was "
        f"{largest:.3g} of it.",
    )


def _detect_noise(sound: Sound) -> SoundFault | None:
    import numpy as np

    mono = sound.samples.mean(axis=0, dtype=np.float64)
    if mono.size < _SHORTEST:
        return None
    mono = mono - mono.mean()
    level = float(np.sqrt((mono**2).mean()))
    if level < _LOUD or float((mono**4).mean()) > _TAILS * level**4:
        return None
    sixteenths = [float(np.sqrt((part**2).mean())) for part in np.array_split(mono, 16)]
    if max(sixteenths) > _STEADY * min(sixteenths):
        return None
    span = _compare_bands(mono)
    if span > _FLAT:
        return None
    return SoundFault(
        "noise",
        f"All frequencies are equally strong: 16 bands differ by {10 * np.log10(span):.1f} dB (sound has "
        f"more than {10 * np.log10(_FLAT):.0f}), from beginning to end.",
    )


def _compare_bands(mono: Any) -> float:
    """Return the ratio of the strongest to the weakest of 16 frequency bands, in power.

    Args:
        mono: `[samples]`.
    """
    import numpy as np

    length = 512
    pieces = mono[: mono.size // length * length].reshape(-1, length) * np.hanning(length)
    power = (np.abs(np.fft.rfft(pieces, axis=1)) ** 2).mean(axis=0)[1:]
    bands = [float(band.mean()) for band in np.array_split(power, 16)]
    return max(bands) / max(min(bands), 1e-30)


_DETECTORS: dict[str, Callable[[Sound], SoundFault | None]] = {
    "silence": _detect_silence,
    "clipping": _detect_clipping,
    "noise": _detect_noise,
}

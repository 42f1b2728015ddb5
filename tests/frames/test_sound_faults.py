"""Faults of finished sound: silent, clipped and noisy, and none in healthy sound."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stopdown.frames.sound import Sound
from stopdown.frames.sound_faults import find_sound_faults, find_sound_findings

RATE = 16_000
TIMES = np.arange(2 * RATE) / RATE
DRAWN = np.random.default_rng(0)
SOUNDS: dict[str, tuple[Callable[[], np.ndarray], list[str]]] = {
    "tone": (lambda: 0.5 * np.sin(2 * np.pi * 440 * TIMES), []),
    "nothing": (lambda: np.zeros(0), ["silent"]),
    "zeros": (lambda: np.zeros(RATE), ["silent"]),
    "a constant": (lambda: np.full(RATE, 0.3), ["silent"]),
    "a whisper": (lambda: 0.002 * np.sin(2 * np.pi * 440 * TIMES), []),
    "clipped": (lambda: np.clip(3 * np.sin(2 * np.pi * 440 * TIMES), -1, 1), ["clipped"]),
    "a peak": (lambda: np.sin(2 * np.pi * 440 * TIMES), []),
    "white noise": (lambda: DRAWN.normal(0, 0.1, 2 * RATE), ["noise"]),
    "faint noise": (lambda: DRAWN.normal(0, 0.005, 2 * RATE), []),
    "fading noise": (lambda: DRAWN.normal(0, 0.1, 2 * RATE) * np.exp(-3 * TIMES), []),
    "brown noise": (lambda: np.cumsum(DRAWN.normal(0, 0.001, 2 * RATE)), []),
}


@pytest.mark.parametrize("name", SOUNDS)
def test_faults_are_told_from_sound(name: str) -> None:
    """Each detector finds its fault alone; what is quiet, loud or coloured has none."""
    draw, expected = SOUNDS[name]
    sound = Sound(draw()[None].astype(np.float32), RATE)
    assert [fault.kind for fault in find_sound_faults(sound)] == expected


def test_a_finding_has_what_was_measured_and_what_to_do() -> None:
    """Its kind names the sound."""
    (finding,) = find_sound_findings(Sound(np.zeros((1, 100), np.float32), RATE), "output")
    assert (finding.kind, finding.module_path) == ("silent-sound", "output")
    assert "None of 100 samples" in finding.evidence
    assert finding.remedy

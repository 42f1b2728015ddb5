"""What a picture must reach against the reference: the limits of `compare`, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass

from stopdown.record_display import Displayed

PARTING = 0.05
"""Relative error at which two runs part: ten times what rounding to bf16 alone leaves (2^-8)."""


@dataclass(frozen=True, repr=False)
class Thresholds(Displayed):
    """What a picture must reach against the reference to count as the same; None is not asked.

    Attributes:
        psnr_db: least peak signal-to-noise ratio.
        ssim: least structural similarity.
        flip: largest mean FLIP error.
        flicker: largest root mean square of what the error changes from frame to frame.
        source: where the defaults come from.
    """

    psnr_db: float | None = 33.0
    ssim: float | None = 0.95
    flip: float | None = None
    flicker: float | None = None
    source: str = (
        "33 dB and 0.95 are where viewers begin to call a picture good (mean opinion score 4 of 5) "
        "in Zinner, Hohlfeld, Abboud and Hossfeld, Impact of frame rate and resolution on objective "
        "QoE metrics, QoMEX 2010. There are no such limits for FLIP and flicker, so they are not limited."
    )

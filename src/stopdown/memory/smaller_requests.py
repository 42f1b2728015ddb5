"""Fewer frames or a smaller picture, for a run that fits in no other way.

Sizes are tried from large to small, as long as the model can make them: frames first, to a half,
then the sides, keeping their ratio. What takes less at every size makes a bisection enough.

**Does not catch** what a smaller picture loses: many models draw badly far from their own size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stopdown.memory.forecast import Fit, choose
from stopdown.pipelines.allowed_sizes import Grid

VIDEO_SHARES = ((0.75, 1.0), (0.5, 1.0), (0.5, 0.75), (0.25, 0.75), (0.25, 0.5), (0.125, 0.5))
"""Shares of the frames and of each side that are tried, largest first."""

PICTURE_SHARES = tuple((1.0, side) for side in (0.875, 0.75, 0.625, 0.5, 0.375, 0.25))
FRAMES_SHARES = tuple((frames, 1.0) for frames in (0.75, 0.5, 0.375, 0.25, 0.125))
"""Where a model makes one size of picture only."""


@dataclass(frozen=True)
class Size:
    """Of a video or picture, in frames and pixels."""

    frames: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        """Of all frames together."""
        return self.frames * self.height * self.width

    def __str__(self) -> str:
        size = f"{self.height}x{self.width}"
        return size if self.frames == 1 else f"{self.frames} frames of {size}"


def list_smaller(size: Size, grid: Grid, *, keeps_frames: bool = False) -> list[Size]:
    """Smaller sizes that the model can make, the largest first.

    Args:
        keeps_frames: the frames are those of a video that was given.
    """
    shares = PICTURE_SHARES if keeps_frames or size.frames == 1 else VIDEO_SHARES
    if grid.only is not None:
        shares = () if keeps_frames or size.frames == 1 else FRAMES_SHARES
    found = [
        Size(
            _round_frames(size.frames, frames, grid),
            _round_side(size.height, side, grid),
            _round_side(size.width, side, grid),
        )
        for frames, side in shares
    ]
    return [one for one in dict.fromkeys(found) if one != size]


def find_largest(
    sizes: Sequence[Size],
    predict: Callable[[Size], Fit],
    limit_bytes: int,
) -> tuple[Size, Fit] | None:
    """The largest size that fits, and what its strategies take; None when none does.

    Args:
        sizes: the largest first.
        predict: what every strategy takes at a size.

    Cost: about two predictions for four sizes, three for eight.
    """
    found, start, end = None, 0, len(sizes)
    while start < end:
        middle = (start + end) // 2
        fit = predict(sizes[middle])
        if choose(fit, limit_bytes) is None:
            start = middle + 1
        else:
            found, end = (sizes[middle], fit), middle
    return found


def _round_frames(frames: int, share: float, grid: Grid) -> int:
    if share == 1.0:
        return frames
    return max(1, int((frames - 1) * share) // grid.frames) * grid.frames + 1


def _round_side(side: int, share: float, grid: Grid) -> int:
    return side if share == 1.0 else max(1, int(side * share) // grid.side) * grid.side

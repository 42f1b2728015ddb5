"""Pictures, videos and masks for a pipeline that was given none."""

from __future__ import annotations

import dataclasses

import numpy as np

from stopdown.pipelines import drawn_inputs
from stopdown.pipelines.drawn_inputs import draw_inputs
from stopdown.pipelines.requests import Request


class Inpainting:
    """A pipeline that needs a picture, a mask and a video."""

    def __call__(self, prompt: str, image: object, mask_image: object, video: object) -> None: ...


def test_what_is_missing_is_drawn_in_the_asked_size() -> None:
    """Frames of a video differ, a mask has both of its values, and what is given stays."""
    request = draw_inputs(Inpainting(), Request(), sides=(32, 48), frames=3)
    assert request.image.shape == (32, 48, 3)
    assert request.video.shape == (3, 32, 48, 3)
    assert not np.array_equal(request.video[0], request.video[1])
    assert set(np.unique(request.mask)) == {0, 255}
    given = np.zeros((8, 8, 3), np.uint8)
    assert draw_inputs(Inpainting(), Request(image=given)).image is given


def test_drawn_inputs_are_fields_of_a_request() -> None:
    """Each can be given by the user, too, and each draw is the same."""
    names = {field.name for field in dataclasses.fields(Request)}
    assert set(drawn_inputs._DRAWN) <= names
    for draw in drawn_inputs._DRAWN.values():
        assert np.array_equal(draw((16, 16), 2), draw((16, 16), 2))

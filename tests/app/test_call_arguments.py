"""Tests of `--arg`: values of an argument of a pipeline's call, from text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stopdown.app.call_arguments import read_arguments
from stopdown.app.generate_command import GenerateOptions
from stopdown.app.registration import reword_text
from stopdown.batch.jobs import describe_request, sign_item
from stopdown.errors import InputError
from stopdown.frames.media import write_media
from stopdown.frames.sound import Sound
from stopdown.pipelines.requests import Request

CLIP = np.random.default_rng(0).integers(0, 255, (3, 8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ("[207, 360]", [207, 360]),
        ('{"a": [1]}', {"a": [1]}),
        ("depth map", "depth map"),
        ('"5"', "5"),
        ('"a.png"', "a.png"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_a_value_is_json_or_a_text(text: str, value: Any) -> None:
    """Numbers, lists and tables are JSON; quotes make a text of anything; all else is a text."""
    found = read_arguments((f"name={text}",))
    assert found == {"name": value}
    assert type(found["name"]) is type(value)


def test_a_path_becomes_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture is a PIL image, a video and a folder lists of them, a sound a tensor."""
    monkeypatch.chdir(tmp_path)
    write_media("a.png", CLIP[:1])
    write_media("frames", CLIP)
    write_media("a.gif", CLIP)
    write_media("a.wav", None, sound=Sound(np.zeros((2, 5), np.float32), 100))
    found = read_arguments(("p=a.png", "f=frames/", "v=a.gif", "s=a.wav"))
    assert np.array_equal(np.asarray(found["p"]), CLIP[0])
    assert [np.array_equal(np.asarray(x), y) for x, y in zip(found["f"], CLIP, strict=True)]
    assert (len(found["v"]), tuple(found["s"].shape)) == (3, (2, 5))


def test_pictures_may_stand_in_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ControlNets take a list of pictures, of any sizes, and VisualCloze lists of lists."""
    monkeypatch.chdir(tmp_path)
    write_media("a.png", CLIP[:1])
    write_media("b.png", CLIP[:1, :4])
    found = read_arguments(('p=["a.png", "b.png"]', 'q=[["a.png", "text"], ["b.png", null]]'))
    assert [x.size for x in found["p"]] == [(8, 8), (8, 4)]
    (one, text), (other, nothing) = found["q"]
    assert (one.size, text, other.size, nothing) == ((8, 8), "text", (8, 4), None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (('a=["none.png"]',), "none.png can't be read: there is no such file"),
        (("labels",), r"--arg labels has no name and value\..* --arg class_labels=\[207\]\."),
        (("=5",), "--arg =5 has no name and value."),
        (("a b=5",), "--arg a b=5 has no name and value."),
        (
            ("a=1", "a=2"),
            r"--arg a was given twice\. Give several values as a list: --arg 'a=\[1, 2\]'\.",
        ),
        (("a=[1,",), r"--arg a=\[1, isn't JSON: .* begins with a bracket"),
        (("a=[NaN]",), "NaN is no number of JSON"),
        (
            ("a=none.png",),
            "none.png can't be read: there is no such file.* write --arg 'a=\"none.png\"'",
        ),
        (("output_type=latent",), "--arg output_type was given. .* Leave --arg output_type out."),
    ],
)
def test_what_is_no_argument_is_refused(given: tuple[str, ...], words: str) -> None:
    """A missing name, a broken list, a file that is not there, and what Stopdown gives itself."""
    with pytest.raises(InputError, match=words):
        read_arguments(given)


def test_a_needed_argument_is_named_as_it_is_typed() -> None:
    """A request of the package is written as options of the command."""
    text = 'Use request=stopdown.Request(arguments={"pose_video": ..., "face_video": ...}).'
    said = reword_text(text, GenerateOptions(source="x"))
    assert said == "Use --arg pose_video=VALUE --arg face_video=VALUE."
    text = (
        'Use request=stopdown.Request(arguments={"image": ...}) with a list.'  # an option as well
    )
    assert reword_text(text, GenerateOptions(source="x")) == "Use --arg image=VALUE with a list."


def test_an_item_of_a_batch_is_known_by_its_arguments() -> None:
    """Another number or another picture makes another item; the same ones make the same."""
    requests = [Request("a", arguments=given) for given in ({}, {"n": [1]}, {"n": [2]})]
    requests += [Request("a", arguments={"p": [CLIP[i]]}) for i in (0, 1)]
    signed = [sign_item({}, x, "") for x in requests]
    assert len({*signed}) == len(signed)
    again = Request("a", arguments={"p": [CLIP[0].copy()]})
    assert sign_item({}, again, "") == signed[3]
    assert describe_request(requests[1])["arguments"] == {"n": [1]}

"""Tests of requests: from options to the arguments of a pipeline's call, and back to frames."""

from __future__ import annotations

import dataclasses
import inspect
import re
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from models.other_pipelines import make_allegro, make_latte
from models.pipeline_calls import make_pipeline
from stopdown.errors import OptionError
from stopdown.files.toml_files import read_rows
from stopdown.pipelines.dry_run import make_arguments
from stopdown.pipelines.requests import (
    Request,
    Stage,
    build_arguments,
    check_request,
    describe_unused_negative,
    explain_stop,
    find_frames,
    find_own_frames,
    list_needed_arguments,
    list_own_arguments,
    name_pipeline_arguments,
    refuse_missing_prompt,
    say_what_to_change,
)
from stopdown.pipelines.results import read_frames
from stopdown.sources.library_classes import is_deprecated

PICTURE = np.full((24, 40, 3), 128, np.uint8)
CLIP = np.full((9, 24, 40, 3), 128, np.uint8)


def test_a_text_to_video_call() -> None:
    """Every option has its argument, the seed its generator, and the output is numpy."""
    request = Request("a ball", "a cube", None, None, 9, 32, 48, 5, 6.5, seed=3)
    arguments = build_arguments(make_pipeline("cogvideox"), request)
    generator = arguments.pop("generator")
    assert generator.initial_seed() == 3
    assert generator.device == torch.device("cpu")
    assert arguments == {
        "prompt": "a ball",
        "negative_prompt": "a cube",
        "num_inference_steps": 5,
        "num_frames": 9,
        "height": 32,
        "width": 48,
        "guidance_scale": 6.5,
        "output_type": "np",
        "max_sequence_length": 226,
    }


def test_an_image_to_video_call_without_prompt() -> None:
    """Stable Video Diffusion names its guidance otherwise, and gets the picture at the size."""
    request = Request(image=PICTURE, height=32, width=64, guidance=2.0)
    arguments = build_arguments(make_pipeline("svd"), request)
    assert arguments["image"].size == (64, 32)
    assert (arguments["max_guidance_scale"], "prompt" in arguments) == (2.0, False)


def test_what_was_not_asked_for_is_left_to_the_pipeline() -> None:
    """None gives no argument; the picture keeps its size."""
    arguments = build_arguments(make_pipeline("cogvideox-image"), Request("a", image=PICTURE))
    names = {"prompt", "image", "generator", "output_type", "max_sequence_length"}
    assert set(arguments) == names
    assert arguments["image"].size == (40, 24)


def test_a_video_brings_its_own_frames() -> None:
    """The pipeline gets pictures, and no number of frames, which it would not take."""
    arguments = build_arguments(
        make_pipeline("cogvideox-video"), Request("a", video=CLIP, frames=9)
    )
    assert [frame.size for frame in arguments["video"]] == [(40, 24)] * 9
    assert "num_frames" not in arguments


def test_a_size_for_image_to_image_is_the_size_of_the_picture() -> None:
    """Pipelines that take the size from the picture get it resized."""
    import diffusers

    pipe = diffusers.StableDiffusionImg2ImgPipeline(
        **make_pipeline("sd").components, requires_safety_checker=False
    )
    arguments = build_arguments(pipe, Request("a", image=PICTURE, height=32))
    assert arguments["image"].size == (40, 32)
    assert "height" not in arguments


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        (
            "cogvideox",
            Request(),
            'No `prompt` was given. Add what to show, in quotes, such as "a lake at sunset".',
        ),
        (
            "svd",
            Request(),
            "StableVideoDiffusionPipeline needs `image`, which wasn't given. Give `image`.",
        ),
        (
            "svd",
            Request(prompt="a ball"),
            "StableVideoDiffusionPipeline doesn't take `prompt` and needs `image`, which wasn't given. "
            "It takes `image`, `frames`, `height`, `width`, `steps`, `guidance`. Give `image`. "
            "Leave `prompt` out.",
        ),
        (
            "svd",
            Request(prompt="a ball", image=PICTURE),
            "StableVideoDiffusionPipeline doesn't take `prompt`. It takes `image`, `frames`, "
            "`height`, `width`, `steps`, `guidance`. Leave `prompt` out, or use a model that takes "
            "it.",
        ),
        (
            "cogvideox-image",
            Request(prompt="a ball"),
            "CogVideoXImageToVideoPipeline needs `image`, which wasn't given. Give `image`.",
        ),
        (
            "cogvideox-video",
            Request(prompt="a ball"),
            "CogVideoXVideoToVideoPipeline needs `video`, which wasn't given. Give `video`.",
        ),
        (
            "sd",
            Request(prompt="a ball", frames=9),
            "StableDiffusionPipeline doesn't take `frames`. It takes `prompt`, `negative`, "
            "`height`, `width`, `steps`, `guidance`. Leave `frames` out, or use a model that takes it.",
        ),
        (
            "cogvideox",
            Request(prompt="a ball", image=PICTURE),
            "CogVideoXPipeline doesn't take `image`. It takes `prompt`, `negative`, `frames`, "
            "`height`, `width`, `steps`, `guidance`. Leave `image` out, or use a model that "
            "takes it.",
        ),
    ],
)
def test_what_a_pipeline_does_not_take_or_lacks(name: str, request_: Request, message: str) -> None:
    """The message names the argument as Python does, and what the pipeline takes."""
    with pytest.raises(OptionError) as caught:
        build_arguments(make_pipeline(name), request_)
    assert str(caught.value) == message


def make_signature(name: str, *required: str, **defaults: Any) -> type:
    """A pipeline's class with this name and call."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call: Any = lambda self, *args, **kwargs: None  # noqa: E731 - it gets a signature of its own
    call.__signature__ = inspect.Signature(
        [inspect.Parameter(n, named) for n in ("self", *required)]
        + [inspect.Parameter(n, named, default=x) for n, x in defaults.items()]
    )
    return type(name, (), {"__call__": call})


INPAINT = {"prompt": None, "image": None, "mask_image": None, "strength": 1.0}
CONTROL = {"prompt": None, "image": None, "num_inference_steps": 50}
BOTH = {"prompt": None, "image": None, "control_image": None, "strength": 0.8}


@pytest.mark.parametrize(
    ("kind", "request_", "message"),
    [
        (
            make_signature("SomeInpaintPipeline", **INPAINT),
            Request("a", image=PICTURE),
            "SomeInpaintPipeline needs `mask` (its argument mask_image), which wasn't given. Give `mask`.",
        ),
        (
            make_signature("SomeInpaintPipeline", **INPAINT),
            Request("a"),
            "SomeInpaintPipeline needs `image` and `mask` (its argument mask_image), which weren't given. "
            "Give `image` and `mask`.",
        ),
        (
            make_signature("SomeControlNetPipeline", **CONTROL),
            Request("a"),
            "SomeControlNetPipeline needs `control_image` (its argument image), which wasn't given. Give "
            "`control_image`.",
        ),
        (
            make_signature("SomeControlNetImg2ImgPipeline", **BOTH),
            Request("a", image=PICTURE),
            "SomeControlNetImg2ImgPipeline needs `control_image`, which wasn't given. "
            "Give `control_image`.",
        ),
        (
            make_signature("SomeInpaintPipeline", **INPAINT, num_inference_steps=50),
            Request("a", image=PICTURE, mask=PICTURE, steps=3, strength=0.3),
            "3 steps at a strength of 0.3 are less than one step. SomeInpaintPipeline makes that share "
            "of its steps. Use steps=4 or more, or strength=1.",
        ),
        (
            make_signature("ClassPipeline", "class_labels"),
            Request(),
            "ClassPipeline needs class_labels, which wasn't given. Use request=stopdown.Request("
            'arguments={"class_labels": ...}).',
        ),
        (
            make_signature("SomeControlNetPipeline", **CONTROL),
            Request("a", image=PICTURE, control_image=PICTURE),
            "`image` and `control_image` were both given, and SomeControlNetPipeline has one argument for "
            "them: image. Leave `image` out.",
        ),
        (
            make_signature("SomePipeline", prompt=None),
            Request("a", arguments={"mask": 1}),
            "SomePipeline doesn't take the argument mask. Its call takes prompt. Leave mask out.",
        ),
    ],
)
def test_an_input_that_is_missing_is_named_with_its_flag(
    kind: type, request_: Request, message: str
) -> None:
    """One message names the argument of the call and the option that gives it."""
    with pytest.raises(OptionError) as caught:
        name_pipeline_arguments(kind, request_)
    assert str(caught.value) == message


def test_a_class_that_takes_several_pictures_is_given_a_list() -> None:
    """JoyImage's editor takes `images`, a list of any length, and fails with a picture alone."""
    import diffusers

    pipe = object.__new__(diffusers.JoyImageEditPlusPipeline)
    (picture,) = build_arguments(pipe, Request("a", image=PICTURE))["images"]
    assert np.array_equal(np.asarray(picture), PICTURE)


def test_masks_and_control_pictures_have_the_size_asked_for() -> None:
    """What a pipeline compares pixel by pixel is resized alike; a mask is grey; own arguments win."""
    kind = make_signature("SomePipeline", **INPAINT, control_image=None)
    request = Request(
        "a", image=PICTURE, mask=PICTURE[..., 0], control_image=PICTURE, height=32, width=48
    )
    arguments = build_arguments(kind(), request)
    pictures = [arguments[name] for name in ("image", "mask_image", "control_image")]
    assert [(x.size, x.mode) for x in pictures] == [
        ((48, 32), "RGB"),
        ((48, 32), "L"),
        ((48, 32), "RGB"),
    ]
    own = dataclasses.replace(request, arguments={"mask_image": "mine", "prompt": "b"})
    arguments = build_arguments(kind(), own)
    assert (arguments["mask_image"], arguments["prompt"]) == ("mine", "b")


def test_a_mask_of_booleans_is_white_where_it_is_true() -> None:
    """It was refused by `compare`, and so were pictures of other kinds, which stay so."""
    kind, mask = make_signature("SomePipeline", **INPAINT), PICTURE[..., 0] > 127
    request = check_request("compare", Request("a", image=PICTURE, mask=mask))
    assert request is not None
    assert build_arguments(kind(), request)["mask_image"].getextrema() == (255, 255)
    with pytest.raises(OptionError, match=r"image=...\)\) was given an array of bool"):
        check_request("compare", Request("a", image=mask))


@pytest.mark.parametrize(
    ("name", "arguments", "frames"),
    [
        ("cogvideox", {}, 9),
        ("cogvideox", {"num_frames": 5}, 5),
        ("cogvideox-video", {"video": [None] * 7}, 7),
        ("svd", {}, 3),
        ("wan", {}, 81),
        ("sd", {}, 1),
        ("cogview3plus", {}, 1),
    ],
)
def test_frames_are_known_before_the_run(name: str, arguments: Any, frames: int) -> None:
    """Asked for, from the video, from the model's config or the pipeline's default."""
    assert find_frames(make_pipeline(name), arguments) == frames


def test_frames_of_latte_are_those_of_its_positions() -> None:
    """A call without a number of frames gets the config's, not the pipeline's 16, and runs."""
    pipe = make_latte(video_length=3)
    pipe.set_progress_bar_config(disable=True)
    request = Request("a ball", height=32, width=32, steps=1)
    arguments = build_arguments(pipe, request)
    assert arguments["video_length"] == find_frames(pipe, {}) == find_own_frames(pipe) == 3
    assert read_frames(pipe(**arguments, clean_caption=False)).shape == (3, 32, 32, 3)
    asked = build_arguments(pipe, dataclasses.replace(request, frames=1))
    assert asked["video_length"] == find_frames(pipe, asked) == 1
    assert make_arguments(pipe)["video_length"] == 3


def test_a_config_recommends_only_numbers_that_the_call_takes() -> None:
    """Text, lists and names that the pipeline's call lacks are left out, as is what is no table."""
    pipe = make_latte(video_length=3)
    told = {"eta": 0.5, "height": "64", "prompt": "a cat", "timesteps": [1], "colour": 3}
    pipe.transformer.register_to_config(_recommended_call=told)
    assert list_own_arguments(pipe) == {"eta": 0.5, "video_length": 3}
    pipe.transformer.register_to_config(_recommended_call=["eta"])
    assert list_own_arguments(pipe) == {"video_length": 3}


def test_frames_of_allegro_are_those_of_its_latents() -> None:
    """Its config counts latent frames, each of which is decoded to four."""
    assert find_frames(make_allegro(), {}) == 8


def test_frames_are_read_from_videos_and_pictures() -> None:
    """Both kinds of output give `[T, H, W, 3]`."""
    clip, picture = np.zeros((1, 5, 8, 8, 3)), np.zeros((1, 8, 8, 3))
    assert read_frames(SimpleNamespace(frames=clip)).shape == (5, 8, 8, 3)
    assert read_frames(SimpleNamespace(images=picture)).shape == (1, 8, 8, 3)


NEEDED = {
    "LTXImageToVideoPipeline": {"image"},
    "StableDiffusionInstructPix2PixPipeline": {"image"},
    "StableDiffusionUpscalePipeline": {"image"},
    "WanVideoToVideoPipeline": {"video"},
    "WanVACEPipeline": set[str](),
    "AnyFlowPipeline": set[str](),
    "Flux2Pipeline": set[str](),
    "FluxKontextPipeline": set[str](),
    "HeliosPipeline": set[str](),
}
"""Real classes, to the pictures and videos without which they fail."""


@pytest.mark.parametrize("name", list(NEEDED))
def test_what_a_real_class_cannot_do_without(name: str) -> None:
    """Its own words and code tell a picture that it starts from from one that it may be given."""
    import diffusers

    needed = {*list_needed_arguments(getattr(diffusers, name))} - {"prompt"}
    assert needed == NEEDED[name]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "KandinskyV22Pipeline",
            "KandinskyV22Pipeline is the second stage: KandinskyV22PriorPipeline makes that from a prompt. "
            "Save both as one model, in Python: diffusers.KandinskyV22CombinedPipeline.from_pretrained("
            '"kandinsky-community/kandinsky-2-2-decoder").save_pretrained("kandinsky-2-2"). Then give '
            "kandinsky-2-2.",
        ),
        (
            "IFSuperResolutionPipeline",
            "IFSuperResolutionPipeline is the second stage: give `image`, the picture that "
            "DeepFloyd/IF-I-XL-v1.0 makes.",
        ),
    ],
)
def test_a_second_stage_names_the_first(name: str, remedy: str) -> None:
    """What goes on from another model's result says which model, and what makes one of both."""
    import diffusers

    with pytest.raises(OptionError) as caught:
        name_pipeline_arguments(getattr(diffusers, name), Request(prompt="a"))
    assert caught.value.remedy.startswith(remedy)


def test_an_embedding_is_what_another_pipeline_makes() -> None:
    """No option can give one: the remedy is Python, where both pipelines are called."""
    kind = make_signature("SomePipeline", "image_embeds", "negative_image_embeds")
    with pytest.raises(OptionError) as caught:
        name_pipeline_arguments(kind, Request())
    assert caught.value.remedy == (
        "Another pipeline makes image_embeds and negative_image_embeds. Call both in Python: the first "
        "one, then this one as pipe = stopdown.load(SOURCE)."
    )


@pytest.mark.parametrize("name", ["ControlnetPipeline", "ControlnetImg2ImgPipeline"])
def test_a_second_stage_without_a_combined_class_shows_both_calls(name: str) -> None:
    """Kandinsky's ControlNets take a prior's result, whose class and fields the remedy names."""
    kind = getattr(diffusers, f"KandinskyV22{name}")
    with pytest.raises(OptionError) as caught:
        name_pipeline_arguments(kind, Request())
    assert caught.value.remedy == (
        f"KandinskyV22{name} is the second stage: KandinskyV22PriorPipeline makes that from a prompt, and "
        "no class does both. In Python: prior = diffusers.KandinskyV22PriorPipeline.from_pretrained("
        '"kandinsky-community/kandinsky-2-2-prior"); made = prior("a cat"); pipe = stopdown.load(SOURCE); '
        "then pipe(image_embeds=made.image_embeds, negative_image_embeds=made.negative_image_embeds, ...)."
    )


def test_a_method_that_has_to_be_called_first_is_named() -> None:
    """LEdits++ edits the picture that its `invert` was called with; no argument gives it."""
    said = "The `invert` method has to be called beforehand. Edits are of `image`s."
    remedy = say_what_to_change(diffusers.LEditsPPPipelineStableDiffusion, said)
    assert remedy == (
        "Call its method invert first, in Python: pipe = stopdown.load(SOURCE); pipe.invert(image=...); "
        "then pipe(...)."
    )
    assert "invert" not in say_what_to_change(diffusers.StableDiffusionPipeline, said)


def test_several_controlnets_are_told_to_take_a_list() -> None:
    """Their error names `image`, also where the pictures to follow are called otherwise."""
    said = "For multiple controlnets: `image` must be type `list`"
    for kind, name in (
        (diffusers.StableDiffusionControlNetImg2ImgPipeline, "control_image"),
        (diffusers.StableDiffusionControlNetPipeline, "image"),
    ):
        assert say_what_to_change(kind, said) == (
            f'Use request=stopdown.Request(arguments={{"{name}": ...}}) with a list of pictures, one for '
            "each ControlNet."
        )


def test_a_picture_smaller_than_a_block_is_told_how_large_to_be() -> None:
    """The latent upscaler rounds sides down to multiples of 64, and has no option for them."""
    kind = diffusers.StableDiffusionLatentUpscalePipeline
    assert say_what_to_change(kind, "height and width must be > 0") == (
        "Give an `image` of 64 pixels a side or more: its sides are rounded down to whole blocks."
    )


@pytest.mark.parametrize(
    ("error", "precisions", "said"),
    [
        (RuntimeError("expected scalar type Half but found Float"), ("fp16",), "Run it again with"),
        (
            RuntimeError("expected scalar type Half but found Float"),
            ("fp16", "fp32"),
            "Run it again",
        ),
        (RuntimeError("an unknown error"), ("fp32", "fp32"), "It ran in fp32, so the cause is in"),
        (IndexError("index 5 is out of bounds"), ("fp16",), "Run it again with"),
        (ValueError("cannot convert float NaN to integer"), ("fp16",), "Run it again with"),
        (
            AttributeError("'Image' object has no attribute 'shape'"),
            ("fp16",),
            "The cause is in the",
        ),
        (
            RuntimeError("Given normalized_shape=[32], expected"),
            ("fp16",),
            "The cause is in the model",
        ),
    ],
)
def test_an_error_that_no_precision_causes_does_not_advise_fp32(
    error: Exception, precisions: tuple[str, ...], said: str
) -> None:
    """Wrong names and sizes stay wrong in fp32; NaN and dtypes may not; what ran in fp32 says so."""
    found = explain_stop(diffusers.StableDiffusionPipeline, {}, error, precisions=precisions)
    assert found.remedy.startswith(said)
    assert ("precision" in found.remedy) == (not said.startswith("It ran"))


def test_a_picture_becomes_a_tensor_where_a_call_takes_only_tensors() -> None:
    """A hint of Kandinsky's ControlNet has a shape and no size; a picture elsewhere stays one."""
    picture = Image.fromarray(PICTURE)
    embeds = {"image_embeds": 0, "negative_image_embeds": 0}
    request = Request(height=24, width=40, arguments={**embeds, "hint": picture})
    pipe = object.__new__(diffusers.KandinskyV22ControlnetPipeline)
    given = build_arguments(pipe, request)
    assert given["hint"].shape == (1, 3, 24, 40)
    assert float(given["hint"].max()) == pytest.approx(128 / 255)
    other = make_signature("SomePipeline", hint=None)()
    assert build_arguments(other, Request(arguments={"hint": picture}))["hint"] is picture


def test_each_combined_class_makes_both_stages() -> None:
    """Classes of the table are Diffusers'; a combined one takes a prompt, and the prior's components."""
    import diffusers

    for stage in read_rows("stages", "stage", Stage):
        assert all(hasattr(diffusers, name) for name in (*stage.classes, stage.first))
        if stage.combined:
            combined = getattr(diffusers, stage.combined)
            parts = inspect.signature(combined.__init__).parameters
            assert "prompt" in list_needed_arguments(combined)
            assert any(name.startswith("prior_") for name in parts)
            types = re.findall(r"\w+", " ".join(str(x.annotation) for x in parts.values()))
            assert not any(map(is_deprecated, types)), stage.combined  # Diffusers loads none


def test_a_negative_prompt_is_given_where_a_pipeline_stops_without_one() -> None:
    """EasyAnimate iterates over None; others keep their own default."""
    given = [
        build_arguments(kind(), Request("a")).get("negative_prompt")
        for kind in (
            make_signature("EasyAnimatePipeline", prompt=None, negative_prompt=None),
            make_signature("SomePipeline", prompt=None, negative_prompt=None),
        )
    ]
    assert given == ["", None]


def refuses_missing_prompt(kind: type) -> bool:
    """Whether a class is refused without a prompt by the names of its components alone."""
    try:
        refuse_missing_prompt(kind.__name__, inspect.signature(kind.__init__).parameters, Request())
    except OptionError:
        return True
    return False


def test_a_prompt_that_is_there_is_no_missing_one() -> None:
    """A text, also an empty one, and its embeddings will do; a pipeline without a tokenizer takes none."""
    parts = ("tokenizer_2", "vae")
    for request in (Request(""), Request(arguments={"prompt_embeds": 1}), Request("a")):
        refuse_missing_prompt("WanPipeline", parts, request)
    refuse_missing_prompt("StableVideoDiffusionPipeline", ("vae", "unet"), Request())
    refuse_missing_prompt("WanImageToVideoPipeline", parts, Request())  # later, with its picture
    with pytest.raises(OptionError, match=r"^No `prompt` was given"):
        refuse_missing_prompt("WanPipeline", parts, Request())


@pytest.mark.slow
def test_only_classes_that_need_a_prompt_are_refused_early() -> None:
    """Each class of Diffusers that its description refuses without a prompt takes one by that name."""
    import diffusers

    kinds = [getattr(diffusers, name) for name in dir(diffusers) if "Pipeline" in name]
    kinds = [kind for kind in kinds if "__call__" in dir(kind)]
    refused = [kind for kind in kinds if refuses_missing_prompt(kind)]
    assert len(refused) > 200
    assert [x.__name__ for x in refused if "prompt" not in list_needed_arguments(x)] == []


def test_bf16_that_is_handed_to_numpy_is_named() -> None:
    """Pipelines that make arrays of their latents cannot run in bf16, and nothing given is at fault."""
    with pytest.raises(TypeError) as caught:
        torch.ones(1, dtype=torch.bfloat16).numpy()
    said = say_what_to_change(diffusers.LDMTextToImagePipeline, str(caught.value))
    assert said.startswith("It hands bf16 to NumPy")


@pytest.mark.parametrize(
    ("name", "arguments", "is_told"),
    [
        ("FluxPipeline", {"negative_prompt": "blur"}, True),
        ("HunyuanVideoPipeline", {"negative_prompt": "blur", "true_cfg_scale": 1}, True),
        ("FluxPipeline", {"negative_prompt": "blur", "true_cfg_scale": 4}, False),
        ("FluxPipeline", {"negative_prompt": ""}, False),
        ("FluxPipeline", {}, False),
        ("QwenImagePipeline", {"negative_prompt": "blur"}, False),
        ("StableDiffusionPipeline", {"negative_prompt": "blur"}, False),
    ],
)
def test_a_negative_prompt_without_effect_is_told(
    name: str, arguments: dict[str, Any], is_told: bool
) -> None:
    """Flux and HunyuanVideo ignore it with their defaults, without a word."""
    said = describe_unused_negative(getattr(diffusers, name), arguments)
    assert bool(said) is is_told
    assert not said or f"{name} reads it only with a true_cfg_scale above 1" in said

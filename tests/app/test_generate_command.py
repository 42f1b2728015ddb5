"""Whole runs of `generate`: every family, mixed precisions, and what is never written."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.pipeline_calls import paint_decoder
from models.single_file_layout import save_single_file
from scenes import TEMPLATES, all_scenes
from stopdown.app import generate_command
from stopdown.app.display import Display
from stopdown.app.generate_command import GenerateOptions, generate, list_unknown_words
from stopdown.errors import (
    InputError,
    NonFiniteError,
    OptionError,
    OutputError,
    StopdownError,
)
from stopdown.files.outputs import find_record_path
from stopdown.frames.media import read_image, read_video, to_uint8, write_media
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.results import read_frames
from stopdown.records import RunRecord, read_record
from stopdown.sources.sources import resolve_source
from stopdown.testing import save_pipeline

SaveTiny = Callable[..., Path]
NOISE = np.random.default_rng(0).integers(0, 255, (9, 32, 32, 3), np.uint8)
SMALL = {"height": 32, "width": 32}

RUNS: dict[str, dict[str, Any]] = {
    "cogvideox": {"prompt": "a", "frames": 9, **SMALL},
    "cogvideox-image": {"prompt": "a", "frames": 9, "image": True, **SMALL},
    "cogvideox-video": {"prompt": "a", "video": True, **SMALL},
    "cogvideox+video": {"prompt": "a", "video": True, **SMALL},
    "cogview3plus": {"prompt": "a", **SMALL},
    "cogview3plus+large": {"prompt": "a"},
    "svd": {"image": True, "frames": 3, **SMALL},
    "sd": {"prompt": "a"},
    "sd+image": {"prompt": "a", "image": True},
    "sd+mask": {"prompt": "a", "image": True, "mask": True, "strength": 0.5, **SMALL},
    "sdxl": {"prompt": "a", "negative": "b"},
    "flux": {"prompt": "a", **SMALL},
    "wan": {"prompt": "a", "frames": 5, **SMALL},
}
"""The smallest run of each family; True stands for a file to start from, + for a sister class."""


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a picture, and with a clip as a folder of frames."""
    folder = tmp_path_factory.mktemp("media")
    write_media(folder / "picture.png", NOISE[:1])
    write_media(folder / "clip", NOISE)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder for what runs write."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def make_options(source: Path, out: Path, media: Path, **options: Any) -> GenerateOptions:
    """Options of a run of two steps into a folder of frames, unless said otherwise."""
    picture = media / "picture.png"
    files = {"image": picture, "mask": picture, "video": media / "clip"}
    options |= {name: path for name, path in files.items() if options.get(name) is True}
    defaults: dict[str, Any] = {"output": str(out / "frames"), "steps": 2, "precision": "fp32"}
    return GenerateOptions(str(source), **{**defaults, **options})


@pytest.fixture
def run(save_tiny: SaveTiny, media: Path, out: Path) -> Callable[..., RunRecord]:
    """A run of a tiny pipeline by name: its record."""

    def run_tiny(name: str, *, overflow: str | None = None, **options: Any) -> RunRecord:
        source = save_tiny(name.split("+")[0], overflow=overflow)
        return generate(make_options(source, out, media, **{**RUNS[name], **options}))

    return run_tiny


@functools.cache
def run_plain(folder: Path, class_name: str, name: str) -> np.ndarray[Any, Any]:
    """The pixels of the same run by plain Diffusers in fp32, from noise of seed 0."""
    import diffusers

    pipe = getattr(diffusers, class_name).from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    options = {**RUNS[name]}
    image = NOISE[0] if options.pop("image", False) else None
    video = NOISE if options.pop("video", False) else None
    mask = NOISE[0] if options.pop("mask", False) else None
    request = Request(image=image, video=video, mask=mask, steps=2, **options)
    return to_uint8(read_frames(pipe(**build_arguments(pipe, request))))


def name_precisions(record: RunRecord) -> dict[str, str]:
    """What most of each component's weights really were."""
    return {call.component: call.precisions[0] for call in record.calls}


CLASSES = {
    "cogvideox": "CogVideoXPipeline",
    "cogvideox+video": "CogVideoXVideoToVideoPipeline",
    "cogvideox-image": "CogVideoXImageToVideoPipeline",
    "cogvideox-video": "CogVideoXVideoToVideoPipeline",
    "cogview3plus": "CogView3PlusPipeline",
    "svd": "StableVideoDiffusionPipeline",
    "sd": "StableDiffusionPipeline",
    "sd+image": "StableDiffusionImg2ImgPipeline",
    "sd+mask": "StableDiffusionInpaintPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "flux": "FluxPipeline",
    "wan": "WanPipeline",
}
"""The class that serves each run."""

QUICK = ("cogvideox", "cogvideox+video", "svd", "sd+mask")
"""Runs that differ in what they start from: a prompt, a video, a picture, a mask. The others are slow."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CLASSES],
)
@pytest.mark.usefixtures("each_device")
def test_fp32_equals_plain_diffusers(run: Any, save_tiny: SaveTiny, out: Path, name: str) -> None:
    """Every family writes the very pixels of plain Diffusers, and the record names its class."""
    record = run(name)
    plain = run_plain(save_tiny(name.split("+")[0]), CLASSES[name], name)
    np.testing.assert_array_equal(read_video(out / "frames"), plain)
    assert record.pipeline == CLASSES[name]
    assert set(name_precisions(record).values()) == {"fp32"}
    assert {decision.reason for decision in record.decisions} == {"You asked for fp32."}


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        slow("cogvideox", "text_encoder=fp32,transformer=bf16,vae=fp32"),
        slow("cogvideox", "text_encoder=bf16,transformer=fp32,vae=fp16-plain"),
        slow(
            "cogvideox-image",
            "text_encoder=bf16,transformer=bf16,vae.encode=fp32,vae.decode=bf16",
        ),
        (
            "cogvideox-video",
            "text_encoder=bf16,transformer=bf16,vae.encode=bf16,vae.decode=fp16-plain",
        ),
        slow("cogview3plus", "text_encoder=fp32,transformer=fp16-plain,vae=bf16"),
        ("svd", "image_encoder=fp32,unet=bf16,vae=fp16-plain"),
        slow("svd", "image_encoder=bf16,unet=fp32,vae.encode=fp32,vae.decode=fp16-plain"),
        slow("sd", "unet=bf16,vae=fp32"),
        slow("sdxl", "text_encoder=fp32,text_encoder_2=bf16,unet=fp16-plain,vae=fp32"),
        slow("flux", "text_encoder=fp32,text_encoder_2=bf16,transformer=bf16,vae=fp32"),
        slow("wan", "text_encoder=fp32,transformer=bf16,vae=fp32"),
    ],
)
@pytest.mark.usefixtures("each_device")
def test_mixed_precisions_really_run(
    run: Any, save_tiny: SaveTiny, out: Path, name: str, precision: str
) -> None:
    """Each component runs in what was asked for it, and the picture stays near that of fp32."""
    record = run(name, precision=precision)
    found = name_precisions(record)
    asked = dict(entry.split("=") for entry in precision.split(","))
    expected = {
        "vae.decode" if component == "vae" else component: value.removesuffix("-plain")
        for component, value in asked.items()
    }
    if name == "svd":  # the pipeline itself brings an fp16 autoencoder with force_upcast to fp32
        expected["vae.encode"] = "fp32"
    assert {component: found[component] for component in expected} == expected
    reference = run_plain(save_tiny(name), CLASSES[name], name).astype(np.float64)
    assert np.sqrt(np.mean((read_video(out / "frames") - reference) ** 2)) < 8
    assert sum(call.non_finite for call in record.calls) == 0


@pytest.mark.usefixtures("each_device")
def test_auto_runs_what_it_decided(run: Any, out: Path) -> None:
    """Without a request each component runs in what its decision says, with a reason."""
    record = run("cogvideox", precision="auto")
    decided = {decision.component: decision.precision for decision in record.decisions}
    assert name_precisions(record).items() <= decided.items()
    assert {decision.stored for decision in record.decisions} == {"bf16"}
    for decision in record.decisions:
        assert decision.reason.startswith("The weights are stored in bf16")


@pytest.mark.usefixtures("each_device")
def test_what_is_kept_in_fp32_is_in_the_record(run: Any) -> None:
    """T5's wo stays fp32 in fp16: the decision says so, and the call's precisions show it."""
    record = run("cogvideox", precision="fp16-plain", frames=1)
    decision = next(d for d in record.decisions if d.component == "text_encoder")
    call = next(c for c in record.calls if c.component == "text_encoder")
    assert (decision.kept_fp32, call.precisions) == (("wo",), ("fp16", "fp32"))
    assert decision.reason.startswith("You asked for ")
    assert decision.reason.endswith(" `wo` stays in fp32, as the model's authors specify.")


@pytest.mark.parametrize(
    ("name", "component", "place"),
    [
        ("cogvideox", "text_encoder", ""),
        pytest.param("cogvideox", "transformer", " at step 1 of 2", marks=pytest.mark.slow),
        pytest.param("cogvideox", "vae", "", marks=pytest.mark.slow),
        pytest.param(
            "cogview3plus+large", "transformer", " at step 1 of 2", marks=pytest.mark.slow
        ),
        pytest.param("svd", "unet", " at step 1 of 2", marks=pytest.mark.slow),
        pytest.param("sd", "unet", " at step 1 of 2", marks=pytest.mark.slow),
        ("wan", "transformer", " at step 1 of 2 (sigma 1)"),
    ],
)
@pytest.mark.usefixtures("each_device")
def test_overflow_in_fp16_stops_the_run(
    run: Any, out: Path, name: str, component: str, place: str
) -> None:
    """The error names component, step and precision with its reason, and nothing is written."""
    with pytest.raises(NonFiniteError) as caught:
        run(name, overflow=component, precision="fp16-plain", on_fault="raise")
    error = caught.value
    named = f"{component}.decode" if component == "vae" else component
    assert re.fullmatch(
        r"Overflow in .+: an activation reached [\d,]+, above fp16's maximum of 65,504\.",
        error.what,
    )
    assert error.expected.startswith(f"`{named}` returned ")
    assert f" values) in fp16{place}. The fault begins at `{named}:" in error.expected
    assert f"`{named}` ran in fp16 because you asked for fp16-plain." in error.expected
    assert error.remedy.startswith(f'Use `precision="{named}=bf16"`, or load the model with ')
    assert error.exit_code == 1
    assert list(out.iterdir()) == []


@pytest.mark.usefixtures("each_device")
def test_the_remedy_works(run: Any, out: Path) -> None:
    """What the error says to type gives a picture."""
    record = run("cogvideox", overflow="transformer", precision="transformer=bf16", frames=1)
    assert record.findings == ()
    assert name_precisions(record)["transformer"] == "bf16"
    assert len(read_video(out / "frames")) == 1


@pytest.mark.parametrize(("bias", "kind"), [(-2.0, "black"), (0.0, "grey")])
def test_one_colour_is_a_finding(
    save_tiny: SaveTiny, media: Path, out: Path, tmp_path: Path, bias: float, kind: str
) -> None:
    """A decoder that paints one value is written and reported, with what to type."""
    folder = paint_decoder(save_tiny("cogvideox"), tmp_path / "painted", bias)
    record = generate(make_options(folder, out, media, **RUNS["cogvideox"]))
    (finding,) = record.findings
    assert (finding.kind, finding.module_path) == (f"{kind}-frames", "output")
    assert finding.evidence.startswith("All 9 frames: mean colour (")
    assert "--precision fp32" in finding.remedy
    assert len(read_video(out / "frames")) == 9


def test_a_frozen_clip_is_a_finding(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine times the same picture is reported."""
    monkeypatch.setattr(
        "stopdown.pipelines.results.read_frames",
        lambda output: np.repeat(np.asarray(output.frames[0])[:1], 9, axis=0),
    )
    (finding,) = run("cogvideox").findings
    assert finding.kind == "frozen-frames"
    assert finding.evidence.startswith("All 9 frames show the same picture")


@pytest.mark.usefixtures("each_device")
def test_nan_in_the_frames_themselves_is_an_error(
    run: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN that appears after the last component does not become a black pixel."""
    monkeypatch.setattr(
        "stopdown.pipelines.results.read_frames",
        lambda output: np.full((9, 32, 32, 3), np.nan, np.float32),
    )
    with pytest.raises(NonFiniteError, match="The decoded frames hold 27648 NaN and 0 Inf"):
        run("cogvideox")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    "suffix",
    ["clip.mp4", *(pytest.param(x, marks=pytest.mark.slow) for x in ("clip.gif", "frames/"))],
)
@pytest.mark.usefixtures("each_device")
def test_the_same_options_give_the_same_bytes(run: Any, out: Path, suffix: str) -> None:
    """Two runs write equal files; another seed writes others."""
    written = []
    for place, seed in (("a", 0), ("b", 0), ("c", 1)):
        (out / place).mkdir()
        run("cogvideox", output=f"{out}/{place}/{suffix}", seed=seed, steps=1)
        files = sorted(path for path in (out / place).rglob("*") if path.suffix != ".json")
        written.append([path.read_bytes() for path in files if path.is_file()])
    assert written[0] == written[1] != written[2]


def test_a_wrong_format_is_refused_before_the_download(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pipeline makes is known from its class, before its weights are there."""
    monkeypatch.setattr(generate_command, "find_kind", lambda source: "hub")
    monkeypatch.setattr(generate_command, "is_complete", lambda source: False)

    def find(options: Any, display: Any, with_weights: bool = True) -> Any:
        assert not with_weights
        return resolve_source("shapes")

    monkeypatch.setattr(generate_command, "find_named_source", find)
    monkeypatch.setattr(
        "stopdown.app.size_limits.show_before_download", lambda *_: pytest.fail("it goes on")
    )
    with pytest.raises(OptionError, match=r"clip\.png is a single picture"):
        generate(GenerateOptions("owner/name", "a", output=str(out / "clip.png")))


@pytest.mark.parametrize("words", ["image={}", 'image=["other.png", "{}"]', 'image="{}"'])
def test_a_file_in_an_argument_is_not_replaced(words: str, out: Path) -> None:
    """The output of a run isn't what it reads, even with --force."""
    picture = out / "in.png"
    write_media(picture, NOISE[:1])
    options = GenerateOptions(
        "shapes", "a", output=str(picture), force=True, arg=(words.format(picture),)
    )
    with pytest.raises(OutputError, match=r"in\.png is a file that this run reads"):
        generate_command._check_output_early(options)


@pytest.mark.usefixtures("each_device")
def test_the_record_says_what_was_done(run: Any, save_tiny: SaveTiny, out: Path) -> None:
    """The JSON beside the output is the record that was returned, with every fact of the run."""
    output = str(out / "clip.mp4")
    record = run("cogvideox", output=output, negative="b", guidance=3.0, seed=7)
    path = find_record_path(output)
    assert path == out / "clip.mp4.json"
    assert read_record(path, RunRecord) == record
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["request"] == {
        "source": str(save_tiny("cogvideox")),
        "prompt": "a",
        "negative": "b",
        "output": output,
        "precision": "fp32",
        "device": "auto",
        "steps": 2,
        "seed": 7,
        "frames": 9,
        "height": 32,
        "width": 32,
        "guidance": 3.0,
        "strict": False,
        "on_fault": "repair",
        "maxima": False,
        "keep_repairs": False,
        "num": 1,
        "force": False,
    }
    assert set(content["stages_s"]) == {
        "prepare",
        "load",
        "place",
        "encode",
        "denoise",
        "decode",
        "other",
        "write",
    }
    assert all(value >= 0 for value in content["stages_s"].values())
    assert sum(content["stages_s"].values()) <= content["elapsed_s"]
    assert content["peak_bytes"] >= 0  # none if the process has that much memory to spare
    assert 0 < content["own_s"] < content["elapsed_s"]
    assert len(content["fingerprint"]) == 64
    assert content["machine"]["versions"]["torch"]
    assert (content["schema"], content["kind"], content["output"]) == (1, "run", output)


@pytest.mark.usefixtures("each_device")
def test_the_display_sees_every_stage(save_tiny: SaveTiny, media: Path, out: Path) -> None:
    """Loading counts bytes, denoising counts steps, encoding and decoding are told of."""
    seen: list[tuple[str, str, int, int]] = []

    class Display:
        def progress(self, *call: Any) -> None:
            seen.append(call)

        def announce(self, text: str) -> None:
            raise AssertionError(text)

        def detail(self, text: str) -> None:
            pass

    options = make_options(save_tiny("cogvideox"), out, media, **RUNS["cogvideox"])
    generate(options, Display())
    stages = list(dict.fromkeys(stage for stage, *_ in seen))
    assert stages == ["import", "choose", "load", "encode", "denoise", "decode"]
    assert [call[2:] for call in seen if call[0] == "denoise"] == [(1, 2), (2, 2)]
    loads = [call for call in seen if call[0] == "load"]
    assert loads[-1][2] == loads[-1][3] > 0


def test_a_picture_is_written_as_png(run: Any, out: Path) -> None:
    """A text-to-image model writes one png, and refuses to be a folder's name with .png in it."""
    record = run("cogview3plus", output=str(out / "picture.png"))
    assert record.output == str(out / "picture.png")
    assert read_image(out / "picture.png").shape == (32, 32, 3)


def test_a_clip_does_not_fit_a_png(run: Any, out: Path) -> None:
    """What a model makes is known from its class, and a png is refused before it's loaded."""
    with pytest.raises(OptionError, match="single picture, and CogVideoXPipeline makes a video"):
        run("cogvideox", frames=None, output=str(out / "clip.png"))
    assert list(out.iterdir()) == []


def test_frames_cut_a_video(run: Any, media: Path, out: Path) -> None:
    """--frames takes so many frames of the video; a number that the model cannot make is refused."""
    run("cogvideox-video", frames=1)
    assert len(read_video(out / "frames")) == 1
    with pytest.raises(
        OptionError, match=r"frames=6 doesn't fit this model\..* are 1 and 9: use frames"
    ):
        run("cogvideox-video", frames=6, output=str(out / "other"))


@pytest.mark.usefixtures("each_device")
def test_out_of_memory_is_one_message(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch says when memory ends becomes a message with what to do; exit code 1."""
    import diffusers

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr(diffusers.CogVideoXTransformer3DModel, "forward", fail)
    with pytest.raises(StopdownError) as caught:
        run("cogvideox")
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        "The device ran out of memory: CUDA out of memory. Tried to allocate 20.00 GiB. more. A run "
        "needs memory for the weights and for the largest layer's activations. "
        'Leave memory="none" out if you '
        "gave it, or use a smaller `height` and `width`, fewer `frames`, or a 16-bit `precision`."
    )


@pytest.mark.usefixtures("each_device")
def test_what_a_pipeline_refuses_is_one_message(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError of the pipeline's own checks reaches the user as its sentence."""
    import diffusers

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("`guidance_scale` must be odd.")

    monkeypatch.setattr(diffusers.CogVideoXPipeline, "check_inputs", refuse)
    with pytest.raises(InputError) as caught:
        run("cogvideox")
    assert str(caught.value) == (
        "CogVideoXPipeline refused the request: `guidance_scale` must be odd. Change `guidance`."
    )


@pytest.fixture(scope="module")
def single_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Stable Diffusion in fp16 as a single file."""
    return save_single_file(tmp_path_factory.mktemp("single") / "tiny.safetensors")


@pytest.mark.parametrize(
    ("processor", "decided"),
    [("bf16", "fp32"), ("plain", "fp32"), ("fp16", "fp16")],
    indirect=["processor"],
)
@pytest.mark.usefixtures("processor")
def test_a_single_file_runs_with_its_configs(
    single_file: Path, save_tiny: SaveTiny, media: Path, out: Path, decided: str
) -> None:
    """Class, stored format and decisions come from file, configs, and what the processor computes in."""
    config = str(save_tiny("sd", "fp16"))
    options = make_options(single_file, out, media, prompt="a", config=config, precision="auto")
    record = generate(options)
    assert record.pipeline == "StableDiffusionPipeline"
    assert {d.component: (d.precision, d.stored) for d in record.decisions} == {
        "vae.encode": ("fp32", "fp16"),  # its config sets force_upcast
        "vae.decode": ("fp32", "fp16"),
        "text_encoder": (decided, "fp16"),
        "unet": (decided, "fp16"),
    }
    if decided == "fp32":
        plain = run_plain(Path(config), record.pipeline, "sd")
        np.testing.assert_array_equal(read_video(out / "frames"), plain)


@pytest.mark.usefixtures("each_device")
def test_a_single_file_takes_mixed_precisions(
    single_file: Path, save_tiny: SaveTiny, media: Path, out: Path
) -> None:
    """Components of a single file differ as those of a folder do, also from picture to picture."""
    options = make_options(
        single_file,
        out,
        media,
        prompt="a",
        image=True,
        config=str(save_tiny("sd", "fp16")),
        precision="unet=bf16,vae.encode=bf16,vae.decode=fp32,text_encoder=fp16-plain",
    )
    record = generate(options)
    assert record.pipeline == "StableDiffusionImg2ImgPipeline"
    assert name_precisions(record) == {
        "vae.encode": "bf16",
        "vae.decode": "fp32",
        "text_encoder": "fp16",
        "unet": "bf16",
    }


def test_a_single_file_has_checked_sizes_and_components(
    single_file: Path, save_tiny: SaveTiny, media: Path, out: Path
) -> None:
    """What cannot be is refused before the file is loaded, as for a folder."""
    config = str(save_tiny("sd", "fp16"))
    options = make_options(single_file, out, media, prompt="a", config=config)
    with pytest.raises(OptionError, match="height=36 doesn't fit this model"):
        generate(dataclasses.replace(options, height=36))
    with pytest.raises(OptionError, match="The model has no component 'transformer'"):
        generate(dataclasses.replace(options, precision="transformer=bf16"))


def test_words_that_the_bundled_model_never_saw_are_named(tmp_path: Path) -> None:
    """Each caption that it was trained on is known; of another prompt each strange word is named once."""
    shapes = resolve_source("shapes")
    captions = [x.caption(template) for x in all_scenes() for template in TEMPLATES]
    assert [found for x in captions if (found := list_unknown_words(shapes, x))] == []
    assert list_unknown_words(shapes, "A cat, a red cat riding") == ['"cat"', '"riding"']
    save_pipeline("cogvideox", tmp_path / "other")
    assert list_unknown_words(resolve_source(tmp_path / "other"), "a cat") == []


class _Seen(Display):
    """Keeps the stages and remarks of a run."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        """Keep the stage."""
        self.seen.append(stage)

    def inform(self, text: str) -> None:
        """Keep the remark."""
        self.seen.append(text)


def test_the_choice_of_a_precision_is_a_stage_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds behind the imports, which seemed to go on; strange words come first."""

    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("stopdown.plans.plan_choice.choose_plan", stop)
    shown = _Seen()
    options = GenerateOptions("shapes", "a cat", output=str(tmp_path / "a.mp4"))
    with pytest.raises(InterruptedError):
        generate(options, shown)
    assert shown.seen[0].startswith('The demo model shapes doesn\'t know the word "cat".')
    assert shown.seen[1:4] == ["import", "import", "choose"]

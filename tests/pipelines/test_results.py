"""What `generate` writes by the kind of pipeline: pictures, videos and sound, and their names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import stopdown
from models.other_pipelines import make_dit, make_layered
from models.sound_models import make_stable_audio, save_stable_audio
from stopdown.batch.records import BatchRecord
from stopdown.errors import OptionError, StopdownWarning
from stopdown.frames.media import read_image
from stopdown.pipelines.requests import Request
from stopdown.pipelines.results import (
    check_format,
    choose_suffix,
    find_frame_rate,
    find_output_kind,
    find_sound_rate,
    read_frames,
    read_result,
)
from stopdown.records import from_json

SMALL = ("--height", 32, "--width", 32, "--steps", 1, "--precision", "fp32")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def sound_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stable_audio(tmp_path_factory.mktemp("sound") / "model")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("StableDiffusionPipeline", "picture"),
        ("Kandinsky5T2IPipeline", "picture"),
        ("IFPipeline", "picture"),
        ("WuerstchenCombinedPipeline", "picture"),
        ("WanPipeline", "video"),
        ("WanAnimatePipeline", "video"),
        ("StableVideoDiffusionPipeline", "video"),
        ("LTX2Pipeline", "video"),
        ("StableAudioPipeline", "sound"),
        ("StableAudio3Pipeline", "sound"),
        ("AceStepPipeline", "sound"),
        ("AudioLDM2Pipeline", "sound"),
        ("MusicLDMPipeline", "sound"),
        ("LongCatAudioDiTPipeline", "sound"),
        ("ShapEPipeline", "video"),
        ("MarigoldDepthPipeline", "picture"),
        ("MarigoldIntrinsicsPipeline", "video"),
        ("MarigoldNormalsPipeline", "picture"),
        ("FluxPriorReduxPipeline", ""),
    ],
)
def test_the_kind_of_a_pipeline_is_read_from_its_module(name: str, kind: str) -> None:
    """The output classes that a pipeline's module names say what it makes, before anything is loaded."""
    assert find_output_kind(getattr(diffusers, name)) == kind


def test_a_pipeline_of_ones_own_makes_what_its_parent_makes() -> None:
    """A subclass in a module without output classes is known by the class that it extends."""
    made = type("MyPipeline", (diffusers.StableAudioPipeline,), {"__module__": __name__})
    assert find_output_kind(made) == "sound"


def test_one_frame_is_a_picture() -> None:
    """A video model that is asked for one frame writes a picture."""
    suffixes = [choose_suffix(diffusers.WanPipeline, Request(frames=n)) for n in (None, 1, 9)]
    assert suffixes == [".mp4", ".png", ".mp4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_images_per_prompt": 2}, "there are 2 frames to write"),
        ({"num_images_per_prompt": 2, "prompt": ["a", "b"]}, "there are 4 frames to write"),
        ({"prompt": ["a", "b"]}, "there are 2 frames to write"),
    ],
)
def test_several_pictures_are_no_single_file(arguments: dict[str, Any], message: str) -> None:
    """They were refused after the run, which was lost; a folder holds them."""
    kind = diffusers.StableDiffusionPipeline
    with pytest.raises(OptionError, match=message):
        check_format(kind, Request("a", arguments=arguments), "a.png")
    check_format(kind, Request("a", arguments=arguments), "a/")
    check_format(kind, Request("a", arguments={"num_images_per_prompt": 1}), "a.png")


@pytest.mark.parametrize("name", ["a.mp4", "a.webm"])
def test_a_missing_encoder_is_told_before_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without PyAV, or with one that lacks x264, hours of computing ended in an error."""
    kind, request = diffusers.CogVideoXPipeline, Request("a")
    with monkeypatch.context() as patch:
        patch.setattr(av, "codecs_available", {"mpeg4"})
        with pytest.raises(OptionError, match="This build of PyAV has no encoder lib"):
            check_format(kind, request, name)
        check_format(kind, request, "frames/")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(OptionError, match="needs the package av, which isn't installed"):
            check_format(kind, request, name)
        check_format(kind, request, "a.gif")
    check_format(kind, request, name)


def test_a_format_without_room_is_refused_before_the_run() -> None:
    """The picture was computed, and lost: no WebP is wider than 16383 pixels."""
    kind = diffusers.StableDiffusionPipeline
    with pytest.raises(OptionError, match=r"no room for a frame of width 16384\."):
        check_format(kind, Request("a", width=16384), "a.webp")
    check_format(kind, Request("a", width=16384), "a.png")


def test_a_video_is_no_picture_before_its_length_is_known() -> None:
    """`-o a.png` for a video was refused once the model was downloaded, planned and loaded."""
    kind = diffusers.CogVideoXPipeline
    with pytest.raises(OptionError, match=r"a\.png is a single picture"):
        check_format(kind, Request("a"), "a.png")
    check_format(kind, Request("a", frames=1), "a.png")
    check_format(kind, Request("a", video=np.zeros((1, 4, 4, 3), np.uint8)), "a.png")


def test_several_videos_at_a_time_are_refused() -> None:
    """One of them was written, and the others were lost without a word."""
    kind = diffusers.CogVideoXPipeline
    with pytest.raises(OptionError, match=r"num_videos_per_prompt=2 at a time\. One of them"):
        check_format(kind, Request("a", arguments={"num_videos_per_prompt": 2}), "a.mp4")
    check_format(kind, Request("a", arguments={"num_videos_per_prompt": 1}), "a.mp4")


def test_a_pipeline_without_output_is_refused() -> None:
    """Embeddings are no picture: what the result has is named."""
    with pytest.raises(OptionError) as caught:
        check_format(diffusers.FluxPriorReduxPipeline, Request(), "a.png")
    assert caught.value.what == "FluxPriorReduxPipeline makes no picture, video or sound."
    assert caught.value.expected == "Its result has pooled_prompt_embeds, prompt_embeds."


def test_a_prediction_is_a_picture() -> None:
    """Depth is grey, normals are colours from -1 to 1, and ShapE's views of an object are frames."""
    from diffusers.pipelines.marigold.pipeline_marigold_depth import MarigoldDepthOutput
    from diffusers.pipelines.marigold.pipeline_marigold_normals import MarigoldNormalsOutput
    from diffusers.pipelines.shap_e.pipeline_shap_e import ShapEPipelineOutput

    depth = np.random.default_rng(0).random((1, 4, 6, 1))
    found = read_frames(MarigoldDepthOutput(depth, None, None))
    assert (found == np.repeat(depth, 3, -1)).all()
    normals = np.array([-1.0, 0.0, 1.0]).reshape(1, 1, 1, 3)
    found = read_frames(MarigoldNormalsOutput(normals, None, None))
    assert found.tolist() == [[[[0.0, 0.5, 1.0]]]]
    views = np.random.default_rng(0).random((1, 5, 4, 6, 3))
    assert (read_frames(ShapEPipelineOutput(views)) == views[0]).all()


def test_noise_without_a_generator_has_the_seed_as_well(
    run: Run, save_tiny: Callable[..., Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline's code that draws from PyTorch's own generator draws the same, and leaves it as before."""
    drawn: list[torch.Tensor] = []
    call = diffusers.StableDiffusionPipeline.__call__

    def draw_more(self: Any, *args: Any, **kwargs: Any) -> Any:
        drawn.append(torch.randn(4))
        return call(self, *args, **kwargs)

    draw_more.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "__call__", draw_more)
    model = save_tiny("sd", "fp32")
    for seed in (0, 0, 1):
        before = torch.get_rng_state()
        assert run("generate", model, "a", *SMALL, "--seed", seed)[0] == 0
        assert torch.equal(torch.get_rng_state(), before)
    one, same, other = drawn[-3:]
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_picture_goes_to_a_png(run: Run, save_tiny: Callable[..., Path], here: Path) -> None:
    """Without -o a picture model writes stopdown.png, then stopdown-2.png, each with its record."""
    model = save_tiny("sd", "fp32")
    for name in ("stopdown.png", "stopdown-2.png"):
        code, out, err = run("generate", model, "a", *SMALL, "-q")
        assert (code, out, err) == (0, f"{name}\n", "")
        assert read_image(here / name).shape == (32, 32, 3)
        record = json.loads((here / f"{name}.json").read_text())
        assert record["output"] == record["request"]["output"] == name


@pytest.mark.parametrize(
    ("name", "form"), [("p.jpg", "JPEG"), ("p.jpeg", "JPEG"), ("p.webp", "WEBP")]
)
def test_a_picture_in_other_formats(
    name: str, form: str, run: Run, save_tiny: Callable[..., Path], here: Path
) -> None:
    """A .jpg and a .webp are pictures of their format, close to the .png; missing folders are made."""
    model = save_tiny("sd", "fp32")
    for output in ("a.png", f"new/deep/{name}"):
        assert run("generate", model, "a", *SMALL, "-o", output)[0] == 0
    with Image.open(here / "new" / "deep" / name) as found:
        assert found.format == form
    exact = read_image(here / "a.png").astype(int)
    difference = np.abs(read_image(here / "new" / "deep" / name) - exact).mean()
    assert difference < 4 if form == "JPEG" else difference == 0


def test_sound_goes_to_a_wav(run: Run, sound_model: Path, here: Path) -> None:
    """Without -o a sound model writes stopdown.wav, whose samples are those of the pipeline."""
    code, out, err = run("generate", sound_model, "a", "--steps", 2)
    assert (code, err) == (0, ""), err
    assert "Wrote stopdown.wav in " in out
    assert "sound   0.0 s, 2 channels, 800 Hz" in out
    found, rate = soundfile.read(here / "stopdown.wav")
    pipe = diffusers.DiffusionPipeline.from_pretrained(sound_model)
    generator = torch.Generator().manual_seed(0)
    made = pipe("a", num_inference_steps=2, generator=generator, output_type="np").audios[0]
    assert rate == 800
    assert np.abs(found.T - np.clip(made, -1, 32767 / 32768)).max() <= 0.501 / 32768
    record = json.loads((here / "stopdown.wav.json").read_text())
    assert record["sound"] == "0.0 s, 2 channels, 800 Hz"


@pytest.mark.parametrize("name", ["a.mp4", "a.png", "frames/"])
def test_sound_is_refused_another_format(
    name: str, run: Run, sound_model: Path, here: Path
) -> None:
    """A format that holds no sound is refused before weights are loaded, with the one to use."""
    code, _, err = run("generate", sound_model, "a", "-o", name)
    assert code == 2
    assert "isn't a file of sound, and the pipeline makes sound alone." in err
    assert not list(here.glob("*"))


def test_pictures_are_refused_a_format_of_sound(
    run: Run, save_tiny: Callable[..., Path], here: Path
) -> None:
    """A .wav of a picture model is refused at once."""
    code, _, err = run("generate", save_tiny("sd", "fp32"), "a", "-o", "a.wav")
    assert code == 2
    assert "a.wav is a file of sound, and the pipeline makes pictures." in err


def scale_decoder(model: Path, folder: Path, factor: float) -> Path:
    """The sound model with its last layer times a factor."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(model)
    pipe.save_pretrained(folder)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    name = next(x for x in weights if x.startswith("decoder.conv2.") and x.endswith(("_g", "0")))
    weights[name] *= factor
    save_file(weights, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(("factor", "kind"), [(0.0, "silent"), (1000.0, "clipped")])
def test_a_fault_of_sound_is_a_finding(
    factor: float, kind: str, run: Run, sound_model: Path, here: Path
) -> None:
    """Silence and clipping stand on the card and in the record, and end a strict run with 1."""
    model = scale_decoder(sound_model, here / "model", factor)
    code, out, _ = run("generate", model, "a", "--steps", 1, "--strict")
    assert code == 1
    assert f"{kind}-sound: " in out
    (finding,) = json.loads((here / "stopdown.wav.json").read_text())["findings"]
    assert (finding["kind"], finding["module_path"]) == (f"{kind}-sound", "output")
    assert "--precision" in finding["remedy"]
    code, out, _ = run("report", "stopdown.wav.json")
    page = (here / "stopdown.html").read_text()
    assert code == 0
    assert '<audio controls src="data:audio/wav;base64,' in page
    assert f"{kind}-sound" in page


def test_the_guard_hears_faults_of_sound(sound_model: Path, here: Path) -> None:
    """A guarded pipeline of one's own reports silence once, and its samples are as without a guard."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(scale_decoder(sound_model, here / "x", 0.0))
    with stopdown.guard(pipe) as guarded, pytest.warns(StopdownWarning, match="None of 62 samples"):
        audios = pipe("a", num_inference_steps=1, output_type="np").audios
    assert np.abs(audios).max() == 0.0
    assert [x.kind for x in guarded.record.findings] == ["silent-sound"]


def test_a_batch_of_sound(run: Run, sound_model: Path, here: Path) -> None:
    """Each prompt becomes a .wav, or a .flac on request, with a picture of it for the page."""
    (here / "prompts.txt").write_text("a bell\na drum\n")
    words = ("batch", sound_model, "--prompts", "prompts.txt", "--steps", 1)
    assert run(*words, "-o", "out")[0] == 0
    assert [soundfile.info(x).samplerate for x in sorted(here.glob("out/*.wav"))] == [800, 800]
    record = from_json((here / "out" / "batch.json").read_bytes(), BatchRecord)
    assert all(item.preview for item in record.items)
    assert run(*words, "-o", "flac", "--format", "flac")[0] == 0
    assert len(list(here.glob("flac/*.flac"))) == 2
    code, _, err = run(*words, "-o", "no", "--format", "mp4")
    assert code == 2
    assert "isn't a file of sound" in err


def test_sound_is_compared_by_its_samples(run: Run, sound_model: Path, here: Path) -> None:
    """`compare` measures samples where there are no frames."""
    words = ("compare", sound_model, "--prompt", "a", "--steps", 1, "--precisions", "fp32,bf16")
    code, _, err = run(*words, "-o", "page.html")
    assert code == 0, err
    found = json.loads((here / "page.html.json").read_text())
    (row,) = found["rows"]
    reference, other = row["cells"]
    assert (reference["precision"], reference["error"]) == ("fp32", "")
    assert 0 < other["measures"]["rmse"] < 0.2


class _Output(dict[str, Any]):
    __getattr__ = dict.get


def test_a_track_is_read_beside_its_frames() -> None:
    """The rate is that of what makes the samples, and frames per second those that the call was for."""
    pipe: Any = type("P", (), {"__call__": lambda self, frame_rate=24.0: None})()
    pipe.vocoder = type("V", (), {"config": {"output_sampling_rate": 100}})()
    pipe.audio_vae = type("A", (), {"config": {"sample_rate": 16000}})()
    made = _Output(frames=np.zeros((1, 48, 4, 4, 3)), audio=torch.zeros(1, 2, 200).bfloat16())
    found = read_result(pipe, {}, made)
    assert found.frames is not None
    assert found.samples is not None
    assert (found.frames.shape, found.samples.shape) == ((48, 4, 4, 3), (2, 200))
    assert (found.rate, found.fps) == (100, 24.0)
    assert read_result(pipe, {"frame_rate": 12.0}, made).fps == 12.0
    del pipe.vocoder, pipe.audio_vae
    with pytest.raises(OptionError, match="P doesn't say how many samples a second of its sound"):
        find_sound_rate(pipe)


@pytest.mark.parametrize(
    ("name", "arguments", "rate"),
    [
        ("LTXPipeline", {}, 25),
        ("LTXPipeline", {"frame_rate": 12}, 12),
        ("StableVideoDiffusionPipeline", {}, 7),
        ("WanPipeline", {}, 16),
        ("HunyuanVideoPipeline", {}, 15),
        ("CogVideoXPipeline", {}, 8),
        ("AnimateDiffPipeline", {}, None),
        ("StableDiffusionPipeline", {}, None),
    ],
)
def test_a_video_is_made_for_a_frame_rate(
    name: str, arguments: dict[str, Any], rate: float | None
) -> None:
    """It's that of the call, of its default, or of Diffusers' example for the class."""
    assert find_frame_rate(getattr(diffusers, name), arguments) == rate


@pytest.mark.parametrize(("words", "rate"), [((), 16), (("--fps", 12), 12)])
def test_a_video_plays_at_the_rate_that_it_was_made_for(
    run: Run, save_tiny: Callable[..., Path], here: Path, words: tuple[Any, ...], rate: int
) -> None:
    """A Wan's is 16 frames per second, where each video had 8, half its speed; --fps sets another."""
    code, _, err = run(
        "generate", save_tiny("wan"), "a", "--frames", 5, *SMALL, *words, "-o", "clip.mp4"
    )
    assert code == 0, err
    with av.open(str(here / "clip.mp4")) as file:
        assert file.streams.video[0].average_rate == rate


def test_the_rate_is_that_of_the_decoder() -> None:
    """Stable Audio's autoencoder has it in its config."""
    assert find_sound_rate(make_stable_audio()) == 800


def test_an_argument_without_an_option_is_given_by_name(run: Run, here: Path) -> None:
    """Class labels make a picture, the refusal without them names the flag, and a wrong name is refused."""
    make_dit().save_pretrained(here / "model")
    words = ("generate", "model", "--steps", 1, "--precision", "fp32")
    code, _, err = run(*words)
    assert code == 2
    assert (
        "DiTPipeline needs class_labels, which wasn't given. Use --arg class_labels=VALUE." in err
    )
    code, _, err = run(*words, "--arg", "class_labels=[207]", "--arg", "guidance_scale=1.5")
    assert code == 0, err
    record = json.loads((here / "stopdown.png.json").read_text())
    assert record["request"]["arg"] == ["class_labels=[207]", "guidance_scale=1.5"]
    code, _, err = run(*words, "--arg", "class_labels=[207]", "--arg", "colour=red")
    assert code == 2
    assert "DiTPipeline doesn't take the argument colour." in err
    assert "class_labels" in err


def test_weights_that_are_computed_of_others_are_planned(run: Run, here: Path) -> None:
    """Sound decoders normalise their weights by hooks; plans, copies and fp16 runs take them as others."""
    make_stable_audio().to(torch.bfloat16).save_pretrained(here / "model")
    words = ("generate", "model", "a", "--steps", 2)
    for name, precision in (("a", "fp32"), ("b", "fp16"), ("c", "vae.encode=fp32,vae.decode=bf16")):
        code, out, err = run(*words, "--precision", precision, "-o", f"{name}.wav", "-v")
        assert code == 0, err
        if precision == "fp16":
            assert "deepcopy" not in out
    exact, *others = (soundfile.read(here / f"{x}.wav")[0] for x in "abc")
    assert all(np.abs(x - exact).mean() < 0.004 for x in others)
    pipe = diffusers.DiffusionPipeline.from_pretrained("model")
    planned = stopdown.fp16(pipe, prompt="a", num_inference_steps=2)
    with planned, pytest.warns(StopdownWarning, match="held at full scale"):
        made = pipe("a", num_inference_steps=2, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(made.audios).all()


def test_a_refusal_that_names_no_option_advises_none(
    run: Run, save_tiny: Callable[..., Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what names an argument of the call is answered with it; all else with how one is given."""
    model = save_tiny("sd", "fp32")

    def refuse(pipe: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError(said)

    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "check_inputs", refuse)
    for said, advice in (
        ("Invalid sample size.", "--arg NAME=VALUE"),
        ("`height` has to be divisible by 8.", "Change --height."),
    ):
        code, _, err = run("generate", model, "a", *SMALL)
        assert code == 2
        assert "StableDiffusionPipeline refused the request: " in err
        assert advice in err
        assert ("Change --height" in err) == ("height" in said)


def test_an_error_that_a_module_raises_is_no_refusal(
    run: Run, save_tiny: Callable[..., Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose parts don't fit together can't be mended by another `--image`."""

    def stop(module: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError("image features and image tokens do not match")

    model = save_tiny("sd", "fp32")
    monkeypatch.setattr(diffusers.UNet2DConditionModel, "forward", stop)
    code, _, err = run("generate", model, "a", *SMALL)
    assert code == 1
    assert "StableDiffusionPipeline stopped: ValueError: image features" in err
    assert "Change --image" not in err
    assert "refused" not in err


def test_an_error_of_a_models_own_code_is_one_message(
    run: Run, save_tiny: Callable[..., Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what and where, and what was not given if the pipeline's own code stopped; no traceback."""

    def stop(pipe: Any, *args: Any, **kwargs: Any) -> None:
        raise UnboundLocalError("cannot access local variable 'condition'")

    model = save_tiny("sd", "fp32")
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "check_inputs", stop)
    code, _, err = run("generate", model, "a", *SMALL)
    assert code == 1
    assert "Traceback" not in err
    found = "StableDiffusionPipeline stopped: UnboundLocalError: cannot access local variable"
    assert found in err
    assert "It was raised in diffusers/pipelines/stable_diffusion/" in err
    assert "It ran in fp32, so the cause is in the model or the request." in err
    assert not (here / "stopdown.png").exists()


@pytest.mark.slow
def test_a_picture_in_layers_is_written_with_its_transparency(here: Path, run: Run) -> None:
    """Its pipeline reads pictures with an alpha channel, and makes one picture for each layer."""
    make_layered().save_pretrained("layered")
    Image.new("RGB", (64, 64), (200, 40, 40)).save("in.png")
    given = (
        "generate",
        "layered",
        "a fox",
        "--image",
        "in.png",
        "--steps",
        1,
        "--precision",
        "fp16",
    )
    given = (*given, "--arg", "layers=2", "--arg", "true_cfg_scale=1.0")
    status, _, err = run(*given, "-o", "one.png")
    assert status == 2
    assert "there are 2 frames to write" in err
    status, _, err = run(*given, "-o", "layers/")
    assert status == 0, err
    calls = {
        x["component"]: x["precisions"]
        for x in json.loads(Path("layers.json").read_text())["calls"]
    }
    assert all("fp16" in x for x in calls.values())
    for path in ("layers/frame_0000.png", "layers/frame_0001.png"):
        with Image.open(path) as made:
            assert (made.mode, made.size) == ("RGBA", (640, 640))
    assert not Path("layers/frame_0002.png").exists()

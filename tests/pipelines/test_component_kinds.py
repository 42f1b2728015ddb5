"""What Diffusers loads by `from_pretrained` is loaded, whatever its components are called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stopdown
from models.other_pipelines import make_allegro
from stopdown.memory.offloader import Offloader, predict_run
from stopdown.memory.run_memory import OUTSIDE
from stopdown.memory.strategies import Placement, Strategy
from stopdown.numerics import relative_l2
from stopdown.plans.certified import list_planned
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("module_cache")]

FP16 = torch.float16


def make_tokenizer() -> Any:
    """A generic fast tokenizer, which transformers 5 calls `TokenizersBackend` in `model_index.json`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[PAD]", *[chr(97 + number) for number in range(26)]]
    known = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", model_max_length=16
    )


ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
LAYER = {"hidden_size": 32, "intermediate_size": 48, **ATTENTION}


def make_ace_step(version: str = "turbo") -> Any:
    """An AceStepPipeline with its tokenizer of sounds, which is a model."""
    import diffusers
    from diffusers.pipelines.ace_step import modeling_ace_step as parts
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    transformer = diffusers.AceStepTransformer1DModel(
        **LAYER,
        num_hidden_layers=2,
        in_channels=24,
        audio_acoustic_hidden_dim=8,
        patch_size=2,
        sliding_window=16,
        is_turbo=version == "turbo",
        model_version=version,
    )
    encoder = parts.AceStepConditionEncoder(
        **LAYER,
        text_hidden_dim=32,
        timbre_hidden_dim=8,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
        sliding_window=16,
    )
    sounds = parts.AceStepAudioTokenizer(
        **LAYER,
        audio_acoustic_hidden_dim=8,
        fsq_dim=32,
        num_attention_pooler_hidden_layers=1,
        sliding_window=16,
    )
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=6,
        downsampling_ratios=[1, 2],
        decoder_channels=3,
        decoder_input_channels=8,
        channel_multiples=[2, 4],
        sampling_rate=4,
    )
    return diffusers.AceStepPipeline(
        vae=vae,
        text_encoder=Qwen3Model(Qwen3Config(vocab_size=64, num_hidden_layers=2, **LAYER)),
        tokenizer=make_tokenizer(),
        transformer=transformer,
        condition_encoder=encoder,
        audio_tokenizer=sounds,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )


def make_prx() -> Any:
    """A PRXPipeline, whose encoder is a class that Transformers does not have at its top level."""
    import diffusers
    from transformers import T5GemmaConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    torch.manual_seed(0)
    part = {"vocab_size": 64, "num_hidden_layers": 2, **LAYER}
    config = T5GemmaConfig(encoder=part, decoder=part)
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=4,
        context_in_dim=32,
        hidden_size=32,
        num_heads=2,
        depth=2,
        axes_dim=[8, 8],
        mlp_ratio=2.0,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=[8],
        down_block_types=["DownEncoderBlock2D"],
        up_block_types=["UpDecoderBlock2D"],
        norm_num_groups=4,
        shift_factor=0.1,
    )
    return diffusers.PRXPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=T5GemmaEncoder(config.encoder),
        tokenizer=make_tokenizer(),
        vae=vae,
        default_sample_size=32,
    )


def hear(pipe: Any) -> Any:
    """A second of sound."""
    return pipe(
        prompt="a piano",
        lyrics="la",
        audio_duration=4.0,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="pt",
    ).audios


def see(pipe: Any) -> Any:
    """A picture."""
    return pipe(
        "a fox",
        height=32,
        width=32,
        num_inference_steps=2,
        use_resolution_binning=False,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
    ).images


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "ace-step": (make_ace_step, hear),
    "prx": (make_prx, see),
}
MODELS = {
    "ace-step": {"vae", "text_encoder", "transformer", "condition_encoder", "audio_tokenizer"},
    "prx": {"vae", "text_encoder", "transformer"},
}


@pytest.fixture(scope="module", params=list(KINDS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name, folder, and what fp32 gives."""
    make, run = KINDS[request.param]
    folder = tmp_path_factory.mktemp("models") / request.param
    pipe = make()
    pipe.save_pretrained(folder)
    if request.param == "prx":  # published with the configuration of a whole T5Gemma
        from transformers import T5GemmaConfig

        part = {"vocab_size": 64, "num_hidden_layers": 2, **LAYER}
        T5GemmaConfig(encoder=part, decoder=part).save_pretrained(folder / "text_encoder")
    return request.param, folder, torch.as_tensor(run(quiet(type(pipe), folder)))


def quiet(kind: Any, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    pipe = kind.from_pretrained(folder, dtype=dtype, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_models_are_told_from_what_only_prepares(saved: Any) -> None:
    """A tokenizer of sounds has weights, a tokenizer by whatever name has none."""
    name, folder, _ = saved
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    assert index["tokenizer"] == ["transformers", "TokenizersBackend"]
    source = resolve_source(folder)
    verify_source(source)
    assert {*list_planned(source)} == MODELS[name]


@pytest.mark.parametrize("way", ["load", "quantization"])
@pytest.mark.filterwarnings("ignore")
def test_what_diffusers_loads_is_loaded(saved: Any, way: str) -> None:
    """It gives what fp32 gives."""
    import diffusers

    name, folder, wanted = saved
    kind = {"ace-step": diffusers.AceStepPipeline, "prx": diffusers.PRXPipeline}[name]
    if way == "load":
        pipe = stopdown.load(folder, precision="fp16", device="cpu")
    else:
        pipe = quiet(kind, folder, FP16, quantization_config=stopdown.quantization(folder))
    pipe.set_progress_bar_config(disable=True)
    made = torch.as_tensor(KINDS[name][1](pipe))
    assert relative_l2(made, wanted) < 0.02
    if way == "load":
        pipe.stopdown_guard.remove()


@pytest.mark.parametrize("placement", ["component", "block"])
def test_weights_that_are_read_between_calls_and_by_hooks(
    placement: Placement, tmp_path: Path
) -> None:
    """AceStep's own code reads an embedding of its encoder, and weight_norm's hooks those of its decoder:
    the same sound bit for bit where weights are offloaded, which ended the process."""
    pipe = make_ace_step("base")
    pipe.set_progress_bar_config(disable=True)
    wanted = hear(pipe)
    arguments = {"prompt": "a piano", "lyrics": "la", "audio_duration": 4.0, "output_type": "pt"}
    fit = predict_run(pipe, arguments, steps=2, fused=True)
    assert fit.strays["condition_encoder"] == {"": frozenset({OUTSIDE})}
    taken = next(x for x in fit.predictions if x.strategy == Strategy(placement))
    with Offloader(pipe, taken, (), fit.strays, store=tmp_path):
        assert torch.equal(hear(pipe), wanted)


def test_a_model_that_is_called_a_tokenizer_needs_its_weights(saved: Any, tmp_path: Path) -> None:
    """Without them the folder is damaged, and that is said."""
    import shutil

    from stopdown.errors import SourceError

    name, folder, _ = saved
    part = "audio_tokenizer" if name == "ace-step" else "text_encoder"
    shutil.copytree(folder, tmp_path / "model")
    for path in (tmp_path / "model" / part).glob("*.safetensors"):
        path.unlink()
    with pytest.raises(SourceError, match=rf"{part} has no safetensors weights"):
        verify_source(resolve_source(tmp_path / "model"))


def test_an_autoencoder_that_works_in_tiles_alone(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiling is turned on for Allegro, whose decoder does nothing without it, in every precision."""
    make_allegro().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    size = ("--height", 32, "--width", 32, "--frames", 8, "--steps", 1)
    for precision in ("fp32", "fp16"):
        words = ("generate", "model", "a", *size, "--precision", precision, "-o", precision)
        code, _, err = run(*words)
        assert code == 0, err
        assert len(list((tmp_path / precision).glob("*.png"))) == 8
    assert run("fit", "model", *size)[0] == 0  # its forecast turned tiling off

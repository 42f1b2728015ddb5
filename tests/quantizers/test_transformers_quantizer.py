"""Text encoders of Transformers by a plan, alone and in their pipeline's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import stopdown
from models.planned_models import FP16, is_near, load_encoder
from stopdown.errors import OptionError, StopdownWarning
from stopdown.runtime import repairs
from stopdown.runtime.guard import guard

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("module_cache")]


def test_a_model_of_transformers_is_near_to_fp32(cogvideox: Path) -> None:
    """A text encoder in its pipeline's folder overflows in plain fp16, and not with the config."""
    tokens = torch.tensor([[5, 6, 7, 1]])
    with torch.no_grad():
        wanted = load_encoder(cogvideox / "text_encoder", quantization_config=None).float()(tokens)
        encoder = load_encoder(cogvideox / "text_encoder")
        assert encoder.dtype == FP16
        assert is_near(encoder(tokens)[0], wanted[0])


def test_a_text_encoder_without_a_pipeline_is_certified(cogvideox: Path, tmp_path: Path) -> None:
    """Calls of a text encoder are known: tokens and a mask."""
    shutil.copytree(cogvideox / "text_encoder", tmp_path / "t5")
    encoder = load_encoder(tmp_path / "t5")
    assert encoder.hf_quantizer.applied_plan.components[0].in_force.certified


def test_a_guard_that_leaves_takes_no_repair_along(cogvideox: Path) -> None:
    """A model that repairs its other calls itself does so after a guard as well."""
    tokens = torch.tensor([[5, 6, 7, 1]])
    with torch.no_grad():
        wanted = load_encoder(cogvideox / "text_encoder", quantization_config=None).float()(tokens)
        encoder = load_encoder(cogvideox / "text_encoder")
        with guard({"text_encoder": encoder}):
            encoder(tokens)
        encoder.encoder.block[0].register_forward_hook(lambda *_: None)
        with pytest.warns(StopdownWarning, match="for which its exponents didn't hold"):
            assert is_near(encoder(tokens)[0], wanted[0])


@pytest.mark.parametrize(
    "name",
    [
        "Qwen2_5_VLForConditionalGeneration",
        pytest.param("Mistral3ForConditionalGeneration", marks=pytest.mark.slow),
    ],
)
def test_an_encoder_that_also_sees_is_certified(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config is one of two parts: without `use_cache=False` it returns keys, which nothing may scale.

    A call that asks for them has it cast, where bf16 is not native to fp32, and the warning says so.
    """
    from models.encoder_models import make_call, make_encoder

    monkeypatch.setattr(repairs, "computes_bf16", lambda device: False)
    module = make_encoder(name)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith(("v_proj.weight", "o_proj.weight")):
                parameter *= 2.0**24 if key.endswith("v_proj.weight") else 2.0**-24
    module.save_pretrained(tmp_path / "encoder")
    encoder, plain, wide = (
        type(module).from_pretrained(tmp_path / "encoder", dtype=dtype, **options)
        for dtype, options in (
            (FP16, {"quantization_config": stopdown.StopdownConfig()}),
            (FP16, {}),
            (torch.float32, {}),
        )
    )
    assert encoder.hf_quantizer.applied_plan.components[0].in_force.certified
    _, args, options = make_call(name, module, "right")
    with torch.no_grad():
        wanted = wide(*args, **options)[0]
        assert not is_near(plain(*args, **options)[0], wanted)
        assert is_near(encoder(*args, **options)[0], wanted)
        with pytest.warns(StopdownWarning, match=r"without use_cache=False.*to fp32"):
            assert is_near(encoder(*args, **options | {"use_cache": True})[0], wanted)


def test_what_authors_keep_in_fp32_fits_fp16(cogvideox: Path) -> None:
    """Both libraries ignore `_keep_in_fp32_modules` beside a config; the exponents make T5's `wo` fit."""
    encoder = load_encoder(cogvideox / "text_encoder")
    kept = encoder.hf_quantizer.applied_plan.components[0].scaling
    assert "wo" in type(encoder)._keep_in_fp32_modules
    for name, parameter in encoder.named_parameters():
        if ".wo." in name and not any(name in x for x in (kept.stream.kept, kept.fp32_modules)):
            assert parameter.dtype == FP16


def test_a_cast_to_its_own_dtype_is_none(cogvideox: Path) -> None:
    """Diffusers gives a text encoder its own dtype back when a LoRA is loaded: that moves it alone."""
    encoder = load_encoder(cogvideox / "text_encoder")
    before = {name: x.dtype for name, x in encoder.named_parameters()}
    assert encoder.to(device="cpu", dtype=encoder.dtype) is encoder
    assert encoder.to(encoder.dtype) is encoder
    assert {name: x.dtype for name, x in encoder.named_parameters()} == before
    assert FP16 in before.values()
    with pytest.raises(OptionError, match="can't be cast"):
        encoder.to(torch.bfloat16)

"""Converted files in others' readers: Diffusers, and ComfyUI from a checkout that a variable names.

`STOPDOWN_COMFYUI` names the checkout, or several with a colon between; packages that ComfyUI needs come by
`PYTHONPATH`.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from models.single_file_models import MODELS
from readers.single_file_readers import (
    SGM,
    UNREAD_BY_DIFFUSERS,
    convert_model,
    measure,
    measure_checkpoint,
    measure_svd,
    run_in_comfyui,
    run_in_diffusers,
    run_in_sgm,
)
from stopdown.errors import OptionError
from stopdown.fold_names import list_folds
from stopdown.scaling.graph import blocks

CHECKOUTS = [path for path in os.environ.get("STOPDOWN_COMFYUI", "").split(":") if path]
NO_COMFYUI = pytest.mark.skipif(
    not CHECKOUTS, reason="STOPDOWN_COMFYUI names no checkout of ComfyUI"
)
NO_SGM = pytest.mark.skipif(
    "STOPDOWN_SGM" not in os.environ, reason="STOPDOWN_SGM names no checkout of sgm"
)
PROGRAMS = [
    *(pytest.param("comfyui", root, marks=NO_COMFYUI) for root in CHECKOUTS or ("",)),
    pytest.param("sgm", os.environ.get("STOPDOWN_SGM", ""), marks=NO_SGM),
]
QUICK = ("wan", "sd3")
NAMES = [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in MODELS]


def assert_right(errors: dict[str, float], exact: float = 0.0) -> None:
    """NaN or wrong before; afterwards six times nearer than bf16, and in fp32 bit for bit the original."""
    print(errors)  # noqa: T201 - the figures, with -s
    assert not errors["fp16"] < 0.5
    assert errors["converted fp32"] <= exact
    assert errors["converted fp16"] <= errors["bf16"] / 6


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_diffusers_reads_what_was_converted(name: str, tmp_path: Path) -> None:
    """By `from_single_file` of the component's class."""
    if name in UNREAD_BY_DIFFUSERS:
        pytest.skip("Diffusers reads no file of this model, or of its published width alone")
    assert_right(measure(name, run_in_diffusers, tmp_path))


@pytest.mark.thorough
def test_a_file_holds_exponents_of_columns(tmp_path: Path) -> None:
    """A Flux whose single block has attention values beyond fp16: folds alone, in rows and columns.

    `linear2` reads them beside the feed-forward. Without exponents by range it is refused.
    """
    source, path = convert_model("flux-attention", tmp_path)
    with safe_open(path, "pt") as file:
        folds = list_folds(json.loads(file.metadata()["stopdown.exponents"]))
    assert len({exponent for place, exponent in folds["single_blocks.0.linear2.weight"]}) > 1
    before, after = load_file(source), load_file(path)
    for name, tensor in after.items():
        expected = before[name].float()
        for place, exponent in folds.get(name, ()):
            expected[place] *= 2.0**exponent
        assert torch.equal(tensor, expected.half()), name
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(blocks, "_read_joint", lambda node: None)
        with pytest.raises(OptionError, match="1 multiply"):
            convert_model("flux-attention", tmp_path / "without")


@NO_COMFYUI
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("root", CHECKOUTS)
def test_comfyui_reads_what_was_converted(name: str, root: str, tmp_path: Path) -> None:
    """By ComfyUI's own loader; where its code has sizes that no tiny model has, by its model class.

    Its norms of LTX's autoencoder square in the format of their input.
    """
    if not MODELS[name].inputs:
        pytest.skip("ComfyUI does not know this model")
    assert_right(measure(name, functools.partial(run_in_comfyui, root), tmp_path))


@pytest.mark.slow
@NO_SGM
@pytest.mark.parametrize("name", SGM)
def test_sgm_reads_what_was_converted(name: str, tmp_path: Path) -> None:
    """By the model class of Stability-AI's generative-models, which takes every tensor of the file.

    Eps stay as they are; sgm has others than Diffusers, so in fp32 the last bit may be another.
    """
    run = functools.partial(run_in_sgm, os.environ["STOPDOWN_SGM"])
    assert_right(measure(name, run, tmp_path), exact=2.0**-20)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "root"), PROGRAMS)
def test_a_whole_svd_is_read(program: str, root: str, tmp_path: Path) -> None:
    """A Diffusers folder becomes one file; UNet, decoder and both encoders are right.

    Its readers have no `quant_conv`: it was multiplied into the convolution before it.
    """
    errors = measure_svd(root, program, tmp_path)
    print(errors)  # noqa: T201 - the figures, with -s
    assert len(errors) == (4 if program == "comfyui" else 3)
    assert errors.pop("image_encoder", {"converted fp16": 0.0})["converted fp16"] < 2.0**-8
    for part, found in errors.items():
        assert_right(found, exact=2.0**-20 if (program, part) == ("sgm", "unet") else 0.0)


@pytest.mark.slow
@NO_COMFYUI
@pytest.mark.parametrize("root", CHECKOUTS)
def test_comfyui_reads_a_whole_checkpoint(root: str, tmp_path: Path) -> None:
    """A Diffusers folder becomes one file, without `--allow-eps`: its encoder, UNet and decoder are right.

    Eps stay as they are, so in fp32 the last bit may be another for other latents than those measured.
    """
    assert_right(measure_checkpoint(root, tmp_path), exact=2.0**-20)

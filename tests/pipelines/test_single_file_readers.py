"""Converted files in others' readers: Diffusers, and ComfyUI from a checkout that a variable names.

`STOPDOWN_COMFYUI` names the checkout, or several with a colon between; packages that ComfyUI needs come by
`PYTHONPATH`.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from single_file_models import MODELS
from single_file_readers import (
    UNREAD_BY_DIFFUSERS,
    measure,
    measure_checkpoint,
    run_in_comfyui,
    run_in_diffusers,
)

CHECKOUTS = [path for path in os.environ.get("STOPDOWN_COMFYUI", "").split(":") if path]
QUICK = ("wan", "sd3")
NAMES = [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in MODELS]


def assert_right(errors: dict[str, float]) -> None:
    """NaN or wrong before; afterwards six times nearer than bf16, and in fp32 bit for bit the original."""
    print(errors)  # noqa: T201 - the figures, with -s
    assert not errors["fp16"] < 0.5
    assert errors["converted fp32"] == 0.0
    assert errors["converted fp16"] <= errors["bf16"] / 6


@pytest.mark.parametrize("name", NAMES)
def test_diffusers_reads_what_was_converted(name: str, tmp_path: Path) -> None:
    """By `from_single_file` of the component's class."""
    if name in UNREAD_BY_DIFFUSERS:
        pytest.skip("Diffusers reads no file of this model, or of its published width alone")
    assert_right(measure(name, run_in_diffusers, tmp_path))


@pytest.mark.skipif(not CHECKOUTS, reason="STOPDOWN_COMFYUI names no checkout of ComfyUI")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("root", CHECKOUTS)
def test_comfyui_reads_what_was_converted(name: str, root: str, tmp_path: Path) -> None:
    """By ComfyUI's own loader; where its code has sizes that no tiny model has, by its model class."""
    assert_right(measure(name, functools.partial(run_in_comfyui, root), tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUTS, reason="STOPDOWN_COMFYUI names no checkout of ComfyUI")
@pytest.mark.parametrize("root", CHECKOUTS)
def test_comfyui_reads_a_whole_checkpoint(root: str, tmp_path: Path) -> None:
    """A Diffusers folder becomes one file, without `--allow-eps`: its encoder, UNet and decoder are right.

    Eps stay as they are, so in fp32 the last bit may be another for other latents than those measured.
    """
    errors = measure_checkpoint(root, tmp_path)
    print(errors)  # noqa: T201 - the figures, with -s
    assert not errors["fp16"] < 0.5
    assert errors["converted fp32"] <= 2.0**-20
    assert errors["converted fp16"] <= errors["bf16"] / 6

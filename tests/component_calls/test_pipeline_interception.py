"""Calls of a program's devices and pipelines, intercepted while a script runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch.utils._device import _device_constructors

from stopdown.component_calls.pipeline_interception import redirect_devices
from stopdown.interception.patches import Patches
from stopdown.testing import make_pipeline


def test_a_default_device_works_after_a_redirection() -> None:
    """Torch keeps a list of what makes tensors: it holds torch's own functions, not replaced ones."""
    _device_constructors.cache_clear()
    with mock.patch.object(torch, "linspace"), torch.device("meta"):
        torch.ones(1)
    with Patches() as patches:
        redirect_devices("cpu", print, patches)
        assert torch.linspace(0, 1, 2, device="cuda").device.type == "cpu"
        with torch.device("meta"):
            assert torch.hann_window(4).is_meta
    with torch.device("meta"):
        assert torch.linspace(0, 1, 2).is_meta


def test_what_goes_elsewhere_is_left_alone() -> None:
    """Only CUDA is redirected: dtypes, the meta device and other arguments pass."""
    said: list[str] = []
    with Patches() as patches:
        redirect_devices("cpu", said.append, patches)
        assert torch.ones(1).to("meta").device.type == "meta"
        assert torch.nn.Linear(1, 1).to(torch.float16).weight.dtype == torch.float16
        assert torch.ones(1).to("cpu", torch.float64, copy=True).dtype == torch.float64
    assert said == []


def test_files_and_models_that_are_loaded_onto_cuda_are_redirected(tmp_path: Path) -> None:
    """`load_file(path, device="cuda")` and a model's `device_map` ended in errors."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel

    pipe = make_pipeline("sd")
    path, said = tmp_path / "weights.safetensors", list[str]()
    save_file({"weight": torch.ones(2)}, path)
    pipe.vae.save_pretrained(tmp_path / "vae")
    pipe.text_encoder.save_pretrained(tmp_path / "text_encoder")
    with Patches() as patches:
        redirect_devices("cpu", said.append, patches)
        assert safetensors.torch.load_file(path, device="cuda")["weight"].device.type == "cpu"
        with safetensors.safe_open(path, "pt", device="cuda:0") as file:
            assert file.get_tensor("weight").device.type == "cpu"
        for kind, name in ((AutoencoderKL, "vae"), (CLIPTextModel, "text_encoder")):
            made = kind.from_pretrained(tmp_path / name, device_map="cuda")
            assert made.device.type == "cpu"
    assert "The script requests a device_map; --device overrides it." in said
    assert len(said) == 3


@pytest.mark.parametrize("device_map", ["cpu", {"": torch.device("cpu")}])
def test_a_model_that_is_loaded_onto_the_host_stays_there(device_map: Any, tmp_path: Path) -> None:
    """A text encoder that a script runs on the host was moved to the device, and its inputs were not."""
    from transformers import CLIPTextModel

    make_pipeline("sd").text_encoder.save_pretrained(tmp_path)
    said = list[str]()
    with Patches() as patches:
        redirect_devices("meta", said.append, patches)
        made = CLIPTextModel.from_pretrained(tmp_path, device_map=device_map)
    assert made.device.type == "cpu"
    assert said == []

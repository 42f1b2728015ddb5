"""A single safetensors file: a tiny Stable Diffusion in the layout of its first authors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from hub_server import HubServer
from safetensors.torch import load_file, save_file

from models.single_file_layout import save_single_file
from stopdown import testing
from stopdown.devices.device_choice import choose_device
from stopdown.errors import SourceError
from stopdown.pipelines.loader import complete_source, load_pipeline
from stopdown.plans import planned_loader
from stopdown.plans.applier import load_entry
from stopdown.plans.certified import certify_plan
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source

CONFIGURATION = "stable-diffusion-v1-5/stable-diffusion-v1-5"
"""Where Diffusers takes the configuration of such a file from."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Stable Diffusion as a Diffusers folder."""
    path = tmp_path_factory.mktemp("single") / "sd"
    return testing.save_pipeline("sd", path, dtype=torch.float16)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a single file."""
    return save_single_file(tmp_path_factory.mktemp("single") / "tiny.safetensors")


def assert_equal_weights(pipe: Any, dtype: torch.dtype) -> None:
    made = testing.make_pipeline("sd", dtype=torch.float16)
    for component in ("unet", "vae", "text_encoder"):
        loaded = getattr(pipe, component).state_dict()
        for name, tensor in getattr(made, component).state_dict().items():
            assert torch.equal(loaded[name], tensor.to(dtype)), f"{component}:{name}"


def test_a_single_file_loads_with_a_local_configuration(file: Path, folder: Path) -> None:
    """Every weight is the one that was saved, and the tokenizer comes from the folder."""
    source = resolve_source(file, config=folder)
    verify_source(source)
    pipe = load_pipeline(source, torch_dtypes=torch.float32)
    assert_equal_weights(pipe, torch.float32)
    assert pipe.tokenizer("a b").input_ids == testing.make_pipeline("sd").tokenizer("a b").input_ids


def test_components_of_a_single_file_have_their_own_precision(file: Path, folder: Path) -> None:
    """The VAE can stay in fp32 while the rest is in bf16."""
    dtypes = {"vae": torch.float32, "default": torch.bfloat16}
    pipe = load_pipeline(resolve_source(file, config=folder), torch_dtypes=dtypes)
    assert (pipe.vae.dtype, pipe.unet.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.thorough
def test_exponents_are_put_on_the_format_of_the_file(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single file in fp16 is loaded by a plan without any weight in fp32 on the way."""
    source = complete_source(resolve_source(file, config=folder))
    plan, seen = certify_plan(source), set[torch.dtype]()

    def watch(module: torch.nn.Module, *given: Any, **named: Any) -> Any:
        seen.update(x.dtype for x in module.parameters())
        return load_entry(module, *given, **named)

    monkeypatch.setattr(planned_loader, "load_entry", watch)
    pipe = planned_loader.load_plan(source, plan, choose_device("cpu")).pipe
    assert seen == {torch.float16}
    assert pipe.unet.dtype == torch.float16


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Hub on loopback that this process asks, with the configuration of Stable Diffusion."""
    with HubServer({CONFIGURATION: folder}) as server:
        # Read from the environment when the client is imported, which has happened by now.
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield server


def test_the_configuration_comes_from_the_hub_without_weights(hub: HubServer, file: Path) -> None:
    """The kind of checkpoint is read from its names; only configurations are downloaded."""
    pipe = load_pipeline(resolve_source(file), torch_dtypes=torch.float16)
    assert_equal_weights(pipe, torch.float16)
    assert not any(name.endswith(".safetensors") for name in hub.downloaded())


def test_a_configuration_that_cannot_be_read_is_one_message(hub: HubServer, file: Path) -> None:
    """Without a connection the message says what is missing and what to give instead."""
    hub.stop()
    with pytest.raises(SourceError) as caught:
        load_pipeline(resolve_source(file), torch_dtypes=torch.float16)
    message = str(caught.value)
    assert message.startswith(
        f"The configuration of {file} couldn't be read from {CONFIGURATION}. A single file holds "
        f"weights only. The model {CONFIGURATION} couldn't be downloaded from {hub.endpoint}: "
    )
    assert message.endswith(
        "Connect to the Hub, or give a Diffusers folder of the same kind of model as "
        "configuration (its weights aren't read)."
    )


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ("cond_stage_model.", "Failed to load CLIPTextModel. Weights for this component appear"),
        ("model.diffusion_model.out.2.", "tensors of the model are missing from them"),
        ("first_stage_model.decoder.conv_out.", "tensors of the model are missing from them"),
        ("cond_stage_model.transformer.text_model.final", "they lack "),
    ],
)
def test_a_single_file_that_lacks_weights_is_refused(
    file: Path, folder: Path, tmp_path: Path, lost: str, found: str
) -> None:
    """A file without its text encoder, or without one layer, does not load half."""
    tensors = load_file(file)
    part = tmp_path / "part.safetensors"
    save_file({name: tensors[name] for name in tensors if not name.startswith(lost)}, part)
    with pytest.raises(SourceError) as caught:
        load_pipeline(resolve_source(part, config=folder), torch_dtypes=torch.float16)
    assert str(caught.value).startswith(f"The weights in {part} don't match the model: ")
    assert found in str(caught.value)


def test_the_configuration_needs_no_weights(file: Path, folder: Path, tmp_path: Path) -> None:
    """A configuration folder from which the weights were removed is enough."""
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    for path in bare.rglob("*.safetensors"):
        path.unlink()
    load_pipeline(resolve_source(file, config=bare), torch_dtypes=torch.float16)

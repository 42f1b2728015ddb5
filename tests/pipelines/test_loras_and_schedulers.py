"""LoRAs and schedulers that a user names: parsed, looked up, and refused with what there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.lora_cases import write_lora
from stopdown.errors import OptionError, SourceError, StopdownError
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.loras_and_schedulers import (
    find_scheduler,
    parse_lora,
    put_extras,
    put_loras,
)
from stopdown.sources.source import Source
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline


def test_a_lora_is_a_path_and_a_weight(tmp_path: Path) -> None:
    """The number behind the last colon is the weight, 1 by default; colons of paths stay."""
    for name in ("style.safetensors", "a:b.safetensors"):
        path = str(tmp_path / name)
        save_file({"a": torch.ones(1)}, path)
        assert parse_lora(path) == (path, 1.0)
        assert parse_lora(f"{path}:0.8") == (path, 0.8)
        assert parse_lora(f"{path}:-2") == (path, -2.0)


@pytest.mark.parametrize("name", ["none.safetensors", "none.safetensors:0.5", "here.bin"])
def test_what_is_no_lora_is_refused(name: str, tmp_path: Path) -> None:
    """A file that isn't there, and one of another kind."""
    (tmp_path / "here.bin").write_bytes(b"x")
    with pytest.raises(OptionError, match=r"There is no \.safetensors file .* for the LoRA"):
        parse_lora(str(tmp_path / name))


def test_a_damaged_lora_is_refused(tmp_path: Path) -> None:
    """Before anything is loaded."""
    path = tmp_path / "cut.safetensors"
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(StopdownError, match=r"The LoRA .*cut\.safetensors"):
        parse_lora(str(path))


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "eulerdiscrete", " EulerDiscrete "])
def test_a_scheduler_is_found_in_any_spelling(name: str) -> None:
    """With or without the word `Scheduler`, in any case."""
    assert find_scheduler(name) == "EulerDiscreteScheduler"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Euler", "EulerDiscreteScheduler"),
        ("unipc", "UniPCMultistepScheduler"),
        ("DPMSolver", "DPMSolverMultistepScheduler"),
        ("EulerAncestral", "EulerAncestralDiscreteScheduler"),
        ("DDIM", "DDIMScheduler"),
    ],
)
def test_a_scheduler_has_the_name_that_people_use(name: str, found: str) -> None:
    """The option's own help says `Euler`, which was refused."""
    assert find_scheduler(name) == found


def test_an_unknown_scheduler_has_the_nearest() -> None:
    """The remedy has one that there is."""
    with pytest.raises(OptionError) as caught:
        find_scheduler("EulerDiscret")
    assert "EulerDiscrete" in caught.value.expected
    assert caught.value.remedy == 'Use scheduler="EulerDiscrete".'


def make_source(**changes: Any) -> Source:
    return dataclasses.replace(resolve_source("shapes"), **changes)


def test_a_scheduler_that_does_not_fit_is_refused() -> None:
    """Those that fit are listed; one of them takes the place of the pipeline's own."""
    pipe = make_pipeline("sd")
    fits = make_source(scheduler="EulerDiscreteScheduler")
    put_extras(pipe, fits)
    assert type(pipe.scheduler).__name__ == "EulerDiscreteScheduler"
    with pytest.raises(OptionError) as caught:
        put_extras(pipe, make_source(scheduler="FlowMatchEulerDiscreteScheduler"))
    assert caught.value.what.startswith("FlowMatchEulerDiscreteScheduler doesn't fit")
    assert "EulerDiscreteScheduler" in caught.value.expected
    assert type(pipe.scheduler).__name__ == "EulerDiscreteScheduler"


def test_a_pipeline_without_loras_refuses_one() -> None:
    """And takes none in silence."""
    put_loras(object(), ())
    with pytest.raises(SourceError, match="object takes no LoRA"):
        put_loras(object(), (("style.safetensors", 1.0),))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")  # of Diffusers
def test_loras_have_their_weights(save_tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Two are put on with a weight each; a file whose tensors have no place is refused."""
    folder = save_tiny("sd")
    path = str(write_lora(resolve_source(folder), tmp_path))
    pipe = load_pipeline(resolve_source(folder), torch_dtypes=torch.float32)
    put_loras(pipe, ((path, 0.5), (path, 2.0)))
    layer = next(x for x in pipe.unet.modules() if getattr(x, "scaling", None))
    assert layer.scaling["lora_1"] == 4 * layer.scaling["lora_0"]
    other = tmp_path / "other.safetensors"
    save_file({"unet.nothing.lora_A.weight": torch.ones(1, 1)}, other)
    with pytest.raises(SourceError, match="other"):
        put_loras(pipe, ((str(other), 1.0),))

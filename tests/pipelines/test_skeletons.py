"""Tests of pipelines without weights: what is copied of them, and how they are cast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from stopdown.fake_tensors.fake_modules import build_fake, find_mode
from stopdown.pipelines.skeletons import build_skeleton, copy_skeleton
from stopdown.scaling.graph.capture import capture_call
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline

SaveTiny = Callable[..., Path]


class Keeping(nn.Module):
    """Keeps tensors outside of its parameters, as caches and tables do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = {"rows": [torch.tensor(2.0)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.fixture
def no_copied_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops before a storage's address is copied: two owners would give it back twice."""

    def refuse(self: Any, memo: Any) -> None:
        raise AssertionError("a storage's address is copied")

    monkeypatch.setattr(StorageWeakRef, "__deepcopy__", refuse, raising=False)


@pytest.fixture
def skeleton(save_tiny: SaveTiny) -> Any:
    source = resolve_source(save_tiny("sd"))
    return build_skeleton(source, dict.fromkeys(source.components, torch.float16))


def count_constants(module: nn.Module) -> int:
    """Storages whose addresses a module's mode keeps."""
    return len(find_mode(module).fake_tensor_converter.constant_storage_mapping)


@pytest.mark.usefixtures("no_copied_addresses")
def test_a_stand_in_is_captured_without_copying_its_mode(skeleton: Any) -> None:
    """A capture copies the component, and leaves its mode and the addresses in it alone."""
    with find_mode(skeleton.text_encoder):
        skeleton.text_encoder.kept = torch.tensor(2.0)
    assert count_constants(skeleton.text_encoder)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    capture = capture_call(skeleton.text_encoder, (ids,), dtype=torch.float16)
    assert capture.component == "CLIPTextModel"


@pytest.mark.usefixtures("no_copied_addresses")
def test_a_stand_in_of_a_stand_in_has_a_mode_of_its_own(skeleton: Any) -> None:
    """Copying a skeleton takes over no address; casting the copy leaves the first as it is."""
    with find_mode(skeleton.unet):
        skeleton.unet.kept = torch.tensor(2.0)
    assert count_constants(skeleton.unet)
    second = copy_skeleton(skeleton)
    assert find_mode(second.unet) is find_mode(second.text_encoder)
    assert find_mode(second.unet) is not find_mode(skeleton.unet)
    second.unet.to(torch.float32)
    assert {p.dtype for p in second.unet.parameters()} == {torch.float32}
    assert {p.dtype for p in skeleton.unet.parameters()} == {torch.float16}


@pytest.mark.usefixtures("no_copied_addresses")
def test_fake_tensors_outside_of_parameters_keep_their_mode() -> None:
    """A table in a plain attribute holds the mode as a parameter does; a capture shares it."""
    module = build_fake(Keeping, torch.float16)
    assert count_constants(module)
    capture = capture_call(module, (torch.zeros(2, 4),), dtype=torch.float16)
    assert set(capture.parameters.values()) == {"linear.weight", "linear.bias"}


def test_a_captured_stand_in_is_cast_as_before(skeleton: Any) -> None:
    """The way a skeleton takes casts goes over to the capture's copy, not back to the original."""
    ids = torch.zeros(1, 8, dtype=torch.int64)
    capture_call(skeleton.text_encoder, (ids,), dtype=torch.bfloat16)
    assert {p.dtype for p in skeleton.text_encoder.parameters()} == {torch.float16}
    skeleton.text_encoder.to(torch.float32)
    assert {p.dtype for p in skeleton.text_encoder.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "component"), [("sdxl", "text_encoder_2"), ("svd", "image_encoder")]
)
def test_a_model_inside_of_a_model_has_the_dtype_asked_for(
    save_tiny: SaveTiny, name: str, component: str
) -> None:
    """CLIP's classes with a projection hold another model; the dtype in the stored config is not its."""
    source = resolve_source(save_tiny(name))
    part = getattr(build_skeleton(source, {component: torch.float16}), component)
    assert {p.dtype for p in part.parameters()} == {torch.float16}


class Reading(nn.Module):
    """Reads values of a table while it is built, as models with dropped paths do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.5, 3, device="cpu")]
        self.linear = nn.Linear(4, 4)
        self.twin = self.linear
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_a_class_that_reads_a_table_is_built_without_memory() -> None:
    """Its rates are numbers; its parameters are fakes, in the dtype asked for, and shared as before."""
    module = build_fake(Reading, torch.float16)
    assert module.rates == [0.0, 0.25, 0.5]
    assert find_mode(module) is not None
    tensors = [*module.parameters(), *module.buffers()]
    assert all(isinstance(x, FakeTensor) and x.device.type == "cpu" for x in tensors)
    assert {x.dtype for x in tensors} == {torch.float16}
    assert module.twin.weight is module.linear.weight
    assert "table" not in module.state_dict()


def test_the_pipelines_that_a_pipeline_runs_are_copied_with_it() -> None:
    """A combined pipeline's prior ran with real weights in a dry run, and wasn't counted."""
    pipe = make_pipeline("sd")
    pipe.prior_pipe = type(pipe)(**pipe.components)
    skeleton = copy_skeleton(pipe)
    assert skeleton.prior_pipe.unet is skeleton.unet
    assert all(isinstance(x, FakeTensor) for x in skeleton.prior_pipe.unet.parameters())
    assert pipe.prior_pipe.unet is pipe.unet
    assert skeleton.prior_pipe.scheduler is not pipe.prior_pipe.scheduler

"""What components in fp16 say their dtype is, beside one that returns more than fp16 holds."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stopdown.component_calls.stated_dtypes import state_dtypes
from stopdown.interception.patches import Patches
from stopdown.module_calls.module_code import list_functions

FP16, FP32 = torch.float16, torch.float32


class Part(nn.Module):
    """Says its dtype as models of Diffusers and Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2).to(FP16)

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.weight.dtype

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layer(value.to(self.read()))

    def read(self) -> torch.dtype:
        return self.dtype


class Derived(Part):
    """Has its dtype from another class."""


def make_pipe() -> Any:
    return SimpleNamespace(encoder=Derived(), denoiser=Part())


def state(pipe: Any, wide: bool = True) -> Patches:
    patches = Patches()
    state_dtypes([pipe.encoder, pipe.denoiser], [pipe.encoder] if wide else [], patches)
    return patches


def test_parts_of_a_pipeline_with_a_wide_encoder_say_fp32_until_it_is_undone() -> None:
    """Those of another pipeline, of the same classes, say what they are in."""
    pipe, other = make_pipe(), make_pipe()
    patches, others = state(pipe), state(other, wide=False)
    assert (pipe.encoder.dtype, pipe.denoiser.dtype) == (FP32, FP32)
    assert (other.encoder.dtype, other.denoiser.dtype) == (FP16, FP16)
    patches.undo()
    assert (pipe.encoder.dtype, pipe.denoiser.dtype) == (FP16, FP16)
    others.undo()
    assert "dtype" not in vars(Derived)
    assert isinstance(vars(Part)["dtype"], property)


def test_classes_are_left_alone_while_nothing_is_wide() -> None:
    """A pipeline whose values fit has its own property."""
    before, patches = vars(Part)["dtype"], state(make_pipe(), wide=False)
    assert vars(Part)["dtype"] is before
    assert "dtype" not in vars(Derived)
    patches.undo()


def test_a_part_says_what_it_is_in_to_its_own_call() -> None:
    """Its code casts what it computes with, and a helper of it does."""
    pipe = make_pipe()
    with state(pipe):
        made = pipe.denoiser(torch.ones(1, 2))
    assert made.dtype == FP16


def test_a_part_that_nothing_known_holds_says_fp32() -> None:
    """A script may have taken the parts out of their pipeline; a copy is under no plan."""
    pipe = make_pipe()
    with state(pipe):
        denoiser, again = pipe.denoiser, copy.deepcopy(pipe.denoiser)
        del pipe.denoiser
        assert denoiser.dtype == FP32
        assert again.dtype == FP16


def test_a_part_that_is_alone_says_what_it_is_in_beside_other_pipelines() -> None:
    """A wide encoder elsewhere in the process is nothing to it: its owner may cast it to its own dtype."""
    with state(make_pipe()):
        alone = make_pipe()
        with state(alone, wide=False):
            encoder = alone.encoder
            del alone
            assert encoder.dtype == FP16


def test_compiled_code_reads_what_a_part_is_in() -> None:
    """The property breaks no graph."""
    pipe, value = make_pipe(), torch.ones(1, 2)
    plain = pipe.denoiser(value)
    with state(pipe):
        compiled = torch.compile(pipe.denoiser, backend="eager", fullgraph=True)
        assert torch.equal(compiled(value), plain)


def test_the_property_is_no_code_that_a_call_runs() -> None:
    """A plan holds for a class whose `dtype` is ours, and for one whose is its own again."""
    pipe = make_pipe()
    kinds = list_functions([pipe.encoder, pipe.denoiser])
    for one in kinds:
        one.note()
    with state(pipe):
        assert not [x for one in kinds for x in one.list_changes()]
        for one in kinds:
            one.note()
    assert not [x for one in kinds for x in one.list_changes()]


def test_an_autoencoder_that_is_brought_to_fp32_says_what_it_is_in() -> None:
    """SVD's pipeline casts it to fp32 when it says fp16; a plan takes that back in its configuration."""
    pipe = make_pipe()
    pipe.denoiser.config = SimpleNamespace(force_upcast=True)
    with state(pipe):
        assert (pipe.encoder.dtype, pipe.denoiser.dtype) == (FP32, FP16)
        pipe.denoiser.config.force_upcast = False
        assert pipe.denoiser.dtype == FP32

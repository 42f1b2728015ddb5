"""Names and sizes of a call's inputs."""

from __future__ import annotations

import torch
from torch import nn

from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.call_inputs import (
    find_largest_step,
    fits,
    is_encoded,
    is_timestep,
    name_inputs,
    read_call_sizes,
    read_names,
    read_sizes,
    show_sizes,
)
from stopdown.module_calls.callee import Callee


class Denoiser(nn.Module):
    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        return hidden_states


LATENT, STEP, TEXT = torch.zeros(2, 16, 60, 90), torch.tensor([981]), torch.zeros(2, 226, 4096)


def test_inputs_are_named_by_keyword_or_place() -> None:
    """Names of the method's parameters stand for places, and an unknown place has none."""
    names = read_names(Denoiser(), "")
    assert names == ("hidden_states", "timestep", "encoder_hidden_states")
    found = name_inputs((LATENT, STEP), {"encoder_hidden_states": TEXT}, names)
    assert [name for name, _ in found] == list(names)
    assert [name for name, _ in name_inputs((LATENT,), {})] == [""]


def test_sizes_leave_the_batch_and_tables_out() -> None:
    """Timesteps, masks, rotary tables and size conditions have none."""
    kwargs = {
        "image_rotary_emb": torch.zeros(8, 8), "attention_mask": torch.zeros(2, 226),
        "time_ids": torch.zeros(2, 6), "guidance": torch.zeros(2, 1),
    }  # fmt: skip
    found = read_sizes((LATENT, STEP, TEXT), kwargs, read_names(Denoiser(), "forward"))
    assert found == [("hidden_states", (16, 60, 90)), ("encoder_hidden_states", (226, 4096))]


def test_a_matrix_in_a_list_counts_whole() -> None:
    """It is one item of the batch."""
    assert read_sizes((), {"cap_feats": [torch.zeros(7, 64)]}) == [("cap_feats", (7, 64))]


def test_sizes_of_calls_are_under_their_names() -> None:
    """`vae.decode` has its own argument."""
    module = Denoiser()
    callee = Callee("transformer", module, "forward", "denoise")
    call = ComponentCall(callee, (), {"hidden_states": LATENT, "timestep": STEP})
    assert read_call_sizes([call]) == [("transformer", [("hidden_states", (16, 60, 90))])]


def test_a_size_fits_within_one_of_several() -> None:
    """Every dimension counts, and so does their number."""
    assert fits((16, 60, 90), [(16, 30, 30), (16, 60, 90)])
    assert not fits((16, 60, 91), [(16, 60, 90), (16, 90, 60)])
    assert not fits((60, 90), [(16, 60, 90)])
    assert show_sizes([(16, 60, 90), (226,)]) == "16 × 60 × 90 or 226"


def test_the_largest_step_is_found() -> None:
    """A long tensor of that name is no timestep."""
    assert find_largest_step((), {"timestep": torch.tensor([3, 981]), "t": torch.tensor(5)}) == 981
    assert find_largest_step((), {"hidden_states": LATENT}) == 0
    assert is_timestep("timestep_cond", torch.zeros(4))
    assert not is_timestep("timestep", torch.zeros(17))


def test_outputs_of_encoders_are_known_by_name() -> None:
    """Latents are none."""
    names = ("encoder_hidden_states", "pooled_projections", "cap_feats", "hidden_states")
    assert list(map(is_encoded, names)) == [True, True, True, False]

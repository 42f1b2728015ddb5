"""Inputs beyond the limits of a certificate are found at the component call, reported once and recorded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from models.pipeline_calls import call_pipeline, make_pipeline
from models.snapshots import assert_untouched
from stopdown import guard, make_plan, rescale_
from stopdown.errors import StopdownWarning
from stopdown.module_calls.call_inputs import fits
from stopdown.numerics import relative_l2
from stopdown.plans.calibrated import measure_plan
from stopdown.plans.plan_files import read_class_versions
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.scaling.bounds.input_limits import EMBEDDINGS, LATENTS, list_timesteps
from stopdown.scaling.trials import bounded_search


def test_an_input_beyond_its_limit_is_found() -> None:
    """Each call that a certificate does not cover is counted, with no read more and no bit changed."""
    pipe, told = make_pipeline("cogvideox"), []
    with guard(pipe) as plain:
        expected = call_pipeline(pipe, "cogvideox")
    with assert_untouched(pipe), guard(pipe, announce=told.append) as handle:
        handle.limit_inputs(
            "transformer", {"forward.hidden_states": 0.5, "forward.timestep": 1000.5}
        )
        found = call_pipeline(pipe, "cogvideox")
    np.testing.assert_array_equal(found, expected)
    assert handle.record.host_reads == plain.record.host_reads
    (sentence,) = handle.record.uncertified
    assert sentence.startswith("2 calls of `transformer` not certified: `hidden_states` reached ")
    assert "the plan's bounds hold up to 0.5" in sentence
    assert len(told) == 1
    assert told[0].startswith("1 call of `transformer` not certified")


def test_inputs_within_their_limits_are_silent() -> None:
    """Nothing is said of a call that a certificate covers, or of another method's argument."""
    pipe, told = make_pipeline("cogvideox"), []
    with guard(pipe, announce=told.append) as handle:
        handle.limit_inputs("transformer", {"forward.hidden_states": LATENTS})
        handle.limit_inputs("vae", {"encode.z": 1e-6, "decode.z": LATENTS})
        call_pipeline(pipe, "cogvideox")
    assert handle.record.uncertified == ()
    assert not told


def test_a_positional_argument_is_found_too() -> None:
    """What a pipeline passes without a name is known by its place: the latents of a decode."""
    pipe = make_pipeline("cogvideox")
    with guard(pipe) as handle:
        handle.limit_inputs("vae", {"decode.z": 1e-6})
        with pytest.warns(StopdownWarning, match="not certified: `z` reached"):
            call_pipeline(pipe, "cogvideox")
    assert handle.record.uncertified[0].startswith(
        "1 call of `vae.decode` not certified: `z` reached "
    )


def test_a_guard_takes_the_limits_of_its_plan() -> None:
    """Under a plan with a certificate the record says which calls it does not cover."""
    pipe, told = make_pipeline("cogvideox"), []
    entries = {
        name: ComponentPlan(name, type(module).__name__, sample_weights(module), "as loaded")
        for name in ("transformer", "vae", "text_encoder")
        for module in [getattr(pipe, name)]
    }
    limits = {"forward.hidden_states": 0.5}
    entries["transformer"] = dataclasses.replace(
        entries["transformer"], precision="fp16", scaling=Scaling(limits=limits)
    )
    plan = Plan("x", "", type(pipe).__name__, "fp16", read_class_versions(), tuple(entries.values()),
                "cpu", 0.0)  # fmt: skip
    with guard(pipe, plan, announce=told.append) as handle:
        call_pipeline(pipe, "cogvideox")
    assert "`hidden_states` reached" in handle.record.uncertified[0]
    assert len(told) == 1


def test_a_longer_call_is_not_certified() -> None:
    """A certificate holds for the lengths that it was made for; a longer call is named, and watched."""
    pipe, told = make_pipeline("cogvideox"), []
    sizes = {
        "forward.encoder_hidden_states": ((4, 16),),
        "forward.hidden_states": ((99, 99, 99, 99),),
    }
    with assert_untouched(pipe), guard(pipe, announce=told.append) as handle:
        handle.limit_inputs("transformer", {}, sizes)
        call_pipeline(pipe, "cogvideox")
    (sentence,) = handle.record.uncertified
    assert sentence.startswith(
        "2 calls of `transformer` not certified: `encoder_hidden_states` was "
    )
    assert sentence.endswith("bounds hold up to 4 × 16. The output was watched as always.")
    assert len(told) == 1


class Sums(nn.Module):
    """Adds up all tokens: what it computes grows with their number, as its bound does."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8)
        self.mix = nn.Linear(8, 8, bias=False)
        self.widen.weight.data = torch.eye(8) * 2.0**10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.mix(self.widen(x).sum(1))))


def test_a_call_beyond_the_certified_length_is_watched() -> None:
    """At a certified length nothing overflows; at one 64 times as long a value does, and is repaired."""
    torch.manual_seed(0)
    module = Sums().half().float().eval().requires_grad_(False)
    short, long = (torch.rand(1, length, 8) * LATENTS for length in (8, 512))
    wanted = {len(x[0]): module(x) for x in (short, long)}
    plan = make_plan(module, run=lambda: module(short))
    (entry,) = plan.components
    assert entry.in_force.certified
    assert not module.half()(short.half()).isfinite().all()
    module.float()
    with guard(module, plan, announce=lambda text: None) as handle:
        assert relative_l2(module(short.half()), wanted[8]) < 2e-3
        assert not handle.record.uncertified
        assert not handle.repairs
        found = module(long.half())
        assert relative_l2(found, wanted[512]) < 2e-3
    (sentence,) = handle.record.uncertified
    assert "`x` was 512 × 8, and the plan's bounds hold up to 8 × 8." in sentence
    (repair,) = handle.repairs
    assert repair.action == "rescaled"


def test_a_fault_where_no_bound_fits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixed plan it is said which value rests on measurement."""
    monkeypatch.setattr(bounded_search, "is_free", lambda *_, **__: False)
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module.eval().requires_grad_(False)
    nn.init.constant_(module[0].weight, 5000.0)  # for inputs up to 64 up to 2.6e6
    nn.init.constant_(module[1].weight, 2.0**-10)
    small, large = torch.full((2, 8), 0.01), torch.full((2, 8), 50.0)
    wanted = module(large)
    plan = measure_plan(module, ranges="auto", run=lambda: module(small))
    assert plan.components[0].in_force.uncertain == ("Sequential:0 (linear)",)
    with guard(module, plan, announce=lambda text: None) as handle:
        assert relative_l2(module(large.half()), wanted) < 2e-3
    (repair,) = handle.repairs
    said = (
        "No bound of the plan keeps all values there in range: they rested on measured calls, where"
    )
    assert f"{said} such values had at least 8.3 bits of headroom." in repair.evidence


def test_sizes_of_several_calls() -> None:
    """A size is covered by one call that is as large in every dimension, not by the largest of each."""
    module = nn.Linear(4, 4).requires_grad_(False)
    calls = [(module, (torch.randn(1, *size, 4),), {}) for size in ((2, 9), (9, 2), (2, 3))]
    scaling = rescale_(module, calls=calls, ranges="bound").scaling
    (sizes,) = scaling.sizes.values()
    assert sizes == ((2, 9, 4), (9, 2, 4))
    assert fits((1, 9, 4), sizes)
    assert not fits((9, 9, 4), sizes)
    assert not fits((2, 4), sizes)


def test_names_of_positional_arguments_set_limits() -> None:
    """A module's own signature says what a positional argument is."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(
            self, sample: torch.Tensor, encoder_hidden_states: torch.Tensor
        ) -> torch.Tensor:
            return self.linear(sample + encoder_hidden_states)

    module = Model().eval().requires_grad_(False)
    args = (torch.randn(2, 4), torch.randn(2, 4))
    scaling = rescale_(module, args, ranges="bound").scaling
    assert scaling.limits == {
        "forward.sample": LATENTS,
        "forward.encoder_hidden_states": EMBEDDINGS,
    }
    assert "|sample| up to 64, |encoder_hidden_states| up to 128" in scaling.range_note
    assert "sample of length up to 4" in scaling.range_note
    assert scaling.sizes == {"forward.sample": ((4,),), "forward.encoder_hidden_states": ((4,),)}


@pytest.mark.parametrize(
    ("given", "last"), [(0.0, 1000.0), (0.5, 1.0), (1.0, 1.0), (999.0, 1000.0)]
)
def test_a_timestep_of_nothing_says_no_unit(given: float, last: float) -> None:
    """A run of one step can have 0 where others have 999; up to 1 means a share of the way."""
    assert float(list_timesteps(torch.tensor(given)).values[-1]) == last

"""Steps of a run: as a loop of Diffusers tells them, else counted at the scheduler."""

from __future__ import annotations

import pytest
import torch
from diffusers import CacheMixin

import stopdown
from models.pipeline_calls import call_pipeline
from stopdown import testing
from stopdown.component_calls.step_counter import StepCounter
from stopdown.interception.patches import Patches
from stopdown.module_calls.call_interception import Rank


class Denoiser(torch.nn.Module, CacheMixin):
    """A model that Diffusers' loops call in a `cache_context`."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.shrink = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shrink(self.grow(x))


@pytest.fixture
def denoiser() -> Denoiser:
    """One whose values between its layers are beyond fp16's range."""
    module = Denoiser().requires_grad_(False)
    module.grow.weight.fill_(60000.0)
    module.shrink.weight.fill_(2.0**-16)
    return module.half()


def test_a_loop_without_a_pipeline_tells_its_steps(denoiser: Denoiser) -> None:
    """Step, timestep and sigma stand in the repair; without the context it is a call by its number."""
    told = {"step_index": 2, "num_inference_steps": 8, "timestep": 751, "sigma": 0.25}
    with stopdown.guard(denoiser, announce=lambda text: None) as handle:
        assert "cache_context" in vars(denoiser)
        with denoiser.cache_context("cond", **told):
            denoiser(torch.ones(1, 4).half())
    (repair,) = handle.record.repairs
    assert repair.step == 2
    assert " in fp16 at step 3 of 8 (timestep 751, sigma 0.25)" in repair.evidence
    assert "cache_context" not in vars(denoiser)
    with stopdown.guard(denoiser, announce=lambda text: None) as handle:
        denoiser(torch.ones(1, 4).half())
    (repair,) = handle.record.repairs
    assert repair.step is None
    assert " at call 1" in repair.evidence


def test_what_is_told_ends_with_its_context(denoiser: Denoiser) -> None:
    """Contexts may lie in each other, and end with an error too."""
    counter = StepCounter(None, Rank.GUARD)
    with Patches() as patches:
        counter.listen(denoiser, patches)
        with denoiser.cache_context("cond", step_index=1):
            with pytest.raises(KeyError), denoiser.cache_context("uncond", step_index=5):
                raise KeyError
            assert counter.is_told
        assert not counter.is_told


@pytest.mark.thorough
def test_a_pipeline_tells_its_sigma() -> None:
    """Wan's own loop tells step and sigma, which stand where its scheduler's count stood."""
    pipe = testing.make_pipeline("wan", overflow="transformer", dtype=torch.float16)
    with stopdown.guard(pipe, announce=lambda text: None) as handle:
        call_pipeline(pipe, "wan")
    repair, sigmas = handle.record.repairs[0], pipe.scheduler.sigmas
    assert repair.step is not None
    assert f" at step {repair.step + 1} of 2 (sigma {sigmas[repair.step]:.3g})" in repair.evidence

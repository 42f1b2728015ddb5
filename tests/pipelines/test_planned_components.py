"""Components under a plan that are cast, saved, copied or offloaded: one message of ours, or right."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stopdown.errors import InputError, PlanError, ScalingError, StopdownWarning
from stopdown.mapped_weights import StoredWeight, wait_
from stopdown.plans.applier import apply_plan
from stopdown.plans.plan_files import read_class_versions
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.runtime.guard import guard
from stopdown.testing import make_pipeline

SMALL = {"prompt": "a", "height": 32, "width": 32, "num_inference_steps": 1, "output_type": "np"}


def plan_plainly(pipe: Any, **scalings: Scaling) -> Plan:
    """A plan that has every component in fp16, by the given exponents."""
    parts = {name: getattr(pipe, name) for name in ("text_encoder", "unet", "vae")}
    entries = [
        ComponentPlan(
            name, type(x).__name__, sample_weights(x), "fp16", scalings.get(name, Scaling())
        )
        for name, x in parts.items()
    ]
    return Plan(
        "here",
        "",
        type(pipe).__name__,
        "fp16",
        read_class_versions(),
        tuple(entries),
        "cpu",
        0.0,
    )


@pytest.fixture
def pipe() -> Any:
    made = make_pipeline("sd")
    made.set_progress_bar_config(disable=True)
    return made


EXPONENTS = Scaling(
    exponents={"time_embedding.linear_1.weight": -2, "time_embedding.linear_1.bias": -2},
    multiplies={"time_embedding.linear_1": 2},
)
KEPT = Scaling(
    exponents=EXPONENTS.exponents, multiplies=EXPONENTS.multiplies, fp32_modules=("conv_out",)
)

CASTS: dict[str, tuple[str, Callable[[torch.nn.Module], Any]]] = {
    "float": ("unet", lambda x: x.float()),
    "bf16": ("unet", lambda x: x.to(torch.bfloat16)),
    "of another": ("text_encoder", lambda x: x.float()),
}


@pytest.mark.thorough
@pytest.mark.parametrize("row", CASTS)
def test_a_cast_under_a_plan_is_met_at_the_entrances(pipe: Any, row: str) -> None:
    """A component that was cast, or the one behind it, gets its arguments in its dtype."""
    name, cast = CASTS[row]
    wanted = torch.as_tensor(pipe(**SMALL, generator=torch.Generator().manual_seed(0)).images)
    with apply_plan(pipe, plan_plainly(pipe, unet=EXPONENTS)):
        cast(getattr(pipe, name))
        found = torch.as_tensor(pipe(**SMALL, generator=torch.Generator().manual_seed(0)).images)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.thorough
def test_other_errors_are_the_programs_own(pipe: Any) -> None:
    """An error that is not about dtypes passes as it is."""
    with apply_plan(pipe, plan_plainly(pipe, unet=EXPONENTS)):
        pipe.vae.bfloat16()
        with pytest.raises(TypeError, match="unexpected keyword"):
            pipe.vae(nothing=1)


@pytest.mark.thorough
def test_what_a_plan_keeps_in_fp32_is_not_lowered_in_silence(pipe: Any) -> None:
    """`.half()` of a component whose plan keeps layers in fp32 stops its next call."""
    with apply_plan(pipe, plan_plainly(pipe, unet=KEPT)):
        pipe.unet.half()
        with pytest.raises(ScalingError, match=r"unet was cast since .*conv_out\.\w+ is fp16"):
            pipe(**SMALL)


@pytest.mark.thorough
def test_casts_that_change_nothing_are_let_through(pipe: Any) -> None:
    """`.half()` of what is in fp16 throughout, and a decoder that is run in fp32."""
    with torch.no_grad(), apply_plan(pipe, plan_plainly(pipe, unet=EXPONENTS)):
        before = pipe(**SMALL, generator=torch.Generator().manual_seed(0)).images
        pipe.unet.half()
        after = pipe(**SMALL, generator=torch.Generator().manual_seed(0)).images
    assert (before == after).all()


def test_only_what_a_plan_changed_is_not_saved(pipe: Any, tmp_path: Path) -> None:
    """`save_pretrained` writes a component whose plan is a cast alone; pickling is refused for each."""
    with apply_plan(pipe, plan_plainly(pipe, unet=EXPONENTS)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", StopdownWarning)
            pipe.vae.save_pretrained(tmp_path / "vae")
        with pytest.raises(PlanError, match="UNet2DConditionModel can't be saved"):
            pipe.unet.save_pretrained(tmp_path / "unet")
        for part in (pipe.vae, pipe.unet):
            with pytest.raises(InputError, match="can't be pickled while its calls are watched"):
                torch.save(part, io.BytesIO())
    torch.save(pipe.vae, io.BytesIO())


@pytest.mark.thorough
def test_a_copy_computes_with_its_own_weights(pipe: Any) -> None:
    """A deep copy of a planned or guarded component is not answered by the component itself."""
    given = (torch.ones(1, 4, 8, 8).half(), torch.ones(1), torch.ones(1, 2, 32).half())
    plan = plan_plainly(pipe, unet=EXPONENTS)
    with torch.no_grad(), guard(pipe, plan, announce=lambda text: None):
        copied = copy.deepcopy(pipe.unet)
        assert torch.equal(copied(*given).sample, pipe.unet(*given).sample)
        for parameter in copied.conv_out.parameters():  # it has no exponents
            parameter.zero_()
        assert not copied(*given).sample.any()
        assert pipe.unet(*given).sample.any()
        with pytest.raises(InputError, match="can't be pickled"):
            torch.save(copied, io.BytesIO())
        copy.deepcopy(copied)


@pytest.mark.parametrize("put", [apply_plan, guard])
def test_weights_that_wait_take_no_plan(pipe: Any, put: Any) -> None:
    """On `meta`, as accelerate leaves them, or in a file: refused before anything is read."""
    plan = plan_plainly(pipe, unet=EXPONENTS)
    weight = pipe.unet.conv_in.weight
    wait_(weight, StoredWeight(weight.detach().clone(), torch.float32))
    with pytest.raises(PlanError, match=r"unet has no values in 1 of its weights, conv_in\.weight"):
        put(pipe, plan)
    pipe.unet.to("meta")
    with pytest.raises(PlanError, match="Put the plan on first, and offload"):
        put(pipe, plan)


def test_a_weight_that_waits_can_be_printed() -> None:
    """Its values are not asked for; PyTorch reads past the end of memory there."""
    weight = torch.nn.Parameter(torch.ones(3, 2), requires_grad=False)
    stored = StoredWeight(weight.detach().clone(), torch.float16)
    wait_(weight, stored)
    assert repr(weight) == "Parameter of fp16 [3, 2], whose values are stored elsewhere"
    assert "Parameter" in str(torch.nn.ParameterList([weight]))

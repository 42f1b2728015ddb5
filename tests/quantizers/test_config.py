"""`StopdownConfig`: what a `config.json` carries, and which entry of a plan a model gets."""

from __future__ import annotations

import pytest

from stopdown.errors import OptionError, PlanError
from stopdown.plans.plan_files import seal_plan
from stopdown.quantizers.config import StopdownConfig
from stopdown.records import ComponentPlan, Plan


@pytest.fixture
def plan() -> Plan:
    entries = (
        ComponentPlan("text_encoder", "T5EncoderModel", "fp16", "fp16"),
        ComponentPlan("text_encoder_2", "T5EncoderModel", "fp16", "fp32"),
        ComponentPlan("vae", "AutoencoderKL", "fp16", "fp16"),
    )
    return seal_plan(Plan("shapes", "", components=entries))


def test_a_model_gets_the_entry_of_its_class(plan: Plan) -> None:
    """Where several have the class, the component's name decides; without it they are refused."""
    config = StopdownConfig(plan)
    assert config.find_entry("AutoencoderKL").component == "vae"
    assert config.find_entry("T5EncoderModel", "text_encoder_2").precision == "fp32"
    with pytest.raises(PlanError, match="has several entries for a T5EncoderModel"):
        config.find_entry("T5EncoderModel")
    with pytest.raises(PlanError, match="has no entry for a T5EncoderModel called text_encoder_3"):
        config.find_entry("T5EncoderModel", "text_encoder_3")
    with pytest.raises(PlanError, match="has no entry for a UNet2DConditionModel"):
        config.find_entry("UNet2DConditionModel")


def test_a_config_is_read_as_it_was_written(plan: Plan) -> None:
    """The plan and each flag that is set are carried; others are left out."""
    written = StopdownConfig(plan, guard=True, component="vae").to_dict()
    read = StopdownConfig(**written)
    assert read.is_carried
    assert read.plan is not None
    assert read.plan.components == plan.components
    assert (read.guard, read.component, read.folded) == (True, "vae", False)
    assert "folded" not in written


def test_a_guard_is_true_or_false() -> None:
    """Another value is refused before anything is loaded."""
    with pytest.raises(OptionError, match=r"StopdownConfig\(guard=...\) was given 'yes'"):
        StopdownConfig(guard="yes")  # type: ignore[arg-type]

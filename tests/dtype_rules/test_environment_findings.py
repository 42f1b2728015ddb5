"""Findings from outside the operations, decided from plain facts about calls."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stopdown.devices.device_profiles import find_profile
from stopdown.dtype_rules.environment_findings import (
    check_device,
    check_needs,
    check_range,
    check_schedule,
    check_unseen,
    check_upcast,
)
from stopdown.dtype_rules.inspection import CallStats, Examination
from stopdown.records import Finding

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def see(*calls: CallStats, **facts: Any) -> Examination:
    """A dry run in which these calls were made."""
    return Examination(callees={x.name: x for x in calls}, **facts)


def list_kinds(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.module_path) for finding in findings]


def test_a_format_that_the_device_emulates_is_one_finding() -> None:
    """It names all calls in that format, at the first one's component; native formats are none."""
    calls = (
        CallStats("unet", "unet", "UNet", FP16),
        CallStats("text_encoder", "text_encoder", "T5", BF16),
        CallStats("vae", "vae.decode", "VAE", BF16),
        CallStats("safety", "safety", "Checker", None),
    )
    (found,) = check_device(see(*calls), find_profile("v100"))
    assert (found.kind, found.module_path) == ("format-emulated", "text_encoder")
    assert found.evidence.startswith("text_encoder, vae.decode in bf16. NVIDIA Tesla V100")
    assert list_kinds(check_device(see(*calls), find_profile("a100"))) == []


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        (("conv3d", "bf16"), [("device-fault", "vae:conv_in")]),
        (("conv3d", "fp16"), []),
        (("conv2d", "bf16"), []),
    ],
)
def test_a_fault_of_a_device_is_found_where_its_operation_is(
    operation: tuple[str, str], found: list[tuple[str, str]]
) -> None:
    """A V100 has no 3D convolution in bf16: that operation in that format, at its first place."""
    seen = see(operations={operation: "vae:conv_in"})
    assert list_kinds(check_device(seen, find_profile("v100"))) == found


def test_timesteps_collapse_if_fewer_are_left_than_there_were() -> None:
    """999 and 998 are one number in bf16; in fp16 and fp32 they are two, and few steps stay apart."""
    schedule = torch.tensor([999.0, 998.0, 997.0])

    def check(dtype: torch.dtype, times: torch.Tensor) -> list[tuple[str, str]]:
        given = [time.reshape(1).to(dtype) for time in times]
        call = CallStats("unet", "unet", "UNet", FP16, times=given)
        seen = see(call, scheduler=SimpleNamespace(timesteps=times))
        return list_kinds(check_schedule(seen))

    assert check(BF16, schedule) == [("timesteps-collapse", "unet")]
    assert check(FP16, schedule) == []
    assert check(FP32, schedule) == []
    assert check(BF16, torch.tensor([896.0, 512.0, 128.0])) == []


def test_a_table_of_a_scheduler_collapses() -> None:
    """By the table's name; one that is wide, short or not 1D is left out."""
    wide = torch.linspace(0.9, 1.0, 1000)
    tables = {"alphas": wide.bfloat16(), "betas": wide, "ends": wide[-2:].bfloat16()}
    seen = see(scheduler=SimpleNamespace(**tables, grid=wide.bfloat16().reshape(10, 100)))
    (found,) = check_schedule(seen)
    assert (found.kind, found.module_path) == ("sigmas-collapse", "scheduler")
    assert found.evidence.startswith("SimpleNamespace.alphas is bf16: of 1000 entries ")
    assert list_kinds(check_schedule(see())) == []


@pytest.mark.parametrize(
    ("decode", "encode", "is_found"),
    [
        ({"main": FP16}, None, True),
        ({"main": FP32}, None, False),
        ({"main": FP16, "is_rescaled": True}, None, False),
        ({"main": FP16}, FP32, False),
        ({"main": FP16}, FP16, True),
    ],
)
def test_force_upcast_is_unread_unless_something_answers_it(
    decode: dict[str, Any], encode: torch.dtype | None, is_found: bool
) -> None:
    """A plan answers it, and so does a pipeline that upcasts the other direction."""
    calls = [CallStats("vae", "vae.decode", "VAE", force_upcast=True, **decode)]
    calls += [] if encode is None else [CallStats("vae", "vae.encode", "VAE", encode)]
    found = list_kinds(check_upcast(see(*calls)))
    assert found == [("force-upcast-unread", "vae")] * is_found


def test_a_class_may_not_work_in_a_format() -> None:
    """Sana's transformer in fp32 gives another picture; in fp16, or as another class, it's no finding."""
    calls = (
        CallStats("transformer", "transformer", "SanaTransformer2DModel", FP32),
        CallStats("other", "other", "SanaTransformer2DModel", FP16),
        CallStats("vae", "vae.decode", "AutoencoderDC", FP32),
    )
    (found,) = check_needs(see(*calls))
    assert (found.kind, found.module_path) == ("model-needs", "transformer")
    assert found.evidence == "transformer is a SanaTransformer2DModel in fp32."
    assert found.why.startswith("Sana was trained in fp16")


def test_what_was_stored_in_bf16_needs_a_plan_in_fp16() -> None:
    """One finding names all such components; stored otherwise, planned or in bf16 they are none."""
    stored = {"text_encoder": "bf16", "unet": "bf16", "vae": "fp32", "planned": "bf16"}
    calls = (
        CallStats("unet", "unet", "UNet", FP16),
        CallStats("text_encoder", "text_encoder", "T5", BF16),
        CallStats("vae", "vae.decode", "VAE", FP16),
        CallStats("planned", "planned", "UNet", FP16, is_rescaled=True),
    )
    (found,) = check_range(see(*calls), stored)
    assert (found.kind, found.module_path) == ("range-unplanned", "unet")
    assert found.evidence.startswith("unet is stored in bf16, and would run in fp16")
    assert list_kinds(check_range(see(*calls), {})) == []


def test_each_component_that_stopped_is_a_note() -> None:
    """With the reason."""
    seen = see(unseen=[("unet", "ValueError: no"), ("vae.decode", "KeyError: x")])
    found = list(check_unseen(seen))
    assert list_kinds(found) == [("unchecked", "unet"), ("unchecked", "vae.decode")]
    assert found[0].evidence == "Its code stopped without values: ValueError: no"

"""Planted faults are found at their module path, and healthy pipelines have no finding.

A few of each run by default; all of them are in the slow tests, and in `benchmarks/check.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stopdown
from models.check_faults import (
    CALLS,
    FAULTS,
    Fault,
    call_of,
    check_fault,
    load_healthy,
    plant_fault,
)
from models.measured_plans import measure_pipeline
from stopdown.pipelines.requests import Request
from stopdown.testing import PIPELINE_NAMES, make_pipeline

QUICK = (
    "queries upcast alone",
    "T5 in fp16 with fused norms, wo in fp32",
    "T5 by .half()",
    "text encoder in fp32",
    "bf16 3D convolutions on a V100",
    "alphas in bf16",
    "clip of CogView3-Plus",
    "force_upcast that SD does not read",
    "a NaN",
    "autocast over T5's wo",
    "a mask of -inf",
    "Sana in fp32",
)
"""One fault or two of each class."""

HEALTHY = tuple(
    (name, dtype, device)
    for name in PIPELINE_NAMES
    for dtype, device in (
        (torch.float32, "cpu"),
        (torch.float32, "v100"),
        (torch.bfloat16, "a100"),
        (torch.bfloat16, "mps-m3"),
    )
)
QUICK_HEALTHY = (
    ("cogview3plus", torch.float32, "cpu"),
    ("sd", torch.bfloat16, "a100"),
    ("flux", torch.bfloat16, "mps-m3"),
)


def find(fault: Fault, folder: Path) -> list[tuple[str, str]]:
    """Kind and module path of every finding of a planted fault."""
    found = check_fault(fault, plant_fault(fault, folder))
    for finding in found:
        assert finding.evidence
        assert finding.why
        assert finding.remedy
        assert "{" not in finding.remedy.replace("{argument", ""), finding.remedy
    return [(finding.kind, finding.module_path) for finding in found]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in QUICK], ids=lambda f: f.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    """The fault's class at the fault's place, without weights unless they are the cause."""
    assert (fault.kind, fault.module_path) in find(fault, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name not in QUICK], ids=lambda f: f.name)
def test_every_other_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    """The same for the rest."""
    assert (fault.kind, fault.module_path) in find(fault, tmp_path / "model")


def test_the_faults_are_many() -> None:
    """At least 40 faults in at least 8 pipelines; the quick ones are among them."""
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({fault.pipeline for fault in FAULTS}) >= 8
    assert set(QUICK) <= {fault.name for fault in FAULTS}


@pytest.mark.parametrize(("name", "dtype", "device"), QUICK_HEALTHY)
def test_a_healthy_pipeline_has_no_finding(name: str, dtype: torch.dtype, device: str) -> None:
    """In fp32 and in bf16, as loading gives it: an empty list."""
    assert stopdown.check(load_healthy(name, dtype), device=device, arguments=call_of(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "device"), HEALTHY)
def test_no_healthy_pipeline_has_a_finding(name: str, dtype: torch.dtype, device: str) -> None:
    """The same for all of them on more devices."""
    assert stopdown.check(load_healthy(name, dtype), device=device, arguments=call_of(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINE_NAMES)
def test_a_planned_pipeline_has_no_finding(name: str) -> None:
    """In fp16 by a plan: neither its clamps nor its lost fp32 modules are reported."""
    pipe = make_pipeline(name)
    call: dict[str, Any] = CALLS[name]
    given = {"prompt": call.get("prompt")} if "prompt" in call else {}
    if "image" in call:
        given["image"] = np.asarray(call["image"])
    if "video" in call:
        given["video"] = np.stack([np.asarray(frame) for frame in call["video"]])
    request = Request(
        **given,
        frames=call.get("num_frames"),
        height=call.get("height"),
        width=call.get("width"),
        steps=2,
    )
    plan = measure_pipeline(pipe, prompts=("a",), request=request)
    with stopdown.apply_plan(pipe, plan):
        assert stopdown.check(pipe, device="v100", arguments=call_of(name)) == []

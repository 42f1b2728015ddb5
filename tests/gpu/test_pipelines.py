"""Pipelines on the accelerator that is here: placement, memory, guard, journal; or on the simulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.injected_faults import inject
from models.pipeline_calls import CALLS, call_pipeline, quiet
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.component_calls.components import find_components
from stopdown.devices.device_choice import Device
from stopdown.devices.device_memory import peak_memory
from stopdown.devices.device_profiles import describe_device
from stopdown.doctor import has_fused_attention
from stopdown.memory.offloader import Offloader, predict_run
from stopdown.memory.strategies import PLACEMENTS, Placement, Strategy
from stopdown.runtime.guard import guard

pytestmark = pytest.mark.gpu

ROOM = 2**24
"""What libraries take for themselves, beside which a tiny pipeline is nothing."""


def test_a_guarded_run_has_the_same_bits(accelerator: Device) -> None:
    """The guard changes nothing on a device, and what it runs is near the CPU's."""
    expected = call_pipeline(testing.make_pipeline("sd"), "sd")
    pipe = testing.make_pipeline("sd").to(accelerator.torch_name)
    plain = call_pipeline(pipe, "sd")
    with guard(pipe, announce=quiet) as handle:
        np.testing.assert_array_equal(call_pipeline(pipe, "sd"), plain)
    assert handle.repairs == ()
    np.testing.assert_allclose(plain, expected, atol=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["nan", "range"])
def test_faults_are_repaired(kind: Any, accelerator: Device) -> None:
    """NaN that passes is computed again, what leaves fp16 is scaled."""
    pipe = testing.make_pipeline("sd", dtype=torch.float16).to(accelerator.torch_name)
    with (
        assert_untouched(pipe),
        inject(pipe, "unet", step=1, kind=kind),
        guard(pipe, announce=quiet) as handle,
    ):
        assert np.isfinite(call_pipeline(pipe, "sd")).all()
    assert len(handle.repairs) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_weights_wait_where_they_should(placement: Placement, accelerator: Device) -> None:
    """The picture is that of a run with everything on the device, and the peak is as predicted."""
    pipe = testing.make_pipeline("sd")
    expected = call_pipeline(testing.make_pipeline("sd").to(accelerator.torch_name), "sd")
    arguments = {**CALLS["sd"], "num_inference_steps": 2, "output_type": "np"}
    fused = has_fused_attention(describe_device(accelerator), ["fp32"])
    fit = predict_run(pipe, arguments, steps=2, fused=fused, device=accelerator.torch_name)
    plain = {Strategy(placement), Strategy(placement, split=True)}  # split without fused attention
    taken = next(one for one in fit.predictions if one.strategy in plain)
    with (
        assert_untouched(pipe),
        peak_memory(accelerator) as peak,
        Offloader(pipe, taken, (), fit.strays, device=accelerator.torch_name),
    ):
        places = {
            x.device.type
            for m in find_components(pipe).values()
            for x in (*m.parameters(), *m.buffers())
        }
        assert places == {accelerator.type}
        np.testing.assert_allclose(call_pipeline(pipe, "sd"), expected, atol=1e-3)
    assert peak.peak_bytes <= 1.2 * taken.peak_bytes + ROOM


def test_a_journal_goes_on(accelerator: Device, tmp_path: Path) -> None:
    """What a journal answers is what the device gave."""
    pipe = testing.make_pipeline("sd").to(accelerator.torch_name)
    with guard(pipe, journal=tmp_path, announce=quiet):
        plain = call_pipeline(pipe, "sd")
    sorted(tmp_path.glob("*.pt"))[-1].unlink()
    with guard(pipe, journal=tmp_path, announce=quiet) as handle:
        np.testing.assert_array_equal(call_pipeline(pipe, "sd"), plain)
    assert handle.record.journal is not None
    assert handle.record.journal.answered > 0

"""Each kind of pipeline in fp16 on the accelerator that is here, or on the simulated one.

By each kind of plan, under the guard, and wherever weights wait.
"""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stopdown
from models.pipeline_calls import CALLS, call_pipeline, name_denoiser
from stopdown import testing
from stopdown.devices.device_choice import Device
from stopdown.interception.randomness import same_noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("known_speed"),
    pytest.mark.filterwarnings("ignore::stopdown.StopdownWarning"),
]

NEAR = 0.01
"""Mean error of pixels in [0, 1] that is small enough, whatever that of bf16 is."""


def save(save_tiny: Callable[..., Path], name: str) -> Path:
    return save_tiny(name, overflow=name_denoiser(name))


def call(pipe: Any, name: str) -> Any:
    """Return the pixels of a run with the noise that each format gets."""
    with same_noise():
        return call_pipeline(pipe, name)


def measure(pixels: Any, expected: Any) -> float:
    """Return the mean error of pixels."""
    return float(np.abs(pixels - expected).mean())


@functools.cache
def draw(folder: Path, name: str, precision: Any, device: str) -> Any:
    """Pixels, and what the guard repaired."""
    pipe = stopdown.load(folder, precision=precision, device=device, memory="none")
    pipe.set_progress_bar_config(disable=True)
    pixels = call(pipe, name)
    repairs = pipe.stopdown_guard.record.repairs
    del pipe
    gc.collect()
    return pixels, repairs


@pytest.mark.thorough
@pytest.mark.parametrize("name", CALLS)
def test_fp16_is_nearer_than_bf16(
    name: str, accelerator: Device, save_tiny: Callable[..., Path]
) -> None:
    """By certificate, without a repair; plain fp16 may be repaired where it overflows."""
    folder, there = save(save_tiny, name), accelerator.torch_name
    expected, _ = draw(folder, name, "fp32", there)
    errors = {}
    for precision in ("bf16", "fp16", "fp16-plain"):
        pixels, repairs = draw(folder, name, precision, there)
        assert np.isfinite(pixels).all(), precision
        assert not repairs or precision == "fp16-plain", (precision, repairs)
        errors[precision] = measure(pixels, expected)
    print(f"\n{name}: " + ", ".join(f"{key} {value:.2e}" for key, value in errors.items()))  # noqa: T201
    assert errors["fp16"] <= max(errors["bf16"], NEAR), errors


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sd", "cogvideox", "flux", "wan"])
def test_a_loaded_pipeline_is_brought_to_fp16_there(name: str, accelerator: Device) -> None:
    """One line for a pipeline that is on the device already."""
    there = accelerator.torch_name
    make = functools.partial(testing.make_pipeline, name, overflow=name_denoiser(name))
    expected = call_pipeline(make().to(there), name)
    pipe = make().to(there)
    stopdown.fp16(pipe, **{**CALLS[name], "num_inference_steps": 1})
    pixels = call(pipe, name)
    assert np.isfinite(pixels).all()
    assert measure(pixels, expected) <= NEAR


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sd", "cogvideox"])
@pytest.mark.parametrize("memory", ["component", "block"])
def test_weights_wait_on_a_small_device(
    name: str,
    memory: str,
    accelerator: Device,
    save_tiny: Callable[..., Path],
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    """`generate` within a limit, in fp16 by a plan: not resident, and nothing is found in the frames."""
    folder, there = save(save_tiny, name), accelerator.torch_name
    words = (*("--height", 32, "--width", 32, "--steps", 2, "--device", there), "--json")
    words += ("--frames", 9) if name == "cogvideox" else ()
    code, out, err = run("fit", folder, *words)
    assert code == 0, err
    rows = json.loads(out)["rows"]
    peak = min(row["peak_bytes"] for row in rows if row["strategy"].startswith(memory))
    limit = f"{int(1.2 * peak / 1024)}KiB"
    code, out, err = run(
        *("generate", folder, "a", *words, "--precision", "fp16", "--memory", limit, "--force"),
        *("-o", tmp_path / ("out.gif" if name == "cogvideox" else "out.png")),
    )
    assert code == 0, err
    record = json.loads(out)
    assert record["strategy"] != "resident"
    assert record["findings"] == []
    assert {x["precision"] for x in record["decisions"]} == {"fp16"}


@pytest.mark.parametrize("name", ["sd", "cogvideox", "wan"])
def test_a_compiled_denoiser_in_fp16(
    name: str, accelerator: Device, save_tiny: Callable[..., Path]
) -> None:
    """`torch.compile` of a planned component: nothing is lost."""
    if accelerator.type != "cuda":
        pytest.skip("Inductor makes no code for a simulated device.")
    folder, there = save(save_tiny, name), accelerator.torch_name
    expected, _ = draw(folder, name, "fp16", there)
    pipe = stopdown.load(folder, precision="fp16", device=there)
    getattr(pipe, name_denoiser(name)).compile()
    pixels = call(pipe, name)
    assert pipe.stopdown_guard.record.repairs == ()
    assert measure(pixels, expected) <= NEAR

"""`generate MODEL PROMPT` without an option, on devices that are smaller than the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from device.simulated_device import KIND, Simulated
from models.pipeline_calls import name_denoiser
from stopdown.devices.device_profiles import find_device_target
from stopdown.frames.media import write_media
from stopdown.memory.forecast import USABLE_SHARE
from stopdown.plans import calibrated, plan_choice
from stopdown.testing import PIPELINE_NAMES

pytestmark = pytest.mark.usefixtures("known_speed")

NEEDED = {
    "svd": ("--image", "image.png", "--frames", 2),
    "cogvideox": ("a", "--frames", 9),
    "cogvideox-image": ("a", "--image", "image.png", "--frames", 9),
    "cogvideox-video": ("a", "--video", "video.gif"),
    "wan": ("a", "--frames", 5),
}
"""What a kind is given; a prompt for the others."""

BACKENDS = {"v100": "cuda", "t4": "cuda", "mps-m1": "mps"}

ROOM = 1.05
"""To a forecast, which knows no fp32 residual stream before the plan is made."""

QUICK = [("sd", "t4", 0.25)]
ALL = [
    (name, device, share)
    for name in PIPELINE_NAMES
    for device in BACKENDS
    for share in (0.75, 0.25)
    if (name, device, share) not in QUICK
]


@pytest.mark.parametrize(
    ("name", "device", "share"),
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALL)],
)
def test_generate_without_an_option_works_on_a_small_device(
    name: str,
    device: str,
    share: float,
    simulated: Simulated,
    save_tiny: Callable[..., Path],
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first try makes a picture by a plan of its own; the second takes that plan.

    The device has a share of the weights, and what the values of a run take beside them; for models so
    tiny that one layer takes more, it has what the smallest strategy needs.
    """
    folder = save_tiny(name, overflow=name_denoiser(name))
    weights = sum(x.stat().st_size for x in folder.rglob("*.safetensors"))
    simulated.act_as(BACKENDS[device], computes_not=[torch.bfloat16])
    supports = find_device_target(device)[1].supports
    for module in (plan_choice, calibrated):
        monkeypatch.setattr(module, "probe_formats", lambda device: supports)
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path / "cache"))
    clip = np.random.default_rng(0).integers(0, 255, (9, 32, 32, 3), np.uint8)
    write_media(tmp_path / "video.gif", clip, 8)
    write_media(tmp_path / "image.png", clip[:1])
    monkeypatch.chdir(tmp_path)
    needed = NEEDED.get(name, ("a",))
    size = ("--height", 32, "--width", 32, "--steps", 2, "--device", KIND, "--json")
    frames = needed[needed.index("--frames") :] if "--frames" in needed else ()
    code, out, err = run("fit", folder, *frames, *size)
    assert code == 0, err
    rows = json.loads(out)["rows"]
    resident = max(row["peak_bytes"] for row in rows if row["strategy"] == "resident")
    values = resident - weights
    smallest = ROOM * min(row["peak_bytes"] for row in rows)
    needs = max(share * weights + values, smallest) / USABLE_SHARE
    simulated.limit(simulated.used() + int(needs))
    output = "out.gif" if len(needed) > 1 else "out.png"
    words = ("generate", folder, *needed, *size, "-o", output, "--force")
    for _ in range(2):
        code, out, err = run(*words)
        assert code == 0, err
        record = json.loads(out)
        assert record["findings"] == []
        assert {entry["precision"] for entry in record["decisions"]} <= {"fp16", "fp32"}
        assert any("an automatic plan" in entry["reasons"][0] for entry in record["decisions"])
        if (
            resident > needs * USABLE_SHARE
        ):  # of a tiny model, the smallest strategy may take as much
            assert record["strategy"] != "resident"
        monkeypatch.setattr(plan_choice, "certify_plan", None)  # the second run has no use for it

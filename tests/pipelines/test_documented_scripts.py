"""Scripts like those of Diffusers' documentation, with one argument added.

Each is run twice: in fp32 as it is, and in fp16 with `quantization_config=stopdown.quantization(...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models.pipeline_calls import name_denoiser
from processes.documented_scripts import ADDED, SCRIPTS, run_script

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    "name", [x if x == "sd" else pytest.param(x, marks=pytest.mark.slow) for x in SCRIPTS]
)
def test_a_documented_script_with_one_argument_added(
    name: str,
    save_tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The denoiser overflows in fp16; with the argument pictures are those of fp32, but for rounding."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    folder = save_tiny(name, overflow=name_denoiser(name))
    wanted, _ = run_script(name, folder, "float32")
    found, pipe = run_script(name, folder, "float16", ADDED)
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    assert denoiser.quantization_method == "stopdown"
    assert found.std() > 0.004
    assert np.abs(found - wanted).mean() < 0.02
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)

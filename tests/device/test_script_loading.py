"""`stopdown run` on a device that is fast in fp16 and not in bf16: what a script loads gets a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from device.simulated_device import KIND, Simulated
from stopdown.app.run_command import ScriptOptions, run_script
from stopdown.devices.device_profiles import find_device_target
from stopdown.errors import SourceError
from stopdown.plans import calibrated, plan_choice
from stopdown.quantizers import script_loading
from stopdown.records import ScriptRecord

PAINT = """
import sys
import numpy as np
import torch
from diffusers import CogView3PlusPipeline

pipe = CogView3PlusPipeline.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
pipe.set_progress_bar_config(disable=True)
METHOD = getattr(pipe.transformer, "quantization_method", None)
print(METHOD)
"""
RUN = """
size = dict(height=32, width=32, max_sequence_length=16, num_inference_steps=2)
found = pipe("a", generator=torch.Generator().manual_seed(0), output_type="np", **size).images
np.save(sys.argv[3], found)
"""

Run = Callable[..., tuple[ScriptRecord, list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A script's text, run with arguments: its record, and what was said."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path / "cache"))

    def run_text(text: str, *words: object, **options: str) -> tuple[ScriptRecord, list[str]]:
        script, said = tmp_path / "script.py", []
        script.write_text(text)
        given = ScriptOptions(str(script), tuple(map(str, words)), **options)
        return run_script(given, said.append), said

    return run_text


@pytest.fixture
def v100(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """A card that is fast in fp16, and refuses bf16."""
    simulated.act_as("cuda", computes_not=[torch.bfloat16])
    supports = find_device_target("v100")[1].supports
    for module in (plan_choice, calibrated, script_loading):
        monkeypatch.setattr(module, "probe_formats", lambda device: supports)
    return simulated


@pytest.mark.thorough
@pytest.mark.usefixtures("v100")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_faults_are_prevented(
    run: Run, save_tiny: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    """A model that overflows is loaded by a plan: near to fp32, no repair; 16-bit casts are left out."""
    folder = save_tiny("cogview3plus", overflow="transformer")
    casts = (
        f"pipe.to('{KIND}', torch.{dtype})\npipe.transformer.to(torch.{dtype})\npipe.vae.half()\n"
    )
    record, said = run(PAINT + casts + RUN, folder, dtype, tmp_path / "planned.npy")
    assert record.exit_code == 0
    assert record.runs[0].repairs == ()
    assert record.findings == ()
    assert "loaded in fp16 with a plan that was certified from its weights" in " ".join(said)
    wide, _ = run(PAINT + RUN, folder, "float32", tmp_path / "wide.npy")
    assert wide.remarks == ()
    found, wanted = (np.load(tmp_path / f"{name}.npy") for name in ("planned", "wide"))
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


@pytest.mark.usefixtures("v100")
def test_as_is_leaves_loads_alone(
    run: Run, save_tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--precision as-is`: the model is that of the script."""
    folder = save_tiny("cogview3plus")
    _, said = run(PAINT, folder, "float16", precision="as-is")
    assert (said, capsys.readouterr().out) == ([], "None\n")


def test_other_devices_leave_loads_alone(
    run: Run, save_tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, and on a card with fast bf16, nothing changes."""
    folder = save_tiny("cogview3plus")
    _, said = run(PAINT, folder, "float16")
    assert (said, capsys.readouterr().out) == ([], "None\n")


@pytest.mark.usefixtures("simulated")
def test_a_card_with_fast_bf16_leaves_loads_alone(
    run: Run,
    save_tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An A100 runs bf16 as fast as fp16."""
    supports = find_device_target("a100")[1].supports
    monkeypatch.setattr(script_loading, "probe_formats", lambda device: supports)
    _, said = run(PAINT, save_tiny("cogview3plus"), "float16")
    assert (said, capsys.readouterr().out) == ([], "None\n")


@pytest.mark.thorough
@pytest.mark.usefixtures("v100")
def test_one_model_of_a_pipeline_gets_a_plan(
    run: Run, save_tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`subfolder=` says which pipeline it belongs to; a lone model is loaded as the script requests."""
    folder = save_tiny("cogview3plus", overflow="transformer")
    text = (
        "import sys, torch\nfrom diffusers import CogView3PlusTransformer2DModel as Model\n"
        "for given in (dict(subfolder='transformer'), dict()):\n"
        "    place = sys.argv[1] + ('' if given else '/transformer')\n"
        "    model = Model.from_pretrained(place, dtype=torch.float16, **given)\n"
        "    print(getattr(model, 'quantization_method', None))\n"
    )
    _, said = run(text, folder)
    assert capsys.readouterr().out == "stopdown\nNone\n"
    assert len(said) == 1


@pytest.mark.usefixtures("v100")
def test_a_plan_is_made_from_what_the_script_names(
    run: Run, save_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the client's own cache, the model was downloaded twice."""
    asked = []

    def note(source: str, **named: object) -> None:
        asked.append(named)
        raise SourceError("No plan is needed here.")

    monkeypatch.setattr(script_loading, "quantization", note)
    text = (
        "import sys, torch\nfrom diffusers import AutoencoderKL, DiffusionPipeline\n"
        "named = dict(cache_dir='models', vae=AutoencoderKL.from_pretrained(sys.argv[1] + '/vae'))\n"
        "DiffusionPipeline.from_pretrained(sys.argv[1], dtype=torch.float16, **named)\n"
    )
    run(text, save_tiny("cogview3plus"))
    expected = {"revision": None, "variant": None, "cache_dir": "models", "leave": ["vae"]}
    assert asked == [expected]


@pytest.mark.usefixtures("v100")
@pytest.mark.parametrize("kind", [SourceError, RuntimeError])
def test_what_cannot_have_a_plan_is_loaded_as_asked(
    run: Run,
    save_tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    """Whatever a plan ends in, it is said, and the script goes on."""

    def refuse(*_: object, **__: object) -> None:
        raise kind("No plan can be made.")

    monkeypatch.setattr(script_loading, "quantization", refuse)
    _, said = run(PAINT, save_tiny("cogview3plus"), "float16")
    assert capsys.readouterr().out == "None\n"
    assert "is loaded as the script requests. No plan can be made." in said[0]

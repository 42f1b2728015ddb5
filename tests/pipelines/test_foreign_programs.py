"""Whole programs of others, unedited, from checkouts that variables name, with tiny checkpoints.

Their own packages (deepspeed, triton, torchvision, imageio, datasets, wandb…) have to be importable, by
`PYTHONPATH` for example; a test without them is skipped and says which is missing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from foreign_models import VARIABLES, find_missing
from stopdown.media import read_video
from stopdown.records import ScriptRecord, from_json

TESTS = Path(__file__).parents[1]
CPU_RUN = TESTS / "cpu_run.py"
NEEDS = {
    "CogVideo SAT": ("deepspeed", "triton", "torchvision", "imageio", "datasets", "wandb"),
}
"""Program to what it imports and this project does not."""

pytestmark = pytest.mark.slow


def skip_without(program: str) -> dict[str, str]:
    """The environment that a program runs in; skips where a checkout or package is missing."""
    if missing := find_missing(program):
        pytest.skip(f"needs a checkout of {program}: {', '.join(missing)} not set")
    absent = [name for name in NEEDS[program] if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"needs the packages of {program}: {', '.join(absent)} cannot be imported")
    paths = [os.environ[name] for name in VARIABLES[program]]
    paths += [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu"}


def call(folder: Path, env: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """A process in a new folder."""
    folder.mkdir()
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def measure_psnr(path: Path, reference: Path) -> float:
    """Decibels between two videos."""
    one, other = (np.asarray(read_video(x), float) for x in (path, reference))
    return float(10 * np.log10(255**2 / np.mean((one - other) ** 2)))


@pytest.mark.timeout(1800)  # nine processes, each of which imports deepspeed
def test_sample_video_of_cogvideo(tmp_path: Path) -> None:
    """Healthy it writes the same file; an overflow of the transformer is black, and right when guarded."""
    env = skip_without("CogVideo SAT")
    script = Path(os.environ["STOPDOWN_COGVIDEO"]) / "sat" / "sample_video.py"
    made = tmp_path / "made"
    with_script = {**env, "PYTHONPATH": f"{script.parent}{os.pathsep}{env['PYTHONPATH']}"}
    made.mkdir()
    done = call(tmp_path / "make", with_script, CPU_RUN, TESTS / "sat_program.py", made)
    assert done.returncode == 0, done.stderr[-2000:]

    def describe(*configs: str) -> list[object]:
        names = ("model", "inference", *configs)
        return [script, "--base", *(made / f"{name}.yaml" for name in names), "--seed", 5]

    def run_plain(name: str, *configs: str) -> Path:
        done = call(tmp_path / name, env, CPU_RUN, *describe(*configs))
        assert done.returncode == 0, done.stderr[-2000:]
        return next((tmp_path / name).rglob("*.mp4"))

    def run_guarded(name: str, *configs: str) -> tuple[Path, ScriptRecord]:
        command = ("-m", "stopdown", "run", "--json", "--device", "cpu")
        done = call(tmp_path / name, env, *command, *describe(*configs))
        assert done.returncode == 0, done.stderr[-2000:]
        record = from_json(done.stdout[done.stdout.index('{\n  "script"') :], ScriptRecord)
        return next((tmp_path / name).rglob("*.mp4")), record

    video, record = run_guarded("healthy")
    assert video.read_bytes() == run_plain("plain").read_bytes()
    assert record.modules is not None
    calls = {call.component: call.precisions for call in record.modules.calls}
    assert calls == {
        "GeneralConditioner": ("fp16",),
        "OpenAIWrapper": ("fp16",),
        "VideoAutoencoderInferenceWrapper.decode": ("fp16",),
    }
    assert record.modules.repairs == ()

    wide = run_plain("wide", "overflow", "fp32")
    assert np.asarray(read_video(run_plain("black", "overflow"))).max() < 8
    video, record = run_guarded("repaired", "overflow")
    assert record.modules is not None
    (repair,) = record.modules.repairs
    assert (repair.component, repair.action) == ("OpenAIWrapper", "rescaled")
    assert "diffusion_model.transformer.layers.1" in repair.module_path
    assert measure_psnr(video, wide) > 25

    for command in ((CPU_RUN,), ("-m", "stopdown", "run", "--device", "cpu")):
        done = call(tmp_path / f"wrong-{len(command)}", env, *command, script, "--nonsense")
        assert done.returncode == 2

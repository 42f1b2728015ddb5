"""Commands with `--device`: load, plan, run, compare and make many on a device that is not the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stopdown
from device.simulated_device import KIND, Simulated
from models.pipeline_calls import call_pipeline
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.component_calls.components import find_components
from stopdown.frames.media import read_image
from stopdown.memory.weight_stores import WAITING
from stopdown.records import RunRecord

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("known_speed")]


def make(folder: Path, output: Path, **options: Any) -> RunRecord:
    """A run of two steps, with the seed and the noise of every other."""
    made = generate(
        GenerateOptions(
            source=str(folder),
            prompt="a",
            steps=2,
            output=str(output),
            **{"device": KIND, "quiet": True, "force": True, **options},
        )
    )
    gc.collect()  # a pipeline that is gone holds itself
    return made


def read_pixels(path: Path) -> np.ndarray[Any, Any]:
    return read_image(path)


PRECISIONS = {
    "fp32": "fp32",
    "mixed": "unet=bf16,vae.encode=fp32,vae.decode=bf16,text_encoder=fp32",
    "fp16": "fp16",
}


@pytest.mark.parametrize(
    ("precision", "memory"),
    [
        ("mixed", "64MiB"),
        ("fp16", None),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("fp32", None), ("fp32", "64MiB"), ("mixed", None), ("fp16", "64MiB"))
        ),
    ],
)
def test_a_run_is_that_of_the_cpu(
    precision: str,
    memory: str | None,
    simulated: Simulated,
    save_tiny: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """In each precision, with and without a limit: the same file, and nothing is left on the device."""
    simulated.act_as("cuda")
    folder, asked = save_tiny("sd", "fp32"), PRECISIONS[precision]
    make(folder, tmp_path / "there.png", precision=asked, device="cpu", memory=memory)
    before = simulated.used(), simulated.counts.operations
    record = make(folder, tmp_path / "here.png", precision=asked, memory=memory)
    np.testing.assert_array_equal(
        read_pixels(tmp_path / "here.png"), read_pixels(tmp_path / "there.png")
    )
    assert simulated.counts.operations - before[1] > 1000
    assert record.peak_source == "peak of PyTorch's simulated allocator"
    assert record.repairs == ()


@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.9, 0.3))]
)
def test_a_small_device_makes_the_same_file(
    share: float, simulated: Simulated, save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """On a device that has a part of what the run takes, weights wait on the host, without an option."""
    folder, before = save_tiny("sd", "fp32"), simulated.used()
    whole = make(folder, tmp_path / "whole.png", precision="fp32", memory="none")
    assert simulated.used() == before
    limit = before + int(share * (whole.peak_bytes - before))
    simulated.limit(limit)
    small = make(folder, tmp_path / "small.png", precision="fp32")
    assert small.strategy != "resident"
    assert small.peak_bytes <= limit
    np.testing.assert_array_equal(
        read_pixels(tmp_path / "small.png"), read_pixels(tmp_path / "whole.png")
    )


def test_a_limit_above_the_device_is_that_of_the_device(
    simulated: Simulated,
    save_tiny: Callable[..., Path],
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--memory 16GiB` on a card of 8 ended in a traceback; a wrong prediction ends in a message."""
    folder, before = save_tiny("sd", "fp32"), simulated.used()
    whole = make(folder, tmp_path / "a.png", precision="fp32", memory="none")
    simulated.limit(before + (whole.peak_bytes - before) // 2)
    words = ("generate", folder, "a", "--steps", 2, "--device", KIND, "--precision", "fp32")
    words = (*words, "--memory", "1GiB", "-o")
    code, _, said = run(*words, tmp_path / "b.png")
    assert code == 0, said
    assert "less than the 1.0 GiB that it was given, so that is the limit." in said
    monkeypatch.setattr("stopdown.runtime.memory_limits.count_limit", lambda *_: 2**40)
    code, _, said = run(*words, tmp_path / "c.png")
    assert code == 1
    assert "The device ran out of memory" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("backend", ["cuda", "mps"])
def test_a_full_device_is_a_message(
    backend: str,
    simulated: Simulated,
    save_tiny: Callable[..., Path],
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    """With `--memory none` a device that is too small is one message, as CUDA and as MPS say it."""
    simulated.act_as(backend)
    folder, before = save_tiny("sd", "fp32"), simulated.used()
    whole = make(folder, tmp_path / "a.png", precision="fp32", memory="none")
    peak = whole.peak_bytes - before
    for share in (0.9, 0.1):
        simulated.limit(before + int(share * peak))
        code, _, said = run(
            *("generate", folder, "a", "--steps", 2, "--device", KIND, "--precision", "fp32"),
            *("--memory", "none", "-o", tmp_path / "b.png"),
        )
        assert code == 1
        assert "The device ran out of memory" in said
        assert "Leave --memory none out if you gave it" in said
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("precision", "memory"),
    [
        ("fp16-plain", "4MiB"),
        ("auto", "1MiB"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("fp16-plain", None),
                ("fp16-plain", "1MiB"),
                ("auto", None),
                ("auto", "4MiB"),
            )
        ),
    ],
)
def test_overflow_is_repaired_wherever_weights_wait(
    precision: str,
    memory: str | None,
    simulated: Simulated,
    save_tiny: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """A denoiser that overflows is scaled on the device, also while its weights come and go."""
    simulated.act_as("cuda", computes_not=[torch.bfloat16])
    folder = save_tiny("sd", "fp32", "unet")
    record = make(folder, tmp_path / "a.png", precision=precision, memory=memory)
    assert record.findings == ()
    assert (precision == "fp16-plain") == bool(record.repairs)


def test_a_device_without_fp64_serves_every_command(
    simulated: Simulated,
    save_tiny: Callable[..., Path],
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    """Plan, run, compare and batch where fp64 is missing, as on MPS: nothing asks for it there."""
    simulated.act_as("mps", lacks=[torch.float64])
    folder, there = save_tiny("sd", "fp32", "unet"), ("--device", KIND)
    plan = tmp_path / "plan.json"
    assert run("plan", folder, "-o", plan)[0] == 0
    record = make(folder, tmp_path / "a.png", precision=str(plan))
    assert (record.findings, record.repairs) == ((), ())
    page = tmp_path / "page.html"
    code, _, said = run(
        *(
            "compare",
            folder,
            "--prompt",
            "a",
            "--steps",
            2,
            "--precisions",
            f"fp32,fp16-plain,{plan}",
        ),
        *("-o", page, *there),
    )
    assert code == 0, said
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    out = tmp_path / "many"
    code, _, said = run(
        *(
            "batch",
            folder,
            "--prompts",
            prompts,
            "-o",
            out,
            "--steps",
            2,
            "--precision",
            plan,
            *there,
        )
    )
    assert code == 0, said
    assert len(list(out.rglob("*.mp4"))) + len(list(out.rglob("*.png"))) == 2


def test_a_batch_ends_with_its_device(
    simulated: Simulated,
    save_tiny: Callable[..., Path],
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    """After an illegal access CUDA computes nothing: each further item failed, a night's worth of them."""
    folder, out = save_tiny("sd", "fp32"), tmp_path / "out"
    words = ("batch", folder, "a", "b", "--steps", 2, "--precision", "fp32", "--device", KIND, "-o")
    simulated.fail_after(600)
    code, _, said = run(*words, out)
    simulated.fail_after(0)
    assert code == 1
    assert "simulated:0 (Simulated accelerator) stopped computing: " in said
    assert "the same command continues from there." in said
    assert "failed" not in said
    assert run(*words, out)[1].startswith("2 of 2 done")


@pytest.mark.parametrize("guard", [True, False])
def test_load_stays_within_a_small_device(
    guard: bool, simulated: Simulated, save_tiny: Callable[..., Path]
) -> None:
    """A loaded pipeline makes the pixels of the CPU, call after call, where its weights do not fit."""
    folder = save_tiny("sd", "fp32")
    expected = call_pipeline(stopdown.load(folder, device="cpu", precision="fp32"), "sd")
    before = simulated.used()
    pipe = stopdown.load(folder, device=KIND, precision="fp32", memory="none", guard=guard)
    weights = simulated.used() - before
    np.testing.assert_array_equal(call_pipeline(pipe, "sd"), expected)
    del pipe
    gc.collect()
    simulated.limit(before + weights // 2)
    pipe = stopdown.load(folder, device=KIND, precision="fp32", guard=guard)
    assert simulated.used() - before < weights // 2
    for _ in range(2):
        np.testing.assert_array_equal(call_pipeline(pipe, "sd"), expected)
    assert all(WAITING in vars(module) for module in find_components(pipe).values())
    del pipe
    gc.collect()
    assert simulated.used() == before

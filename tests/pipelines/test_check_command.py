"""`stopdown check` as it is typed: exit codes, JSON, a Hub id without its weights, and --fix."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stopdown.app.check_command import print_check
from stopdown.records import CheckRecord, Finding, from_json
from stopdown.sources.headers import RESCALED_ENTRY
from stopdown.testing import save_pipeline

Run = Callable[..., tuple[int, str, str]]


def test_findings_exit_1_and_say_what_to_type(run: Run, tmp_path: Path) -> None:
    """Configs alone, for a card that is not here: findings and what to type."""
    folder = save_pipeline("cogview3plus", tmp_path / "model")
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    code, out, err = run("check", folder, "--precision", "fp16-plain", "--device", "v100")
    assert code == 1, err
    assert "WRONG RESULT transformer:transformer_blocks.0  [clamp-may-bite]" in out
    assert "stopdown plan " in out
    assert "SOURCE" not in out
    assert "Traceback" not in err


def test_equal_findings_are_printed_once() -> None:
    """Those that differ in place and figures alone: the first, the count, and the other places."""
    found = [
        Finding("weight-subnormal", f"unet:{i}", f"{i} become 0.", "Use fp32.", "They lose digits.")
        for i in range(3)
    ]
    found.insert(1, Finding("fp32-module-lost", "unet:9", "Cast.", "Load again.", "Worse."))
    record = CheckRecord("m", "v100", {}, tuple(found), (), 0.0)
    page = io.StringIO()
    print_check(record, Console(file=page, width=200))
    assert page.getvalue().splitlines()[4:] == [
        "WRONG RESULT unet:0 and 2 more  [weight-subnormal]",
        "  0 become 0.",
        "  They lose digits.",
        "  → Same fix as above.",
        "  The same in unet:1, unet:2.",
        "",
        "WRONG RESULT unet:9  [fp32-module-lost]",
        "  Cast.",
        "  Worse.",
        "  → Load again.",
    ]


def test_a_healthy_source_exits_0(run: Run, tmp_path: Path) -> None:
    """In fp32, with JSON: a record without findings that comes back unchanged."""
    folder = save_pipeline("cogview3plus", tmp_path / "model", dtype=torch.float32)
    code, out, err = run("check", folder, "--device", "v100", "--json")
    assert code == 0, err
    record = from_json(out, CheckRecord)
    assert (record.findings, record.mended) == ((), ())
    assert record.precisions == dict.fromkeys(("text_encoder", "transformer", "vae"), "fp32")
    assert record.device == "v100 (NVIDIA Tesla V100)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "unet=fp16"], "The model has no component 'unet'."),
        (["--revision", "main"], "--revision main was given, and shapes is"),
        (["--precision", "vae=fp16,vae=fp32"], "asks for vae=fp16 and for vae=fp32"),
        (
            ["--precision", "vae.decode=fp32", "--fix"],
            "--fix was given with --precision vae.decode",
        ),
    ],
)
def test_a_mistake_exits_2(run: Run, arguments: list[str], message: str) -> None:
    """One line that names the mistake, no traceback."""
    code, out, err = run("check", "shapes", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.thorough
def test_fix_writes_a_folder_in_one_precision(run: Run, tmp_path: Path) -> None:
    """A tensor out of range stays a finding; what is mended is written, and the source is not."""
    folder = save_pipeline("sd", tmp_path / "model", dtype=torch.float16)
    code, out, err = run(
        "check",
        folder,
        "--precision",
        "fp16-plain",
        "--device",
        "v100",
        "--fix",
        "-o",
        tmp_path / "mended",
    )
    assert "mended vae: cast to fp32, as its config says" in out, err
    assert "after loading it, call stopdown.mend(pipe)" in out
    assert code == 0
    (weights,) = (tmp_path / "mended" / "vae").glob("*.safetensors")
    with safe_open(str(weights), framework="pt") as file:
        assert file.get_tensor("decoder.conv_in.weight").dtype == torch.float32


@pytest.mark.slow
def test_damaged_weights_remain_after_a_fix(run: Run, tmp_path: Path) -> None:
    """NaN cannot be mended: it is found with and without --fix."""
    folder = save_pipeline("cogview3plus", tmp_path / "model", dtype=torch.float32)
    (path,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(path)
    tensors["proj_out.bias"][0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    code, out, _ = run("check", folder, "--device", "v100", "--fix", "--json")
    record = json.loads(out)
    assert code == 1
    assert [(f["kind"], f["module_path"]) for f in record["findings"]] == [
        ("weight-not-finite", "transformer:proj_out.bias")
    ]


@pytest.mark.slow
def test_a_hub_id_is_checked_without_its_weights(tmp_path: Path) -> None:
    """Configs are downloaded; of the weights only the headers are asked for, by range."""
    folder = save_pipeline("cogview3plus", tmp_path / "tiny")
    weights = next((folder / "transformer").glob("*.safetensors"))
    save_file(load_file(weights), weights, metadata={RESCALED_ENTRY: "transformer: rescaled"})
    with HubServer({"maker/tiny": folder}) as hub:
        environment: dict[str, Any] = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))},
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "home"),
        }
        command = [sys.executable, "-m", "stopdown.app.cli", "check", "maker/tiny"]
        done = subprocess.run(
            [
                *command,
                "--precision",
                "fp16-plain",
                "--device",
                "v100",
                "--json",
                "--revision",
                "main",
            ],
            capture_output=True,
            text=True,
            env=environment,
        )
        asked = [entry for entry in hub.requests if entry[1].endswith(".safetensors")]
    assert done.returncode == 1, done.stderr
    record = from_json(done.stdout, CheckRecord)
    (planned,) = [finding for finding in record.findings if finding.kind == "range-unplanned"]
    assert planned.evidence == (
        "text_encoder, transformer and vae are stored in bf16, and would run in fp16 without a plan."
    )
    (rescaled,) = [finding for finding in record.findings if finding.kind == "rescaled-weights"]
    assert (rescaled.module_path, rescaled.evidence) == (
        "transformer",
        "Its file says: transformer: rescaled.",
    )
    assert asked
    assert all(ranged and ranged.startswith("bytes=") for _, _, ranged in asked)
    assert not list((tmp_path / "home").rglob("*.safetensors"))

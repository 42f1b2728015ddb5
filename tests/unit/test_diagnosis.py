"""`explain`: known messages to their class, unknown ones to unknown, pictures to what they show."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stopdown.app import cli
from stopdown.diagnosis import (
    UNKNOWN,
    condense,
    explain,
    explain_text,
    parse_knowledge,
    read_knowledge,
)
from stopdown.errors import InputError
from stopdown.media import write_media

CASES = Path(__file__).parents[2] / "benchmarks" / "cases"
CAST = "RuntimeWarning: invalid value encountered in cast"

MESSAGES = [
    (CAST, "unattributed"),
    ("mat1 and mat2 must have the same dtype, but got Float and Half", "dtype-mismatch"),
    ("expected scalar type Float but found BFloat16", "dtype-mismatch"),
    (
        "Input type (float) and bias type (struct c10::Half) should be the same",
        "dtype-mismatch",
    ),
    ("\"LayerNormKernelImpl\" not implemented for 'Half'", "not-implemented"),
    ("fp8e4nv data type is not supported on CUDA arch < 89", "not-implemented"),
    # of PyTorch
    ("'mps.add' op requires the same element type for all operands and results", "dtype-mismatch"),
    (
        "index_add_(): self (Half) and source (Float) must have the same scalar type",
        "dtype-mismatch",
    ),
    ("index_copy_(): self and source expected to have the same dtype, but got", "dtype-mismatch"),
    ("torch.meshgrid expects all tensors to have the same dtype", "dtype-mismatch"),
    ("linalg.solve: Expected A and B to have the same dtype, but found A of", "dtype-mismatch"),
    ("Unsupported dtype Half", "not-implemented"),
    ("softmax with half to float conversion is not supported on CPU", "not-implemented"),
    ("linalg.inv: Low precision dtypes not supported. Got BFloat16", "not-implemented"),
    ("quantile() input tensor must be either float or double dtype", "not-implemented"),
    ("No available kernel. Aborting execution.", "not-implemented"),
    ("cutlassF: no kernel found to launch!", "not-implemented"),
    (
        "cuFFT only supports dimensions whose sizes are powers of two when computing in half "
        "precision, but got a signal size of[50]",
        "not-implemented",
    ),
    (
        "value cannot be converted to type at::Half without overflow: -1e+09",
        "attention-mask",
    ),
    ("RuntimeWarning: overflow encountered in cast", "unattributed"),
    (
        "SVD unet gives NaN on A100, not on V100: compiled, attention accumulates in half precision",
        "attention-range",
    ),
    ("probability tensor contains either `inf`, `nan` or element < 0", "unattributed"),
    (
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, CUDA_R_16BF`",
        "bf16-emulated",
    ),
    # of Diffusers and Transformers
    ("Query, key, and value must be bfloat16.", "not-implemented"),
    (
        "There are modules in T5EncoderModel that should be kept in float32: ['wo'].",
        "fp32-island",
    ),
    (
        "The input hidden states seems to be silently casted in float32, this might be related",
        "fp32-island",
    ),
    ("`.half()` is not supported for quantized model.", "quantised"),
    ("`torch.bfloat16` is not supported for AWQ CUDA kernels yet.", "quantised"),
    (
        "MXFP4 quantization is only supported on GPUs with compute capability >= 7.5",
        "not-implemented",
    ),
    (
        "transformer needs to be of type `torch.dtype`, e.g. `torch.float16`, but is x.",
        "dtype-option",
    ),
    (
        "Falling back to torch.float32 because loading with the original dtype failed",
        "bf16-emulated",
    ),
    ("LayerwiseCastingHook does not support deinitialization.", "quality"),
    ("Potential NSFW content was detected in one or more images. A black image", "look-alike"),
]

NEAR_MISSES = [
    "ValueError: attn_mask.shape[0] (3) must be 1 or 2 for 2D attention mask.",
    "ValueError: `noise` is required for this step denoise",
    "noise is required for this step denoise",
    "AutoModel is designed to be instantiated using the from_pretrained or from_pipe methods.",
    "component vae is not switched over to new pipeline because type does not match the expected.",
]
"""What Diffusers says of something else, in words that messages of precision have too."""


@pytest.mark.parametrize("message", NEAR_MISSES)
def test_a_near_miss_stays_unknown(message: str) -> None:
    """A mask's shape, a missing argument and a factory method are no failure of precision."""
    assert explain(message).fault == UNKNOWN


@pytest.mark.parametrize(("message", "fault"), MESSAGES)
def test_a_known_message_gives_its_class(message: str, fault: str) -> None:
    """The class, a line that shows it, and what to type."""
    found = explain(message)
    assert found.fault == fault
    assert found.evidence[0].text == message
    assert found.remedy
    assert found.run_next


def test_every_message_of_a_program_is_recognised() -> None:
    """No message of the collected reports is unknown when a program printed it."""
    entries = tomllib.loads((CASES / "failures.toml").read_text(encoding="utf-8"))["case"]
    printed = {
        e["shown"] for e in entries if re.search(r"mat1|Warning:|not implemented", e["shown"])
    }
    assert len(printed) > 5
    assert [text for text in printed if explain(text).fault == UNKNOWN] == []


def test_unrelated_messages_are_unknown() -> None:
    """At least twenty messages of other kinds are answered with unknown, and with what to run."""
    messages = tomllib.loads((CASES / "unrelated.toml").read_text(encoding="utf-8"))["messages"]
    assert len(messages) >= 20
    found = [explain(message) for message in messages]
    assert {x.fault for x in found} == {UNKNOWN}
    assert all(x.run_next for x in found)


@pytest.mark.parametrize(
    "message",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 15.77 GiB of which 1.42 GiB is free.",
        "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 6.00 GiB",
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.9 GB, max allowed: 18.1 GB)",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 1000000000000 bytes.",
    ],
)
def test_too_little_memory_leads_to_what_fits(message: str) -> None:
    """On every backend: what each way to save takes, and how to run within a limit."""
    found = explain(message)
    assert found.fault == "memory"
    assert "stopdown generate SOURCE PROMPT --memory auto" in found.run_next
    assert any("stopdown plan SOURCE --memory auto" in line for line in found.remedy)


def test_without_knowledge_everything_is_unknown() -> None:
    """It is the data that answers: with none, the surest message is unknown."""
    assert explain_text(MESSAGES[1][0], parse_knowledge([])).fault == UNKNOWN


def test_facts_beside_a_message_change_the_answer() -> None:
    """A bare warning is not attributed; beside a CogVideoX-5B in fp16 it is the transformer's range."""
    assert explain(CAST).fault == "unattributed"
    told = explain(f"CogVideoX-5b, torch_dtype=torch.float16, V100\n{CAST}")
    assert told.fault == "transformer-range"
    assert {clue.line for clue in told.evidence} == {1, 2}


def test_an_exception_is_read_with_its_traceback() -> None:
    """What torch really raises is recognised, and both dtypes are named."""
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float16)
    found = explain(caught.value)
    assert found.fault == "dtype-mismatch"
    assert "fp32" in found.title
    assert "fp16" in found.title


def test_the_place_is_the_deepest_frame_in_a_model() -> None:
    """Of a traceback the last frame in Diffusers' or Transformers' models is named."""
    text = (
        '  File "/x/diffusers/pipelines/cogvideo/pipeline_cogvideox.py", line 700, in __call__\n'
        '  File "/x/transformers/models/t5/modeling_t5.py", line 283, in forward\n'
        '  File "/x/torch/nn/modules/linear.py", line 125, in forward\n'
        "RuntimeError: expected scalar type Float but found Half\n"
    )
    assert explain(text).site == "transformers/models/t5/modeling_t5.py:283 in forward"


def test_a_long_log_is_condensed_and_line_numbers_stay() -> None:
    """A progress bar of many lines counts once, and the message keeps its own line number."""
    bars = [f"{i}%|###| {i}/1000" for i in range(1000)]
    text, numbers = condense("\n".join([*bars, MESSAGES[1][0]]))
    assert len(text.splitlines()) == 2
    assert numbers == [1, 1001]
    assert explain("\n".join([*bars, MESSAGES[1][0]])).evidence[0].line == 1001


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        (np.zeros((4, 16, 16, 3), np.uint8), "unattributed"),
        (np.full((4, 16, 16, 3), 128, np.uint8), "positions"),
        (np.random.default_rng(0).integers(0, 255, (9, 64, 64, 3), np.uint8), "fp32-island"),
    ],
)
def test_a_video_is_looked_at(tmp_path: Path, frames: np.ndarray[Any, Any], fault: str) -> None:
    """Black, grey and noisy frames give what they can come from."""
    write_media(f"{tmp_path}/frames/", frames, fps=8)
    assert explain(tmp_path / "frames").fault == fault


def test_a_healthy_picture_has_no_fault(tmp_path: Path) -> None:
    """Smooth and uneven frames that move are called healthy, and no more than that."""
    ramp = np.linspace(20, 230, 16)
    frame = np.stack([np.add.outer(ramp, ramp) / 2] * 3, axis=-1)
    frames = np.stack([np.roll(frame, 4 * i, axis=1) for i in range(4)]).astype(np.uint8)
    write_media(f"{tmp_path}/frames/", frames, fps=8)
    assert explain(tmp_path / "frames").fault == "none"


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    """The message names the file."""
    with pytest.raises(InputError, match=r"run\.log cannot be read: No such file"):
        explain(tmp_path / "run.log")


def test_the_knowledge_is_whole() -> None:
    """Every cause has a known fault, every sign favours known ones, and commands are those there are."""
    known = read_knowledge()
    assert {cause.fault for cause in known.causes} <= set(known.faults)
    assert {fault for sign in known.signs for fault in sign.favours} <= set(known.faults)
    commands = [line for cause in known.causes for line in cause.next]
    typed = [shlex.split(line)[1] for line in commands if line.startswith("stopdown")]
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert set(typed) <= names


def test_it_works_without_torch() -> None:
    """A message is explained in a process that never loads torch."""
    code = (
        "import sys; sys.modules['torch'] = None; import stopdown;"
        f"print(stopdown.explain({CAST!r}).fault)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "unattributed"


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    streams = capsys.readouterr()
    return int(left.value.code or 0), streams.out, streams.err


def test_the_command_answers_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """`stopdown explain TEXT` prints class, evidence and remedy; with --json the record."""
    code, page, _ = _run(capsys, "explain", MESSAGES[1][0])
    assert code == 0
    assert "dtype-mismatch" in page
    assert "What to do" in page
    code, text, _ = _run(capsys, "explain", MESSAGES[1][0], "--json")
    assert json.loads(text)["fault"] == "dtype-mismatch"


def test_the_command_reads_a_log_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file by name, and `-` for what is piped in."""
    log = tmp_path / "run.log"
    log.write_text(f"step 1\n{CAST}\n")
    assert _run(capsys, "explain", str(log))[0] == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(MESSAGES[2][0]))
    assert "dtype-mismatch" in _run(capsys, "explain", "-")[1]


def test_the_command_says_unknown_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not known is exit code 1, and a file that is not there is 2."""
    code, page, _ = _run(capsys, "explain", "KeyError: 'unet'")
    assert (code, page.startswith("unknown")) == (1, True)
    code, page, error = _run(capsys, "explain", "missing.log")
    assert (code, page) == (2, "")
    assert "There is no file missing.log" in error

"""`explain`: known messages to their class, unknown ones to unknown, pictures to what they show."""

from __future__ import annotations

import ast
import errno
import importlib.util
import io
import json
import os
import re
import re._constants as parts  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stopdown import diagnosis, errors
from stopdown.app import cli, commands
from stopdown.diagnosis import (
    FILES,
    UNKNOWN,
    condense,
    explain,
    explain_stream,
    explain_text,
    parse_knowledge,
    read_knowledge,
)
from stopdown.errors import InputError
from stopdown.files.toml_files import read_folder
from stopdown.frames import media
from stopdown.frames.media import write_media

CASES = Path(__file__).parents[1] / "benchmarks" / "cases"
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
    ("probability tensor contains either `inf`, `nan` or element < 0", "encoder-range"),
    (
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, CUDA_R_16BF`",
        "bf16-emulated",
    ),
    # of Diffusers and Transformers
    ("Query, key, and value must be bfloat16.", "not-implemented"),
    (
        "There are modules in T5EncoderModel that should be kept in float32: ['wo'].",
        "fp32-module",
    ),
    (
        "The input hidden states seems to be silently casted in float32, this might be related",
        "fp32-module",
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
    """Two hundred messages, prompts and questions are answered with unknown, and with what to run."""
    messages = tomllib.loads((CASES / "unrelated.toml").read_text(encoding="utf-8"))["messages"]
    assert len(set(messages)) >= 200
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
    assert any(x.startswith("stopdown generate SOURCE PROMPT") for x in found.run_next)
    assert any("stopdown fit SOURCE" in line for line in found.remedy)


def test_without_knowledge_everything_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the data that answers: with none, the surest message is unknown."""
    monkeypatch.setattr(diagnosis, "read_knowledge", lambda: parse_knowledge([]))
    assert explain_text(MESSAGES[1][0]).fault == UNKNOWN


def test_facts_beside_a_message_change_the_answer() -> None:
    """A bare warning is not attributed; beside a CogVideoX-5B in fp16 it is the transformer's range."""
    assert explain(CAST).fault == "unattributed"
    told = explain(f"CogVideoX-5b, torch_dtype=torch.float16, V100\n{CAST}")
    assert told.fault == "transformer-range"
    assert {clue.line for clue in told.evidence} == {1, 2}


COMFYUI = """\
Total VRAM 24113 MB, total RAM 64000 MB
pytorch version: 2.12.0+cu130
Device: cuda:0 NVIDIA GeForce RTX 4090 : cudaMallocAsync
Using pytorch attention
model weight dtype torch.float16, manual cast: None
VAE load device: cuda:0, offload device: cpu, dtype: torch.bfloat16
CLIP/text encoder model load device: cuda:0, offload device: cpu, current: cpu, dtype: torch.float16
Requested to load AutoencoderKL
loaded completely 20451.2 319.1 True
Prompt executed in 12.53 seconds
"""


def test_every_text_of_a_family_is_answered_with_one_of_its_faults() -> None:
    """Each text in the style of programs gets a fault of its family, and its cause if that is named."""
    families = tomllib.loads((CASES / "families.toml").read_text(encoding="utf-8"))["family"]
    assert len({text for family in families for text in family["texts"]}) >= 40
    wrong = {
        text: (found.fault, found.cause)
        for family in families
        for text in family["texts"]
        for found in [explain(text)]
        if found.fault not in family["faults"] or found.cause != family.get("cause", found.cause)
    }
    assert wrong == {}


MESSAGES_2026 = tomllib.loads((CASES / "messages_2026.toml").read_text(encoding="utf-8"))["message"]


@pytest.mark.parametrize("case", MESSAGES_2026, ids=lambda case: case["text"][:60])
def test_a_message_of_2026_gets_its_class_and_its_fix_first(case: dict[str, Any]) -> None:
    """The class and the run are right, the first remedy is the fix, and nothing that is wrong is said."""
    found = explain(case["text"])
    assert found.fault in case["faults"]
    assert re.search(case.get("first", ""), found.remedy[0])
    said = "\n".join((found.title, found.why, *found.remedy, *found.run_next))
    assert re.search(case.get("never", "(?!)"), said) is None
    assert list(found.run) == case.get("run", list(found.run))


def test_a_remedy_for_the_card_of_the_text_comes_first() -> None:
    """A GTX 16 gets its own remedy first; a card that has none gets the order of the cause."""
    text = "Normalizing audio: Peak=nan"
    assert explain(f"GTX 1660 Ti\n{text}").remedy[0].startswith("On GTX 16: ")
    others = [x for x in explain(text).remedy if not x.startswith("On GTX 16")]
    assert list(explain(f"RTX 3060\n{text}").remedy) == others


@pytest.mark.thorough
def test_reports_of_our_own_are_answered() -> None:
    """Whole reports in the style of 2025 and 2026, with title, card and model: nine of ten as expected."""
    reports = json.loads((CASES / "own_reports.json").read_text(encoding="utf-8"))
    assert len(reports) >= 180
    wrong = []
    for report in reports:
        parts = [report[name] for name in ("title", "text", "device", "model")]
        if explain("\n".join(parts)).fault not in report["expected_class"].split(" / "):
            wrong.append(report["title"])
    assert len(wrong) <= len(reports) // 10, wrong


def test_advice_of_a_program_is_not_read() -> None:
    """What a program says to try in another case names neither a fault nor its cause."""
    advice = "If you are using SageAttention, try --disable-sage when you get black images"
    assert explain(f"Using SageAttention 2\n{advice}").fault == UNKNOWN
    assert explain(f"Encountered NaN in Latent\n{advice}").cause == "non-finite"
    assert (
        explain(f"Using SageAttention 2\nEncountered NaN in Latent\n{advice}").cause
        == "sums-in-fp16"
    )


def test_a_refused_product_is_read_with_its_card() -> None:
    """On cards that have the product the libraries are suspect, and not the card."""
    message = "CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( a, CUDA_R_16F, lda`"
    assert explain(f"Tesla P40\n{message}").cause == "product-not-on-card"
    newer = explain(f"NVIDIA GeForce RTX 4090\n{message}")
    assert (newer.fault, newer.cause) == ("not-implemented", "product-refused-by-a-newer-card")


RUN = """\
pytorch version: 2.10.0+cu126
Device: cuda:0 Tesla V100-SXM2-16GB : cudaMallocAsync
main.py --fast fp16_accumulation --use-sage-attention --fast fp16_accumulation
ComfyUI version: 0.7.0
"""


def test_what_the_run_was_is_read_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Program, version, card and options of a log are shown, each once, with what they lead to."""
    found = explain(f"{RUN}{CAST}")
    options = "--fast fp16_accumulation, --use-sage-attention"
    assert found.run == ("ComfyUI 0.7.0", "PyTorch 2.10.0+cu126", "Tesla V100-SXM2-16GB", options)
    assert found.cause == "sums-in-fp16"
    _, page, _ = _run(capsys, "explain", f"{RUN}{CAST}")
    assert "The run: ComfyUI 0.7.0, PyTorch 2.10.0+cu126, Tesla V100-SXM2-16GB" in page
    assert explain(CAST).run == ()


def test_remedies_are_those_of_the_card() -> None:
    """Volta and Turing get fp16 with a plan, Pascal and Maxwell fp32; without a card both are named."""
    message = "CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"
    volta, pascal, neither = (explain(f"{x}\n{message}").remedy for x in ("V100", "GTX 1080", ""))
    assert [any("--precision fp16" in x for x in y) for y in (volta, pascal, neither)] == [1, 0, 1]
    assert [any("--precision fp32" in x for x in y) for y in (volta, pascal, neither)] == [0, 1, 1]


def test_loose_words_count_only_in_a_description_of_a_run() -> None:
    """ "The image is dark" beside a format is a symptom; in a prompt, or in a long log, it is not."""
    assert explain("only mosaic with fp16 on a T4").fault != UNKNOWN
    assert explain("only mosaic").fault == UNKNOWN
    log = "\n".join(f"line {chr(97 + i % 26)}{chr(97 + i // 26)} of a log" for i in range(200))
    assert explain(f"only mosaic with fp16 on a T4\n{log}").fault == UNKNOWN


def test_lines_of_every_run_are_no_evidence() -> None:
    """A healthy log is unknown; with a fault in it neither offload nor VAE is blamed for being named."""
    assert explain(COMFYUI).fault == UNKNOWN
    faulty = explain(f"{COMFYUI}nodes.py:1700: {CAST}")
    assert (faulty.fault, faulty.cause) == ("unattributed", "non-finite")
    assert explain(f"VAE Decode gives NaN\n{CAST}").fault == "unattributed"
    known = explain(f"{COMFYUI}HunyuanVideo in fp16\n{CAST}")
    assert known.fault == "transformer-range"


PROMPTS = """\
a man in an all black suit in the rain
product photo of a perfume bottle, pure black background
worst quality, low quality, bad quality, blurry, garbled text, noise
noise, grain, jpeg artifacts, deformed hands
an infinity pool at sunset
the picture is black and white, heavy contrast
a black picture frame on the wall of a museum
a poster for a black movie night
black screen with green text, hacker aesthetic
a portrait of Nan in her studio
pixelated retro game character
strange artifacts of a lost civilization
a Mac and an apple on a desk, half eaten
transformers robots in flux, a sage plant
gibberish writing on a wall
全黑的背景下的一朵白花
一只黑猫坐在窗台上"""


def list_messages(package: str) -> Iterator[str]:
    """The texts of errors and log lines in a package's code."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                call = node.exc if isinstance(node, ast.Raise) else node
                if isinstance(call, ast.Call) and call.args:
                    first = call.args[0]
                    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
                    if is_text and " " in first.value and len(first.value) > 25:  # type: ignore[union-attr]
                        yield str(first.value)  # type: ignore[union-attr]


@pytest.mark.thorough
def test_of_unrelated_texts_none_is_explained() -> None:
    """Prompts, and messages and descriptions of 12 packages that have nothing to do with precision."""
    packages = ("PIL", "rich", "click", "huggingface_hub", "jinja2", "psutil", "pytest", "filelock")
    texts = [*PROMPTS.splitlines()]
    for name in packages:
        found = sorted(set(list_messages(name)))
        texts += found[:: max(1, len(found) // 20)]
    for name in ("numpy", "pillow", "rich", "huggingface_hub"):
        lines = [x for x in (metadata(name).get_payload() or "").splitlines() if len(x) > 40]
        texts += lines[:: max(1, len(lines) // 20)]
    assert len(texts) >= 200
    answers = {text: explain(text).fault for text in texts}
    assert {text: fault for text, fault in answers.items() if fault != UNKNOWN} == {}


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
    assert explain(text).frame == "transformers/models/t5/modeling_t5.py:283 in forward"


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
        (np.random.default_rng(0).integers(0, 255, (9, 64, 64, 3), np.uint8), "fp32-module"),
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
    lines = [line for cause in known.causes for line in cause.next]
    typed = [shlex.split(line)[1] for line in lines if line.startswith("stopdown")]
    names = {
        command.name or command.callback.__name__ for command in commands.app.registered_commands
    }
    assert set(typed) <= names


@pytest.mark.parametrize("name", ["one.png", "one.jpg", "one.webp", "one.bmp", "one.tif"])
def test_the_command_looks_at_a_picture(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A black picture of every kind is called black through the command line."""
    Image.new("RGB", (32, 32)).save(tmp_path / name)
    code, page, error = _run(capsys, "explain", str(tmp_path / name))
    assert (code, error) == (0, "")
    assert page.startswith(f"{name}: the picture is black.\n→ Black without NaN")
    assert page.endswith("Kind unattributed\n")


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif", "frames/"])
def test_the_command_looks_at_a_clip(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A black video, gif or folder of frames is called black through the command line."""
    write_media(f"{tmp_path}/{name}", np.zeros((4, 32, 32, 3), np.uint8))
    code, page, error = _run(capsys, "explain", f"{tmp_path}/{name}")
    assert (code, error) == (0, "")
    assert "the picture is black" in page


def test_of_a_long_clip_the_beginning_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more frames are decoded than the limit, and the answer says so; a shorter clip says nothing."""
    write_media(f"{tmp_path}/frames/", np.zeros((4, 16, 16, 3), np.uint8))
    assert "Only its first" not in explain(tmp_path / "frames").why
    monkeypatch.setattr(diagnosis, "MOST_FRAMES", 3)
    assert explain(tmp_path / "frames").why.endswith("Only its first 3 frames were looked at.")
    monkeypatch.setattr(media, "MOST_CLIP_BYTES", 2 * 16 * 16 * 3)
    assert explain(tmp_path / "frames").why.endswith("Only its first 2 frames were looked at.")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A named pipe that nobody writes to, and a device, are refused before they are opened."""
    os.mkfifo(tmp_path / "pipe.log")
    for path in (tmp_path / "pipe.log", Path("/dev/zero")):
        with pytest.raises(InputError, match=r"cannot be read: it is no file\. .*explain -$"):
            explain(path)


def test_a_message_longer_than_a_name_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """A message of 400 characters on one line is not looked for as a file."""
    code, page, _ = _run(capsys, "explain", f"{MESSAGES[1][0]}{'!' * 400}")
    assert (code, page.splitlines()[-1]) == (0, "Kind dtype-mismatch")


class _Endless(io.RawIOBase):
    """A stream of lines that never ends, and the bytes that were taken from it."""

    taken = 0

    def read(self, size: int = -1) -> bytes:
        assert size > 0
        self.taken += size
        return (b"step 1 of 2\n" * (size // 12 + 1))[:size]


def test_a_stream_without_end_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is piped in is read piece by piece and no further than the limit."""
    monkeypatch.setattr(diagnosis, "MOST_BYTES", 2_000)
    monkeypatch.setattr(diagnosis, "MOST_STREAM_BYTES", 10_000)
    endless = _Endless()
    assert explain_stream(endless).fault == UNKNOWN  # type: ignore[arg-type]
    assert endless.taken <= 11_000


def test_of_a_long_stream_and_file_both_ends_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message at the end of what is longer than the limit is found, and gets no false number."""
    monkeypatch.setattr(diagnosis, "MOST_BYTES", 2_000)
    lines = "".join(f"{'x' * (i % 90)}\n" for i in range(200))
    text = f"{lines}{CAST}\n"
    (tmp_path / "run.log").write_text(text)
    for found in (
        explain(tmp_path / "run.log"),
        explain(text),
        explain_stream(io.BytesIO(text.encode())),
    ):
        assert (found.fault, found.evidence[0].line) == ("unattributed", 0)


def test_bytes_that_are_no_text_are_read_past(tmp_path: Path) -> None:
    """A log with bytes that are not UTF-8 is read, from a file and from a pipe."""
    content = b"\xff\xfe caf\xe9\n" + CAST.encode()
    (tmp_path / "run.log").write_bytes(content)
    assert explain(tmp_path / "run.log").fault == "unattributed"
    assert explain_stream(io.BytesIO(content)).fault == "unattributed"


class _Failing(io.RawIOBase):
    """A stream that the system refuses to read."""

    def read(self, size: int = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_standard_input_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says why, and how else to give a log."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=_Failing(), isatty=lambda: False))
    code, _, error = _run(capsys, "explain", "-")
    assert (code, "Standard input cannot be read: Input/output error." in error) == (2, True)


def test_control_sequences_of_a_log_are_not_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Titles, colours, cursor movements and reversed text in a log do not reach the terminal."""
    hidden = "\x1b]0;owned\x07\x1b[2J\x1b[31m[red]\u202e\x9b2J\x08"
    code, page, _ = _run(capsys, "explain", f"{hidden}{CAST}\x1b[0m")
    assert code == 0
    assert CAST in page
    assert "[red]" in page
    assert "owned" not in page
    assert not set(page) & set("\x1b\x07\x08\x9b\u202e")


MOST_STEPS = 2_000


def count_paths(items: Any) -> tuple[int, int]:
    """In how many ways a pattern can match from one place, and of its atomic parts the largest such number.

    The engine tries no more than these before it goes on to the next place; "without limit" is 10**9.
    """
    paths, most = 1, 1
    for operation, argument in items:
        these, inner = _count_one(operation, argument)
        paths, most = min(paths * these, 10**9), max(most, inner)
    return paths, max(paths, most)


def _count_one(operation: Any, argument: Any) -> tuple[int, int]:
    if operation in (parts.MAX_REPEAT, parts.MIN_REPEAT, parts.POSSESSIVE_REPEAT):
        least, largest, body = argument
        paths, most = count_paths(body)
        largest = 10**9 if largest is parts.MAXREPEAT else int(largest)
        if operation is parts.POSSESSIVE_REPEAT:
            return 1, max(most, largest)
        if paths > 1 and largest > 1:
            return 10**9, 10**9
        return (largest - least) * paths + 1, most
    if operation is parts.BRANCH:
        counted = [count_paths(branch) for branch in argument[1]]
        return sum(paths for paths, _ in counted), max(most for _, most in counted)
    if operation in (parts.SUBPATTERN, parts.ATOMIC_GROUP, parts.ASSERT, parts.ASSERT_NOT):
        body = argument if operation is parts.ATOMIC_GROUP else argument[-1]
        paths, most = count_paths(body)
        return (paths if operation is parts.SUBPATTERN else 1), most
    return 1, 1


def count_steps(pattern: str) -> int:
    return count_paths(parser.parse(pattern, re.MULTILINE))[1]


@pytest.mark.parametrize(
    "pattern", [r"a[^\n]*b", r"\w+ b", r"(?:a{1,9}){1,9}", r"a{0,90}b{0,90}", r"\s*$"]
)
def test_the_count_of_steps_sees_what_backtracks(pattern: str) -> None:
    """Repeats without limit, within each other and side by side are above the limit."""
    assert count_steps(pattern) > MOST_STEPS


def test_every_pattern_is_linear() -> None:
    """From each place of a text a pattern tries a bounded number of ways, however long the text is."""
    known = read_knowledge()
    patterns = [p for cause in known.causes for p in (*cause.messages, *cause.needs)]
    patterns += [p for sign in known.signs for p in (*sign.match, *sign.unless)]
    patterns += [p for cause in known.causes for p in cause.loose]
    patterns += (*known.routine, *known.advice, *known.beside, *known.demands)
    patterns += [p for fact in known.facts for p in fact.lines]
    patterns += [p for x in known.generations for p in (x.cards, x.named)]
    patterns += [errors._UNPRINTABLE, diagnosis._FRAME, diagnosis._MODEL_FILE]
    assert [p.pattern for p in patterns if count_steps(p.pattern) > MOST_STEPS] == []


def test_patterns_see_short_lines_with_single_blanks() -> None:
    """Whatever the text: no long line, no two blanks or line ends side by side, no tabs, a limited size."""
    blanks = "\n".join(" \t" * i for i in range(900))
    text, _ = condense(
        f"{blanks}\n{'word  ' * 500}\n" + "\n".join(f"{'ab ' * i}" for i in range(2000))
    )
    assert max(map(len, text.split("\n"))) <= diagnosis.LONGEST_LINE
    assert len(text) <= diagnosis.MOST_CHARACTERS
    assert re.search(r"\s\s|\t", text) is None


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    streams = capsys.readouterr()
    return int(left.value.code or 0), streams.out, streams.err


def test_the_command_answers_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """`stopdown explain TEXT` prints class, evidence and remedy; with --json the record."""
    code, page, _ = _run(capsys, "explain", MESSAGES[1][0])
    assert code == 0
    first, second, *_, last = page.splitlines()
    assert first == "Two operands of one operation have different dtypes: fp32 and fp16."
    assert second.startswith(
        "→ Load all components at once, with a cast at each boundary: stopdown"
    )
    assert last == "Kind dtype-mismatch"
    code, text, _ = _run(capsys, "explain", MESSAGES[1][0], "--json")
    assert json.loads(text)["fault"] == "dtype-mismatch"


def test_the_command_reads_a_log_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file by name, and `-` for what is piped in."""
    log = tmp_path / "run.log"
    log.write_text(f"step 1\n{CAST}\n")
    assert _run(capsys, "explain", str(log))[0] == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MESSAGES[2][0].encode())))
    assert "dtype-mismatch" in _run(capsys, "explain", "-")[1]


def test_the_command_says_unknown_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not known is exit code 1, and a file that is not there is 2."""
    code, page, _ = _run(capsys, "explain", "KeyError: 'unet'")
    assert (code, page.splitlines()[-1]) == (1, "Kind unknown")
    code, page, error = _run(capsys, "explain", "missing.log")
    assert (code, page) == (2, "")
    assert "There is no file missing.log" in error


def test_of_equal_causes_the_likelier_is_answered() -> None:
    """What lies outside of a model is answered only where a message speaks for it more."""
    assert set(FILES) == set(read_folder("explain"))
    faults = [cause.fault for cause in read_knowledge().causes]
    assert faults.index("vae-range") < faults.index("backend-kernel")

"""What `explain` says of a text: its cause, evidence and remedy."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from models.command_runs import run_line
from models.failure_messages import CAST, MESSAGES
from stopdown.diagnosis import texts
from stopdown.diagnosis.explained import explain
from stopdown.diagnosis.knowledge import FILES, UNKNOWN, read_knowledge
from stopdown.diagnosis.texts import condense
from stopdown.files.toml_files import read_folder

CASES = Path(__file__).parents[2] / "benchmarks" / "cases"


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
    _, page, _ = run_line(capsys, "explain", f"{RUN}{CAST}")
    assert "Detected: ComfyUI 0.7.0, PyTorch 2.10.0+cu126, Tesla V100-SXM2-16GB" in page
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


def test_the_place_is_the_deepest_frame_in_a_model() -> None:
    """Of a traceback the last frame in Diffusers' or Transformers' models is named."""
    text = (
        '  File "/x/diffusers/pipelines/cogvideo/pipeline_cogvideox.py", line 700, in __call__\n'
        '  File "/x/transformers/models/t5/modeling_t5.py", line 283, in forward\n'
        '  File "/x/torch/nn/modules/linear.py", line 125, in forward\n'
        "RuntimeError: expected scalar type Float but found Half\n"
    )
    assert explain(text).frame == "transformers/models/t5/modeling_t5.py:283 in forward"


TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/x/app.py", line 3, in <module>\n'
    "    pipe(prompt)\n"
    '  File "/x/site-packages/diffusers/models/attention.py", line 325, in forward\n'
    "    x = self.to_q(x)\n"
    "RuntimeError: \"LayerNormKernelImpl\" not implemented for 'Half'\n"
)


def _begin_lines(prefix: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in TRACEBACK.splitlines())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACEBACK.replace("/", "\\").replace("\\x\\", "C:\\Users\\x y\\"), 6),
        (TRACEBACK.replace("\n", "\r\n"), 6),
        (_begin_lines("[rank0]: "), 6),
        (_begin_lines("2026-11-30 08:00:00,123 - app - ERROR - "), 6),
        (_begin_lines("> "), 6),
        (_begin_lines("\x1b[31m") + "\x1b[0m", 6),
        ("started\n" + json.dumps({"time": 1, "log": "x" * 900 + "\n" + TRACEBACK}), 2),
        (repr(TRACEBACK.replace("/", "\\")), 1),
        (str(TRACEBACK.encode()), 1),
    ],
    ids=["windows", "crlf", "rank", "logger", "quoted", "coloured", "json", "repr", "bytes"],
)
def test_a_traceback_is_read_as_programs_print_it(text: str, line: int) -> None:
    """The cause, its line, the deepest frame and the program, whatever stands around the lines."""
    found = explain(text)
    assert (found.cause, found.evidence[0].line) == ("no-half-kernel", line)
    assert found.frame == "diffusers/models/attention.py:325 in forward"
    assert found.run == ("diffusers",)


def test_quotes_that_a_shell_takes_away_change_no_answer() -> None:
    """`stopdown explain "..."` gets a message without its double quotes, and without any if unquoted."""
    messages = [(text, fault) for text, fault in MESSAGES if '"' in text]
    assert messages
    for text, fault in messages:
        assert explain(text.replace('"', "")).fault == fault, text
    for text in (
        "RuntimeError: LayerNormKernelImpl not implemented for Half",
        "NotImplementedError: The operator aten::_int_mm is not currently implemented for the MPS device",
        "RuntimeError: User specified an unsupported autocast device_type mps",
    ):
        assert explain(text).fault == "not-implemented", text


@pytest.mark.parametrize(
    ("fail", "title"),
    [
        (lambda a, b: torch.complex(a, b), "different dtypes: fp32 and fp16."),
        (lambda a, b: torch.tensordot(a, b, dims=0), "different dtypes."),
        (lambda a, b: torch.nn.GRU(4, 4)(a[None, None]), "different dtypes: fp16 and fp32."),
        (lambda a, b: torch.scatter(b, 0, torch.tensor([0]), a), "different dtypes."),
        (lambda a, b: Image.fromarray(a.numpy()[None, None, :3]), "The result is in fp16, and "),
    ],
)
def test_what_torch_and_pillow_say_of_dtypes_is_known(fail: Callable[..., Any], title: str) -> None:
    """As they say it in the versions that are installed."""
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        fail(torch.ones(4).half(), torch.ones(4))
    assert title in explain(caught.value).title


def test_a_message_is_read_as_people_paste_it() -> None:
    """With quotation marks of a chat, or wrapped by a terminal; another line isn't joined to it."""
    curly = "RuntimeError: \u201cLayerNormKernelImpl\u201d not implemented for \u2018Half\u2019"
    assert explain(curly).cause == "no-half-kernel"
    wrapped = (
        "loading\nRuntimeError: Input type (torch.cuda.HalfTensor) and\nweight type "
        "(torch.cuda.FloatTensor)\nshould be the same\ndone"
    )
    found = explain(wrapped)
    assert (found.cause, found.evidence[0].line) == ("operands-differ", 2)
    assert found.title.endswith("different dtypes: fp16 and fp32.")
    other = "RuntimeError: Input type (torch.cuda.HalfTensor) and\nTypeError: weight type is wrong"
    assert explain(other).fault == UNKNOWN


def test_a_long_log_is_condensed_and_line_numbers_stay() -> None:
    """A progress bar of many lines counts once, and the message keeps its own line number."""
    bars = [f"{i}%|###| {i}/1000" for i in range(1000)]
    text, numbers = condense("\n".join([*bars, MESSAGES[1][0]]))
    assert len(text.splitlines()) == 2
    assert numbers == [1, 1001]
    assert explain("\n".join([*bars, MESSAGES[1][0]])).evidence[0].line == 1001


def test_patterns_see_short_lines_with_single_blanks() -> None:
    """Whatever the text: no long line, no two blanks or line ends side by side, no tabs, a limited size."""
    blanks = "\n".join(" \t" * i for i in range(900))
    text, _ = condense(
        f"{blanks}\n{'word  ' * 500}\n" + "\n".join(f"{'ab ' * i}" for i in range(2000))
    )
    assert max(map(len, text.split("\n"))) <= texts.LONGEST_LINE
    assert len(text) <= texts.MOST_CHARACTERS
    assert re.search(r"\s\s|\t", text) is None


def test_of_equal_causes_the_likelier_is_answered() -> None:
    """What lies outside of a model is answered only where a message speaks for it more."""
    assert set(FILES) == set(read_folder("explain"))
    faults = [cause.fault for cause in read_knowledge().causes]
    assert faults.index("vae-range") < faults.index("backend-kernel")

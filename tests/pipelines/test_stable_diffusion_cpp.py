"""Converted files in stable-diffusion.cpp, which computes in fp16 where neither Diffusers nor ComfyUI does.

Its package, `stable-diffusion-cpp-python`, is compiled when it is installed; `PYTHONPATH` names where.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from readers.sdcpp_runs import DECODER, DENOISER, FLASH, find_missing, measure, measure_gguf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(find_missing()), reason=find_missing() or "it can run"),
]

WRONG = 20.0
"""Mean difference of bytes of a picture that is white instead."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Differences of all runs; they are made in one process."""
    made = measure(tmp_path_factory.mktemp("sdcpp"))
    print(made)  # noqa: T201 - the figures, with -s
    return made


def test_a_denoiser_is_right_in_fp16(found: dict[str, dict[str, float]]) -> None:
    """White before; afterwards six times nearer than bf16, and in fp32 byte for byte the original."""
    errors = found[DENOISER]
    assert errors["fp16"] > WRONG
    assert errors["converted fp32"] == 0.0
    assert errors["converted fp16"] <= errors["bf16"] / 6


def test_it_draws_what_diffusers_draws(found: dict[str, dict[str, float]]) -> None:
    """The original in fp32, with the converted decoder: the same noise, step and picture."""
    assert found[DENOISER]["Diffusers"] < 0.2


def test_a_decoder_is_right_where_no_format_helps(found: dict[str, dict[str, float]]) -> None:
    """Its convolutions are in fp16 whatever the file: white in fp32 and bf16, too."""
    errors = found[DECODER]
    assert min(errors["exact"], errors["fp16"], errors["bf16"]) > WRONG
    assert errors["converted fp16"] < 0.2
    assert errors["converted fp32"] < 0.2


def test_gguf_is_right_too(tmp_path: Path) -> None:
    """F16 is white before. Q8_0 makes bytes of activations, and is white with flash attention in fp16."""
    pytest.importorskip("gguf")
    found = measure_gguf(tmp_path)
    print(found)  # noqa: T201 - the figures, with -s
    for kind, key in (("F16", "before"), ("F16", f"before{FLASH}"), ("Q8_0", f"before{FLASH}")):
        assert found[kind][key] > WRONG
        assert found[kind][key.replace("before", "after")] < 0.2
    assert found["Q8_0"]["after"] == found["Q8_0"]["before"] < 0.2

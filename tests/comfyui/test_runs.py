"""Tests of the node pack in a running ComfyUI: black without the node, right with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from comfyui.conftest import Answer, Server
from comfyui.prompts import compute_in, make_prompt, run_in_fp16

NEAR = 0.5
"""A picture this near to fp32's is right: on average less than half of one step of 255."""


def is_black(answer: Answer) -> bool:
    """Whether nothing is left of a picture."""
    assert answer.picture is not None, answer.error
    return bool((answer.picture == 0).all())


@pytest.mark.parametrize("lora", ["", "flux"])
@pytest.mark.parametrize("when", ["at a fault", "plan first"])
def test_black_without_and_right_with(server: Server, lora: str, when: str) -> None:
    """Flux overflows in fp16; with the node it gives fp32's picture, also with a LoRA."""
    prompt = make_prompt("flux_black", lora=lora)
    right = server.run(prompt)
    assert is_black(server.run(compute_in(prompt, "fp16")))
    found = server.run(run_in_fp16(prompt, when=when))
    assert found.find_difference(right) < NEAR
    assert found.find_difference(right) < server.run(compute_in(prompt, "bf16")).find_difference(
        right
    )
    (report,) = found.texts
    assert report.startswith("model: diffusion_model in fp16: 3 calls, ")
    if when == "at a fault":
        assert "diffusion_model:final_layer.adaLN_modulation.1: range, rescaled." in report
        assert "at step 1 of 3, in fp16" in report
    else:
        assert "none faulty" in report


def test_against_its_own_clamp(server: Server) -> None:
    """What ComfyUI clamps is finite and wrong; the node finds it behind the clamp."""
    prompt = make_prompt("flux_clamped")
    right = server.run(prompt)
    assert server.run(compute_in(prompt, "fp16")).find_difference(right) > 10
    found = server.run(run_in_fp16(prompt))
    assert found.find_difference(right) < NEAR
    assert "double_blocks.0.img_mlp.0: clamped, rescaled." in found.texts[0]


@pytest.mark.parametrize("when", ["at a fault", "plan first"])
def test_weights_that_wait(start: Callable[..., Server], when: str) -> None:
    """With weights in host memory, and a LoRA patched in at each call, the picture is the same."""
    server = start(STOPDOWN_TEST_LOWVRAM="1")
    prompt = make_prompt("flux_black", lora="flux")
    right = server.run(prompt)
    assert is_black(server.run(compute_in(prompt, "fp16")))
    assert server.run(run_in_fp16(prompt, when=when)).find_difference(right) < NEAR
    assert "lowvram patches: 3" in server.log.read_text()


def test_a_healthy_model_is_left_alone(server: Server) -> None:
    """The guard changes no bit of a run without a fault."""
    prompt = make_prompt("flux_healthy")
    plain = server.run(compute_in(prompt, "fp16"))
    found = server.run(run_in_fp16(prompt))
    assert found.find_difference(plain) == 0
    assert found.texts == ("model: diffusion_model in fp16: 3 calls, none faulty.",)


def test_raise_names_the_layer(server: Server) -> None:
    """The run stops with the component, the layer and the step; the next one is as ever."""
    prompt = make_prompt("flux_black")
    found = server.run(run_in_fp16(prompt, on_fault="raise"))
    assert "`diffusion_model` gave 4096 NaN in 4096 values at step 1 of 3" in found.error
    assert "`diffusion_model:final_layer.adaLN_modulation.1`" in found.error
    assert not is_black(server.run(make_prompt("flux_black", steps=2)))

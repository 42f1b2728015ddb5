"""Tests of the node pack in a running ComfyUI: black without the node, right with it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from comfyui.conftest import CHECKOUT, HERE, PACK, Answer, Server
from comfyui.prompts import (
    check_sums,
    compute_in,
    encode_text,
    guard,
    make_node,
    make_prompt,
    run_in_fp16,
)

NEAR = 0.5
"""A picture this near to fp32's is right: on average less than half of one step of 255."""


def is_black(answer: Answer) -> bool:
    """Whether nothing is left of a picture."""
    assert answer.picture is not None, answer.error
    return bool((answer.picture == 0).all())


@pytest.mark.parametrize(
    ("name", "lora", "where"),
    [
        ("flux_black", "", "final_layer.adaLN_modulation.1"),
        ("flux_black", "flux", "final_layer.adaLN_modulation.1"),
        ("z_image_black", "", "final_layer.adaLN_modulation.1"),
        ("qwen_image_black", "", "transformer_blocks.1.img_mlp.net.0.proj"),
        ("wan_black", "", "blocks.1.ffn.0"),
    ],
)
def test_black_without_and_right_with(server: Server, name: str, lora: str, where: str) -> None:
    """A model overflows in fp16; with a node it gives fp32's picture, also with a LoRA.

    *Run in fp16* has exponents before anything overflows; the guard finds them at the fault.
    """
    prompt = make_prompt(name, lora=lora)
    right = server.run(prompt)
    assert is_black(server.run(compute_in(prompt, "fp16")))
    found = server.run(run_in_fp16(prompt))
    assert found.find_difference(right) < NEAR
    assert found.find_difference(right) < server.run(compute_in(prompt, "bf16")).find_difference(
        right
    )
    assert found.texts[0].startswith("model: diffusion_model in fp16: 3 calls, ")
    if name == "flux_black":  # all that overflows has bounds; of the others something is repaired
        assert found.texts == ("model: diffusion_model in fp16: 3 calls, none faulty.",)
    repaired = server.run(guard(prompt))
    assert repaired.find_difference(right) < NEAR
    (report,) = repaired.texts
    assert report.startswith("model: diffusion_model in fp16: 3 calls, ")
    assert f"diffusion_model:{where}: range, rescaled." in report
    assert "in fp16 at step 1 of 3" in report


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("flux_clamped", "double_blocks.0.img_mlp.0"),
        ("z_image_clamped", "layers.0.feed_forward.w3"),
    ],
)
def test_against_its_own_clamp(server: Server, name: str, where: str) -> None:
    """What ComfyUI clamps is finite and wrong; the node finds it behind the clamp."""
    prompt = make_prompt(name)
    right = server.run(prompt)
    assert server.run(compute_in(prompt, "fp16")).find_difference(right) > 10
    assert server.run(run_in_fp16(prompt)).find_difference(right) < NEAR
    found = server.run(guard(prompt))
    assert found.find_difference(right) < NEAR
    assert f"diffusion_model:{where}: clamped, rescaled." in found.texts[0]


def test_a_vae_in_fp16(server: Server) -> None:
    """A decoder whose values are beyond fp16's range gives fp32's picture.

    A product in it has bounds that no exponents bring into range, so that is repaired when it overflows.
    """
    prompt = make_prompt("flux_healthy", "small_black")
    right = server.run(prompt)
    found = server.run(run_in_fp16(prompt, what="vae"))
    assert found.find_difference(right) < NEAR
    assert found.texts[0].startswith("vae: vae.decode in fp16: 1 calls, ")
    assert server.run(make_prompt("flux_healthy", "small_black", steps=2)).picture is not None


def test_a_text_encoder_in_fp16(server: Server) -> None:
    """ComfyUI computes text encoders in fp32; this one is beyond fp16's range."""
    prompt = encode_text(make_prompt("flux_healthy"), "a red circle")
    right = server.run(prompt)
    found = server.run(run_in_fp16(prompt, what="clip"))
    assert found.find_difference(right) < NEAR
    assert found.texts == ("clip: t5base in fp16: 1 calls, none faulty.",)


@pytest.mark.parametrize(("name", "word"), [("flux_healthy", "safe"), ("flux_black", "not safe")])
def test_sums_in_fp16_are_judged(server: Server, name: str, word: str) -> None:
    """The node says whether fp16 accumulation is safe, and the picture is as without it."""
    prompt = make_prompt(name)
    found = server.run(check_sums(prompt))
    assert found.find_difference(server.run(compute_in(prompt, "fp16"))) == 0
    (report,) = found.texts
    assert f"In this run fp16 accumulation is {word}: " in report
    assert "linear layers and matrix products reach " in report  # ComfyUI's attention on a CPU, too


def test_exponents_are_found_once(server: Server) -> None:
    """They are kept for these weights: a new node takes them."""
    folder = server.folder / "cache" / "plans"
    assert server.run(run_in_fp16(make_prompt("flux_clamped"))).picture is not None
    kept = sorted(folder.glob("*.json"))
    assert kept
    assert server.run(run_in_fp16(make_prompt("flux_clamped", steps=2))).picture is not None
    assert sorted(folder.glob("*.json")) == kept


def test_a_saved_checkpoint_needs_no_node(server: Server, models: Path) -> None:
    """The file that is written loads by itself, and is right in fp16; what it cannot hold is refused."""
    prompt = make_prompt("z_image_clamped")
    right = server.run(prompt)
    saves = {"model": ["fp16", 0], "report": ["fp16", 3], "images": ["decode", 0]}
    node = make_node("StopdownSaveFp16", **saves, filename_prefix="diffusion_models/test")
    found = server.run(run_in_fp16(prompt) | {"file": node})
    text = next(text for text in found.texts if text.endswith("scaled."))
    shutil.copy(text.partition(": ")[0], models / "diffusion_models" / "z_image_saved.safetensors")
    saved = server.run(compute_in(make_prompt("z_image_saved"), "fp16"))
    assert saved.find_difference(right) < NEAR
    refused = server.run(run_in_fp16(make_prompt("flux_black")) | {"file": node})
    assert (
        "Powers of two in its weights alone don't keep its activations within fp16's range"
        in refused.error
    )


def test_doctor_and_explain(server: Server) -> None:
    """Both say in the page what they say in a terminal."""
    prompt = compute_in(make_prompt("flux_black"), "fp16")
    prompt["doctor"] = make_node("StopdownDoctor")
    prompt["explain"] = make_node("StopdownExplain", message="", images=["decode", 0])
    doctor, explain = sorted(server.run(prompt).texts, key=lambda text: "black" in text[:80])
    assert "What --precision auto would choose" in doctor
    assert "black" in explain.partition("\n")[0]


def test_the_start_imports_nothing_of_ours(server: Server) -> None:
    """ComfyUI imports the pack without Stopdown."""
    code = (
        "import sys; sys.path.insert(0, {here!r}); from launch import prepare; from pathlib import Path;"
        "prepare(Path({checkout!r})); sys.argv = ['', '--cpu'];"
        "import comfy.options; comfy.options.enable_args_parsing(); import comfy_api.latest;"
        "before = set(sys.modules); sys.path.insert(0, {above!r}); import comfyui;"
        "new = set(sys.modules) - before;"
        "print(sorted(x for x in new if x.partition('.')[0] != 'comfyui'))"
    )
    filled = code.format(here=str(HERE), checkout=CHECKOUT, above=str(PACK.parent))
    found = subprocess.run(
        [sys.executable, "-c", filled], check=True, capture_output=True, text=True
    )
    names = ast.literal_eval(found.stdout.strip().splitlines()[-1])
    assert [x for x in names if x.partition(".")[0] not in sys.stdlib_module_names] == []


def test_weights_that_wait(start: Callable[..., Server]) -> None:
    """With weights in host memory, and a LoRA patched in at each call, the picture is the same."""
    server = start(STOPDOWN_TEST_LOWVRAM="1")
    prompt = make_prompt("flux_black", lora="flux")
    right = server.run(prompt)
    assert is_black(server.run(compute_in(prompt, "fp16")))
    assert server.run(run_in_fp16(prompt)).find_difference(right) < NEAR
    assert server.run(guard(prompt)).find_difference(right) < NEAR
    told = server.log.read_text()
    assert re.search(r"lowvram patches: 3|loaded partially .* 3\n", told)  # 0.33, 0.3


def test_a_healthy_model_is_left_alone(server: Server) -> None:
    """The guard changes no bit of a run without a fault."""
    prompt = make_prompt("flux_healthy")
    plain = server.run(compute_in(prompt, "fp16"))
    found = server.run(guard(prompt))
    assert found.find_difference(plain) == 0
    assert found.texts == ("model: diffusion_model in fp16: 3 calls, none faulty.",)


def test_raise_names_the_layer(server: Server) -> None:
    """The run stops with the component, the layer and the step; the next one is as ever."""
    prompt = make_prompt("flux_black")
    found = server.run(guard(prompt, "raise"))
    assert (
        "`diffusion_model` returned only NaN (1,024 values) in fp16 at step 1 of 3" in found.error
    )
    assert "`diffusion_model:final_layer.adaLN_modulation.1`" in found.error
    assert not is_black(server.run(make_prompt("flux_black", steps=2)))

"""Prompts in the form that ComfyUI's HTTP API takes: nodes by number, each with its class and inputs."""

from __future__ import annotations

from typing import Any

WIDTHS = {"flux": 64, "z_image": 64, "qwen_image": 64, "wan": 4096}
"""Of the conditioning that each tiny model takes."""

Prompt = dict[str, Any]


def make_node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node."""
    return {"class_type": class_type, "inputs": inputs}


def make_prompt(unet: str, vae: str = "small", *, steps: int = 3, lora: str = "") -> Prompt:
    """From a model to a saved picture; nothing of Stopdown in it."""
    family = next(name for name in WIDTHS if unet.startswith(name))
    is_video = family in ("wan", "qwen_image")
    conditioning = {"number": 2, "tokens": 6, "width": WIDTHS[family], "pooled": 32}
    latent = {"width": 64, "height": 64, "batch_size": 1}
    return {
        "unet": make_node("UNETLoader", unet_name=f"{unet}.safetensors", weight_dtype="default"),
        "text": make_node("TestConditioning", **conditioning),
        "latent": make_node("EmptyHunyuanLatentVideo", **latent, length=1)
        if family == "wan"
        else make_node("EmptySD3LatentImage", **latent),
        "vae": make_node("VAELoader", vae_name=f"{'wan' if is_video else vae}.safetensors"),
        "sampler": make_node(
            "KSampler",
            model=["lora" if lora else "unet", 0],
            positive=["text", 0],
            negative=["text", 0],
            latent_image=["latent", 0],
            seed=1,
            steps=steps,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            denoise=1.0,
        ),
        "decode": make_node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "save": make_node("SaveImage", images=["decode", 0], filename_prefix="test"),
    } | (
        {
            "lora": make_node(
                "LoraLoaderModelOnly",
                model=["unet", 0],
                lora_name=f"{lora}.safetensors",
                strength_model=1.0,
            )
        }
        if lora
        else {}
    )


def insert(prompt: Prompt, name: str, node: dict[str, Any], source: str, slot: int = 0) -> Prompt:
    """The same prompt with a node that takes what `source` gave to others, and gives it to them."""
    changed = {
        key: {
            **other,
            "inputs": {
                field: [name, slot] if value == [source, 0] else value
                for field, value in other["inputs"].items()
            },
        }
        for key, other in prompt.items()
    }
    return changed | {name: node}


def compute_in(prompt: Prompt, dtype: str) -> Prompt:
    """With ComfyUI's own node for the dtype that a model computes in."""
    source = "lora" if "lora" in prompt else "unet"
    node = make_node("ModelComputeDtype", model=[source, 0], dtype=dtype)
    return insert(prompt, "dtype", node, source)


SLOTS = {"model": 0, "clip": 1, "vae": 2, "report": 3}
"""Outputs of our nodes."""


def run_in_fp16(prompt: Prompt, *, what: str = "model") -> Prompt:
    """With our node for the model, the clip or the vae, and its report."""
    loaded = "lora" if "lora" in prompt else "unet"
    source = {"model": loaded}.get(what, what)
    node = make_node("StopdownRunInFp16", **{what: [source, 0]})
    report = make_node("StopdownReport", images=["decode", 0], report=["fp16", SLOTS["report"]])
    return insert(prompt, "fp16", node, source, SLOTS[what]) | {"report": report}


def guard(prompt: Prompt, on_fault: str = "repair") -> Prompt:
    """With ComfyUI's own node for fp16, the guard behind it, and its report."""
    node = make_node("StopdownGuard", model=["dtype", 0], on_fault=on_fault)
    report = make_node("StopdownReport", images=["decode", 0], report=["guard", SLOTS["report"]])
    return insert(compute_in(prompt, "fp16"), "guard", node, "dtype") | {"report": report}


def check_sums(prompt: Prompt) -> Prompt:
    """With ComfyUI's own node for fp16, the node that looks at sums behind it, and its report."""
    node = make_node("StopdownCheckSums", model=["dtype", 0])
    report = make_node("StopdownReport", images=["decode", 0], report=["sums", SLOTS["report"]])
    return insert(compute_in(prompt, "fp16"), "sums", node, "dtype") | {"report": report}


def encode_text(prompt: Prompt, text: str) -> Prompt:
    """With a text encoder in the place of drawn conditioning."""
    return prompt | {
        "clip": make_node(
            "CLIPLoader", clip_name="t5_black.safetensors", type="stable_audio", device="default"
        ),
        "text": make_node("CLIPTextEncode", text=text, clip=["clip", 0]),
    }

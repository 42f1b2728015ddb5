"""Full-size checkpoints in fp32, bf16, plain fp16, and fp16 with measured plans and certificates.

A folder with the real configuration of one component is written, every layer at its full width, weights
in bf16; the other components are tiny. Weights are drawn, with the magnitudes that users reported:
a residual stream that grows from 8e4 to some 1e6, gated products and outputs of T5's `wo` beyond 65504,
rows of unequal size, a few channels that are eight times the others. Then the folder is sampled twice
over small latents, from disk, within a limit of memory. Each stage runs in a process of its own. The
first call of the component gets fp32's arguments in every format, so its error is that of one call.

Linears and convolutions of fp16 are summed in fp32 and rounded once, as devices do; attention is torch's.
The copies in fp32 that this takes are in what is predicted and what is measured.

A certificate with an fp32 residual is what `auto` makes and keeps. *plan* measures a run in fp32,
and leaves the stream as it is.

    python benchmarks/full_size_runs.py CogVideoX-2B
    python benchmarks/full_size_runs.py CogVideoX-2B --stages bf16 fp16
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from full_size_configs import MODELS, T5_XXL  # noqa: E402 (the path is set above)

from stopdown.devices.environment import describe_machine  # noqa: E402

PROMPT = "a red circle moving left on a grey background"
LONG_PROMPT = (
    "A girl in a YELLOW raincoat rides her old bike along a foggy quay at 6:45 in the morning; gulls "
    "wheel over 17 moored boats, lamps go out one by one, and water drips from every rope. Shot on 35 mm "
    "film, low sun, quiet exit"
)
"""It fills 223 of the 226 tokens, one a character. With `PROMPT` 179 of them are the same, padding."""
STEPS = 2
LIMIT_BYTES = 9 << 28
SHARD_BYTES = 1 << 30
STAGES = ("fp32", "bf16", "fp16", "plan", "fp16 by plan", "certify", "fp16 by certificate",
          "certify, fp32 residual", "fp16 by certificate, fp32 residual")  # fmt: skip
AUTO, OLD = "certify, fp32 residual", "plan"
"""Stages that make plans: as `auto` does, and from a run in fp32."""
ENTRY, GROWTH = 14, 5.7
"""Exponents of two: of the residual stream where it begins, and by how much it grows to the end."""
LOUD_ROWS, LOUDNESS = 4, 8.0
_TINY_T5 = {**T5_XXL, "num_layers": 1, "d_ff": 64, "num_heads": 1}
_TINY_VAE = {
    "down_block_types": ["CogVideoXDownBlock3D"] * 4,
    "up_block_types": ["CogVideoXUpBlock3D"] * 4,
    "block_out_channels": [8, 8, 8, 8],
    "latent_channels": 16,
    "layers_per_block": 1,
    "norm_num_groups": 2,
}

_TINY_TRANSFORMER = {
    "num_attention_heads": 1,
    "num_layers": 1,
    "text_embed_dim": 4096,
    "use_rotary_positional_embeddings": True,
}
_TINY_PICTURE_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [8, 8, 8, 8],
    "norm_num_groups": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
_TINY_VIDEO_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "block_out_channels": [32, 32, 32, 32],
    "latent_channels": 4,
}
_TINY_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_Z_IMAGE = (
    "ZImagePipeline",
    {
        "tokenizer": (
            "transformers",
            "T5Tokenizer",
            {"chat_template": "{{ messages[0].content }}"},
        ),
        "text_encoder": ("transformers", "Qwen3Model", _TINY_QWEN3),
        "transformer": ("diffusers", "ZImageTransformer2DModel", {}),
        "vae": ("diffusers", "AutoencoderKL", _TINY_PICTURE_VAE),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    },
)
"""The transformer's configuration is its class's own (Tongyi-MAI/Z-Image-Turbo)."""
_TINY_WAN_VAE = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_TINY_LTX_VAE = {
    "block_out_channels": [8, 8, 8, 8],
    "layers_per_block": [1, 1, 1, 1, 1],
    "decoder_block_out_channels": [8, 8, 8, 8],
    "decoder_layers_per_block": [1, 1, 1, 1, 1],
}
_FLOW = ("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
_T5_TOKENIZER = ("transformers", "T5Tokenizer", {})
_WAN = (
    "WanPipeline",
    {
        "tokenizer": _T5_TOKENIZER,
        "text_encoder": (
            "transformers",
            "UMT5EncoderModel",
            {**_TINY_T5, "architectures": ["UMT5EncoderModel"], "model_type": "umt5"},
        ),
        "transformer": (
            "diffusers",
            "WanTransformer3DModel",
            {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        ),
        "vae": ("diffusers", "AutoencoderKLWan", _TINY_WAN_VAE),
        "scheduler": _FLOW,
    },
)
_LTX = (
    "LTXPipeline",
    {
        "tokenizer": _T5_TOKENIZER,
        "text_encoder": ("transformers", "T5EncoderModel", _TINY_T5),
        "transformer": ("diffusers", "LTXVideoTransformer3DModel", {}),
        "vae": ("diffusers", "AutoencoderKLLTXVideo", _TINY_LTX_VAE),
        "scheduler": (
            "diffusers",
            "FlowMatchEulerDiscreteScheduler",
            {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05},
        ),
    },
)
_QWEN_IMAGE = (
    "QwenImagePipeline",
    {
        "tokenizer": _T5_TOKENIZER,
        "text_encoder": (
            "transformers",
            "Qwen3Model",
            {**_TINY_QWEN3, "hidden_size": 3584, "vocab_size": 32768},
        ),
        "transformer": ("diffusers", "QwenImageTransformer2DModel", {}),
        "vae": (
            "diffusers",
            "AutoencoderKLQwenImage",
            {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        ),
        "scheduler": (
            "diffusers",
            "FlowMatchEulerDiscreteScheduler",
            {"use_dynamic_shifting": True},
        ),
    },
)
_FLUX = (
    "FluxPipeline",
    {
        "tokenizer": ("transformers", "CLIPTokenizer", {}),
        "tokenizer_2": _T5_TOKENIZER,
        "text_encoder": (
            "transformers",
            "CLIPTextModel",
            {"hidden_size": 768, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 90,
             "num_attention_heads": 12, "bos_token_id": 88, "eos_token_id": 89},
        ),
        "text_encoder_2": ("transformers", "T5EncoderModel", _TINY_T5),
        "transformer": ("diffusers", "FluxTransformer2DModel", {"guidance_embeds": True}),
        "vae": ("diffusers", "AutoencoderKL", _TINY_PICTURE_VAE),
        "scheduler": (
            "diffusers",
            "FlowMatchEulerDiscreteScheduler",
            {"use_dynamic_shifting": True},
        ),
    },
)  # fmt: skip
"""The transformers' configurations are their classes' own, as published (Lightricks/LTX-Video,
Qwen/Qwen-Image, black-forest-labs/FLUX.1-dev); that of Wan is Wan-AI/Wan2.1-T2V-1.3B-Diffusers."""
_TINY_TEXT = {"intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 90,
              "bos_token_id": 88, "eos_token_id": 89}  # fmt: skip
_SDXL = (
    "StableDiffusionXLPipeline",
    {
        "tokenizer": ("transformers", "CLIPTokenizer", {}),
        "tokenizer_2": ("transformers", "CLIPTokenizer", {}),
        "text_encoder": (
            "transformers",
            "CLIPTextModel",
            {**_TINY_TEXT, "hidden_size": 768, "num_attention_heads": 12},
        ),
        "text_encoder_2": (
            "transformers",
            "CLIPTextModelWithProjection",
            {**_TINY_TEXT, "hidden_size": 1280, "num_attention_heads": 20, "projection_dim": 1280},
        ),
        "unet": (
            "diffusers",
            "UNet2DConditionModel",
            {"sample_size": 128, "block_out_channels": [320, 640, 1280],
             "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
             "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
             "attention_head_dim": [5, 10, 20], "transformer_layers_per_block": [1, 2, 10],
             "cross_attention_dim": 2048, "use_linear_projection": True,
             "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
             "projection_class_embeddings_input_dim": 2816},
        ),
        "vae": (
            "diffusers",
            "AutoencoderKL",
            {"down_block_types": ["DownEncoderBlock2D"] * 4,
             "up_block_types": ["UpDecoderBlock2D"] * 4, "block_out_channels": [128, 256, 512, 512],
             "layers_per_block": 2, "latent_channels": 4, "sample_size": 1024,
             "scaling_factor": 0.13025, "force_upcast": True},
        ),
        "scheduler": (
            "diffusers",
            "EulerDiscreteScheduler",
            {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"},
        ),
    },
)  # fmt: skip
"""As published (stabilityai/stable-diffusion-xl-base-1.0), but for the text encoders' depth."""
_TINY_SDXL_UNET = {
    "sample_size": 128, "block_out_channels": [32, 32], "norm_num_groups": 2,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "attention_head_dim": [1, 1],
    "layers_per_block": 1, "cross_attention_dim": 2048, "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
_TINY_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "projection_dim": 1024,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        base: its configurations in `BASES`.
        component: that has its full size.
        others: configuration of the components that are made tiny.
        changed: entries of the component's configuration that are not those of `base`.
        request: fields of the request.
        is_healthy: whether weights are drawn so that nothing overflows in fp16.
        limit_bytes: memory for a run.
    """

    base: str
    component: str
    others: dict[str, dict[str, Any]]
    changed: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    is_healthy: bool = False
    limit_bytes: int = LIMIT_BYTES


BASES = {
    **MODELS,
    "Z-Image": _Z_IMAGE,
    "Wan-1.3B": _WAN,
    "LTX-Video": _LTX,
    "Qwen-Image": _QWEN_IMAGE,
    "Flux": _FLUX,
    "SDXL": _SDXL,
}
_VIDEO = {"frames": 9, "height": 64, "width": 64, "prompt": PROMPT, "guidance": 1.0}
_LARGE_PICTURE = {"height": 1024, "width": 1024, "prompt": PROMPT, "guidance": 1.0}
_PICTURE = {"height": 64, "width": 64, "prompt": PROMPT, "guidance": 1.0}
_TINY_COGVIDEOX = {"text_encoder": _TINY_T5, "vae": _TINY_VAE}
_T5 = Case(
    "CogVideoX-5B",
    "text_encoder",
    {"transformer": _TINY_TRANSFORMER, "vae": _TINY_VAE},
    {},
    _VIDEO,
)
CASES = {
    "CogVideoX-2B": Case(
        "CogVideoX-5B",
        "transformer",
        _TINY_COGVIDEOX,
        {"num_attention_heads": 30, "num_layers": 30, "use_rotary_positional_embeddings": False},
        _VIDEO,
    ),
    "CogVideoX-5B": Case("CogVideoX-5B", "transformer", _TINY_COGVIDEOX, {}, _VIDEO),
    "T5-XXL": _T5,
    "T5-XXL, long prompt": replace(_T5, request={**_VIDEO, "prompt": LONG_PROMPT}),
    "CogView3-Plus-3B": Case(
        "CogView3-Plus-3B",
        "transformer",
        {"text_encoder": _TINY_T5, "vae": _TINY_PICTURE_VAE},
        {},
        _PICTURE,
    ),
    "SVD-XT": Case(
        "SVD-XT",
        "unet",
        {"image_encoder": _TINY_CLIP, "vae": _TINY_VIDEO_VAE},
        {},
        {"frames": 2, "height": 128, "width": 128, "picture": True, "guidance": 1.0},
    ),
    "Z-Image": Case("Z-Image", "transformer", {}, {}, _PICTURE),
    "Wan-1.3B": Case("Wan-1.3B", "transformer", {}, {}, _VIDEO),
    "LTX-Video": Case("LTX-Video", "transformer", {}, {}, _VIDEO),
    "Qwen-Image, 2 of 60 blocks": Case(
        "Qwen-Image", "transformer", {}, {"num_layers": 2}, _PICTURE
    ),
    "Flux, 1 of 19 and 3 of 38 blocks": Case(
        "Flux", "transformer", {}, {"num_layers": 1, "num_single_layers": 3}, _PICTURE
    ),
    "SDXL, healthy": Case(
        "SDXL",
        "unet",
        {"vae": {**_TINY_PICTURE_VAE, "latent_channels": 4}},
        {},
        _LARGE_PICTURE,
        is_healthy=True,
        limit_bytes=6 << 30,
    ),
    "SDXL's autoencoder": Case(
        "SDXL", "vae", {"unet": _TINY_SDXL_UNET}, {}, _LARGE_PICTURE, limit_bytes=12 << 30
    ),
}
"""Which of them were run stands in the results. Models whose weights in fp32 are larger than 24 GiB, and of
which no row is whole, are cut in depth."""


def write_folder(name: str, folder: Path) -> int:
    """Write a checkpoint with drawn weights; bytes of its large component."""
    case = CASES[name]
    pipeline, parts = BASES[case.base]
    folder.mkdir(parents=True)
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": "0.42.1"}
    written = 0
    for part, (library, kind, config) in parts.items():
        index[part] = [library, kind]
        config = case.others.get(part, config)
        config = {**config, **(case.changed if part == case.component else {})}
        size = _write_part(
            folder / part,
            library,
            kind,
            config,
            is_large=part == case.component and not case.is_healthy,
        )
        written += size if part == case.component else 0
    (folder / "model_index.json").write_text(json.dumps(index))
    return written


def _write_part(
    folder: Path,
    library: str,
    kind: str,
    config: dict[str, Any],
    *,
    is_large: bool,
    device: str = "cpu",
) -> int:
    import diffusers
    import transformers

    from stopdown.pipelines.tiny_pipelines import make_clip_tokenizer, make_t5_tokenizer

    made = getattr(diffusers if library == "diffusers" else transformers, kind)
    folder.mkdir()
    if kind == "T5Tokenizer":
        tokenizer = make_t5_tokenizer()
        tokenizer.chat_template = config.get("chat_template")
        tokenizer.save_pretrained(folder)
        return 0
    if kind == "CLIPTokenizer":
        make_clip_tokenizer().save_pretrained(folder)
        return 0
    if kind.endswith("Scheduler"):
        made(**{k: v for k, v in config.items() if not k.startswith("_")}).save_pretrained(folder)
        return 0
    if kind.endswith("ImageProcessor"):
        made().save_pretrained(folder)
        return 0
    with torch.device("meta"):
        if library == "transformers":
            full = made.config_class(**{k: v for k, v in config.items() if k != "model_type"})
            full.save_pretrained(folder)
            module, stem = made(full), "model"
        else:
            module, stem = made(**config), "diffusion_pytorch_model"
            module.save_config(folder)
    return _write_weights(module, folder, stem, Draw(module, is_large=is_large, device=device))


def _write_weights(module: torch.nn.Module, folder: Path, stem: str, draw: Draw) -> int:
    """Shards of at most about `SHARD_BYTES` and their index."""
    from safetensors.torch import save_file

    groups, held = [dict[str, torch.Size]()], 0
    for name, parameter in module.named_parameters():
        if held > SHARD_BYTES:
            groups.append({})
            held = 0
        groups[-1][name] = parameter.shape
        held += 2 * parameter.numel()
    files: dict[str, str] = {}
    for number, group in enumerate(groups):
        file = f"{stem}-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        tensors = {name: draw(name, shape) for name, shape in group.items()}
        if number == 0:  # an autoencoder's means are 0 and its deviations 1
            kept = module.state_dict().keys()
            for name, buffer in module.named_buffers():
                if name in kept:
                    make = torch.ones if name.endswith("std") else torch.zeros
                    tensors[name] = make(buffer.shape)
            group.update((name, x.shape) for name, x in tensors.items())
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(group, file))
    total = sum(2 * parameter.numel() for parameter in module.parameters())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return total


class Draw:
    """Weights in bf16 as of a trained model, roughly, and as large as users reported."""

    def __init__(self, module: torch.nn.Module, *, is_large: bool, device: str = "cpu") -> None:
        from stopdown.pipelines.tiny_pipelines import read_streams

        self._stream = read_streams().get(type(module).__name__) if is_large else None
        self._is_t5 = type(module).__name__ == "T5EncoderModel"
        self._generator = torch.Generator(device).manual_seed(0)
        numbers = [_number(name) for name, _ in module.named_parameters()]
        self._blocks = 1 + max(numbers, default=0)

    def __call__(self, name: str, shape: torch.Size) -> torch.Tensor:
        made, device = self._generator, self._generator.device
        tensor = torch.empty(shape, dtype=torch.float32, device=device)
        if len(shape) > 1:
            tensor.normal_(0, math.prod(shape[1:]) ** -0.5, generator=made)
            rows = torch.randn(shape[0], generator=made, device=device).mul_(0.5).sub_(0.125).exp_()
            tensor *= rows.view(-1, *[1] * (len(shape) - 1))
        else:
            tensor.normal_(0, 0.05, generator=made)
            tensor += 0.0 if name.endswith("bias") else 1.0
        return self._enlarge(name, tensor).bfloat16()

    def _enlarge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        path = name.rpartition(".")[0]
        if self._stream is None:
            return tensor
        if self._is_t5:
            return tensor * _T5_SIZES.get(path.rpartition(".")[2], 1.0)
        is_writer = re.fullmatch(self._stream.writers, path)
        carries = re.fullmatch(self._stream.carriers, path) and name.endswith("bias")
        if not (is_writer or carries or re.fullmatch(self._stream.buffers, name)):
            return tensor
        tensor[:LOUD_ROWS] *= LOUDNESS
        depth = _number(name) / max(1, self._blocks - 1)
        return tensor * 2.0 ** round(ENTRY + GROWTH * depth)


_T5_SIZES = {"q": 0.125, "layer_norm": 4.0, "wi_0": 8.0, "wi_1": 16.0, "wo": 8.0, "o": 32.0}
"""Of layers of T5's encoder: gated products of 1e5 (`wo` itself is kept in fp32 by Transformers), outputs
of `wo` of 3e5 and a stream that grows to 1e6."""


def _number(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0


def make_request(name: str) -> Any:
    from stopdown.pipelines.requests import Request

    fields = dict(CASES[name].request)
    if fields.pop("picture", False):
        shape = (fields["height"], fields["width"], 3)
        fields["image"] = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    output = "pt" if CASES[name].component == "vae" else "latent"
    return Request(steps=STEPS, arguments={"output_type": output}, **fields)


class Watch:
    """Peak of this process's memory that is no mapped file, read every 20 ms."""

    def __init__(self) -> None:
        self.peak = _read_anonymous()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ended.wait(0.02):
            self.peak = max(self.peak, _read_anonymous())

    def restart(self) -> int:
        """The peak so far; a new one begins."""
        before, self.peak = max(self.peak, _read_anonymous()), _read_anonymous()
        return before


def _read_anonymous() -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


@dataclass
class Calls:
    """What goes into the component and comes out, and fp32's arguments for its first call."""

    given: Any = None
    first: Any = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    elapsed_s: list[float] = field(default_factory=list)

    @contextmanager
    def following(self, pipe: Any, component: str) -> Iterator[None]:
        """While it is on, the component's calls are kept."""
        from stopdown.component_calls.components import find_callees
        from stopdown.interception.patches import Patches
        from stopdown.module_calls.call_interception import Rank, intercept

        with Patches() as patches:
            for callee in find_callees(pipe):
                if callee.component_name == component:
                    intercept(callee, self._follow, patches, Rank.RECORD)
            yield

    def _follow(self, call: Any) -> Any:
        args, kwargs = call.args, call.kwargs
        from torch.utils import _pytree as pytree

        from stopdown.numerics import iterate_tensors

        if not self.outputs and self.given is not None:
            dtypes = [x.dtype if isinstance(x, torch.Tensor) else None
                      for x in pytree.tree_leaves((args, kwargs))]  # fmt: skip
            leaves, spec = pytree.tree_flatten(self.given)
            cast = [x if dtype is None else x.to(dtype)
                    for x, dtype in zip(leaves, dtypes, strict=True)]  # fmt: skip
            args, kwargs = pytree.tree_unflatten(cast, spec)
        if not self.outputs:
            self.first = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        begun = time.perf_counter()
        output = replace(call, args=args, kwargs=kwargs).proceed()
        self.elapsed_s.append(round(time.perf_counter() - begun, 1))
        self.outputs.append(next(iterate_tensors(output)).detach().float())
        return output


def run_stage(name: str, stage: str, folder: Path) -> dict[str, Any]:
    """Load as the stage says, sample, and compare with what fp32 gave."""
    from stopdown.devices.device_choice import choose_device
    from stopdown.memory.offloader import make_offloader, predict_run
    from stopdown.pipelines.class_selection import select_pipeline
    from stopdown.pipelines.requests import build_arguments
    from stopdown.plans.plan_choice import choose_plan
    from stopdown.plans.planned_loader import load_plan
    from stopdown.plans.precision import PLAIN_FP16
    from stopdown.records import MemoryPlan
    from stopdown.sources.source_checks import verify_source
    from stopdown.sources.sources import resolve_source

    watch, request, device = Watch(), make_request(name), choose_device("cpu")
    source = resolve_source(folder / "model")
    verify_source(source)
    source = select_pipeline(source, request)
    precision = {**{x: str(name_plan(folder, x)) for x in _MADE_BY}, "fp16": PLAIN_FP16}.get(
        stage, stage
    )
    begun = time.perf_counter()
    plan = choose_plan(source, precision, device, memory=MemoryPlan(), request=request)
    loaded = load_plan(source, plan, device)
    load_s, load_peak = time.perf_counter() - begun, watch.restart()
    pipe, arguments = loaded.pipe, build_arguments(loaded.pipe, request)
    pipe.set_progress_bar_config(disable=True)
    with wide(stage):  # its copies in fp32 count
        fit = predict_run(pipe, arguments, steps=STEPS, fused=True)
    offloader = make_offloader(pipe, fit, CASES[name].limit_bytes, store=folder)
    calls, reference = Calls(), folder / "fp32.pt"
    stored = torch.load(reference, weights_only=False) if stage != "fp32" else None
    calls.given = None if stored is None else stored["first"]
    with offloader, calls.following(pipe, CASES[name].component), torch.no_grad(), wide(stage):
        watch.restart()
        base = watch.peak - owned(pipe)
        begun = time.perf_counter()
        latents = read_latents(pipe(**arguments))
        elapsed_s, peak = time.perf_counter() - begun, watch.restart()
    kept = {"first": calls.first, "outputs": calls.outputs, "latents": latents}
    if stage == "fp32":
        torch.save(kept, reference)
    row = {
        "load_s": load_s, "load_peak_bytes": load_peak, "strategy": offloader.taken.strategy.name,
        "predicted_bytes": offloader.taken.peak_bytes, "measured_bytes": peak - base,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "calls_s": calls.elapsed_s, "elapsed_s": elapsed_s, "cpu_s": time.process_time(),
    }  # fmt: skip
    return row | (compare(kept, stored) if stored is not None else describe(kept))


_MADE_BY = {
    "fp16 by plan": "plan",
    "fp16 by certificate": "certify",
    "fp16 by certificate, fp32 residual": "certify, fp32 residual",
}
"""Stages that rest on a plan, and the stage that makes it."""


def name_plan(folder: Path, stage: str) -> Path:
    """The file of the plan that a stage rests on."""
    return folder / f"{_MADE_BY[stage]}.json"


def wide(stage: str) -> Any:
    """Products of fp16 summed in fp32, where the format is fp16."""
    from stopdown.scaling.trials.trial import WideProducts

    return WideProducts() if stage.startswith("fp16") else nullcontext()


def owned(pipe: Any) -> int:
    """Bytes of parameters and buffers that stay while the pipeline runs."""
    from stopdown.component_calls.components import find_components

    modules = find_components(pipe).values()
    tensors = [x for m in modules for x in (*m.parameters(), *m.buffers())]
    return sum({id(s): s.nbytes() for x in tensors if (s := x.untyped_storage())}.values())


def read_latents(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else next(iter(result.values()))
    return found.detach().float()


def compare(kept: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Relative 2-norm errors of the first call and of the latents."""
    from stopdown.numerics import relative_l2

    first, latents = kept["outputs"][0], kept["latents"]
    finite = bool(latents.isfinite().all())
    return {
        "non_finite": int((~first.isfinite()).sum()), "values": first.numel(),
        "call_error": relative_l2(first, stored["outputs"][0]) if first.isfinite().all() else None,
        "latents_error": relative_l2(latents, stored["latents"]) if finite else None,
    }  # fmt: skip


def describe(kept: dict[str, Any]) -> dict[str, Any]:
    return {"output_rms": float(kept["outputs"][0].square().mean().sqrt()),
            "latents_rms": float(kept["latents"].square().mean().sqrt())}  # fmt: skip


def plan_stage(name: str, stage: str, folder: Path) -> dict[str, Any]:
    """Make a plan by measuring or from the weights alone."""
    from models.measured_plans import measure_pipeline
    from stopdown.devices.device_choice import choose_device
    from stopdown.plans.certified import certify_plan
    from stopdown.plans.plan_choice import find_or_certify
    from stopdown.plans.plan_files import write_plan
    from stopdown.sources.sources import resolve_source

    watch, source = Watch(), str(folder / "model")
    stages: dict[str, float] = {}
    begun = time.perf_counter()

    def follow(what: str, which: str, done: int, total: int) -> None:
        stages.setdefault(
            f"{what} {which}" if what != "load" else what, time.perf_counter() - begun
        )

    request = make_request(name)
    prompts = () if request.prompt is None else (request.prompt,)
    case = CASES[name]
    kind = BASES[case.base][1][case.component][1]
    with counting_fp32_calls(kind) as calls:
        if stage == "plan":
            made = measure_pipeline(source, prompts=prompts, request=request, residual="native")
        elif stage == AUTO:
            shutil.rmtree(os.environ["STOPDOWN_CACHE"], ignore_errors=True)
            device = choose_device("cpu")
            made = find_or_certify(resolve_source(source), device, request=request, progress=follow)
        else:
            made = certify_plan(source, request=request, progress=follow)
    elapsed_s = time.perf_counter() - begun
    write_plan(made, folder / f"{stage}.json")
    entry = next(x for x in made.components if x.component == CASES[name].component)
    exponents = entry.in_force.exponents.values()
    return {
        "fp32_calls": len(calls),
        "elapsed_s": elapsed_s, "cpu_s": time.process_time(),
        "peak_bytes": watch.restart(), "precision": entry.precision,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "headroom_bits": entry.in_force.headroom_bits, "folds": len(exponents),
        "exponents": [min(exponents, default=0), max(exponents, default=0)],
        "multiplies": len(entry.in_force.multiplies),
        "fp32_modules": list(entry.in_force.fp32_modules), "certified": entry.in_force.certified,
        "bounded": entry.in_force.bounded, "values": entry.in_force.values,
        "measured_bits": entry.in_force.measured_bits,
        "reasons": entry.reasons, "stages_s": stages,
    }  # fmt: skip


@contextmanager
def counting_fp32_calls(kind: str) -> Iterator[list[str]]:
    """Note each call of a module of a class whose matrices are all in fp32, and real."""
    from torch._subclasses.fake_tensor import FakeTensor

    found: list[str] = []

    def count(module: torch.nn.Module, _: Any) -> None:
        if type(module).__name__ != kind:
            return
        weights = [x for x in module.parameters() if x.dim() > 1]
        is_real = not any(isinstance(x, FakeTensor) or x.is_meta for x in weights)
        if is_real and all(x.dtype == torch.float32 for x in weights):
            found.append(kind)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield found
    finally:
        hook.remove()


def weights_stage(name: str, stage: str, folder: Path) -> dict[str, Any]:
    """Write the folder."""
    begun = time.perf_counter()
    return {"bytes": write_folder(name, folder / "model"), "elapsed_s": time.perf_counter() - begun}


_MAKERS = {
    **dict.fromkeys(_MADE_BY.values(), plan_stage),
    "weights": weights_stage,
}


def run_all(name: str, stages: list[str], folder: Path) -> None:
    for stage in (*(() if (folder / "model").exists() else ("weights",)), *stages):
        command = [sys.executable, __file__, name, "--one", stage, "--folder", str(folder)]
        environment = {**os.environ, "STOPDOWN_CACHE": str(folder / "cache")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            row = {"failure": f"exit {done.returncode}: {done.stderr.strip()[-600:]}"}
        else:
            row = json.loads(done.stdout.strip().splitlines()[-1])
        print(name, stage, json.dumps(row)[:1500], flush=True)
        store(name, stage, row)


def store(name: str, stage: str, row: dict[str, Any]) -> None:
    path = RESULTS / "full_size_runs.json"
    report = json.loads(path.read_text()) if path.is_file() else {"rows": {}}
    rows = report["rows"]
    rows.setdefault(name, {})[stage] = row
    for later in [later for later, made_by in _MADE_BY.items() if made_by == stage]:
        rows[name].pop(later, None)  # of the plan before
    names = (shlex.quote(x) for x in rows)
    command = "; ".join(f"python benchmarks/full_size_runs.py {x}" for x in names)
    report = {"command": command, "machine": describe_machine(), "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")
    write_tables(report)


def write_tables(report: dict[str, Any]) -> None:
    """One table of runs and one of plans for each checkpoint."""
    machine = report["machine"]
    lines = [
        "# Checkpoints of full size, run",
        "",
        f"`{report['command']}` on {machine['cpu']}, {machine['cores']} cores, one or two threads,",
        "beside other work: seconds say little. Every layer of the named component has its full width,",
        "weights are drawn and stored in bf16, the other components are tiny. Two steps, no guidance:",
        "CogVideoX, T5, Wan and LTX for nine frames of 64 x 64 pixels, SVD-XT for two frames of 128 x 128,",
        f"the others for a picture of 64 x 64, all within {LIMIT_BYTES / 2**30:g} GiB. SDXL's are for a",
        "picture of 1024 x 1024 within 6 GiB, and with *healthy* in its name nothing overflows in fp16.",
        "Where a name has",
        "a number of blocks, the others were left out; the stream grows as much in these as in all.",
        "*call*: relative error of one call of the component with fp32's arguments; *latents*: of two",
        "steps. Peaks are those of a run; *loading* is its own. Linears and",
        "convolutions of fp16 are summed in fp32 and rounded once, attention is PyTorch's own.",
        "",
        *summarise(report["rows"]),
    ]
    for name, rows in report["rows"].items():
        size = (
            f"{rows['weights']['bytes'] / 1e9:.1f} GB of weights in bf16"
            if "weights" in rows
            else ""
        )
        runs = [format_run(stage, row) for stage, row in rows.items() if "calls_s" in row]
        plans = [
            format_plan(stage, row)
            for stage, row in rows.items()
            if row.get("headroom_bits") is not None
        ]
        failed = [
            f"{stage}: {row['failure'][-200:]}" for stage, row in rows.items() if "failure" in row
        ]
        lines += [f"## {name}", "", *([size, ""] if size else [])]
        lines += [
            "| run | call | latents | strategy | predicted | measured | loading | seconds a call |",
            "|---|--:|--:|---|--:|--:|--:|--:|",
            *runs,
            "",
        ]
        if plans:
            lines += [
                "| plan | seconds | peak memory | headroom | folds | exponents | fp32 modules | values |",
                "|---|--:|--:|--:|--:|---|---|---|",
                *plans,
                "",
            ]
        lines += [*failed, ""] if failed else []
    (RESULTS / "full_size_runs.md").write_text("\n".join(lines))


def summarise(rows: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """What `auto` does beside bf16 and the plan that a run in fp32 gives: errors of one call."""
    lines = [
        "`auto` takes a certificate with an fp32 residual; *certified*: of its fp16 values.",
        "*whole calls in fp32*: of the component, while `auto` made the plan.",
        "",
        "| checkpoint | bf16 | auto | bf16 : auto | certified | measured in fp32 | whole calls in fp32 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        bf16, auto, old = (
            row.get(x, {}).get("call_error")
            for x in (
                "bf16",
                f"fp16 by {AUTO}".replace("certify", "certificate"),
                "fp16 by plan",
            )
        )
        made_by = row.get(AUTO, {})
        calls = str(made_by.get("fp32_calls", ""))
        ratio = f"{bf16 / auto:.1f}" if bf16 and auto else ""
        errors = ["" if x is None else f"{100 * x:.3g} %" for x in (bf16, auto, old)]
        share = (
            f"{100 * made_by['bounded'] / made_by['values']:.3g} %" if made_by.get("values") else ""
        )
        cells = [name, *errors[:2], ratio, share, errors[2], calls]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def format_run(stage: str, row: dict[str, Any]) -> str:
    errors = ["", ""]
    if "values" in row:
        found = (row["call_error"], row["latents_error"])
        errors = ["not finite" if x is None else f"{100 * x:.3g} %" for x in found]
        if row["non_finite"]:
            errors[0] = f"{100 * row['non_finite'] / row['values']:.0f} % NaN or Inf"
    sizes = (row["predicted_bytes"], row["measured_bytes"], row["load_peak_bytes"])
    cells = [stage, *errors, row["strategy"], *(f"{x / 2**30:.2f} GiB" for x in sizes),
             f"{min(row['calls_s']):.0f}"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def format_plan(stage: str, row: dict[str, Any]) -> str:
    modules = row["fp32_modules"]
    values = f"{row['bounded']} of {row['values']} certified" if row["values"] else "measured"
    if row["values"] and row.get("measured_bits") is not None:
        values += f", the others measured with {row['measured_bits']:.1f} bits of headroom"
    names = {
        OLD: "measured in fp32",
    }
    name = names.get(stage, stage.replace("certify", "certificate"))
    cells = [
        name, f"{row['elapsed_s']:.0f}",
        f"{row['peak_bytes'] / 2**30:.2f} GiB", f"{row['headroom_bits']:.1f} bits", str(row["folds"]),
        f"{row['exponents'][0]}..{row['exponents'][1]}", ", ".join(modules) or "none", values,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", choices=list(CASES))
    parser.add_argument("--stages", nargs="*", default=STAGES, choices=STAGES)
    parser.add_argument("--folder", type=Path, help="keep the weights here")
    parser.add_argument("--one", choices=("weights", *STAGES), help="one stage, in this process")
    options = parser.parse_args()
    if options.one:
        make = _MAKERS.get(options.one, run_stage)
        print(json.dumps(make(options.name, options.one, options.folder)))
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="full-size-"))
    try:
        run_all(options.name, list(options.stages), folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()

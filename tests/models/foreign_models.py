"""Tiny models of programs that are no Diffusers pipelines, of their own classes, with inputs.

The classes come from checkouts that environment variables name (`VARIABLES`); nothing of them is in
this repository. Two of the programs have a package of the same name, `sgm`: one program a process.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from models.rescaling_models import Call, randomise

VARIABLES = {
    "ComfyUI": ("STOPDOWN_COMFYUI",),
    "generative-models": ("STOPDOWN_SGM",),
    "imaginAIry": ("STOPDOWN_IMAGINAIRY",),
    "CogVideo": ("STOPDOWN_COGVIDEO",),
    "CogVideo SAT": ("STOPDOWN_SAT", "STOPDOWN_COGVIDEO"),
}
"""Program to the variables that name the checkouts of its code."""

WAYS = {
    "residual": r"to_out\.0|attn\.proj|attention\.dense|dense_4h_to_h|\.o\.|\.wo\.|out_proj|fc2|o_proj"
    r"|down_proj|out_layers\.3|conv2|img_mlp\.2|txt_mlp\.2|mlp\.2|linear2|ffn\.2|net\.2|\.w2\."
    r"|attention\.out|\.\d+\.proj_out|proj_x|proj_y|w1o|w2o|mlpX\.c_proj|mlpC\.c_proj|ff_out|attn\d\.out|\d\.o_proj|residual\.6",
    "feed-forward": r"mlp\.0|mlp_0|\.w1\.|\.w3\.|\.wi|fc1|gate_proj|up_proj|net\.0\.proj|ffn\.0"
    r"|linear1|dense_h_to_4h|ff_proj|c_fc|ff_in|ff\.proj_in",
    "attention": r"to_v|\.v\.|v_proj|qkv|query_key_value|to_kv|w1v|w2v",
    "feature maps": r"conv1|conv2|nin_shortcut|conv_shortcut|conv_in|time_stack|time_mix_conv|upsample"
    r"|downsample|residual\.[26]|in_layers\.2|out_layers\.3",
}
"""Name of a way to overflow to the weights that it scales."""


@dataclass(frozen=True)
class Foreign:
    """A tiny model of a program.

    Attributes:
        program: key of `VARIABLES`.
        build: makes it, once the program can be imported.
        calls: its calls, given the model.
        ways: keys of `WAYS`.
    """

    program: str
    build: Callable[[], nn.Module]
    calls: Callable[[Any], list[Call]]
    ways: tuple[str, ...] = ("residual", "feed-forward", "attention")


def find_missing(program: str) -> list[str]:
    """The variables of a program that name no folder."""
    return [x for x in VARIABLES[program] if not Path(os.environ.get(x, "/nowhere")).is_dir()]


def open_program(program: str) -> None:
    """Let a program's code be imported in this process."""
    folders = [os.environ[x] for x in VARIABLES[program]]
    for folder in (f"{folders[1]}/sat", folders[0]) if len(folders) > 1 else folders:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if program == "ComfyUI":
        options = importlib.import_module("comfy.cli_args").args
        options.cpu = options.use_pytorch_cross_attention = True
    if program in ("generative-models", "CogVideo SAT"):
        _open_package("sgm", Path(sys.path[0] if program == "generative-models" else sys.path[1]))
    if program == "CogVideo SAT":
        rotary = types.ModuleType("sat.model.position_embedding.triton_rotary")
        rotary.apply_rotary = None  # type: ignore[attr-defined]  # for devices with Triton
        sys.modules[rotary.__name__] = rotary
        _join_alone()


def _join_alone() -> None:
    """CogVideo's first stage asks for its rank among those that share a video: one alone."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        _load("sgm.util.initialize_context_parallel")(1)


def _open_package(name: str, folder: Path) -> None:
    """`sgm` without what its packages import of training: their modules are imported one by one."""
    for part in (name, f"{name}.modules", f"{name}.models"):
        package = types.ModuleType(part)
        package.__path__ = [str(folder / part.replace(".", "/"))]
        sys.modules.setdefault(part, package)


def make_foreign(name: str, seed: int = 0) -> tuple[nn.Module, list[Call]]:
    """A model of the table with random weights, and its calls."""
    example = EXAMPLES[name]
    open_program(example.program)
    torch.manual_seed(seed)
    with mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor):
        module = example.build().eval().requires_grad_(False)
    _fill(module)
    return module, example.calls(module)


def _fill(module: nn.Module) -> None:
    """Weights as `randomise` makes them, from zeros: ComfyUI leaves them as memory was."""
    for name, parameter in module.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        parameter.data.fill_(float(is_norm))
    for name, buffer in module.named_buffers():
        if name.endswith("pos_embed"):
            buffer.data.normal_()
    randomise(module)


def _load(name: str) -> Any:
    """`package.module.Class`, imported."""
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def _class(name: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: _load(name)(**config)


def _comfy(name: str, **config: Any) -> Callable[[], nn.Module]:
    """A model of ComfyUI as it is built where weights are in the format of the computation."""

    def build() -> nn.Module:
        operations = _load("comfy.ops.disable_weight_init")
        return _load(f"comfy.{name}")(
            dtype=torch.float32, device="cpu", operations=operations, **config
        )

    return build


def _comfy_text(name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        operations = _load("comfy.ops.disable_weight_init")
        return _load(f"comfy.text_encoders.{name}")(config, torch.float32, "cpu", operations)

    return build


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in names}


def _call(*args: Any, **kwargs: Any) -> Callable[[nn.Module], list[Call]]:
    """One call of a module with these arguments, made afresh by functions."""

    def calls(module: nn.Module) -> list[Call]:
        made = tuple(x() if callable(x) else x for x in args)
        named = {k: v() if callable(v) else v for k, v in kwargs.items()}
        return [(module, made, named)]

    return calls


def _random(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def _times(*values: float) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(values)


def _tokens(length: int = 7, vocabulary: int = 64) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(1, vocabulary, (1, length))


# Stability-AI's sgm and what imaginAIry made of it

_SGM_UNET: dict[str, Any] = {
    "in_channels": 8,
    "model_channels": 32,
    "out_channels": 4,
    "num_res_blocks": 1,
    "attention_resolutions": [1, 2],
    "channel_mult": [1, 2],
    "num_head_channels": 16,
    "use_linear_in_transformer": True,
    "transformer_depth": 1,
    "context_dim": 16,
    "adm_in_channels": 12,
    "num_classes": "sequential",
}
_SVD_UNET: dict[str, Any] = _SGM_UNET | {
    "spatial_transformer_attn_type": "softmax",
    "extra_ff_mix_layer": True,
    "use_spatial_context": True,
    "merge_strategy": "learned_with_images",
    "video_kernel_size": [3, 1, 1],
}
_SVD_CALL = _call(
    _random(3, 8, 8, 8),
    _times(0.3, 0.3, 0.3),
    _random(3, 1, 16),
    _random(3, 12),
    num_video_frames=3,
    image_only_indicator=lambda: torch.zeros(1, 3),
)
_SDXL_CALL = _call(_random(1, 8, 8, 8), _times(500.0), _random(1, 5, 16), _random(1, 12))
_SGM_VAE: dict[str, Any] = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 16,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
    "attn_type": "vanilla",
}
_MAPS = ("feature maps", "residual", "attention")


def _temporal_vae(package: str) -> Callable[[], nn.Module]:
    """Stable Video Diffusion's first stage, without the regularizer that draws noise."""

    def build() -> nn.Module:
        decoder = {
            "target": f"{package}.autoencoding.temporal_ae.VideoDecoder",
            "params": _SGM_VAE | {"video_kernel_size": [3, 1, 1], "time_mode": "conv-only"},
        }
        encoder = {"target": f"{package}.diffusionmodules.model.Encoder", "params": _SGM_VAE}
        where = f"{package.removesuffix('.modules')}.models" if package[0] == "s" else package
        regularizer = {"target": f"{package}.autoencoding.regularizers.DiagonalGaussianRegularizer"}
        return _load(f"{where}.autoencoder.AutoencodingEngine")(
            encoder_config=encoder,
            decoder_config=decoder,
            loss_config={"target": "torch.nn.Identity"},
            regularizer_config=regularizer | {"params": {"sample": False}},
        )

    return build


_SVD_VAE_CALLS = lambda module: [  # noqa: E731
    (module.encode, (torch.randn(3, 3, 16, 16),), {}),
    (module.decode, (torch.randn(3, 4, 8, 8),), {"timesteps": 3}),
]

# ComfyUI

_FLUX: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "vec_in_dim": 8,
    "context_in_dim": 16,
    "hidden_size": 32,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
_FLUX2: dict[str, Any] = _FLUX | {
    "vec_in_dim": None,
    "global_modulation": True,
    "mlp_silu_act": True,
    "qkv_bias": False,
    "ops_bias": False,
    "txt_ids_dims": [2],
}
_CHROMA: dict[str, Any] = _without(_FLUX, "guidance_embed") | {
    "in_channels": 16,
    "out_channels": 16,
    "in_dim": 64,
    "out_dim": 32,
    "hidden_dim": 32,
    "n_layers": 2,
    "vec_in_dim": 8,
}
_WAN: dict[str, Any] = {
    "text_len": 6,
    "in_dim": 4,
    "dim": 32,
    "ffn_dim": 64,
    "freq_dim": 32,
    "text_dim": 16,
    "out_dim": 4,
    "num_heads": 2,
    "num_layers": 2,
}
_VIDEO = (_random(1, 4, 2, 8, 8), _times(0.5), _random(1, 6, 16))
_COMFY_UNET: dict[str, Any] = {
    "image_size": 8,
    "in_channels": 4,
    "model_channels": 32,
    "out_channels": 4,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "num_head_channels": 16,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "transformer_depth": [0, 1],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 1, 1],
    "context_dim": 16,
    "adm_in_channels": 12,
    "num_classes": "sequential",
}
_COMFY_SVD: dict[str, Any] = _COMFY_UNET | {
    "in_channels": 8,
    "use_temporal_resblock": True,
    "use_temporal_attention": True,
    "extra_ff_mix_layer": True,
    "use_spatial_context": True,
    "merge_strategy": "learned_with_images",
    "video_kernel_size": [3, 1, 1],
}
_NEXT: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "multiple_of": 16,
    "ffn_dim_multiplier": 2.0,
    "qk_norm": True,
    "cap_feat_dim": 16,
    "axes_dims": [4, 6, 6],
    "axes_lens": [32, 32, 32],
}
_NEXT_CALL = _call(_random(1, 4, 8, 8), _times(0.5), _random(1, 6, 16), num_tokens=6)
_LLAMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_T5: dict[str, Any] = {
    "num_layers": 2,
    "d_model": 32,
    "d_kv": 16,
    "num_heads": 2,
    "d_ff": 48,
    "dense_act_fn": "gelu_pytorch_tanh",
    "is_gated_act": True,
    "model_type": "t5",
    "vocab_size": 64,
}
_CLIP: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_act": "quick_gelu",
    "max_position_embeddings": 77,
    "eos_token_id": 63,
}


def _text_call(module: Any) -> list[Call]:
    """As ComfyUI's `SDClipModel` calls its transformers: embeddings made before, in fp32."""
    tokens = torch.randint(1, 64, (1, 7))
    embeds = module.get_input_embeddings()(tokens)
    kwargs = {"embeds": embeds, "num_tokens": [7], "intermediate_output": -1}
    return [(module, (None,), {"attention_mask": None, "dtype": embeds.dtype, **kwargs})]


def _clip_call(module: Any) -> list[Call]:
    embeds = module.get_input_embeddings()(torch.randint(1, 64, (1, 77)))
    return [(module, (None,), {"embeds": embeds, "num_tokens": [77], "dtype": embeds.dtype})]


def _comfy_llama(name: str, config: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with mock.patch.object(_load(f"comfy.text_encoders.llama.{config}"), "head_dim", 16):
            module: Any = _comfy_text(f"llama.{name}", **_LLAMA)()
        module.model.config.head_dim = 16
        return module

    return build


def _comfy_vae(**more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = _without(_SGM_VAE, "attn_type")
        return _load("comfy.ldm.models.autoencoder.AutoencoderKL")(
            ddconfig=config, embed_dim=4, **more
        )

    return build


def _comfy_svd_vae() -> nn.Module:
    config = _without(_SGM_VAE, "attn_type")
    decoder = config | {"video_kernel_size": [3, 1, 1], "alpha": 0.0}
    where = "comfy.ldm.modules"
    return _load("comfy.ldm.models.autoencoder.AutoencodingEngine")(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{where}.diffusionmodules.model.Encoder", "params": config},
        decoder_config={"target": f"{where}.temporal_ae.VideoDecoder", "params": decoder},
    )


def _hunyuan_vae() -> nn.Module:
    config = _without(_SGM_VAE, "attn_type") | {"conv3d": True}
    config |= {"time_compress": 2}
    return _load("comfy.ldm.models.autoencoder.AutoencoderKL")(ddconfig=config, embed_dim=4)


def _picture(*latents: int, factor: int = 2) -> Callable[[Any], list[Call]]:
    *_, height, width = latents
    frames = latents[2:-2]
    sample = (latents[0], 3, *(2 * n - 1 for n in frames), factor * height, factor * width)

    def calls(module: Any) -> list[Call]:
        return [
            (module.encode, (torch.randn(sample),), {}),
            (module.decode, (torch.randn(latents),), {}),
        ]

    return calls


# CogVideo's SAT code


def _sat_dit() -> nn.Module:
    import argparse

    made = argparse.Namespace(
        checkpoint_activations=False,
        vocab_size=1,
        max_sequence_length=64,
        layernorm_order="pre",
        skip_init=False,
        model_parallel_size=1,
        is_decoder=False,
        mode="inference",
        use_gpu_initialization=False,
        device="cpu",
    )
    return _load("dit_video_concat.DiffusionTransformer")(
        transformer_args=made,
        time_embed_dim=16,
        elementwise_affine=True,
        num_frames=5,
        time_compressed_rate=4,
        latent_width=8,
        latent_height=8,
        num_layers=2,
        patch_size=[1, 2, 2],
        in_channels=4,
        out_channels=4,
        hidden_size=64,
        adm_in_channels=16,
        num_attention_heads=2,
        modules={
            "pos_embed_config": {
                "target": "dit_video_concat.Rotary3DPositionEmbeddingMixin",
                "params": {"hidden_size_head": 32, "text_length": 6},
            },
            "patch_embed_config": {
                "target": "dit_video_concat.ImagePatchEmbeddingMixin",
                "params": {"text_hidden_size": 16},
            },
            "adaln_layer_config": {
                "target": "dit_video_concat.AdaLNMixin",
                "params": {"qk_ln": True},
            },
            "final_layer_config": {"target": "dit_video_concat.FinalLayerMixin"},
        },
    )


def _sat_vae() -> nn.Module:
    config = _without(_SGM_VAE, "attn_type")
    where = "vae_modules.cp_enc_dec.ContextParallel"
    return _load("vae_modules.autoencoder.VideoAutoencoderInferenceWrapper")(
        cp_size=1,
        loss_config={"target": "torch.nn.Identity"},
        regularizer_config={
            "target": "vae_modules.regularizers.DiagonalGaussianRegularizer",
            "params": {"sample": False},
        },
        encoder_config={"target": f"{where}Encoder3D", "params": config | {"gather_norm": True}},
        decoder_config={"target": f"{where}Decoder3D", "params": config | {"gather_norm": False}},
    )


class FusedRMSNorm(nn.Module):
    """apex's `FusedRMSNorm` as T5 uses it: sums in fp32, the result in the dtype of the weight."""

    def __init__(self, shape: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self.elementwise_affine = (shape,), eps, True
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the dtype of its input: apex's kernel takes operands of mixed dtypes."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


def _fused_t5() -> nn.Module:
    """CogVideo's text encoder: Transformers' T5, whose norms apex replaces where it is installed."""
    from transformers import T5Config, T5EncoderModel
    from transformers.models.t5 import modeling_t5

    config = T5Config(
        d_model=32, d_ff=48, d_kv=16, num_heads=2, num_layers=2, vocab_size=64,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    with mock.patch.object(modeling_t5, "T5LayerNorm", FusedRMSNorm):
        return T5EncoderModel(config)


EXAMPLES: dict[str, Foreign] = {
    "sgm VideoUNet": Foreign(
        "generative-models",
        _class("sgm.modules.diffusionmodules.video_model.VideoUNet", **_SVD_UNET),
        _SVD_CALL,
    ),
    "sgm UNetModel": Foreign(
        "generative-models",
        _class("sgm.modules.diffusionmodules.openaimodel.UNetModel", **_SGM_UNET),
        _SDXL_CALL,
    ),
    "sgm AutoencodingEngine, temporal": Foreign(
        "generative-models", _temporal_vae("sgm.modules"), _SVD_VAE_CALLS, _MAPS
    ),
    "imaginAIry VideoUNet": Foreign(
        "imaginAIry",
        _class("imaginairy.modules.sgm.diffusionmodules.video_model.VideoUNet", **_SVD_UNET),
        _SVD_CALL,
    ),
    "imaginAIry AutoencodingEngine, temporal": Foreign(
        "imaginAIry", _temporal_vae("imaginairy.modules.sgm"), _SVD_VAE_CALLS, _MAPS
    ),
    "SAT DiffusionTransformer": Foreign(
        "CogVideo SAT",
        _sat_dit,
        _call(_random(1, 2, 4, 8, 8), _times(500.0), _random(1, 6, 16)),
    ),
    "SAT VideoAutoencoder": Foreign(
        "CogVideo SAT", _sat_vae, _picture(1, 4, 3, 4, 4), _MAPS[:2]
    ),
    "T5 under FusedRMSNorm": Foreign("CogVideo SAT", _fused_t5, _call(input_ids=_tokens())),
    "ComfyUI Flux": Foreign(
        "ComfyUI",
        _comfy("ldm.flux.model.Flux", **_FLUX),
        _call(_random(1, 4, 8, 8), _times(0.5), _random(1, 6, 16), _random(1, 8), _times(3.5)),
    ),
    "ComfyUI Flux 2": Foreign(
        "ComfyUI",
        _comfy("ldm.flux.model.Flux", **_FLUX2),
        _call(_random(1, 4, 8, 8), _times(0.5), _random(1, 6, 16), None, _times(3.5)),
    ),
    "ComfyUI Chroma": Foreign(
        "ComfyUI",
        _comfy("ldm.chroma.model.Chroma", **_CHROMA),
        _call(_random(1, 4, 8, 8), _times(0.5), _random(1, 6, 16), _times(0.0)),
    ),
    "ComfyUI Wan": Foreign("ComfyUI", _comfy("ldm.wan.model.WanModel", **_WAN), _call(*_VIDEO)),
    "ComfyUI Qwen-Image": Foreign(
        "ComfyUI",
        _comfy(
            "ldm.qwen_image.model.QwenImageTransformer2DModel",
            in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        _call(_random(1, 4, 1, 8, 8), _times(0.5), _random(1, 6, 16)),
    ),
    "ComfyUI Lumina 2": Foreign("ComfyUI", _comfy("ldm.lumina.model.NextDiT", **_NEXT), _NEXT_CALL),
    "ComfyUI Z-Image": Foreign(
        "ComfyUI",
        _comfy(
            "ldm.lumina.model.NextDiT", z_image_modulation=True, pad_tokens_multiple=8,
            time_scale=1000.0, **(_NEXT | {"dim": 256, "n_heads": 16, "n_kv_heads": 16}),
        ),
        _NEXT_CALL,
    ),
    "ComfyUI HunyuanVideo": Foreign(
        "ComfyUI",
        _comfy(
            "ldm.hunyuan_video.model.HunyuanVideo",
            **_without(_FLUX, "txt_ids_dims", "patch_size"), patch_size=[1, 2, 2], byt5=False,
            meanflow=False,
            use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False,
        ),
        _call(*_VIDEO, _random(1, 8), guidance=_times(6.0)),
    ),
    "ComfyUI CogVideoX": Foreign(
        "ComfyUI",
        _comfy(
            "ldm.cogvideo.model.CogVideoXTransformer3DModel",
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
            time_embed_dim=8, text_embed_dim=16, num_layers=2, sample_width=8, sample_height=8,
            sample_frames=5, max_text_seq_length=6, use_rotary_positional_embeddings=True,
        ),
        _call(*_VIDEO),
    ),
    "ComfyUI SD3": Foreign(
        "ComfyUI",
        _comfy(
            "ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
            input_size=None, pos_embed_scaling_factor=None, pos_embed_offset=None,
            pos_embed_max_size=16, patch_size=2, in_channels=4, depth=1, num_patches=256,
            num_blocks=2, adm_in_channels=8, qk_norm="rms", context_embedder_config={
                "target": "torch.nn.Linear", "params": {"in_features": 16, "out_features": 64},
            },
        ),
        _call(_random(1, 4, 8, 8), _times(500.0), _random(1, 6, 16), _random(1, 8)),
    ),
    "ComfyUI AuraFlow": Foreign(
        "ComfyUI",
        _comfy(
            "ldm.aura.mmdit.MMDiT", in_channels=4, out_channels=4, patch_size=2, dim=32, n_layers=2,
            n_double_layers=1, n_heads=2, cond_seq_dim=16, max_seq=64,
        ),
        _call(_random(1, 4, 8, 8), _times(0.5), _random(1, 6, 16)),
    ),
    "ComfyUI LTX": Foreign(
        "ComfyUI",
        _comfy(
            "ldm.lightricks.model.LTXVModel", in_channels=4, cross_attention_dim=32,
            attention_head_dim=16, num_attention_heads=2, caption_channels=16, num_layers=2,
        ),
        _call(
            _random(1, 4, 2, 8, 8), _times(0.5), _random(1, 6, 16), None, frame_rate=25.0,
        ),
    ),
    "ComfyUI Mochi": Foreign(
        "ComfyUI",
        _comfy(
            "ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint", depth=2, num_heads=2,
            hidden_size_x=32, hidden_size_y=16, mlp_ratio_x=384.0, mlp_ratio_y=4.0, patch_size=2,
            in_channels=4, qk_norm=True, qkv_bias=False, out_bias=True, attn_drop=0.0,
            use_t5=True, t5_feat_dim=16, t5_token_length=6, rope_theta=10000.0,
        ),
        _call(
            *_VIDEO, attention_mask=lambda: torch.ones(1, 6), num_tokens=6,
        ),
    ),
    "ComfyUI SDXL UNet": Foreign(
        "ComfyUI",
        _comfy("ldm.modules.diffusionmodules.openaimodel.UNetModel", **_COMFY_UNET),
        _call(_random(1, 4, 8, 8), _times(500.0), _random(1, 5, 16), _random(1, 12)),
    ),
    "ComfyUI SVD UNet": Foreign(
        "ComfyUI",
        _comfy("ldm.modules.diffusionmodules.openaimodel.UNetModel", **_COMFY_SVD),
        _call(
            _random(3, 8, 8, 8), _times(0.3, 0.3, 0.3), _random(3, 1, 16), _random(3, 12),
            num_video_frames=3, image_only_indicator=lambda: torch.zeros(1, 3),
        ),
    ),
    "ComfyUI SDXL VAE": Foreign("ComfyUI", _comfy_vae(), _picture(1, 4, 8, 8), _MAPS),
    "ComfyUI SVD VAE": Foreign(
        "ComfyUI", _comfy_svd_vae,
        lambda module: [
            (module.encode, (torch.randn(3, 3, 16, 16),), {}),
            (module.decode, (torch.randn(3, 4, 8, 8),), {}),
        ],
        _MAPS,
    ),
    "ComfyUI Wan VAE": Foreign(
        "ComfyUI",
        _class("comfy.ldm.wan.vae.WanVAE", dim=16, z_dim=4, dim_mult=[1, 2], num_res_blocks=1,
               temperal_downsample=[True]),
        _picture(1, 4, 2, 4, 4), _MAPS,
    ),
    "ComfyUI HunyuanVideo VAE": Foreign(
        "ComfyUI", _hunyuan_vae, _picture(1, 4, 2, 4, 4), _MAPS
    ),
    "ComfyUI CogVideoX VAE": Foreign(
        "ComfyUI",
        _class("comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX", block_out_channels=(16, 32),
               latent_channels=4, layers_per_block=1, groups=4, temporal_compression_ratio=2),
        _picture(1, 4, 2, 4, 4), _MAPS[:2],
    ),
    "ComfyUI T5": Foreign("ComfyUI", _comfy_text("t5.T5", **_T5), _text_call),
    "ComfyUI umT5": Foreign(
        "ComfyUI", _comfy_text("t5.T5", **(_T5 | {"model_type": "umt5"})), _text_call
    ),
    "ComfyUI CLIP": Foreign("ComfyUI", lambda: _load("comfy.clip_model.CLIPTextModel")(
        _CLIP, torch.float32, "cpu", _load("comfy.ops.disable_weight_init")), _clip_call),
    "ComfyUI Llama": Foreign("ComfyUI", _comfy_llama("Llama2", "Llama2Config"), _text_call),
    "ComfyUI Qwen3": Foreign("ComfyUI", _comfy_llama("Qwen3_4B", "Qwen3_4BConfig"), _text_call),
    "ComfyUI Gemma 2": Foreign(
        "ComfyUI", _comfy_llama("Gemma2_2B", "Gemma2_2B_Config"), _text_call
    ),
}  # fmt: skip
"""Name of a class to how it is built, called and made to overflow."""

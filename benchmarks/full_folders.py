"""Folders of well-known checkpoints without their weights: configurations at full size, or cut in depth.

The numbers are those of the published configurations; tokenizers are small ones, since only the
length of what they give matters. Used by other benchmarks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from full_size_configs import T5_XXL

from stopdown.fake_tensors.fake_modules import build_fake
from stopdown.pipelines.tiny_pipelines import make_clip_tokenizer, make_t5_tokenizer

Parts = dict[str, Any]


def make_t5(layers: int, kind: str = "T5", **other: Any) -> Any:
    """The encoder of T5 v1.1 XXL, or of umT5 XXL."""
    config = T5_XXL | {
        "num_layers": layers,
        "is_encoder_decoder": False,
        "use_cache": False,
        "dropout_rate": 0.0,
    }
    del config["architectures"], config["model_type"], config["tie_word_embeddings"]
    made = getattr(transformers, f"{kind}Config")(**config | other)
    return getattr(transformers, f"{kind}EncoderModel")(made)


def make_cogvideox(heads: int, layers: int, text_layers: int, *, rotary: bool) -> Parts:
    """CogVideoX-2B has 30 heads and layers, CogVideoX-5B 48 heads, 42 layers and rotary positions."""
    return {
        "text_encoder": lambda: make_t5(text_layers),
        "transformer": lambda: diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=heads,
            num_layers=layers,
            text_embed_dim=4096,
            use_rotary_positional_embeddings=rotary,
        ),
        "vae": diffusers.AutoencoderKLCogVideoX,
        "tokenizer": make_t5_tokenizer,
        "scheduler": diffusers.CogVideoXDDIMScheduler,
    }


def make_cogview3plus(layers: int, text_layers: int) -> Parts:
    """CogView3-Plus-3B has 30 layers."""
    return {
        "text_encoder": lambda: make_t5(text_layers),
        "transformer": lambda: diffusers.CogView3PlusTransformer2DModel(num_layers=layers),
        "vae": lambda: diffusers.AutoencoderKL(
            block_out_channels=(128, 512, 1024, 1024),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=3,
            latent_channels=16,
            sample_size=1024,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        ),
        "tokenizer": make_t5_tokenizer,
        "scheduler": diffusers.CogVideoXDDIMScheduler,
    }


def make_svd(image_layers: int, blocks: int) -> Parts:
    """SVD-XT has an image encoder of 32 layers and 2 layers in each block of its UNet."""
    return {
        "image_encoder": lambda: transformers.CLIPVisionModelWithProjection(
            transformers.CLIPVisionConfig(
                hidden_size=1280,
                intermediate_size=5120,
                num_hidden_layers=image_layers,
                num_attention_heads=16,
                patch_size=14,
                image_size=224,
                projection_dim=1024,
            )
        ),
        "unet": lambda: diffusers.UNetSpatioTemporalConditionModel(
            num_attention_heads=(5, 10, 20, 20), num_frames=25, layers_per_block=blocks
        ),
        "vae": lambda: diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            layers_per_block=2,
            sample_size=768,
        ),
        "feature_extractor": transformers.CLIPImageProcessor,
        "scheduler": diffusers.EulerDiscreteScheduler,
    }


def make_clip(width: int, layers: int, heads: int, kind: Any, **config: Any) -> Any:
    """A text encoder of CLIP: 768, 12 and 12 are CLIP-L, 1280, 32 and 20 OpenCLIP's bigG."""
    return kind(
        transformers.CLIPTextConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            projection_dim=width,
            **config,
        )
    )


def make_picture_vae(channels: int) -> Any:
    """The autoencoder of Stable Diffusion and SDXL (4 channels) and of Flux (16)."""
    has_quant = channels == 4
    shift = {} if has_quant else {"scaling_factor": 0.3611, "shift_factor": 0.1159}
    return diffusers.AutoencoderKL(
        **shift,
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=channels,
        sample_size=1024,
        use_quant_conv=has_quant,
        use_post_quant_conv=has_quant,
    )


def make_sdxl() -> Parts:
    """SDXL 1.0's base."""
    return {
        "text_encoder": lambda: make_clip(768, 12, 12, transformers.CLIPTextModel),
        "text_encoder_2": lambda: make_clip(
            1280, 32, 20, transformers.CLIPTextModelWithProjection, hidden_act="gelu"
        ),
        "tokenizer": make_clip_tokenizer,
        "tokenizer_2": make_clip_tokenizer,
        "unet": lambda: diffusers.UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=[1, 2, 10],
            attention_head_dim=[5, 10, 20],
            cross_attention_dim=2048,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
            use_linear_projection=True,
        ),
        "vae": lambda: make_picture_vae(4),
        "scheduler": diffusers.EulerDiscreteScheduler,
    }


def make_flux() -> Parts:
    """FLUX.1-dev: the defaults of its transformer's class are its own."""
    return {
        "text_encoder": lambda: make_clip(768, 12, 12, transformers.CLIPTextModel),
        "text_encoder_2": lambda: make_t5(24),
        "tokenizer": make_clip_tokenizer,
        "tokenizer_2": make_t5_tokenizer,
        "transformer": lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True),
        "vae": lambda: make_picture_vae(16),
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, shift=3.0
        ),
    }


def make_wan() -> Parts:
    """Wan2.1-T2V-14B: the defaults of its classes are its own; its text encoder is umT5 XXL."""
    return {
        "text_encoder": lambda: make_t5(24, "UMT5", vocab_size=256384),
        "tokenizer": make_t5_tokenizer,
        "transformer": diffusers.WanTransformer3DModel,
        "vae": diffusers.AutoencoderKLWan,
        "scheduler": diffusers.UniPCMultistepScheduler,
    }


CHECKPOINTS: dict[str, tuple[str, Callable[[], Parts]]] = {
    "CogVideoX-5B": ("CogVideoXPipeline", lambda: make_cogvideox(48, 42, 24, rotary=True)),
    "CogVideoX-2B": ("CogVideoXPipeline", lambda: make_cogvideox(30, 30, 24, rotary=False)),
    "CogView3-Plus-3B": ("CogView3PlusPipeline", lambda: make_cogview3plus(30, 24)),
    "SVD-XT": ("StableVideoDiffusionPipeline", lambda: make_svd(32, 2)),
    "SDXL": ("StableDiffusionXLPipeline", make_sdxl),
    "FLUX.1-dev": ("FluxPipeline", make_flux),
    "Wan2.1-T2V-14B": ("WanPipeline", make_wan),
    "CogVideoX-2B, cut": ("CogVideoXPipeline", lambda: make_cogvideox(30, 2, 1, rotary=False)),
    "CogView3-Plus-3B, cut": ("CogView3PlusPipeline", lambda: make_cogview3plus(2, 1)),
    "SVD-XT, cut": ("StableVideoDiffusionPipeline", lambda: make_svd(2, 1)),
}
"""Name → class of the pipeline, and the factories of its components."""


def write_configs(name: str, folder: Path, *, with_headers: bool = False) -> Path:
    """A Diffusers folder with the configurations of a checkpoint, and no weights.

    Args:
        with_headers: files of weights in bf16 as well, with a header and nothing that takes room on disk.
    """
    class_name, make = CHECKPOINTS[name]
    index: dict[str, Any] = {"_class_name": class_name, "_diffusers_version": diffusers.__version__}
    for part, factory in make().items():
        built = _write_part(factory, folder / part)
        if with_headers and isinstance(built, torch.nn.Module):
            _write_header(built, folder / part)
        library = type(built).__module__.partition(".")[0]
        index[part] = [library, type(built).__name__]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return folder


def _write_part(factory: Callable[[], Any], folder: Path) -> Any:
    folder.mkdir(parents=True)
    is_module = "tokenizer" not in folder.name and folder.name not in (
        "scheduler",
        "feature_extractor",
    )
    built = build_fake(factory, torch.bfloat16) if is_module else factory()
    if not is_module:
        built.save_pretrained(folder)
    elif isinstance(built, transformers.PreTrainedModel):
        built.config.save_pretrained(folder)
    else:
        built.save_config(folder)
    return built


def _write_header(module: torch.nn.Module, folder: Path) -> None:
    """A file of weights whose tensors are a hole, in the layout of safetensors."""
    is_transformers = isinstance(module, transformers.PreTrainedModel)
    name = "model" if is_transformers else "diffusion_pytorch_model"
    tied = set(getattr(module, "_tied_weights_keys", None) or {})
    header, end = {}, 0
    for key, tensor in module.state_dict().items():
        if key in tied:
            continue
        begun, end = end, end + 2 * tensor.numel()
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begun, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with (folder / f"{name}.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)

"""Tiny pipelines from real Diffusers classes, with random weights: the recipes behind `testing`.

Each recipe gives the components of one pipeline class, narrow enough that a whole run takes about a
second on one CPU core, also in fp16. Weights come from the classes' own initialisation. Tokenizers
are real ones with a vocabulary of characters.

`overflow_` then makes one component too large for fp16 the way real checkpoints are: the values of
its residual stream (or of a gated product) are multiplied by a power of two. Only norms read the
stream, so fp32 and bf16 stay right; in fp16 the component gives NaN. Every weight fits into fp16.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

LARGEST_WEIGHT = 32768.0
"""Scaled weights stay below this, so that they survive the cast to fp16."""

TEXT_WIDTH = 32
SPECIAL_PIECES = ("<pad>", "</s>", "<unk>", "▁")
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'-"

Components = dict[str, Any]


def make_t5_tokenizer() -> Any:
    """A `T5Tokenizer` that knows single characters."""
    from transformers import T5Tokenizer

    pieces = [*SPECIAL_PIECES, *CHARACTERS]
    vocab = [(piece, 0.0 if index < 3 else -2.0) for index, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0)


def make_clip_tokenizer() -> Any:
    """A `CLIPTokenizer` that knows single characters, alone and at the end of a word."""
    from transformers import CLIPTokenizer

    letters = CHARACTERS.lower()
    pieces = dict.fromkeys([*letters, *(f"{letter}</w>" for letter in letters)])
    pieces |= dict.fromkeys(["<|startoftext|>", "<|endoftext|>"])
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def _make_t5(class_name: str = "T5EncoderModel") -> Any:
    import transformers

    config_class = getattr(transformers, class_name.replace("EncoderModel", "Config"))
    config = config_class(
        vocab_size=len(SPECIAL_PIECES) + len(CHARACTERS),
        d_model=TEXT_WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return getattr(transformers, class_name)(config)


def _make_clip_text(class_name: str = "CLIPTextModel") -> Any:
    import transformers

    tokenizer = make_clip_tokenizer()
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return getattr(transformers, class_name)(config)


def _make_clip_vision() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=224,
        patch_size=56,
    )
    return CLIPVisionModelWithProjection(config)


def _make_cogvideox_scheduler() -> Any:
    from diffusers import CogVideoXDDIMScheduler

    return CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0,
        timestep_spacing="trailing",
    )


def _make_cogvideox(*, is_image_to_video: bool = False) -> Components:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel

    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=8 if is_image_to_video else 4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=TEXT_WIDTH,
        num_layers=2,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        use_rotary_positional_embeddings=True,
        use_learned_positional_embeddings=is_image_to_video,
    )
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        sample_height=32,
        sample_width=32,
        scaling_factor=0.7,
    )
    return {
        "tokenizer": make_t5_tokenizer(),
        "text_encoder": _make_t5(),
        "vae": vae,
        "transformer": transformer,
        "scheduler": _make_cogvideox_scheduler(),
    }


def _make_cogvideox_image() -> Components:
    return _make_cogvideox(is_image_to_video=True)


def _make_autoencoder_kl(**options: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        sample_size=32,
        **options,
    )


def _make_cogview3plus() -> Components:
    from diffusers import CogView3PlusTransformer2DModel

    transformer = CogView3PlusTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=TEXT_WIDTH,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=8,
        sample_size=8,
    )
    return {
        "tokenizer": make_t5_tokenizer(),
        "text_encoder": _make_t5(),
        "vae": _make_autoencoder_kl(),
        "transformer": transformer,
        "scheduler": _make_cogvideox_scheduler(),
    }


def _make_svd() -> Components:
    from diffusers import (
        AutoencoderKLTemporalDecoder,
        EulerDiscreteScheduler,
        UNetSpatioTemporalConditionModel,
    )
    from transformers import CLIPImageProcessor

    unet = UNetSpatioTemporalConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        block_out_channels=(32, 32),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        num_attention_heads=(2, 2),
        num_frames=3,
    )
    vae = AutoencoderKLTemporalDecoder(
        down_block_types=("DownEncoderBlock2D",) * 3,
        block_out_channels=(32, 32, 32),
        sample_size=32,
        force_upcast=True,
    )
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        interpolation_type="linear",
        timestep_type="continuous",
        timestep_spacing="leading",
        steps_offset=1,
        sigma_min=0.002,
        sigma_max=700.0,
        use_karras_sigmas=True,
    )
    return {
        "vae": vae,
        "image_encoder": _make_clip_vision(),
        "unet": unet,
        "scheduler": scheduler,
        "feature_extractor": CLIPImageProcessor(),
    }


def _make_unet(**options: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=2,
        **options,
    )


def _make_euler_scheduler() -> Any:
    from diffusers import EulerDiscreteScheduler

    return EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
    )


def _make_sd() -> Components:
    return {
        "vae": _make_autoencoder_kl(),
        "text_encoder": _make_clip_text(),
        "tokenizer": make_clip_tokenizer(),
        "unet": _make_unet(cross_attention_dim=TEXT_WIDTH),
        "scheduler": _make_euler_scheduler(),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def _make_sdxl() -> Components:
    unet = _make_unet(
        cross_attention_dim=2 * TEXT_WIDTH,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + TEXT_WIDTH,
    )
    return {
        "vae": _make_autoencoder_kl(force_upcast=True),
        "text_encoder": _make_clip_text(),
        "text_encoder_2": _make_clip_text("CLIPTextModelWithProjection"),
        "tokenizer": make_clip_tokenizer(),
        "tokenizer_2": make_clip_tokenizer(),
        "unet": unet,
        "scheduler": _make_euler_scheduler(),
        "add_watermarker": False,
    }


def _make_flux() -> Components:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "vae": _make_autoencoder_kl(shift_factor=0.1, scaling_factor=0.4),
        "text_encoder": _make_clip_text(),
        "tokenizer": make_clip_tokenizer(),
        "text_encoder_2": _make_t5(),
        "tokenizer_2": make_t5_tokenizer(),
        "transformer": transformer,
    }


def _make_wan() -> Components:
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanTransformer3DModel,
    )

    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_WIDTH,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return {
        "tokenizer": make_t5_tokenizer(),
        "text_encoder": _make_t5("UMT5EncoderModel"),
        "vae": vae,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "transformer": transformer,
    }


RECIPES: dict[str, tuple[str, Callable[[], Components]]] = {
    "cogvideox": ("CogVideoXPipeline", _make_cogvideox),
    "cogvideox-image": ("CogVideoXImageToVideoPipeline", _make_cogvideox_image),
    "cogvideox-video": ("CogVideoXVideoToVideoPipeline", _make_cogvideox),
    "cogview3plus": ("CogView3PlusPipeline", _make_cogview3plus),
    "svd": ("StableVideoDiffusionPipeline", _make_svd),
    "sd": ("StableDiffusionPipeline", _make_sd),
    "sdxl": ("StableDiffusionXLPipeline", _make_sdxl),
    "flux": ("FluxPipeline", _make_flux),
    "wan": ("WanPipeline", _make_wan),
}
"""Name → pipeline class and the function that makes its components."""


def build_pipeline(name: str, *, seed: int = 0) -> Any:
    """A tiny pipeline of the named recipe in fp32, with weights drawn from the seed.

    The global random state is left as it was.
    """
    import diffusers

    class_name, make_components = RECIPES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        components = make_components()
    for component in components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(False)
    return getattr(diffusers, class_name)(**components)


def build_wide(heads: int, layers: int, time_width: int, device: str) -> Any:
    """The tiny CogVideoX with a denoiser of some size: heads of 64, drawn from a seed on a device."""
    from diffusers import CogVideoXTransformer3DModel

    pipe = build_pipeline("cogvideox")
    config = {name: x for name, x in pipe.transformer.config.items() if not name.startswith("_")}
    config |= {"num_attention_heads": heads, "attention_head_dim": 64}
    config |= {"num_layers": layers, "time_embed_dim": time_width}
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        made = CogVideoXTransformer3DModel(**config)
    pipe.register_modules(transformer=made.eval().requires_grad_(False))
    return pipe


@dataclass(frozen=True)
class Stream:
    """Which parameters write a residual stream.

    Attributes:
        writers: modules (as a pattern over dotted paths) that write into the stream from outside;
            weight and bias are scaled.
        carriers: modules that map the stream to itself; only their bias is scaled.
        buffers: buffers and parameters that are added to the stream.
        spikes: pairs of a pattern and an exponent: modules that are scaled besides, which does not
            keep the function.
    """

    writers: str = ""
    carriers: str = ""
    buffers: str = ""
    spikes: tuple[tuple[str, int], ...] = ()


_CONVOLUTIONAL = Stream(
    writers=r"(.*\.)?(conv_in(\.conv)?|conv2(\.conv)?|proj_in|to_out\.0|ff(_in)?\.net\.2"
    r"|time_pos_embed\.linear_2)",
    carriers=r"(.*\.)?(conv_shortcut(\.conv)?|(down|up)samplers\.\d+\.conv"
    r"(\.conv)?|attentions\.\d+\.proj_out)",
)
_GATED_PRODUCT = Stream(spikes=((r".*\.layer\.1\.layer_norm", 4), (r".*\.wi_1", 12)))
_DOUBLE_STREAM = Stream(
    writers=r"x_embedder|context_embedder|.*\.(to_out\.0|to_add_out|ff(_context)?\.net\.2)"
    r"|single_transformer_blocks\.\d+\.proj_out"
)
_NORMED_STREAM = Stream(  # what is added to it comes out of norms
    writers=r"x_embedder|all_x_embedder\.2-1|.*caption_embedder\.1|cap_embedder\.1"
    r"|.*\.(norm2|attention_norm2|ffn_norm2)",
    buffers=r"x_pad_token|cap_pad_token",
)

STREAMS: dict[str, Stream] = {
    "CogVideoXTransformer3DModel": Stream(
        writers=r"patch_embed\.(text_)?proj|.*\.(attn1\.to_out\.0|ff\.net\.2)",
        buffers=r"patch_embed\.pos_embedding",
    ),
    # Its authors clip the stream to the range of fp16, which hides an overflow there. The values of
    # attention are not clipped.
    "CogView3PlusTransformer2DModel": Stream(
        writers=r"patch_embed\.(text_)?proj|.*\.(attn1\.to_v|ff\.net\.2)",
        carriers=r".*\.attn1\.to_out\.0",
        buffers=r"patch_embed\.pos_embed",
    ),
    "CogView4Transformer2DModel": Stream(
        writers=r"patch_embed\.(text_)?proj|.*\.(attn1\.to_out\.0|ff\.net\.2)"
    ),
    "FluxTransformer2DModel": _DOUBLE_STREAM,
    "WanTransformer3DModel": Stream(writers=r"patch_embedding|.*\.(to_out\.0|ffn\.net\.2)"),
    "ChromaTransformer2DModel": _DOUBLE_STREAM,
    "SD3Transformer2DModel": Stream(
        writers=r"pos_embed\.proj|context_embedder|.*\.(to_out\.0|to_add_out|ff(_context)?\.net\.2)",
        buffers=r"pos_embed\.pos_embed",
    ),
    "HunyuanVideoTransformer3DModel": Stream(
        writers=r"x_embedder\.proj|context_embedder\.proj_in|.*\.(to_out\.0|to_add_out|ff(_context)?\.net\.2)"
        r"|single_transformer_blocks\.\d+\.proj_out"
    ),
    "LTXVideoTransformer3DModel": Stream(writers=r"proj_in|.*\.(to_out\.0|ff\.net\.2)"),
    "Lumina2Transformer2DModel": _NORMED_STREAM,
    "ZImageTransformer2DModel": _NORMED_STREAM,
    "QwenImageTransformer2DModel": Stream(
        writers=r"img_in|txt_in|.*\.(to_out\.0|to_add_out|(img|txt)_mlp\.net\.2)"
    ),
    "AutoencoderKLWan": Stream(
        writers=r"(.*\.)?(conv_in|conv2|proj)",
        carriers=r".*\.(conv_shortcut|resample\.1|time_conv)",
    ),
    "CLIPVisionModelWithProjection": Stream(writers=r".*\.(pre_layrnorm|out_proj|fc2)"),
    # T5 replaces Inf in its stream by the largest value; a product that overflows becomes NaN.
    "T5EncoderModel": _GATED_PRODUCT,
    "UMT5EncoderModel": _GATED_PRODUCT,
    "AutoencoderKL": _CONVOLUTIONAL,
    "AutoencoderKLCogVideoX": _CONVOLUTIONAL,
    "AutoencoderKLHunyuanVideo": _CONVOLUTIONAL,
    "AutoencoderKLLTXVideo": Stream(
        writers=r"(.*\.)?(conv_in\.conv|conv2\.conv|conv_shortcut\.conv)",
        carriers=r".*\.(down|up)samplers\.\d+\.conv(\.conv)?",
    ),
    "AutoencoderKLTemporalDecoder": _CONVOLUTIONAL,
    "UNet2DConditionModel": _CONVOLUTIONAL,
    "UNetSpatioTemporalConditionModel": _CONVOLUTIONAL,
}
"""Model class → what makes it overflow in fp16."""


def overflow_(module: torch.nn.Module) -> int:
    """Scale a module's weights in place so that it overflows in fp16 and nowhere else.

    Returns:
        The exponent of two that its residual stream was multiplied by; 0 for a gated product.

    Raises:
        ValueError: there is no rule for this class.
    """
    stream = STREAMS.get(type(module).__name__)
    if stream is None:
        raise ValueError(f"no rule makes {type(module).__name__} overflow; known: {list(STREAMS)}")
    written = list(_find_stream_tensors(module, stream))
    exponent = _choose_exponent(written)
    for tensor in written:
        tensor.data.mul_(2.0**exponent)
    for pattern, spike in stream.spikes:
        for tensor in _find_parameters(module, pattern):
            tensor.data.mul_(2.0**spike)
    return exponent


def _choose_exponent(tensors: list[torch.Tensor]) -> int:
    if not tensors:
        return 0
    largest = max(float(tensor.abs().max()) for tensor in tensors)
    return min(20, math.floor(math.log2(LARGEST_WEIGHT / largest)))


def _find_stream_tensors(module: torch.nn.Module, stream: Stream) -> Iterator[torch.Tensor]:
    yield from _find_parameters(module, stream.writers)
    yield from _find_parameters(module, stream.carriers, only="bias")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if re.fullmatch(stream.buffers, name):
            yield tensor


def _find_parameters(
    module: torch.nn.Module, pattern: str, *, only: str = ""
) -> Iterator[torch.Tensor]:
    for path, child in module.named_modules():
        if path and re.fullmatch(pattern, path):
            for name, tensor in child.named_parameters(recurse=False):
                if not only or name == only:
                    yield tensor

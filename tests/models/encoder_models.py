"""The text and image encoders that pipelines of Diffusers name, tiny, with their calls.

`list_encoders` reads the names from the annotations of the pipelines. `ENCODERS` has a tiny model for
each, `NOT_BUILT` why there is none.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.rescaling_models import randomise
from stopdown.numerics import iterate_tensors

LENGTH, PADS, WORDS = 12, 3, 64
MASKS = ("none", "right", "left")
_ROLES = re.compile(
    r"(prior_)*(text_encoder(_\d)?|image_encoder|bert|siglip|qformer)|vision_language_encoder"
)
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_TEXT: dict[str, Any] = {**_SIZES, "vocab_size": WORDS}
_LLM: dict[str, Any] = {
    **_TEXT,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {**_LLM, "query_pre_attn_scalar": 16, "sliding_window": 8}
_T5 = {
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 16,
    "num_heads": 2,
    "num_layers": 2,
    "vocab_size": WORDS,
    "feed_forward_proj": "gated-gelu",
}
_PIXELS = {"image_size": 16, "patch_size": 8}
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_QWEN_VL = {**_LLM, "rope_parameters": _ROPE, "max_position_embeddings": 64}
_QWEN_EYES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
_TOKENS = {
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}


@dataclass(frozen=True)
class Encoder:
    """A tiny encoder.

    Attributes:
        build: makes it.
        sees: it is given a picture, not tokens.
        method: what pipelines call; "" for the module itself.
        inputs: arguments beside tokens, mask and picture, given the batch size.
    """

    build: Callable[[], nn.Module]
    sees: bool = False
    method: str = ""
    inputs: Callable[[int], Mapping[str, Any]] = lambda batch: {}


def list_encoders() -> dict[str, set[str]]:
    """Class name to the pipelines of Diffusers whose annotations name it as an encoder."""
    import diffusers

    found: dict[str, set[str]] = {}
    for pipeline in (x for x in dir(diffusers) if x.endswith("Pipeline")):
        made = getattr(diffusers, pipeline)
        if "onnx" in pipeline.lower() or not inspect.isclass(made):
            continue
        for name, parameter in inspect.signature(made.__init__).parameters.items():
            if not _ROLES.fullmatch(name):
                continue
            noted = parameter.annotation
            text = noted.__name__ if inspect.isclass(noted) else str(noted)
            for class_name in re.findall(r"\b(?:[A-Z]\w*)\b", text):
                if class_name not in ("Union", "Optional", "Any", "None"):
                    found.setdefault(class_name, set()).add(pipeline)
    return found


def asks_for_states(pipelines: set[str]) -> bool:
    """Whether the code of some of the pipelines asks an encoder for its hidden states."""
    import diffusers

    codes = (inspect.getsource(inspect.getmodule(getattr(diffusers, x))) for x in pipelines)  # type: ignore[arg-type]
    return any("output_hidden_states=True" in code for code in codes)


def make_encoder(name: str, seed: int = 0) -> nn.Module:
    """A tiny encoder of a class with random weights."""
    torch.manual_seed(seed)
    module = ENCODERS[name].build().eval().requires_grad_(False)
    for key, parameter in module.named_parameters():
        if "norm" in key and key.endswith("weight"):
            parameter.data.fill_(1.0)  # ChatGLM's are whatever was in memory
    randomise(module)
    return module


def make_call(
    name: str,
    module: nn.Module,
    mask: str,
    *,
    states: bool = False,
    length: int = LENGTH,
    seed: int = 1,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A call as pipelines make it: two prompts or pictures, the second one padded on a side.

    Args:
        mask: `none`, `right` or `left`.
        states: asks for the hidden states.
    """
    encoder, draw = ENCODERS[name], torch.Generator().manual_seed(seed)
    call = getattr(module, encoder.method) if encoder.method else module
    given: dict[str, Any] = dict(encoder.inputs(2))
    if encoder.sees:
        given.setdefault("pixel_values", torch.randn(2, 3, 16, 16, generator=draw))
    else:
        given["input_ids"] = torch.randint(3, 50, (2, length), generator=draw)
        if mask != "none":
            kept = torch.ones(2, length, dtype=torch.long)
            pads = slice(length - PADS, None) if mask == "right" else slice(0, PADS)
            kept[1, pads] = given["input_ids"][1, pads] = 0
            given["attention_mask"] = kept
    accepts = inspect.signature(call if encoder.method else module.forward).parameters
    wants = accepts.get("attention_mask")
    if mask == "none" and wants is not None and wants.default is inspect.Parameter.empty:
        given["attention_mask"] = torch.ones(2, length, dtype=torch.long)
    free = any(x.kind is x.VAR_KEYWORD for x in accepts.values())
    is_decoder = hasattr(module.config, "use_cache") or hasattr(module.config, "text_config")
    if "use_cache" in accepts or (free and is_decoder and not encoder.sees):
        given["use_cache"] = False
    if states and ("output_hidden_states" in accepts or free):
        given["output_hidden_states"] = True
    return call, (), given


def run_encoder(
    call: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """The floating outputs of a call in fp32, with its floating inputs in a dtype."""
    made, args, kwargs = call
    given = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, dict(kwargs)
    )
    with torch.no_grad():
        found = made(*args, **given)
    return [x.float() for x in iterate_tensors(found) if x.is_floating_point()]


def _of(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Build a class of Transformers from its configuration."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return build


def _in_diffusers(module: str, name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Build a class that lies in Diffusers itself, from a configuration there or of Transformers."""

    def build() -> nn.Module:
        import transformers

        place = importlib.import_module(f"diffusers.pipelines.{module}")
        kind = getattr(place, config, None) or getattr(transformers, config)
        return getattr(place, name)(kind(**options))

    return build


def _build_t5_gemma() -> nn.Module:
    import transformers

    part = transformers.T5GemmaModuleConfig(**_GEMMA)
    made = transformers.T5GemmaConfig(encoder=part, decoder=part, is_encoder_decoder=False)
    return transformers.T5GemmaEncoderModel(made)


def _build_t5_gemma2() -> nn.Module:
    import transformers
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

    made = transformers.T5Gemma2EncoderConfig(
        text_config={**_GEMMA, "dropout_rate": 0.0},
        vision_config=_SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=60,
    )
    return T5Gemma2Encoder(made, 0)


def _build_vits() -> nn.Module:
    import transformers
    from transformers.models.vits.modeling_vits import VitsTextEncoder

    return VitsTextEncoder(
        transformers.VitsConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, ffn_dim=48, flow_size=32
        )
    )


_QWEN_VL_ALL = {
    "text_config": _QWEN_VL,
    "vision_config": {**_QWEN_EYES, "intermediate_size": 48, "out_hidden_size": 32},
    **_TOKENS,
}
_QWEN3_EYES = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_QWEN3_VL_ALL = {
    **_QWEN_VL_ALL,
    "vision_config": {**_QWEN_VL_ALL["vision_config"], **_QWEN3_EYES},
}
_CLIP_TEXT = {**_TEXT, "max_position_embeddings": 32, "projection_dim": 16, "eos_token_id": 2}
_CLIP_EYES = {**_SIZES, **_PIXELS, "projection_dim": 16}
_ROBERTA = {**_TEXT, "max_position_embeddings": 32, "pad_token_id": 0}
_LLAVA = {
    "text_config": {"model_type": "llama", **_LLM},
    "vision_config": {"model_type": "clip_vision_model", **_CLIP_EYES},
    "image_token_index": 60,
}
_MISTRAL = {
    "text_config": {"model_type": "mistral", **_LLM},
    "vision_config": {"model_type": "pixtral", **_SIZES, **_PIXELS, "head_dim": 16},
    "image_token_index": 60,
}
_SIGLIP = {**_SIZES, **_PIXELS}

ENCODERS: dict[str, Encoder] = {
    "BertModel": Encoder(_of("BertModel", "BertConfig", **_ROBERTA)),
    "CLIPTextModel": Encoder(_of("CLIPTextModel", "CLIPTextConfig", **_CLIP_TEXT)),
    "CLIPTextModelWithProjection": Encoder(
        _of("CLIPTextModelWithProjection", "CLIPTextConfig", **_CLIP_TEXT)
    ),
    "CLIPVisionModel": Encoder(_of("CLIPVisionModel", "CLIPVisionConfig", **_CLIP_EYES), sees=True),
    "CLIPVisionModelWithProjection": Encoder(
        _of("CLIPVisionModelWithProjection", "CLIPVisionConfig", **_CLIP_EYES), sees=True
    ),
    "ChatGLMModel": Encoder(
        _in_diffusers(
            "kolors.text_encoder", "ChatGLMModel", "ChatGLMConfig", num_layers=2,
            padded_vocab_size=WORDS, hidden_size=32, ffn_hidden_size=48, kv_channels=16,
            num_attention_heads=2, seq_length=32, multi_query_attention=True,
            multi_query_group_num=1, add_qkv_bias=True, original_rope=True,
        )
    ),
    "ClapModel": Encoder(
        _of("ClapModel", "ClapConfig", text_config={**_ROBERTA, "projection_dim": 16},
            audio_config={"hidden_size": 16, "patch_embeds_hidden_size": 16, "depths": [1],
                          "num_attention_heads": [1], "num_hidden_layers": 1, "num_mel_bins": 16,
                          "spec_size": 16, "window_size": 2, "projection_dim": 16},
            projection_dim=16),
        method="get_text_features",
    ),
    "ClapTextModelWithProjection": Encoder(
        _of("ClapTextModelWithProjection", "ClapTextConfig", **_ROBERTA, projection_dim=16)
    ),
    "ContextCLIPTextModel": Encoder(
        _in_diffusers("deprecated.blip_diffusion.modeling_ctx_clip", "ContextCLIPTextModel",
                      "CLIPTextConfig", **_CLIP_TEXT),
        inputs=lambda batch: {"ctx_embeddings": None, "ctx_begin_pos": None},
    ),
    "Gemma2PreTrainedModel": Encoder(_of("Gemma2Model", "Gemma2Config", **_GEMMA)),
    "Gemma3ForConditionalGeneration": Encoder(
        _of("Gemma3ForConditionalGeneration", "Gemma3Config", text_config=_GEMMA,
            vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_index=60)
    ),
    "Gemma4UnifiedForConditionalGeneration": Encoder(
        _of("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedConfig", text_config=_LLM,
            vision_config={"hidden_size": 32, "mm_embed_dim": 32, "mm_posemb_size": 16,
                           "output_proj_dims": 32}, audio_config=None)
    ),
    "GemmaPreTrainedModel": Encoder(_of("GemmaModel", "GemmaConfig", **_LLM)),
    "GlmModel": Encoder(_of("GlmModel", "GlmConfig", **_LLM)),
    "LlamaForCausalLM": Encoder(_of("LlamaForCausalLM", "LlamaConfig", **_LLM)),
    "LlamaModel": Encoder(_of("LlamaModel", "LlamaConfig", **_LLM)),
    "LlavaForConditionalGeneration": Encoder(
        _of("LlavaForConditionalGeneration", "LlavaConfig", **_LLAVA)
    ),
    "Mistral3ForConditionalGeneration": Encoder(
        _of("Mistral3ForConditionalGeneration", "Mistral3Config", **_MISTRAL)
    ),
    "Mistral3Model": Encoder(_of("Mistral3Model", "Mistral3Config", **_MISTRAL)),
    "MultilingualCLIP": Encoder(
        _in_diffusers("kandinsky.text_encoder", "MultilingualCLIP", "MCLIPConfig",
                      transformerDimSize=32, imageDimSize=16, **_ROBERTA)
    ),
    "PaintByExampleImageEncoder": Encoder(
        _in_diffusers("deprecated.paint_by_example.image_encoder", "PaintByExampleImageEncoder",
                      "CLIPVisionConfig", **_CLIP_EYES),
        sees=True,
    ),
    "PreTrainedModel": Encoder(
        _in_diffusers("latent_diffusion.pipeline_latent_diffusion", "LDMBertModel", "LDMBertConfig",
                      vocab_size=WORDS, max_position_embeddings=32, encoder_layers=2,
                      encoder_ffn_dim=48, encoder_attention_heads=2, head_dim=16, d_model=32)
    ),
    "Qwen2VLForConditionalGeneration": Encoder(
        _of("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", text_config=_QWEN_VL,
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2,
                           "patch_size": 4}, **_TOKENS)
    ),
    "Qwen2_5_VLForConditionalGeneration": Encoder(
        _of("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", **_QWEN_VL_ALL)
    ),
    "Qwen2_5_VLTextModel": Encoder(
        _of("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", **_QWEN_VL)
    ),
    "Qwen3ForCausalLM": Encoder(_of("Qwen3ForCausalLM", "Qwen3Config", **_LLM)),
    "MistralModel": Encoder(_of("MistralModel", "MistralConfig", **_LLM)),
    "Gemma3TextModel": Encoder(_of("Gemma3TextModel", "Gemma3TextConfig", **_GEMMA)),
    "Qwen3Model": Encoder(_of("Qwen3Model", "Qwen3Config", **_LLM)),
    "Qwen3VLForConditionalGeneration": Encoder(
        _of("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", **_QWEN3_VL_ALL)
    ),
    "Qwen3VLModel": Encoder(_of("Qwen3VLModel", "Qwen3VLConfig", **_QWEN3_VL_ALL)),
    "RobertaSeriesModelWithTransformation": Encoder(
        _in_diffusers("deprecated.alt_diffusion.modeling_roberta_series",
                      "RobertaSeriesModelWithTransformation", "RobertaSeriesConfig",
                      project_dim=16, **_ROBERTA)
    ),
    "Siglip2VisionModel": Encoder(
        _of("Siglip2VisionModel", "Siglip2VisionConfig", **_SIZES, patch_size=8, num_patches=4),
        sees=True,
        inputs=lambda batch: {
            "pixel_values": torch.randn(batch, 4, 192),
            "pixel_attention_mask": torch.ones(batch, 4, dtype=torch.long),
            "spatial_shapes": torch.tensor([[2, 2]] * batch),
        },
    ),
    "SiglipModel": Encoder(
        _of("SiglipModel", "SiglipConfig", text_config={**_TEXT, "max_position_embeddings": 32},
            vision_config=_SIGLIP),
        sees=True, method="get_image_features",
    ),
    "SiglipVisionModel": Encoder(_of("SiglipVisionModel", "SiglipVisionConfig", **_SIGLIP), sees=True),
    "SmolLM3ForCausalLM": Encoder(_of("SmolLM3ForCausalLM", "SmolLM3Config", **_LLM)),
    "T5EncoderModel": Encoder(_of("T5EncoderModel", "T5Config", **_T5)),
    "T5Gemma2Encoder": Encoder(
        _build_t5_gemma2
    ),
    "T5GemmaEncoderModel": Encoder(_build_t5_gemma),
    "UMT5EncoderModel": Encoder(_of("UMT5EncoderModel", "UMT5Config", **_T5)),
    "VitsModel": Encoder(
        _build_vits, inputs=lambda batch: {"padding_mask": torch.ones(batch, LENGTH, 1)}
    ),
}  # fmt: skip
"""Class, as annotations name it, to a tiny model of it; abstract classes to one that pipelines take."""

NOT_BUILT = {
    "AutoModel": "no class of its own",
    "Blip2QFormerModel": "its constructor downloads a tokenizer",
    "GlmImageForConditionalGeneration": "called through `generate`, token by token",
    "T5GemmaEncoder": "the name that Diffusers imports T5GemmaEncoderModel's encoder by",
}
"""Class that annotations name to why it has no row."""

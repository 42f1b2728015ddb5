"""What Diffusers' tests read from the Hub, made here: tiny tokenizers, processors and models.

`answer_hub` puts them in the place of each `from_pretrained` of Transformers. They have the sizes that the
tests expect of theirs, and a vocabulary of characters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stopdown.pipelines.tiny_pipelines import make_clip_tokenizer, make_t5_tokenizer

MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
SPECIAL = ("<|im_start|>", "<|im_end|>", *MARKS.values())
CHAT = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}"
    "{{ c.get('text', '<|vision_start|><|image_pad|><|vision_end|>') }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
WIDTH = 16
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": WIDTH,
    "num_heads": 4,
    "intermediate_size": 32,
}
ROPE = {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 1e6}


def make_byte_tokenizer(**options: Any) -> Any:
    """A `Qwen2Tokenizer` that knows single bytes and the marks of chats and pictures."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    pieces = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", *SPECIAL]
    made = Qwen2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], **options
    )
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    made.chat_template = CHAT
    return made


def make_gemma_tokenizer(**options: Any) -> Any:
    """A tokenizer of single bytes that begins each text with a mark, as Gemma's: none is empty."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    mark = "<|endoftext|>"
    backend = make_byte_tokenizer().backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single=f"{mark} $A", special_tokens=[(mark, backend.token_to_id(mark))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=mark, eos_token=mark, pad_token=mark, **options
    )


def make_chatglm_tokenizer(kind: type) -> Any:
    """A `ChatGLMTokenizer`, which Diffusers has for Kolors, that knows single letters."""
    from sentencepiece import SentencePieceTrainer

    letters = [chr(97 + i) for i in range(26)]
    with tempfile.TemporaryDirectory() as name:
        SentencePieceTrainer.train(
            sentence_iterator=iter([" ".join(letters), " ".join(reversed(letters))]),
            model_prefix=f"{name}/tokenizer",
            model_type="char",
            vocab_size=64,
            hard_vocab_limit=False,
            pad_id=3,
            minloglevel=2,
        )
        made = kind(f"{name}/tokenizer.model")
        with tempfile.NamedTemporaryFile(suffix=".model", delete=False) as file:
            file.write((Path(name) / "tokenizer.model").read_bytes())  # it's copied when saved
        made.vocab_file = file.name
    return made


def make_chatglm_config() -> Any:
    """What the Hub's tiny ChatGLM has."""
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig

    return ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=128,
        hidden_size=8,
        ffn_hidden_size=16,
        kv_channels=4,
        num_attention_heads=2,
        seq_length=256,
        add_qkv_bias=True,
        original_rope=True,
    )


def make_roberta_tokenizer(**options: Any) -> Any:
    """A `RobertaTokenizer` that knows single bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import RobertaTokenizer

    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    return RobertaTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], **options
    )


def make_unigram_tokenizer(**options: Any) -> Any:
    """An `XLMRobertaTokenizer` that knows single characters."""
    from transformers import XLMRobertaTokenizer

    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *map(chr, range(97, 123)), "<mask>"]
    return XLMRobertaTokenizer(vocab=[(x, 0.0 if x[0] == "<" else -2.0) for x in pieces], **options)


def make_bert_tokenizer(**options: Any) -> Any:
    """A `BertTokenizer` that knows single letters."""
    from transformers import BertTokenizer

    letters = [*map(chr, range(97, 123))]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    return BertTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        **{"model_max_length": 77, **options},
    )


def make_processor(**options: Any) -> Any:
    """A `Qwen2VLProcessor` for pictures of a few patches."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    size = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**size),
        tokenizer=make_byte_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(**size),
        chat_template=CHAT,
    )


def make_large_patch_processor() -> Any:
    """A `Qwen3VLProcessor`, whose patches are larger than those of Qwen 2's."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    size = {"min_pixels": 32 * 32, "max_pixels": 64 * 64, "patch_size": 16}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**size),
        tokenizer=make_byte_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(patch_size=16),
        chat_template=CHAT,
    )


def make_glm_processor(kind: type) -> Any:
    """A `GlmImageProcessor`, whose tokenizer knows the marks of grids and of generated pictures."""
    from transformers import GlmImageImageProcessor

    marks = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    tokenizer = make_byte_tokenizer(bos_token="<|dit_token_16384|>", extra_special_tokens=marks)
    tokenizer.chat_template = CHAT
    size = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
    return kind(
        image_processor=GlmImageImageProcessor(**size), tokenizer=tokenizer, chat_template=CHAT
    )


def make_t5_config() -> Any:
    """What the Hub's tiny T5 has."""
    from transformers import T5Config

    return T5Config(vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=5, num_heads=4)


def _make_model(kind: type) -> Any:
    import transformers as of

    shared = {name: 259 + number for number, name in enumerate(MARKS)}
    seen = {**VISION, "out_hidden_size": WIDTH, "hidden_size": 32}
    small = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2}
    pictures = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    mixed = {**ROPE, "mrope_interleaved": True}
    configs: dict[str, Callable[[], Any]] = {
        "ChatGLMModel": make_chatglm_config,
        "T5EncoderModel": make_t5_config,
        "UMT5EncoderModel": lambda: of.UMT5Config(
            vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4
        ),
        "BertModel": lambda: of.BertConfig(vocab_size=1124, num_attention_heads=4, **small),
        "LlamaForCausalLM": lambda: of.LlamaConfig(
            **{**TEXT, "num_attention_heads": 4, "num_key_value_heads": 4}
        ),
        "Gemma3ForConditionalGeneration": lambda: of.Gemma3Config(
            text_config={**TEXT, "hidden_size": 32, "head_dim": 8, "sliding_window": 64},
            vision_config={
                **pictures,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=1,
        ),
        "Qwen2VLForConditionalGeneration": lambda: of.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": ROPE},
            vision_config={**VISION, "mlp_ratio": 2},
            **shared,
        ),
        "Qwen2_5_VLForConditionalGeneration": lambda: of.Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": ROPE}, vision_config=seen, **shared
        ),
        "Qwen3VLForConditionalGeneration": lambda: of.Qwen3VLConfig(
            text_config={**TEXT, "head_dim": 8, "rope_parameters": mixed},
            vision_config={**seen, "deepstack_visual_indexes": [0]},
            **shared,
        ),
        "SiglipVisionModel": lambda: of.SiglipVisionConfig(
            num_attention_heads=4, image_size=30, patch_size=2, **small
        ),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = kind(configs[kind.__name__]())
        if kind.__name__ == "ChatGLMModel":  # its weights are made by `torch.empty`
            for name, value in made.state_dict().items():
                value.normal_(0, 0.1) if value.dim() > 1 else value.fill_("norm" in name)
        return made


def _make_tokenizer(kind: type, where: str, taken: dict[str, Any]) -> Any:
    name = kind.__name__
    if "CLIP" in name or ("clip" in where and "mclip" not in where):
        return make_clip_tokenizer()
    if "ChatGLM" in name:
        return make_chatglm_tokenizer(kind)
    if "gemma" in where:
        return make_gemma_tokenizer(**taken)
    if "XLM" in name:
        return make_unigram_tokenizer(model_max_length=77, **taken)
    if "Roberta" in name:
        return make_roberta_tokenizer(**taken)
    if "T5" in name or "t5" in where:
        made = make_t5_tokenizer()
        made.model_max_length = taken.get("model_max_length", 512)
        return made
    return make_bert_tokenizer(**taken) if "bert" in where else make_byte_tokenizer(**taken)


def _make_part(kind: type, source: str, **options: Any) -> Any:
    """What a class makes of a name of the Hub."""
    name, where = kind.__name__, source.lower()
    taken = {k: x for k, x in options.items() if k in ("model_max_length", "truncation")}
    if name == "AutoConfig":
        return make_t5_config()
    if "Tokenizer" in name:
        return _make_tokenizer(kind, where, taken)
    if name == "GlmImageProcessor":
        return make_glm_processor(kind)
    if name.endswith("ImageProcessor") or name.endswith("FeatureExtractor"):
        left = {k: x for k, x in options.items() if k not in ("subfolder",)}
        if name == "DPTImageProcessor":
            left = {"size": {"height": 32, "width": 32}, **left}
        return kind(**left)
    if name == "Qwen3VLProcessor":
        return make_large_patch_processor()
    return make_processor() if "Processor" in name else _make_model(kind)


def answer_hub() -> None:
    """Make here whatever a class of Transformers is asked for by a name of the Hub."""
    import transformers
    from transformers import FeatureExtractionMixin, ImageProcessingMixin, ProcessorMixin

    bases = (
        *(transformers.PreTrainedTokenizerBase, transformers.PreTrainedModel, ProcessorMixin),
        *(FeatureExtractionMixin, ImageProcessingMixin, transformers.AutoTokenizer),
        *(transformers.AutoConfig, transformers.AutoProcessor),
    )
    for base in bases:
        read = vars(base)["from_pretrained"].__func__

        def from_pretrained(
            kind: Any, source: Any, *args: Any, read: Any = read, **options: Any
        ) -> Any:
            is_name = isinstance(source, str) and source.count("/") == 1 and source[0] not in "/."
            if is_name:
                return _make_part(kind, source, **options)
            return read(kind, source, *args, **options)

        base.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment, method-assign]

    import diffusers

    diffusers.UNet2DModel.from_pretrained = _make_unet  # type: ignore[method-assign]


def _make_unet(source: str, *, subfolder: str = "", **options: Any) -> Any:
    """What `diffusers/consistency-models-test` has: a UNet of pictures, with classes or without."""
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        num_class_embeds=10 if subfolder.endswith("cond") else None,
    )


def fit_vocabularies(components: dict[str, Any]) -> None:
    """Give text encoders the tokens and the marks of their tokenizers."""
    for name, encoder in components.items():
        suffix = name.removeprefix("text_encoder")
        tokenizer = components.get(f"tokenizer{suffix}") or components.get(f"processor{suffix}")
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        if not name.startswith("text_encoder") or not hasattr(encoder, "get_input_embeddings"):
            continue
        if tokenizer is None or not hasattr(tokenizer, "convert_tokens_to_ids"):
            continue
        try:
            embeddings = encoder.get_input_embeddings()
        except NotImplementedError:  # CLAP and M-CLIP, whose tokens are those of a part
            encoder = getattr(encoder, "text_model", None) or encoder.transformer
            embeddings = encoder.get_input_embeddings()
        if embeddings is not None and embeddings.weight.shape[0] < len(tokenizer):
            encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        for field, mark in MARKS.items():
            if getattr(encoder.config, field, None) is not None and mark in tokenizer.get_vocab():
                setattr(encoder.config, field, tokenizer.convert_tokens_to_ids(mark))

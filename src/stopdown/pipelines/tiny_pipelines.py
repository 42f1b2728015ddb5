"""Tiny pipelines of real Diffusers classes with random weights, the implementation of `testing`.

Each is small enough that a run takes about a second on one CPU core, also in fp16. Classes and
configurations are data in `knowledge/rules/tiny_pipelines.toml`. Weights come from the classes' own
initialisation. Tokenizers are real ones with a vocabulary of characters.

`overflow_` makes a component overflow fp16 as real checkpoints do: the values of its residual stream (or of
a gated product) are multiplied by a power of two. Only norms read the stream, so fp32 and bf16 are still
right, but in fp16 the component returns NaN. All weights fit in fp16.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from stopdown.files.toml_files import read_rows, read_rules

LARGEST_WEIGHT = 32768.0
"""Limit for scaled weights, so that they stay finite in fp16."""

SPECIAL_PIECES = ("<pad>", "</s>", "<unk>", "▁")
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'-"


def make_t5_tokenizer() -> Any:
    """Make a `T5Tokenizer` whose vocabulary is single characters."""
    from transformers import T5Tokenizer

    pieces = [*SPECIAL_PIECES, *CHARACTERS]
    vocab = [(piece, 0.0 if index < 3 else -2.0) for index, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0)


def make_clip_tokenizer() -> Any:
    """Make a `CLIPTokenizer` whose vocabulary is single characters, also in their form at word ends."""
    from transformers import CLIPTokenizer

    letters = CHARACTERS.lower()
    pieces = dict.fromkeys([*letters, *(f"{letter}</w>" for letter in letters)])
    pieces |= dict.fromkeys(["<|startoftext|>", "<|endoftext|>"])
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def list_tiny_pipelines() -> tuple[str, ...]:
    return tuple(read_rules("tiny_pipelines")["pipeline"])


def build_part(name: str) -> Any:
    """Build a component of `tiny_pipelines.toml`, with weights from PyTorch's global generator."""
    import diffusers
    import transformers

    fields = _read_part(name)
    class_name = fields.pop("class")
    if class_name == "T5Tokenizer":
        return make_t5_tokenizer()
    if class_name == "CLIPTokenizer":
        return make_clip_tokenizer()
    if hasattr(diffusers, class_name):
        return getattr(diffusers, class_name)(**fields)
    kind: Any = getattr(transformers, class_name)
    return kind(kind.config_class(**fields)) if issubclass(kind, torch.nn.Module) else kind()


def _read_part(name: str) -> dict[str, Any]:
    own = dict(read_rules("tiny_pipelines")["part"][name])
    like = own.pop("like", "")
    return {**_read_part(like), **own} if like else own


def build_pipeline(name: str, *, seed: int = 0) -> Any:
    """Build the tiny pipeline of this name in fp32, with random weights from a seed.

    The global random state is not changed.
    """
    import diffusers

    parts = dict(read_rules("tiny_pipelines")["pipeline"][name])
    kind = getattr(diffusers, parts.pop("class"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        components = {component: build_part(part) for component, part in parts.items()}
    for component in components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(False)
    taken = inspect.signature(kind.__init__).parameters
    absent = {x: None for x in ("safety_checker", "feature_extractor") if x in taken}
    switches = {x: False for x in ("requires_safety_checker", "add_watermarker") if x in taken}
    return kind(**{**absent, **switches, **components})


def build_wide(heads: int, layers: int, time_width: int, device: str) -> Any:
    """Build the tiny CogVideoX with a denoiser of the given size on a device, with fixed random weights.

    Args:
        heads: attention heads, each of 64 features.
        layers: number of transformer blocks.
        time_width: width of the time embedding.
    """
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


class Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Patterns of the parameters that write the residual stream of some classes (`tiny_pipelines.toml`)."""

    classes: tuple[str, ...]
    writers: str = ""
    carriers: str = ""
    buffers: str = ""
    spikes: tuple[tuple[str, int], ...] = ()


@functools.cache
def read_streams() -> dict[str, Stream]:
    """Map the class of each tiny model to the weights to scale so that it overflows."""
    rows = read_rows("tiny_pipelines", "stream", Stream)
    return {class_name: row for row in rows for class_name in row.classes}


def overflow_(module: torch.nn.Module | None) -> int:
    """Scale a module's weights in place so that it overflows in fp16, but not in fp32 or bf16.

    Returns:
        The exponent of the power of two by which its residual stream was multiplied; 0 for a gated product.
    """
    known = read_streams()
    stream = known.get(type(module).__name__)
    if module is None or stream is None:
        raise ValueError(f"no rule makes {type(module).__name__} overflow; known: {list(known)}")
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

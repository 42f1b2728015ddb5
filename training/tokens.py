"""The tokenizer of the models: T5's Unigram tokenizer with a vocabulary of whole words and letters."""

from __future__ import annotations

import string
from collections.abc import Iterable

from transformers import T5Tokenizer


def make_tokenizer(captions: Iterable[str]) -> T5Tokenizer:
    """Words of the captions, then single characters for every other word, then nothing else."""
    words = {word.strip(",") for caption in captions for word in caption.split()}
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -100.0), ("▁", -4.0)]
    pieces += [(f"▁{word}", -2.0) for word in sorted(words)]
    pieces += [
        (letter, -8.0) for letter in string.ascii_letters + string.digits + string.punctuation
    ]
    return T5Tokenizer(vocab=pieces, extra_ids=0, additional_special_tokens=[])

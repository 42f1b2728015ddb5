"""The tokenizer of `shapes`: T5's Unigram tokenizer with a vocabulary of whole words and letters."""

from __future__ import annotations

import string

from transformers import T5Tokenizer

from scenes import TEMPLATES, all_scenes


def make_tokenizer() -> T5Tokenizer:
    """Words of the captions, then single characters for every other word, then nothing else."""
    words = {
        word.strip(",") for s in all_scenes() for t in TEMPLATES for word in s.caption(t).split()
    }
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -100.0), ("▁", -4.0)]
    pieces += [(f"▁{word}", -2.0) for word in sorted(words)]
    pieces += [
        (letter, -8.0) for letter in string.ascii_letters + string.digits + string.punctuation
    ]
    return T5Tokenizer(vocab=pieces, extra_ids=0, additional_special_tokens=[])

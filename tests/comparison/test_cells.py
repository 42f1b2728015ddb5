"""Cells of a comparison: stored, read back, and their pictures in a page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from diffusers import KandinskyV22PriorPipeline, PriorTransformer, UnCLIPScheduler
from PIL import Image
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from models.comparisons import draw_clip
from stopdown import compare, testing
from stopdown.comparison.cells import (
    fail_cell,
    make_sheet,
    read_outcome,
    share_bytes,
    write_outcome,
)
from stopdown.errors import InputError
from stopdown.pipelines.requests import Request


def test_a_finished_cell_that_was_changed_is_named(tmp_path: Path) -> None:
    """The message says what to remove; a cell as it was written comes back."""
    path = tmp_path / "cell.msgpack"
    write_outcome(fail_cell("bf16", "no memory"), path)
    assert read_outcome(path).cell.error == "no memory"
    content = path.read_bytes()
    for changed in (b"", content[:40], content.replace(b"precision", b"precisiom")):
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"cell\.msgpack can't be read: .*rm "):
            read_outcome(path)


def test_a_small_clip_is_kept_without_loss() -> None:
    """Every pixel of every frame comes back from the sheet."""
    frames = (draw_clip(4) * 255).round().astype(np.uint8)
    sheet = make_sheet(frames, 100_000)
    whole = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet.data))).convert("RGB"))
    for index, frame in enumerate(frames):
        y, x = (index // sheet.columns) * sheet.height, (index % sheet.columns) * sheet.width
        assert np.array_equal(whole[y : y + sheet.height, x : x + sheet.width], frame)


def test_a_large_clip_is_made_to_fit() -> None:
    """Noise that does not compress is made smaller until it fits; its frames stay in order."""
    frames = np.random.default_rng(0).integers(0, 256, (16, 96, 96, 3), np.uint8)
    sheet = make_sheet(frames, 12_000)
    assert len(base64.b64decode(sheet.data)) <= 12_000
    assert sheet.width < 96 or sheet.every > 1
    assert sheet.frames * sheet.every >= 16


def test_twenty_prompts_by_six_stay_below_thirty_megabytes() -> None:
    """All shares together, difference maps and base64 included, leave room for the page."""
    cells = 20 * 6
    pictures = cells * (share_bytes(cells) + share_bytes(cells) // 3)
    assert pictures * 4 / 3 < 28_000_000


def test_embeddings_are_compared_by_their_values() -> None:
    """A prior returns no picture: what it hands on to the decoder is measured, as sound is."""
    tokenizer = testing.make_pipeline("sd").tokenizer
    tiny = {"hidden_size": 32, "projection_dim": 32, "intermediate_size": 37}
    tiny |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    text = CLIPTextConfig(**tiny, vocab_size=1000, eos_token_id=tokenizer.eos_token_id)
    pipe = KandinskyV22PriorPipeline(
        PriorTransformer(
            num_attention_heads=2, attention_head_dim=12, embedding_dim=32, num_layers=1
        ),
        CLIPVisionModelWithProjection(CLIPVisionConfig(**tiny, image_size=16, patch_size=8)),
        CLIPTextModelWithProjection(text),
        tokenizer,
        UnCLIPScheduler(prediction_type="sample", clip_sample_range=10.0),
        None,
    )
    made = compare(pipe, "a", "fp32,fp16-plain", request=Request(steps=2))
    first, second = made.rows[0].cells
    assert not first.error
    assert (first.verdict, first.sheet) == ("reference", None)
    assert second.measures is not None
    assert second.verdict == "same"

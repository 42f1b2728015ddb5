"""GGUF files: opened, their texts, and the values and scales of blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.weight_file_samples import draw, write_gguf
from stopdown.errors import StopdownError
from stopdown.sources import gguf_files
from stopdown.sources.gguf_files import list_blocks, open_gguf, read_texts, unpack_rows


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_values_are_those_that_were_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows at a time, up to the rounding of the type."""
    weight = draw(8, 64)
    reader = open_gguf(write_gguf(tmp_path / "a.gguf", kind, {"a": weight.numpy()}))
    (found,) = list_blocks(reader)
    assert (found.name, found.shape) == ("a", (8, 64))
    monkeypatch.setattr(gguf_files, "_MOST_VALUES", 3 * 64)
    parts = list(unpack_rows(reader.tensors[0]))
    assert len(parts) > 1
    assert all(x.dtype == torch.float32 for x in parts)
    torch.testing.assert_close(torch.cat(parts).reshape(8, 64), weight, rtol=0.0, atol=0.02)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_scales_are_those_of_the_blocks(kind: str, tmp_path: Path) -> None:
    """Of a block of 32 values of one size, the scale times the largest code is that size."""
    sizes = torch.tensor([0.5, 2.0])
    weight = (sizes[:, None] * torch.tensor([1.0, -1.0]).repeat(16)).numpy()
    (found,) = list_blocks(open_gguf(write_gguf(tmp_path / "a.gguf", kind, {"a": weight})))
    assert found.read_scales is not None
    scales = found.read_scales().float()
    steps = {"Q8_0": 127, "Q4_1": 15 / 2}[kind]
    torch.testing.assert_close(scales[:, 0] * steps, sizes, rtol=2e-3, atol=0.0)
    (plain,) = list_blocks(open_gguf(write_gguf(tmp_path / "b.gguf", "F16", {"a": weight})))
    assert plain.read_scales is None


def test_texts_of_the_header_are_read(tmp_path: Path) -> None:
    """The architecture is one of them; numbers are none."""
    path = write_gguf(tmp_path / "a.gguf", "F16", {"a": np.ones((2, 4), np.float32)})
    texts = read_texts(open_gguf(path))
    assert texts["general.architecture"] == "flux"
    assert all(isinstance(x, str) for x in texts.values())


@pytest.mark.parametrize("damage", ["other", "cut"])
def test_what_is_no_gguf_is_refused(damage: str, tmp_path: Path) -> None:
    """A file of another kind, and one that is cut off."""
    path = write_gguf(tmp_path / "a.gguf", "F16", {"a": np.ones((64, 64), np.float32)})
    content = path.read_bytes()
    path.write_bytes(b"none" if damage == "other" else content[:40])
    said = "doesn't begin with the letters GGUF" if damage == "other" else "isn't whole"
    with pytest.raises(Exception, match=said) as caught:
        open_gguf(path)
    assert not isinstance(caught.value, StopdownError)  # its caller says which file it is

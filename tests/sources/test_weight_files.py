"""A weight file as a list of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stopdown.sources.headers import DamagedFileError
from stopdown.sources.weight_files import load_weights, open_weight_file, read_shapes


def test_weights_come_as_they_are_stored(tmp_path: Path) -> None:
    """Values, dtypes, shapes and sizes are those of the file."""
    stored = {"a": torch.randn(2, 3).half(), "b": torch.randn(4).bfloat16()}
    save_file(stored, tmp_path / "w.safetensors")
    found = load_weights(tmp_path / "w.safetensors")
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    shapes = read_shapes(tmp_path / "w.safetensors")
    assert {name: x.shape for name, x in shapes.items()} == {"a": (2, 3), "b": (4,)}
    opened = open_weight_file(tmp_path / "w.safetensors")
    assert {x.name for x in opened.weights} == {"a", "b"}


def test_a_file_that_is_cut_off_is_damaged(tmp_path: Path) -> None:
    """It is told before any value is read."""
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedFileError):
        open_weight_file(path)

"""Weights of a file, read piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stopdown.errors import ScalingError
from stopdown.sources.file_weights import describe_plain, iterate_rows
from stopdown.sources.headers import read_header


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_plain_weight_is_read_in_fp32(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Its values and shape are those of the file."""
    path, value = tmp_path / "a.safetensors", torch.randn(shape).bfloat16()
    save_file({"w": value}, path)
    weight = describe_plain(path, "w", read_header(path)["w"])
    assert torch.equal(weight.load(), value.float())
    assert (weight.stored, weight.shape) == ("bf16", shape)


def test_a_format_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    """The name of the weight and its format are in the message."""
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(2, dtype=torch.int16)}, path)
    with pytest.raises(ScalingError, match="The values of w can't be unpacked: it is stored as "):
        describe_plain(path, "w", read_header(path)["w"]).load()


def test_slices_of_rows_cover_each_row_once() -> None:
    """A slice has at most 4 M values, or one row that is larger."""
    rows = list(iterate_rows(torch.empty(5, 2**21)))
    assert rows == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(iterate_rows(torch.empty(2, 2**23, device="meta"))) == [slice(0, 1), slice(1, 2)]

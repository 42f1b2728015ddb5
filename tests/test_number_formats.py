"""Formats as data, held against torch."""

from __future__ import annotations

import pytest
import torch

from stopdown.errors import OptionError
from stopdown.number_formats import (
    FORMATS,
    PRECISIONS,
    Format,
    find_format,
    format_about,
    format_figure,
    format_range,
    name_dtype,
    parse_precision,
)


@pytest.mark.parametrize("entry", FORMATS.values(), ids=list(FORMATS))
def test_figures_are_those_of_torch(entry: Format) -> None:
    """Largest, smallest and precision of each format are what torch says of its dtype."""
    info = torch.finfo(entry.torch_dtype)
    assert entry.largest == info.max
    assert entry.smallest_normal == info.smallest_normal
    assert 2.0 ** (1 - entry.significant_bits) == info.eps
    assert entry.size_bytes * 8 == info.bits
    assert entry.smallest == pytest.approx(
        entry.smallest_normal * 2.0 ** (1 - entry.significant_bits), rel=0.02
    )


@pytest.mark.parametrize("entry", FORMATS.values(), ids=list(FORMATS))
def test_a_format_is_found_by_each_of_its_names(entry: Format) -> None:
    """The torch dtype, its name, the name in safetensors and our own lead to one format."""
    for key in (entry.torch_dtype, entry.torch_name, entry.safetensors_name, entry.name):
        assert find_format(key) is entry
    assert name_dtype(entry.torch_dtype) == entry.name


def test_integers_are_no_format() -> None:
    """An integer dtype has no format and keeps torch's name."""
    assert find_format(torch.int64) is None
    assert find_format("I64") is None
    assert name_dtype(torch.int64) == "int64"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fp16", "fp16"),
        ("FP16 ", "fp16"),
        ("half", "fp16"),
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("float32", "fp32"),
        ("full", "fp32"),
    ],
)
def test_a_precision_is_read_from_its_common_names(text: str, name: str) -> None:
    """Common aliases lead to the three precisions."""
    assert parse_precision(text) == name
    assert name in PRECISIONS


@pytest.mark.parametrize("text", ["fp8", "int8", "fp64", "", "auto"])
def test_an_unknown_precision_is_refused(text: str) -> None:
    """What a component cannot run in is an error of usage that shows both ways to write one."""
    with pytest.raises(OptionError) as caught:
        parse_precision(text)
    assert str(caught.value) == (
        f"The precision {text!r} is unknown. Known values are fp32, bf16, fp16, auto, and the "
        'path of a plan, such as plan.json. For example: precision="fp16", or '
        'precision="transformer=bf16,vae=fp32".'
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 s"), (99.4, "99 s"), (100, "2 min"), (5990, "100 min"), (9000, "2.5 h")],
)
def test_an_estimated_time_is_rounded(seconds: float, said: str) -> None:
    """Two digits and a unit, since it is an estimate."""
    assert format_about(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.134, "0.13"),
        (2.0, "2"),
        (23.7, "24"),
        (99.7, "100"),
        (121.0, "120"),
        (4649.0, "4,600"),
        (8e-5, "8e-05"),
    ],
)
def test_a_figure_has_two_digits_and_no_exponent(value: float, said: str) -> None:
    """Nobody has to read `1.2e+02 times`."""
    assert format_figure(value) == said


@pytest.mark.parametrize(
    ("least", "most", "said"),
    [
        (900, 1860, "15 to 31 min"),
        (68, 120, "1 to 2 min"),
        (20, 120, "20 s to 2 min"),
        (5400, 7200, "90 min to 2.0 h"),
        (61, 61.2, "61 s"),
    ],
)
def test_a_range_has_its_unit_once(least: float, most: float, said: str) -> None:
    """Two times in the same unit share it; others have both units, and equal ones are one time."""
    assert format_range(least, most) == said

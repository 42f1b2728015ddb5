"""Exponents that a repair found, merged with those of submodules that didn't fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stopdown.records import ResidualStream, Scaling
from stopdown.runtime.merged_scalings import merge_scalings

BEFORE = Scaling(
    exponents={"encoder.a": -3},
    fp32_modules=("encoder.c",),
    fp32_flops=0.25,
    headroom_bits=1.0,
    tightest="VAE:encoder.a",
    certified=True,
    pinned={"odd": ("VAE:encoder",)},
    outputs={0: 2},
    stream=ResidualStream(("encoder.d", "decoder.d"), ("encoder.e",), cast_input_up=("",)),
    limits={"encode.x": 1.0, "decode.z": 64.0},
    sizes={"encode.x": ((4,),), "decode.z": ((9,),)},
    note="Why not.",
)


FOUND = Scaling(exponents={"decoder.a": -1}, fp32_flops=0.5, headroom_bits=2.0, tightest="new")


MERGED: dict[str, Any] = {
    "fp32_flops": 0.75,
    "tightest": "VAE:encoder.a",
    "certified": False,
    "pinned": {"odd": ("VAE:encoder",)},
    "outputs": {0: 2},
    "stream": ResidualStream(("encoder.d",), ("encoder.e",), cast_input_up=("",)),
    "limits": {"encode.x": 1.0},
    "sizes": {"encode.x": ((4,),)},
    "note": "Why not.",
}


@pytest.mark.parametrize("name", MERGED)
def test_what_did_not_fail_keeps_everything(name: str) -> None:
    """A decoder's new exponents leave stream, limits, outputs and pins of the encoder as they were."""
    merged = merge_scalings(BEFORE, FOUND, ["decoder.a"], ["decode"])
    assert getattr(merged, name) == MERGED[name]


def test_what_failed_keeps_nothing() -> None:
    """Calls of the component itself make its own casts, outputs and limits anew."""
    before = dataclasses.replace(BEFORE, limits={"forward.x": 1.0})
    merged = merge_scalings(before, FOUND, ["encoder.a", "decoder.a"], ["forward"])
    assert (merged.outputs, merged.limits, merged.stream) == ({}, {}, None)
    assert merged.exponents == {"decoder.a": -1}
    assert merged.tightest == "new"


def test_parts_that_did_not_fail_keep_their_exponents() -> None:
    """New exponents of a decoder leave those of the encoder in force."""
    before = Scaling(
        exponents={"encoder.a": -3, "decoder.a": -2},
        eps={"encoder.norm.eps": -6},
        multiplies={"decoder.b": 1},
        fp32_modules=("encoder.c", "decoder.c"),
        headroom_bits=1.5,
        kept_buffers=("encoder.t",),
    )
    found = Scaling(exponents={"decoder.b": -4}, headroom_bits=3.0, kept_buffers=("decoder.t",))
    merged = merge_scalings(before, found, ["decoder.a", "decoder.b"])
    assert merged.exponents == {"encoder.a": -3, "decoder.b": -4}
    assert merged.eps == {"encoder.norm.eps": -6}
    assert merged.multiplies == {}
    assert merged.fp32_modules == ("encoder.c",)
    assert (merged.headroom_bits, merged.kept_buffers) == (1.5, ("decoder.t", "encoder.t"))

"""Values of calls as files keep them: packed, unpacked, and told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DecoderOutput

from stopdown.runtime.journal_values import PackingError, digest_call, pack, unpack


def test_structures_come_back_with_strides_and_shared_tensors() -> None:
    """Outputs keep their class; a tensor that is there twice is stored once."""
    tensor = torch.arange(6.0).reshape(2, 3).T
    value = {"a": [tensor, (tensor, None, 1.5)], "b": DecoderOutput(sample=torch.ones(2))}
    structure, tensors = pack(value)
    assert len(tensors) == 2
    found: Any = unpack(structure, tensors)
    assert found["a"][0] is found["a"][1][0]
    assert found["a"][0].stride() == tensor.stride()
    assert torch.equal(found["a"][0], tensor)
    assert type(found["b"]) is DecoderOutput
    assert found["a"][1][1:] == (None, 1.5)


def test_other_objects_are_refused() -> None:
    """Nothing is pickled, and a structure that is damaged gives no value."""
    with pytest.raises(PackingError, match="it returns a set"):
        pack({1})
    with pytest.raises(PackingError, match="its structure is not right"):
        unpack({"tensor": 3, "strides": [1], "on": "cpu"}, [])


def test_calls_differ_by_each_argument() -> None:
    """The digest follows names, values, dtypes and shapes."""
    x = torch.ones(4)
    calls = [
        ("vae", (x,), {}),
        ("unet", (x,), {}),
        ("vae", (), {"x": x}),
        ("vae", (x.half(),), {}),
        ("vae", (x.view(2, 2),), {}),
        ("vae", (x * 2,), {}),
    ]
    assert len({digest_call(*call) for call in calls}) == len(calls)
    assert digest_call(*calls[0]) == digest_call("vae", (x.clone(),), {})

"""Values of calls as files keep them: packed, unpacked, and told apart."""

from __future__ import annotations

import hmac
import importlib
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from transformers.modeling_outputs import BaseModelOutput

from stopdown.runtime.journal_values import (
    PackingError,
    _spread,
    digest_call,
    pack,
    unpack,
)

EYE = torch.eye(2)


def seal(content: bytes) -> bytes:
    """Content with the checksum that a journal expects."""
    return content + hmac.digest(b"", content, "sha256")


def test_structures_come_back_with_strides_and_shared_tensors() -> None:
    """Outputs keep their class; a tensor that is there twice is stored once."""
    tensor = torch.arange(6.0).reshape(2, 3).T
    value = {"a": [tensor, (tensor, None, 1.5)], "b": DecoderOutput(sample=torch.ones(2))}
    found: Any = unpack(pack(value))
    assert found["a"][0] is found["a"][1][0]
    assert found["a"][0].stride() == tensor.stride()
    assert torch.equal(found["a"][0], tensor)
    assert type(found["b"]) is DecoderOutput
    assert found["a"][1][1:] == (None, 1.5)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:, -1],
        lambda x: x[1, :, :3].T,
        lambda x: x[:1, 0].expand(5, 512),
        lambda x: x[:, :0],
        lambda x: torch.nn.Parameter(x[0, 0]),
    ],
)
def test_views_come_back_without_the_storage_behind_them(
    cut: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A part of a large tensor keeps values and strides, and takes the bytes of its own values."""
    view = cut(torch.randn(2, 512, 512))
    content = pack((view, view))
    assert len(content) < 40_000
    found, again = unpack(content)
    assert found is again
    assert torch.equal(found, view)
    assert (found.shape, found.stride()) == (view.shape, view.stride())
    assert not found.requires_grad


class Unknown:
    """No output of a model."""


class Own(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Unknown(), r"\S*test_journal_values.Unknown is no output of a model"),
        (np.ones(2), r"numpy\S+ is no output of a model"),
        (BaseModelOutput(last_hidden_state=[Unknown()]), "Unknown is no output of a model"),
        (iter(()), "builtins.iter is no output of a model"),
        (EYE.as_subclass(Own), r"test_journal_values.Own is no output of a model"),
        ({"x": Unknown}, "Unknown is no output of a model"),
        (os.system, r"posix.system is no output of a model"),
        ((EYE, EYE.view(torch.int32)), "it can't be pickled: Cannot save multiple tensors"),
    ],
)
def test_other_objects_are_refused(value: Any, said: str) -> None:
    """What couldn't be read again isn't written."""
    with pytest.raises(PackingError, match=said):
        pack(value)


class Hostile:
    """Pickled, it is a call of any function."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (os.system, ("touch hostile",)),
        (eval, ("open('hostile', 'w')",)),
        (open, ("hostile", "w")),
        (DecoderOutput, ()),
        (DecoderOutput, (1, 2, 3)),
        (importlib.import_module, ("this",)),
        (torch.nn.Linear, (2, 2)),
        (_spread, (torch.ones(2), (2**60,), (2**60,))),
        (_spread, (torch.ones(2), (5,), (1,))),
    ],
)
def test_a_hostile_pickle_is_refused(
    call: Any, arguments: tuple[Any, ...], tmp_path: Path, monkeypatch: Any
) -> None:
    """A file that calls other functions or names other classes executes and imports nothing."""
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    torch.save({"output": Hostile(call, *arguments)}, file)
    with pytest.raises(PackingError, match="its structure isn't right"):
        unpack(seal(file.getvalue()))
    assert not list(tmp_path.iterdir())
    assert "this" not in sys.modules


def test_what_is_no_file_of_a_journal_is_refused() -> None:
    """Cut, empty, or pickled by something else."""
    whole = pack({"output": torch.ones(3)})
    for content in (b"", whole[: len(whole) // 2], pickle.dumps({"output": 1}), b"PK" + bytes(99)):
        with pytest.raises(PackingError, match="it is damaged"):
            unpack(content)
        with pytest.raises(PackingError, match="its structure isn't right"):
            unpack(seal(content))
    with pytest.raises(PackingError, match="was made with other arguments"):
        unpack(whole, purpose="another")


def test_a_name_is_looked_up_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of an output whose module isn't loaded is refused, and the module stays away."""
    content = pack(DecoderOutput(sample=EYE))
    monkeypatch.delitem(sys.modules, DecoderOutput.__module__)
    with pytest.raises(PackingError, match="its structure isn't right"):
        unpack(content)
    assert DecoderOutput.__module__ not in sys.modules


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

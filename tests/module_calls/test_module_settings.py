"""What is set on a module between its calls, while exponents are in it: right, refused or reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models.settable_models import WAYS, Stream, call, planned, repaired, rescaled
from stopdown.errors import ScalingError
from stopdown.module_calls.module_settings import ModuleSettings
from stopdown.numerics import relative_l2
from stopdown.scaling.watch.folded_weights import FoldedWeights


def replace_part(module: Stream) -> None:
    torch.manual_seed(5)
    other = nn.Linear(16, 16).requires_grad_(False)
    other.weight.mul_(2.0**15)
    module.embed = other.to(module.embed.weight.dtype)


SET: dict[str, tuple[Callable[[Stream], object], str]] = {
    "added": (lambda module: setattr(module, "mode", "added"), "with mode=added (forward)"),
    "gated": (lambda module: setattr(module, "mode", "gated"), "with mode=gated (forward)"),
    "list": (lambda module: module.shares.__setitem__(0, 0.5), "with shares[] (forward)"),
    "part": (replace_part, "with another embed (forward)"),
}


def find_allowed(module: Stream) -> float:
    """The error of bf16, which is what a guard casts to."""
    low = copy.deepcopy(module).bfloat16()
    return float(relative_l2(call(low, torch.bfloat16).float(), call(module, torch.float32)))


@pytest.mark.parametrize("put", WAYS)
@pytest.mark.parametrize("name", SET)
def test_what_is_set_is_asked_for(name: str, put: Any) -> None:
    """An attribute and another part lead calls elsewhere: a guard repairs them, else they are refused."""
    change, text = SET[name]
    module, said = Stream(), list[str]()
    plain = copy.deepcopy(module)
    change(plain)
    wanted = call(plain, torch.float32)
    with put(module, said) as dtype:
        before = call(module, dtype)
        change(module)
        if put is not repaired:
            with pytest.raises(ScalingError, match=r"(Stream|part) was called with") as raised:
                call(module, dtype)
            assert text in str(raised.value)
            if name != "part":
                module.mode, module.shares[0] = "", 0.0
                assert torch.equal(call(module, dtype), before)
            return
        found = [call(module, dtype) for _ in range(2)]
    assert max(relative_l2(x.float(), wanted) for x in found) <= find_allowed(plain)
    assert sum(text in x for x in said) == 1


@pytest.mark.parametrize("name", ["gated", "list", "part"])
def test_not_looked_for_it_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at what was set the same calls are wrong by far, and nothing is said."""
    monkeypatch.setattr(ModuleSettings, "read", lambda self: None)
    module, said = Stream(), list[str]()
    plain = copy.deepcopy(module)
    SET[name][0](plain)
    with planned(module, said) as dtype:
        SET[name][0](module)
        assert relative_l2(call(module, dtype).float(), call(plain, torch.float32)) > 0.3
    assert said == []


@pytest.mark.parametrize("put", WAYS)
@pytest.mark.parametrize("kind", [list, dict])
def test_containers_that_a_call_fills(kind: type, put: Any) -> None:
    """What a call puts into its caller's list or mapping has no exponent, and is in there once."""
    module, said, wanted = Stream(), list[str](), kind()
    plain = copy.deepcopy(module)
    right = call(plain, torch.float32, wanted)
    with put(module, said) as dtype:
        store = kind()
        if put is not repaired:
            with pytest.raises(ScalingError, match="such calls put tensors into their arguments"):
                call(module, dtype, store)
            assert not store
            return
        found = call(module, dtype, store)
    low = kind()
    bf16 = call(copy.deepcopy(plain).bfloat16(), torch.bfloat16, low)
    assert len(store) == 1
    kept, true, near = (x[0] if kind is list else x["h"] for x in (store, wanted, low))
    assert relative_l2(kept.float(), true) <= max(relative_l2(near.float(), true), 2e-3)
    assert relative_l2(found.float(), right) <= max(relative_l2(bf16.float(), right), 2e-3)
    assert len(said) == 1


@pytest.mark.parametrize("put", WAYS)
def test_what_a_call_sets_is_left_alone(put: Any) -> None:
    """A counter that the call itself moves leads it nowhere: its signature stays."""
    module, said = Stream(), list[str]()
    with put(module, said) as dtype:
        first = call(module, dtype)
        assert all(torch.equal(call(module, dtype), first) for _ in range(3))
    assert said == []


class Around(nn.Module):
    """As an adapter holds a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives."""
        made: torch.Tensor = self.base_layer(x)
        return made


def test_an_adapter_is_no_other_part() -> None:
    """A layer that is wrapped, and one that is put back, have the weights that they had."""
    module, said = Stream(), list[str]()
    with rescaled(module, said) as dtype:
        before, layer = call(module, dtype), module.embed
        module.embed = Around(layer)  # type: ignore[assignment]
        assert torch.equal(call(module, dtype), before)
        module.embed = layer
        assert torch.equal(call(module, dtype), before)
    assert said == []


@pytest.mark.parametrize("trains", [False, True])
def test_a_written_row_is_refused(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of a weight, in training mode as well, PyTorch's default; not looked for, it is wrong."""
    row = Stream().embed.weight[3].flip(0) / 64
    plain = Stream()
    plain.embed.weight[3] = row
    wanted = call(plain, torch.float32)
    for is_watched in (True, False):
        module = Stream()
        with monkeypatch.context() as patch, planned(module, []) as dtype:
            module.train(trains)
            module.embed.weight[3] = row
            if is_watched:
                with pytest.raises(ScalingError, match=r"1 weights of part were rewritten"):
                    call(module, dtype)
            else:
                patch.setattr(FoldedWeights, "check", lambda self: None)
                assert not relative_l2(call(module, dtype).float(), wanted) <= 0.05  # or NaN

"""What is set on a module between its calls, while exponents are in it: right, refused or reported."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.component_calls.call_interception import UNPLANNED
from stopdown.errors import ScalingError, StopdownWarning
from stopdown.numerics import relative_l2
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.runtime.guard import guard
from stopdown.scaling.call_watch import CallWatch
from stopdown.scaling.module_settings import ModuleSettings
from stopdown.scaling.rescale import rescale_

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))


class Stream(nn.Module):
    """A stream beyond fp16, whose parts count alike; an attribute leads it elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down, self.last = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.table = nn.RMSNorm(16, eps=1e-6), nn.Parameter(torch.randn(16))
        self.mode, self.calls, self.shares = "", 0, [0.0]
        self.eval().requires_grad_(False)
        for layer in (self.embed, self.down):
            layer.weight.mul_(2.0**17)

    def forward(self, x: torch.Tensor, store: Any = None) -> torch.Tensor:
        """`[N, 16]`, the same again; a container gets the stream."""
        self.calls += 1
        h = self.embed(x)
        h = h + self.down(self.up(self.norm(h)))
        if self.mode == "added":
            h = h + self.table * 1e5
        if self.mode == "gated" or self.shares[0] != 0:
            h = h * torch.sigmoid(h * 1e-5)
        if isinstance(store, list):
            store.append(h)
        if isinstance(store, dict):
            store["h"] = h
        made: torch.Tensor = self.last(self.norm(h))
        return made


def call(module: nn.Module, dtype: torch.dtype = torch.float16, store: Any = None) -> torch.Tensor:
    made: torch.Tensor = module(X.to(dtype), **({} if store is None else {"store": store}))
    return made


@contextlib.contextmanager
def planned(module: Stream, said: list[str]) -> Iterator[torch.dtype]:
    plan = measure_plan({"part": module}, run=lambda: call(module, torch.float32))
    with warnings.catch_warnings(record=True) as caught, apply_plan({"part": module}, plan):
        warnings.simplefilter("always", StopdownWarning)
        yield torch.float16
    said += [str(x.message) for x in caught]


@contextlib.contextmanager
def repaired(module: Stream, said: list[str]) -> Iterator[torch.dtype]:
    module.half()
    with guard(module, announce=said.append) as handle:
        call(module)
        assert [x.action for x in handle.repairs] == ["rescaled"]
        said.clear()
        yield torch.float16


@contextlib.contextmanager
def rescaled(module: Stream, said: list[str]) -> Iterator[torch.dtype]:
    rescaling = rescale_(module, (X,))
    yield torch.float32
    rescaling.undo()


WAYS = [planned, repaired, rescaled]


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


@pytest.mark.parametrize("put", WAYS)
@pytest.mark.parametrize("name", SET)
def test_what_is_set_is_asked_for(name: str, put: Any) -> None:
    """An attribute and another part lead calls elsewhere: they run without exponents, or are refused."""
    change, text = SET[name]
    module, said = Stream(), list[str]()
    plain = copy.deepcopy(module)
    change(plain)
    wanted = call(plain, torch.float32)
    with put(module, said) as dtype:
        before = call(module, dtype)
        change(module)
        if put is rescaled:
            with pytest.raises(ScalingError, match=r"Stream was called with") as raised:
                call(module, dtype)
            assert text in str(raised.value)
            return
        found = [call(module, dtype) for _ in range(2)]
        if name != "part":
            module.mode, module.shares[0] = "", 0.0
            assert torch.equal(call(module, dtype), before)
            assert UNPLANNED not in vars(module)
    assert max(relative_l2(x.float(), wanted) for x in found) < 2e-3
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
    right = call(copy.deepcopy(module), torch.float32, wanted)
    with put(module, said) as dtype:
        store = kind()
        if put is rescaled:
            with pytest.raises(ScalingError, match="such calls put tensors into their arguments"):
                call(module, dtype, store)
            assert not store
            return
        found = call(module, dtype, store)
    assert len(store) == 1
    kept, true = (x[0] if kind is list else x["h"] for x in (store, wanted))
    assert relative_l2(kept.float(), true) < 2e-3
    assert relative_l2(found.float(), right) < 2e-3
    assert sum("such calls put tensors into their arguments" in x for x in said) == 1


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
        module.embed = Around(layer)
        assert torch.equal(call(module, dtype), before)
        module.embed = layer
        assert torch.equal(call(module, dtype), before)
    assert said == []


@pytest.mark.parametrize("put", WAYS)
def test_hooks_on_parts_are_reported(put: Any) -> None:
    """What a hook is given inside has an exponent: said once; a library's is its own matter."""
    module, said = Stream(), list[str]()

    def hook(part: nn.Module, given: Any, output: torch.Tensor) -> None:
        pass

    def library(part: nn.Module, given: Any, output: torch.Tensor) -> None:
        pass

    library.__module__ = "peft.tuners"
    with put(module, said) as dtype, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StopdownWarning)
        call(module, dtype)
        module.up.register_forward_hook(library)
        module.register_forward_hook(hook)  # of the component itself: it sees what its caller sees
        call(module, dtype)
        assert not [*said, *caught]
        module.down.register_forward_hook(hook)
        for _ in range(2):
            call(module, dtype)
    texts = [*said, *(str(x.message) for x in caught)]
    assert len(texts) == 1
    assert texts[0].startswith("Forward hooks were put on down of ")


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
                patch.setattr(CallWatch, "_check_weights", lambda self: None)
                assert not relative_l2(call(module, dtype).float(), wanted) <= 0.05  # or NaN

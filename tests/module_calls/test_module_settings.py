"""What is set on a module between its calls, while exponents are in it: right, refused or reported."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stopdown.errors import ScalingError, StopdownWarning
from stopdown.module_calls.module_settings import ModuleSettings
from stopdown.numerics import relative_l2
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.runtime.guard import guard
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.watch.folded_weights import FoldedWeights

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


class LoRA(nn.Module):
    """An adapter that replaces the `forward` of its layer, as kohya's do, and calls what was there."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lora_down, self.lora_up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.requires_grad_(False).lora_up.weight.mul_(2.0**17)
        self.layer, self.org_forward = [layer], layer.forward

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapter adds."""
        low = F.linear(x, self.lora_down.weight.to(x.dtype))
        return F.linear(low, self.lora_up.weight.to(x.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output with what the adapter adds."""
        made: torch.Tensor = self.org_forward(x) + self.add(x)
        return made


def replace_on_part(module: Stream, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module.down, "forward", LoRA(module.down).forward)


def replace_by_closure(module: Stream, patch: pytest.MonkeyPatch) -> None:
    lora = LoRA(module.down)
    patch.setattr(module.down, "forward", lambda x: lora(x))


def replace_on_class(module: Stream, patch: pytest.MonkeyPatch) -> None:
    lora, before, layer = LoRA(module.down), nn.Linear.forward, module.down

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return before(self, x) + lora.add(x) if self is layer else before(self, x)

    lora.org_forward = functools.partial(before, module.down)
    patch.setattr(nn.Linear, "forward", forward)


def replace_class(module: Stream, patch: pytest.MonkeyPatch) -> None:
    lora = LoRA(module.down)

    class Merged(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + lora.add(x)

    patch.setattr(module.down, "__class__", Merged)


def replace_whole(module: Stream, patch: pytest.MonkeyPatch) -> None:
    lora = LoRA(module.down)

    def forward(x: torch.Tensor, store: Any = None) -> torch.Tensor:
        h, inner = module.embed(x), None
        inner = module.norm(h)
        h = h + module.down(module.up(inner)) + lora.add(module.up(inner))
        made: torch.Tensor = module.last(module.norm(h))
        return made

    patch.setattr(module, "forward", forward)


def replace_whole_class(module: Stream, patch: pytest.MonkeyPatch) -> None:
    lora = LoRA(module.down)

    def forward(self: Stream, x: torch.Tensor, store: Any = None) -> torch.Tensor:
        h = self.embed(x)
        inner = self.up(self.norm(h))
        made: torch.Tensor = self.last(self.norm(h + self.down(inner) + lora.add(inner)))
        return made

    patch.setattr(Stream, "forward", forward)


def put_hook(module: Stream, patch: pytest.MonkeyPatch) -> None:
    lora = LoRA(module.down)
    module.down.register_forward_hook(lambda part, given, output: output + lora.add(given[0]))


def put_global_hook(module: Stream, patch: pytest.MonkeyPatch) -> None:
    lora, layer = LoRA(module.down), module.down

    def hook(part: nn.Module, given: Any, output: Any) -> Any:
        return output + lora.add(given[0]) if part is layer else output

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    patch.setattr(handle, "id", handle.id)  # a reference, until it is removed with the patch
    GLOBAL.append(handle.remove)


def replace_function(module: Stream, patch: pytest.MonkeyPatch) -> None:
    lora, before, layer = LoRA(module.down), F.linear, module.down

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        made = before(x, weight, bias)
        if weight is not layer.weight:
            return made
        low = before(x, lora.lora_down.weight.to(x.dtype))
        return made + before(low, lora.lora_up.weight.to(x.dtype))

    patch.setattr(F, "linear", linear)


GLOBAL: list[Callable[[], object]] = []
REPLACED: dict[str, tuple[Callable[[Stream, pytest.MonkeyPatch], object], str]] = {
    "part": (replace_on_part, "another down.forward"),
    "closure": (replace_by_closure, "another down.forward"),
    "class of layers": (replace_on_class, "another Linear.forward"),
    "class of a layer": (replace_class, "another down.__class__"),
    "whole": (replace_whole, "another forward"),
    "class of the whole": (replace_whole_class, "another Stream.forward"),
    "hook": (put_hook, "a hook on down"),
    "hook on all": (put_global_hook, "a hook on all modules"),
    "function": (replace_function, "another torch.nn.functional.linear"),
}


@pytest.mark.parametrize("put", WAYS)
@pytest.mark.parametrize("name", REPLACED)
def test_code_that_is_replaced_is_asked_for(
    name: str, put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that is replaced computes without exponents: a guard repairs that, else it is refused."""
    change, text = REPLACED[name]
    module, said = Stream(), list[str]()
    plain = copy.deepcopy(module)
    with monkeypatch.context() as patch:
        change(plain, patch)
        wanted = call(plain, torch.float32)
        while GLOBAL:
            GLOBAL.pop()()
    assert relative_l2(call(module, torch.float32), wanted) > 0.05
    with put(module, said) as dtype, monkeypatch.context() as patch:
        before = call(module, dtype)
        change(module, patch)
        try:
            if put is not repaired:
                with pytest.raises(ScalingError, match=text) as raised:
                    call(module, dtype)
                assert "Replace functions and parts, and put hooks on, before the plan" in str(
                    raised.value
                )
            else:
                found = [call(module, dtype) for _ in range(2)]
        finally:
            while GLOBAL:
                GLOBAL.pop()()
        patch.undo()
        if put is not repaired:
            if "hook" not in name:
                assert torch.equal(call(module, dtype), before)
            return
    assert max(relative_l2(x.float(), wanted) for x in found) < 0.02  # bf16's are 0.004 to 0.01
    assert sum(text in x for x in said) == 1


@pytest.mark.parametrize("name", ["part", "hook", "function"])
def test_code_that_is_not_looked_for_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at code the same calls are wrong by far, and nothing is said."""
    monkeypatch.setattr(ModuleSettings, "read", lambda self: None)
    module, said = Stream(), list[str]()
    plain = copy.deepcopy(module)
    with monkeypatch.context() as patch:
        REPLACED[name][0](plain, patch)
        wanted = call(plain, torch.float32)
    with planned(module, said) as dtype, monkeypatch.context() as patch:
        REPLACED[name][0](module, patch)
        assert not relative_l2(call(module, dtype).float(), wanted) <= 0.05
    assert said == []


class Processor:
    """What a part holds to be called, as an attention has its processor."""

    def __call__(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        made: torch.Tensor = layer(x)
        return made


class Processed(Stream):
    """The same with a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def forward(self, x: torch.Tensor, store: Any = None) -> torch.Tensor:
        """The same through the processor."""
        h = self.embed(x)
        h = h + self.processor(self.down, self.up(self.norm(h)))
        made: torch.Tensor = self.last(self.norm(h))
        return made


def test_the_call_of_a_processor_is_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """`__call__` of a class that no part has, but an attribute of a part."""
    module, said = Processed(), list[str]()
    plain = copy.deepcopy(module)

    def add(self: Processor, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = layer(x) + x * 2.0**17
        return made

    with planned(module, said) as dtype:
        call(module, dtype)
        monkeypatch.setattr(Processor, "__call__", add)
        with pytest.raises(ScalingError, match=r"with another Processor.__call__ \(forward\)"):
            call(module, dtype)
    assert relative_l2(call(module, torch.float32), call(plain, torch.float32)) == 0


@pytest.mark.parametrize("put", WAYS)
def test_what_libraries_put_around_code_is_none(put: Any) -> None:
    """Hooks and wrappers of libraries call what was there; hooks on the whole see what its caller sees."""
    module, said = Stream(), list[str]()
    accelerate = pytest.importorskip("accelerate.hooks")

    def hook(part: nn.Module, given: Any, output: torch.Tensor) -> None:
        pass

    library = FunctionType(hook.__code__, {"__name__": "peft.tuners"})
    with put(module, said) as dtype:
        before = call(module, dtype)
        accelerate.add_hook_to_module(module.down, accelerate.ModelHook())
        module.up.register_forward_hook(library)
        module.register_forward_hook(hook)
        assert torch.equal(call(module, dtype), before)
        accelerate.remove_hook_from_module(module.down)
        vars(module.last)["forward"] = module.last.forward  # the class's own, bound
        vars(module)["cpu"] = module.cpu  # moves weights
        assert torch.equal(call(module, dtype), before)
    assert said == []


def test_a_hook_that_is_removed_is_gone() -> None:
    """The exponents hold again for the calls behind it, to the last bit."""
    module, said = Stream(), list[str]()
    with planned(module, said) as dtype:
        before = call(module, dtype)
        handle = module.down.register_forward_hook(lambda part, given, output: None)
        with pytest.raises(ScalingError, match="with a hook on down"):
            call(module, dtype)
        handle.remove()
        assert torch.equal(call(module, dtype), before)


def test_a_function_in_the_place_of_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody sets on the whole module while exponents are on is there when they are gone."""
    module = Stream()
    with planned(module, []):
        replace_whole(module, monkeypatch)
        mine = vars(module)["forward"]
    assert vars(module)["forward"] is mine


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


@pytest.mark.parametrize("put", [planned, repaired])
def test_an_observer_sees_what_the_model_computes_and_is_named_in_short(put: Any) -> None:
    """A hook on each layer that only reads sees no scaled values, and the message names three of them."""
    module, said = Stream(), list[str]()
    seen: list[list[float]] = []

    def observe(model: Stream) -> None:
        seen.append([])
        for layer in model.children():
            layer.register_forward_hook(lambda *x: seen[-1].append(float(x[-1].abs().max())))

    plain = copy.deepcopy(module)
    observe(plain)
    wanted = call(plain, torch.float32)
    short = "with a hook on down, with a hook on embed, with a hook on last and 2 more (forward)"
    with put(module, said) as dtype:
        observe(module)
        if put is planned:
            with pytest.raises(ScalingError) as raised:
                call(module, dtype)
            assert short in str(raised.value)
            return
        made = call(module, dtype)
    assert relative_l2(made.float(), wanted) < 0.01
    assert seen[1] == pytest.approx(seen[0], rel=0.02)
    assert len(said) == 1
    assert short in said[0]

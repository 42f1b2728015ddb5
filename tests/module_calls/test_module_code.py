"""Code of a module that is replaced after its exponents were found."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models.settable_models import WAYS, Stream, call, planned, repaired
from stopdown.errors import ScalingError
from stopdown.module_calls.module_settings import ModuleSettings
from stopdown.numerics import relative_l2
from stopdown.scaling.rescale import rescale_


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


def test_a_layer_that_diffusers_skips_is_asked_for() -> None:
    """Its input was passed on in place of its output, which has another exponent."""
    from diffusers import LayerSkipConfig
    from diffusers.hooks import apply_layer_skip
    from diffusers.models.attention import FeedForward

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.ff = nn.LayerNorm(8), FeedForward(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.ff(self.norm(x))

    torch.manual_seed(0)
    blocks = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2))})
    model = nn.Sequential(*blocks["blocks"], nn.LayerNorm(8)).eval().requires_grad_(False)
    for block in model[:2]:
        block.ff.net[2].weight.mul_(2.0**18)
    x = torch.randn(2, 4, 8)
    assert rescale_(model, x).exponents
    plain = model(x)
    config = LayerSkipConfig(indices=[0], fqn="blocks", skip_attention=False, skip_ff=True)
    apply_layer_skip(blocks, config)
    with pytest.raises(ScalingError, match=r"another 0\.ff"):
        model(x)
    blocks["blocks"][0].ff._diffusers_hook.remove_hook("layer_skip_hook")
    assert torch.equal(model(x), plain)

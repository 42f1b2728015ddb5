"""Adapters of a rescaled module as programs use them: compiled, in threads, made of others, in copies.

In fp32 every bit is that of the same steps on the original.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.errors import ScalingError
from stopdown.fold_names import RESCALED
from stopdown.numerics import relative_l2
from stopdown.scaling.folding.adapters import _FollowedLayer
from stopdown.scaling.rescale import rescale_

peft = pytest.importorskip("peft", reason="peft puts LoRA on; it is in the extra `adapters`")


class Net(nn.Module):
    """A residual stream beyond fp16, up to a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.inner, self.norm = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.out(self.norm(x + self.second(self.inner(x))))

    def load_lora_adapter(self, adapter_name: str) -> None:
        """As Diffusers' models do, without a file."""
        add(self, adapter_name)


@pytest.fixture
def pair() -> tuple[Net, Net, torch.Tensor]:
    """A rescaled module, the original, and the argument of a call."""
    torch.manual_seed(0)
    original = Net().eval().requires_grad_(False)
    for layer in (original.first, original.second):
        layer.weight.mul_(2.0**18)
    module, x = copy.deepcopy(original), torch.randn(3, 16)
    rescaling = rescale_(module, x)
    assert {"first.weight", "second.weight"} <= rescaling.exponents.keys()
    assert not rescaling.multiplies
    return module, original, x


def add(module: nn.Module, name: str = "one", **options: Any) -> Any:
    """A LoRA on two layers that have exponents, with random matrices."""
    torch.manual_seed(len(name))
    options = {"init_lora_weights": False, "target_modules": ["first", "second"], **options}
    config = peft.LoraConfig(r=2, lora_alpha=2000, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a second adapter
        made = peft.inject_adapter_in_model(config, module, adapter_name=name)
    return made.requires_grad_(False)


@pytest.mark.thorough
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_lora_on_compiled_code_is_scaled(pair: Any, is_first: bool, is_wrapped: bool) -> None:
    """Compiled code ran past the hooks that scale it, and added it 64 times too large."""
    module, original, x = pair
    for one in (module, original) if is_first else ():
        add(one)
    module.compile(backend="eager")
    called = torch.compile(module, backend="eager") if is_wrapped else module
    assert torch.equal(called(x), original(x))
    for one in () if is_first else (module, original):
        add(one)
    assert torch.equal(called(x), original(x))


def test_a_loaded_lora_is_scaled_before_its_first_call(pair: Any) -> None:
    """Code that is compiled or exported around the module doesn't run what scales it."""
    module, original, x = pair
    add(original)
    state = {name: value for name, value in original.state_dict().items() if "lora" in name}
    add(module)
    module.load_state_dict(state, strict=False)
    with torch.no_grad():
        exported = torch.export.export(module, (x,), strict=False).module()
        assert torch.equal(exported(x), original(x))
    saved = module.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in state.items())


def test_two_threads_scale_a_lora_once(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found it unscaled at their first call, and both scaled it, for good."""
    module, original, x = pair
    together, fold = threading.Barrier(2), _FollowedLayer._fold

    def wait(*args: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.5)
        return fold(*args)

    for one in (module, original):
        add(one)
    monkeypatch.setattr(_FollowedLayer, "_fold", wait)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(module, [x, x]))
    assert all(torch.equal(y, original(x)) for y in found)


@pytest.mark.parametrize("how", ["linear", "svd"])
def test_a_lora_is_made_of_two_scaled_ones(pair: Any, how: str) -> None:
    """The sum was made of scaled matrices, and scaled again."""
    module, original, x = pair
    made = []
    for one in (module, original):
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=2, lora_alpha=2000, target_modules=["first"], init_lora_weights=False
        )
        model = peft.get_peft_model(one, config, adapter_name="one")
        model.add_adapter("two", config)
        model(x)
        model.add_weighted_adapter(["one", "two"], [0.5, 0.7], "both", combination_type=how)
        model.set_adapter("both")
        made.append(model(x))
    assert torch.equal(*made)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
@pytest.mark.parametrize("is_second", [False, True])
def test_a_lora_that_takes_a_part_of_the_weight_is_refused(
    pair: Any, is_second: bool, kind: str
) -> None:
    """PEFT made it of the scaled weight, and it was scaled again."""
    module, original, x = pair
    for one in (module, original) if is_second else ():
        add(one)
        one(x)
    add(module, "part", init_lora_weights=kind)
    with pytest.raises(ScalingError, match=r"2 weights of Net were rewritten"):
        module(x)


def test_a_weight_that_a_lora_was_merged_into_is_as_it_should_be(pair: Any) -> None:
    """Another adapter comes later: the weight is compared with what the merge left."""
    module, original, x = pair
    for one in (module, original):
        add(one)
        one(x)
        for layer in (one.first, one.second):
            layer.merge()
        add(one, "later")
    assert torch.equal(module(x), original(x))
    with torch.no_grad():
        module.first.get_base_layer().weight.copy_(original.first.get_base_layer().weight)
    with pytest.raises(ScalingError, match=r"weights of Net were rewritten.*first\.weight"):
        module(x)


class Attention(Net):
    """A layer with two matrices of its own in place of one."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.MultiheadAttention(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.inner(x)
        return self.out(self.norm(x + self.second(y, y, y, need_weights=False)[0]))


def test_a_lora_on_a_layer_of_several_matrices_is_refused() -> None:
    """PEFT puts one around `MultiheadAttention`: the call ended in a raw error."""
    module, x = Attention().eval().requires_grad_(False), torch.randn(3, 16)
    module.first.weight.mul_(2.0**18)
    assert rescale_(module, x).exponents
    add(module, target_modules=["second"])
    with pytest.raises(ScalingError, match=r"a MultiheadAttention has no single weight"):
        module(x)


def call_plainly(call: Callable[..., Any], given: dict[str, torch.Tensor]) -> Any:
    return call(given)


def call_in_vmap(call: Callable[..., Any], given: dict[str, torch.Tensor]) -> Any:
    return torch.vmap(call)({name: x[None] for name, x in given.items()})


@pytest.mark.parametrize("way", [call_plainly, torch.func.grad, call_in_vmap])
def test_matrices_that_a_caller_gives_are_refused(pair: Any, way: Any) -> None:
    """They were scaled in the caller's own dict, or the check of them ended in a raw error."""
    module, _, x = pair
    add(module)
    given = {name: value.detach().clone() for name, value in module.named_parameters()}
    given = {name: value for name, value in given.items() if "lora" in name}
    held = copy.deepcopy(given)

    def call(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module, tensors, x).sum()

    with pytest.raises(ScalingError, match=r"is the caller's own tensor"):
        way(call)(given) if way is torch.func.grad else way(call, given)
    assert all(torch.equal(given[name], value) for name, value in held.items())


def test_a_dora_that_was_written_into_before_its_first_call(pair: Any) -> None:
    """Its magnitudes are PEFT's, of the scaled weight, even if its matrices aren't zero."""
    module, original, x = pair
    for one in (module, original):
        add(one, use_dora=True, init_lora_weights=True)
        for layer in (one.first, one.second):
            torch.manual_seed(1)
            layer.lora_B["one"].weight.normal_()
    assert relative_l2(module(x), original(x)) < 1e-5


def test_a_lora_on_a_deep_copy_is_scaled(pair: Any) -> None:
    """Nothing scaled it there: put on before the copy and not called yet, or put on the copy itself."""
    module, original, x = pair
    for one in (module, original):
        add(one)
    copied = copy.deepcopy(copy.deepcopy(module))
    assert torch.equal(copied(x), original(x))
    for one in (copied, original):
        add(one, "later")
    assert torch.equal(copied(x), original(x))
    assert not torch.equal(copied(x), module(x))


def test_what_is_merged_in_a_deep_copy_is_merged_there(pair: Any) -> None:
    """`merge` of the copy's layer was that of the original's layer."""
    module, original, x = pair
    for one in (module, original):
        add(one)
    before = module(x)
    copied = copy.deepcopy(module)
    for one in (copied, original):
        one.first.merge()
    assert copied.first.merged_adapters
    assert not module.first.merged_adapters
    assert torch.equal(copied(x), original(x))
    assert torch.equal(module(x), before)


def test_a_lora_is_loaded_into_the_copy_that_is_asked(pair: Any) -> None:
    """`load_lora_adapter`, as Diffusers' models have it, of the copy was that of the original."""
    module, original, x = pair
    before, copied = module(x), copy.deepcopy(module)
    for one in (copied, original):
        one.load_lora_adapter(adapter_name="one")
    assert torch.equal(copied(x), original(x))
    assert torch.equal(module(x), before)


def test_weights_of_a_deep_copy_are_watched(pair: Any) -> None:
    """Gradients were those of other weights, and weights that were written have no exponents."""
    module, original, x = pair
    copied = copy.deepcopy(module).requires_grad_(True)
    with pytest.raises(ScalingError, match=r"A gradient of \S+ of a copy of Net was requested"):
        copied(x).sum().backward()
    with torch.no_grad():
        copied.first.weight.copy_(original.first.weight)
    with pytest.raises(ScalingError, match=r"1 weights of a copy of Net were rewritten"):
        copied(x)
    found = weakref.ref(copied)
    del copied
    gc.collect()
    assert found() is None
    assert torch.equal(module(x), original(x))


def test_a_lora_that_is_trained_after_a_call_is_refused(pair: Any) -> None:
    """It was scaled while it needed no gradient; those of its matrices were those of others."""
    module, _, x = pair
    made = add(module)
    module(x)
    made.first.lora_A["one"].weight.requires_grad_(True)
    with pytest.raises(ScalingError, match=r"A gradient of the adapter 'one' of first"):
        module(x).sum().backward()
    made.requires_grad_(False)
    assert torch.equal(module(x), add(pair[1])(x))


@torch.no_grad()
def test_an_offloaded_lora_is_scaled(pair: Any) -> None:
    """Accelerate's offloading (`enable_sequential_cpu_offload`) reads the state dict, which had unscaled
    matrices, and moves them to other tensors: it was added unscaled.
    """
    accelerate = pytest.importorskip("accelerate")
    module, original, x = pair

    def offload(*, is_on: bool) -> None:
        for one in (module, original):
            if is_on:
                accelerate.cpu_offload(one, execution_device="cpu")
            else:
                accelerate.hooks.remove_hook_from_module(one, recurse=True)

    for name in ("one", "another"):
        for one in (module, original):
            add(one, name)
        offload(is_on=True)
        for _ in range(2):
            assert torch.equal(module(x), original(x))
        offload(is_on=False)
        assert torch.equal(module(x), original(x))
        state = module.state_dict()
        saved = {key: value for key, value in original.state_dict().items() if "lora" in key}
        assert all(torch.equal(state[key], value) for key, value in saved.items())
    vars(module)[RESCALED]._take_off()
    state = module.state_dict()
    assert all(torch.equal(state[key], value) for key, value in saved.items())


@torch.no_grad()
def test_a_lora_whose_rank_is_padded_is_scaled_once(pair: Any) -> None:
    """PEFT makes scaled matrices longer for `hotswap`: they were scaled again."""
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    module, original, x = pair
    for one in (module, original):
        add(one)
        one(x)
        prepare_model_for_compiled_hotswap(one, target_rank=8)
    assert torch.equal(module(x), original(x))

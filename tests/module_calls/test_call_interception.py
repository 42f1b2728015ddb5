"""Tests of component calls: layers on a method, taken off in any order, and casts at a boundary."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput

from stopdown.interception.patches import Patches
from stopdown.module_calls.call import ComponentCall, cast_floats, find_float_dtype
from stopdown.module_calls.call_interception import (
    Rank,
    copy_layers,
    find_module,
    intercept,
    put_cast,
    put_layer,
)
from stopdown.module_calls.callee import Callee


class Component(torch.nn.Module):
    """A module that notes the dtypes it was called with."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2, dtype=dtype)
        self.seen: dict[str, torch.dtype] = {}

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, added: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor]:
        self.seen = {"sample": sample.dtype, "timestep": timestep.dtype}
        self.seen |= {name: value.dtype for name, value in (added or {}).items()}
        return (self.linear(sample),)

    def decode(self, sample: torch.Tensor) -> torch.Tensor:
        return self.linear(sample)


def make_layer(name: str, calls: list[str]) -> Any:
    def layer(call: ComponentCall) -> Any:
        calls.append(name)
        return call.proceed()

    return layer


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_layers_come_off_in_any_order(order: tuple[str, ...]) -> None:
    """Whichever goes first, the others stay, outermost first, and the last leaves nothing behind."""
    component, calls = Component(), list[str]()
    before = set(vars(component))
    patches = {name: Patches() for name in "abc"}
    for name in "abc":
        put_layer(component, "forward", make_layer(name, calls), patches[name], Rank.GUARD)
    left = ["c", "b", "a"]
    for name in order:
        patches[name].undo()
        left.remove(name)
        calls.clear()
        component(torch.ones(1, 2), torch.ones(1))
        assert calls == left
    assert set(vars(component)) == before


@pytest.mark.parametrize(
    "order", list(itertools.permutations((Rank.PLAN, Rank.GUARD, Rank.JOURNAL)))
)
def test_layers_lie_by_rank(order: tuple[Rank, ...]) -> None:
    """Whoever comes first, the journal is outside of the guard, and that outside of the plan."""
    component, calls, patches = Component(), list[str](), Patches()
    for rank in order:
        put_layer(component, "forward", make_layer(rank.name, calls), patches, rank)
    put_layer(component, "forward", make_layer("another", calls), patches, Rank.GUARD)
    component(torch.ones(1, 2), torch.ones(1))
    assert calls == ["JOURNAL", "another", "GUARD", "PLAN"]


def test_a_copy_has_its_layers_in_their_order() -> None:
    """Ranks go with the layers to a copy of the module."""
    component, copied, calls = Component(), Component(), list[str]()
    with Patches() as patches:
        for rank in (Rank.JOURNAL, Rank.COMPONENT, Rank.GUARD):
            put_layer(component, "forward", make_layer(rank.name, calls), patches, rank)
        copy_layers(component, copied, Rank.EXPONENTS)
    put_layer(copied, "forward", make_layer("plan", calls), Patches(), Rank.PLAN)
    copied(torch.ones(1, 2), torch.ones(1))
    assert calls == ["JOURNAL", "GUARD", "plan", "COMPONENT"]


def test_one_layer_twice_is_two_layers() -> None:
    """The same function can stand there twice, and one undo takes both when both are its own."""
    component, calls, patches = Component(), list[str](), Patches()
    layer = make_layer("a", calls)
    put_layer(component, "decode", layer, patches, Rank.GUARD)
    put_layer(component, "decode", layer, patches, Rank.GUARD)
    component.decode(torch.ones(1, 2))
    assert calls == ["a", "a"]
    patches.undo()
    assert "decode" not in vars(component)


def test_a_layer_above_a_foreign_wrapper_calls_it() -> None:
    """What someone else put there before stays beneath, and is there again afterwards."""
    component, calls, patches = Component(), list[str](), Patches()
    original = component.forward
    component.forward = lambda *args: calls.append("theirs") or original(*args)  # type: ignore
    theirs = component.forward
    put_layer(component, "forward", make_layer("ours", calls), patches, Rank.GUARD)
    component(torch.ones(1, 2), torch.ones(1))
    patches.undo()
    assert calls == ["ours", "theirs"]
    assert component.forward is theirs


def test_a_copied_wrapper_is_not_taken_for_the_stack() -> None:
    """functools.wraps copies attributes; a layer put above such a wrapper stands above it."""
    import functools

    component, calls, patches, others = Component(), list[str](), Patches(), Patches()
    put_layer(component, "forward", make_layer("inner", calls), patches, Rank.GUARD)
    inner = component.forward

    @functools.wraps(inner)
    def theirs(*args: Any) -> Any:
        calls.append("theirs")
        return inner(*args)

    component.forward = theirs  # type: ignore[method-assign]
    put_layer(component, "forward", make_layer("outer", calls), others, Rank.GUARD)
    component(torch.ones(1, 2), torch.ones(1))
    assert calls == ["outer", "theirs", "inner"]


class Counted:
    """Has a method."""

    def times(self, number: int) -> int:
        return number - 1


class Wrapper:
    """Passes on what it doesn't have itself, as `torch.compile` wraps a module."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_inner"], name)


def test_a_method_that_a_wrapper_passes_on_is_called() -> None:
    """Its class has none to follow; Diffusers calls `cache_context` of a compiled transformer."""
    wrapper = Wrapper(Counted())
    with Patches() as patches:
        put_layer(wrapper, "times", lambda call: call.proceed() + 1, patches, Rank.RECORD)
        assert wrapper.times(3) == 3
    assert wrapper.times(3) == 2
    assert "times" not in vars(wrapper)


def test_a_call_shows_whose_weights_serve() -> None:
    """A method that belongs to another module is found beneath every layer."""
    owner, other = Component(), Component()
    callee = Callee("vae.decode", owner, "decode", "decode")
    assert find_module(callee) is owner
    owner.decode = other.decode  # type: ignore[method-assign]
    with Patches() as patches:
        intercept(callee, make_layer("a", []), patches, Rank.GUARD)
        assert find_module(callee) is other


def cast_call(stage: str = "denoise", dtype: torch.dtype = torch.bfloat16) -> Any:
    component = Component(dtype)
    method = "decode" if stage == "decode" else "forward"
    return component, Callee("unet", component, method, stage)


@pytest.mark.parametrize("as_keywords", [False, True])
def test_a_cast_keeps_times_and_positions(as_keywords: bool) -> None:
    """A timestep of 999 stays fp32, also when it is positional as for a UNet: bf16 has no 999."""
    component, callee = cast_call()
    arguments = {
        "sample": torch.ones(1, 2),
        "timestep": torch.tensor([999.0]),
        "added": {"text_embeds": torch.ones(1), "time_ids": torch.tensor([1080.0])},
    }
    with Patches() as patches:
        put_cast(callee, torch.bfloat16, patches)
        (output,) = component(**arguments) if as_keywords else component(*arguments.values())
    assert component.seen == {
        "sample": torch.bfloat16,
        "timestep": torch.float32,
        "text_embeds": torch.bfloat16,
        "time_ids": torch.float32,
    }
    assert output.dtype == torch.float32
    assert "forward" not in vars(component)


def test_what_a_decoder_returns_stays_as_it_is() -> None:
    """An fp32 decoder fed with bf16 latents gives fp32 pixels, which are not rounded again."""
    component, callee = cast_call("decode", torch.float32)
    with Patches() as patches:
        put_cast(callee, torch.float32, patches)
        assert component.decode(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_cast_follows_a_component_that_was_cast() -> None:
    """A pipeline that brings its autoencoder to fp32 for one call gets fp32 arguments."""
    component, callee = cast_call("encode", torch.float16)
    with Patches() as patches:
        put_cast(callee, torch.float16, patches)
        component.float()
        component(torch.ones(1, 2, dtype=torch.float16), torch.ones(1))
    assert component.seen["sample"] == torch.float32


def test_floats_are_cast_wherever_they_are() -> None:
    """Inside lists, tuples, dicts and outputs of models; integers, texts and None stay."""
    value = [torch.ones(1), (torch.ones(1), 3, None), {"a": torch.ones(1), "b": "text"}]
    cast = cast_floats(value, torch.float16)
    assert [cast[0].dtype, cast[1][0].dtype, cast[2]["a"].dtype] == [torch.float16] * 3
    assert (cast[1][1:], cast[2]["b"]) == ((3, None), "text")
    assert cast_floats(torch.ones(1, dtype=torch.int64), torch.float16).dtype == torch.int64
    kept = cast_floats({"timesteps": torch.ones(1), "x": torch.Size([2])}, torch.float16)
    assert (kept["timesteps"].dtype, kept["x"]) == (torch.float32, torch.Size([2]))
    listed = cast_floats(UserList([torch.ones(1)]), torch.float16)
    assert (type(listed), listed[0].dtype) == (UserList, torch.float16)


class UserList(list[torch.Tensor]):
    """A list that pytree does not know."""


def test_a_distribution_is_cast() -> None:
    """What an autoencoder encodes to is sampled later: its mean and spread are cast, on a copy."""
    encoded = AutoencoderKLOutput(DiagonalGaussianDistribution(torch.ones(1, 4, 2, 2)))
    cast = cast_floats(encoded, torch.bfloat16)
    assert type(cast) is AutoencoderKLOutput
    generator = torch.Generator().manual_seed(0)
    assert cast.latent_dist.sample(generator).dtype == torch.bfloat16
    assert cast.latent_dist.mode().dtype == torch.bfloat16
    assert encoded.latent_dist.mode().dtype == torch.float32


def test_the_dtype_that_came_in_is_that_of_the_values() -> None:
    """Not that of a timestep that stands before them."""
    arguments = {
        "timestep": torch.ones(1),
        "input_ids": torch.ones(1, dtype=torch.int64),
        "hidden_states": [torch.ones(1, dtype=torch.bfloat16)],
    }
    assert find_float_dtype(arguments) == torch.bfloat16
    nested = {"added": {"time_ids": torch.ones(1), "text_embeds": torch.ones(1).half()}}
    assert find_float_dtype(nested) == torch.float16
    cache = SimpleNamespace(keys=torch.ones(1).double())  # no part of what is cast
    assert find_float_dtype({"cache": cache, "sample": torch.ones(1).half()}) == torch.float16
    assert find_float_dtype({"input_ids": torch.ones(1, dtype=torch.int64), "flag": True}) is None

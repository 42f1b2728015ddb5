"""Arguments that are cast: in the lists and mappings that the caller gave, which keep what is written."""

from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from torch import nn

from models.overlapping_calls import overlap_calls
from models.snapshots import compare_snapshot, take_snapshot
from stopdown.interception.arguments import hook_arguments, put_back, replace_tensors
from stopdown.interception.patches import Patches
from stopdown.module_calls.call_interception import put_cast
from stopdown.module_calls.callee import Callee
from stopdown.records import Scaling
from stopdown.scaling.folding.folds import cast_

WIDE, NARROW = torch.float32, torch.float16


class Pair(NamedTuple):
    """A tuple with names."""

    left: torch.Tensor
    right: int


def halve(value: torch.Tensor) -> torch.Tensor:
    """In fp16 what is fp32."""
    return value.to(NARROW) if value.dtype == WIDE else value


def make_nests() -> dict[str, Any]:
    """A tensor in each kind of container."""
    x = torch.ones(2)
    return {
        "list": [x, None, [x]],
        "deque": deque([x]),
        "dict": OrderedDict(a=x, timestep=x),
        "tuple": (x, [x]),
        "named": Pair(x, 3),
    }


@pytest.mark.parametrize("kind", make_nests())
def test_containers_are_the_callers_and_get_back_what_they_held(kind: str) -> None:
    """During the call a container is the same object with other tensors; after it the same ones."""
    given = make_nests()[kind]
    before = [id(x) for x in flatten(given)]
    (during,), _, replaced = replace_tensors((given,), {}, halve)
    assert {x.dtype for x in flatten(during)} == {NARROW}
    assert (during is given) == (kind not in ("tuple", "named"))
    assert type(during) is type(given)
    put_back(replaced)
    assert [id(x) for x in flatten(given)] == before


def flatten(value: Any) -> list[torch.Tensor]:
    """Every tensor in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    items = items if isinstance(items, (list, tuple, deque, type({}.values()))) else list(items)
    nested = (dict, list, tuple, deque, torch.Tensor)
    return [x for item in items if isinstance(item, nested) for x in flatten(item)]


def test_what_is_kept_by_name_stays() -> None:
    """Also inside of a mapping."""
    given = {"timestep": torch.ones(1), "added": {"timestep": torch.ones(1), "a": torch.ones(1)}}
    _, cast, _ = replace_tensors((), given, halve, keeps=lambda name: name == "timestep")
    assert cast["timestep"].dtype == cast["added"]["timestep"].dtype == WIDE
    assert cast["added"]["a"].dtype == NARROW


class Writing(nn.Module):
    """Takes one entry of the caller's list away, writes another, and counts."""

    def forward(self, x: torch.Tensor, cache: list[Any], count: list[int], *, fail: bool = False):
        count[0] += 1
        cache[0] = x * 2
        cache.pop()
        if fail:
            raise ValueError("no more")
        return x


@pytest.mark.parametrize("fail", [False, True])
def test_what_a_module_writes_stays(fail: bool) -> None:
    """What it wrote, counted and took out is the caller's; the rest is as it was, also after an error."""
    module, patches = Writing(), Patches()
    kept, x = torch.full((2,), 5.0), torch.ones(2)
    cache, count = [None, kept, x], [0]
    with patches:
        hook_arguments(module, halve, patches)
        if fail:
            with pytest.raises(ValueError, match="no more"):
                module(x, cache, count, fail=True)
        else:
            module(x, cache, count)
    assert count == [1]
    assert cache[0].dtype == NARROW
    assert cache[1:] == [kept]
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


def test_at_the_call_of_a_component_too() -> None:
    """The arguments of a whole component are cast in the same way."""
    module = Writing()
    cache, count = [None, torch.ones(2), torch.ones(2)], [0]
    with Patches() as patches:
        put_cast(Callee("unet", module, "forward", "denoise"), NARROW, patches)
        module(torch.ones(2), cache, count)
    assert (count, cache[0].dtype, cache[1].dtype) == ([1], NARROW, WIDE)


def make_qwen() -> nn.Module:
    """A tiny autoencoder of Qwen-Image."""
    torch.manual_seed(0)
    return AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True]
    )


def make_wan() -> nn.Module:
    """A tiny autoencoder of Wan."""
    torch.manual_seed(0)
    return AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True]
    )


@pytest.mark.parametrize("make", [make_wan, make_qwen])
def test_fp32_layers_of_an_autoencoder_that_remembers(make: Any) -> None:
    """Each block of Wan's and Qwen-Image's decoder in fp32: as many frames as without, and near them."""
    module = make().eval().requires_grad_(False)
    latents = torch.randn(1, 4, 3, 4, 4)
    reference = module.decode(latents).sample
    parts = [(p, x) for p, x in module.decoder.named_modules() if p and list(x.children())]
    paths = [p for p, x in parts if not isinstance(x, nn.ModuleList)]  # which are never called
    for path in paths:
        before = take_snapshot(module)
        with cast_(module, NARROW, Scaling(fp32_modules=(f"decoder.{path}",))):
            frames = module.decode(latents.half()).sample
        assert compare_snapshot(before, module) == []
        assert frames.shape == reference.shape
        assert (frames.float() - reference).abs().max() < 0.05 * reference.abs().max()


class Storing(nn.Module):
    """Writes what it computes into a cache of fixed size, as AnyFlow and a `StaticCache` do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.proj.weight.copy_(2 * torch.eye(2))

    def forward(self, x: torch.Tensor, cache: Any, place: int = 0) -> torch.Tensor:
        found = cache["k"] if isinstance(cache, dict) else getattr(cache, "k", cache)
        found[place] = self.proj(x)
        return found.sum(0)


CACHES = {
    "tensor": lambda k: k,
    "mapping": lambda k: {"k": k},
    "object": lambda k: SimpleNamespace(k=k),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("is_inference", [False, True])
def test_what_is_written_into_a_cast_tensor_is_the_callers(kind: str, is_inference: bool) -> None:
    """A cache that the caller has in another format is filled, and none of its other values is rounded."""
    module = Storing().half()
    with Patches() as patches, torch.inference_mode(is_inference):
        put_cast(Callee("unet", module, "forward", "denoise"), NARROW, patches)
        written, beside = torch.zeros(3, 2), torch.tensor([[1e-9, 1.0]])
        cache = CACHES[kind](written)
        for place in range(2):
            found = module(torch.ones(1, 2) + beside, cache, place)
    assert written.tolist() == [[2.0, 4.0], [2.0, 4.0], [0.0, 0.0]]
    assert found.tolist() == [4.0, 8.0]
    assert beside.tolist() == torch.tensor([[1e-9, 1.0]]).tolist()


def test_what_an_fp32_layer_writes_into_its_input_stays() -> None:
    """An activation in place changes the tensor that its caller goes on with."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            self.act(y)
            return y

    module, patches = InPlace(), Patches()
    with patches:
        hook_arguments(module.act, lambda x: x.float(), patches)
        assert module(torch.tensor([-1.0, 1.0]).half()).tolist() == [0.0, 2.0]


def test_the_lists_of_two_threads_are_kept_apart() -> None:
    """The thread that is done first gets its own list back, and not that of the other."""
    module, patches = nn.Identity(), Patches()
    lists = {name: [torch.ones(1)] for name in "ab"}
    during = list[torch.dtype]()

    with patches:
        hook_arguments(module, halve, patches)
        overlap_calls(
            module,
            lambda: module(lists["a"]),
            lambda: module(lists["b"]),
            lambda: during.extend(lists[name][0].dtype for name in "ab"),
        )
    assert during == [WIDE, NARROW]
    assert [lists[name][0].dtype for name in "ab"] == [WIDE, WIDE]

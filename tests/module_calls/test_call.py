"""One call of a component as a value: its names, its casts, and what of its arguments is meant."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.module_calls.call import (
    ComponentCall,
    bring_back,
    cast_floats,
    find_float_dtype,
    find_meant,
    is_kept,
    map_tensors,
    narrow_if_finite,
    sign_arguments,
    stays_finite,
)
from stopdown.module_calls.callee import DIFFUSERS_KEEPS, GENERAL_KEEPS, Callee

INF, NAN = math.inf, math.nan


class Named(nn.Module):
    """Takes a value, a mask and a time."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, timestep: Any = None) -> Any:
        return hidden_states


def make_call(*args: Any, **kwargs: Any) -> ComponentCall:
    module = Named()
    callee = Callee("denoiser", module, "forward", "denoise")
    return ComponentCall(callee, args, kwargs, module.forward)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        *(("hidden_states", x, math.isfinite(x)) for x in (0.0, 65504.0, INF, -INF, NAN)),
        *(("attention_mask", x, x == -INF or math.isfinite(x)) for x in (0.0, INF, -INF, NAN)),
        ("position_bias", -INF, True),
    ],
)
def test_one_rule_says_what_is_meant(name: str, value: float, meant: bool) -> None:
    """It holds for the ends of a range, which a guard reads, as for each element of a tensor."""
    assert find_meant(name, value) is meant
    tensor = torch.tensor([1.0, value], dtype=torch.float16)
    assert find_meant(name, tensor).tolist() == [True, meant]
    call = make_call(**{name: tensor})
    assert call.is_given_finite is meant
    cleaned = call.bring_to_finite()
    assert cleaned.kwargs[name].tolist() == [1.0, value if meant else 0.0]
    assert (cleaned is call) is meant


def test_arguments_by_place_have_their_names() -> None:
    """A mask that is given by place may hold -Inf, and a value beside it may not."""
    hidden, mask = torch.tensor([1.0, -INF]), torch.tensor([0.0, -INF])
    call = make_call(hidden, mask)
    assert list(call.named) == ["hidden_states", "attention_mask"]
    first, second = call.bring_to_finite().args
    assert first.tolist() == [1.0, 0.0]
    assert second is mask


def test_arguments_without_names_are_looked_at() -> None:
    """What would overflow is found behind the names of the method, too."""

    class Free(nn.Module):
        def forward(self, *args: Any) -> Any:
            return args[0]

    module = Free()
    callee = Callee("net", module, "forward", "call")
    given = tuple(torch.tensor([x]) for x in (1.0, 2.0, 1e6))
    assert ComponentCall(callee, given, {}, module.forward).list_beyond(torch.float16) == ["*2"]


def test_arguments_are_cast_and_outputs_brought_back() -> None:
    """Times stay as they are, unless 16 bits become 32; the output has the dtype that arguments had."""
    seen = list[torch.dtype]()

    class Seeing(Named):
        def forward(
            self, hidden_states: Any, attention_mask: Any = None, timestep: Any = None
        ) -> Any:
            seen.extend([hidden_states.dtype, timestep.dtype])
            return hidden_states * 2

    module = Seeing()
    callee = Callee("denoiser", module, "forward", "denoise")
    given = {"hidden_states": torch.tensor([1.5]), "timestep": torch.tensor([999.0])}
    output = ComponentCall(callee, (), given, module.forward).proceed_in(torch.float16)
    assert seen == [torch.float16, torch.float32]
    assert (output.dtype, output.tolist()) == (torch.float32, [3.0])
    for dtype in (torch.float32, torch.bfloat16):
        half = {name: x.half() for name, x in given.items()}
        ComponentCall(callee, (), half, module.forward).proceed_in(dtype)
    assert seen[2:] == [torch.float32, torch.float32, torch.bfloat16, torch.float16]


def test_a_cache_in_another_format_is_cast_for_the_call() -> None:
    """An earlier call filled it in fp32; what this call puts in stays, what it reads is as before."""
    keys, values = torch.ones(2), [torch.zeros(2)]
    cache = SimpleNamespace(keys=keys, values=values, layers=[SimpleNamespace(keys=keys)])
    seen = list[torch.dtype]()

    class Cached(Named):
        def forward(
            self, hidden_states: Any, attention_mask: Any = None, timestep: Any = None
        ) -> Any:
            held = attention_mask
            seen.extend(x.dtype for x in (held.keys, held.values[0], held.layers[0].keys))
            held.values[0] = hidden_states
            return hidden_states

    module = Cached()
    callee = Callee("denoiser", module, "forward", "denoise")
    given = torch.ones(2, dtype=torch.float16)
    ComponentCall(callee, (given, cache), {}, module.forward).proceed_in(torch.bfloat16)
    assert seen == [torch.bfloat16] * 3
    assert cache.keys is keys
    assert cache.layers[0].keys is keys
    assert values[0].dtype == torch.bfloat16


def test_what_fp16_cannot_hold_is_named() -> None:
    """A mask of -Inf is not: what hides a score stays so."""
    wide, mask = torch.tensor([1e5]), torch.tensor([-1e9])
    call = make_call(wide, mask, torch.tensor([1e6]))
    assert call.list_beyond(torch.float16) == ["hidden_states"]
    assert call.list_beyond(torch.bfloat16) == []
    assert not stays_finite(wide, torch.float16)
    assert narrow_if_finite(wide, torch.float16) is wide
    assert narrow_if_finite(torch.ones(1), torch.float16).dtype == torch.float16


def test_an_output_that_the_narrow_format_cannot_hold_stays_wide() -> None:
    """What came in fp16 and went out in fp32 beyond its range is not made Inf."""
    made = torch.tensor([1e6])
    assert bring_back(made, torch.float32, torch.float16).dtype == torch.float32
    assert bring_back(torch.ones(1), torch.float32, torch.float16).dtype == torch.float16


def test_calls_of_one_kind_have_one_key() -> None:
    """Values are not in it; shapes, dtypes and plain arguments are."""
    key = make_call(torch.zeros(2, 3)).key
    assert key == make_call(torch.ones(2, 3)).key
    others = [
        make_call(torch.ones(2, 4)), make_call(torch.ones(2, 3).half()),
        make_call(torch.ones(2, 3), timestep=1),
    ]  # fmt: skip
    assert len({key, *(x.key for x in others)}) == 4
    assert sign_arguments((), {"a": 1, "b": 2}) == sign_arguments((), {"b": 2, "a": 1})


def test_tensors_are_changed_wherever_they_are() -> None:
    """In tuples, lists and mappings; whole numbers keep their dtype."""
    nested = ({"a": [torch.ones(1)]}, torch.tensor([3]), "text")
    held, second, text = cast_floats(nested, torch.float16)
    (first,) = held["a"]
    assert (first.dtype, second.dtype, text) == (torch.float16, torch.int64, "text")
    (doubled, *_) = map_tensors((torch.ones(2), 1), lambda x: x * 2)
    assert doubled.tolist() == [2.0, 2.0]


def test_the_dtype_of_a_call_is_that_of_its_values() -> None:
    """A time in fp32 beside values in fp16 is left out."""
    call = make_call(torch.ones(1).half(), timestep=torch.ones(1))
    assert call.came_as == torch.float16
    assert find_float_dtype({"timestep": torch.ones(1)}, is_kept) is None
    assert find_float_dtype({"timestep_cond": torch.ones(1)}, is_kept) == torch.float32


@pytest.mark.parametrize(
    ("name", "keeps", "is_it"),
    [
        ("timestep_cond", DIFFUSERS_KEEPS, False),
        ("timestep_cond", GENERAL_KEEPS, False),
        ("timestep_cond", ("*timestep*",), True),
        ("timestep_cond", (*DIFFUSERS_KEEPS, "timestep_cond"), True),
        ("timestep", DIFFUSERS_KEEPS, True),
        ("sigmas", ("*sigma*", "!sigmas"), False),
        ("sigma", ("*sigma*", "!sigmas"), True),
        ("other", ("!sigmas",), False),
    ],
)
def test_the_last_pattern_that_matches_decides(
    name: str, keeps: tuple[str, ...], is_it: bool
) -> None:
    """An exception is one of the patterns, so a model's own patterns have it only if they say so."""
    assert is_kept(name, keeps) == is_it

"""Text encoders that are asked for hidden states: each replay begins where the call began."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from models.hidden_state_calls import (
    ASKED,
    FAMILIES,
    ask,
    call_encoder,
    can_ask,
    copy_encoder,
    measure_errors,
)
from stopdown.errors import NonFiniteError
from stopdown.interception.patches import Patches
from stopdown.module_calls.kept_state import KeptState
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.runtime.guard import guard
from stopdown.runtime.scripts import ScriptGuard
from stopdown.scaling.rescale import rescale_


def _ignore(text: str) -> None:
    pass


@contextmanager
def guarded(module: nn.Module, given: dict[str, Any]) -> Iterator[None]:
    with guard(module.half(), announce=_ignore) as handle:
        yield
        assert [x.action for x in handle.repairs] == ["rescaled"]


@contextmanager
def under_run(module: nn.Module, given: dict[str, Any]) -> Iterator[None]:
    module.half()
    with Patches() as patches:
        ScriptGuard(_ignore).put_on(patches)
        yield


@contextmanager
def planned(module: nn.Module, given: dict[str, Any]) -> Iterator[None]:
    """Under a plan that was made with calls that ask for nothing."""
    plain = {name: x for name, x in given.items() if name in ("input_ids", "attention_mask")}
    plan = measure_plan({"part": module}, run=lambda: call_encoder(module, plain))
    with apply_plan({"part": module}, plan), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of caches: such calls run in fp32
        yield


@contextmanager
def planned_and_guarded(module: nn.Module, given: dict[str, Any]) -> Iterator[None]:
    plain = {name: x for name, x in given.items() if name in ("input_ids", "attention_mask")}
    plan = measure_plan({"part": module}, run=lambda: call_encoder(module, plain))
    with guard({"part": module}, plan, announce=_ignore) as handle:
        yield
        assert {x.action for x in handle.repairs} <= {"rescaled", "signature"}
        assert not handle.session.log.left


@contextmanager
def in_fp16(module: nn.Module, given: dict[str, Any]) -> Iterator[None]:
    """As `stopdown.fp16` does with this call as its example."""
    plan = measure_plan({"part": module}, run=lambda: call_encoder(module, given))
    with guard({"part": module}, plan, announce=_ignore) as handle:
        yield
        assert not handle.repairs


WAYS = {x.__name__: x for x in (guarded, under_run, planned, planned_and_guarded, in_fp16)}
QUICK = (
    ("Qwen3Model", "states and cache", "guarded"),
    ("T5EncoderModel", "states and maps", "planned_and_guarded"),
    ("CLIPTextModel", "states", "under_run"),
)


def list_rows() -> Iterator[Any]:
    yield from QUICK
    for name, asked, way in itertools.product(FAMILIES, ASKED, WAYS):
        if can_ask(name, asked) and (name, asked, way) not in QUICK:
            is_shown = asked in ("states", "states and cache") and way in ("guarded", "under_run")
            mark = pytest.mark.thorough if is_shown else pytest.mark.slow
            yield pytest.param(name, asked, way, marks=mark)


@pytest.mark.parametrize(("name", "asked", "way"), list(list_rows()))
def test_states_are_those_of_fp32(name: str, asked: str, way: str) -> None:
    """Each tensor of a repaired call is there once, nearer to fp32 than bf16's, and comes again."""
    given = ask(name, asked)
    wanted = call_encoder(copy_encoder(name, torch.float32), given)
    bf16 = measure_errors(call_encoder(copy_encoder(name, torch.bfloat16), given), wanted)
    plain = measure_errors(call_encoder(copy_encoder(name, torch.float16), given), wanted)
    assert plain > bf16
    module = copy_encoder(name, torch.float32)
    with WAYS[way](module, given):
        first, second = call_encoder(module, given), call_encoder(module, given)
    assert measure_errors(first, wanted) < bf16 / 2
    assert all(itertools.starmap(torch.equal, zip(first, second, strict=True)))
    assert len(call_encoder(module, given)) == len(wanted)


def test_rescaling_leaves_no_recorder_behind() -> None:
    """A model that is rescaled with hidden states, and back, returns each of them once."""
    given = ask("Qwen3Model", "states")
    module = copy_encoder("Qwen3Model", torch.float32)
    rescaling = rescale_(module, (), given)
    assert rescaling.multiplies
    assert rescaling.trial is not None
    assert rescaling.trial.rel_err < rescaling.trial.bf16_rel_err
    rescaling.undo()
    assert len(call_encoder(module, given)) == len(ask_untouched("Qwen3Model", given))


def ask_untouched(name: str, given: dict[str, Any]) -> list[torch.Tensor]:
    return call_encoder(copy_encoder(name, torch.float32), given)


def test_recorders_are_part_of_what_a_module_keeps() -> None:
    """Hooks that a call registers are named, and those of all calls since are gone once it is restored."""
    module, given = copy_encoder("Qwen3Model", torch.float32), ask("Qwen3Model", "states")
    kept = KeptState(module)
    call_encoder(module, given)
    changed = kept.list_changes()
    assert "layers.0.(hooks)" in changed
    for _ in range(2):
        kept.restore(changed)
        assert kept.list_changes() == []
        assert len(call_encoder(module, given)) == 4


@pytest.mark.parametrize("name", ["T5EncoderModel", "Qwen3Model"])
def test_damaged_weights_are_no_race(name: str) -> None:
    """A damaged weight behind the first block is named, and no race: the call comes out the same again."""
    module = copy_encoder(name, torch.float32)
    path, weight = [
        (path, x)
        for path, x in module.named_parameters()
        if path.endswith(("wi_0.weight", "gate_proj.weight"))
    ][-1]
    weight.data[0, 0] = torch.inf
    with guard(module, announce=_ignore), pytest.raises(NonFiniteError) as caught:
        call_encoder(module, ask(name, "states"))
    assert f"{path} isn't finite" in str(caught.value)
    assert "race" not in str(caught.value)

"""Calls of planned and guarded modules that are transformed, compiled or differentiated."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from models.rescaling_models import cast_tree
from stopdown.errors import ScalingError, StopdownWarning
from stopdown.interception.patches import Patches
from stopdown.numerics import iterate_tensors, relative_l2
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.records import Plan
from stopdown.runtime.guard import Guard, guard
from stopdown.runtime.scripts import ScriptGuard
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.watch.call_watch import CallWatch

SCALE = 1024.0
"""What losses are multiplied with, as always in fp16."""


@pytest.fixture(scope="module")
def plan(model: nn.Module, given: dict[str, Any]) -> Plan:
    return measure_plan({"part": model}, run=lambda: run(model, given))


def run(module: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = module(**given, return_dict=False)[0]
    return made


@contextlib.contextmanager
def put(way: str, model: nn.Module, plan: Plan, given: dict[str, Any]) -> Iterator[nn.Module]:
    """A copy of the model in fp16."""
    module = copy.deepcopy(model)
    if way == "rescaled":
        rescale_(module, (), given, cast=True)
        yield module
    elif way == "repaired":
        with guard(module.half(), announce=lambda text: None) as handle:
            run(module, cast_tree(given, torch.float16))
            assert handle.repairs
            yield module
    else:
        with (
            apply_plan({"part": module}, plan)
            if way == "planned"
            else guard({"part": module}, plan, announce=lambda text: None)
        ):
            yield module


def transform(kind: str, module: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    hidden, text, time = given.values()

    def call(hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = module(hidden, text, time, return_dict=False)[0]
        return made

    with torch.no_grad():
        if kind == "vmap":
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return torch.func.vmap(call)(hidden[None], text[None])[0]
        if kind == "grad":
            _, made = torch.func.grad(lambda x: (call(x, text).sum(), call(x, text)), has_aux=True)(
                hidden
            )
            return made
        if kind == "make_fx":
            return make_fx(call)(hidden, text)(hidden, text)
        return torch.compile(module, backend="eager")(**given, return_dict=False)[0]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("way", ["planned", "planned and guarded", "repaired", "rescaled"])
@pytest.mark.parametrize("kind", ["vmap", "grad", "make_fx", "compile"])
def test_transformed_calls_are_right(
    model: nn.Module, plan: Plan, given: dict[str, Any], way: str, kind: str
) -> None:
    """Where no value can be read, a call is as right as any other, and no check of ours stops it."""
    wanted = run(model, given)
    with put(way, model, plan, given) as module:
        found = transform(kind, module, cast_tree(given, torch.float16))
    assert relative_l2(found, wanted) < 2e-3


def test_a_transformed_call_of_a_bare_module_is_said(model: nn.Module, given: Any) -> None:
    """A first call by `vmap`, which no guard can repair, is said once; an outer call repairs the next."""
    module, said = copy.deepcopy(model).half(), list[str]()
    low = cast_tree(given, torch.float16)
    with guard(module, announce=said.append) as handle:
        for _ in range(2):
            assert not transform("vmap", module, low).isfinite().all()
        assert len(said) == 1
        assert "is called inside of torch.func (vmap, grad), where no value can be read" in said[0]
        assert "Call it once outside of that" in said[0]
        assert set(said) <= set(handle.record.unwatched)
        run(module, low)
        found = transform("vmap", module, low)
    assert relative_l2(found, run(model, given)) < 2e-3


def test_a_transformed_call_of_a_script_is_counted(model: nn.Module, given: Any) -> None:
    """Under `run` a call by `vmap` isn't guarded: the script gets its own values, the record a line."""
    module, low = copy.deepcopy(model).half(), cast_tree(given, torch.float16)
    with Patches() as patches:
        script = ScriptGuard(lambda _: None)
        script.put_on(patches)
        assert not transform("vmap", module, low).isfinite().all()
    assert script.modules.record is not None
    assert any("1 call inside of torch.func" in x for x in script.modules.record.unwatched)


@pytest.mark.thorough
def test_a_module_that_is_compiled_later_is_guarded(model: nn.Module, given: Any) -> None:
    """What `torch.compile` made of a guarded module is watched and repaired like the module itself."""
    module, said = copy.deepcopy(model).half(), list[str]()
    low = cast_tree(given, torch.float16)
    with guard(module, announce=said.append) as handle:
        found = run(torch.compile(module, backend="eager"), low)
        assert [x.action for x in handle.repairs] == ["rescaled"]
        assert [x.calls for x in handle.record.calls] == [1]
    assert relative_l2(found, run(model, given)) < 2e-3
    assert not any("not guarded" in text for text in said)


def differentiate(
    module: nn.Module, given: dict[str, Any], *, before: Callable[[], Any] = lambda: None
) -> torch.Tensor:
    """The gradient of a loss by the hidden states; `before` is called between call and backward pass."""
    hidden = given["hidden_states"].clone().requires_grad_()
    made = next(iterate_tensors(module(**{**given, "hidden_states": hidden})))
    before()
    (made.float().square().mean() * SCALE).backward()
    assert hidden.grad is not None
    return hidden.grad.float() / SCALE


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("way", ["planned", "planned and guarded", "repaired", "rescaled"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_by_inputs(
    model: Any, plan: Plan, given: dict[str, Any], way: str, reentrant: bool | None
) -> None:
    """They are those of fp32, also where blocks run again in the backward pass."""
    wanted = differentiate(copy.deepcopy(model), given)
    warnings.filterwarnings("ignore", message="Gradients with respect to inputs")
    with put(way, model, plan, given) as module:
        if reentrant is not None:
            assert isinstance(module, type(model))
            module.enable_gradient_checkpointing()  # type: ignore[operator]
            module._gradient_checkpointing_func = lambda *args: torch.utils.checkpoint.checkpoint(
                *args, use_reentrant=reentrant
            )
        found = differentiate(module, cast_tree(given, torch.float16))
    assert relative_l2(found, wanted) < 3e-3


def test_gradients_in_fp16_are_said_once(model: nn.Module, plan: Plan, given: Any) -> None:
    """Small gradients are lost in fp16: it says how to keep them, and nothing of the kind in fp32."""
    module = copy.deepcopy(model)
    with apply_plan({"part": module}, plan):
        with pytest.warns(
            StopdownWarning, match="Gradients with respect to inputs of part are computed in"
        ):
            differentiate(module, given)
        differentiate(module, given)  # any other warning is an error
    with apply_plan({"part": module}, plan, cast=False):
        assert torch.equal(differentiate(module, given), differentiate(copy.deepcopy(model), given))


@pytest.mark.parametrize("way", ["planned", "folded", "rescaled"])
def test_gradients_of_folded_weights_are_refused(
    model: nn.Module, plan: Plan, given: Any, way: str
) -> None:
    """They would be those of other weights, up to 3,000 times as large."""
    module = copy.deepcopy(model).requires_grad_(True)
    with contextlib.ExitStack() as stack:
        if way == "rescaled":
            stack.callback(rescale_(module, (), given).undo)
        else:
            stack.enter_context(apply_plan({"part": module}, plan, cast=way == "planned"))
        with pytest.raises(ScalingError, match=r"A gradient of .* was requested") as caught:
            module(**given).sample.sum().backward()
        assert "module.requires_grad_(False)" in caught.value.remedy


def test_gradients_of_folded_adapters_are_refused(
    model: Any, plan: Plan, given: dict[str, Any]
) -> None:
    """A LoRA under a plan takes its exponents, so it cannot be trained there."""
    module = copy.deepcopy(model)
    with apply_plan({"part": module}, plan):
        module.add_adapter(LoraConfig(r=2, target_modules=["to_v"], init_lora_weights=False), "a")
        with pytest.raises(ScalingError, match=r"A gradient of the adapter 'a' of .*to_v was"):
            module(**given).sample.sum().backward()


@pytest.mark.parametrize("cause", ["taken off", "another call"])
def test_a_backward_pass_after_the_exponents(
    model: nn.Module, plan: Plan, given: dict[str, Any], cause: str
) -> None:
    """A backward pass that would read other weights than its call is refused with one message."""
    warnings.filterwarnings("ignore", message="Gradients with respect to inputs")
    module = copy.deepcopy(model)
    put = guard if cause == "another call" else apply_plan
    applied = put({"part": module}, plan)

    def other() -> None:
        watch = CallWatch.find(module)
        assert watch is not None
        watch.known.verdicts = dict.fromkeys(
            watch.known.verdicts
        )  # no exponents hold for the next call, which the guard repairs
        run(module, given)

    before = other if cause == "another call" else applied.undo
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*its exponents didn't hold")
        with pytest.raises(ScalingError, match="between a call and its backward pass"):
            differentiate(module, given, before=before)
    if isinstance(applied, Guard):
        applied.remove()

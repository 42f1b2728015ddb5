"""Parts of modules that have exponents, called alone: right, or refused with one message."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from models.rescaling_models import WAYS, cast_tree, make_example, scale_weights
from models.signature_cases import measure_error
from models.snapshots import assert_untouched
from stopdown.errors import InputError, ScalingError, StopdownWarning
from stopdown.interception.patches import Patches
from stopdown.module_calls import call_interception
from stopdown.module_calls.call_interception import find_code
from stopdown.plans.applier import apply_entry, apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.records import Plan
from stopdown.runtime.activation_maxima import find_compiled
from stopdown.runtime.guard import guard
from stopdown.scaling.rescale import rescale_
from stopdown.testing import make_pipeline

Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Arguments and keyword arguments of a part in fp32, and what it returns."""

PARTS = ("patch_embed", "transformer_blocks.0", "transformer_blocks.1.ff", "norm_final", "norm_out")


@pytest.fixture(scope="module")
def calls(model: nn.Module, given: dict[str, Any]) -> dict[str, Call]:
    """What the parts are called with in a call of the whole, in fp32."""
    found: dict[str, Call] = {}
    plain = copy.deepcopy(model)
    for path in PARTS:

        def note(part: Any, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            found.setdefault(path, (args, kwargs, output))

        plain.get_submodule(path).register_forward_hook(note, with_kwargs=True)
    run(plain, given)
    return found


@pytest.fixture(scope="module")
def plan(model: nn.Module, given: dict[str, Any]) -> Plan:
    return measure_plan({"part": model}, run=lambda: run(model, given))


def run(module: nn.Module, kwargs: dict[str, Any], args: tuple[Any, ...] = ()) -> Any:
    with torch.no_grad():
        return module(*args, **kwargs)


@contextmanager
def put(way: str, module: nn.Module, plan: Plan, given: dict[str, Any]) -> Iterator[None]:
    if way == "rescaled":
        rescaling = rescale_(module, (), given, cast=True)
        yield
        rescaling.undo()
    elif way == "repaired":
        module.half()
        with guard(module, announce=lambda text: None) as handle:
            run(module, cast_tree(given, torch.float16))
            assert [x.action for x in handle.repairs] == ["rescaled"]
            yield
    else:
        with apply_plan({"part": module}, plan, cast=way == "planned"):
            yield


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["planned", "folded", "repaired", "rescaled"])
def test_parts_alone_are_right(
    model: nn.Module,
    plan: Plan,
    given: dict[str, Any],
    calls: dict[str, Call],
    way: str,
) -> None:
    """Given what the whole gives it in fp32, each part returns what it returns there."""
    module, low = copy.deepcopy(model), copy.deepcopy(model).bfloat16()
    with put(way, module, plan, given):
        whole = run(module, cast_tree(given, module.dtype))
        for path, (args, kwargs, wanted) in calls.items():
            bf16 = run(low.get_submodule(path), *cast_tree((kwargs, args), torch.bfloat16))
            found = run(module.get_submodule(path), kwargs, args)
            error = measure_error(found, wanted)
            assert error < measure_error(bf16, wanted) / 2
            assert error == 0.0 or way != "folded"
        again = run(module, cast_tree(given, module.dtype))
    assert measure_error(again, whole) == 0.0


def test_switched_off(
    model: nn.Module,
    plan: Plan,
    calls: dict[str, Call],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without what leads their calls the parts are wrong by far: the test above sees what it is for."""
    monkeypatch.setattr(
        call_interception.PartCall,
        "__call__",
        lambda self, *args, **kwargs: self.callee.owner._call_impl(*args, **kwargs),
    )
    module = copy.deepcopy(model)
    args, kwargs, wanted = calls["patch_embed"]
    with apply_plan({"part": module}, plan, cast=False):
        assert measure_error(run(module.patch_embed, kwargs, args), wanted) > 0.5


def test_nothing_leads_parts_inside_of_a_call(model: nn.Module, plan: Plan, given: Any) -> None:
    """During calls of the whole its parts are as they are without a plan, and afterwards for good."""
    module = copy.deepcopy(model)
    seen: list[bool] = []
    with assert_untouched({"part": module}), apply_plan({"part": module}, plan):
        assert "_compiled_call_impl" in vars(module.norm_out)
        note = lambda *_: seen.append("_compiled_call_impl" in vars(module.norm_out))  # noqa: E731
        handle = module.register_forward_hook(note)
        run(module, given)
        handle.remove()
        assert not find_compiled(module)
        copied = copy.deepcopy(module)
        assert "_compiled_call_impl" not in vars(copied.norm_out)
    assert seen == [False]


def test_a_part_that_is_compiled_stays_so(model: nn.Module, plan: Plan, given: Any) -> None:
    """Code that a part was compiled to before and during a plan runs in calls of the whole, and stays."""
    module = copy.deepcopy(model)
    early, late = (lambda *args, **kwargs: None for _ in range(2))
    vars(module.norm_out)["_compiled_call_impl"] = early
    with apply_plan({"part": module}, plan):
        vars(module.norm_final)["_compiled_call_impl"] = late
        assert find_compiled(module) == ("norm_final", "norm_out")
        assert find_code(module.norm_out) is early
    assert vars(module.norm_out)["_compiled_call_impl"] is early
    assert vars(module.norm_final)["_compiled_call_impl"] is late


@pytest.mark.thorough
@pytest.mark.parametrize("put", [apply_plan, guard])
def test_a_part_that_no_exponents_hold_for(put: Any) -> None:
    """A part with a weight of another part is refused; a guard does not guard the calls of parts."""
    pipe = make_pipeline("cogvideox", overflow="text_encoder")
    encoder = pipe.text_encoder
    ids = {"input_ids": torch.randint(0, 70, (1, 16), generator=torch.Generator().manual_seed(0))}
    made = measure_plan({"part": encoder}, run=lambda: run(encoder, ids))
    with put({"part": encoder}, made):
        with pytest.raises(ScalingError, match="`part:encoder` was called alone") as caught:
            run(encoder.encoder, ids)
        assert caught.value.remedy.startswith("Call the whole component, or take the exponents")


def test_a_method_that_calls_parts(plan: Plan) -> None:
    """Of a method that is no component call the parts that it calls are right."""
    encoder = make_pipeline("cogvideox", overflow="text_encoder").text_encoder
    ids = torch.randint(0, 70, (1, 16), generator=torch.Generator().manual_seed(0))
    wanted = encoder.get_input_embeddings()(ids)
    made = measure_plan({"part": encoder}, run=lambda: run(encoder, {"input_ids": ids}))
    with apply_plan({"part": encoder}, made, cast=False):
        assert torch.equal(encoder.get_input_embeddings()(ids), wanted)


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_weights_of_parts_are_taken_with_a_word(model: nn.Module, plan: Plan, way: str) -> None:
    """Scaled weights of a part, as `ControlNetModel.from_unet` takes them, are said to be so once."""
    module = copy.deepcopy(model)
    takes = {"state_dict": lambda part: part.state_dict(), "deepcopy": copy.deepcopy}
    with apply_plan({"part": module}, plan):
        copy.deepcopy(module)
        takes[way](module.time_embedding)  # holds no weight with an exponent
        with pytest.warns(StopdownWarning, match="its weights are scaled"):
            takes[way](module.patch_embed)
        takes[way](module.patch_embed)  # any other warning is an error
        with pytest.raises(InputError, match="can't be pickled while its calls are watched"):
            pickle.dumps(module.patch_embed)
    takes[way](module.patch_embed)


@pytest.mark.parametrize("way", ["rescaled", "with its plan in its config"])
def test_weights_of_parts_are_said_to_be_scaled_however_it_was_put(
    model: nn.Module, given: dict[str, Any], plan: Plan, way: str
) -> None:
    """Diffusers is refused (`from_unet`, `from_unet2d`), which made a model of scaled weights."""
    module, patches = copy.deepcopy(model), Patches()
    if way == "rescaled":
        patches.defer(rescale_(module, (), given).undo)
    else:
        patches.defer(apply_entry(module, plan.components[0], savers=("diffusers",)).undo)
    by_diffusers, by_others = (
        eval("lambda part: part.state_dict()", {"__name__": name})
        for name in ("diffusers.models.unets.unet_motion_model", "diffusers.utils")
    )
    with patches:
        by_diffusers(module)
        with pytest.raises(
            ScalingError, match=r"Another model .*, which are scaled.*`from_unet2d`"
        ):
            by_diffusers(module.patch_embed)
        with pytest.warns(StopdownWarning, match="A part of .* was copied, and its weights are sc"):
            by_others(module.patch_embed)


def test_no_controlnet_is_made_of_scaled_weights() -> None:
    """It was made with a warning, and pictures were wrong."""
    from diffusers import ControlNetModel

    unet, [(_, _, given)] = make_example("SD UNet")
    scale_weights(unet, WAYS["last linear"], 14)
    unet.eval().requires_grad_(False)
    rescaling = rescale_(unet, (), given)
    with pytest.raises(ScalingError, match="Make the other model first"):
        ControlNetModel.from_unet(unet)
    rescaling.undo()
    assert torch.equal(ControlNetModel.from_unet(unet).conv_in.weight, unet.conv_in.weight)


def test_replicas_are_refused(model: nn.Module, plan: Plan) -> None:
    """What DataParallel copies to several devices would compute with the weights of one."""
    module = copy.deepcopy(model)
    refusal = pytest.raises(
        ScalingError, match="DataParallel can't copy part while it has exponents"
    )
    with apply_plan({"part": module}, plan), refusal:
        module._replicate_for_data_parallel()
    module._replicate_for_data_parallel()


def test_a_plan_leaves_autocast(model: nn.Module, plan: Plan, given: dict[str, Any]) -> None:
    """What a plan cast computes in its own dtypes, whatever autocast is around the call."""
    module = copy.deepcopy(model)
    wanted = run(model, given)
    with apply_plan({"part": module}, plan):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert measure_error(run(module, given), wanted) < 2e-3

"""Exponents that a file can hold: eps by fields of its configuration, and folds without multiplies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm

from models.conversions import convert_made
from models.snapshots import assert_untouched
from stopdown.checkpoints import file_exponents
from stopdown.checkpoints.file_exponents import (
    FileExponents,
    express_component,
    find_eps_fields,
    list_eps,
)
from stopdown.errors import OptionError, ScalingError
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.call_interception import Rank, put_layer
from stopdown.module_calls.callee import Callee
from stopdown.plans.exponents import scale_component
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.scaling.folding.folds import fold_scaling
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.trials import folds_alone
from stopdown.sources.single_file_names import Layout
from stopdown.testing import make_pipeline


@pytest.fixture(scope="module")
def encoder() -> tuple[Any, ComponentPlan, ComponentCall]:
    """A T5 beyond fp16, its exponents, and a call of it."""
    module = make_pipeline("cogvideox", overflow="text_encoder").text_encoder
    tokens = torch.arange(8)[None]
    rescaling = rescale_(module, (tokens,))
    rescaling.undo()
    entry = ComponentPlan("text_encoder", "T5EncoderModel", "", "fp16", rescaling.scaling)
    call = ComponentCall(Callee("text_encoder", module, "forward", "encode"), (tokens,), {})
    return module, entry, call


def test_fields_are_found_by_doubling_them() -> None:
    """A field sets the norms that double with it; eps in a class's code belong to none."""
    pipe = make_pipeline("cogvideox")
    fields = find_eps_fields(pipe.text_encoder)
    assert fields == {"layer_norm_epsilon": frozenset(list_eps(pipe.text_encoder))}
    fields = find_eps_fields(pipe.transformer)
    assert list(fields) == ["norm_eps"]
    left = list_eps(pipe.transformer).keys() - fields["norm_eps"]
    assert left == {f"transformer_blocks.{i}.attn1.norm_{x}.eps" for i in (0, 1) for x in "qk"}
    assert find_eps_fields(torch.nn.LayerNorm(4)) == {}


def test_a_field_makes_a_component_exact(
    encoder: tuple[Any, ComponentPlan, ComponentCall],
) -> None:
    """Built from the changed configuration, with the folded weights, a T5 is bit for bit the same."""
    module, entry, call = encoder
    with assert_untouched(module):
        found = express_component(module, entry, lambda: [])
    assert (found.left, found.effect, found.anew) == ({}, 0.0, False)
    config = type(module.config)(**{**module.config.to_dict(), **found.fields})
    built = type(module)(config).eval()
    rescaling = fold_scaling(module, entry.scaling)
    built.load_state_dict(module.state_dict())
    rescaling.undo()
    assert list_eps(built) != list_eps(module)
    with torch.no_grad():
        assert torch.equal(built(*call.args)[0], module(*call.args)[0])


def test_what_a_file_cannot_hold_is_found_anew(
    encoder: tuple[Any, ComponentPlan, ComponentCall],
) -> None:
    """A plan with a multiply is solved again by folds alone; without a configuration eps stay."""
    module, entry, call = encoder
    multiplied = dataclasses.replace(entry.scaling, multiplies={"encoder.block.0": -2})
    with_multiply = dataclasses.replace(entry, scaling=multiplied)
    partly = dataclasses.replace(entry.scaling, outputs={0: 3}, fp32_modules=("encoder",))
    wide = dataclasses.replace(entry, scaling=partly)
    assert file_exponents.describe_rest(with_multiply) == "1 multiply"
    assert file_exponents.describe_rest(wide) == "the fp32 module encoder and an output in fp32"
    assert not file_exponents._is_folds_alone(module, wide)
    with pytest.raises(ScalingError, match=r"^Its plan has 1 multiply, and no run of the pipeline"):
        express_component(module, with_multiply, lambda: [])
    with assert_untouched(module):
        found = express_component(module, with_multiply, lambda: [call])
        bare = express_component(module, entry, lambda: [call], has_config=False)
    assert (found.anew, found.left, found.scaling.multiplies) == (True, {}, {})
    assert list(found.fields) == ["layer_norm_epsilon"]
    assert bare.left
    assert (bare.fields, bare.calls) == ({}, 1)


def test_squares_fit_where_readers_keep_them_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of Diffusers squares in fp32; one that squares in its input's format needs smaller inputs.

    Exponents are looked for beneath the layers that a run has put on the module.
    """
    torch.manual_seed(0)
    norm = RMSNorm(8, eps=1e-8, elementwise_affine=False)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 8)).eval()
    module[0].weight.data *= 2.0**16
    tokens = torch.randn(4, 8)
    rescaling = rescale_(module, (tokens,))
    rescaling.undo()
    entry = ComponentPlan("vae", "Sequential", "", "fp16", rescaling.scaling)
    call = ComponentCall(Callee("vae", module, "forward", "decode"), (tokens,), {})
    express = functools.partial(express_component, module, entry, lambda: [call])
    assert _find_largest_output(module, express(has_config=False).scaling, tokens) > 256
    layout = Layout("Sequential", "", (), narrow=("RMSNorm",))
    monkeypatch.setattr(file_exponents, "read_layouts", lambda: {"Sequential": layout})
    with Patches() as patches:
        put_layer(module, "forward", _refuse, patches, Rank.RECORD)
        narrow = express(has_config=False)
    assert narrow.anew
    assert 1 < _find_largest_output(module, narrow.scaling, tokens) < 256
    assert express(has_config=True).scaling.exponents == entry.in_force.exponents


def _find_largest_output(
    module: torch.nn.Sequential, scaling: Scaling, tokens: torch.Tensor
) -> float:
    """Of the first layer, with these exponents."""
    rescaling = fold_scaling(module, scaling)
    with torch.no_grad():
        largest = float(module[0](tokens).abs().max())
    rescaling.undo()
    return largest


@pytest.mark.thorough
def test_exponents_found_anew_rest_on_bounds(
    encoder: tuple[torch.nn.Module, ComponentPlan, ComponentCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where those of the plan do: a certificate is made again for folds alone, or it is gone."""
    module, entry, call = encoder
    certified, _ = scale_component(module, [call], ranges="bound")
    assert certified.certified
    multiplied = dataclasses.replace(certified, multiplies={"encoder.block.0": -2})
    planned = dataclasses.replace(entry, scaling=multiplied)
    found = express_component(module, planned, lambda: [call])
    assert found.anew
    assert found.scaling.certified
    assert found.scaling.range_note.startswith(f"All {found.scaling.values} activations")
    measured = dataclasses.replace(entry.scaling, multiplies={"encoder.block.0": -2})
    plain = express_component(module, dataclasses.replace(entry, scaling=measured), lambda: [call])
    assert (plain.anew, plain.scaling.certified) == (True, False)
    monkeypatch.setattr(folds_alone, "scale_by_bounds", _refuse)
    assert not express_component(module, planned, lambda: [call]).scaling.certified


def _refuse(*_: Any, **__: Any) -> Any:
    raise ScalingError("no bounds")


def test_the_effect_of_an_eps_is_measured() -> None:
    """A LayerNorm whose input is scaled and whose eps is not changes the output by what is said."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    callee = Callee("m", module, "forward", "denoise")
    calls = [ComponentCall(callee, (torch.randn(4, 8),), {})]
    folds = {"0.weight": -8, "0.bias": -8}
    with assert_untouched(module), torch.no_grad():
        whole = Scaling(exponents=folds, eps={"1.eps": -16})
        before = module(*calls[0].args)
        exact = file_exponents._measure_effect(module, FileExponents(whole), calls, [before])
        folded = FileExponents(Scaling(exponents=folds))
        left = file_exponents._measure_effect(module, folded, calls, [before])
    assert exact == {"effect": 0.0, "calls": 1}
    rescaling = fold_scaling(module, Scaling(exponents=folds))
    after = module(*calls[0].args).detach()
    rescaling.undo()
    error = float((after - before).double().norm() / before.double().norm())
    assert left["effect"] == pytest.approx(error)
    assert error > 0.1


@pytest.mark.thorough
def test_an_effect_beyond_the_limit_is_refused(
    save_planned: Callable[..., tuple[Path, Plan]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All components in one message, with the norms, the change and both ways on; nothing is left."""
    folder, plan = save_planned("sd", "native")
    monkeypatch.setattr(file_exponents, "_measure_effect", lambda *_: {"effect": 0.25, "calls": 9})
    monkeypatch.setattr(
        folds_alone,
        "measure_kinds",
        lambda *_: [SimpleNamespace(measured=None, capture=SimpleNamespace(signature="forward()"))],
    )
    monkeypatch.setattr(folds_alone.FoldsAlone, "find", lambda *_, **__: None)
    with pytest.raises(OptionError) as caught:
        convert_made("sd", folder, tmp_path / "out", plan, leave=["vae"])
    assert str(caught.value) == (
        f"{folder} can't be written in fp16 for programs without Stopdown. unet: no configuration "
        "field sets conv_norm_out.eps, down_blocks.0.attentions.0.norm.eps, "
        "down_blocks.0.attentions.0.transformer_blocks.0.norm1.eps and "
        f"{count_left(plan) - 3} more, and without it the "
        "output is 2.5e-01 off in 9 calls; up to 4.9e-04 is accepted. Files can only contain weights and "
        "configs, but no multiplications, fp32 modules or "
        "casts. Write unchanged what can't be converted: "
        'leave="unet". Or accept the difference: allow="eps". Or run the plan itself: stopdown '
        f"generate {folder} --precision PLAN."
    )
    assert list(tmp_path.iterdir()) == []
    record = convert_made("sd", folder, tmp_path / "out", plan, leave=["vae"], allow=["eps"])
    assert next(e.effect for e in record.components if e.component == "unet") == 0.25


def count_left(plan: Plan) -> int:
    return len(next(entry.in_force.eps for entry in plan.components if entry.component == "unet"))

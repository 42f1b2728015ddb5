"""Casts at the entrance of a planned module's parts: masks of fp32's lowest number hide there as well."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from models.encoder_models import MASKS, make_call
from models.hidden_state_calls import FAMILIES, call_encoder, make_wide_encoder, measure_errors
from models.snapshots import assert_untouched
from stopdown.errors import ScalingError
from stopdown.interception.patches import Patches
from stopdown.module_calls.call_interception import put_cast
from stopdown.module_calls.callee import Callee
from stopdown.numerics import HIDDEN_IN_FP16, cast_mask, relative_l2
from stopdown.scaling.folding.folds import cast_, fold_scaling, load_scaled
from stopdown.scaling.rescale import rescale_
from stopdown.scaling_records import Operands, ResidualStream, Scaling

LOWEST = torch.finfo(torch.float32).min


class Scores(nn.Module):
    """Attention as Transformers writes it: a mask is added to the scores of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.query(states) @ self.key(states).mT + mask
        return scores.softmax(-1, dtype=torch.float32).to(states.dtype) @ states


class Masked(nn.Module):
    """A residual stream with one such layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = Scores()
        self.requires_grad_(False)

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return states + self.attention(states, mask=mask)


def make_mask(lowest: float) -> torch.Tensor:
    """Hide the later words, and the first two, which are padding: nothing is left to their rows."""
    kept = torch.ones(6, 6).tril().bool()
    kept[:, :2] = False
    return torch.zeros(6, 6).masked_fill(~kept, lowest)


@pytest.mark.parametrize("lowest", [LOWEST, torch.finfo(torch.bfloat16).min, -1e9])
@pytest.mark.parametrize("score", [0.0, 2.0])
def test_a_mask_stays_finite_at_the_entrance_of_a_planned_part(lowest: float, score: float) -> None:
    module, states, mask = Masked(), torch.randn(6, 8), make_mask(lowest)
    module.attention.query.bias.data.fill_(-score)  # the scores are about -32
    module.attention.key.bias.data.fill_(score)
    wanted = module(states, mask)
    stream = ResidualStream(
        cast_output_up=("attention",), cast_input_down=("attention",), returns=False
    )
    cast_(module, torch.float16, Scaling(stream=stream))
    found = module(states, mask)
    assert bool(found.isfinite().all())
    assert relative_l2(found[2:], wanted[2:]) < 1e-2  # what padding is given to is never read


@pytest.mark.parametrize("lowest", [LOWEST, -1e9])
def test_a_mask_stays_finite_between_two_components(lowest: float) -> None:
    module, states, mask = Masked(), torch.randn(6, 8), make_mask(lowest)
    wanted = module(states, mask)
    module.half()
    with Patches() as patches:
        put_cast(Callee("unet", module, "forward", "denoise"), torch.float16, patches)
        found = module(states, mask)
    assert bool(found.isfinite().all())
    assert relative_l2(found[2:], wanted[2:]) < 2e-3


def test_a_cast_mask_keeps_what_is_no_sentinel() -> None:
    given = torch.tensor([-float("inf"), -7e4, -6e4, 0.5, 7e4, float("inf"), float("nan")])
    pairs = zip(cast_mask(given, torch.float16).tolist(), given.half().tolist(), strict=True)
    assert all(x == y or (x != x and y != y) for x, y in pairs)
    assert cast_mask(torch.tensor(LOWEST), torch.float16).item() == HIDDEN_IN_FP16


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Gemma2PreTrainedModel", *FAMILIES])
def test_encoders_with_additive_masks_are_right_however_they_are_padded(name: str) -> None:
    wide = make_wide_encoder(name)
    module = copy.deepcopy(wide)
    calls: list[Any] = [(module, (), make_call(name, wide, mask)[2]) for mask in ("none", "right")]
    rescaling = rescale_(module, calls=calls, residual="fp32")
    cast_(module, torch.float16, rescaling)
    for mask in MASKS:
        given = make_call(name, wide, mask)[2]
        wanted = call_encoder(wide, given)
        bf16 = measure_errors(call_encoder(copy.deepcopy(wide).bfloat16(), given), wanted)
        assert measure_errors(call_encoder(module, given), wanted) <= bf16, mask


MISSING: dict[str, dict[str, Any]] = {
    "exponent": {"exponents": {"0.weight": -3, "absent.weight": -3}},
    "multiply": {"exponents": {"0.weight": -3}, "multiplies": {"0": 3, "absent": 3}},
    "eps": {"exponents": {"0.weight": -3}, "eps": {"absent.eps": 2}},
    "fp32 module": {"exponents": {"0.weight": -3}, "fp32_modules": ("0", "absent")},
    "cast input": {"operands": Operands(cast_inputs=("0", "absent"))},
    "stream": {"multiplies": {"0": 3}, "stream": ResidualStream(("0",), ("absent",))},
    "end of a stream": {"stream": ResidualStream((), (), cast_output_down=("absent",))},
}


@pytest.mark.parametrize(
    ("kind", "put"),
    [*((kind, load_scaled) for kind in MISSING), *((kind, cast_) for kind in [*MISSING][3:])],
)
def test_a_scaling_with_a_name_that_is_missing_changes_nothing(kind: str, put: Any) -> None:
    """The name is said; weights, dtypes and hooks are as they were."""
    module, scaling = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), Scaling(**MISSING[kind])
    with assert_untouched(module), pytest.raises(ScalingError, match=r"Sequential has no .*absent"):
        put(module, torch.float16, scaling)


def test_what_stays_in_fp32_does_so_inside_of_an_adapter() -> None:
    """A plan that is put on again after a LoRA was loaded: the layer got fp32 inputs and fp16 weights."""
    module = nn.ModuleDict({"embed": nn.Linear(4, 4), "out": nn.Linear(4, 4)})
    inject_adapter_in_model(LoraConfig(target_modules=["embed"]), module)
    stream = ResidualStream((), (), cast_input_up=("embed",), kept=("embed.weight", "embed.bias"))
    with cast_(module, torch.float16, Scaling(stream=stream)):
        layer: Any = module["embed"].get_base_layer()  # type: ignore[operator]
        assert {layer.weight.dtype, layer.bias.dtype} == {torch.float32}
        assert module["out"].weight.dtype == torch.float16


def test_a_weight_is_scaled_once_if_two_parameters_have_its_memory() -> None:
    """`nn.Parameter(other.weight)` is another parameter in the same memory; only a trial noticed it."""
    module = nn.ModuleDict({x: nn.Linear(4, 4, bias=False) for x in ("one", "two", "three")})
    whole = torch.randn(8, 4)
    module["one"].weight = nn.Parameter(whole[:4], requires_grad=False)
    module["two"].weight = nn.Parameter(whole[4:], requires_grad=False)
    module["three"].weight = nn.Parameter(module["two"].weight, requires_grad=False)
    before, scaling = whole.clone(), Scaling(exponents={"two.weight": -3})
    with pytest.raises(
        ScalingError, match=r"^two\.weight and three\.weight of ModuleDict lie in the"
    ):
        fold_scaling(module, scaling)
    assert torch.equal(whole, before)
    fold_scaling(module, Scaling(exponents={"one.weight": -3}))
    assert torch.equal(whole[:4] * 8, before[:4])
    assert torch.equal(whole[4:], before[4:])

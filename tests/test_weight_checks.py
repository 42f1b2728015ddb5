"""What stands in the way of scaling before anything is run: quantised weights, NaN and Inf."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.packed_weights import Packed
from stopdown import fp16
from stopdown.errors import ScalingError
from stopdown.scaling.rescale import rescale_
from stopdown.testing import make_pipeline
from stopdown.weight_checks import check_weights, find_quantised, is_packed


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        (torch.zeros(2, 2, dtype=torch.int8), "int8"),
        (torch.zeros(2, 2, dtype=torch.uint8), "uint8"),
        (torch.zeros(2, 2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (Packed(torch.zeros(2, 2, dtype=torch.int8)), "Packed"),
    ],
)
def test_quantised_weights_are_named_and_left_alone(weight: torch.Tensor, kind: str) -> None:
    """Packed numbers, small floats and wrapped tensors: rescaling names the weight and stops."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_quantised(module) == ""
    module[1].weight = nn.Parameter(weight, requires_grad=False)
    assert is_packed(module[1].weight)
    assert find_quantised(module) == f"{kind}: 1.weight"
    before = module[0].weight.clone()
    with pytest.raises(ScalingError, match=rf"quantised weights \({kind}: 1\.weight\); they are l"):
        rescale_(module, (torch.ones(1, 2),))
    assert torch.equal(module[0].weight, before)


def test_a_method_that_was_noted_counts() -> None:
    """What the loading library wrote down is believed, whatever the weights look like."""
    module = nn.Linear(2, 2)
    module.quantization_method = "bitsandbytes"
    assert find_quantised(module) == "bitsandbytes"


def test_gguf_that_was_turned_into_floats_is_rescaled() -> None:
    """Transformers notes GGUF for weights that it has dequantised; packed ones still count."""
    module = nn.Linear(2, 2).requires_grad_(False)
    module.quantization_method, module.is_quantized = "gguf", True
    assert find_quantised(module) == ""
    rescale_(module, (torch.ones(1, 2),)).undo()
    module.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    assert find_quantised(module) == "gguf"


def test_of_many_packed_weights_some_are_named() -> None:
    """A hundred names help nobody."""
    module = nn.Module()
    for i in range(10):
        module.register_parameter(
            f"w{i}", nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
        )
    assert find_quantised(module) == "int8: w0, w1, w2, w3, w4, w5, w6, w7 and 2 more"


def test_every_tensor_with_nan_is_named() -> None:
    """All of them in one message with their counts, before anything is captured."""
    module = nn.Linear(2, 2)
    module.weight.data[0, 0], module.bias.data[:] = float("nan"), float("inf")
    with pytest.raises(ScalingError, match=r"weight \(1 of 4\), bias \(2 of 2\)"):
        check_weights(module)
    with pytest.raises(ScalingError, match=r"2 of its tensors hold NaN or Inf"):
        rescale_(module, (torch.ones(1, 2),))


class Extra(nn.Linear):
    """A layer with a state beside its tensors, as Transformer Engine's."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


def test_a_state_that_is_no_tensor_is_passed_over() -> None:
    """It ended in a raw AttributeError, and the layer is scaled like any other."""
    layer, x = Extra(4, 4), torch.ones(1, 4)
    before = layer(x)
    rescale_(layer, x)
    assert torch.equal(layer(x), before)


def test_a_pipeline_with_such_a_layer_gets_a_plan() -> None:
    """Its weights are sampled, hashed and cast without that state."""
    pipe = make_pipeline("sd")
    old = pipe.unet.time_embedding.linear_1
    pipe.unet.time_embedding.linear_1 = Extra(old.in_features, old.out_features)
    with fp16(pipe) as handle:
        assert not handle.repairs

"""Weights that a precision doesn't hold, and dtypes that differ from those of their component."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models.packed_weights import Packed
from stopdown.dtype_rules.parameters import (
    check_dtypes,
    check_files,
    check_parameters,
    check_rescaled_files,
    check_tensor,
    find_widening,
)
from stopdown.fold_names import RESCALED

TINY = 1e-6
"""Below the smallest normal number of fp16."""


@pytest.mark.parametrize(
    ("values", "target", "kind", "said"),
    [
        ([math.nan, 1.0, math.inf], "fp32", "weight-not-finite", "2 of 3 values are NaN or Inf, as stored"),
        ([7e4, -8e4, 1.0], "fp16", "weight-out-of-range", "2 of 3 values are beyond 65504"),
        ([7e4, -8e4, 1.0], "bf16", "", ""),
        ([TINY, 1e-9, 1.0, 0.0], "fp16", "weight-subnormal", "2 of 3 values are below 6.1e-05"),
        ([TINY, 1e-9, 1.0, 0.0], "fp16", "weight-subnormal", "1 become 0"),
        ([TINY, 1e-9, 1.0, 0.0], "bf16", "", ""),
        ([TINY, 1.0, 1.0, 1.0], "fp16", "", ""),
        ([TINY], "fp16", "", ""),
        ([0.0, 0.0], "fp16", "", ""),
        ([], "fp16", "", ""),
    ],
)  # fmt: skip
def test_what_a_format_does_not_hold_is_found(
    values: list[float], target: str, kind: str, said: str
) -> None:
    """NaN in any format, values beyond fp16, and tensors most of which fp16 holds in few bits."""
    found = list(check_tensor("unet:a.weight", torch.tensor(values), target))
    assert [x.kind for x in found] == [kind] * bool(kind)
    assert all(x.module_path == "unet:a.weight" and said in x.evidence for x in found)


class Half(nn.Module):
    """Two linears, of which each may have another dtype, and a norm."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=x) for x in dtypes)
        self.norm = nn.LayerNorm(4).half()


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(4, 4).to(torch.float8_e4m3fnuz),
        torch.ones(4, 4).to(torch.float8_e8m0fnu),
        Packed(torch.ones(4, 4, dtype=torch.int8)),
        nn.UninitializedParameter(),
    ],
    ids=["fp8 of AMD", "scales", "packed", "lazy"],
)
def test_weights_without_readable_values_are_passed_over(weight: torch.Tensor) -> None:
    """They ended in a raw KeyError, NotImplementedError or ValueError."""
    layer = nn.Linear(4, 4, dtype=torch.float16)
    is_made = isinstance(weight, nn.Parameter)
    layer.weight = weight if is_made else nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        layer.bias[0] = math.nan
    for precisions in ({}, {"unet": "fp16"}):
        (found,) = check_parameters({"unet": layer}, precisions)
        assert (found.kind, found.module_path) == ("weight-not-finite", "unet:bias")


def test_weights_stored_in_fp8_are_no_other_dtype() -> None:
    """fp8 is for storage; a layer in fp32 beside them is found, and cast to what the others compute in."""
    module = Half(torch.float16, torch.float16, torch.float16)
    module.layers[:2].to(torch.float8_e4m3fn)
    assert list(check_dtypes({"unet": module})) == []
    module.norm.float()
    (found,) = check_dtypes({"unet": module})
    assert found.evidence.endswith("fp32, where most of the component is fp16.")


def test_a_layer_of_another_dtype_is_found_once() -> None:
    """The finding is at the layer; layers that cast their own input, and exponents, are no finding."""
    odd = Half(torch.float16, torch.float32, torch.float16)
    (found,) = check_dtypes({"unet": odd})
    assert (found.kind, found.module_path) == ("several-dtypes", "unet:layers.1")
    assert "fp32, where most of the component is fp16" in found.evidence
    assert list(check_dtypes({"unet": Half(torch.float16, torch.float16)})) == []
    setattr(odd, RESCALED, True)
    assert list(check_dtypes({"unet": odd})) == []


class Widening(nn.Linear):
    """A class of its own that casts its input."""


def test_layers_that_widen_are_known_by_their_class() -> None:
    """One that a run reached stands for all of its class; PyTorch's own classes count one by one."""
    module = nn.Sequential(Widening(2, 2), Widening(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert set(find_widening(module, "unet", ["unet:0", "vae:3"])) == {"0", "1"}
    assert set(find_widening(module, "unet", ["unet:2"])) == {"2"}
    wide = nn.Sequential(Widening(2, 2), *(nn.Linear(2, 2).half() for _ in range(3)))
    assert [x.module_path for x in check_dtypes({"unet": wide})] == ["unet:0"]
    assert list(check_dtypes({"unet": wide}, ["unet:0"])) == []


def test_weights_are_checked_in_the_precision_that_is_asked_for() -> None:
    """In their own without one; small values of a component with exponents are its plan's."""
    module = nn.Linear(2, 2)
    module.weight.data.fill_(TINY)
    module.bias.data.fill_(7e4)
    kinds = [x.kind for x in check_parameters({"unet": module}, {"unet": "fp16"})]
    assert kinds == ["weight-subnormal", "weight-out-of-range"]
    assert list(check_parameters({"unet": module}, {})) == []
    setattr(module, RESCALED, True)
    kinds = [x.kind for x in check_parameters({"unet": module}, {"unet": "fp16"})]
    assert kinds == ["weight-out-of-range"]


def test_files_are_checked_tensor_by_tensor(tmp_path: Path) -> None:
    """Floating tensors of each file, by component; whole numbers are none."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.tensor([7e4]), "ids": torch.tensor([70000])}, path)
    (found,) = check_files({"vae": [path]}, {"vae": "fp16"})
    assert (found.kind, found.module_path) == ("weight-out-of-range", "vae:a")
    assert list(check_files({"vae": [path]}, {})) == []


def test_what_files_say_of_rescaling_is_a_note() -> None:
    """A component whose file says nothing has no finding."""
    (found,) = check_rescaled_files({"unet": "unet: scaled by powers of two", "vae": ""})
    assert (found.kind, found.module_path) == ("rescaled-weights", "unet")
    assert "scaled by powers of two" in found.evidence

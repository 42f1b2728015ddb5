"""Weights that wait in 8 bits: fp8 or int8 codes with a factor for each row.

E4M3 has 4 significant bits, and they end early: normal numbers from 2^-6, the largest 448. Weights of
a network lie around 2^-6, so a plain cast leaves most of them subnormal, and those of a checkpoint
that was rescaled for fp16 may vanish. So each row (dimension 0) is multiplied by the power of two that
brings its largest value just below 448, and divided by it when it is widened. Both are exact, so
the codes of a rescaled weight are those of the weight itself.

int8 codes are those of torchao's weight-only quantiser, for linear layers. Its own product multiplies
by the bare codes (up to 127) and scales the result, which overflows fp16 where the layer itself
does not; here the weight is whole again before anything is multiplied by it.

**Catches** weights of any scale, down to the smallest numbers of fp16.
**Does not catch** rows whose values span more than 2^15 in fp8, or 2^7 in int8: the small ones are
lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stopdown.number_formats import FORMATS
from stopdown.patches import Patches
from stopdown.pipelines.layerwise_casting import find_storable

CODES = FORMATS["fp8-e4m3"]
_MOST_AT_ONCE = 2**22
"""Values that are packed at a time: what it takes beside the weight stays small."""

_LARGEST_FACTOR = {torch.float16: 14}
_LARGEST_OF_OTHERS = 60
"""Exponents whose powers of two are normal, both ways; larger ones become two factors."""


@dataclass(frozen=True)
class Packed:
    """One weight in 8 bits.

    Attributes:
        codes: fp8 or int8, in the weight's shape.
        factors: `[rows, 1, ...]` in the weight's dtype; the weight is the codes times all of them.
    """

    codes: torch.Tensor
    factors: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it consists of."""
        return (self.codes, *self.factors)

    def to(self, device: torch.device) -> Packed:
        """The same on another device."""
        codes, *factors = (tensor.to(device) for tensor in self.tensors)
        return Packed(codes, tuple(factors))

    def fill(self, target: torch.Tensor) -> None:
        """Write the weight into a tensor of its shape, on the device of the codes."""
        target.copy_(self.codes)
        for factor in self.factors:
            target.mul_(factor)


@dataclass(frozen=True)
class Packing:
    """What the weights of one component take when those that can wait in 8 bits.

    Attributes:
        parts: path of a layer → bytes of its packed weights as it computes with them.
        total_bytes: of all parameters, the packed ones in 8 bits; tied ones count once.
    """

    parts: dict[str, int]
    total_bytes: int


def pack(weight: torch.Tensor, storage: str = "fp8") -> Packed:
    """A weight `[rows, ...]`, floating and finite, in 8 bits.

    Args:
        storage: `fp8`, or `int8` for a matrix.

    Raises:
        ImportError: torchao, which int8 needs, is not installed.

    Cost: fp8: one pass over it for each factor, `_MOST_AT_ONCE` values at a time.
    """
    return _pack_int8(weight.detach()) if storage == "int8" else _pack_fp8(weight)


def _pack_fp8(weight: torch.Tensor) -> Packed:
    weight = weight.detach()
    exponents = _find_exponents(weight)
    codes = torch.empty_like(weight, dtype=CODES.torch_dtype)
    rows = max(1, _MOST_AT_ONCE // max(1, math.prod(weight.shape[1:])))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        scaled = weight[part]
        for factor in _make_factors(exponents, weight.dtype):
            scaled = scaled * factor[part]
        codes[part] = scaled.to(CODES.torch_dtype)
    return Packed(codes, _make_factors(-exponents, weight.dtype))


def _pack_int8(weight: torch.Tensor) -> Packed:
    """Codes and scales of torchao; a scale is a number in [0.5, 1) and a power of two."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    with Patches() as patches:
        made = torch.nn.Parameter(weight.float(), requires_grad=False)
        patches.set_item(layer._parameters, "weight", made)
        quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
        quantised: Any = layer.weight
    mantissas, exponents = torch.frexp(quantised.scale)
    return Packed(
        quantised.qdata, (mantissas.to(weight.dtype), *_make_factors(exponents, weight.dtype))
    )


def choose_packed(
    module: torch.nn.Module, strays: Mapping[str, frozenset[str]], storage: str = "fp8"
) -> dict[str, dict[str, torch.nn.Parameter]]:
    """Path of a layer → its weights that wait in 8 bits; those that other modules read do not.

    Args:
        strays: of the component's dry run.
        storage: `fp8`, or `int8`, which is for linear layers alone.
    """
    found = find_storable(module)
    parts = dict(module.named_modules())
    return {
        path: weights
        for path, weights in found.items()
        if not strays.get(path) and (storage != "int8" or isinstance(parts[path], torch.nn.Linear))
    }


def weigh_packing(
    module: torch.nn.Module, strays: Mapping[str, frozenset[str]], storage: str = "fp8"
) -> Packing:
    """What a component's weights would take; only shapes and dtypes are read."""
    chosen = choose_packed(module, strays, storage)
    total = sum(x.nbytes for x in module.parameters())
    once = {id(x): x for weights in chosen.values() for x in weights.values()}
    saved = sum(x.nbytes - _weigh_packed(x, storage) for x in once.values())
    parts = {path: sum(x.nbytes for x in weights.values()) for path, weights in chosen.items()}
    return Packing(parts, total - saved)


def _weigh_packed(weight: torch.Tensor, storage: str) -> int:
    """Bytes of the codes and of the factors of each row; of fp8's second, which few need, none."""
    factors = 2 if storage == "int8" else 1
    return weight.numel() + factors * weight.shape[0] * weight.element_size()


def _find_exponents(weight: torch.Tensor) -> torch.Tensor:
    """For each row `[rows, 1, ...]` the largest exponent that leaves it within the range of fp8."""
    largest = weight.abs().flatten(1).amax(1).float()
    mantissas, exponents = torch.frexp(largest)
    limit, top = math.frexp(CODES.largest)
    found = torch.where(mantissas <= limit, top - exponents, top - 1 - exponents)
    found = torch.where(torch.isfinite(largest) & (largest > 0), found, 0)
    bound = 2 * _LARGEST_FACTOR.get(weight.dtype, _LARGEST_OF_OTHERS)
    return found.clamp(-bound, bound).view(-1, *[1] * (weight.dim() - 1))


def _make_factors(exponents: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Powers of two whose product is `2**exponents`, each of them normal in the dtype."""
    ones = torch.ones_like(exponents, dtype=torch.float32)
    if int(exponents.abs().max()) <= _LARGEST_FACTOR.get(dtype, _LARGEST_OF_OTHERS):
        return (torch.ldexp(ones, exponents).to(dtype),)
    half = torch.div(exponents, 2, rounding_mode="trunc")
    return tuple(torch.ldexp(ones, part).to(dtype) for part in (half, exponents - half))

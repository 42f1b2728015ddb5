"""Checks of a module's weights before they are scaled: quantised weights, NaN and Inf.

**Catches** integers and one-byte floats among the parameters (bitsandbytes, GGUF, layerwise casting),
tensors that wrap packed data (torchao, quanto), a quantisation method that the loading library
recorded; NaN and Inf in any parameter or buffer of the checkpoint, tensor by tensor.
**Does not catch** weights that were quantised and dequantised to 16 bits: they are ordinary.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stopdown.errors import ScalingError
from stopdown.mapped_weights import find_stored
from stopdown.number_formats import list_some
from stopdown.numerics import count_non_finite

MOST_NAMED = 8
"""Number of tensors that a message names; it counts further ones."""


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a weight is stored in a quantised format, such as int8, that can't be scaled."""
    if is_traceable_wrapper_subclass(tensor):
        return True
    return not (tensor.is_floating_point() or tensor.is_complex()) or tensor.element_size() == 1


def find_quantised(module: torch.nn.Module) -> str:
    """Describe a module's quantisation by its method or its packed weights; return "" if it has none.

    Transformers reports GGUF as the method of a module whose weights it has dequantised to plain
    floats.
    """
    method = getattr(module, "quantization_method", None)
    named = str(getattr(method, "value", method) or "a method of its own")
    packed = {name: x for name, x in module.named_parameters() if is_packed(x)}
    is_plain = named == "gguf" and not packed
    if not is_plain and (getattr(module, "is_quantized", False) or method is not None):
        return named
    if not packed:
        return ""
    kinds = sorted({_name_kind(x) for x in packed.values()})
    return f"{', '.join(kinds)}: {list_some(list(packed), MOST_NAMED)}"


def _name_kind(tensor: torch.Tensor) -> str:
    if is_traceable_wrapper_subclass(tensor):
        return type(tensor).__name__
    return str(tensor.dtype).removeprefix("torch.")


def refuse_quantised(module: torch.nn.Module) -> None:
    if found := find_quantised(module):
        raise ScalingError(
            f"{type(module).__name__} has quantised weights ({found}); they are left alone.",
            expected="Powers of two are folded into weights that are stored as floats of 16 bits "
            "or more. A product's output takes the exponent of its weight, so norms and biases alone "
            "can't bring values into range.",
            remedy="Convert its file, whose scales can hold them, and load the result: stopdown "
            "convert FILE OUT. Or load it without quantisation, or keep it out of the rescaling.",
        )


def check_weights(module: torch.nn.Module) -> None:
    """Raise an error that names all tensors with NaN or Inf; weights that are still in files are not read.

    Cost: one pass and one host read for each tensor.
    """
    found = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue  # `get_extra_state` of a module, such as Transformer Engine's
        if is_packed(tensor) or tensor.is_meta or find_stored(tensor) is not None:
            continue
        if bad := sum(count_non_finite(tensor)):
            found.append(f"{name} ({bad} of {tensor.numel()})")
    if found:
        raise ScalingError(
            f"{len(found)} of its tensors hold NaN or Inf: {', '.join(found)}.",
            remedy="Download or save the model again.",
        )

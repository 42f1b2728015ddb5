"""Construction, conversion and copying of modules with fake tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from stopdown.fold_names import name_parameters
from stopdown.interception.patches import CHANGING, Patches

_NO_SWAP = "Couldn't swap"
"""Beginning of PyTorch's error when a fake parameter is converted, as by `to_empty` and `skip_init`."""


def build_fake(factory: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """Build a module directly in `dtype` with fake tensors, without memory for its weights.

    If its constructor reads values of tensors (rates of dropped paths), these are real, on the host.
    """
    before, mode = torch.get_default_dtype(), FakeTensorMode(allow_non_fake_inputs=True)
    torch.set_default_dtype(dtype)
    try:
        with mode:
            return factory().eval()
    except DataDependentOutputException:
        with torch.device("meta"):
            return make_fake(factory().eval(), mode)
    except RuntimeError as error:
        if _NO_SWAP not in str(error):
            raise
        with CHANGING, Patches() as patches, mode:
            patches.set_class_attribute(torch.nn.Module, "_apply", _choose_conversion())
            return factory().eval()
    finally:
        torch.set_default_dtype(before)


def _choose_conversion() -> Callable[..., torch.nn.Module]:
    """Return a replacement of `Module._apply` that can convert fake parameters.

    For modules without fake parameters, as other threads may convert them, it calls the original.
    """
    convert_real = torch.nn.Module._apply

    def apply(
        module: torch.nn.Module, convert: Callable[[Any], Any], recurse: bool = True
    ) -> torch.nn.Module:
        is_fake = any(isinstance(x, FakeTensor) for x in name_parameters(module).values())
        chosen = convert_fakes_ if is_fake else convert_real
        return chosen(module, convert, recurse)

    return apply


def convert_fakes_(
    module: torch.nn.Module, convert: Callable[[Any], Any], recurse: bool = True
) -> torch.nn.Module:
    """Apply a conversion to a module with fake tensors as `Module._apply` does, which fails on them."""
    patches = Patches()  # never undone, as a conversion isn't
    with find_mode(module):
        for part in module.modules() if recurse else (module,):
            for table in (part._parameters, part._buffers):
                for name, tensor in list(table.items()):
                    if tensor is not None:
                        made = convert(tensor)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        patches.set_item(
                            table, name, mark_as_parameter(made) if is_parameter else made
                        )
    return module


def make_fake(module: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """Replace the tensors of a module by fake ones on the host, in place, and return it."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, own in part.named_parameters(recurse=False):
            if id(own) not in made:
                made[id(own)] = torch.nn.Parameter(fake_like(own, mode), own.requires_grad)
            part.register_parameter(name, made[id(own)])
        for name, buffer in part.named_buffers(recurse=False):
            is_stored = name not in part._non_persistent_buffers_set
            part.register_buffer(name, fake_like(buffer, mode), persistent=is_stored)
    return module


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def mark_as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a parameter; a fake one is marked in place, so it must not be shared."""
    if not isinstance(tensor, FakeTensor):
        return torch.nn.Parameter(tensor, requires_grad=False)
    tensor._is_param = True
    return tensor


def find_mode(module: torch.nn.Module) -> FakeTensorMode:
    """Return the fake mode of a module's parameters and buffers; a new one if none is fake."""
    for tensor in name_parameters(module).values():
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def detach_derived(module: torch.nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` of a module that detaches tensors computed from its parameters.

    `torch.nn.utils.weight_norm` stores such a tensor in an attribute, and PyTorch refuses to copy it with
    its gradient history.
    """
    held = (x for part in module.modules() for x in vars(part).values())
    return {id(x): x.detach() for x in held if isinstance(x, torch.Tensor) and not x.is_leaf}


def renew_fakes(
    module: torch.nn.Module, mode: FakeTensorMode, known: Collection[int] = ()
) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` of a module that replaces its fake tensors by new ones in `mode`.

    `deepcopy` must copy neither them nor their mode (torch 2.13.0, 2026-11-21). A mode knows storages by
    their addresses and frees each when it dies; a copy of the mode frees them again, which corrupts
    memory much later. Empty dicts (of hooks, a dozen per module) are in the memo because copying them
    takes a third of the time.

    Args:
        known: ids of tensors to leave out of the memo.
    """
    tables = [vars(part) for part in module.modules()]
    held = pytree.tree_leaves(tables)
    memo: dict[int, Any] = {
        id(x): type(x)()
        for table in tables
        for x in table.values()
        if type(x) in (OrderedDict, dict) and not x
    }
    memo |= detach_derived(module)
    for tensor in (x for x in held if isinstance(x, FakeTensor)):
        memo[id(tensor.fake_mode)] = mode
        if id(tensor) not in known:
            memo[id(tensor)] = make_like(tensor, tensor.dtype, mode, real=False)
    return memo


def make_like(
    tensor: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode, real: bool
) -> torch.Tensor:
    if real:
        return tensor.detach().to(dtype)
    if isinstance(tensor, FakeTensor) and tensor.dtype == dtype and tensor.fake_mode is mode:
        return tensor.detach()
    device = "cpu" if tensor.is_meta else tensor.device
    with mode:
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype, device=device)

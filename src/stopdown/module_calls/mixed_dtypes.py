"""Find the casts that a module needs in fp16 because its code mixes dtypes in one operation.

Code that was written for autocast, or for weights that are cast at each call, mixes dtypes: a timestep
embedding that is always fp32, an input upcast before a convolution, a norm that computes in fp32 with
fp16 parameters. One run on fake tensors finds all of these. If a layer receives another dtype than its
weight's, its input must be cast. If its own code upcasts the input, as `GroupNorm32` does, its parameters
must stay in fp32.

**Catches** linears, convolutions, layer and group norms whose weight is a parameter, and products (`@`)
with a parameter or a view of one.

**Does not catch** products of two activations of different dtypes, and weights that are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stopdown.errors import CaptureError
from stopdown.interception.own_hooks import hook_part_arguments
from stopdown.interception.patches import Patches
from stopdown.mapped_weights import cast_tensor_
from stopdown.numerics import iterate_tensors
from stopdown.scaling_records import Operands

NO_OPERANDS = Operands()
"""The result for code that mixes no dtypes."""

PRODUCT_FUNCTIONS: frozenset[Any] = frozenset({functional.linear}) | frozenset(
    getattr(torch, f"conv{kind}{rank}d") for kind in ("", "_transpose") for rank in (1, 2, 3)
)
"""The functions that compute linears and convolutions."""

COMPUTED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Dtypes that operations compute in; other floating dtypes are for storage, and a cast to them is lossy."""

_WEIGHTED: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(PRODUCT_FUNCTIONS, ("input", "weight", "bias")),
    functional.layer_norm: ("input", "normalized_shape", "weight", "bias"),
    functional.group_norm: ("input", "num_groups", "weight", "bias"),
}
"""Functions that require operands of one dtype → names of their arguments, in order."""

_MATRIX_PRODUCTS: frozenset[Any] = frozenset(
    getattr(place, name) for place in (torch, torch.Tensor) for name in ("matmul", "mm", "bmm")
) | {torch.Tensor.__matmul__}
"""Functions of two matrices of one dtype, either of which may be a weight."""


MOST_OPERATIONS = 200_000
"""Operations of a call after which it's considered endless; the largest models have a tenth of them."""


def find_operands(call: Callable[[], Any], shadow: torch.nn.Module) -> Operands:
    """Run a call, and find the casts that give each of its operations operands of one dtype.

    If the code fails even with these casts, the result covers it up to the failure.

    Args:
        call: makes the call of `shadow`.
        shadow: a copy of the module whose parameters have the intended dtypes, usually fake.

    Raises:
        CaptureError: the code has not ended after `MOST_OPERATIONS` operations.

    Cost: one run of the call; if inputs must be cast, a second one with these casts, which shows the
        layers that upcast them again.
    """
    found = _look(call, shadow, NO_OPERANDS)
    return _look(call, shadow, found) if found.cast_inputs else found


def _look(call: Callable[[], Any], shadow: torch.nn.Module, known: Operands) -> Operands:
    """Run the call once with the known casts, and return them together with those that it still needs."""
    ignored = contextlib.suppress(
        Exception
    )  # what stops it stops the capture, which names the line
    with Patches() as patches:
        cast_to_weights(shadow, Operands(known.cast_inputs), patches)
        with _Watch(shadow, patches) as found, ignored:
            call()
    if found.count > MOST_OPERATIONS:
        raise CaptureError(
            f"The code of {type(shadow).__name__} hadn't ended after {MOST_OPERATIONS:,} operations in "
            "fp16.",
            expected="A loop that goes on until values are small doesn't end for values that fp16 can't "
            "hold.",
            remedy="Run it in bf16 or fp32.",
        )
    wide = found.wide.union(known.fp32_parameters)
    cast = found.cast.union(known.cast_inputs) - {x.rpartition(".")[0] for x in wide}
    return Operands(tuple(sorted(cast)), tuple(sorted(wide)))


def merge_operands(*several: Operands) -> Operands:
    """Merge the casts of layers' inputs and parameters that several calls of a module need."""
    return Operands(
        tuple(sorted({path for one in several for path in one.cast_inputs})),
        tuple(sorted({name for one in several for name in one.fp32_parameters})),
    )


def cast_operands(
    module: torch.nn.Module, operands: Operands, dtype: torch.dtype, patches: Patches
) -> None:
    """Register hooks by which layers cast their inputs to `dtype`, the dtype of their weights.

    Args:
        operands: paths of the layers, in `cast_inputs`.
        patches: undoing it removes the hooks.
    """
    for path in operands.cast_inputs:
        hook_part_arguments(module, path, partial(_cast, dtype), patches)


def cast_to_weights(module: torch.nn.Module, operands: Operands, patches: Patches) -> None:
    """Hook layers so that they cast inputs to their weight's current dtype, and cast parameters to fp32.

    Args:
        operands: the layers whose inputs are cast, and the parameters that become fp32.
    """
    for path in operands.cast_inputs:
        cast = partial(_cast_to_weight, module.get_submodule(path))
        hook_part_arguments(module, path, cast, patches)
    cast_parameters(module, operands.fp32_parameters, torch.float32, patches)


def cast_parameters(
    module: torch.nn.Module, names: Iterable[str], dtype: torch.dtype, patches: Patches
) -> None:
    parameters = dict(module.named_parameters())
    for name in names:
        cast_tensor_(parameters[name], dtype, patches)


def _is_autocast(args: Any, kwargs: Any) -> bool:
    kinds = {x.device.type for x in iterate_tensors((args, kwargs))}
    return any(map(torch.is_autocast_enabled, kinds))


def _cast_to_weight(part: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    weight = getattr(part, "weight", None)
    if not isinstance(weight, torch.Tensor):
        weight = next(part.parameters(recurse=False))
    return _cast(weight.dtype, value) if {weight.dtype, value.dtype} <= COMPUTED else value


def _cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    is_other = value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if is_other else value


class _Watch(TorchFunctionMode):
    """A function mode that gives the operands of each layer one dtype, and records the casts.

    Attributes:
        cast: paths of layers that received another dtype than their weight's.
        wide: names of parameters of layers whose own code upcasts the input.
        count: number of operations; beyond `MOST_OPERATIONS` each fails.
    """

    def __init__(self, module: torch.nn.Module, patches: Patches) -> None:
        super().__init__()
        self.cast, self.wide, self.count = set[str](), set[str](), 0
        self._names = {id(x): name for name, x in module.named_parameters()}
        self._given: dict[str, set[torch.dtype]] = {}
        for path, part in module.named_modules():
            if next(part.parameters(recurse=False), None) is not None:
                hook = partial(self._enter, path)
                patches.defer(part.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _enter(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._given[path] = {x.dtype for x in iterate_tensors((args, kwargs))}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        if self.count > MOST_OPERATIONS:
            raise RuntimeError("The call has too many operations.")
        kwargs = dict(kwargs or {})
        names = _WEIGHTED.get(func)
        is_product = func in PRODUCT_FUNCTIONS or func in _MATRIX_PRODUCTS
        if is_product and _is_autocast(args, kwargs):
            return func(*args, **kwargs)  # autocast casts the operands of products on every device
        if func in _MATRIX_PRODUCTS and len(args) == 2:
            return func(*self._agree_matrices(*args), **kwargs)
        if names is None:
            return func(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        rest = args[len(names) :]
        others = {name: x for name, x in given.items() if name not in names}
        return func(*self._agree(given, names), *rest, **others)

    def _agree(self, given: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
        """Return a layer function's arguments in the order of `names`, with operands of one dtype."""
        source, weight = given["input"], given.get("weight")
        name = self._find_name(weight)
        if (
            weight is not None
            and name
            and source.dtype != weight.dtype
            and {source.dtype, weight.dtype} <= COMPUTED
        ):
            path = name.rpartition(".")[0]
            if source.dtype in self._given.get(path, ()):
                self.cast.add(path)
                given["input"] = source.to(weight.dtype)
            elif weight.dtype.itemsize < source.dtype.itemsize:
                self._widen(given, source.dtype)
        return [given.get(name) for name in names]

    def _agree_matrices(self, left: Any, right: Any) -> list[Any]:
        """Return both matrices of a product in one dtype, if one of them is a weight."""
        if self._find_name(right):
            return self._agree({"input": left, "weight": right}, ("input", "weight"))
        return self._agree({"input": right, "weight": left}, ("weight", "input"))

    def _find_name(self, tensor: Any) -> str:
        """Return the name of a parameter, or of the parameter that a view shows; "" for other tensors."""
        if not isinstance(tensor, torch.Tensor):
            return ""
        return self._names.get(id(tensor)) or self._names.get(id(tensor._base), "")

    def _widen(self, given: dict[str, Any], dtype: torch.dtype) -> None:
        for key in ("weight", "bias"):
            if name := self._find_name(given.get(key)):
                self.wide.add(name)
                given[key] = given[key].to(dtype)
